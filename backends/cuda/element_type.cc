#include "kvant/backends/cuda/element_type.h"

namespace kvant::cuda {

ElementType ElementTypeOf(DataType type) {
  switch (type) {
    case kvant::kUndef:
      return kNone;
    case kvant::kF32:
      return kFloat32;
    case kvant::kF16:
      return kFloat16;
    case kvant::kBF16:
      return kBFloat16;
    case kvant::kF8E4M3:
      return kFloat8E4M3;
    case kvant::kF8E5M2:
      return kFloat8E5M2;
    case kvant::kS64:
      return kInt64;
    case kvant::kS32:
      return kInt32;
    case kvant::kS8:
      return kInt8;
    case kvant::kU8:
      return kUint8;
    case kvant::kS4:
      return kInt4;
    case kvant::kU4:
      return kUint4;
    case kvant::kS2:
      return kInt2;
    case kvant::kU2:
      return kUint2;
    case kvant::kBoolean:
      return kBool;
  }
  return kNone;
}

}  // namespace kvant::cuda
