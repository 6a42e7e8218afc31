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

Signature::Port MakePort(const LogicalTensor& tensor, size_t alignment) {
  const int bits = BitsOf(tensor.type);
  const size_t of_element = bits > 8 ? bits / 8 : 1;
  const bool on_host = tensor.property == Property::kHostScalar;
  return {&tensor, static_cast<size_t>(tensor.memory_bytes()),
          on_host ? of_element : std::max(of_element, alignment), on_host};
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
      pool_(engine.shared_memory()) {
  for (const TensorId id : inputs) inputs_.push_back(MakePort(graph.tensor(id), alignment));
  for (const TensorId id : outputs) outputs_.push_back(MakePort(graph.tensor(id), alignment));
}

std::string Signature::NameOf(bool output, size_t port) const {
  const LogicalTensor& tensor = *(output ? outputs_ : inputs_)[port].tensor;
  const std::string name = tensor.name.empty() ? "" : absl::StrCat(" '", tensor.name, "'");
  return absl::StrCat(output ? "output " : "input ", port, name, " (tensor ", tensor.id, ", ",
                      tensor.ToString(), ")");
}

absl::Status Signature::CheckTensor(bool output, size_t port, const void* data,
                                    size_t bytes) const {
  const Port& need = (output ? outputs_ : inputs_)[port];
  if (need.bytes == 0) return absl::OkStatus();
  if (data == nullptr) return InvalidArguments(NameOf(output, port), " is null");
  if (bytes < need.bytes) {
    return InvalidArguments(NameOf(output, port), " needs ", need.bytes, " bytes, not ", bytes);
  }
  if (Misaligned(data, need.alignment)) {
    return InvalidArguments(NameOf(output, port), " is not aligned to ", need.alignment, " bytes");
  }
  return absl::OkStatus();
}

absl::Status Signature::CheckReachable(absl::Span<const ConstTensor> inputs,
                                       absl::Span<const Tensor> outputs) const {
  absl::InlinedVector<const void*, 16> pointers;
  absl::InlinedVector<std::pair<bool, size_t>, 16> ports;
  const auto add = [&](bool output, size_t port, const void* data) {
    const Port& need = (output ? outputs_ : inputs_)[port];
    if (need.bytes == 0 || need.on_host) return;
    pointers.push_back(data);
    ports.emplace_back(output, port);
  };
  for (size_t i = 0; i < inputs.size(); ++i) add(false, i, inputs[i].data);
  for (size_t i = 0; i < outputs.size(); ++i) add(true, i, outputs[i].data);
  if (pointers.empty()) return absl::OkStatus();
  const std::optional<DeviceMemory::Unreachable> found = memory_->FindUnreachable(pointers);
  if (!found) return absl::OkStatus();
  const auto [output, port] = ports[found->index];
  return InvalidArguments(NameOf(output, port), " ", found->why);
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
  KVANT_RETURN_IF_ERROR(count("inputs", inputs.size(), inputs_.size()));
  KVANT_RETURN_IF_ERROR(count("outputs", outputs.size(), outputs_.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckTensor(false, i, inputs[i].data, inputs[i].bytes));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckTensor(true, i, outputs[i].data, outputs[i].bytes));
  }
  if (memory_->asynchronous()) KVANT_RETURN_IF_ERROR(CheckReachable(inputs, outputs));
  if (scratch.data() == nullptr) return absl::OkStatus();
  if (scratch.size() < scratch_bytes_) {
    return InvalidArguments("scratch needs ", scratch_bytes_, " bytes, not ", scratch.size());
  }
  if (!Misaligned(scratch.data(), kScratchAlignment)) return absl::OkStatus();
  return InvalidArguments("scratch is not aligned to ", kScratchAlignment, " bytes");
}

absl::StatusOr<size_t> Signature::FindPort(bool output, std::string_view name) const {
  const std::vector<Port>& ports = output ? outputs_ : inputs_;
  const auto missing = [&](std::string_view why) {
    return InvalidArguments(output ? "output '" : "input '", name, "' is ", why, " of the ", what_);
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
absl::Status Signature::Arrange(bool output, absl::Span<const std::pair<std::string_view, T>> named,
                                absl::InlinedVector<T, 8>& tensors) const {
  const size_t ports = (output ? outputs_ : inputs_).size();
  tensors.resize(ports);
  absl::InlinedVector<bool, 8> given(ports, false);
  for (const auto& [name, tensor] : named) {
    KVANT_ASSIGN_OR_RETURN(const size_t port, FindPort(output, name));
    if (given[port]) return InvalidArguments(NameOf(output, port), " is given twice");
    given[port] = true;
    tensors[port] = tensor;
  }
  for (size_t port = 0; port < ports; ++port) {
    if (!given[port]) return InvalidArguments(NameOf(output, port), " is missing");
  }
  return absl::OkStatus();
}

absl::Status Signature::InPortOrder(
    CompiledPartition::NamedInputs inputs, CompiledPartition::NamedOutputs outputs,
    absl::FunctionRef<absl::Status(absl::Span<const ConstTensor>, absl::Span<const Tensor>)> body)
    const {
  absl::InlinedVector<ConstTensor, 8> in;
  absl::InlinedVector<Tensor, 8> out;
  KVANT_RETURN_IF_ERROR(Arrange(false, inputs, in));
  KVANT_RETURN_IF_ERROR(Arrange(true, outputs, out));
  return body(in, out);
}

absl::Status Signature::WithScratch(const Stream& stream, absl::Span<std::byte> scratch,
                                    absl::FunctionRef<absl::Status(std::byte*)> body) const {
  if (scratch.data() != nullptr || scratch_bytes_ == 0) return body(scratch.data());
  return pool_.Use(scratch_bytes_, stream.native(), body);
}

}  // namespace kvant
