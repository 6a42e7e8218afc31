// Tensors of the ABI: descriptions, and DLPack's with their memory.
#ifndef KVANT_INTEGRATIONS_C_TENSORS_H_
#define KVANT_INTEGRATIONS_C_TENSORS_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/integrations/c/kvant_c.h"

namespace kvant::c {

// kInvalidDataType for what is none of kvant_type.
absl::StatusOr<DataType> TypeOf(kvant_type type);
absl::StatusOr<LogicalTensor> TensorOf(const kvant_tensor& tensor);
// Points into `tensor`.
kvant_tensor Describe(const LogicalTensor& tensor);

// The type of DLPack's, or nothing.
std::optional<DataType> TypeOf(const DLDataType& type);
// "f16[2,3]", and what DLPack calls a type that kvant lacks.
std::string Describe(const DLTensor& tensor);
// "cuda:0".
std::string DeviceText(const DLDevice& device);
// Whether an engine of that device computes on memory of this one.
bool Reaches(const DLDevice& engine, const DLDevice& memory);
inline void* DataOf(const DLTensor& tensor) {
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// What a tensor of an execution has to be like. On the way to a kernel these checks are all that
// costs, so what they compare is laid out beforehand.
class Port {
 public:
  // `name`: "input 'q'" and the like. `device`: where its memory must be. `of_graph`: of one,
  // which could be compiled for other strides.
  Port(std::string name, const LogicalTensor& tensor, const DLDevice& device, bool of_graph = true);

  // Its memory, if type, dims, strides and device are the port's; kInvalidArguments in words
  // otherwise.
  absl::StatusOr<Tensor> Take(const DLTensor* tensor) const;

 private:
  bool HasDims(const DLTensor& tensor, const Dims& dims, const Dims& strides) const;
  bool IsBytes(const DLTensor& tensor) const;
  absl::Status Mismatch(const DLTensor& tensor) const;

  std::string name_;
  DataType type_;
  Dims dims_, strides_;
  // Of the bytes that elements of less than a byte are packed in; none where they are not.
  std::optional<Dims> packed_dims_, packed_strides_;
  DLDataType dl_type_;
  DLDevice device_;
  size_t bytes_;
  bool of_graph_;
};

}  // namespace kvant::c

#endif  // KVANT_INTEGRATIONS_C_TENSORS_H_
