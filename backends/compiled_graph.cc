#include "kvant/backends/compiled_graph.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/engine.h"
#include "kvant/backends/signature.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr size_t kAlignment = 64;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What one partition hands on to others: alive from the step that writes it to the last that reads.
struct Handed {
  TensorId id = 0;
  size_t bytes = 0;
  size_t first = 0, last = 0;
  size_t at = 0;
};

// Gives each the lowest place that is free while it is alive, the largest first; how far they
// reach.
size_t PlaceAll(std::vector<Handed>& all) {
  std::stable_sort(all.begin(), all.end(),
                   [](const Handed& a, const Handed& b) { return a.bytes > b.bytes; });
  size_t reach = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    Handed& one = all[i];
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t j = 0; j < i; ++j) {
        const Handed& other = all[j];
        const bool together = one.first <= other.last && other.first <= one.last;
        if (!together || one.at >= other.at + other.bytes || other.at >= one.at + one.bytes) {
          continue;
        }
        one.at = other.at + other.bytes;
        moved = true;
      }
    }
    reach = std::max(reach, one.at + one.bytes);
  }
  return reach;
}

absl::Status NothingToRun() {
  return MakeError(ErrorKind::kInvalidArguments,
                   "the compiled graph has nothing to run: it was made by default or moved from");
}

}  // namespace

struct CompiledGraph::State {
  Graph graph;
  std::vector<CompiledPartition> partitions;
  std::vector<std::string> misses;
  std::vector<Step> steps;  // of each partition
  std::unique_ptr<Signature> signature;
};

absl::StatusOr<CompiledGraph> CompiledGraph::Make(const Engine& engine, Graph graph,
                                                  std::vector<CompiledPartition> partitions,
                                                  std::vector<std::string> explanations) {
  auto state = std::make_shared<State>();
  state->graph = std::move(graph);
  state->partitions = std::move(partitions);
  state->misses = std::move(explanations);
  const Graph& known = state->graph;

  absl::flat_hash_map<TensorId, Place> places;
  for (size_t i = 0; i < known.inputs().size(); ++i) {
    places[known.inputs()[i]] = {Place::In::kInputs, i};
  }
  for (size_t i = 0; i < known.outputs().size(); ++i) {
    places[known.outputs()[i]] = {Place::In::kOutputs, i};
  }
  // What is left lies in the scratch.
  absl::flat_hash_map<TensorId, Handed> handed;
  size_t alignment = 1;
  for (size_t step = 0; step < state->partitions.size(); ++step) {
    const CompiledPartition& compiled = state->partitions[step];
    const Partition& partition = compiled.partition();
    alignment = std::max(alignment, compiled.executable_->alignment());
    for (const TensorId id : partition.inputs()) {
      if (const auto found = handed.find(id); found != handed.end()) found->second.last = step;
    }
    for (size_t port = 0; port < partition.outputs().size(); ++port) {
      const LogicalTensor& tensor = partition.output(static_cast<int>(port));
      if (places.contains(tensor.id)) continue;
      if (const Op& last = partition.ops().ops().back(); last.kind == OpKind::kAppend) {
        return MakeError(ErrorKind::kInvalidGraph,
                         absl::StrCat(last.ToString(), ": tensor ", tensor.id,
                                      ", which it writes a part of, is no output of the graph"));
      }
      const auto bytes = Aligned(static_cast<size_t>(tensor.memory_bytes()));
      handed[tensor.id] = {tensor.id, bytes, step, step, 0};
    }
  }
  std::vector<Handed> all;
  for (const auto& [id, one] : handed) all.push_back(one);
  std::sort(all.begin(), all.end(), [](const Handed& a, const Handed& b) {
    return a.first != b.first ? a.first < b.first : a.id < b.id;
  });
  size_t scratch = PlaceAll(all);
  for (const Handed& one : all) places[one.id] = {Place::In::kScratch, one.at};

  for (const CompiledPartition& compiled : state->partitions) {
    Step& step = state->steps.emplace_back();
    for (const TensorId id : compiled.partition().inputs()) {
      const auto found = places.find(id);
      if (found == places.end()) {
        return absl::InternalError(absl::StrCat("nothing writes tensor ", id));
      }
      step.inputs.push_back(found->second);
    }
    for (const TensorId id : compiled.partition().outputs()) step.outputs.push_back(places.at(id));
    // Each its own, which it finds as it left it.
    step.scratch_at = scratch;
    scratch += Aligned(compiled.scratch_bytes());
  }
  state->signature = std::make_unique<Signature>("graph", engine, scratch);
  for (const TensorId id : known.inputs()) {
    state->signature->AddInput(known.tensor(id), alignment);
  }
  for (const TensorId id : known.outputs()) {
    state->signature->AddOutput(known.tensor(id), alignment);
  }
  CompiledGraph compiled;
  compiled.state_ = std::move(state);
  return compiled;
}

const Graph& CompiledGraph::graph() const {
  static const auto* const none = new Graph();
  return state_ ? state_->graph : *none;
}

const std::vector<CompiledPartition>& CompiledGraph::partitions() const {
  static const auto* const none = new std::vector<CompiledPartition>();
  return state_ ? state_->partitions : *none;
}

bool CompiledGraph::fused() const {
  return state_ && std::all_of(partitions().begin(), partitions().end(),
                               [](const CompiledPartition& one) { return one.fused(); });
}

double CompiledGraph::rounding() const {
  double most = 0;
  for (const CompiledPartition& one : partitions()) most = std::max(most, one.rounding());
  return most;
}

std::vector<std::string> CompiledGraph::explanations() const {
  std::vector<std::string> all;
  for (const CompiledPartition& one : partitions()) all.push_back(one.ToString());
  if (state_) all.insert(all.end(), state_->misses.begin(), state_->misses.end());
  return all;
}

std::string CompiledGraph::ToString() const {
  return state_ ? absl::StrJoin(explanations(), "\n") : "nothing to run";
}

size_t CompiledGraph::scratch_bytes() const {
  return state_ ? state_->signature->scratch_bytes() : 0;
}

absl::Status CompiledGraph::Execute(const Stream& stream, absl::Span<const ConstTensor> inputs,
                                    absl::Span<const Tensor> outputs,
                                    absl::Span<std::byte> scratch) const {
  return WithoutExceptions([&] { return CheckedExecute(stream, inputs, outputs, scratch); });
}

absl::Status CompiledGraph::Execute(const Stream& stream, NamedInputs inputs,
                                    NamedOutputs outputs) const {
  return WithoutExceptions([&]() -> absl::Status {
    if (!state_) return NothingToRun();
    absl::InlinedVector<ConstTensor, 8> in;
    absl::InlinedVector<Tensor, 8> out;
    KVANT_RETURN_IF_ERROR(state_->signature->Arrange(inputs, in));
    KVANT_RETURN_IF_ERROR(state_->signature->Arrange(outputs, out));
    return CheckedExecute(stream, absl::MakeConstSpan(in), absl::MakeConstSpan(out), {});
  });
}

absl::Status CompiledGraph::CheckedExecute(const Stream& stream,
                                           absl::Span<const ConstTensor> inputs,
                                           absl::Span<const Tensor> outputs,
                                           absl::Span<std::byte> scratch) const {
  if (!state_) return NothingToRun();
  KVANT_RETURN_IF_ERROR(state_->signature->Check(stream, inputs, outputs, scratch));
  return state_->signature->WithScratch(stream, scratch, [&](std::byte* block) {
    for (size_t step = 0; step < state_->steps.size(); ++step) {
      KVANT_RETURN_IF_ERROR(RunStep(step, stream, inputs, outputs, block));
    }
    return absl::OkStatus();
  });
}

absl::Status CompiledGraph::RunStep(size_t step, const Stream& stream,
                                    absl::Span<const ConstTensor> inputs,
                                    absl::Span<const Tensor> outputs, std::byte* scratch) const {
  const Step& ports = state_->steps[step];
  absl::InlinedVector<const void*, 16> in;
  for (const Place& place : ports.inputs) {
    in.push_back(place.in == Place::In::kInputs    ? inputs[place.at].data
                 : place.in == Place::In::kOutputs ? outputs[place.at].data
                                                   : scratch + place.at);
  }
  absl::InlinedVector<void*, 4> out;
  for (const Place& place : ports.outputs) {
    out.push_back(place.in == Place::In::kOutputs ? outputs[place.at].data : scratch + place.at);
  }
  const CompiledPartition& compiled = state_->partitions[step];
  std::byte* const own = compiled.scratch_bytes() == 0 ? nullptr : scratch + ports.scratch_at;
  return compiled.Run(stream, in, absl::MakeSpan(out), own);
}

std::ostream& operator<<(std::ostream& out, const CompiledGraph& compiled) {
  return out << compiled.ToString();
}

}  // namespace kvant
