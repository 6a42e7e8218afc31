// Sums over all tokens, where tensor cores cut off what falls below the largest term.
#include <cmath>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/backends/executor.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/attention_graph.h"

namespace kvant::cuda {
namespace {

constexpr int64_t kHeads = 8, kQueries = 64, kTokens = 4096, kChannels = 16;

// Published for A100 and H100 (simt.h).
class LongSumsTest : public testing::TestWithParam<simt::MmaModel> {};

TEST_P(LongSumsTest, OfF32LoseNothing) {
  const Graph graph = MakeAttentionGraph({.heads = kHeads,
                                          .kv_heads = kHeads,
                                          .q_len = kQueries,
                                          .kv_len = kTokens,
                                          .head_size = kChannels,
                                          .dtype = kF32})
                          .value();
  const Partition partition = PartitionGraph(graph).value().front();
  const std::unique_ptr<Backend> backend =
      MakeBackend("cuda_simt", MakeSimtLauncher({.races = false, .accumulate = GetParam()}));
  const std::unique_ptr<Executable> executable = backend->Compile(partition).value();
  // A warp adds up all tokens.
  ASSERT_THAT(executable->kernel(), testing::HasSubstr("4 x 1 warps, 1 split"));
  // By queries of 0 all tokens weigh the same, and outputs are means.
  const std::vector<float> q(kHeads * kQueries * kChannels, 0.f);
  const std::vector<float> k(kHeads * kTokens * kChannels, 1.f);
  std::vector<float> v(k.size());
  for (size_t i = 0; i < v.size(); ++i)
    v[i] = 1.f + static_cast<float>(i * 2654435761u % 1000) / 1e3f;
  std::vector<float> output(q.size());
  std::vector<const void*> inputs;
  for (const TensorId id : partition.inputs()) {
    const std::string& name = graph.tensor(id).name;
    inputs.push_back(name == "q" ? q.data() : name == "k" ? k.data() : v.data());
  }
  void* outputs[] = {output.data()};
  std::vector<std::byte> scratch(executable->scratch_bytes(1));
  const auto serial = MakeSerialExecutor();
  ASSERT_TRUE(executable->Run({*serial, inputs, absl::MakeSpan(outputs), scratch.data()}).ok());
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t d = 0; d < kChannels; ++d) {
      double mean = 0;
      for (int64_t s = 0; s < kTokens; ++s) mean += v[(h * kTokens + s) * kChannels + d];
      mean /= kTokens;
      for (int64_t row = 0; row < kQueries; ++row) {
        const float got = output[(h * kQueries + row) * kChannels + d];
        // As sums that are rounded have it.
        ASSERT_LE(std::abs(got - mean) / mean, 2e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LongSumsTest,
                         testing::Values(simt::MmaModel{8, 1}, simt::MmaModel{16, 2}),
                         [](const auto& info) { return info.index == 0 ? "a100" : "h100"; });

}  // namespace
}  // namespace kvant::cuda
