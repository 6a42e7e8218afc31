// Tensors: oneDNN's, with what executing needs of them at hand.
#include <cstring>

#include "kvant/graph/data_type.h"
#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/handles.h"
#include "kvant/integrations/onednn/names.h"

namespace kvant::dnnl_abi {
namespace {

// `made` is oneDNN's; `value` of a host scalar, whose value oneDNN does not tell.
Status Wrap(TensorHandle made, const TensorDesc& desc, const void* value, TensorHandle* tensor) {
  NextTensor owner(made);
  return Guard([&]() -> Status {
    auto ours = std::make_unique<OurTensor>();
    if (value != nullptr) {
      std::memcpy(&ours->scalar, value, BitsOf(TypeOf(desc.data_type)) / 8);
      ours->data = &ours->scalar;
    } else if (const Status got = next::tensor_get_data_handle(made, &ours->data);
               got != kSuccess) {
      return got;
    }
    ours->next = std::move(owner);
    *tensor = ours.release()->handle();
    return kSuccess;
  });
}

}  // namespace

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_create(TensorHandle* tensor, const TensorDesc* desc,
                                                  dnnl_engine* engine, void* data) {
  if (tensor == nullptr || desc == nullptr) return kInvalidArguments;
  TensorHandle made = nullptr;
  const Status status = next::tensor_create(&made, desc, engine, data);
  return status == kSuccess ? Wrap(made, *desc, nullptr, tensor) : status;
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_create_scalar(TensorHandle* tensor,
                                                         const TensorDesc* desc, void* value) {
  if (tensor == nullptr || desc == nullptr) return kInvalidArguments;
  TensorHandle made = nullptr;
  const Status status = next::tensor_create_scalar(&made, desc, value);
  return status == kSuccess ? Wrap(made, *desc, value, tensor) : status;
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_destroy(TensorHandle tensor) {
  OurTensor* const ours = As<OurTensor>(tensor);
  if (ours == nullptr) return next::tensor_destroy(tensor);
  delete ours;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_get_data_handle(const dnnl_graph_tensor* tensor,
                                                           void** data) {
  return next::tensor_get_data_handle(NextOf<OurTensor>(tensor), data);
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_set_data_handle(TensorHandle tensor, void* data) {
  OurTensor* const ours = As<OurTensor>(tensor);
  const Status status = next::tensor_set_data_handle(NextOf<OurTensor>(tensor), data);
  if (ours == nullptr || status != kSuccess) return status;
  return next::tensor_get_data_handle(ours->next.get(), &ours->data);
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_get_engine(const dnnl_graph_tensor* tensor,
                                                      dnnl_engine** engine) {
  return next::tensor_get_engine(NextOf<OurTensor>(tensor), engine);
}

KVANT_DNNL_EXPORT Status dnnl_graph_tensor_get_logical_tensor(const dnnl_graph_tensor* tensor,
                                                              TensorDesc* desc) {
  return next::tensor_get_logical_tensor(NextOf<OurTensor>(tensor), desc);
}

}  // namespace kvant::dnnl_abi
