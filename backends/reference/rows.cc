#include "kvant/backends/reference/rows.h"

#include <algorithm>

#include "kvant/backends/loops.h"

namespace kvant::reference {
namespace {

// Elements of work per task: a matter of shape only.
constexpr int64_t kTaskElements = 16384;

template <typename T>
void Copy(const Row& row, T* to, const T* from) {
  to += row.offset[0];
  from += row.offset[1];
  if (row.stride[0] == 1 && row.stride[1] == 1) {
    std::copy_n(from, row.count, to);
  } else {
    for (int64_t i = 0; i < row.count; ++i) to[i * row.stride[0]] = from[i * row.stride[1]];
  }
}

}  // namespace

Dims BroadcastStrides(absl::Span<const int64_t> dims, absl::Span<const int64_t> out) {
  const Dims dense = DenseStrides(dims);
  Dims strides(out.size(), 0);
  const size_t missing = out.size() - dims.size();
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1) strides[missing + i] = dense[i];
  }
  return strides;
}

void CopyRow(const Row& row, size_t bytes, void* to, const void* from) {
  if (bytes == 8) {
    Copy(row, static_cast<int64_t*>(to), static_cast<const int64_t*>(from));
  } else {
    Copy(row, static_cast<int32_t*>(to), static_cast<const int32_t*>(from));
  }
}

Walk::Walk(absl::Span<const int64_t> dims, std::vector<Dims> strides) : strides_(strides.size()) {
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    if (dims[axis] == 1) continue;
    bool merges = !dims_.empty();
    for (size_t i = 0; merges && i < strides.size(); ++i) {
      merges = strides_[i].back() == strides[i][axis] * dims[axis];
    }
    if (merges) {
      dims_.back() *= dims[axis];
      for (size_t i = 0; i < strides.size(); ++i) strides_[i].back() = strides[i][axis];
    } else {
      dims_.push_back(dims[axis]);
      for (size_t i = 0; i < strides.size(); ++i) strides_[i].push_back(strides[i][axis]);
    }
  }
  if (dims_.empty()) {
    dims_.push_back(1);
    for (Dims& operand : strides_) operand.push_back(1);
  }
}

Dims Walk::extents(int operand) const {
  Dims extents = dims_;
  for (size_t axis = 0; axis < extents.size(); ++axis) {
    if (strides_[operand][axis] == 0) extents[axis] = 1;
  }
  return extents;
}

Row Walk::RowAt(int64_t index) const {
  Row row;
  row.count = dims_.back();
  for (size_t i = 0; i < strides_.size(); ++i) row.stride[i] = strides_[i].back();
  for (int axis = static_cast<int>(dims_.size()) - 2; axis >= 0; --axis) {
    const int64_t coordinate = index % dims_[axis];
    index /= dims_[axis];
    for (size_t i = 0; i < strides_.size(); ++i) row.offset[i] += coordinate * strides_[i][axis];
  }
  return row;
}

void Walk::ForEachRow(Executor& executor, absl::FunctionRef<void(const Row&)> body) const {
  const int64_t length = dims_.back();
  const int64_t rows = ElementsOf(absl::MakeSpan(dims_).first(dims_.size() - 1));
  if (rows == 0 || length == 0) return;
  // A task is a piece of a row, or some rows.
  const int64_t piece = std::min(length, kTaskElements), pieces = (length + piece - 1) / piece;
  ForEachInTasks(executor, rows * pieces, kTaskElements / piece, [&](int64_t index) {
    Row row = RowAt(index / pieces);
    const int64_t begin = index % pieces * piece;
    row.count = std::min(piece, length - begin);
    for (size_t i = 0; i < strides_.size(); ++i) row.offset[i] += begin * row.stride[i];
    body(row);
  });
}

}  // namespace kvant::reference
