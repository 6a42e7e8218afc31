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
  int bits = 8;    // of a code; so many are its range, from
  int lowest = 0;  // on, of integers
  const float* scales = nullptr;
  const float* reciprocals = nullptr;  // null if `divide`
  const float* values = nullptr;       // the zero points; |value| <= 2^15 where they are codes
  const Codebook* codebook = nullptr;  // codes are positions in it
  // With a format of ggml, quotients are products (x - offset) * reciprocal as they are, and a
  // group whose reciprocal is NaN has the codes 0. No scales, no zero points.
  GgmlFormat ggml = GgmlFormat::kNone;
  const float* offsets = nullptr;  // null: 0
};

// Groups of `group` numbers, `run` of them side by side: the first from `index` on in the array at
// `src`, runs `step` elements apart. There are whole runs of them.
struct NumberRows {
  DataType type = kUndef;
  const void* src = nullptr;
  int64_t index = 0;
  int64_t group = 0, groups = 0;
  int64_t run = 1, step = 0;
};

// `lines` lines of n numbers, `stride` elements apart: a group is a column.
struct NumberColumns {
  DataType type = kUndef;
  const void* src = nullptr;
  int64_t index = 0;
  int64_t stride = 0, lines = 0, n = 0;
  // Bytes to the numbers that come next. Half of them are prefetched while ranges are found,
  // the other half while codes are. For rows hardware does better by itself.
  int64_t ahead = 0;
};

// Where codes go: those of a run (of a line) side by side, runs `step` codes apart.
struct CodeRuns {
  void* codes = nullptr;
  int64_t index = 0, step = 0;
};

// Numbers are of a floating-point type, from `index` on in the array at `src`; no byte beside
// them is read. Codes are as they are stored, and may begin and end within a byte: of a byte that
// they share, the rest stays.
struct QuantizeKernels {
  // The smallest and largest of each group, NaN counted as beyond infinity. With `magnitude`, both
  // are the largest magnitude.
  void (*row_ranges)(const NumberRows& rows, bool magnitude, float* min, float* max);
  void (*column_ranges)(const NumberColumns& columns, bool magnitude, float* min, float* max);
  // ParametersOf for n groups, and 1 / scale; whether QuantizeParameters::divide may be false.
  // Without zero points none are written.
  bool (*parameters)(const ParameterRule& rule, int64_t n, const float* min, const float* max,
                     float* scales, float* reciprocals, float* zero_points);
  // With the parameters of each group; those of three beyond the last may be read.
  void (*row_codes)(const NumberRows& rows, const QuantizeParameters& how, const CodeRuns& out);
  // With those of each column, which may be read up to the next multiple of kColumnBlock.
  void (*column_codes)(const NumberColumns& columns, const QuantizeParameters& how,
                       const CodeRuns& out);
  // For formats of ggml with a codebook: sum (x * x * q * x) and sum (x * x * q * q) of each group,
  // q being codebook[code] of x, added up one after another.
  void (*row_fits)(DataType type, const void* src, int64_t index, int64_t group, int64_t groups,
                   const QuantizeParameters& how, float* sum_qx, float* sum_qq);
  // n codes, a byte each, become codes of `bits` from out_index on in the array at `out`.
  void (*pack)(int bits, const uint8_t* codes, int64_t n, void* out, int64_t out_index);
  // n numbers from `index` on become those of another floating-point type, or the same, from
  // `out_index` on, rounded to nearest even. No byte beside them is written.
  void (*convert)(DataType type, const void* src, int64_t index, int64_t n, DataType to, void* out,
                  int64_t out_index);
};

inline constexpr int64_t kColumnBlock = 64;

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_QUANTIZE_KERNELS_H_
