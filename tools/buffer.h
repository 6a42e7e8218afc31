// Memory for tensors, by id.
#ifndef KVANT_TOOLS_BUFFER_H_
#define KVANT_TOOLS_BUFFER_H_

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// Zeroed, 64-byte aligned, movable. A size of 0 has memory too, so that data()
// is never null. Throws std::bad_alloc when there is no memory.
class Buffer {
 public:
  // For a tensor whose shape is known. kResourceExhausted, naming it and its bytes.
  static absl::StatusOr<Buffer> For(const LogicalTensor& tensor) {
    const int64_t bytes = tensor.memory_bytes();
    try {
      return Buffer(static_cast<size_t>(bytes));
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(absl::StrCat("there is not enough memory for ",
                                                       tensor.Label(), ", ", tensor.ToString(),
                                                       ", of ", bytes, " bytes"));
    }
  }

  explicit Buffer(size_t bytes)
      // The form that throws would end the program under the address sanitizer.
      : data_(static_cast<std::byte*>(::operator new(bytes + 1, kAlignment, std::nothrow))),
        bytes_(bytes) {
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes + 1);
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  operator Tensor() { return {.data = data(), .bytes = bytes_}; }       // NOLINT
  operator ConstTensor() const { return ConstTensor(data(), bytes_); }  // NOLINT

  Buffer Copy() const {
    Buffer copy(bytes_);
    std::memcpy(copy.data(), data(), bytes_);
    return copy;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_;
};

// A Buffer is made before it goes in: absl's map is not to be used again, not even destroyed, once
// a constructor has thrown inside it, and a graph may ask for more memory than there is.
using BufferMap = absl::flat_hash_map<TensorId, Buffer>;

}  // namespace kvant

#endif  // KVANT_TOOLS_BUFFER_H_
