#include "kvant/backends/oracle/array.h"

#include <cstring>
#include <utility>

namespace kvant::oracle {

int64_t ElementsOf(absl::Span<const int64_t> dims) {
  int64_t elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return elements;
}

Array::Array(Dims shape) : dims(std::move(shape)), values(ElementsOf(dims)) {}

Dims BroadcastDims(absl::Span<const int64_t> a, absl::Span<const int64_t> b) {
  Dims dims(std::max(a.size(), b.size()), 1);
  for (absl::Span<const int64_t> from : {a, b}) {
    const size_t skip = dims.size() - from.size();
    for (size_t d = 0; d < from.size(); ++d) {
      if (from[d] != 1) dims[skip + d] = from[d];
    }
  }
  return dims;
}

Array Expand(Executor& executor, const Array& array, const Dims& dims) {
  Array expanded(dims);
  const IndexMap map = BroadcastMap(array.dims, dims);
  ForEachRow<1>(executor, dims, {&map}, [&](int64_t first, const auto& bases) {
    for (size_t j = 0; j < map.axes.back().size(); ++j) {
      expanded.values[first + j] = array.values[bases[0] + map.axes.back()[j]];
    }
  });
  return expanded;
}

IndexMap StridedMap(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides) {
  IndexMap map;
  for (size_t d = 0; d < dims.size(); ++d) {
    auto& axis = map.axes.emplace_back(dims[d]);
    for (int64_t c = 0; c < dims[d]; ++c) axis[c] = c * strides[d];
  }
  // A scalar is a row of one.
  if (dims.empty()) map.axes.push_back({0});
  return map;
}

IndexMap BroadcastMap(absl::Span<const int64_t> from, absl::Span<const int64_t> dims) {
  const Dims dense = DenseStrides(from);
  Dims strides(dims.size(), 0);
  // Leading dims that `from` has in excess are 1 and add nothing.
  for (size_t back = 1; back <= std::min(from.size(), dims.size()); ++back) {
    if (from[from.size() - back] != 1) strides[dims.size() - back] = dense[from.size() - back];
  }
  return StridedMap(dims, strides);
}

IndexMap GroupMap(absl::Span<const int64_t> dims, absl::Span<const int64_t> group,
                  absl::Span<const int64_t> groups) {
  const Dims strides = DenseStrides(groups);
  IndexMap map;
  for (size_t d = 0; d < dims.size(); ++d) {
    auto& axis = map.axes.emplace_back(dims[d]);
    for (int64_t c = 0; c < dims[d]; ++c) axis[c] = c / group[d] * strides[d];
  }
  if (dims.empty()) map.axes.push_back({0});
  return map;
}

IndexMap ConstantMap(absl::Span<const int64_t> dims) {
  return StridedMap(dims, Dims(dims.size(), 0));
}

Array Load(Executor& executor, const LogicalTensor& desc, const void* memory) {
  Array array(*desc.dims);
  const IndexMap map = StridedMap(array.dims, desc.StridesOrDense());
  const std::vector<int64_t>& columns = map.axes.back();
  ForEachRow<1>(executor, array.dims, {&map}, [&](int64_t first, const auto& bases) {
    for (size_t j = 0; j < columns.size(); ++j) {
      array.values[first + j] = LoadElement(desc.type, memory, bases[0] + columns[j]);
    }
  });
  if (desc.type == kS64 && array.size() == 1) {
    int64_t value;
    std::memcpy(&value, memory, sizeof(value));
    array.exact = value;
  }
  return array;
}

void Store(const LogicalTensor& desc, const Array& array, void* memory) {
  const IndexMap map = StridedMap(*desc.dims, desc.StridesOrDense());
  const std::vector<int64_t>& columns = map.axes.back();
  // Serially: neighbours of a sub-byte element share its byte, whichever row they are in.
  const std::unique_ptr<Executor> serial = MakeSerialExecutor();
  ForEachRow<1>(*serial, *desc.dims, {&map}, [&](int64_t first, const auto& bases) {
    for (size_t j = 0; j < columns.size(); ++j) {
      if (!array.stored.empty() && !array.stored[first + j]) continue;
      StoreElement(desc.type, memory, bases[0] + columns[j], array.values[first + j]);
    }
  });
}

}  // namespace kvant::oracle
