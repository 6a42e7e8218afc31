#include "kvant/tests/ptxemu/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

constexpr size_t kPage = 4096;

uint64_t RoundUp(uint64_t value) { return (value + kPage - 1) / kPage * kPage; }

}  // namespace

DeviceMemory::DeviceMemory() {
  constexpr size_t kRange = size_t{1} << 42;
  void* range =
      mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    std::perror("ptxemu: reserving device addresses");
    std::abort();
  }
  begin_ = next_ = RoundUp(reinterpret_cast<uint64_t>(range));
  end_ = next_ + kRange - kPage;
}

uint64_t DeviceMemory::Allocate(size_t bytes) {
  // Aligned to 256, as the driver promises, and to no more.
  const uint64_t base = next_ + kPage + 256;
  if (bytes > end_ - base) return 0;
  next_ = RoundUp(base + bytes);
  auto made = std::make_unique<Allocation>();
  made->base = base;
  made->bytes = bytes;
  made->data.assign(bytes, 0xcd);
  made->known = ZeroedArray<uint8_t>(bytes);
  made->written = ZeroedArray<uint32_t>(bytes);
  allocations_[base] = std::move(made);
  return base;
}

uint64_t DeviceMemory::AllocateOnHost(size_t bytes) {
  auto made = std::make_unique<Allocation>();
  made->bytes = bytes;
  made->data.assign(bytes, 0xcd);
  made->base = reinterpret_cast<uint64_t>(made->data.data());
  made->known = ZeroedArray<uint8_t>(bytes);
  std::fill_n(made->known.data(), bytes, uint8_t{1});  // what the host stores is not seen
  made->written = ZeroedArray<uint32_t>(bytes);
  made->on_host = true;
  const uint64_t base = made->base;
  allocations_[base] = std::move(made);
  return base;
}

std::string DeviceMemory::Free(uint64_t base) {
  const auto found = allocations_.find(base);
  if (found == allocations_.end()) return "was never allocated";
  Allocation& a = *found->second;
  if (a.freed) return "was freed before";
  if (a.on_host) {  // whose addresses are given out again
    last_ = nullptr;
    allocations_.erase(found);
    return "";
  }
  a.freed = true;
  a.data = {};
  a.known = {};
  a.written = {};
  return "";
}

Allocation* DeviceMemory::Find(uint64_t address) {
  if (last_ != nullptr && address - last_->base < last_->bytes) return last_;
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return nullptr;
  Allocation* const a = std::prev(found)->second.get();
  // Behind the host's there may be anything; of the device's range it is the nearest.
  const bool on_device = address >= begin_ && address < end_;
  if (a->on_host != !on_device || (!on_device && address - a->base >= a->bytes)) return nullptr;
  return last_ = a;
}

Allocation* DeviceMemory::Covering(uint64_t address, size_t bytes) {
  Allocation* a = Find(address);
  if (a == nullptr || a->freed) return nullptr;
  const uint64_t at = address - a->base;
  return at <= a->bytes && bytes <= a->bytes - at ? a : nullptr;
}

std::string DeviceMemory::Describe(uint64_t address) {
  const std::string hex = StrCat("0x", std::hex, address);
  const Allocation* a = Find(address);
  if (a == nullptr) return hex + ", no device memory";
  return StrCat(hex, ", ", address - a->base, " bytes into an allocation of ", a->bytes, " bytes",
                a->freed ? ", freed" : "");
}

size_t DeviceMemory::live() const {
  size_t count = 0;
  for (const auto& [base, a] : allocations_) count += !a->freed;
  return count;
}

}  // namespace kvant::ptxemu
