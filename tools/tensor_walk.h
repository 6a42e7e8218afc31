// Walking a tensor's elements in dense row-major order, whatever its strides.
#ifndef KVANT_TOOLS_TENSOR_WALK_H_
#define KVANT_TOOLS_TENSOR_WALK_H_

#include <cstdint>

#include "kvant/graph/logical_tensor.h"

namespace kvant {

// Calls visit(index, offset, at) for the elements [first, last) in dense row-major
// order: offset is where the element lies, in elements, and at its coordinates
// (const Dims&). Needs has_shape().
template <typename Visit>
void ForEachElement(const LogicalTensor& tensor, int64_t first, int64_t last, Visit visit) {
  const Dims strides = tensor.StridesOrDense();
  const Dims& dims = *tensor.dims;
  const int rank = tensor.rank();
  Dims at(dims.size(), 0);
  int64_t offset = 0;
  int64_t rest = first;
  for (int d = rank - 1; d >= 0 && first < last; --d) {
    at[d] = rest % dims[d];
    rest /= dims[d];
    offset += at[d] * strides[d];
  }
  for (int64_t index = first; index < last; ++index) {
    visit(index, offset, static_cast<const Dims&>(at));
    for (int d = rank - 1; d >= 0; --d) {
      offset += strides[d];
      if (++at[d] < dims[d]) break;
      offset -= at[d] * strides[d];
      at[d] = 0;
    }
  }
}

template <typename Visit>
void ForEachElement(const LogicalTensor& tensor, Visit visit) {
  ForEachElement(tensor, 0, tensor.elements(), visit);
}

}  // namespace kvant

#endif  // KVANT_TOOLS_TENSOR_WALK_H_
