#include <string>

#include "kvant/graph/json.h"
#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/files.h"
#include "kvant/tools/graph_runner.h"

namespace kvant {

void GraphArguments::AddGraphTo(CLI::App& command) {
  command.add_option("graph", path, "A graph in oneDNN's JSON; '-' is standard input")->required();
  command.add_option("--in-shapes", overrides.in_shapes,
                     "New shapes and layouts of tensors: ID:DxDxD[*TAG or *STRIDES][+ID:...]");
  command.add_option("--dt", overrides.dt,
                     "New data types of tensors: ID:TYPE[+ID:TYPE...], or TYPE for all of f32, "
                     "bf16 and f16");
  command.add_option("--op-attrs", overrides.op_attrs,
                     "New attributes of ops: OPID:NAME:VALUE[*NAME:VALUE][+OPID:...]");
  command
      .add_option("--grammar", grammar,
                  "native: fuse all that means attention; onednn: fuse "
                  "what oneDNN fuses")
      ->check(CLI::IsMember({"native", "onednn"}))
      ->capture_default_str();
}

void GraphArguments::AddTo(CLI::App& command) {
  AddGraphTo(command);
  command
      .add_option("--backend", backend,
                  "auto: on the CPU, fused where possible, else op by op; one of the others runs "
                  "everything or fails. cuda: the first GPU; cuda_simt: its kernels on the CPU, "
                  "checked and slow")
      ->check(CLI::IsMember({"auto", "cpu", "reference", "oracle", "cuda", "cuda_simt"}))
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads; 0 is one per hardware thread")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

absl::StatusOr<Graph> GraphArguments::Load() const {
  KVANT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxGraphBytes));
  absl::StatusOr<Graph> graph = GraphFromJson(text);
  if (graph.ok()) graph = ApplyOverrides(*graph, overrides);
  if (!graph.ok()) {
    return MakeError(ErrorKindOf(graph.status()), path, ": ", graph.status().message());
  }
  return graph;
}

absl::StatusOr<Engine> GraphArguments::MakeEngine() const {
  return Engine::Create(EngineOptionsFor(backend, threads));
}

PartitionOptions GraphArguments::partition_options() const {
  using Grammar = PartitionOptions::Grammar;
  return {.grammar = grammar == "onednn" ? Grammar::kOneDnn : Grammar::kNative};
}

}  // namespace kvant
