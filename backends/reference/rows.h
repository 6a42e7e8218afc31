// Walking strided operands together, row by row: the loop under all plain code here.
#ifndef KVANT_BACKENDS_REFERENCE_ROWS_H_
#define KVANT_BACKENDS_REFERENCE_ROWS_H_

#include <array>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant::reference {

inline constexpr int kMaxOperands = 4;

// Strides of a dense array of `dims` seen as one of `out` (NumPy broadcast): 0 where it repeats.
Dims BroadcastStrides(absl::Span<const int64_t> dims, absl::Span<const int64_t> out);

// Elements [0, count) of one row: operand i has element e at offset[i] + e * stride[i].
struct Row {
  int64_t count = 0;
  std::array<int64_t, kMaxOperands> offset{};
  std::array<int64_t, kMaxOperands> stride{};
};

// Operand 0 becomes operand 1, of elements of 4 or 8 bytes.
void CopyRow(const Row& row, size_t bytes, void* to, const void* from);

// An iteration space of any rank, and the strides of up to kMaxOperands operands in it.
class Walk {
 public:
  // Adjacent dims are merged where every operand allows it.
  Walk(absl::Span<const int64_t> dims, std::vector<Dims> strides);

  const Dims& dims() const { return dims_; }
  const Dims& strides(int operand) const { return strides_[operand]; }
  // dims() with 1 where the operand repeats.
  Dims extents(int operand) const;

  // Calls body for rows that cover every element once, in parallel; rows are cut where long.
  void ForEachRow(Executor& executor, absl::FunctionRef<void(const Row&)> body) const;

 private:
  Row RowAt(int64_t index) const;

  Dims dims_;  // never empty
  std::vector<Dims> strides_;
};

}  // namespace kvant::reference

#endif  // KVANT_BACKENDS_REFERENCE_ROWS_H_
