#include "kvant/tools/dnnl_replay.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/integrations/onednn/names.h"

namespace kvant::dnnl_abi {
namespace {

// What a client says of a tensor.
absl::StatusOr<TensorDesc> Describe(const LogicalTensor& tensor) {
  if (tensor.value) {
    return MakeError(ErrorKind::kUnimplemented, "oneDNN has no constants: ", tensor.Label());
  }
  KVANT_RETURN_IF_ERROR(NumberOf(tensor.type).status());
  return DescOf(tensor);
}

absl::Status SetAttr(const DnnlApi& api, OpHandle op, AttrNumber number, const AttrValue& value) {
  const auto set = [&](const auto& v) -> Status {
    using T = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<T, int64_t>) {
      return api.op_set_attr_s64(op, number, &v, 0);
    } else if constexpr (std::is_same_v<T, float>) {
      return api.op_set_attr_f32(op, number, &v, 0);
    } else if constexpr (std::is_same_v<T, bool>) {
      const uint8_t byte = v;
      return api.op_set_attr_bool(op, number, &byte, 1);
    } else if constexpr (std::is_same_v<T, std::string>) {
      return api.op_set_attr_str(op, number, v.c_str(), v.size() + 1);
    } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
      return api.op_set_attr_s64(op, number, v.data(), v.size());
    } else {
      return api.op_set_attr_f32(op, number, v.data(), v.size());
    }
  };
  return Checked(std::visit(set, value), "set_attr");
}

}  // namespace

absl::Status Checked(Status status, std::string_view call) {
  if (status == kSuccess) return absl::OkStatus();
  return MakeError(
      status == kUnimplemented ? ErrorKind::kUnimplemented : ErrorKind::kInvalidArguments,
      "dnnl_graph ", call, ": status ", status);
}

absl::StatusOr<std::unique_ptr<DnnlEngine>> DnnlEngine::Create(const DnnlApi& api) {
  std::unique_ptr<DnnlEngine> made(new DnnlEngine(api));
  KVANT_RETURN_IF_ERROR(Checked(api.engine_create(&made->engine_, kCpu, 0), "engine_create"));
  KVANT_RETURN_IF_ERROR(
      Checked(api.stream_create(&made->stream_, made->engine_, 1), "stream_create"));
  return made;
}

DnnlEngine::~DnnlEngine() {
  if (stream_ != nullptr) api_.stream_destroy(stream_);
  if (engine_ != nullptr) api_.engine_destroy(engine_);
}

absl::Status DnnlReplay::AddOps() {
  const DnnlApi& api = engine_.api();
  const GraphOptions& options = graph_.options();
  KVANT_RETURN_IF_ERROR(Checked(
      api.graph_create_with_fpmath_mode(&handle_, kCpu, static_cast<FpMathMode>(options.fpmath)),
      "graph_create"));
  if (options.apply_to_int && api.graph_set_fpmath_mode != nullptr) {
    KVANT_RETURN_IF_ERROR(
        Checked(api.graph_set_fpmath_mode(handle_, static_cast<FpMathMode>(options.fpmath), 1),
                "graph_set_fpmath_mode"));
  }
  for (const Op& op : graph_.ops()) {
    KVANT_ASSIGN_OR_RETURN(const KindNumber kind, NumberOf(op.kind));
    OpHandle handle = nullptr;
    KVANT_RETURN_IF_ERROR(
        Checked(api.op_create(&handle, op.id, kind, op.name.c_str()), "op_create"));
    const std::unique_ptr<dnnl_graph_op, Status (*)(OpHandle)> owner(handle, api.op_destroy);
    for (const TensorId id : op.inputs) {
      KVANT_ASSIGN_OR_RETURN(const TensorDesc desc, Describe(graph_.tensor(id)));
      KVANT_RETURN_IF_ERROR(Checked(api.op_add_input(handle, &desc), "op_add_input"));
    }
    for (const TensorId id : op.outputs) {
      KVANT_ASSIGN_OR_RETURN(const TensorDesc desc, Describe(graph_.tensor(id)));
      KVANT_RETURN_IF_ERROR(Checked(api.op_add_output(handle, &desc), "op_add_output"));
    }
    for (const auto& [attr, value] : op.attrs) {
      KVANT_ASSIGN_OR_RETURN(const AttrNumber number, NumberOf(attr));
      KVANT_RETURN_IF_ERROR(SetAttr(api, handle, number, value));
    }
    KVANT_RETURN_IF_ERROR(Checked(api.add_op(handle_, handle), "add_op of " + op.ToString()));
  }
  KVANT_RETURN_IF_ERROR(Checked(api.graph_finalize(handle_), "graph_finalize"));
  return Checked(api.graph_filter(handle_, kFusion), "graph_filter");
}

absl::Status DnnlReplay::ReadParts() {
  const DnnlApi& api = engine_.api();
  size_t count = 0;
  KVANT_RETURN_IF_ERROR(
      Checked(api.graph_get_partition_num(handle_, &count), "graph_get_partition_num"));
  std::vector<PartitionHandle> handles(count);
  if (count == 0) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(
      Checked(api.graph_get_partitions(handle_, count, handles.data()), "graph_get_partitions"));
  for (const PartitionHandle handle : handles) parts_.emplace_back().partition = handle;
  for (Part& part : parts_) {
    size_t ops = 0, inputs = 0, outputs = 0;
    uint8_t supported = 0;
    KVANT_RETURN_IF_ERROR(Checked(api.partition_get_op_num(part.partition, &ops), "get_op_num"));
    KVANT_RETURN_IF_ERROR(
        Checked(api.partition_get_input_ports_num(part.partition, &inputs), "get_input_ports_num"));
    KVANT_RETURN_IF_ERROR(Checked(api.partition_get_output_ports_num(part.partition, &outputs),
                                  "get_output_ports_num"));
    part.ops.resize(ops);
    part.inputs.resize(inputs);
    part.outputs.resize(outputs);
    KVANT_RETURN_IF_ERROR(
        Checked(api.partition_get_ops(part.partition, ops, part.ops.data()), "get_ops"));
    KVANT_RETURN_IF_ERROR(
        Checked(api.partition_get_input_ports(part.partition, inputs, part.inputs.data()),
                "get_input_ports"));
    KVANT_RETURN_IF_ERROR(
        Checked(api.partition_get_output_ports(part.partition, outputs, part.outputs.data()),
                "get_output_ports"));
    KVANT_RETURN_IF_ERROR(Checked(api.partition_get_id(part.partition, &part.id), "get_id"));
    KVANT_RETURN_IF_ERROR(
        Checked(api.partition_is_supported(part.partition, &supported), "is_supported"));
    part.supported = supported != 0;
  }
  return absl::OkStatus();
}

absl::Status DnnlReplay::Compile(Part& part) const {
  const DnnlApi& api = engine_.api();
  if (part.compiled != nullptr) api.compiled_partition_destroy(part.compiled);
  part.compiled = nullptr;
  KVANT_RETURN_IF_ERROR(Checked(api.compiled_partition_create(&part.compiled, part.partition),
                                "compiled_partition_create"));
  std::vector<const TensorDesc*> inputs, outputs;
  for (TensorDesc& port : part.inputs) {
    KVANT_ASSIGN_OR_RETURN(port, Describe(graph_.tensor(port.id)));
    inputs.push_back(&port);
  }
  for (TensorDesc& port : part.outputs) {
    KVANT_ASSIGN_OR_RETURN(port, Describe(graph_.tensor(port.id)));
    outputs.push_back(&port);
  }
  KVANT_RETURN_IF_ERROR(
      Checked(api.partition_compile(part.partition, part.compiled, inputs.size(), inputs.data(),
                                    outputs.size(), outputs.data(), engine_.engine()),
              absl::StrCat("partition_compile of ", part.ops.size(), " ops")));
  if (api.compiled_partition_execute_v2 == nullptr) return absl::OkStatus();
  TensorDesc desc;
  KVANT_RETURN_IF_ERROR(
      Checked(api.compiled_partition_get_scratchpad_logical_tensor(part.compiled, &desc),
              "get_scratchpad_logical_tensor"));
  if (part.scratch != nullptr) api.tensor_destroy(part.scratch);
  part.scratch = nullptr;
  if (desc.dims[0] == 0) return absl::OkStatus();
  return Checked(api.tensor_create(&part.scratch, &desc, engine_.engine(), kAllocate),
                 "tensor_create of a scratchpad");
}

absl::StatusOr<std::unique_ptr<DnnlReplay>> DnnlReplay::Create(const DnnlEngine& engine,
                                                               const Graph& graph) {
  std::unique_ptr<DnnlReplay> made(new DnnlReplay(engine, graph));
  KVANT_RETURN_IF_ERROR(made->AddOps());
  KVANT_RETURN_IF_ERROR(made->ReadParts());
  KVANT_RETURN_IF_ERROR(made->CompileAgain());
  return made;
}

absl::Status DnnlReplay::CompileAgain() {
  for (Part& part : parts_) KVANT_RETURN_IF_ERROR(Compile(part));
  return absl::OkStatus();
}

DnnlReplay::~DnnlReplay() {
  const DnnlApi& api = engine_.api();
  for (const Part& part : parts_) {
    if (part.scratch != nullptr) api.tensor_destroy(part.scratch);
    if (part.compiled != nullptr) api.compiled_partition_destroy(part.compiled);
    api.partition_destroy(part.partition);
  }
  if (handle_ != nullptr) api.graph_destroy(handle_);
}

DnnlReplay::Binding::~Binding() {
  for (const TensorHandle tensor : tensors_) api_.tensor_destroy(tensor);
}

absl::StatusOr<DnnlReplay::Binding> DnnlReplay::Bind(BufferMap& buffers) const {
  const DnnlApi& api = engine_.api();
  Binding binding(api);
  for (const Part& part : parts_) {
    for (const TensorDesc& port : part.outputs) {
      if (buffers.contains(port.id)) continue;
      KVANT_ASSIGN_OR_RETURN(Buffer buffer, Buffer::For(graph_.tensor(port.id)));
      buffers.emplace(port.id, std::move(buffer));
    }
  }
  for (const Part& part : parts_) {
    Binding::Ports& ports = binding.parts_.emplace_back();
    const auto add = [&](const TensorDesc& port,
                         std::vector<const dnnl_graph_tensor*>& to) -> absl::Status {
      const auto found = buffers.find(port.id);
      if (found == buffers.end()) {
        return InvalidArguments("no data for ", port.id);
      }
      TensorHandle tensor = nullptr;
      const bool scalar = port.property == static_cast<PropertyNumber>(Property::kHostScalar);
      KVANT_RETURN_IF_ERROR(Checked(
          scalar ? api.tensor_create_scalar(&tensor, &port, found->second.data())
                 : api.tensor_create(&tensor, &port, engine_.engine(), found->second.data()),
          "tensor_create"));
      binding.tensors_.push_back(tensor);
      to.push_back(tensor);
      return absl::OkStatus();
    };
    for (const TensorDesc& port : part.inputs) KVANT_RETURN_IF_ERROR(add(port, ports.inputs));
    for (const TensorDesc& port : part.outputs) KVANT_RETURN_IF_ERROR(add(port, ports.outputs));
    ports.scratchpad = part.scratch;
  }
  return binding;
}

absl::Status DnnlReplay::Run(const Binding& binding) const {
  const DnnlApi& api = engine_.api();
  for (size_t i = 0; i < parts_.size(); ++i) {
    auto ports = binding.parts_[i];
    const auto execute = [&](auto function, auto... scratchpad) {
      return function(parts_[i].compiled, engine_.stream(), ports.inputs.size(),
                      ports.inputs.data(), ports.outputs.size(), ports.outputs.data(),
                      scratchpad...);
    };
    KVANT_RETURN_IF_ERROR(
        Checked(api.compiled_partition_execute_v2 == nullptr
                    ? execute(api.compiled_partition_execute)
                    : execute(api.compiled_partition_execute_v2, ports.scratchpad),
                "compiled_partition_execute"));
  }
  return Checked(api.stream_wait(engine_.stream()), "stream_wait");
}

}  // namespace kvant::dnnl_abi
