// MatMul with numpy's batch rules.
#include <cstddef>

#include "kvant/backends/oracle/ops.h"

namespace kvant::oracle {
namespace {

// A task computes this many rows and columns: small enough that its part of the result and of one
// row of B stay in cache, and a matter of shape only, so that no result depends on threads.
constexpr int64_t kTaskRows = 32;
constexpr int64_t kTaskColumns = 512;

struct Problem {
  const double* a;  // [batch, m, k]
  const double* b;  // [batch, k, n]
  double* c;        // [batch, m, n]
  int64_t m, k, n;
};

// Rows of C [begin, begin + kRows), columns [j0, j1): four rows share each load of B.
template <int kRows>
void MultiplyRows(const Problem& p, const double* a, const double* b, double* c, int64_t j0,
                  int64_t j1) {
  for (int64_t k = 0; k < p.k; ++k) {
    const double* __restrict row = b + k * p.n;
    double factor[kRows];
    for (int r = 0; r < kRows; ++r) factor[r] = a[r * p.k + k];
    if constexpr (kRows == 4) {
      double* __restrict c0 = c;
      double* __restrict c1 = c + p.n;
      double* __restrict c2 = c + 2 * p.n;
      double* __restrict c3 = c + 3 * p.n;
      for (int64_t j = j0; j < j1; ++j) {
        const double value = row[j];
        c0[j] += factor[0] * value;
        c1[j] += factor[1] * value;
        c2[j] += factor[2] * value;
        c3[j] += factor[3] * value;
      }
    } else {
      double* __restrict c0 = c;
      for (int64_t j = j0; j < j1; ++j) c0[j] += factor[0] * row[j];
    }
  }
}

void MultiplyBlock(const Problem& p, int64_t a_batch, int64_t b_batch, int64_t c_batch, int64_t i0,
                   int64_t j0) {
  const int64_t i1 = std::min(p.m, i0 + kTaskRows);
  const int64_t j1 = std::min(p.n, j0 + kTaskColumns);
  const double* a = p.a + a_batch * p.m * p.k;
  const double* b = p.b + b_batch * p.k * p.n;
  double* c = p.c + c_batch * p.m * p.n;
  int64_t i = i0;
  for (; i + 4 <= i1; i += 4) MultiplyRows<4>(p, a + i * p.k, b, c + i * p.n, j0, j1);
  for (; i < i1; ++i) MultiplyRows<1>(p, a + i * p.k, b, c + i * p.n, j0, j1);
}

// The last two axes swapped.
Array Transposed(Executor& executor, const Array& x) {
  Dims dims = x.dims, strides = DenseStrides(x.dims);
  std::swap(dims[dims.size() - 1], dims[dims.size() - 2]);
  std::swap(strides[dims.size() - 1], strides[dims.size() - 2]);
  return Gather(executor, x, dims, StridedMap(dims, strides));
}

// Operand `port` as [batch..., rows, columns]: a vector is a row on the left and a column on the
// right (transposing it does nothing). `storage` keeps what had to be rearranged.
struct Matrix {
  const double* data;
  Dims batch;
  int64_t rows, columns;
};

Matrix MatrixOf(OpContext& context, int port, bool transposed, Array& storage) {
  const Array& x = context.in(port);
  if (x.dims.size() < 2) {
    const int64_t length = x.size();
    return port == 0 ? Matrix{x.data(), {}, 1, length} : Matrix{x.data(), {}, length, 1};
  }
  if (transposed) storage = Transposed(context.executor, x);
  const Array& y = transposed ? storage : x;
  const size_t rank = y.dims.size();
  return {y.data(), Dims(y.dims.begin(), y.dims.end() - 2), y.dims[rank - 2], y.dims[rank - 1]};
}

void AddBias(OpContext& context, Array& y) {
  const Array& bias = context.in(2);
  const IndexMap map = GroupMap(bias.dims, y.dims);
  ForEach<1>(context.executor, y.dims, {&map},
             [&](int64_t i, const auto& at) { y.values[i] += bias.values[at[0]]; });
}

// For each batch of the result, which batch of an operand it takes.
std::vector<int64_t> BatchIndices(const Dims& operand, const Dims& batch) {
  std::vector<int64_t> indices(ElementsOf(batch));
  const IndexMap map = GroupMap(operand, batch);
  ForEach<1>(*MakeSerialExecutor(), batch, {&map},
             [&](int64_t i, const auto& at) { indices[i] = at[0]; });
  return indices;
}

}  // namespace

absl::StatusOr<Array> EvalMatMul(OpContext& context) {
  Array a_storage, b_storage;
  const Matrix a = MatrixOf(context, 0, context.op.Get<Attr::kTransposeA>(), a_storage);
  const Matrix b = MatrixOf(context, 1, context.op.Get<Attr::kTransposeB>(), b_storage);
  Array y(context.out_dims(0));
  const Dims batch = *Broadcast(a.batch, b.batch);
  const std::vector<int64_t> a_batch = BatchIndices(a.batch, batch);
  const std::vector<int64_t> b_batch = BatchIndices(b.batch, batch);
  const Problem problem{a.data, b.data, y.data(), a.rows, a.columns, b.columns};
  const int64_t row_tasks = (a.rows + kTaskRows - 1) / kTaskRows;
  const int64_t column_tasks = (b.columns + kTaskColumns - 1) / kTaskColumns;
  context.executor.ParallelFor(ElementsOf(batch) * row_tasks * column_tasks, [&](int64_t task,
                                                                                 int) {
    const int64_t at = task / column_tasks / row_tasks;
    MultiplyBlock(problem, a_batch[at], b_batch[at], at,
                  task / column_tasks % row_tasks * kTaskRows, task % column_tasks * kTaskColumns);
  });
  if (context.has_input(2)) AddBias(context, y);
  return y;
}

// Sylvester's matrix: H_1 = 1, H_2n = [H_n H_n; H_n -H_n], so that its element (i, j) is -1 where i
// and j have an odd number of ones in common.
absl::StatusOr<Array> EvalHadamard(OpContext& context) {
  const Array x = context.Take(0);
  const int64_t n = context.op.Get<Attr::kBlock>();
  Array result(context.out_dims(0));
  const double norm = std::sqrt(static_cast<double>(n));
  for (int64_t first = 0; first < x.size(); first += n) {
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        const double value = x.values[first + j];
        sum += __builtin_parityll(static_cast<uint64_t>(i & j)) ? -value : value;
      }
      result.values[first + i] = sum / norm;
    }
  }
  return result;
}

}  // namespace kvant::oracle
