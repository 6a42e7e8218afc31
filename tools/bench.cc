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
#include "kvant/tools/cuda_stream.h"
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

// Times of calls, and how fast memory is at that time.
struct Measured {
  Times times;
  double memory_gb_per_s = 0;
};

absl::StatusOr<Measured> MeasureOnHost(const GraphRunner& runner, const BufferMap& inputs,
                                       int64_t bytes) {
  KVANT_ASSIGN_OR_RETURN(const Rotation rotation, MakeRotation(runner, inputs, bytes));
  Measured measured;
  KVANT_ASSIGN_OR_RETURN(measured.times, TimeRuns(runner, rotation));
  measured.memory_gb_per_s = MeasureReadGbPerSecond(runner.engine().executor());
  return measured;
}

// On a GPU calls go into a graph, so that what it costs to launch one is not measured, and a copy
// of its memory is what they are compared with.
absl::StatusOr<Measured> MeasureOnDevice(const GraphRunner& runner, const BufferMap& inputs,
                                         int64_t bytes) {
  constexpr size_t kMinCalls = 20, kMinReplays = 30;
  KVANT_ASSIGN_OR_RETURN(const CudaStream stream, CudaStream::Create());
  const Stream on_stream(runner.engine(), stream.native());
  KVANT_ASSIGN_OR_RETURN(const Rotation rotation,
                         MakeRotation(runner, inputs, bytes, 4 * stream.cache_bytes()));
  KVANT_RETURN_IF_ERROR(runner.Run(rotation.bindings[0], on_stream));  // scratch
  const size_t calls = std::max(kMinCalls, rotation.bindings.size());
  KVANT_ASSIGN_OR_RETURN(const CudaGraph graph, stream.Capture([&]() -> absl::Status {
    for (size_t call = 0; call < calls; ++call) {
      const auto& binding = rotation.bindings[call % rotation.bindings.size()];
      KVANT_RETURN_IF_ERROR(runner.Run(binding, on_stream));
    }
    return absl::OkStatus();
  }));
  std::vector<double> seconds;
  const Clock::time_point start = Clock::now();
  while (seconds.size() < kMinReplays ||
         (SecondsSince(start) < kMinSeconds && seconds.size() < kMaxRuns)) {
    KVANT_ASSIGN_OR_RETURN(const double us, stream.Time([&] { return stream.Launch(graph); }));
    seconds.push_back(us * 1e-6 / static_cast<double>(calls));
  }
  Measured measured{.times = Summarize(std::move(seconds))};
  KVANT_ASSIGN_OR_RETURN(measured.memory_gb_per_s,
                         MeasureCopyGbPerSecond(stream, runner.engine().memory()));
  return measured;
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
    progress.reset();
    progress = std::make_unique<Progress>("timing " + runner.backends());
    KVANT_ASSIGN_OR_RETURN(const Preparation preparation,
                           TimePreparation(graph, engine, partitioning));
    const bool on_device = engine.memory().asynchronous();
    KVANT_ASSIGN_OR_RETURN(const Measured measured,
                           (on_device ? MeasureOnDevice : MeasureOnHost)(runner, inputs, bytes));
    const Times& times = measured.times;
    progress.reset();

    const double gb_per_s = static_cast<double>(bytes) / times.best * 1e-9;
    const double fraction = gb_per_s / measured.memory_gb_per_s;
    if (json) {
      const Json out = {{"ms_best", times.best * 1e3},
                        {"ms_median", times.median * 1e3},
                        {"bytes", bytes},
                        {"gb_per_s", gb_per_s},
                        {on_device ? "copy_gb_per_s" : "read_gb_per_s", measured.memory_gb_per_s},
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
    std::printf("%.2f MB in and out, %.2f GB/s, %.0f%% of the %.2f GB/s of %s\n",
                static_cast<double>(bytes) * 1e-6, gb_per_s, fraction * 100,
                measured.memory_gb_per_s,
                on_device ? "copying, read and written" : "plain reading");
    std::printf("partitioned in %.1f us, compiled in %.1f us\n", preparation.partition_us,
                preparation.compile_us);
    return 0;
  }
};

}  // namespace

void AddBenchCommand(CLI::App& app, Action& action) {
  AddCommand<BenchArguments>(app, action, "bench",
                             "Time a graph over buffers that no cache holds, beside a plain read "
                             "of memory with the same threads, or a copy of a GPU's memory");
}

}  // namespace kvant
