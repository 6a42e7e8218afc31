// Units of a store run at the same time unless they share bytes: where codes or zero points have
// less than 8 bits, two that write parts of one byte would lose what the other wrote.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/store/append_harness.h"
#include "kvant/tests/backends/store/quantize_harness.h"

namespace kvant::testing {
namespace {

// Runs a loop's bodies one after another, each on outputs of zeros and of ones, and finds bytes
// that two of them write.
class FindsSharedBytes : public Executor {
 public:
  explicit FindsSharedBytes(std::vector<Bytes>& outputs) : outputs_(outputs) {}

  int max_concurrency() const override { return 2; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    most_ = std::max(most_, n);
    std::vector<std::vector<int64_t>> writers;
    for (const Bytes& output : outputs_) writers.emplace_back(output.size(), -1);
    for (int64_t i = 0; i < n; ++i) {
      for (const std::byte fill : {std::byte{0x00}, std::byte{0xff}}) {
        for (Bytes& output : outputs_) std::fill(output.begin(), output.end(), fill);
        body(i, 0);
        for (size_t o = 0; o < outputs_.size(); ++o) {
          for (size_t at = 0; at < outputs_[o].size(); ++at) {
            if (outputs_[o][at] == fill) continue;
            int64_t& writer = writers[o][at];
            shares_ |= writer >= 0 && writer != i;
            writer = i;
          }
        }
      }
    }
  }
  bool shares() const { return shares_; }
  int64_t most() const { return most_; }  // bodies of a loop

 private:
  std::vector<Bytes>& outputs_;
  bool shares_ = false;
  int64_t most_ = 0;
};

// The most units that may run at the same time. Inputs are zeros, or as given, by port.
int64_t ExpectNoneShared(const Partition& partition, const std::vector<Bytes>& given) {
  const auto executable = std::move(*cpu::CompileStore(*partition.store(), *cpu::ChosenKernels()));
  std::vector<Bytes> inputs = given, outputs;
  for (size_t i = inputs.size(); i < partition.inputs().size(); ++i) {
    inputs.emplace_back(partition.input(static_cast<int>(i)).memory_bytes());
  }
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    outputs.emplace_back(partition.output(static_cast<int>(i)).memory_bytes());
  }
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const Bytes& input : inputs) in.push_back(input.data());
  for (Bytes& output : outputs) out.push_back(output.data());
  FindsSharedBytes executor(outputs);
  std::vector<float> scratch(executable->scratch_bytes(2) / 4 + 1);
  EXPECT_TRUE(
      executable
          ->Run({executor, in, absl::MakeSpan(out), reinterpret_cast<std::byte*>(scratch.data())})
          .ok());
  EXPECT_FALSE(executor.shares()) << executable->kernel();
  return executor.most();
}

constexpr QuantizeTypes kTypes[] = {{kF32, kU4, kF32, kU4},
                                    {kF32, kU2, kF32, kU2},
                                    {kF32, kS4, kF32, kF32},
                                    {kF32, kU8, kF32, kS8}};

TEST(SharedBytes, OfUnitsOfQuantization) {
  const QuantizeLayout layouts[] = {
      {.name = "runs", .dims = {64, 2048}, .group = {1, 32}},
      {.name = "odd runs", .dims = {64, 2046}, .group = {1, 11}},
      {.name = "runs of odd lines", .dims = {2049, 33}, .group = {1, 11}},
      {.name = "odd lines", .dims = {2001, 65}, .group = {1, 65}},
      {.name = "odd outer lines",
       .dims = {3, 2001, 33},
       .group = {1, 1, 33},
       .src_strides = Dims{66100, 33, 1}},
      {.name = "odd outer groups",
       .dims = {3, 2001, 34},
       .group = {1, 1, 34},
       .src_strides = Dims{70000, 34, 1}},
      {.name = "odd few",
       .dims = {4001, 3, 11},
       .group = {1, 1, 11},
       .src_strides = Dims{40, 11, 1}},
      {.name = "runs apart",
       .dims = {2, 600, 64},
       .group = {1, 1, 64},
       .code_strides = Dims{64, 129, 1}},
      {.name = "columns", .dims = {256, 600}, .group = {64, 1}},
      {.name = "odd columns", .dims = {255, 601}, .group = {3, 1}},
      {.name = "swapped columns",
       .dims = {256, 301},
       .group = {64, 1},
       .parameter_strides = Dims{1, 4}},
      {.name = "swapped", .dims = {2048, 64}, .group = {1, 16}, .parameter_strides = Dims{1, 2048}},
      {.name = "tensor", .dims = {5, 45001}},
      {.name = "even parts", .dims = {3, 114036}, .group = {1, 114036}},
      {.name = "odd parts", .dims = {3, 114035}, .group = {1, 114035}},
      {.name = "channels", .dims = {4001, 49}, .axis = 1},
      {.name = "rows", .dims = {5, 30001}, .axis = 0},
      {.name = "blocks", .dims = {64, 512}, .group = {4, 16}},
      {.name = "odd blocks", .dims = {66, 495}, .group = {3, 11}},
  };
  for (const bool computes : {true, false}) {
    int64_t most = 0;
    for (const QuantizeLayout& layout : layouts) {
      for (const QuantizeTypes& types : kTypes) {
        SCOPED_TRACE(layout.name + " " + types.ToString() + (computes ? "" : ", taken"));
        const QuantizeCase test{layout, types};
        const std::vector<Bytes> src{Pack(test.src(), QuantizeNumbers(layout.dims))};
        most = std::max(most, ExpectNoneShared(test.MakePartition(computes), src));
      }
    }
    EXPECT_GT(most, 4);
  }
}

std::vector<int64_t> Slots(int64_t n) {
  std::vector<int64_t> slots(n);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

TEST(SharedBytes, OfUnitsOfAppends) {
  for (const bool given : {true, false}) {
    int64_t most = 0;
    for (const QuantizeTypes& types : kTypes) {
      for (AppendCase test : std::vector<AppendCase>{
               {"runs", {2, 2, 700, 64}, 800, {64, 3}, {1, 1, 1, 32}, types},
               {"odd tokens", {3, 2, 1100, 33}, 1203, {64, 3, 0}, {1, 1, 1, 11}, types},
               {"one group", {3, 2, 1100, 33}, 1203, {65, 3, 1}, {1, 1, 1, 33}, types},
               {"odd heads", {3, 1, 901, 63}, 1203, {65, 3, 1}, {1, 1, 1, 63}, types},
               {"columns", {3, 2, 320, 95}, 960, {64, 32, 0}, {1, 1, 32, 1}, types},
               {"whole rows", {3, 1, 1101, 33}, 1101, {0}, {1, 1, 1, 33}, types},
               {"all tokens", {1, 1, 1100, 65}, 1100, {0}, {1, 1, 1100, 65}, types},
               {.name = "slots",
               .dims = {4000, 1, 1, 33},
               .capacity = 16,
               .positions = Slots(4000),
               .group = {1, 1, 1, 33},
               .types = types,
               .pages = 250}}) {
        test.given = given;
        SCOPED_TRACE(test.name + " " + types.ToString() + (given ? ", taken" : ""));
        std::vector<double> positions;
        for (const int64_t position : test.positions) {
          positions.push_back(static_cast<double>(position));
        }
        const std::vector<Bytes> inputs{Pack(test.src(), QuantizeNumbers(test.dims)),
                                        Pack(test.position(), positions)};
        most = std::max(most, ExpectNoneShared(*test.MakePartition(), inputs));
      }
    }
    EXPECT_GT(most, 2);
  }
}

}  // namespace
}  // namespace kvant::testing
