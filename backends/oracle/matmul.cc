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

// Input `port` as [batch..., rows, columns]: a vector is a row on the left and a column on the
// right (transposing it does nothing).
Array Operand(OpContext& context, int port, bool transposed) {
  Array x = context.Take(port);
  const size_t rank = x.dims.size();
  if (rank < 2) {
    x.dims = port == 0 ? Dims{1, x.size()} : Dims{x.size(), 1};
  } else if (transposed) {
    Dims dims = x.dims, strides = DenseStrides(x.dims);
    std::swap(dims[rank - 1], dims[rank - 2]);
    std::swap(strides[rank - 1], strides[rank - 2]);
    return Gather(context.executor, x, dims, StridedMap(dims, strides));
  }
  return x;
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
  const Array a = Operand(context, 0, context.op.Get<Attr::kTransposeA>());
  const Array b = Operand(context, 1, context.op.Get<Attr::kTransposeB>());
  Array y(context.out_dims(0));
  const Dims a_batch(a.dims.begin(), a.dims.end() - 2), b_batch(b.dims.begin(), b.dims.end() - 2);
  const Dims batch = *Broadcast(a_batch, b_batch);
  const std::vector<int64_t> of_a = BatchIndices(a_batch, batch);
  const std::vector<int64_t> of_b = BatchIndices(b_batch, batch);
  const Problem problem{a.data(),      b.data(),     y.data(), a.dims[a_batch.size()],
                        a.dims.back(), b.dims.back()};
  const int64_t row_tasks = (problem.m + kTaskRows - 1) / kTaskRows;
  const int64_t column_tasks = (problem.n + kTaskColumns - 1) / kTaskColumns;
  context.executor.ParallelFor(
      ElementsOf(batch) * row_tasks * column_tasks, [&](int64_t task, int) {
        const int64_t at = task / column_tasks / row_tasks;
        MultiplyBlock(problem, of_a[at], of_b[at], at, task / column_tasks % row_tasks * kTaskRows,
                      task % column_tasks * kTaskColumns);
      });
  if (context.has_input(2)) {
    const Array& bias = context.in(2);
    const IndexMap map = GroupMap(bias.dims, y.dims);
    ForEach<1>(context.executor, y.dims, {&map},
               [&](int64_t i, const auto& at) { y.values[i] += bias.values[at[0]]; });
  }
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
