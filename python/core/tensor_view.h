// Python's tensors as DLPack describes them.
#ifndef KVANT_PYTHON_CORE_TENSOR_VIEW_H_
#define KVANT_PYTHON_CORE_TENSOR_VIEW_H_

#include <kvant/integrations/c/kvant_c.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "exchange.h"

namespace kvant_python {

namespace nb = nanobind;

// What a tensor is for.
struct Use {
  std::string name;                 // "input 'q'", for errors
  bool written = false;             // refused if read-only
  kvant_type number = KVANT_UNDEF;  // a host scalar's type: a Python number will do
};

// A tensor of the caller's while kvant runs. Nothing is copied; the object is kept alive, and its
// buffer where it has one.
class TensorView {
 public:
  TensorView() = default;
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  // Throws kvant.Error in words. `use` is read in this call only.
  void Read(nb::handle object, const Use& use);
  const DLTensor& tensor() const { return tensor_; }
  // The stream that the tensor's framework works on now; null for memory of the host.
  void* stream() const;

 private:
  struct Buffer;
  struct FreeBuffer {
    void operator()(Buffer* buffer) const;
  };

  void ReadNumber(const Use& use);
  bool ReadBuffer(const Use& use);
  bool ReadBytes(const Use& use);
  void ReadCapsule(const Use& use);

  DLTensor tensor_;
  const dlpack::ExchangeApi* api_ = nullptr;
  nb::object object_, capsule_;
  std::unique_ptr<Buffer, FreeBuffer> buffer_;
  union {
    float f32;
    int32_t s32;
    int64_t s64;
  } number_;
};

}  // namespace kvant_python

#endif  // KVANT_PYTHON_CORE_TENSOR_VIEW_H_
