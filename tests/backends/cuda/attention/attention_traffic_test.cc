// What the attention kernels move, counted by the executor: every byte of K and V and of their
// parameters once per tile of rows, and shared memory without bank conflicts.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/device/simt.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/attention_graph.h"
#include "kvant/tools/buffer.h"

namespace kvant::cuda {
namespace {

struct Shape {
  std::string name, k, v;
  int64_t heads = 8, kv_heads = 1, q_len = 1, kv_len = 531, head_size = 128;
  DataType dtype = kF16;
  // Wavefronts beyond the ideal, per mille of it. Loads of few per mille are those that join states
  // at a block's end.
  uint64_t copy_conflicts = 0, load_conflicts = 0;
  // Of copies: where tokens end in the middle of one of parameters.
  uint64_t sectors_too_many = 0;
  // Scales and zero points are of groups that lie within a tile.
  bool parameters_once = true;
  // Given: K and V are rings, of which ranges say that these tokens exist.
  int64_t first = 0, tokens = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }

// A launch on the executor. Buffers are zeros: what is moved does not depend on values.
struct Launched {
  AttentionPlan plan;
  std::vector<std::string> inputs;
  simt::Report report;  // reads: of each input
};

absl::StatusOr<Launched> LaunchAttention(const Shape& shape) {
  AttentionGraphOptions options;
  options.heads = shape.heads;
  options.kv_heads = shape.kv_heads;
  options.q_len = shape.q_len;
  options.kv_len = shape.kv_len;
  options.head_size = shape.head_size;
  options.dtype = shape.dtype;
  options.k = ParseNumberFormat(shape.k).value();
  options.v = ParseNumberFormat(shape.v).value();
  options.scale = AttentionGraphOptions::Scale::kNone;
  options.ring = shape.tokens > 0;
  KVANT_ASSIGN_OR_RETURN(const Graph graph, MakeAttentionGraph(options));
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  const Partition& partition = partitions.front();
  const auto first = static_cast<int32_t>(shape.first), tokens = static_cast<int32_t>(shape.tokens);
  const int32_t range[] = {first, tokens};
  DeviceProperties device = PropertiesOf("sm_80").value();
  device.multiprocessors = 4;
  Launched launched;
  KVANT_ASSIGN_OR_RETURN(launched.plan, PlanAttention(*partition.attention(), device));

  std::vector<Buffer> buffers;
  std::vector<const void*> inputs;
  simt::Options watching;
  for (const TensorId id : partition.inputs()) {
    const std::string& name = graph.tensor(id).name;
    if (name == "k_ranges" || name == "v_ranges") {
      inputs.push_back(range);
      continue;
    }
    launched.inputs.push_back(graph.tensor(id).name);
    buffers.emplace_back(static_cast<size_t>(graph.tensor(id).memory_bytes()));
    // No zeros, of which a kernel cannot tell whether they are all that f16 has left.
    std::memset(buffers.back().data(), 0x2c, buffers.back().bytes());
    inputs.push_back(buffers.back().data());
    watching.watches.push_back({buffers.back().data(), buffers.back().bytes()});
  }
  Buffer output(static_cast<size_t>(partition.output(0).memory_bytes()));
  Buffer scratch(launched.plan.scratch_bytes),
      constants(launched.plan.binding.constant_bytes.size());
  void* outputs[] = {output.data()};
  AttentionParams params = launched.plan.params;
  FillParams(launched.plan.binding, inputs, outputs, constants.data(), nullptr, &params);
  params.partials = reinterpret_cast<float*>(scratch.data());
  params.done = reinterpret_cast<u32*>(scratch.data() + launched.plan.partial_bytes);
  const KernelSpec kernel = MakeAttentionKernel(launched.plan);
  const SimtBody body = BodyOf(kernel);
  launched.report = simt::Launch({launched.plan.blocks, kernel.threads, kernel.shared_bytes},
                                 watching, [&] { body(&params); });
  return launched;
}

class AttentionTrafficTest : public testing::TestWithParam<Shape> {};

TEST_P(AttentionTrafficTest, EveryByteIsReadOncePerRowTileAndSharedMemoryHasNoConflicts) {
  const Shape& shape = GetParam();
  const absl::StatusOr<Launched> launched = LaunchAttention(shape);
  ASSERT_TRUE(launched.ok()) << launched.status();
  const simt::Report& report = launched->report;
  EXPECT_THAT(report.errors, testing::IsEmpty());
  if (launched->plan.traits.kernel == kTilesKernel) {
    ASSERT_NE(launched->plan.traits.k[0].staging, kLoaded);
    ASSERT_NE(launched->plan.traits.v[0].staging, kLoaded);
  }
  const AttentionTraits& traits = launched->plan.traits;
  ASSERT_EQ(ChannelBlocks(traits), 1);
  const auto expected = static_cast<uint32_t>(RowTiles(traits, launched->plan.params.rows));
  for (size_t i = 0; i < launched->inputs.size(); ++i) {
    const std::string& name = launched->inputs[i];
    const bool codes = name == "k" || name == "v";
    if (name == "q" || (!codes && !shape.parameters_once)) continue;
    const std::vector<uint32_t>& reads = report.reads[i];
    // Of a head, token by token.
    const int64_t row = static_cast<int64_t>(reads.size()) / shape.kv_len;
    for (int64_t token = 0; token < shape.kv_len; ++token) {
      const int64_t at = (token - shape.first + shape.kv_len) % shape.kv_len;
      const uint32_t times = shape.tokens == 0 || at < shape.tokens ? expected : 0;
      const auto begin = reads.begin() + token * row;
      ASSERT_EQ(std::count(begin, begin + row, times), row)
          << name << ": of some byte of token " << token << " "
          << *std::max_element(begin, begin + row) << " reads, of another "
          << *std::min_element(begin, begin + row);
    }
  }
  const simt::Counters& c = report.counters;
  EXPECT_EQ(c.load_matrix_wavefronts, c.load_matrix_wavefronts_ideal);
  const auto excess = [](uint64_t actual, uint64_t ideal) {
    return (actual - ideal) * 1000 / ideal;
  };
  EXPECT_EQ(excess(c.copy_wavefronts, c.copy_wavefronts_ideal), shape.copy_conflicts);
  EXPECT_EQ(excess(c.shared_load_wavefronts, c.shared_load_wavefronts_ideal), shape.load_conflicts);
  EXPECT_EQ(c.copy_sectors - c.copy_sectors_ideal, shape.sectors_too_many);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionTrafficTest,
    testing::Values(
        Shape{.name = "F16", .k = "f16", .v = "f16", .load_conflicts = 3},
        Shape{.name = "Bf16Head64",
              .k = "bf16",
              .v = "bf16",
              .head_size = 64,
              .dtype = kBF16,
              .load_conflicts = 12},
        Shape{.name = "F16Head80", .k = "f16", .v = "f16", .head_size = 80, .load_conflicts = 4},
        Shape{.name = "F32",
              .k = "f32",
              .v = "f32",
              .head_size = 64,
              .dtype = kF32,
              .load_conflicts = 3},
        Shape{.name = "Nf4", .k = "u4:g32:nf4", .v = "u4:g32:nf4", .load_conflicts = 3},
        Shape{.name = "Nf4Head80",
              .k = "u4:g16:nf4",
              .v = "u4:g16:nf4",
              .head_size = 80,
              .load_conflicts = 3},
        // Rings begin within a sector, and all lanes read where.
        Shape{.name = "RingOfCodes",
              .k = "u4:g32:rzp",
              .v = "u4:g32:rzp",
              .load_conflicts = 69,
              .sectors_too_many = 24,
              .first = 301,
              .tokens = 457},
        // Of tiles, rows of 160 bytes lie 272 apart: quarters of a warp that cross a row's end copy
        // to the same banks.
        Shape{.name = "RingOfF16Tiles",
              .k = "f16",
              .v = "f16",
              .q_len = 9,
              .head_size = 80,
              .copy_conflicts = 600,
              .first = 301,
              .tokens = 457},
        Shape{.name = "RingOfU4Tiles",
              .k = "u4:g16:zp",
              .v = "u4:g16:zp",
              .q_len = 9,
              .head_size = 80,
              .sectors_too_many = 166,
              .first = 530,
              .tokens = 531},
        Shape{.name = "U4ByToken",
              .k = "u4:token",
              .v = "u4:token",
              .load_conflicts = 3,
              .sectors_too_many = 1},
        Shape{.name = "U4Real",
              .k = "u4:token:rzp",
              .v = "u4:token:rzp",
              .load_conflicts = 3,
              .sectors_too_many = 2},
        // Zero points of groups lie in bytes, which lanes read words of.
        Shape{.name = "U4Groups",
              .k = "u4:g32:zp",
              .v = "u4:g32:zp",
              .load_conflicts = 7,
              .sectors_too_many = 1},
        Shape{.name = "U4GroupsHead64",
              .k = "u4:g32:zp",
              .v = "u4:g32:zp",
              .head_size = 64,
              .load_conflicts = 8,
              .sectors_too_many = 2},
        Shape{.name = "S8",
              .k = "s8:token",
              .v = "s8:token",
              .load_conflicts = 3,
              .sectors_too_many = 1},
        Shape{.name = "U2", .k = "u2:g32", .v = "u2:g32", .load_conflicts = 15},
        // Lanes have nothing to copy where rows are no power of two of pieces. Of K and V alike,
        // since the executor takes lanes' accesses in a line of the source in the order of each
        // lane's own.
        Shape{.name = "U4Head80",
              .k = "u4:token:zp",
              .v = "s8:token",
              .head_size = 80,
              .load_conflicts = 3,
              .sectors_too_many = 1},
        Shape{.name = "U4Head96",
              .k = "u4:g32:zp",
              .v = "u4:token",
              .kv_len = 544,
              .head_size = 96,
              .load_conflicts = 3},
        Shape{.name = "S8Head96",
              .k = "s8:token",
              .v = "s8:token",
              .kv_len = 544,
              .head_size = 96,
              .load_conflicts = 3},
        Shape{.name = "S8Head192",
              .k = "s8:token",
              .v = "s8:token",
              .kv_len = 544,
              .head_size = 192,
              .load_conflicts = 2},
        Shape{.name = "KByChannelOfTwoBits",
              .k = "u2:channel:g32:rzp",
              .v = "u2:g32:rzp",
              .kv_len = 544,
              .load_conflicts = 59},
        Shape{.name = "F8",
              .k = "f8_e4m3:tensor",
              .v = "f8_e4m3:tensor",
              .load_conflicts = 3,
              .parameters_once = false},
        Shape{.name = "KByChannel",
              .k = "u4:channel:g32:zp",
              .v = "u4:token",
              .kv_len = 544,
              .load_conflicts = 2},
        Shape{.name = "SixteenRows",
              .k = "s4:g64",
              .v = "s4:g64",
              .heads = 16,
              .load_conflicts = 3,
              .sectors_too_many = 1},
        Shape{.name = "Prefill", .k = "f16", .v = "f16", .heads = 2, .q_len = 150, .kv_len = 150},
        Shape{.name = "PrefillS8",
              .k = "s8:token",
              .v = "s8:token",
              .heads = 2,
              .q_len = 150,
              .kv_len = 150}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvant::cuda
