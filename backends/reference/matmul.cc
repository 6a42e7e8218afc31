// MatMul. oneDNN repeats batch dims of 1 itself. Batch dims are merged where both operands allow
// it, and query heads that share a B become rows of one larger product.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/reference/lowering.h"
#include "kvant/backends/reference/onednn.h"
#include "kvant/backends/reference/pieces.h"
#include "kvant/backends/reference/rows.h"

namespace kvant::reference {
namespace {

struct Matrix {
  Dims batch;
  int64_t rows = 1, columns = 1;
  bool transposed = false;
};

Matrix MatrixOf(const Array& x, bool transpose, bool left) {
  if (x.dims.size() < 2) {  // a row on the left, a column on the right
    const int64_t length = x.elements();
    return left ? Matrix{{}, 1, length} : Matrix{{}, length, 1};
  }
  const size_t rank = x.dims.size();
  Matrix matrix{Dims(x.dims.begin(), x.dims.end() - 2), x.dims[rank - 2], x.dims[rank - 1],
                transpose};
  if (transpose) std::swap(matrix.rows, matrix.columns);
  return matrix;
}

// Matrices of these batch dims.
dnnl::memory::desc OperandDesc(Dims dims, const Matrix& matrix) {
  dims.push_back(matrix.rows);
  dims.push_back(matrix.columns);
  Dims strides = DenseStrides(dims);
  if (matrix.transposed) {
    strides[dims.size() - 2] = 1;
    strides[dims.size() - 1] = matrix.rows;
  }
  return StridedDesc(dims, strides);
}

// Sylvester's, / sqrt(size).
std::vector<float> HadamardMatrix(int64_t size) {
  std::vector<float> matrix(size * size);
  const double element = 1 / std::sqrt(static_cast<double>(size));
  for (int64_t i = 0; i < size * size; ++i) {
    const bool odd = std::popcount(static_cast<uint64_t>(i / size & i % size)) % 2 != 0;
    matrix[i] = static_cast<float>(odd ? -element : element);
  }
  return matrix;
}

}  // namespace

Array MatMul(Plan& plan, Array a, Array b, bool transpose_a, bool transpose_b) {
  Matrix left = MatrixOf(a, transpose_a, /*left=*/true);
  const Matrix right = MatrixOf(b, transpose_b, /*left=*/false);
  const Dims batch = *Broadcast(left.batch, right.batch);
  Dims dims = batch;
  if (a.dims.size() > 1) dims.push_back(left.rows);
  if (b.dims.size() > 1) dims.push_back(right.columns);
  if (ElementsOf(dims) == 0 || left.columns == 0) {
    return Expanded(plan, ConstantArray(plan, {0}, {}), dims);
  }
  const Walk batches(batch,
                     {BroadcastStrides(left.batch, batch), BroadcastStrides(right.batch, batch)});
  Dims a_batch = batches.extents(0), b_batch = batches.extents(1), result_batch = batches.dims();
  // Either a alone varies along the last axis, or there is no batch.
  if (b_batch.back() == 1 && (a_batch.back() == 1 || !left.transposed)) {
    left.rows *= a_batch.back();
    for (Dims* each : {&a_batch, &b_batch, &result_batch}) each->pop_back();
  }
  Array result = plan.NewArray(dims);
  // oneDNN counts with 32 bits, and divides by what overflows.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows = ElementsOf(result_batch) * left.rows;
  if (std::max({rows, left.columns, right.columns}) > kMost) {
    plan.Decline(absl::StrCat("multiplies ", rows, " rows of ", left.columns, " by ", right.columns,
                              " columns, and oneDNN takes no more than ", kMost, " of each"));
    return result;
  }
  const auto a_desc = OperandDesc(a_batch, left), b_desc = OperandDesc(b_batch, right);
  const auto desc = OperandDesc(result_batch, Matrix{{}, left.rows, right.columns});
  const dnnl::matmul::primitive_desc description(CpuEngine(), a_desc, b_desc, desc,
                                                 UserScratchpad());
  AddPrimitive(plan, dnnl::matmul(description), description.scratchpad_desc(),
               {{DNNL_ARG_SRC, a, a_desc}, {DNNL_ARG_WEIGHTS, b, b_desc}},
               {DNNL_ARG_DST, result, desc});
  return result;
}

absl::StatusOr<Array> LowerMatMul(const Op& op, Lowering& lowering) {
  const bool transpose_a = op.Get<Attr::kTransposeA>();
  const bool transpose_b = op.Get<Attr::kTransposeB>();
  Array result =
      MatMul(lowering.plan, lowering.Input(op, 0), lowering.Input(op, 1), transpose_a, transpose_b);
  if (lowering.HasInput(op, 2)) {
    // A step of its own: the bias broadcasts to dims that the product above has merged.
    result = Reshaped(result, lowering.OutputDims(op, 0));
    result = Binary(lowering.plan, dnnl::algorithm::binary_add, result, lowering.Input(op, 2));
  }
  return result;
}

absl::StatusOr<Array> LowerHadamard(const Op& op, Lowering& lowering) {
  // Of 2^n numbers it is the product of smaller ones, over the axes of [.., kFactor, kFactor]: so
  // that no constant is larger than this.
  constexpr int64_t kFactor = 64;
  Plan& plan = lowering.plan;
  Array x = lowering.Input(op, 0);
  const Dims dims = x.dims;
  int64_t left = op.Get<Attr::kBlock>();
  for (int64_t inner = 1; left > 1 && x.elements() > 0;) {
    const int64_t factor = std::min(left, kFactor);
    const int64_t outer = x.elements() / (factor * inner);
    const Array matrix = ConstantArray(plan, HadamardMatrix(factor), {factor, factor});
    x = inner == 1 ? MatMul(plan, Reshaped(x, {outer, factor}), matrix, false, false)
                   : MatMul(plan, matrix, Reshaped(x, {outer, factor, inner}), false, false);
    inner *= factor;
    left /= factor;
  }
  return Reshaped(x, dims);
}

}  // namespace kvant::reference
