// Runs a case on an engine and judges the result.
#ifndef KVANT_TESTS_CONFORMANCE_HARNESS_H_
#define KVANT_TESTS_CONFORMANCE_HARNESS_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/patterns/partition.h"
#include "kvant/tests/conformance/case_graph.h"
#include "kvant/tests/conformance/data.h"

namespace kvant::conformance {

// By engines.inc and KVANT_CONFORMANCE_ENGINES.
struct EngineUnderTest {
  std::string backend;
  bool fused = false;
};
std::vector<EngineUnderTest> EnginesUnderTest();

using Buffers = absl::flat_hash_map<TensorId, TestBuffer>;

// A case ready to run: its one partition and its inputs.
struct Prepared {
  CaseGraph graph;
  Partition partition;
  Buffers inputs;
};

// Builds and partitions. An error if there is more than one partition or it is not
// attention.
absl::StatusOr<Prepared> Prepare(const Case& c);

struct Outcome {
  CompiledPartition compiled;
  std::vector<TestBuffer> outputs;  // in order of compiled.partition().outputs()
};

// `backend` by name, on `threads` threads, with these inputs.
absl::StatusOr<Outcome> RunOn(const std::string& backend, const Prepared& prepared,
                              const Buffers& inputs, int threads = 2);

// Why `got` is not an acceptable rendering of `expected`; empty if it is.
//
// Per output: benchdnn's rule (tools/acceptance.h), and a bound on the relative L2
// error that benchdnn has not. Sums of up to 1025 products of f32 with errors of
// 2^-24 each stay near 1e-6, hence 1e-5 for f32. Both sides round to f16 or bf16 at
// the end, so they differ only where the exact value lies near a tie: a few percent
// of the elements by one unit in the last place (2^-11 and 2^-8 of the value), about
// a tenth of that in L2. Below f16's normal numbers, 2^-14, one unit is 2^-24 of whatever size, and
// all elements may differ by it. Codes of 8 bits, some tens in size, differ by one there. Where the
// kernel rounds further and says so (CompiledPartition::rounding), that is the bound, or 5e-4 where
// it is that of the CPU's products on codes. benchdnn's rule for single points is for numbers of
// about 1; without `by_point` it is left out.
std::string Judge(const Partition& partition, const std::vector<TestBuffer>& expected,
                  const std::vector<TestBuffer>& got, double rounding = 0, bool by_point = true);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_HARNESS_H_
