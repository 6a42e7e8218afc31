// Execute under CUDA's stream capture: one graph, replayed while the KV lengths in device memory
// change, gives what the oracle gives.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/tests/gpu/gpu.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/attention_graph.h"
#include "kvant/tools/cuda_stream.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/random_data.h"

namespace kvant {
namespace {

constexpr int64_t kBatch = 4, kCapacity = 1500;

Graph DecodeGraph(const std::string& format) {
  AttentionGraphOptions options{.batch = kBatch,
                                .heads = 8,
                                .kv_heads = 2,
                                .kv_len = kCapacity,
                                .head_size = 128,
                                .dtype = kF16,
                                .k = ParseNumberFormat(format).value(),
                                .v = ParseNumberFormat(format).value(),
                                .kv_lengths = true,
                                .single_op = true};
  return MakeAttentionGraph(options).value();
}

class GraphCaptureTest : public testing::TestWithParam<const char*> {};

TEST_P(GraphCaptureTest, ReplaysWithOtherLengths) {
  KVANT_SKIP_WITHOUT_GPU();
  const Graph graph = DecodeGraph(GetParam());
  const auto runner =
      GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("cuda", 0)).value());
  ASSERT_TRUE(runner.ok()) << runner.status();
  const auto oracle =
      GraphRunner::Create(graph, Engine::Create(EngineOptionsFor("oracle", 0)).value());
  ASSERT_TRUE(oracle.ok()) << oracle.status();
  const absl::StatusOr<CudaStream> stream = CudaStream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();

  absl::StatusOr<BufferMap> buffers =
      MakeRandomInputs(graph, {.kind = DataKind::kReal, .seed = 5}, oracle->engine().executor());
  ASSERT_TRUE(buffers.ok()) << buffers.status();
  const absl::StatusOr<GraphRunner::Binding> binding = runner->Bind(*buffers);
  ASSERT_TRUE(binding.ok()) << binding.status();
  const Stream on_stream(runner->engine(), stream->native());
  const auto execute = [&] { return runner->Run(*binding, on_stream); };
  // The first one on a stream takes its scratch, which capturing would not permit.
  ASSERT_TRUE(execute().ok());
  const absl::StatusOr<CudaGraph> captured = stream->Capture(execute);
  ASSERT_TRUE(captured.ok()) << captured.status();

  const std::vector<TensorId>& inputs = runner->compiled().graph().inputs();
  size_t lengths_port = 0;
  while (graph.tensor(inputs.at(lengths_port)).name != "kv_lengths") {
    ASSERT_LT(++lengths_port, inputs.size());
  }
  const TensorId output = graph.outputs().at(0);
  const int32_t lengths[][kBatch] = {
      {1500, 1500, 1500, 1500}, {1, 64, 65, 700}, {0, 1499, 128, 3}, {1000, 1001, 1002, 1003}};
  for (const auto& now : lengths) {
    ASSERT_TRUE(
        stream
            ->CopyFromHost(const_cast<void*>(binding->inputs[lengths_port].data), now, sizeof(now))
            .ok());
    ASSERT_TRUE(stream->Launch(*captured).ok());
    ASSERT_TRUE(stream->Synchronize().ok());
    ASSERT_TRUE(binding->Fetch().ok());

    BufferMap expected;
    for (const auto& [id, buffer] : *buffers) expected.emplace(id, buffer.Copy());
    std::memcpy(expected.at(inputs[lengths_port]).data(), now, sizeof(now));
    ASSERT_TRUE(oracle->Run(expected).ok());
    const Comparison result = Compare(graph.tensor(output), expected.at(output).data(),
                                      buffers->at(output).data(), runner->rounding());
    EXPECT_TRUE(result.passed) << "lengths " << now[0] << ", " << now[1] << ", ..: rel l2 "
                               << result.rel_l2 << ", " << result.failing << " points off";
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GraphCaptureTest,
                         testing::Values("f16", "u4:token:rzp:sf16", "u4:g32:zp:sf16",
                                         "s8:token:sf16"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& letter : name) letter = letter == ':' ? '_' : letter;
                           return name;
                         });

}  // namespace
}  // namespace kvant
