// Dense f64 arrays, and the one loop that all oracle ops are written with.
#ifndef KVANT_BACKENDS_ORACLE_ARRAY_H_
#define KVANT_BACKENDS_ORACLE_ARRAY_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "kvant/backends/loops.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant::oracle {

// Dense row-major; integers are exact up to 2^53.
struct Array {
  Dims dims;
  std::vector<double> values;
  // The one element of an s64 port, whose upper bits f64 may not hold (random seeds).
  std::optional<int64_t> exact;
  // Not empty: which elements a port takes; the others keep what is in its memory.
  std::vector<bool> stored;

  Array() = default;
  explicit Array(Dims shape);
  int64_t size() const { return static_cast<int64_t>(values.size()); }
  double* data() { return values.data(); }
  const double* data() const { return values.data(); }
};

// Where the elements of an array come from: element [c0, c1, ...] has index
// axes[0][c0] + axes[1][c1] + ... Strides, broadcasting, groups and permutations are all tables.
// There is an axis at least: a scalar is a row of one.
struct IndexMap {
  std::vector<std::vector<int64_t>> axes;
};

IndexMap StridedMap(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides);
// An element of a dense array of dims `from` is for a group of those of `dims`. The dims of `from`
// divide these, aligned at the last: those that are equal go one by one, and 1 broadcasts, as in
// numpy.
IndexMap GroupMap(absl::Span<const int64_t> from, absl::Span<const int64_t> dims);

// Calls fn(i, at) for each element of a dense array of `dims`: i is its dense index, at[m] the
// index in the array that map m is of. Rows (all axes but the last) run in parallel.
template <size_t N, typename Fn>
void ForEach(Executor& executor, absl::Span<const int64_t> dims,
             const std::array<const IndexMap*, N>& maps, Fn fn) {
  const int outer = std::max<int>(static_cast<int>(dims.size()) - 1, 0);
  const int64_t length = dims.empty() ? 1 : dims.back();
  const int64_t rows = ElementsOf(dims.subspan(0, outer));
  if (rows == 0 || length == 0) return;
  std::array<const int64_t*, N> columns;
  for (size_t m = 0; m < N; ++m) columns[m] = maps[m]->axes.back().data();
  ForEachInTasks(executor, rows, std::max<int64_t>(1, 16384 / length), [&](int64_t r) {
    std::array<int64_t, N> bases{};
    int64_t rest = r;
    for (int d = outer - 1; d >= 0; --d) {
      const int64_t at = rest % dims[d];
      rest /= dims[d];
      for (size_t m = 0; m < N; ++m) bases[m] += maps[m]->axes[d][at];
    }
    for (int64_t j = 0; j < length; ++j) {
      std::array<int64_t, N> at = bases;
      for (size_t m = 0; m < N; ++m) at[m] += columns[m][j];
      fn(r * length + j, at);
    }
  });
}

// The elements of `from` that `map` says, a map of these dims.
Array Gather(Executor& executor, const Array& from, const Dims& dims, const IndexMap& map);
// A tensor in memory, read through its strides.
Array Load(Executor& executor, const LogicalTensor& desc, const void* memory);
// Writes only the tensor's elements, of `stored` where it says: gaps between strides stay as they
// are.
void Store(const LogicalTensor& desc, const Array& array, void* memory);

}  // namespace kvant::oracle

#endif  // KVANT_BACKENDS_ORACLE_ARRAY_H_
