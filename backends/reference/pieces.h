// The pieces that ops are lowered to: each adds steps to a plan and returns the array they give.
// Shapes have been checked by shape inference. oneDNN's exceptions pass through.
#ifndef KVANT_BACKENDS_REFERENCE_PIECES_H_
#define KVANT_BACKENDS_REFERENCE_PIECES_H_

#include "absl/types/span.h"
#include "dnnl.hpp"
#include "kvant/backends/reference/plan.h"

namespace kvant::reference {

// ports.cc: between the memory of a port, of any type and layout, and dense arrays.
Array LoadPort(Plan& plan, int port, const LogicalTensor& tensor);
Array LoadConstant(Plan& plan, const Constant& value);
// With `offsets`, s32, only rows along axis 0 before the last of them.
void StorePort(Plan& plan, int port, const LogicalTensor& tensor, const Array& array,
               const Array& offsets);

// matmul.cc. NumPy's rules, vectors included; the result has no dims of a vector operand.
Array MatMul(Plan& plan, Array a, Array b, bool transpose_a, bool transpose_b);

// softmax.cc
struct SoftMaxOptions {
  int64_t axis = -1;
  bool inf_as_zero = false;
  bool with_stats = false;
  float stats_of_empty = 0;  // of a row of -inf that becomes zeros
};
struct SoftMaxResult {
  Array probs;
  // max + ln(sum exp(x - max)), the axis of dim 1.
  Array stats;
};
SoftMaxResult SoftMax(Plan& plan, const Array& x, const SoftMaxOptions& options);

// elementwise.cc
Array Eltwise(Plan& plan, dnnl::algorithm algorithm, const Array& x, float alpha = 0,
              float beta = 0);
// NumPy broadcast, of f32 and s32 in any mixture; `result` is one of them. An s32 result is rounded
// to nearest even (a quotient of s32 is cut towards zero) and saturates; a comparison gives f32 0
// or 1.
Array Binary(Plan& plan, dnnl::algorithm algorithm, Array a, Array b,
             Storage result = Storage::kF32);
// `dims`: the result's, which all operands broadcast to.
Array Select(Plan& plan, const Array& condition, const Array& x, const Array& y, const Dims& dims);
// Repeated to `dims`; itself if it has them.
Array Expanded(Plan& plan, const Array& x, absl::Span<const int64_t> dims);

// reduction.cc. Reduced dims become 1. Axes count from the front.
Array Reduce(Plan& plan, dnnl::algorithm algorithm, const Array& x, absl::Span<const int64_t> axes);

// movement.cc
// A dense array of `dims` whose elements lie in x with these strides.
Array Gather(Plan& plan, const Array& x, const Dims& dims, const Dims& strides);
Array Concat(Plan& plan, absl::Span<const Array> arrays, int64_t axis);

// Which elements along an axis exist: of row n of axis 0, [first[n], lengths[n]). s32, one for each
// row or one for all.
struct Existing {
  Array lengths, first;  // of none: 0
};
// x with `value` along `axis` where elements do not exist, NaN replaced too. `group`: elements for
// which one of x stands.
Array KeepExisting(Plan& plan, const Array& x, const Existing& existing, int64_t axis, float value,
                   int64_t group = 1);
// Of x [1, H, T, C] with rows of all sequences one after another, [N, H, T, C]: those from
// offsets[n] to offsets[n + 1], and zeros. And back, zeros beyond the last.
Array Unpack(Plan& plan, const Array& x, const Array& offsets);
Array Pack(Plan& plan, const Array& x, const Array& offsets);

// quantization.cc
// An array with these values.
Array ConstantArray(Plan& plan, std::vector<float> values, Dims dims);

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_PIECES_H_
