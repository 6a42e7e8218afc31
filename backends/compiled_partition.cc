#include "kvant/backends/compiled_partition.h"

#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/engine.h"
#include "kvant/backends/index_checks.h"
#include "kvant/backends/signature.h"
#include "kvant/graph/status.h"
#include "kvant/graph/verbose.h"

namespace kvant {

void CompiledPartition::Prepare(const Engine& engine) {
  signature_ = std::make_shared<Signature>(
      "partition", engine, partition_->ops(), partition_->inputs(), partition_->outputs(),
      executable_->alignment(), executable_->scratch_bytes(engine.executor().max_concurrency()));
  if (engine.device() == Device::kCuda) return;
  index_checks_ = std::make_shared<IndexChecks>(*partition_, fused());
}

absl::Status CompiledPartition::CheckIndices(absl::Span<const void* const> inputs) const {
  return index_checks_ == nullptr ? absl::OkStatus() : index_checks_->Check(inputs);
}

size_t CompiledPartition::scratch_bytes() const { return runs() ? signature_->scratch_bytes() : 0; }

absl::Status CompiledPartition::Execute(const Stream& stream, absl::Span<const ConstTensor> inputs,
                                        absl::Span<const Tensor> outputs,
                                        absl::Span<std::byte> scratch) const {
  return WithoutExceptions([&] {
    if (!runs()) return NothingToRun("partition");
    KVANT_RETURN_IF_ERROR(signature_->Check(stream, inputs, outputs, scratch));
    absl::InlinedVector<const void*, 16> in(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) in[i] = inputs[i].data;
    absl::InlinedVector<void*, 4> out(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) out[i] = outputs[i].data;
    KVANT_RETURN_IF_ERROR(CheckIndices(in));
    return signature_->WithScratch(stream, scratch, [&](std::byte* block) {
      return Run(stream, in, absl::MakeSpan(out), block);
    });
  });
}

absl::Status CompiledPartition::Run(const Stream& stream, absl::Span<const void* const> inputs,
                                    absl::Span<void* const> outputs, std::byte* scratch) const {
  const VerboseEvent event("execute");
  absl::Status done =
      executable_->Run({signature_->executor(), inputs, outputs, scratch, stream.native()});
  event.Done([&] {
    return absl::StrCat(std::string(backend()), ",", partition_->pattern(), done.ok() ? "" : ": ",
                        std::string(done.message()));
  });
  return done;
}

absl::Status CompiledPartition::Execute(const Stream& stream, NamedInputs inputs,
                                        NamedOutputs outputs) const {
  return WithoutExceptions([&] {
    if (!runs()) return NothingToRun("partition");
    return signature_->InPortOrder(inputs, outputs,
                                   [&](auto in, auto out) { return Execute(stream, in, out); });
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

}  // namespace kvant
