#include "kvant/integrations/onednn/await.h"

#include "kvant/graph/data_type.h"
#include "kvant/integrations/onednn/handles.h"
#include "kvant/integrations/onednn/names.h"

namespace kvant::dnnl_abi {
namespace {

// SYCL's types are in no header here. So oneDNN executes the least that it can, the Abs of one
// number, behind the events and with an event of its own.
class Marker {
 public:
  Status Run(dnnl_stream* stream, const void* deps, void* event) {
    dnnl_engine* engine = nullptr;
    if (Failed(next::stream_get_engine(stream, &engine)) || !Compile(engine)) return status_;
    const dnnl_graph_tensor* in = Allocate(input_, engine, &in_);
    const dnnl_graph_tensor* out = Allocate(output_, engine, &out_);
    if (status_ != kSuccess) return status_;
    Failed(next::sycl_interop_compiled_partition_execute(compiled_.get(), stream, 1, &in, 1, &out,
                                                         deps, event));
    // Its tensors go.
    if (status_ == kSuccess) Failed(next::stream_wait(stream));
    return status_;
  }

 private:
  bool Failed(Status status) {
    status_ = status;
    return status != kSuccess;
  }

  static TensorDesc OneNumber(size_t id) {
    LogicalTensor tensor;
    tensor.id = id;
    tensor.type = DataType::kF32;
    tensor.dims = Dims{1};
    return DescOf(tensor);
  }

  bool Compile(dnnl_engine* engine) {
    OpHandle op = nullptr;
    if (Failed(next::op_create(&op, 0, *NumberOf(OpKind::kAbs), "marker"))) return false;
    const NextOp op_owner(op);
    if (Failed(next::op_add_input(op, &input_)) || Failed(next::op_add_output(op, &output_))) {
      return false;
    }
    PartitionHandle partition = nullptr;
    const bool made = !Failed(next::partition_create_with_op(&partition, op, kCpu));
    const NextPartition partition_owner(partition);
    if (!made) return false;
    CompiledHandle compiled = nullptr;
    if (Failed(next::compiled_partition_create(&compiled, partition))) return false;
    compiled_.reset(compiled);
    const TensorDesc *in = &input_, *out = &output_;
    return !Failed(next::partition_compile(partition, compiled, 1, &in, 1, &out, engine));
  }

  const dnnl_graph_tensor* Allocate(const TensorDesc& desc, dnnl_engine* engine,
                                    NextTensor* owner) {
    TensorHandle made = nullptr;
    if (status_ != kSuccess) return nullptr;
    Failed(next::tensor_create(&made, &desc, engine, kAllocate));
    owner->reset(made);
    return made;
  }

  const TensorDesc input_ = OneNumber(0), output_ = OneNumber(1);
  NextCompiled compiled_;
  NextTensor in_, out_;
  Status status_ = kSuccess;
};

}  // namespace

Status Await(dnnl_stream* stream, const void* deps, void* event) {
  static const bool later = NextVersion().cpu_runtime == kSycl;
  if (!later) return kSuccess;
  if (deps != nullptr || event != nullptr) return Marker().Run(stream, deps, event);
  return next::stream_wait(stream);
}

}  // namespace kvant::dnnl_abi
