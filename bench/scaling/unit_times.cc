// The times of all units of a decode step or a prompt, one after another on one thread, and what
// starting and joining threads costs: what bench/scaling computes a schedule's makespan from.
//
// Reads a case as JSON: {"type": "u4", "group": 32, "zero_points": true, "kv_heads": 8, "ratio": 4,
// "head_size": 128, "lengths": [32768], "queries": 1, "bf16": false, "by_tokens": false, "workers":
// 256, "rounds": 15}; {} measures the machine alone. Writes JSON, all times in microseconds. Units
// are what an executor of so many workers is given: with 256, none take turns.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/bench/scaling/attention_case.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/attention.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/memory_speed.h"
#include "kvant/tools/rotation.h"

namespace kvant {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double Us(Clock::duration took) { return std::chrono::duration<double, std::micro>(took).count(); }

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}
double Median(const std::vector<double>& values) { return Quantile(values, 0.5); }

// Units that run one after another where they are not to be neighbours; divides no count of them.
constexpr int64_t kApart = 7;

// Runs every body in the calling thread and keeps the time of each, whatever number of workers it
// says that it has.
class TimingExecutor : public Executor {
 public:
  explicit TimingExecutor(int workers) : workers_(workers) {}

  struct Loop {
    Clock::time_point begin, end;
    std::vector<double> us;  // by index
  };

  int max_concurrency() const override { return workers_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    Loop& loop = loops.emplace_back();
    loop.us.resize(static_cast<size_t>(n));
    loop.begin = Clock::now();
    Clock::time_point before = loop.begin;
    for (int64_t first = 0; first < apart; ++first) {
      for (int64_t i = first; i < n; i += apart) {
        body(i, 0);
        const Clock::time_point after = Clock::now();
        loop.us[static_cast<size_t>(i)] = Us(after - before);
        before = after;
      }
    }
    loop.end = Clock::now();
  }

  std::vector<Loop> loops;  // since they were last cleared
  int64_t apart = 1;        // of bodies that follow each other: 1 is in order

 private:
  const int workers_;
};

// Of one kind of execution, by round.
struct Recorded {
  std::vector<std::vector<double>> units;  // [round][index]
  std::vector<double> before, after;

  Json Serial() const { return {{"before", Median(before)}, {"after", Median(after)}}; }
  // By index: what other programs take from a round is not of the schedule. recording: what it adds
  // to each body's time.
  std::vector<double> Units(double recording) const {
    std::vector<double> medians(units[0].size()), of_one(units.size());
    for (size_t i = 0; i < medians.size(); ++i) {
      for (size_t round = 0; round < units.size(); ++round) of_one[round] = units[round][i];
      medians[i] = std::max(Median(of_one) - recording, 0.0);
    }
    return medians;
  }
};

absl::Status Record(const GraphRunner& runner, const GraphRunner::Binding& binding,
                    TimingExecutor& executor, Recorded& to) {
  executor.loops.clear();
  const Clock::time_point begin = Clock::now();
  KVANT_RETURN_IF_ERROR(runner.Run(binding));
  const Clock::time_point end = Clock::now();
  if (executor.loops.size() != 1) {
    return InvalidArguments("a case of one unit");
  }
  const TimingExecutor::Loop& loop = executor.loops[0];
  to.units.push_back(loop.us);
  to.before.push_back(Us(loop.begin - begin));
  to.after.push_back(Us(end - loop.end));
  return absl::OkStatus();
}

// The same attention where no row tile's tokens are cut, by the kernels themselves.
class Unsplit {
 public:
  explicit Unsplit(const Partition& partition)
      : plan_(*partition.attention(), *cpu::ChosenKernels()),
        problem_(plan_.problem()),
        scratch_(static_cast<size_t>(cpu::WorkerFloats(problem_)) * sizeof(float)) {
    problem_.may_split = false;
    room_.resize(cpu::Schedule::Bytes(problem_, /*few=*/nullptr));
  }

  void Record(const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
              Recorded& to) {
    const cpu::AttentionCall call{
        .problem = &problem_, .inputs = inputs.data(), .outputs = outputs.data()};
    const cpu::KernelSet& kernels = *cpu::ChosenKernels();
    // With so many workers, each unit is a turn.
    const cpu::Schedule schedule(call, cpu::Reader{&kernels, inputs.data()}, /*workers=*/1024,
                                 room_.data());
    std::vector<double>& us = to.units.emplace_back();
    cpu::Worker worker{reinterpret_cast<float*>(scratch_.data())};
    Clock::time_point before = Clock::now();
    for (int64_t turn = 0; turn < schedule.turns(); ++turn) {
      cpu::RunTurn(kernels, call, schedule, turn, worker);
      const Clock::time_point after = Clock::now();
      us.push_back(Us(after - before));
      before = after;
    }
  }

 private:
  const cpu::Plan plan_;
  cpu::AttentionProblem problem_;
  std::vector<std::byte> room_;
  Buffer scratch_;
};

// What a body that does nothing takes: the clock, and the checks that executors other than the
// engine's own are called through.
double TimeRecording(const Engine& engine, TimingExecutor& executor) {
  executor.loops.clear();
  engine.executor().ParallelFor(4096, [](int64_t, int) {});
  return Median(executor.loops[0].us);
}

// A compiled case, over copies of its buffers that no cache holds.
struct Prepared {
  std::shared_ptr<TimingExecutor> executor;
  std::unique_ptr<GraphRunner> runner;
  Rotation rotation;
  int64_t bytes = 0;
  size_t turn = 0;

  static absl::StatusOr<Prepared> Create(const AttentionCase& of, int workers) {
    Prepared made;
    made.executor = std::make_shared<TimingExecutor>(workers);
    KVANT_ASSIGN_OR_RETURN(const Graph graph, MakeCaseGraph(of));
    KVANT_ASSIGN_OR_RETURN(const Engine engine,
                           Engine::Create({.backends = {"cpu"}, .executor = made.executor}));
    KVANT_ASSIGN_OR_RETURN(GraphRunner runner, GraphRunner::Create(graph, engine));
    made.runner = std::make_unique<GraphRunner>(std::move(runner));
    made.bytes = PortBytes(graph);
    KVANT_ASSIGN_OR_RETURN(made.rotation,
                           MakeRotation(*made.runner, MakeCaseInputs(of, graph), made.bytes));
    Recorded first;  // pages, scratch
    KVANT_RETURN_IF_ERROR(made.Run(1, first));
    return made;
  }
  size_t Next() { return turn++ % rotation.bindings.size(); }
  absl::Status Run(int64_t apart, Recorded& to) {
    executor->apart = apart;
    return Record(*runner, rotation.bindings[Next()], *executor, to);
  }
};

absl::StatusOr<Json> TimeCase(const AttentionCase& of, int workers, int rounds) {
  KVANT_ASSIGN_OR_RETURN(Prepared whole, Prepared::Create(of, workers));
  // What runs on one thread alone runs while caches hold what that thread has read: of a share of
  // the tokens, as where there are many threads.
  constexpr int64_t kShare = 64, kLeast = 512;
  AttentionCase share = of;
  for (int64_t& length : share.lengths) {
    length = std::min(length, std::max(length / kShare, kLeast));
  }
  KVANT_ASSIGN_OR_RETURN(Prepared shared, Prepared::Create(share, workers));
  const Partition& partition = whole.runner->partitions().at(0).partition();
  Unsplit unsplit(partition);
  Recorded in_order, apart, least, serial;
  for (int round = 0; round < rounds; ++round) {
    Recorded dropped;  // after which caches hold what a step leaves to the next
    KVANT_RETURN_IF_ERROR(whole.Run(1, dropped));
    KVANT_RETURN_IF_ERROR(whole.Run(1, in_order));
    KVANT_RETURN_IF_ERROR(whole.Run(kApart, apart));
    BufferMap& buffers = *whole.rotation.buffers[whole.Next()];
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (TensorId id : partition.inputs()) inputs.push_back(buffers.at(id).data());
    for (TensorId id : partition.outputs()) outputs.push_back(buffers.at(id).data());
    unsplit.Record(inputs, outputs, least);
    KVANT_RETURN_IF_ERROR(shared.Run(1, dropped));
    KVANT_RETURN_IF_ERROR(shared.Run(1, serial));
  }
  const double recording = TimeRecording(whole.runner->engine(), *whole.executor);
  return Json{{"kernel", whole.runner->kernels()},
              {"bytes", whole.bytes},
              {"in_order", in_order.Units(recording)},
              {"apart", apart.Units(recording)},
              {"least", least.Units(0)},
              {"serial", serial.Serial()}};
}

// Two bodies that wait for each other: how long after the call the second thread has begun, and
// how long after both were done it returned. pause: of the caller before each call.
Json TimeHandOver(Executor& executor, Clock::duration pause) {
  constexpr int kRounds = 101;
  constexpr auto kPatience = std::chrono::milliseconds(20);
  std::vector<double> wake, join;
  for (int round = 0; round < kRounds; ++round) {
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    std::atomic<int> begun{0};
    std::atomic<Clock::rep> last_begin{0}, last_end{0};
    const auto latest = [](std::atomic<Clock::rep>& to) {
      const Clock::rep now = Clock::now().time_since_epoch().count();
      Clock::rep seen = to.load();
      while (seen < now && !to.compare_exchange_weak(seen, now)) {
      }
    };
    const Clock::time_point call = Clock::now();
    executor.ParallelFor(2, [&](int64_t, int) {
      latest(last_begin);
      ++begun;
      // Whoever takes both bodies, because no other thread came, gives up waiting.
      while (begun < 2 && Clock::now() - call < kPatience) {
      }
      latest(last_end);
    });
    const Clock::time_point returned = Clock::now();
    const auto at = [](const std::atomic<Clock::rep>& t) {
      return Clock::time_point(Clock::duration(t.load()));
    };
    wake.push_back(Us(at(last_begin) - call));
    join.push_back(Us(returned - at(last_end)));
  }
  // Other programs take the processors at times; the quarter that is least disturbed counts.
  return {{"wake", Quantile(wake, 0.25)}, {"join", Quantile(join, 0.25)}};
}

Json TimeMachine() {
  Json hand_over;
  const auto time = [&](const char* name, Executor* executor) {
    if (executor == nullptr || executor->max_concurrency() < 2) return;
    TimeHandOver(*executor, {});  // threads start
    hand_over[name] = {{"awake", TimeHandOver(*executor, {})},
                       {"asleep", TimeHandOver(*executor, std::chrono::milliseconds(1))}};
  };
  const std::unique_ptr<Executor> tbb = MakeTbbExecutor();
  time("oneTBB", tbb.get());
  void* const openmp = dlopen("libgomp.so.1", RTLD_NOW);
  if (openmp != nullptr) {
    time("OpenMP", MakeOpenMpExecutor(tbb->max_concurrency(), openmp).get());
  }
  return {{"cores", tbb->max_concurrency()},
          {"read_gb_per_s_of_one", MeasureReadGbPerSecond(*MakeSerialExecutor())},
          {"read_gb_per_s_of_all", MeasureReadGbPerSecond(*tbb)},
          {"hand_over", std::move(hand_over)}};
}

absl::StatusOr<Json> Answer(const Json& request) {
  if (request.empty()) return TimeMachine();
  AttentionCase of;
  const std::string type = request.at("type");
  of.type = type == "s8" ? kS8 : kU4;
  of.group = request.at("group");
  of.zero_points = request.at("zero_points");
  of.kv_heads = request.at("kv_heads");
  of.ratio = request.at("ratio");
  of.head_size = request.at("head_size");
  of.lengths = request.at("lengths").get<std::vector<int64_t>>();
  of.queries = request.value("queries", 1);
  of.bf16 = request.value("bf16", false);
  of.by_tokens = request.value("by_tokens", false);
  return TimeCase(of, request.value("workers", 256), request.at("rounds"));
}

int Main() {
  const Json request = Json::parse(std::cin, nullptr, /*allow_exceptions=*/false);
  if (request.is_discarded()) {
    std::fputs("kvant_unit_times: no JSON on standard input\n", stderr);
    return 2;
  }
  const absl::StatusOr<Json> answer = Answer(request);
  if (!answer.ok()) {
    std::fprintf(stderr, "kvant_unit_times: %s\n", std::string(answer.status().message()).c_str());
    return 1;
  }
  std::puts(answer->dump().c_str());
  return 0;
}

}  // namespace
}  // namespace kvant

int main() { return kvant::Main(); }
