#include "kvant/backends/real_columns.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

absl::Status InvalidArguments(const std::string& message) {
  return MakeError(ErrorKind::kInvalidArguments, message);
}

int64_t At(const View& view, const void* data, int64_t batch, int64_t row, int64_t col) {
  const int64_t index = view.offset + batch * view.strides[0] + row * view.strides[kViewRank - 2] +
                        col * view.strides[kViewRank - 1];
  return static_cast<int64_t>(LoadElement(view.type, data, index));
}

absl::Status CheckLengths(const AttentionSpec& spec, const void* data) {
  for (int64_t b = 0; b < spec.kv_lengths.dims[0]; ++b) {
    const int64_t length = At(spec.kv_lengths, data, b, 0, 0);
    if (length >= 0 && length <= spec.kv_len) continue;
    return InvalidArguments(absl::StrCat("KV length of batch ", b, " is ", length,
                                         "; it must be between 0 and the capacity of ",
                                         spec.kv_len));
  }
  return absl::OkStatus();
}

absl::Status CheckRanges(const AttentionSpec& spec, const void* data) {
  const View& ranges = spec.segment_ranges;
  for (int64_t b = 0; b < ranges.dims[0]; ++b) {
    int64_t sums[2] = {0, 0}, row = 0;
    for (const auto* side : {&spec.k, &spec.v}) {
      const bool keys = side == &spec.k;
      for (size_t s = 0; s < side->size(); ++s, ++row) {
        const int64_t capacity = (*side)[s].data.dims[kViewRank - 2];
        const int64_t first = At(ranges, data, b, row, 0), tokens = At(ranges, data, b, row, 1);
        const bool fits = 0 <= tokens && tokens <= capacity && 0 <= first &&
                          first < std::max<int64_t>(1, capacity);
        if (!fits) {
          return InvalidArguments(absl::StrCat(
              "the range of segment ", s, " of ", keys ? "K" : "V", " in batch ", b, " is ", tokens,
              " tokens from token ", first, " on; the segment has room for ", capacity, " tokens"));
        }
        sums[keys ? 0 : 1] += tokens;
      }
    }
    if (sums[0] != sums[1]) {
      return InvalidArguments(absl::StrCat("the ranges of segments of batch ", b, " add up to ",
                                           sums[0], " tokens of K and ", sums[1], " of V"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckColumns(const AttentionSpec& spec, absl::Span<const void* const> inputs) {
  if (spec.kv_lengths.present()) return CheckLengths(spec, inputs[spec.kv_lengths.port]);
  if (spec.segment_ranges.present()) return CheckRanges(spec, inputs[spec.segment_ranges.port]);
  return absl::OkStatus();
}

}  // namespace kvant
