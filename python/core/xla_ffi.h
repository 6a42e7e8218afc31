// What of XLA's FFI the extension uses: the structs of its C ABI (xla/ffi/api/c_api.h in jaxlib),
// declared here so that a wheel is built without JAX and serves its versions. XLA keeps old
// versions of the ABI for a year at least; tests/python/test_jax.py compares these with the
// installed one.
#ifndef KVANT_PYTHON_CORE_XLA_FFI_H_
#define KVANT_PYTHON_CORE_XLA_FFI_H_

#include <cstddef>
#include <cstdint>

namespace kvant_python::xla {

inline constexpr int kApiMajor = 0, kApiMinor = 3;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extension_start;
  int major_version, minor_version;
};

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// Codes are Abseil's.
enum ErrorCode : int {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
};

struct Error;
struct Context;

struct ErrorArgs {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  ErrorCode code;
};

struct StreamArgs {
  size_t struct_size;
  Extension* extension_start;
  Context* context;
  void* stream;  // out
};

struct DeviceOrdinalArgs {
  size_t struct_size;
  Extension* extension_start;
  Context* context;
  int32_t device_ordinal;  // out
};

// Functions that are not called have no names here.
struct Api {
  size_t struct_size;
  Extension* extension_start;
  ApiVersion version;
  const void* internal_api;
  Error* (*create_error)(ErrorArgs*);
  void* unused[3];
  Error* (*get_stream)(StreamArgs*);
  void* unused_too[12];
  Error* (*get_device_ordinal)(DeviceOrdinalArgs*);
};

enum class DataType : int {
  kPred = 1,
  kS8 = 2,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kF16 = 10,
  kF32 = 11,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3 = 20,  // E4M3FN
  kS4 = 21,
  kU4 = 22,
  kS2 = 26,
  kU2 = 27,
};

// Elements of less than a byte are packed, the first in the lowest bits.
struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  DataType type;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct ByteSpan {
  const char* data;
  size_t size;
};

struct Scalar {
  DataType type;
  void* value;
};

enum class AttributeType : int { kScalar = 3, kString = 4 };

// Of arguments, and of results: all are buffers.
struct Buffers {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  Buffer** buffers;
};

struct Attributes {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;  // sorted
  void** values;     // ByteSpan* or Scalar*
};

enum class Stage : int { kExecute = 3 };

struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers arguments, results;
  Attributes attributes;
  void* future;  // out
};

}  // namespace kvant_python::xla

#endif  // KVANT_PYTHON_CORE_XLA_FFI_H_
