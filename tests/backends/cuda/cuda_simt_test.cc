// The cuda backend on the executor: what conformance does not ask.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/backends/engine.h"
#include "kvant/tests/conformance/harness.h"
#include "kvant/tools/graph_runner.h"

namespace kvant::conformance {
namespace {

using testing::HasSubstr;
using testing::Not;

// Long enough that tokens are split, with tails everywhere.
Case SplitCase() {
  Case c;
  c.name = "Split";
  c.batch = 2;
  c.kv_len = 531;
  c.head_size = 40;
  c.type = kF16;
  c.scores = kF16;
  c.k = {.type = kU4, .group_size = 8, .zero_points = kU4, .scales = kF16};
  c.v = {.type = kS8, .groups = Storage::Groups::kToken, .scales = kF16};
  return c;
}

std::vector<ConstTensor> InputsOf(const Partition& partition, const Buffers& buffers) {
  std::vector<ConstTensor> inputs;
  for (const TensorId id : partition.inputs()) {
    const TestBuffer& buffer = buffers.at(id);
    inputs.emplace_back(buffer.data(), buffer.bytes());
  }
  return inputs;
}

std::string BytesOf(const TestBuffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.data()), buffer.bytes()};
}

class CudaSimtTest : public testing::Test {
 protected:
  const Engine engine_ = Engine::Create(EngineOptionsFor("cuda_simt", 1)).value();
};

// [sinks | codes | window], of which packed codes and tiles take splits each.
Case PartsCase() {
  Case c;
  c.name = "Parts";
  c.batch = 1;
  c.kv_heads = 1;
  c.ratio = 4;
  c.q_len = 1;
  c.head_size = 64;
  c.kv_len = 3 + 1800 + 300;
  c.plain_head = 3;
  c.segments = 2;
  c.plain_tail = true;
  c.real_ranges = true;
  c.type = kF16;
  c.k = c.v = {.type = kS8, .groups = Storage::Groups::kToken, .scales = kF16};
  return c;
}

TEST_F(CudaSimtTest, SplitsAreJoinedAlikeWhateverOrderBlocksRunIn) {
  for (const Case& c : {SplitCase(), PartsCase()}) {
    SCOPED_TRACE(c.name);
    const Prepared prepared = Prepare(c).value();
    std::string first;
    for (const uint64_t seed : {0, 1, 2, 3, 4, 5}) {
      const std::unique_ptr<Backend> backend =
          cuda::MakeBackend("cuda_simt", cuda::MakeSimtLauncher({.seed = seed}));
      const std::unique_ptr<Executable> executable = backend->Compile(prepared.partition).value();
      EXPECT_THAT(executable->kernel(), Not(HasSubstr(" 1 split"))) << executable->kernel();
      EXPECT_EQ(c.name == "Parts", executable->kernel().find("joined with") != std::string::npos);
      std::vector<const void*> inputs;
      for (const ConstTensor& input : InputsOf(prepared.partition, prepared.inputs)) {
        inputs.push_back(input.data);
      }
      TestBuffer output(static_cast<size_t>(prepared.partition.output(0).memory_bytes()));
      std::vector<void*> outputs = {output.data()};
      std::vector<std::byte> scratch(executable->scratch_bytes(1));
      ASSERT_FALSE(scratch.empty());
      const auto executor = MakeSerialExecutor();
      const absl::Status done =
          executable->Run({*executor, inputs, absl::MakeSpan(outputs), scratch.data()});
      ASSERT_TRUE(done.ok()) << done;
      if (seed == 0) first = BytesOf(output);
      EXPECT_EQ(BytesOf(output), first) << "seed " << seed;
    }
  }
}

TEST_F(CudaSimtTest, ScratchServesOneExecutionAfterAnother) {
  for (const Case& c : {SplitCase(), PartsCase()}) {
    SCOPED_TRACE(c.name);
    const Prepared prepared = Prepare(c).value();
    const CompiledPartition compiled = engine_.Compile(prepared.partition).value();
    ASSERT_GT(compiled.scratch_bytes(), 0);
    void* const scratch = engine_.memory().Allocate(compiled.scratch_bytes()).value();
    const Outcome expected = RunOn("cuda_simt", prepared, prepared.inputs).value();
    for (int i = 0; i < 3; ++i) {
      TestBuffer output(expected.outputs[0].bytes());
      const std::vector<Tensor> outputs = {{output.data(), output.bytes()}};
      const absl::Status done =
          compiled.Execute(Stream(engine_), InputsOf(compiled.partition(), prepared.inputs),
                           outputs, {static_cast<std::byte*>(scratch), compiled.scratch_bytes()});
      ASSERT_TRUE(done.ok()) << done;
      EXPECT_EQ(BytesOf(output), BytesOf(expected.outputs[0])) << "execution " << i;
    }
    engine_.memory().Free(scratch);
  }
}

TEST_F(CudaSimtTest, RunsInSeveralThreadsAtOnce) {
  const Prepared prepared = Prepare(SplitCase()).value();
  const CompiledPartition compiled = engine_.Compile(prepared.partition).value();
  const Outcome expected = RunOn("cuda_simt", prepared, prepared.inputs).value();
  std::vector<TestBuffer> outputs(4, TestBuffer(expected.outputs[0].bytes()));
  std::vector<absl::Status> done(outputs.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < outputs.size(); ++i) {
    threads.emplace_back([&, i] {
      const std::vector<Tensor> out = {{outputs[i].data(), outputs[i].bytes()}};
      done[i] =
          compiled.Execute(Stream(engine_), InputsOf(compiled.partition(), prepared.inputs), out);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_TRUE(done[i].ok()) << done[i];
    EXPECT_EQ(BytesOf(outputs[i]), BytesOf(expected.outputs[0])) << "thread " << i;
  }
}

TEST_F(CudaSimtTest, PointersThatVectorsCannotBeLoadedFromAreRefused) {
  const Prepared prepared = Prepare(SplitCase()).value();
  const CompiledPartition compiled = engine_.Compile(prepared.partition).value();
  std::vector<ConstTensor> inputs = InputsOf(compiled.partition(), prepared.inputs);
  inputs[0] = {static_cast<const std::byte*>(inputs[0].data) + 8, inputs[0].bytes};
  TestBuffer output(static_cast<size_t>(compiled.partition().output(0).memory_bytes()));
  const std::string before = BytesOf(output);
  const std::vector<Tensor> outputs = {{output.data(), output.bytes()}};
  const absl::Status done = compiled.Execute(Stream(engine_), inputs, outputs);
  EXPECT_THAT(std::string(done.message()), HasSubstr("is not aligned to 16 bytes"));
  EXPECT_THAT(std::string(done.message()), HasSubstr("input 0 '"));
  EXPECT_EQ(BytesOf(output), before);
}

// Heads that share K and V share a block: what is in the queries of one is nothing to the others.
TEST_F(CudaSimtTest, QueriesOfOneHeadDoNotShowInAnother) {
  Case c = SplitCase();
  c.type = c.scores = kF32;
  c.batch = c.kv_heads = c.q_len = 1;
  c.ratio = 4;
  c.head_size = 64;
  c.k = {.type = kU4, .group_size = 32, .zero_points = kU8, .scales = kF16};
  Prepared prepared = Prepare(c).value();
  const Outcome plain = RunOn("cuda_simt", prepared, prepared.inputs).value();
  EXPECT_THAT(plain.compiled.kernel(), HasSubstr("packed codes, 8 rows"));
  const size_t row = static_cast<size_t>(c.head_size) * sizeof(float);
  for (const float odd :
       {1e30f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (auto& [id, buffer] : prepared.inputs) {
      if (buffer.bytes() == 4 * row) std::memcpy(buffer.data(), &odd, sizeof(odd));
    }
    const Outcome disturbed = RunOn("cuda_simt", prepared, prepared.inputs).value();
    const auto* before = reinterpret_cast<const float*>(plain.outputs[0].data());
    const auto* after = reinterpret_cast<const float*>(disturbed.outputs[0].data());
    const int64_t total = static_cast<int64_t>(plain.outputs[0].bytes() / sizeof(float));
    EXPECT_NE(std::memcmp(before, after, total), 0) << odd;
    // Not bit for bit: all rows' references move together, and where one is not finite all go by
    // smaller probabilities.
    double difference = 0, norm = 0;
    for (int64_t i = total / 4; i < total; ++i) {
      difference += std::pow(after[i] - before[i], 2);
      norm += std::pow(before[i], 2);
    }
    EXPECT_LE(std::sqrt(difference / norm), 2e-4) << odd;
  }
}

// The GPU's own NaN is 0x7fffffff, the CPU's 0x7fc00000.
TEST_F(CudaSimtTest, ANanIsOneWhateverItsBits) {
  Case c;
  c.name = "Nan";
  c.batch = c.kv_heads = c.ratio = 1;
  c.q_len = 16;
  c.kv_len = 64;
  c.head_size = 16;
  c.type = c.scores = kF32;
  c.k = c.v = {.type = kF32};
  const Prepared prepared = Prepare(c).value();
  int spoilt = 0;
  for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7fc00000u}) {
    for (const auto& [id, original] : prepared.inputs) {
      if (original.bytes() < 1024) continue;  // a scalar
      Prepared other = Prepare(c).value();
      std::memcpy(other.inputs.at(id).data() + 20, &bits, sizeof(bits));
      const Outcome expected = RunOn("oracle", other, other.inputs).value();
      const Outcome got = RunOn("cuda_simt", other, other.inputs).value();
      const auto* want = reinterpret_cast<const float*>(expected.outputs[0].data());
      const auto* have = reinterpret_cast<const float*>(got.outputs[0].data());
      for (size_t i = 0; i < expected.outputs[0].bytes() / sizeof(float); ++i) {
        ASSERT_EQ(std::isnan(have[i]), std::isnan(want[i])) << std::hex << bits << ", output " << i;
        spoilt += std::isnan(want[i]) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(spoilt, 4 * (256 + 16 + 16) - 1);
}

// Padding that frameworks hide by the lowest number: where it is all there is, all weigh the same.
TEST_F(CudaSimtTest, RowsMaskedByTheLowestNumberAreMeans) {
  for (const bool codes : {true, false}) {
    for (const DataType type : {kBF16, kF32}) {
      Case c = SplitCase();
      c.kv_len = 170;
      c.type = c.scores = type;
      c.head_size = 64;
      c.q_len = 2;
      c.k = c.v = {.type = type};
      if (codes) c.k = c.v = {.type = kS8, .groups = Storage::Groups::kToken, .scales = kF16};
      c.masks = {{.kind = Mask::Kind::kAdditive, .over = "q"}};
      Prepared prepared = Prepare(c).value();
      int masks = 0;
      for (auto& [id, buffer] : prepared.inputs) {
        if (buffer.bytes() != 2 * static_cast<size_t>(BitsOf(type)) / 8) continue;
        StoreElement(type, buffer.data(), 0, type == kF32 ? -3.4e38 : -3.38e38);
        ++masks;
      }
      ASSERT_EQ(masks, 1);
      const Outcome expected = RunOn("oracle", prepared, prepared.inputs).value();
      const Outcome got = RunOn("cuda_simt", prepared, prepared.inputs).value();
      EXPECT_EQ(
          Judge(got.compiled.partition(), expected.outputs, got.outputs, got.compiled.rounding()),
          "")
          << got.compiled.ToString();
    }
  }
}

}  // namespace
}  // namespace kvant::conformance
