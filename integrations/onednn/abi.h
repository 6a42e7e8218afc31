// The types of oneDNN Graph's C ABI, as oneDNN 3.13 has them, which extend those of 3.2. They are
// declared here so that building needs no oneDNN and depends on none that is found: layouts and
// numbers are the ABI, and a test compares them with oneDNN's own headers.
#ifndef KVANT_INTEGRATIONS_ONEDNN_ABI_H_
#define KVANT_INTEGRATIONS_ONEDNN_ABI_H_

#include <cstddef>
#include <cstdint>

// oneDNN's handles. A pointer to one may be oneDNN's, or stand for one of ours (handles.h).
struct dnnl_engine;
struct dnnl_stream;
struct dnnl_graph_allocator;
struct dnnl_graph_op;
struct dnnl_graph_graph;
struct dnnl_graph_partition;
struct dnnl_graph_compiled_partition;
struct dnnl_graph_tensor;

namespace kvant::dnnl_abi {

using Status = int32_t;
inline constexpr Status kSuccess = 0;
inline constexpr Status kOutOfMemory = 1;
inline constexpr Status kInvalidArguments = 2;
inline constexpr Status kUnimplemented = 3;
inline constexpr Status kRuntimeError = 5;
inline constexpr Status kInvalidGraph = 7;
inline constexpr Status kInvalidGraphOp = 8;
inline constexpr Status kInvalidShape = 9;
inline constexpr Status kInvalidDataType = 10;

using EngineKind = int32_t;
inline constexpr EngineKind kCpu = 1;
using Policy = int32_t;
inline constexpr Policy kFusion = 1;
// Numbered as FpMath of graph.h is.
using FpMathMode = int32_t;
// Rows of data_types.inc, op_kinds.inc and attributes.inc.
using TypeNumber = int32_t;
using KindNumber = int32_t;
using AttrNumber = int32_t;
// Numbered as Layout and Property of logical_tensor.h are.
using LayoutNumber = int32_t;
using PropertyNumber = int32_t;

inline constexpr int kMostDims = 12;
inline constexpr size_t kNoId = SIZE_MAX;
// In the place of a tensor's memory: oneDNN allocates it.
inline void* const kAllocate = reinterpret_cast<void*>(SIZE_MAX);

struct TensorDesc {
  size_t id;
  int32_t ndims;  // -1: not known
  int64_t dims[kMostDims];
  TypeNumber data_type;
  PropertyNumber property;
  LayoutNumber layout_type;
  union {
    int64_t strides[kMostDims];
    size_t layout_id;
  } layout;
};

struct InplacePair {
  size_t input_id, output_id;
};

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};
// Of Version::cpu_runtime.
inline constexpr unsigned kSequential = 1, kOpenMp = 2, kTbb = 4, kThreadPool = 8, kSycl = 512;

using HostAllocate = void* (*)(size_t size, size_t alignment);
using HostFree = void (*)(void*);
using SyclAllocate = void* (*)(size_t, size_t, const void* device, const void* context);
using SyclFree = void (*)(void*, const void* device, const void* context, void* event);
// OpenCL's handles are pointers.
using OclAllocate = void* (*)(size_t, size_t, void* device, void* context);
using OclFree = void (*)(void*, void* device, void* context, void* event);

// What handles of ours stand for.
using OpHandle = dnnl_graph_op*;
using GraphHandle = dnnl_graph_graph*;
using PartitionHandle = dnnl_graph_partition*;
using CompiledHandle = dnnl_graph_compiled_partition*;
using TensorHandle = dnnl_graph_tensor*;

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_ABI_H_
