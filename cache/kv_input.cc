#include "kvant/cache/kv_input.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Magnitudes of f16 and bf16 are in the order of their bits, NaN beyond infinity.
class Limit {
 public:
  explicit Limit(double largest)
      : f32_(static_cast<float>(largest)),
        f16_(Bits(kF16, F32ToF16(static_cast<float>(std::min(largest, 65504.0))), largest)),
        bf16_(Bits(kBF16, F32ToBF16(f32_), largest)) {}

  // The first of n elements that is beyond it, or -1.
  int64_t Beyond(DataType type, const void* data, int64_t index, int64_t n, int64_t stride) const {
    bool within = true;
    if (type == kF32) {
      const float* x = static_cast<const float*>(data) + index;
      for (int64_t i = 0; i < n; ++i) within &= std::fabs(x[i * stride]) <= f32_;
    } else {
      const uint16_t* x = static_cast<const uint16_t*>(data) + index;
      const uint16_t most = type == kF16 ? f16_ : bf16_;
      for (int64_t i = 0; i < n; ++i) within &= (x[i * stride] & 0x7fff) <= most;
    }
    if (within) return -1;
    for (int64_t i = 0; i < n; ++i) {
      const double value = LoadElement(type, data, index + i * stride);
      if (!(std::fabs(value) <= f32_)) return i;
    }
    return -1;
  }

 private:
  // Rounding may have gone up.
  static uint16_t Bits(DataType type, uint16_t bits, double largest) {
    return LoadElement(type, &bits, 0) > largest ? static_cast<uint16_t>(bits - 1) : bits;
  }
  float f32_;
  uint16_t f16_, bf16_;
};

absl::Status Wrong(int64_t layer, const KvTensor& tensor, const KvInput& input,
                   const std::string& what) {
  return InvalidArguments(tensor.name(), " for layer ", layer, " (", input.desc.ToString(), ") ",
                          what);
}

}  // namespace

KvInput MakeKvInput(DataType type, const void* data, const Dims& dims) {
  KvInput input;
  input.desc.type = type;
  input.desc.dims = dims;
  input.data = {data, static_cast<size_t>(KvInputBytes(input.desc))};
  return input;
}

int64_t KvInputBytes(const LogicalTensor& desc) {
  if (desc.type == kUndef || !desc.has_shape() || !ValidateTensor(desc).ok()) return 0;
  const Dims strides = desc.StridesOrDense();
  int64_t last = 0;
  for (size_t d = 0; d < strides.size(); ++d) {
    if ((*desc.dims)[d] == 0) return 0;
    last += ((*desc.dims)[d] - 1) * strides[d];
  }
  return BytesFor(desc.type, last + 1);
}

absl::Status CheckKvInput(int64_t layer, const KvTensor& tensor, const KvInput& input,
                          std::optional<int64_t> tokens) {
  const auto error = [&](const std::string& what) { return Wrong(layer, tensor, input, what); };
  const KvShape& shape = tensor.shape();
  const LogicalTensor& desc = input.desc;
  if (!IsComputeFloat(desc.type)) return error("is not of f32, bf16 or f16");
  if (!desc.has_shape()) return error("has dims that are not known");
  Dims want{shape.batch, shape.heads, kUnknownDim, shape.head_size};
  if (tokens) want[2] = *tokens;
  if (!tokens && desc.rank() == 4) want[2] = (*desc.dims)[2];
  if (*desc.dims != want) {
    return error(
        absl::StrCat("is not [", DimsToString(want), "]: batch, heads, tokens, head size"));
  }
  if (const absl::Status valid = ValidateTensor(desc); !valid.ok()) {
    return error(absl::StrCat("is no tensor in memory: ", valid.message()));
  }
  if (want[2] == 0) return absl::OkStatus();
  if (input.data.data == nullptr) return error("is null");
  const int64_t bytes = KvInputBytes(desc);
  if (input.data.bytes < static_cast<size_t>(bytes)) {
    return error(absl::StrCat("needs ", bytes, " bytes, not ", input.data.bytes));
  }
  const int64_t alignment = BytesFor(desc.type, 1);
  if (reinterpret_cast<uintptr_t>(input.data.data) % alignment != 0) {
    return error(absl::StrCat("is not aligned to ", alignment, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckKvNumbers(int64_t layer, const KvTensor& tensor, const KvInput& input,
                            const KvTaken& taken) {
  const KvShape& shape = tensor.shape();
  const LogicalTensor& desc = input.desc;
  const double largest = tensor.largest();
  const Limit limit(largest);
  const Dims strides = desc.StridesOrDense();
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = taken.starts[b]; t < taken.starts[b] + taken.counts[b]; ++t) {
        const int64_t index = b * strides[0] + h * strides[1] + t * strides[2];
        const int64_t d =
            limit.Beyond(desc.type, input.data.data, index, shape.head_size, strides[3]);
        if (d < 0) continue;
        const double value = LoadElement(desc.type, input.data.data, index + d * strides[3]);
        return Wrong(
            layer, tensor, input,
            absl::StrCat("has ", value, " in batch row ", b, ", head ", h, ", token ", t,
                         ", channel ", d,
                         std::isfinite(value) ? absl::StrCat(", beyond the ", largest, " that '",
                                                             tensor.storage().ToString(), "' holds")
                                              : std::string(", which is not finite"),
                         "; allow_non_finite stores it all the same"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvant
