// MergeSpec: attention over all tokens, made of that over parts of them. The one place where it is
// written down: a backend sees no graph.
//
//   m        = the largest statistics of parts
//   weights  = exp(statistics - m)
//   output   = sum of weights * outputs / sum of weights
//   stats    = m + ln(sum of weights)
// A part whose statistics are -inf does not count, whatever its output holds; without any other the
// output is 0 and stats -inf.
#ifndef KVANT_PATTERNS_MERGE_SPEC_H_
#define KVANT_PATTERNS_MERGE_SPEC_H_

#include <vector>

#include "kvant/patterns/attention_spec.h"

namespace kvant {

struct MergeSpec {
  struct Part {
    PortArray output, stats;
  };

  // Of outputs: rows, and channels along the last. Statistics have one number for a row: their
  // stride along it is 0.
  Dims dims;
  std::vector<Part> parts;
  PortArray output, stats;  // stats may be absent

  int64_t rows() const;
};

// Of the op of a Partition::Kind::kMerge, all shapes known, whose ports these are.
MergeSpec ResolveMerge(const Graph& graph, absl::Span<const TensorId> inputs,
                       absl::Span<const TensorId> outputs);

}  // namespace kvant

#endif  // KVANT_PATTERNS_MERGE_SPEC_H_
