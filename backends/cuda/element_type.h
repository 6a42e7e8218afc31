// Data types in the words of the kernels.
#ifndef KVANT_BACKENDS_CUDA_ELEMENT_TYPE_H_
#define KVANT_BACKENDS_CUDA_ELEMENT_TYPE_H_

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {

// Undefined: kNone.
ElementType ElementTypeOf(DataType type);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_ELEMENT_TYPE_H_
