// Host scalars on a GPU, which the library that stands for its driver records: they stay on the
// host, and kernels get them by value.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/kernels/cuda/attention_params.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"

namespace kvant::cuda {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(HostScalarsOnAGpuTest, StayOnTheHostAndGoByValue) {
  FakeEnvironment fake;
  const absl::StatusOr<Engine> engine = Engine::Create({.device = kvant::Device::kCuda});
  ASSERT_TRUE(engine.ok()) << engine.status();
  GraphBuilder g;
  const Value q = g.Input("q", kvant::kF16, {1, 1, 4, 64}),
              k = g.Input("k", kvant::kF16, {1, 1, 96, 64});
  const Value scores = g.Multiply(g.MatMul(q, k, {.transpose_b = true, .type = kvant::kF32}),
                                  g.HostScalar("scale", kvant::kF32));
  const Value masked = g.CausalMask(scores, g.HostScalar("fill", kvant::kF32),
                                    g.HostScalar("s", kvant::kS32), g.HostScalar("t", kvant::kS32));
  const Value probs = g.SoftMax(masked, {.type = kvant::kF16});
  const auto kept = g.AddOp(OpKind::kDropout, "kept",
                            {probs, g.HostScalar("seed", kvant::kS64), g.Scalar(int64_t{5}),
                             g.HostScalar("p", kvant::kF32)},
                            {kvant::kF16});
  g.Output("o", g.MatMul(kept[0], k));
  const Graph graph = std::move(g).Build().value();
  const auto partitions = PartitionGraph(graph).value();
  const auto compiled = engine->Compile(partitions.at(0), {.require_fused = true});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_THAT(compiled->kernel(), HasSubstr("another kernel where masks do not write -inf"));

  void* const rows = engine->memory().Allocate(4 * 64 * 2).value();
  void* const keys = engine->memory().Allocate(96 * 64 * 2).value();
  void* const out = engine->memory().Allocate(4 * 64 * 2).value();
  const float scale = 0.125f, p = 0.25f;
  const int32_t s = 96, t = 4;
  const int64_t seed = (int64_t{1} << 60) + 3;
  const auto run = [&](const float* fill, const void* q_data) {
    return compiled->Execute(Stream(*engine),
                             {{"q", {q_data, 4 * 64 * 2}},
                              {"k", {keys, 96 * 64 * 2}},
                              {"scale", {&scale, 4}},
                              {"fill", {fill, 4}},
                              {"s", {&s, 4}},
                              {"t", {&t, 4}},
                              {"seed", {&seed, 8}},
                              {"p", {&p, 4}}},
                             {{"o", {out, 4 * 64 * 2}}});
  };
  for (const float fill : {-kInf, -1.f}) {
    fake.cuda().launches.clear();
    const absl::Status status = run(&fill, rows);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(fake.cuda().launches.size(), 1u);
    const std::string& bytes = fake.cuda().launches[0].params;
    AttentionParams params;
    ASSERT_EQ(bytes.size(), sizeof(params));
    std::memcpy(&params, bytes.data(), sizeof(params));
    EXPECT_EQ(params.steps[0].constant, scale);
    EXPECT_EQ(params.steps[1].constant, fill);
    EXPECT_EQ(params.steps[1].shift, 92);
    EXPECT_EQ(params.seed.integer, seed);
    EXPECT_EQ(params.dropout_offset.integer, 5);
    EXPECT_EQ(params.probability.real, 0.25);
  }
  // Everything else is on the device.
  const std::vector<uint16_t> on_host(4 * 64);
  const float fill = -kInf;
  EXPECT_THAT(std::string(run(&fill, on_host.data()).message()),
              HasSubstr("points to host memory"));
  for (void* memory : {rows, keys, out}) engine->memory().Free(memory);
}

}  // namespace
}  // namespace kvant::cuda
