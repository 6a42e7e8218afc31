// What kvant uses of DLPack 1.x and what Debian 12's dlpack.h (0.6) lacks: versioned tensors and
// the C exchange table. Source: include/dlpack/dlpack.h of https://github.com/dmlc/dlpack, v1.3;
// names and layout are its own.
#ifndef KVANT_PYTHON_CORE_EXCHANGE_H_
#define KVANT_PYTHON_CORE_EXCHANGE_H_

#include <dlpack/dlpack.h>

#include <cstdint>

namespace kvant_python::dlpack {

struct Version {
  uint32_t major, minor;
};

// In the capsule "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};
inline constexpr uint64_t kFlagReadOnly = 1, kFlagIsCopied = 2;

// In the capsule "dlpack_exchange_api" at type(t).__dlpack_c_exchange_api__.
struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* prev_api;
};
struct ExchangeApi {
  ExchangeApiHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // May be null. Not zero: a Python exception is set. The tensor is the object's.
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  int (*current_work_stream)(DLDeviceType type, int32_t index, void** stream);
};
inline constexpr uint32_t kMajorVersion = 1;

// Type codes after kDLComplex.
inline constexpr uint8_t kBool = 6, kF8E4M3 = 10, kF8E5M2 = 12;

}  // namespace kvant_python::dlpack

#endif  // KVANT_PYTHON_CORE_EXCHANGE_H_
