// Executors of the caller's that do not what they promise: a status, no harm, and nothing lost.
#include <malloc.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;
using Body = absl::FunctionRef<void(int64_t, int)>;

// 0 where a sanitizer has the heap.
size_t BytesInUse() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

class FunctionExecutor : public Executor {
 public:
  using Run = std::function<void(int64_t n, Body body)>;
  explicit FunctionExecutor(int concurrency, Run run = nullptr)
      : concurrency(concurrency), run(std::move(run)) {}
  int max_concurrency() const override { return concurrency; }
  void ParallelFor(int64_t n, Body body) override {
    if (run) return run(n, body);
    for (int64_t i = 0; i < n; ++i) body(i, static_cast<int>(i) % concurrency);
  }

  int concurrency;
  Run run;
};

// Attention with f32 [1, 4, 40, 16] for q, k and v.
constexpr int64_t kElements = 4 * 40 * 16;

Partition AttentionPartition() {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {1, 4, 40, 16});
  g.Output("o", g.ScaledDotProductAttention(x, x, x, {.scale = 0.25f}).first);
  return PartitionGraph(*std::move(g).Build())->front();
}

struct Attention {
  explicit Attention(const std::shared_ptr<Executor>& executor)
      : engine(*Engine::Create({.executor = executor})),
        compiled(*engine.Compile(AttentionPartition(), {.require_fused = true})) {
    for (int64_t i = 0; i < kElements; ++i) x[i] = std::sin(0.7f * static_cast<float>(i));
  }
  absl::Status Execute() {
    return compiled.Execute(Stream(engine), {ConstTensor(x.data(), kElements * 4)},
                            {Tensor{o.data(), kElements * 4}});
  }

  const Engine engine;
  const CompiledPartition compiled;
  std::vector<float> x = std::vector<float>(kElements), o = std::vector<float>(kElements);
};

struct Misbehaviour {
  std::string message;
  FunctionExecutor::Run run;
};

std::vector<Misbehaviour> Misbehaviours() {
  const auto most = [](int64_t n, Body body) {
    for (int64_t i = 0; i + 1 < n; ++i) body(i, 0);
  };
  const auto all = [](int64_t n, Body body) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
  };
  return {
      {"threw: no threads left",
       [](int64_t, Body) { throw std::runtime_error("no threads left"); }},
      {"threw: no threads left",
       [=](int64_t n, Body body) {
         most(n, body);
         throw std::runtime_error("no threads left");
       }},
      {"threw: no threads left",
       [=](int64_t n, Body body) {
         all(n, body);
         throw std::runtime_error("no threads left");
       }},
      {"threw: there is not enough memory", [](int64_t, Body) { throw std::bad_alloc(); }},
      {"threw: an exception that says nothing", [](int64_t, Body) { throw 7; }},
      {"returned when the body had run for 0 of ", [](int64_t, Body) {}},
      {"returned when the body had run for ", most},
      {"called the body twice for index 2 of ",
       [=](int64_t n, Body body) {
         all(n, body);
         body(2, 1);
       }},
      {"called the body twice for index 0 of ",
       [](int64_t n, Body body) {
         for (int64_t i = 0; i < n; ++i) body(i / 2 * 2, 0);
       }},
      {"called the body for index -1 of ",
       [=](int64_t n, Body body) {
         all(n, body);
         body(-1, 0);
       }},
      {"called the body for index 9000000000 of ",
       [=](int64_t n, Body body) {
         body(9000000000, 0);
         all(n, body);
       }},
      {"called the body for index ",
       [=](int64_t n, Body body) {
         all(n, body);
         body(n, 0);
       }},
      {"called the body in slot 2 of 2",
       [](int64_t n, Body body) {
         for (int64_t i = 0; i < n; ++i) body(i, 2);
       }},
      {"called the body in slot -1 of 2",
       [](int64_t n, Body body) {
         for (int64_t i = 0; i < n; ++i) body(i, -1);
       }},
  };
}

TEST(CallerExecutorTest, FailsTheExecutionAndNoMore) {
  const auto executor = std::make_shared<FunctionExecutor>(2);
  Attention attention(executor);
  ASSERT_TRUE(attention.Execute().ok());
  const std::vector<float> right = attention.o;
  for (const Misbehaviour& does : Misbehaviours()) {
    executor->run = does.run;
    const absl::Status status = attention.Execute();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << does.message;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("ParallelFor of the caller's executor " + does.message));
    executor->run = nullptr;
    std::fill(attention.o.begin(), attention.o.end(), 0.f);
    ASSERT_TRUE(attention.Execute().ok()) << does.message;
    EXPECT_EQ(attention.o, right) << does.message;
  }
}

TEST(CallerExecutorTest, LosesNoScratch) {
  const auto executor = std::make_shared<FunctionExecutor>(
      64, [](int64_t, Body) { throw std::runtime_error("always"); });
  Attention attention(executor);
  ASSERT_GT(attention.compiled.scratch_bytes(), 64u << 10);
  (void)attention.Execute();
  // The leak sanitizer sees it where this reports nothing.
  const size_t before = BytesInUse();
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(attention.Execute().ok());
  EXPECT_LT(BytesInUse(), before + 10 * attention.compiled.scratch_bytes());
}

// What one ParallelFor took is the next one's.
TEST(CallerExecutorTest, TakesNoMoreMemoryFromCallToCall) {
  const std::shared_ptr<Executor> checked =
      *MakeCheckedExecutor(std::make_shared<FunctionExecutor>(64));
  int64_t calls = 0;
  const auto run = [&] { checked->ParallelFor(1000, [&](int64_t, int) { ++calls; }); };
  run();
  const size_t before = BytesInUse();
  for (int i = 0; i < 100; ++i) run();
  EXPECT_LT(BytesInUse(), before + 10'000);
  EXPECT_EQ(calls, 101'000);
}

// Calls that come when ParallelFor has returned find nothing to run.
TEST(CallerExecutorTest, MayReturnEarly) {
  std::vector<std::jthread> late;
  std::atomic<bool> go = false;
  const auto executor = std::make_shared<FunctionExecutor>(2, [&](int64_t n, Body body) {
    body(0, 0);
    late.emplace_back([&go, n, body] {
      while (!go) std::this_thread::yield();
      for (int64_t i = 1; i < n; ++i) body(i, 1);
    });
  });
  Attention attention(executor);
  for (int round = 0; round < 3; ++round) {
    EXPECT_THAT(std::string(attention.Execute().message()), HasSubstr("had run for 1 of "));
  }
  std::fill(attention.o.begin(), attention.o.end(), 42.f);
  go = true;
  late.clear();  // joins
  EXPECT_THAT(attention.o, ::testing::Each(42.f));
}

// Returning while a call is under way is waited for: its tensors and scratch are still in use.
TEST(CallerExecutorTest, WaitsForCallsUnderWay) {
  std::jthread other;
  std::atomic<int> begun = 0;
  const auto bad = std::make_shared<FunctionExecutor>(2, [&](int64_t, Body body) {
    other = std::jthread([&begun, body] { body(0, 1); });
    while (begun == 0) std::this_thread::yield();
  });
  const std::shared_ptr<Executor> checked = *MakeCheckedExecutor(bad);
  std::atomic<bool> ended = false;
  EXPECT_THROW(checked->ParallelFor(2,
                                    [&](int64_t, int) {
                                      ++begun;
                                      std::this_thread::sleep_for(std::chrono::milliseconds(20));
                                      ended = true;
                                    }),
               std::runtime_error);
  EXPECT_TRUE(ended);
}

// Two calls at a time in one slot would share its scratch.
TEST(CallerExecutorTest, HasOneCallInASlotAtATime) {
  std::atomic<int> begun = 0;
  std::atomic<bool> go = false;
  const auto bad = std::make_shared<FunctionExecutor>(2, [&](int64_t, Body body) {
    std::jthread other([&body] { body(0, 1); });
    while (begun == 0) std::this_thread::yield();
    body(1, 1);
    go = true;
  });
  const std::shared_ptr<Executor> checked = *MakeCheckedExecutor(bad);
  const absl::Status status = WithoutExceptions([&]() -> absl::Status {
    checked->ParallelFor(2, [&](int64_t, int) {
      ++begun;
      while (!go) std::this_thread::yield();
    });
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("in slot 1 while another call was in it"));
  EXPECT_EQ(begun, 1);
}

TEST(CallerExecutorTest, SeesNoExceptionOfABody) {
  bool thrown = false;
  const auto executor = std::make_shared<FunctionExecutor>(1, [&](int64_t n, Body body) {
    try {
      for (int64_t i = 0; i < n; ++i) body(i, 0);
    } catch (...) {
      thrown = true;
      throw;
    }
  });
  const std::shared_ptr<Executor> checked = *MakeCheckedExecutor(executor);
  int calls = 0;
  EXPECT_THROW(checked->ParallelFor(5,
                                    [&](int64_t i, int) {
                                      ++calls;
                                      if (i == 1) throw std::bad_alloc();
                                    }),
               std::bad_alloc);
  EXPECT_FALSE(thrown);
  EXPECT_EQ(calls, 2);
  calls = 0;
  checked->ParallelFor(5, [&](int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 5);
}

TEST(CallerExecutorTest, RunsInThreadsAndWithinItself) {
  const auto executor = std::make_shared<FunctionExecutor>(3, [](int64_t n, Body body) {
    std::atomic<int64_t> next = 0;
    std::vector<std::jthread> threads;
    for (int slot = 0; slot < 3; ++slot) {
      threads.emplace_back([&, slot] {
        for (int64_t i = next++; i < n; i = next++) body(i, slot);
      });
    }
  });
  const std::shared_ptr<Executor> checked = *MakeCheckedExecutor(executor);
  for (const int64_t n : {0, 1, 7, 100, 20}) {
    std::atomic<int64_t> sum = 0;
    checked->ParallelFor(
        n, [&](int64_t i, int) { checked->ParallelFor(3, [&](int64_t j, int) { sum += i * j; }); });
    EXPECT_EQ(sum, n * (n - 1) / 2 * 3);
  }
}

TEST(CallerExecutorTest, HasAConcurrencyThatMakesSense) {
  for (const int concurrency : {0, -1, -7, (1 << 16) + 1, std::numeric_limits<int>::max()}) {
    const absl::Status status =
        Engine::Create({.executor = std::make_shared<FunctionExecutor>(concurrency)}).status();
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << concurrency;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("max_concurrency of " + std::to_string(concurrency) + ";"));
  }
  EXPECT_TRUE(Engine::Create({.executor = std::make_shared<FunctionExecutor>(1)}).ok());

  class Throwing : public FunctionExecutor {
   public:
    Throwing() : FunctionExecutor(1) {}
    int max_concurrency() const override { throw std::runtime_error("not yet"); }
  };
  const absl::Status status = Engine::Create({.executor = std::make_shared<Throwing>()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(std::string(status.message()), "not yet");
}

// Scratch is made for what the executor said first.
TEST(CallerExecutorTest, IsAskedForItsConcurrencyOnce) {
  const auto executor = std::make_shared<FunctionExecutor>(2);
  Attention attention(executor);
  const size_t scratch = attention.compiled.scratch_bytes();
  executor->concurrency = 50;
  EXPECT_EQ(attention.engine.executor().max_concurrency(), 2);
  EXPECT_EQ(attention.engine.Compile(AttentionPartition())->scratch_bytes(), scratch);
  EXPECT_THAT(std::string(attention.Execute().message()), HasSubstr("in slot 2 of 2"));
}

TEST(ExceptionsTest, AreStatuses) {
  const auto of = [](auto thrown) {
    return WithoutExceptions([&]() -> absl::Status { throw thrown; });
  };
  EXPECT_EQ(of(std::bad_alloc()), absl::ResourceExhaustedError("there is not enough memory"));
  EXPECT_EQ(of(std::out_of_range("far")), absl::InternalError("far"));
  EXPECT_EQ(of(3).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(WithoutExceptions([] { return absl::OkStatus(); }).ok());
}

// 2^48 bytes, which no address space has: the oracle stores what is read by strides of 0.
TEST(ExceptionsTest, MemoryThatCannotBeHadIsAStatus) {
#ifdef KVANT_SANITIZED
  GTEST_SKIP() << "the sanitizer ends the program";
#endif
  constexpr int64_t kMany = int64_t{1} << 45;
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {kMany}, Dims{0});
  g.Output("y", g.AddOp(OpKind::kReduceSum, "sum", {x}, {kF32},
                        {{Attr::kAxes, std::vector<int64_t>{0}}, {Attr::kKeepDims, true}})[0]);
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const Engine engine = *Engine::Create({.backends = {"oracle"}});
  const absl::StatusOr<CompiledPartition> compiled =
      engine.Compile(PartitionGraph(*graph)->front());
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const float one = 1;
  float y = 0;
  EXPECT_EQ(compiled->Execute(Stream(engine), {ConstTensor(&one, 4)}, {Tensor{&y, 4}}).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace kvant
