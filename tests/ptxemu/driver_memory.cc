// Calls on device memory.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "kvant/tests/ptxemu/driver.h"
#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

constexpr size_t kMostBytes = size_t{4} << 30;

// A range on the device, which is checked when work on it is enqueued, and again when that runs.
struct Range {
  CUdeviceptr at;
  size_t bytes;

  CUresult Check(const char* name) const {
    State& s = TheState();
    if (s.memory.Covering(at, bytes) != nullptr) return kSuccess;
    return Misuse(kInvalidValue, StrCat(name, ": ", s.memory.Describe(at), ", ", bytes, " bytes"));
  }
  const uint8_t* Read() const {
    const Allocation& a = Covering();
    return a.data.data() + (at - a.base);
  }
  uint8_t* Write() const {
    Allocation& a = Covering();
    std::fill_n(a.known.data() + (at - a.base), bytes, uint8_t{1});
    return a.data.data() + (at - a.base);
  }

 private:
  Allocation& Covering() const {
    State& s = TheState();
    Allocation* a = s.memory.Covering(at, bytes);
    if (a != nullptr) return *a;
    throw Fault(kIllegalAddress, StrCat("a copy or fill of ", s.memory.Describe(at), ", ", bytes,
                                        " bytes, freed since it was enqueued"));
  }
};

// Device addresses are those that no allocation of the host can have.
bool IsHost(const void* p) {
  return TheState().memory.Covering(reinterpret_cast<uint64_t>(p), 1) == nullptr;
}

// Enqueues work on ranges of the device, and on memory of the host, which may be null.
template <class F>
CUresult EnqueueOn(const char* name, void* stream_handle, std::initializer_list<Range> ranges,
                   const void* host, F run) {
  return OnStream(name, stream_handle, [&](Stream& stream) {
    for (const Range& range : ranges) {
      if (const CUresult result = range.Check(name); result != kSuccess) return result;
    }
    if (!IsHost(host)) {
      return Misuse(kInvalidValue, std::string(name) + " with device memory as the host's");
    }
    return Enqueue(stream, {name, std::move(run)});
  });
}

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* memory, size_t bytes) {
  return OutsideCapture("cuMemAlloc_v2", [&] {
    if (bytes == 0) return Misuse(kInvalidValue, "cuMemAlloc of nothing");
    if (bytes > kMostBytes) return kOutOfMemory;
    *memory = TheState().memory.Allocate(bytes);
    return kSuccess;
  });
}

// The real one waits for the device. Who counts on that is noted.
CUresult cuMemFree_v2(CUdeviceptr memory) {
  return OutsideCapture("cuMemFree_v2", [&] {
    State& s = TheState();
    if (!s.pending.empty()) Note("cuMemFree with work under way");
    RunPending(nullptr);
    const std::string why_not = s.memory.Free(memory);
    return why_not.empty() ? kSuccess : Misuse(kInvalidValue, "cuMemFree of what " + why_not);
  });
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return OutsideCapture("cuMemHostAlloc", [&] {
    constexpr unsigned kDeviceMap = 2;
    if (bytes == 0) return Misuse(kInvalidValue, "cuMemHostAlloc of nothing");
    if ((flags & kDeviceMap) == 0) {
      return Misuse(kInvalidValue, "cuMemHostAlloc of memory that is not mapped");
    }
    *memory = reinterpret_cast<void*>(TheState().memory.AllocateOnHost(bytes));
    return kSuccess;
  });
}

CUresult cuMemFreeHost(void* memory) {
  return OutsideCapture("cuMemFreeHost", [&] {
    RunPending(nullptr);
    const std::string why_not = TheState().memory.Free(reinterpret_cast<uint64_t>(memory));
    return why_not.empty() ? kSuccess : Misuse(kInvalidValue, "cuMemFreeHost of what " + why_not);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, void* stream) {
  const Range to{at, bytes};
  return EnqueueOn("cuMemsetD8Async", stream, {to}, nullptr,
                   [=] { std::memset(to.Write(), value, bytes); });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr at, const void* from, size_t bytes, void* stream) {
  const Range to{at, bytes};
  return EnqueueOn("cuMemcpyHtoDAsync_v2", stream, {to}, from,
                   [=] { std::memcpy(to.Write(), from, bytes); });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr at, size_t bytes, void* stream) {
  const Range from{at, bytes};
  return EnqueueOn("cuMemcpyDtoHAsync_v2", stream, {from}, to,
                   [=] { std::memcpy(to, from.Read(), bytes); });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to_at, CUdeviceptr from_at, size_t bytes, void* stream) {
  const Range to{to_at, bytes}, from{from_at, bytes};
  return EnqueueOn("cuMemcpyDtoDAsync_v2", stream, {to, from}, nullptr,
                   [=] { std::memmove(to.Write(), from.Read(), bytes); });
}

CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** data, CUdeviceptr pointer) {
  return InContext("cuPointerGetAttributes", [&] {
    constexpr int kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9;
    const bool known = TheState().memory.Covering(pointer, 1) != nullptr;
    for (unsigned n = 0; n < count; ++n) {
      auto* value = static_cast<int*>(data[n]);
      switch (attributes[n]) {
        case kMemoryType:
          *value = known ? 2 : 0;
          break;
        case kIsManaged:
          *value = 0;
          break;
        case kDeviceOrdinal:
          *value = known ? 0 : -2;
          break;
        default:
          return Misuse(kInvalidValue, StrCat("pointer attribute ", attributes[n]));
      }
    }
    return kSuccess;
  });
}

}  // extern "C"

}  // namespace kvant::ptxemu
