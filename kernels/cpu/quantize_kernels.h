// The inner loops of quantization, one set per instruction set.
#ifndef KVANT_KERNELS_CPU_QUANTIZE_KERNELS_H_
#define KVANT_KERNELS_CPU_QUANTIZE_KERNELS_H_

#include <cstdint>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cpu/group_parameters.h"

namespace kvant::cpu {

// Parameters of consecutive groups, as stored.
struct QuantizeParameters {
  DataType codes = kUndef;
  ZeroPoints zero_points = ZeroPoints::kNone;  // f8 codes: kNone
  // Quotients are products with the reciprocal, corrected by their remainder: as good where all
  // elements are finite and scales within 2^+-100, several times as fast. Else divisions.
  bool divide = true;
  float lowest = 0, highest = 0;  // codes
  const float* scales = nullptr;
  const float* reciprocals = nullptr;  // null if `divide`
  const float* values = nullptr;       // the zero points; |value| <= 2^15 where they are codes
  const Codebook* codebook = nullptr;  // codes are positions in it
  // With a format of ggml, quotients are products (x - offset) * reciprocal as they are, and a
  // group whose reciprocal is NaN has the codes 0. No scales, no zero points.
  GgmlFormat ggml = GgmlFormat::kNone;
  const float* offsets = nullptr;  // null: 0
};

// Numbers are of a floating-point type, from `index` on in the array at `src`; no byte beside
// them is read. Codes are a byte each, in two's complement.
struct QuantizeKernels {
  // The smallest and largest of each of `groups` groups of `group` elements side by side, NaN
  // counted as beyond infinity. With `magnitude`, both are the largest magnitude.
  void (*row_ranges)(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
                     bool magnitude, float* min, float* max);
  // The same of `n` columns: line i is the n elements from index + i * stride on.
  void (*column_ranges)(DataType type, const void* src, int64_t index, int64_t stride,
                        int64_t lines, int64_t n, bool magnitude, float* min, float* max);
  // ParametersOf for n groups, and 1 / scale; whether QuantizeParameters::divide may be false.
  // Without zero points none are written.
  bool (*parameters)(const ParameterRule& rule, int64_t n, const float* min, const float* max,
                     float* scales, float* reciprocals, float* zero_points);
  // codes[i] for groups * group elements. Up to kCodeSlack bytes beyond are overwritten, unless
  // group is a multiple of that.
  void (*row_codes)(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
                    const QuantizeParameters& how, uint8_t* codes);
  // codes[i * codes_stride + c], with parameters by c, which may be read up to the next multiple of
  // kCodeSlack. Up to kCodeSlack bytes beyond a line are overwritten, lines in order.
  void (*column_codes)(DataType type, const void* src, int64_t index, int64_t stride, int64_t lines,
                       int64_t n, const QuantizeParameters& how, uint8_t* codes,
                       int64_t codes_stride);
  // For formats of ggml with a codebook: sum (x * x * q * x) and sum (x * x * q * q) of each group,
  // q being codebook[code] of x, added up one after another.
  void (*row_fits)(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
                   const QuantizeParameters& how, float* sum_qx, float* sum_qq);
  // n codes of `bits` 2 or 4 to whole bytes; n is a multiple of 8 / bits.
  void (*pack)(int bits, const uint8_t* codes, int64_t n, uint8_t* out);
  // n numbers from `index` on become those of another floating-point type, or the same, from
  // `out_index` on, rounded to nearest even. No byte beside them is written.
  void (*convert)(DataType type, const void* src, int64_t index, int64_t n, DataType to, void* out,
                  int64_t out_index);
};

inline constexpr int64_t kCodeSlack = 16;

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_QUANTIZE_KERNELS_H_
