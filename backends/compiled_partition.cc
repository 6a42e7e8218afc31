#include "kvant/backends/compiled_partition.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr size_t kScratchAlignment = 64;

absl::Status InvalidArguments(const std::string& message) {
  return MakeError(ErrorKind::kInvalidArguments, message);
}

bool Misaligned(const void* data, size_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment != 0;
}

std::string PortName(const Partition& partition, bool output, size_t port) {
  const int index = static_cast<int>(port);
  const LogicalTensor& desc = output ? partition.output(index) : partition.input(index);
  const std::string name = desc.name.empty() ? "" : absl::StrCat(" '", desc.name, "'");
  return absl::StrCat(output ? "output " : "input ", port, name, " (tensor ", desc.id, ", ",
                      desc.ToString(), ")");
}

absl::Status NothingToRun() {
  return InvalidArguments(
      "the compiled partition has nothing to run: it was made by default or moved from");
}

absl::Status CheckCount(bool output, size_t given, size_t ports) {
  if (given == ports) return absl::OkStatus();
  return InvalidArguments(absl::StrCat("the partition has ", ports,
                                       output ? " outputs, not " : " inputs, not ", given));
}

// The port that a name or a decimal id means.
absl::StatusOr<size_t> FindPort(const Partition& partition, bool output, std::string_view name) {
  const std::vector<TensorId>& ids = output ? partition.outputs() : partition.inputs();
  const auto missing = [&](std::string_view what) {
    return InvalidArguments(absl::StrCat(output ? "output '" : "input '", std::string(name),
                                         "' is ", std::string(what), " of the partition"));
  };
  size_t found = ids.size();
  for (size_t i = 0; i < ids.size(); ++i) {
    const int index = static_cast<int>(i);
    const LogicalTensor& desc = output ? partition.output(index) : partition.input(index);
    if (desc.name != name || name.empty()) continue;
    if (found != ids.size()) return missing("the name of more than one port");
    found = i;
  }
  if (found != ids.size()) return found;
  TensorId id = 0;
  if (absl::SimpleAtoi(absl::string_view(name.data(), name.size()), &id)) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == id) return i;
    }
  }
  return missing("no port");
}

// Puts tensors given by name into port order.
template <typename T>
absl::Status Arrange(const Partition& partition, bool output,
                     std::initializer_list<std::pair<std::string_view, T>> named,
                     absl::InlinedVector<T, 8>& tensors) {
  const std::vector<TensorId>& ids = output ? partition.outputs() : partition.inputs();
  tensors.resize(ids.size());
  absl::InlinedVector<bool, 8> given(ids.size(), false);
  for (const auto& [name, tensor] : named) {
    KVANT_ASSIGN_OR_RETURN(const size_t port, FindPort(partition, output, name));
    if (given[port]) {
      return InvalidArguments(PortName(partition, output, port) + " is given twice");
    }
    given[port] = true;
    tensors[port] = tensor;
  }
  for (size_t port = 0; port < ids.size(); ++port) {
    if (!given[port]) return InvalidArguments(PortName(partition, output, port) + " is missing");
  }
  return absl::OkStatus();
}

}  // namespace

// Blocks of scratch. On the host those that are not in use: as many come to exist as executions
// ever run at once. Where executions run later, one per stream: what is put onto a stream runs in
// order and may share it.
struct CompiledPartition::ScratchPool {
  explicit ScratchPool(std::shared_ptr<DeviceMemory> memory) : memory(std::move(memory)) {}
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  ~ScratchPool() {
    for (void* block : blocks) memory->Free(block);
    for (const auto& [stream, block] : of_stream) memory->Free(block);
  }

  absl::StatusOr<void*> Take(size_t bytes, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (memory->asynchronous()) {
      if (const auto found = of_stream.find(stream); found != of_stream.end()) {
        return found->second;
      }
      of_stream.reserve(of_stream.size() + 1);
      KVANT_ASSIGN_OR_RETURN(void* block, memory->Allocate(bytes));
      of_stream.emplace(stream, block);
      return block;
    }
    if (blocks.empty()) {
      blocks.reserve(lent + 1);  // so that there is room for all that come back
      KVANT_ASSIGN_OR_RETURN(void* block, memory->Allocate(bytes));
      ++lent;
      return block;
    }
    void* block = blocks.back();
    blocks.pop_back();
    ++lent;
    return block;
  }

  // A block that an execution left as the next one expects it, or not.
  void Return(void* block, bool intact) {
    if (memory->asynchronous()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    --lent;
    if (intact) {
      blocks.push_back(block);
    } else {
      memory->Free(block);
    }
  }

  const std::shared_ptr<DeviceMemory> memory;
  std::mutex mutex;  // of what follows
  std::vector<void*> blocks;
  size_t lent = 0;
  absl::flat_hash_map<void*, void*> of_stream;
};

void CompiledPartition::Prepare(const Engine& engine) {
  executor_ = engine.shared_executor();
  memory_ = engine.shared_memory();
  pool_ = std::make_shared<ScratchPool>(memory_);
  scratch_bytes_ = executable_->scratch_bytes(executor_->max_concurrency());
  const auto requirement = [this](const LogicalTensor& port) {
    const int bits = BitsOf(port.type);
    const size_t of_element = bits > 8 ? bits / 8 : 1;
    const bool on_host = port.property == Property::kHostScalar;
    return Requirement{static_cast<size_t>(port.memory_bytes()),
                       on_host ? of_element : std::max(of_element, executable_->alignment()),
                       on_host};
  };
  for (size_t i = 0; i < partition_->inputs().size(); ++i) {
    input_requirements_.push_back(requirement(partition_->input(static_cast<int>(i))));
  }
  for (size_t i = 0; i < partition_->outputs().size(); ++i) {
    output_requirements_.push_back(requirement(partition_->output(static_cast<int>(i))));
  }
}

absl::Status CompiledPartition::CheckTensor(bool output, size_t port, const void* data,
                                            size_t bytes) const {
  const Requirement& need = output ? output_requirements_[port] : input_requirements_[port];
  if (need.bytes == 0) return absl::OkStatus();
  if (data == nullptr) {
    return InvalidArguments(PortName(*partition_, output, port) + " is null");
  }
  if (bytes < need.bytes) {
    return InvalidArguments(absl::StrCat(PortName(*partition_, output, port), " needs ", need.bytes,
                                         " bytes, not ", bytes));
  }
  if (Misaligned(data, need.alignment)) {
    return InvalidArguments(absl::StrCat(PortName(*partition_, output, port), " is not aligned to ",
                                         need.alignment, " bytes"));
  }
  if (need.on_host || !memory_->asynchronous()) return absl::OkStatus();
  if (const std::string why = memory_->WhyUnreachable(data); !why.empty()) {
    return InvalidArguments(absl::StrCat(PortName(*partition_, output, port), " ", why));
  }
  return absl::OkStatus();
}

absl::Status CompiledPartition::Run(const Stream& stream, absl::Span<const void* const> inputs,
                                    absl::Span<void* const> outputs,
                                    absl::Span<std::byte> scratch) const {
  const ExecutionPlace place{*executor_, stream.native()};
  if (scratch.data() != nullptr) {
    if (scratch.size() < scratch_bytes_) {
      return InvalidArguments(
          absl::StrCat("scratch needs ", scratch_bytes_, " bytes, not ", scratch.size()));
    }
    if (Misaligned(scratch.data(), kScratchAlignment)) {
      return InvalidArguments("scratch is not aligned to 64 bytes");
    }
    return executable_->Run(place, inputs, outputs, scratch.data());
  }
  if (scratch_bytes_ == 0) return executable_->Run(place, inputs, outputs, nullptr);
  KVANT_ASSIGN_OR_RETURN(void* block, pool_->Take(scratch_bytes_, stream.native()));
  bool intact = false;
  const absl::Cleanup give_back = [&] { pool_->Return(block, intact); };
  absl::Status done = executable_->Run(place, inputs, outputs, static_cast<std::byte*>(block));
  intact = true;
  return done;
}

absl::Status CompiledPartition::Execute(const Stream& stream, absl::Span<const ConstTensor> inputs,
                                        absl::Span<const Tensor> outputs,
                                        absl::Span<std::byte> scratch) const {
  return WithoutExceptions([&] { return CheckedExecute(stream, inputs, outputs, scratch); });
}

absl::Status CompiledPartition::CheckedExecute(const Stream& stream,
                                               absl::Span<const ConstTensor> inputs,
                                               absl::Span<const Tensor> outputs,
                                               absl::Span<std::byte> scratch) const {
  if (!runs()) return NothingToRun();
  if (stream.shared_executor() != executor_) {
    return InvalidArguments("the stream is of another engine than the compiled partition");
  }
  KVANT_RETURN_IF_ERROR(CheckCount(false, inputs.size(), input_requirements_.size()));
  KVANT_RETURN_IF_ERROR(CheckCount(true, outputs.size(), output_requirements_.size()));
  absl::InlinedVector<const void*, 16> in(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckTensor(false, i, inputs[i].data, inputs[i].bytes));
    in[i] = inputs[i].data;
  }
  absl::InlinedVector<void*, 4> out(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckTensor(true, i, outputs[i].data, outputs[i].bytes));
    out[i] = outputs[i].data;
  }
  return Run(stream, in, absl::MakeSpan(out), scratch);
}

absl::Status CompiledPartition::Execute(const Stream& stream, NamedInputs inputs,
                                        NamedOutputs outputs) const {
  return WithoutExceptions([&]() -> absl::Status {
    if (!runs()) return NothingToRun();
    absl::InlinedVector<ConstTensor, 8> in;
    absl::InlinedVector<Tensor, 8> out;
    KVANT_RETURN_IF_ERROR(Arrange(*partition_, false, inputs, in));
    KVANT_RETURN_IF_ERROR(Arrange(*partition_, true, outputs, out));
    return CheckedExecute(stream, absl::MakeConstSpan(in), absl::MakeConstSpan(out), {});
  });
}

const Partition& CompiledPartition::partition() const {
  static const auto* const none = new Partition();
  return runs() ? *partition_ : *none;
}

std::string CompiledPartition::ToString() const {
  if (!runs()) return "nothing to run";
  std::string text = absl::StrCat(fused() ? "fused " : "not fused: ", partition_->pattern(), "; ",
                                  std::string(backend()), ", ", kernel());
  if (!passed_over_.empty()) {
    absl::StrAppend(&text, "; passed over: ", absl::StrJoin(passed_over_, "; "));
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const CompiledPartition& compiled) {
  return out << compiled.ToString();
}

}  // namespace kvant
