// Times a graph three ways, in turns, over buffers that no cache holds: by kvant as `kvant bench`
// does, by kvant through oneDNN Graph's C functions, and by oneDNN itself through the same
// functions.
//
//   onednn_graph_bench GRAPH KVANT_LIBRARY ONEDNN_LIBRARY CALLS ONEDNN_CALLS
//
// Prints JSON. CALLS is how often each of the first two takes its turn.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/dnnl_replay.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/memory_speed.h"
#include "kvant/tools/random_data.h"
#include "kvant/tools/rotation.h"

namespace kvant {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using dnnl_abi::DnnlEngine;
using dnnl_abi::DnnlReplay;

double Milliseconds(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Run>
absl::Status Time(const Run& run, std::vector<double>* times) {
  const Clock::time_point start = Clock::now();
  KVANT_RETURN_IF_ERROR(run());
  times->push_back(Milliseconds(start));
  return absl::OkStatus();
}

// A graph through a library's functions, with a binding for each copy of the buffers.
struct Client {
  std::unique_ptr<DnnlEngine> engine;
  std::unique_ptr<DnnlReplay> replay;
  std::vector<DnnlReplay::Binding> bindings;
  double compile_us = 0;  // of all partitions again

  absl::Status Open(const std::string& graph_library, const std::string& library,
                    const Graph& graph, const Rotation& rotation) {
    KVANT_ASSIGN_OR_RETURN(const dnnl_abi::DnnlApi api, dnnl_abi::LoadDnnl(graph_library, library));
    KVANT_ASSIGN_OR_RETURN(engine, DnnlEngine::Create(api));
    KVANT_ASSIGN_OR_RETURN(replay, DnnlReplay::Create(*engine, graph));
    std::vector<double> again;
    for (int i = 0; i < 20; ++i) {
      KVANT_RETURN_IF_ERROR(Time([&] { return replay->CompileAgain(); }, &again));
    }
    compile_us = Median(again) * 1e3;
    for (const auto& buffers : rotation.buffers) {
      KVANT_ASSIGN_OR_RETURN(DnnlReplay::Binding binding, replay->Bind(*buffers));
      bindings.push_back(std::move(binding));
    }
    return absl::OkStatus();
  }
};

absl::StatusOr<Json> Bench(char** arguments) {
  const std::string kvant_library = arguments[2], library = arguments[3];
  const int calls = std::atoi(arguments[4]), plain_calls = std::atoi(arguments[5]);
  GraphArguments given;
  given.path = arguments[1];
  KVANT_ASSIGN_OR_RETURN(const Graph graph, given.Load());
  KVANT_ASSIGN_OR_RETURN(const Engine engine, given.MakeEngine());
  KVANT_ASSIGN_OR_RETURN(const GraphRunner runner, GraphRunner::Create(graph, engine));
  KVANT_ASSIGN_OR_RETURN(
      const BufferMap inputs,
      MakeRandomInputs(graph, {.kind = DataKind::kReal, .seed = 1}, engine.executor()));
  const int64_t bytes = PortBytes(graph);
  KVANT_ASSIGN_OR_RETURN(const Rotation rotation, MakeRotation(runner, inputs, bytes));
  Client with, plain;
  KVANT_RETURN_IF_ERROR(with.Open(kvant_library, library, graph, rotation));

  std::vector<double> own, through, others, ratios, read;
  const size_t copies = rotation.bindings.size();
  for (int call = -1; call < calls; ++call) {
    std::vector<double> a, b;
    const size_t at = static_cast<size_t>(call + 1);
    KVANT_RETURN_IF_ERROR(Time([&] { return runner.Run(rotation.bindings[2 * at % copies]); }, &a));
    KVANT_RETURN_IF_ERROR(
        Time([&] { return with.replay->Run(with.bindings[(2 * at + 1) % copies]); }, &b));
    if (call < 0) continue;  // scratch, threads, pages
    own.push_back(a[0]);
    through.push_back(b[0]);
    ratios.push_back(b[0] / a[0]);
    if (call % 8 == 0) read.push_back(MeasureReadGbPerSecond(engine.executor()));
  }
  if (plain_calls > 0) {
    KVANT_RETURN_IF_ERROR(plain.Open(library, library, graph, rotation));
    for (int call = 0; call < plain_calls; ++call) {
      KVANT_RETURN_IF_ERROR(Time([&] { return plain.replay->Run(plain.bindings[0]); }, &others));
    }
  }
  return Json{{"kvant_ms", Median(own)},
              {"through_ms", Median(through)},
              {"ratio_of_medians", Median(through) / Median(own)},
              {"median_ratio", Median(ratios)},
              {"onednn_ms", Median(others)},
              {"onednn_partitions", plain.replay == nullptr ? 0 : plain.replay->parts().size()},
              {"compile_us", with.compile_us},
              {"onednn_compile_us", plain.compile_us},
              {"bytes", bytes},
              {"read_gb_per_s", Median(read)},
              {"kernel", runner.kernels()}};
}

}  // namespace
}  // namespace kvant

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s GRAPH KVANT_LIBRARY ONEDNN_LIBRARY CALLS ONEDNN_CALLS\n",
                 argv[0]);
    return 2;
  }
  const absl::StatusOr<kvant::Json> result = kvant::Bench(argv);
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", std::string(result.status().message()).c_str());
    return 2;
  }
  std::puts(result->dump(2).c_str());
  return 0;
}
