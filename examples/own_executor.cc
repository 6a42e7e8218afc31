// Work in threads of the caller's own, and scratch from the caller's own memory:
// then executing allocates nothing after the first time. The result does not depend on either.
#include <atomic>
#include <cmath>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "kvant/kvant.h"

namespace {

// A few threads per call; a real one would keep them.
class ThreadExecutor : public kvant::Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  int max_concurrency() const override { return threads_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    std::atomic<int64_t> next = 0;
    const auto work = [&](int slot) {
      for (int64_t i = next++; i < n; i = next++) body(i, slot);
    };
    std::vector<std::jthread> others;
    for (int slot = 1; slot < threads_; ++slot) others.emplace_back(work, slot);
    work(0);
  }

 private:
  const int threads_;
};

// Causal attention over f32 [1, 4, 100, 32] with q = k = v.
absl::StatusOr<std::vector<float>> Attend(std::shared_ptr<kvant::Executor> executor) {
  kvant::GraphBuilder g;
  const auto x = g.Input("x", kvant::kF32, {1, 4, 100, 32});
  const auto [o, stats] = g.ScaledDotProductAttention(x, x, x, {.scale = 0.2f, .right_window = 0});
  g.Output("o", o);
  KVANT_ASSIGN_OR_RETURN(const kvant::Graph graph, std::move(g).Build());
  KVANT_ASSIGN_OR_RETURN(const auto engine,
                         kvant::Engine::Create({.executor = std::move(executor)}));
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(graph, {.require_fused = true}));

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> scratch(attention.scratch_bytes() / sizeof(Line) + 1);
  std::vector<float> input(4 * 100 * 32), output(input.size());
  for (size_t i = 0; i < input.size(); ++i) input[i] = std::sin(0.7f * i);
  const size_t bytes = input.size() * sizeof(float);
  KVANT_RETURN_IF_ERROR(
      attention.Execute(kvant::Stream(engine), {{input.data(), bytes}}, {{output.data(), bytes}},
                        absl::MakeSpan(scratch.data()->bytes, scratch.size() * sizeof(Line))));
  std::cout << engine.executor().max_concurrency() << " thread(s), " << attention.scratch_bytes()
            << " bytes of scratch\n";
  return output;
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const auto ours, Attend(std::make_shared<ThreadExecutor>(3)));
  KVANT_ASSIGN_OR_RETURN(const auto serial, Attend(kvant::MakeSerialExecutor()));
  if (ours != serial) return absl::InternalError("the executor changed the result");
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
