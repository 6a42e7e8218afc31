#include "kvant/backends/compiled_graph.h"

#include <algorithm>
#include <map>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_join.h"
#include "kvant/backends/engine.h"
#include "kvant/backends/loops.h"
#include "kvant/backends/signature.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/graph/status.h"

namespace kvant {

struct CompiledGraph::State {
  Graph graph;
  std::vector<CompiledPartition> partitions;
  std::vector<std::string> misses;
  std::vector<Step> steps;  // of each partition
  std::unique_ptr<Signature> signature;
};

absl::StatusOr<CompiledGraph> CompiledGraph::Make(const Engine& engine, Graph graph,
                                                  std::vector<CompiledPartition> partitions,
                                                  std::vector<std::string> misses) {
  auto state = std::make_shared<State>();
  state->graph = std::move(graph);
  state->partitions = std::move(partitions);
  state->misses = std::move(misses);
  const Graph& known = state->graph;

  absl::flat_hash_map<TensorId, Place> places;
  for (size_t i = 0; i < known.inputs().size(); ++i) {
    places[known.inputs()[i]] = {Place::In::kInputs, i};
  }
  for (size_t i = 0; i < known.outputs().size(); ++i) {
    places[known.outputs()[i]] = {Place::In::kOutputs, i};
  }
  absl::flat_hash_map<TensorId, size_t> last_step;  // that reads it
  for (size_t step = 0; step < state->partitions.size(); ++step) {
    for (const TensorId id : state->partitions[step].partition().inputs()) last_step[id] = step;
  }
  // What is left lies in the scratch, from the step that writes it to the last that reads it. Then
  // its memory is taken again: the smallest block that is large enough.
  std::multimap<size_t, size_t> blocks;  // that are free: bytes -> where
  size_t scratch = 0;
  std::vector<std::multimap<size_t, size_t>> dead_after(state->partitions.size());
  size_t alignment = 1;
  for (size_t step = 0; step < state->partitions.size(); ++step) {
    const CompiledPartition& compiled = state->partitions[step];
    const Partition& partition = compiled.partition();
    alignment = std::max(alignment, compiled.executable_->alignment());
    for (size_t port = 0; port < partition.outputs().size(); ++port) {
      const LogicalTensor& tensor = partition.output(static_cast<int>(port));
      if (places.contains(tensor.id)) continue;
      if (const Op& last = partition.ops().ops().back(); Appends(last.kind)) {
        return MakeError(ErrorKind::kInvalidGraph, last.ToString(), ": ", tensor.Label(),
                         ", which it writes a part of, is no output of the graph");
      }
      const size_t bytes = RoundUp(static_cast<size_t>(tensor.memory_bytes()), kScratchAlignment);
      auto block = blocks.lower_bound(bytes);
      if (block == blocks.end()) {
        block = blocks.emplace(bytes, scratch);
        scratch += bytes;
      }
      places[tensor.id] = {Place::In::kScratch, block->second};
      dead_after[last_step.at(tensor.id)].insert(blocks.extract(block));
    }
    blocks.merge(dead_after[step]);
  }

  size_t shared = 0;
  for (const CompiledPartition& compiled : state->partitions) {
    Step& step = state->steps.emplace_back();
    for (const TensorId id : compiled.partition().inputs()) step.inputs.push_back(places.at(id));
    for (const TensorId id : compiled.partition().outputs()) step.outputs.push_back(places.at(id));
    const size_t bytes = RoundUp(compiled.scratch_bytes(), kScratchAlignment);
    if (compiled.keeps_scratch()) {
      step.scratch_at = scratch;
      scratch += bytes;
    } else {
      shared = std::max(shared, bytes);
    }
  }
  // Steps run one after another: those that keep nothing in their scratch share one.
  for (size_t step = 0; step < state->steps.size(); ++step) {
    if (!state->partitions[step].keeps_scratch()) state->steps[step].scratch_at = scratch;
  }
  scratch += shared;
  state->signature = std::make_unique<Signature>("graph", engine, known, known.inputs(),
                                                 known.outputs(), alignment, scratch);
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
  return state_ && std::ranges::all_of(partitions(), &CompiledPartition::fused);
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
  return WithoutExceptions([&] {
    if (!state_) return NothingToRun("graph");
    KVANT_RETURN_IF_ERROR(state_->signature->Check(stream, inputs, outputs, scratch));
    for (size_t step = 0; step < state_->steps.size(); ++step) {
      absl::InlinedVector<const void*, 16> given;
      for (const Place& place : state_->steps[step].inputs) {
        given.push_back(place.in == Place::In::kInputs ? inputs[place.at].data : nullptr);
      }
      KVANT_RETURN_IF_ERROR(state_->partitions[step].CheckIndices(given));
    }
    return state_->signature->WithScratch(stream, scratch, [&](std::byte* block) {
      for (size_t step = 0; step < state_->steps.size(); ++step) {
        KVANT_RETURN_IF_ERROR(RunStep(step, stream, inputs, outputs, block));
      }
      return absl::OkStatus();
    });
  });
}

absl::Status CompiledGraph::Execute(const Stream& stream, NamedInputs inputs,
                                    NamedOutputs outputs) const {
  return WithoutExceptions([&] {
    if (!state_) return NothingToRun("graph");
    return state_->signature->InPortOrder(
        inputs, outputs, [&](auto in, auto out) { return Execute(stream, in, out); });
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
  KVANT_RETURN_IF_ERROR(compiled.CheckIndices(in));
  return compiled.Run(stream, in, absl::MakeSpan(out), scratch + ports.scratch_at);
}

}  // namespace kvant
