// Scales and zero points for DynamicQuantize, computed from data.
#ifndef KVANT_BACKENDS_QUANTIZE_H_
#define KVANT_BACKENDS_QUANTIZE_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// For each group of `group_shape` elements of `src` (dense row-major f32 of these
// dims), the scale and zero point that map the group's range onto the codes of
// `code_type`, rounded to the types they are stored in before anyone uses them:
//   without zero points: scale = max|x| / highest code      (8 bits and f8: 127, 448, ...)
//   integer zero points: range widened to include 0; scale = (max - min) / (codes - 1),
//                        zp = round(lowest code - min / scale), clamped
//   floating zero points: scale as above without widening, zp = lowest code * scale - min,
//                        so that code * scale - zp reproduces the minimum
// A group of zeros gets scale 1. `scales` (and `zero_points`, unless its type is kUndef)
// describe dense tensors of dims src.dim / group_shape; `scale_data` and
// `zero_point_data` receive them.
// kInvalidArguments if a group does not divide or shapes differ.
absl::Status ComputeScales(absl::Span<const float> src, absl::Span<const int64_t> dims,
                           absl::Span<const int64_t> group_shape, DataType code_type,
                           DataType scale_type, void* scale_data, DataType zero_point_type,
                           void* zero_point_data);

}  // namespace kvant

#endif  // KVANT_BACKENDS_QUANTIZE_H_
