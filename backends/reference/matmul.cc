// MatMul. oneDNN repeats batch dims of 1 itself. Batch dims are merged where both operands allow
// it, and query heads that share a B become rows of one larger product.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

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

absl::StatusOr<Array> LowerMatMul(Lowering& lowering) {
  const bool transpose_a = lowering.op().Get<Attr::kTransposeA>();
  const bool transpose_b = lowering.op().Get<Attr::kTransposeB>();
  Array result =
      MatMul(lowering.plan, lowering.Input(0), lowering.Input(1), transpose_a, transpose_b);
  if (lowering.HasInput(2)) {
    // A step of its own: the bias broadcasts to dims that the product above has merged.
    result = Reshaped(result, lowering.OutputDims(0));
    result = Binary(lowering.plan, dnnl::algorithm::binary_add, result, lowering.Input(2));
  }
  return result;
}

// Sylvester's matrix / sqrt(block), which is a product of sums and differences.
absl::StatusOr<Array> LowerHadamard(Lowering& lowering) {
  const Array x = lowering.Input(0);
  const Array result = lowering.plan.NewArray(x.dims);
  const int64_t block = lowering.op().Get<Attr::kBlock>();
  const float norm = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  lowering.plan.AddStep({x}, {result}, [=](const RunContext& context) {
    context.executor.ParallelFor(x.elements() / block, [&](int64_t i, int) {
      float* const y = context.data(result) + i * block;
      std::transform(context.data(x) + i * block, context.data(x) + (i + 1) * block, y,
                     [norm](float value) { return value * norm; });
      for (int64_t half = 1; half < block; half *= 2) {
        for (int64_t j = 0; j < block; j += 2 * half) {
          for (int64_t k = j; k < j + half; ++k) {
            const float sum = y[k] + y[k + half];
            y[k + half] = y[k] - y[k + half];
            y[k] = sum;
          }
        }
      }
    });
  });
  return result;
}

}  // namespace kvant::reference
