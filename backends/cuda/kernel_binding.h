// What is left to fill in when a kernel is launched: pointers, and values that the host reads.
#ifndef KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
#define KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "kvant/graph/constant.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant::cuda {

// The pointer at `offset` of the parameters is that of a port.
struct PortPointer {
  size_t offset = 0;
  int port = 0;
  bool output = false;
};

// The pointer at `offset` of the parameters is so far into the constants, or the scratch.
struct BlockPointer {
  size_t offset = 0;
  size_t at = 0;
};

// The number at `offset` of the parameters is that of a host scalar's port.
struct HostValue {
  enum class As : uint8_t { kFloat, kDouble, kInteger, kAddedShift, kSubtractedShift };
  size_t offset = 0;
  int port = 0;
  DataType type = kvant::kUndef;
  As as = As::kFloat;
};

// Beyond any row or column, and far from overflow.
inline int64_t ClampShift(int64_t shift) {
  constexpr int64_t kFar = int64_t{1} << 30;
  return std::clamp(shift, -kFar, kFar);
}

struct KernelBinding {
  std::vector<PortPointer> ports;
  std::vector<HostValue> values;
  std::vector<BlockPointer> constants, scratch;
  // Copied to the device when the partition is compiled.
  std::vector<std::byte> constant_bytes;

  // The pointer at `offset` of the parameters is that of the array, which may be a constant.
  void Add(size_t offset, const PortArray& array) {
    if (array.constant) return AddConstants(offset, array.constant->data(), 8);
    ports.push_back({offset, array.port, array.output});
  }
  // The pointer at `offset` of the parameters is that of a copy of these bytes.
  void AddConstants(size_t offset, const void* from, size_t bytes) {
    constexpr size_t kAlignment = 16;
    constant_bytes.resize((constant_bytes.size() + kAlignment - 1) / kAlignment * kAlignment);
    constants.push_back({offset, constant_bytes.size()});
    const auto* begin = static_cast<const std::byte*>(from);
    constant_bytes.insert(constant_bytes.end(), begin, begin + bytes);
  }
};

// Where a field of these parameters is.
template <typename Params, typename Field>
size_t OffsetIn(const Params& params, const Field& field) {
  return static_cast<size_t>(reinterpret_cast<const std::byte*>(&field) -
                             reinterpret_cast<const std::byte*>(&params));
}

template <typename T>
void SetField(void* params, size_t offset, T value) {
  std::memcpy(static_cast<std::byte*>(params) + offset, &value, sizeof(value));
}

inline void SetPointer(void* params, size_t offset, const void* pointer) {
  SetField(params, offset, pointer);
}

inline void SetValue(const HostValue& value, const void* data, void* params) {
  const Constant read(value.type, data);
  int64_t shift = 0;
  switch (value.as) {
    case HostValue::As::kFloat:
      return SetField(params, value.offset, static_cast<float>(read.value()));
    case HostValue::As::kDouble:
      return SetField(params, value.offset, read.value());
    case HostValue::As::kInteger:
      return SetField(params, value.offset, read.integer());
    case HostValue::As::kAddedShift:
    case HostValue::As::kSubtractedShift:
      std::memcpy(&shift, static_cast<const std::byte*>(params) + value.offset, sizeof(shift));
      shift += value.as == HostValue::As::kAddedShift ? ClampShift(read.integer())
                                                      : -ClampShift(read.integer());
      return SetField(params, value.offset, shift);
  }
}

// All of `params`, which holds what does not change between launches.
inline void FillParams(const KernelBinding& binding, absl::Span<const void* const> inputs,
                       absl::Span<void* const> outputs, const std::byte* constants,
                       std::byte* scratch, void* params) {
  for (const HostValue& value : binding.values) SetValue(value, inputs[value.port], params);
  for (const PortPointer& pointer : binding.ports) {
    SetPointer(params, pointer.offset,
               pointer.output ? outputs[pointer.port] : inputs[pointer.port]);
  }
  for (const BlockPointer& pointer : binding.constants) {
    SetPointer(params, pointer.offset, constants + pointer.at);
  }
  for (const BlockPointer& pointer : binding.scratch) {
    SetPointer(params, pointer.offset, scratch + pointer.at);
  }
}

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_KERNEL_BINDING_H_
