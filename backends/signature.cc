#include "kvant/backends/signature.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

bool Misaligned(const void* data, size_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment != 0;
}

template <typename... Parts>
absl::Status PortError(const Signature::Port& port, const Parts&... what) {
  const LogicalTensor& tensor = *port.tensor;
  const std::string name = tensor.name.empty() ? "" : absl::StrCat(" '", tensor.name, "'");
  return InvalidArguments(port.role, " ", port.index, name, " (tensor ", tensor.id, ", ",
                          tensor.ToString(), ") ", what...);
}

absl::Status CheckTensor(const Signature::Port& port, const ConstTensor& given) {
  if (port.bytes == 0) return absl::OkStatus();
  if (given.data == nullptr) return PortError(port, "is null");
  if (given.bytes < port.bytes) {
    return PortError(port, "needs ", port.bytes, " bytes, not ", given.bytes);
  }
  if (Misaligned(given.data, port.alignment)) {
    return PortError(port, "is not aligned to ", port.alignment, " bytes");
  }
  return absl::OkStatus();
}

using Ports = absl::Span<const Signature::Port>;

// The port of that name or id, of the inputs or outputs of `what`.
absl::StatusOr<size_t> FindPort(std::string_view what, std::string_view role, Ports ports,
                                std::string_view name) {
  const auto missing = [&](std::string_view why) {
    return InvalidArguments(role, " '", name, "' is ", why, " of the ", what);
  };
  size_t found = ports.size();
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].tensor->name != name || name.empty()) continue;
    if (found != ports.size()) return missing("the name of more than one port");
    found = i;
  }
  if (found != ports.size()) return found;
  TensorId id = 0;
  if (absl::SimpleAtoi(absl::string_view(name.data(), name.size()), &id)) {
    for (size_t i = 0; i < ports.size(); ++i) {
      if (ports[i].tensor->id == id) return i;
    }
  }
  return missing("no port");
}

template <typename T>
absl::Status Arrange(std::string_view what, std::string_view role, Ports ports,
                     absl::Span<const std::pair<std::string_view, T>> named,
                     absl::InlinedVector<T, 8>& tensors) {
  tensors.resize(ports.size());
  absl::InlinedVector<bool, 8> given(ports.size(), false);
  for (const auto& [name, tensor] : named) {
    KVANT_ASSIGN_OR_RETURN(const size_t port, FindPort(what, role, ports, name));
    if (given[port]) return PortError(ports[port], "is given twice");
    given[port] = true;
    tensors[port] = tensor;
  }
  for (size_t port = 0; port < ports.size(); ++port) {
    if (!given[port]) return PortError(ports[port], "is missing");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status NothingToRun(std::string_view what) {
  return InvalidArguments("the compiled ", what,
                          " has nothing to run: it was made by default or moved from");
}

Signature::Signature(std::string_view what, const Engine& engine, const Graph& graph,
                     absl::Span<const TensorId> inputs, absl::Span<const TensorId> outputs,
                     size_t alignment, size_t scratch_bytes)
    : what_(what),
      engine_(engine.identity()),
      executor_(engine.shared_executor()),
      memory_(engine.shared_memory()),
      scratch_bytes_(scratch_bytes),
      pool_(engine.shared_memory()),
      inputs_(inputs.size()) {
  const auto add = [&](std::string_view role, absl::Span<const TensorId> ids) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const LogicalTensor& tensor = graph.tensor(ids[i]);
      const int bits = BitsOf(tensor.type);
      const size_t of_element = bits > 8 ? bits / 8 : 1;
      const bool on_host = tensor.property == Property::kHostScalar;
      ports_.push_back({role, i, &tensor, static_cast<size_t>(tensor.memory_bytes()),
                        on_host ? of_element : std::max(of_element, alignment), on_host});
    }
  };
  add("input", inputs);
  add("output", outputs);
}

absl::Status Signature::Check(const Stream& stream, absl::Span<const ConstTensor> inputs,
                              absl::Span<const Tensor> outputs,
                              absl::Span<std::byte> scratch) const {
  if (stream.engine() != engine_) {
    return InvalidArguments("the stream is of another engine than the compiled ", what_);
  }
  const auto count = [this](const char* ports, size_t given, size_t needed) {
    if (given == needed) return absl::OkStatus();
    return InvalidArguments("the ", what_, " has ", needed, " ", ports, ", not ", given);
  };
  KVANT_RETURN_IF_ERROR(count("inputs", inputs.size(), inputs_));
  KVANT_RETURN_IF_ERROR(count("outputs", outputs.size(), ports_.size() - inputs_));
  absl::InlinedVector<const void*, 24> on_device(ports_.size());
  for (size_t i = 0; i < ports_.size(); ++i) {
    const ConstTensor given = i < inputs_ ? inputs[i] : ConstTensor(outputs[i - inputs_]);
    KVANT_RETURN_IF_ERROR(CheckTensor(ports_[i], given));
    if (ports_[i].bytes > 0 && !ports_[i].on_host) on_device[i] = given.data;
  }
  if (memory_->asynchronous()) {
    const auto unreachable = memory_->FindUnreachable(on_device);
    if (unreachable) return PortError(ports_[unreachable->index], unreachable->why);
  }
  if (scratch.data() == nullptr) return absl::OkStatus();
  if (scratch.size() < scratch_bytes_) {
    return InvalidArguments("scratch needs ", scratch_bytes_, " bytes, not ", scratch.size());
  }
  if (!Misaligned(scratch.data(), kScratchAlignment)) return absl::OkStatus();
  return InvalidArguments("scratch is not aligned to ", kScratchAlignment, " bytes");
}

absl::Status Signature::InPortOrder(
    CompiledPartition::NamedInputs inputs, CompiledPartition::NamedOutputs outputs,
    absl::FunctionRef<absl::Status(absl::Span<const ConstTensor>, absl::Span<const Tensor>)> body)
    const {
  absl::InlinedVector<ConstTensor, 8> in;
  absl::InlinedVector<Tensor, 8> out;
  const Ports ports = ports_;
  KVANT_RETURN_IF_ERROR(Arrange(what_, "input", ports.first(inputs_), inputs, in));
  KVANT_RETURN_IF_ERROR(Arrange(what_, "output", ports.subspan(inputs_), outputs, out));
  return body(in, out);
}

absl::Status Signature::WithScratch(const Stream& stream, absl::Span<std::byte> scratch,
                                    absl::FunctionRef<absl::Status(std::byte*)> body) const {
  if (scratch.data() != nullptr || scratch_bytes_ == 0) return body(scratch.data());
  return pool_.Use(scratch_bytes_, stream.native(), body);
}

}  // namespace kvant
