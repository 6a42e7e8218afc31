// A long prefill needs no memory that grows with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kvant.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

// A field of /proc/self/status in bytes; -1 where there is none.
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return -1;
}

TEST(CpuMemory, PrefillOf32kBy32kStaysWithinItsScratch) {
#ifdef KVANT_SANITIZED
  GTEST_SKIP() << "sanitizers keep memory of their own";
#endif
  if (std::string(cpu::ChosenKernels()->name) == "portable") GTEST_SKIP() << "takes minutes here";
  constexpr int64_t kTokens = 32768, kSize = 64;
  constexpr int kThreads = 2;
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {1, 1, kTokens, kSize});
  const Value k = g.Input("k", kF16, {1, 1, kTokens, kSize});
  const Value v = g.Input("v", kF16, {1, 1, kTokens, kSize});
  const Value scores = g.MatMul(q, g.TypeCast(k, kF32), {.transpose_b = true});
  const Value probs = g.SoftMax(g.CausalMask(scores, g.Input("fill", kF32, {})));
  g.Output("o", g.MatMul(probs, g.TypeCast(v, kF32)));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  ASSERT_TRUE(partitions.ok()) << partitions.status();
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"cpu"}, .threads = kThreads});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::StatusOr<CompiledPartition> compiled = engine->Compile(partitions->at(0));
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  constexpr int64_t kMost = (int64_t{16} << 20) + kThreads * (int64_t{64} << 10);
  EXPECT_LE(static_cast<int64_t>(compiled->scratch_bytes()), kMost);

  std::vector<float> query(kTokens * kSize, 0.01f), output(kTokens * kSize, 1.f);
  std::vector<uint16_t> cache(kTokens * kSize, 0x3c00);
  const float fill = -std::numeric_limits<float>::infinity();
  // Forgets the peak so far.
  std::ofstream("/proc/self/clear_refs") << "5";
  const int64_t before = StatusBytes("VmRSS");
  const size_t half = cache.size() * sizeof(uint16_t), full = query.size() * sizeof(float);
  const absl::Status status = compiled->Execute(Stream(*engine),
                                                {{"q", {query.data(), full}},
                                                 {"k", {cache.data(), half}},
                                                 {"v", {cache.data(), half}},
                                                 {"fill", {&fill, sizeof(fill)}}},
                                                {{"o", {output.data(), full}}});
  ASSERT_TRUE(status.ok()) << status;
  const int64_t peak = StatusBytes("VmHWM");
  EXPECT_NEAR(output[0], 1.f, 1e-5);
  EXPECT_NEAR(output.back(), 1.f, 1e-5);
  if (before < 0 || peak < 0) GTEST_SKIP() << "no /proc/self/status";
  // Stacks of the threads and pages of code that are touched for the first time.
  constexpr int64_t kSlack = int64_t{4} << 20;
  EXPECT_LE(peak - before, kMost + kSlack);
}

}  // namespace
}  // namespace kvant
