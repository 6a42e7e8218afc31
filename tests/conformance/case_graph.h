// From a Case to a graph, and to the data that goes in.
#ifndef KVANT_TESTS_CONFORMANCE_CASE_GRAPH_H_
#define KVANT_TESTS_CONFORMANCE_CASE_GRAPH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/data.h"

namespace kvant::conformance {

struct CaseInput {
  TensorId id = 0;
  std::string name;
  Fill fill;
};

struct CaseGraph {
  Graph graph;
  std::vector<CaseInput> inputs;
};

absl::StatusOr<CaseGraph> BuildCase(const Case& c);

// How many of kv_len tokens batch entry n has, with Case::real_lengths.
int64_t RealLength(const Case& c, int64_t n);
// The first of them, with Case::first_tokens.
int64_t FirstToken(const Case& c, int64_t n);

// With Case::page_size: pages that a batch entry may have, those of the pool, and which of them is
// the i-th of entry n.
int64_t PagesPerEntry(const Case& c);
int64_t PoolPages(const Case& c);
int64_t PageOf(const Case& c, int64_t n, int64_t i);

// With Case::ragged: queries of batch entry n, and room for those of all.
int64_t QueriesOf(const Case& c, int64_t n);
int64_t QueryRoom(const Case& c);

// A run of the tokens that there is room for.
struct Segment {
  int64_t begin = 0, tokens = 0;
  bool plain = false;  // not quantized
  // With Case::real_ranges, which tokens of it exist in a batch; all without.
  int64_t first = 0, real = 0;
};
// What K or V is a Concat of, as batch entry n has it.
std::vector<Segment> SegmentsOf(const Case& c, bool keys, int64_t n);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_CASE_GRAPH_H_
