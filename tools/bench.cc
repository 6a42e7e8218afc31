// kvant bench: how fast a graph runs, beside how fast memory can be read.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "kvant/graph/status.h"
#include "kvant/tools/command.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/memory_speed.h"
#include "kvant/tools/progress.h"
#include "kvant/tools/random_data.h"
#include "kvant/tools/rotation.h"

namespace kvant {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr size_t kMinRuns = 9;
constexpr size_t kMaxRuns = 1000;
constexpr double kMinSeconds = 0.5;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  double best = 0;
  double median = 0;
};

Times Summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {.best = seconds.front(), .median = seconds[seconds.size() / 2]};
}

absl::StatusOr<Times> TimeRuns(const GraphRunner& runner, const Rotation& rotation) {
  KVANT_RETURN_IF_ERROR(runner.Run(rotation.bindings[0]));  // scratch, threads, pages
  KVANT_RETURN_IF_ERROR(runner.Synchronize());
  std::vector<double> seconds;
  const Clock::time_point start = Clock::now();
  while (seconds.size() < kMinRuns ||
         (SecondsSince(start) < kMinSeconds && seconds.size() < kMaxRuns)) {
    const auto& binding = rotation.bindings[(seconds.size() + 1) % rotation.bindings.size()];
    const Clock::time_point before = Clock::now();
    KVANT_RETURN_IF_ERROR(runner.Run(binding));
    KVANT_RETURN_IF_ERROR(runner.Synchronize());
    seconds.push_back(SecondsSince(before));
  }
  return Summarize(std::move(seconds));
}

struct Preparation {
  double partition_us = 0;
  double compile_us = 0;
};

// Best of a few, as a client sees it who partitions and compiles repeatedly.
absl::StatusOr<Preparation> TimePreparation(const Graph& graph, const Engine& engine,
                                            const PartitionOptions& options) {
  std::vector<double> partition, compile;
  for (int i = 0; i < 5; ++i) {
    Clock::time_point before = Clock::now();
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph, options));
    partition.push_back(SecondsSince(before));
    before = Clock::now();
    for (const Partition& p : partitions) KVANT_RETURN_IF_ERROR(engine.Compile(p).status());
    compile.push_back(SecondsSince(before));
  }
  return Preparation{.partition_us = Summarize(partition).best * 1e6,
                     .compile_us = Summarize(compile).best * 1e6};
}

struct BenchArguments {
  GraphArguments graph_arguments;
  bool json = false;

  void AddTo(CLI::App& command) {
    graph_arguments.AddTo(command);
    command.add_flag("--json", json, "Print JSON");
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, graph_arguments.Load());
    KVANT_ASSIGN_OR_RETURN(const Engine engine, graph_arguments.MakeEngine());
    const PartitionOptions partitioning = graph_arguments.partition_options();
    KVANT_ASSIGN_OR_RETURN(const GraphRunner runner,
                           GraphRunner::Create(graph, engine, partitioning));
    auto progress = std::make_unique<Progress>("making random data");
    KVANT_ASSIGN_OR_RETURN(
        const BufferMap inputs,
        MakeRandomInputs(graph, {.kind = DataKind::kReal, .seed = 1}, engine.executor()));
    const int64_t bytes = PortBytes(graph);
    KVANT_ASSIGN_OR_RETURN(const Rotation rotation, MakeRotation(runner, inputs, bytes));
    progress.reset();
    progress = std::make_unique<Progress>("timing " + runner.backends());
    KVANT_ASSIGN_OR_RETURN(const Preparation preparation,
                           TimePreparation(graph, engine, partitioning));
    KVANT_ASSIGN_OR_RETURN(const Times times, TimeRuns(runner, rotation));
    const double read_gb_per_s = MeasureReadGbPerSecond(engine.executor());
    progress.reset();

    const double gb_per_s = static_cast<double>(bytes) / times.best * 1e-9;
    const double fraction = gb_per_s / read_gb_per_s;
    if (json) {
      const Json out = {{"ms_best", times.best * 1e3},
                        {"ms_median", times.median * 1e3},
                        {"bytes", bytes},
                        {"gb_per_s", gb_per_s},
                        {"read_gb_per_s", read_gb_per_s},
                        {"fraction", fraction},
                        {"compile_us", preparation.compile_us},
                        {"partition_us", preparation.partition_us},
                        {"backend", runner.backends()},
                        {"kernel", runner.kernels()}};
      std::puts(out.dump(2).c_str());
      return 0;
    }
    std::printf("%s: %s\n", runner.backends().c_str(), runner.kernels().c_str());
    std::printf("best %.4f ms, median %.4f ms\n", times.best * 1e3, times.median * 1e3);
    std::printf("%.2f MB in and out, %.2f GB/s, %.0f%% of the %.2f GB/s of plain reading\n",
                static_cast<double>(bytes) * 1e-6, gb_per_s, fraction * 100, read_gb_per_s);
    std::printf("partitioned in %.1f us, compiled in %.1f us\n", preparation.partition_us,
                preparation.compile_us);
    return 0;
  }
};

}  // namespace

void AddBenchCommand(CLI::App& app, Action& action) {
  AddCommand<BenchArguments>(app, action, "bench",
                             "Time a graph over buffers that no cache holds, beside a plain read "
                             "of memory with the same threads");
}

}  // namespace kvant
