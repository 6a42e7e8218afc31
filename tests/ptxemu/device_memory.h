// The emulated device's memory.
//
// Device addresses lie in a range that the process may not touch, so a host that follows a device
// pointer crashes. The bytes of an allocation are elsewhere. No address is given out twice, so use
// after free is found.
#ifndef KVANT_TESTS_PTXEMU_DEVICE_MEMORY_H_
#define KVANT_TESTS_PTXEMU_DEVICE_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace kvant::ptxemu {

// An array of zeros. The system zeroes pages of it when they are first touched.
template <class T>
class ZeroedArray {
 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t size) : data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

struct Allocation {
  uint64_t base = 0;
  size_t bytes = 0;
  std::vector<uint8_t> data;
  ZeroedArray<uint8_t> known;     // by byte: something was stored there
  ZeroedArray<uint32_t> written;  // by byte: the last launch that stored there
  bool freed = false;
  bool on_host = false;
};

class DeviceMemory {
 public:
  DeviceMemory();
  // 0: there are no addresses left.
  uint64_t Allocate(size_t bytes);
  // Of the host, at the same address there.
  uint64_t AllocateOnHost(size_t bytes);
  // Why it cannot be freed; empty if it was.
  std::string Free(uint64_t base);
  // The allocation that begins at or below a device address; null for any other address.
  Allocation* Find(uint64_t address);
  // The allocation that holds all of [address, address + bytes), or null.
  Allocation* Covering(uint64_t address, size_t bytes);
  std::string Describe(uint64_t address);
  size_t live() const;

 private:
  uint64_t begin_ = 0, next_ = 0, end_ = 0;
  std::map<uint64_t, std::unique_ptr<Allocation>> allocations_;
  Allocation* last_ = nullptr;  // most finds are of the one before
};

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_DEVICE_MEMORY_H_
