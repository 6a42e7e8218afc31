#include "kvant/backends/oracle/array.h"

#include <cstring>
#include <utility>

namespace kvant::oracle {

Array::Array(Dims shape) : dims(std::move(shape)), values(ElementsOf(dims)) {}

IndexMap StridedMap(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides) {
  IndexMap map;
  for (size_t d = 0; d < dims.size(); ++d) {
    auto& axis = map.axes.emplace_back(dims[d]);
    for (int64_t c = 0; c < dims[d]; ++c) axis[c] = c * strides[d];
  }
  if (dims.empty()) map.axes.push_back({0});
  return map;
}

IndexMap GroupMap(absl::Span<const int64_t> from, absl::Span<const int64_t> dims) {
  const Dims dense = DenseStrides(from);
  IndexMap map = StridedMap(dims, Dims(dims.size(), 0));
  // Leading dims that `from` has in excess are 1 and add nothing.
  for (size_t back = 1; back <= std::min(from.size(), dims.size()); ++back) {
    const size_t d = dims.size() - back, f = from.size() - back;
    for (int64_t c = 0; c < dims[d]; ++c) map.axes[d][c] = c * from[f] / dims[d] * dense[f];
  }
  return map;
}

Array Gather(Executor& executor, const Array& from, const Dims& dims, const IndexMap& map) {
  Array result(dims);
  ForEach<1>(executor, dims, {&map},
             [&](int64_t i, const auto& at) { result.values[i] = from.values[at[0]]; });
  return result;
}

Array Load(Executor& executor, const LogicalTensor& desc, const void* memory) {
  Array array(*desc.dims);
  const IndexMap map = StridedMap(array.dims, desc.StridesOrDense());
  ForEach<1>(executor, array.dims, {&map}, [&](int64_t i, const auto& at) {
    array.values[i] = LoadElement(desc.type, memory, at[0]);
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
  // Serially: neighbours of a sub-byte element share its byte, whichever row they are in.
  ForEach<1>(*MakeSerialExecutor(), *desc.dims, {&map}, [&](int64_t i, const auto& at) {
    if (array.stored.empty() || array.stored[i]) {
      StoreElement(desc.type, memory, at[0], array.values[i]);
    }
  });
}

}  // namespace kvant::oracle
