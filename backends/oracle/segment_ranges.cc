// Ranges of segments: which tokens the columns are.
#include <algorithm>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {

SegmentRanges::SegmentRanges(const AttentionSpec& spec, const Array& ranges) {
  const int64_t batches = ranges.dims[0];
  columns_ = Array({batches});
  const double* range = ranges.data();
  for (int64_t n = 0; n < batches; ++n) {
    for (int side = 0; side < 2; ++side) {
      std::vector<int64_t>& tokens = tokens_[side].emplace_back();
      int64_t begin = 0;  // of the segment in the whole
      for (const KvSegment& segment : side == 0 ? spec.k : spec.v) {
        const int64_t capacity = segment.data.dims[kViewRank - 2];
        for (int64_t i = 0; i < static_cast<int64_t>(range[1]); ++i) {
          tokens.push_back(begin + (static_cast<int64_t>(range[0]) + i) % capacity);
        }
        begin += capacity;
        range += 2;
      }
    }
    columns_.values[n] = static_cast<double>(tokens_[0].back().size());
  }
}

Array SegmentRanges::Order(Executor& executor, bool keys, const Array& whole, size_t rank,
                           int tokens_from_end) const {
  const auto& tokens = tokens_[keys ? 0 : 1];
  const int64_t batches = static_cast<int64_t>(tokens.size());
  Dims dims = whole.dims;
  if (batches > 1) {
    dims.insert(dims.begin(), rank - dims.size(), 1);
    dims[0] = batches;
  }
  const Array from = Expand(executor, whole, dims);
  Array to(dims);
  const size_t axis = dims.size() - tokens_from_end;
  const int64_t inner = ElementsOf(absl::MakeSpan(dims).subspan(axis + 1));
  const int64_t line = dims[axis] * inner;
  const int64_t lines = line == 0 ? 0 : to.size() / line;
  for (int64_t i = 0; i < lines; ++i) {
    const std::vector<int64_t>& order = tokens[i * batches / lines];
    for (size_t c = 0; c < order.size(); ++c) {
      std::copy_n(from.data() + i * line + order[c] * inner, inner,
                  to.data() + i * line + static_cast<int64_t>(c) * inner);
    }
  }
  return to;
}

}  // namespace kvant::oracle
