// What the plan of CUDA attention promises, over a sweep of shapes and devices.
#include "kvant/backends/cuda/attention/attention_plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/attention/attention_parts.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/attention_graph.h"

namespace kvant::cuda {
namespace {

using testing::HasSubstr;

absl::StatusOr<AttentionSpec> SpecOf(const AttentionGraphOptions& options) {
  absl::StatusOr<Graph> graph = MakeAttentionGraph(options);
  if (!graph.ok()) return graph.status();
  absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  if (!partitions.ok()) return partitions.status();
  if (partitions->size() != 1 || partitions->front().attention() == nullptr) {
    return absl::InternalError("not one attention");
  }
  return *partitions->front().attention();
}

NumberFormat Format(const std::string& text) { return ParseNumberFormat(text).value(); }

DeviceProperties Device(const std::string& arch, int multiprocessors = 0) {
  DeviceProperties device = PropertiesOf(arch).value();
  if (multiprocessors > 0) device.multiprocessors = multiprocessors;
  return device;
}

// Every row, channel and token belongs to exactly one block, and there is room for what it needs.
void ExpectSound(const AttentionPlan& plan, const AttentionSpec& spec,
                 const DeviceProperties& device) {
  const AttentionTraits& t = plan.traits;
  const AttentionParams& p = plan.params;
  const int64_t heads = t.kv_varies_over_b2 ? spec.batch[2] : 1;
  EXPECT_EQ(p.rows * heads, spec.q_len * spec.batch[2]);
  const bool codes = t.kernel == kCodesKernel;
  const int64_t block_rows = codes ? int64_t{t.row_blocks} * 8 : int64_t{t.row_warps} * 16;
  const int64_t row_tiles = (p.rows + block_rows - 1) / block_rows;
  const int64_t v_blocks =
      std::max<int64_t>(1, (spec.v_head_size + t.v_block - 1) / std::max(t.v_block, 1));
  const i32 splits = p.split.splits;
  EXPECT_EQ(t.v_block % 16, 0);
  EXPECT_EQ(plan.blocks, spec.batch[0] * spec.batch[1] * heads * row_tiles * v_blocks * splits);
  EXPECT_EQ(plan.threads, t.row_warps * t.token_warps * 32);
  if (!codes) {
    EXPECT_EQ(t.tile % ((TakesF32(t.arithmetic) ? 8 : 16) * t.token_warps), 0);
  }
  EXPECT_LE(plan.threads, 256);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes_per_block);
  EXPECT_GE(plan.blocks_per_multiprocessor, 1);
  EXPECT_LE(plan.blocks_per_multiprocessor * (plan.shared_bytes + 1024),
            device.shared_bytes_per_multiprocessor);
  EXPECT_GE(splits, 1);
  const int64_t slots = int64_t{plan.blocks_per_multiprocessor} * device.multiprocessors;
  if (splits > 1 && !codes) {
    EXPECT_LE(plan.blocks, slots);  // one wave
  }
  if (splits == 1) {
    EXPECT_EQ(plan.scratch_bytes, 0);
  } else {
    EXPECT_GE(p.kv_len / splits, codes ? t.warp_tile : t.tile);
    const int64_t state = block_rows * (t.v_block + 2) * 4;
    EXPECT_EQ(plan.partial_bytes, plan.blocks * state);
    EXPECT_EQ(plan.scratch_bytes, plan.partial_bytes + plan.blocks / splits * 4);
  }
}

// No block of either part takes much longer than its share of the slots would, so that few blocks
// of codes do not go on alone, nor many of tiles come in their way.
TEST(AttentionPlanTest, PartsShareTheSlotsByTheTimeThatTokensTake) {
  constexpr double kCostOfTiles = 8;
  for (const int64_t batch : {1, 2, 8, 64}) {
    for (const int64_t window : {128, 1024, 8192}) {
      for (const int64_t tokens : {1024, 8192, 65536}) {
        if (tokens < window) continue;  // then the window is what codes' kernel has
        SCOPED_TRACE(absl::StrCat(batch, " x ", tokens, " tokens beside ", window));
        const AttentionSpec spec = SpecOf({.batch = batch,
                                           .heads = 32,
                                           .kv_heads = 8,
                                           .kv_len = tokens,
                                           .head_size = 128,
                                           .dtype = kF16,
                                           .k = Format("u4:g64:rzp"),
                                           .v = Format("u4:g64:rzp"),
                                           .sink_tokens = 4,
                                           .window_tokens = window})
                                       .value();
        std::string why_not;
        const std::optional<PartsPlan> plan = PlanParts(spec, Device("sm_90a", 132), why_not);
        ASSERT_TRUE(plan.has_value()) << why_not;
        EXPECT_EQ(plan->params.codes_block, plan->others.blocks);
        EXPECT_EQ(plan->blocks, plan->others.blocks + plan->codes.blocks);
        const double slots = 132. * plan->codes.blocks_per_multiprocessor;
        const double of_tiles = kCostOfTiles * static_cast<double>(std::max<int64_t>(window, 256));
        const double heads = 8. * static_cast<double>(batch);
        const double ideal = heads * (of_tiles + static_cast<double>(tokens)) / slots;
        // Splits are whole numbers, and no shorter than a few tiles.
        const double least = std::max(2 * ideal, kCostOfTiles * 256);
        EXPECT_LE(static_cast<double>(tokens) / plan->params.codes_split.splits,
                  std::max(least, heads > slots ? static_cast<double>(tokens) : 0));
        EXPECT_LE(of_tiles / plan->params.split.splits,
                  std::max(least, heads > slots ? of_tiles : 0));
      }
    }
  }
}

TEST(AttentionPlanTest, IsSoundForManyShapesAndDevices) {
  int planned = 0;
  for (const char* arch : {"sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"}) {
    for (const int multiprocessors : {1, 16, 132}) {
      const DeviceProperties device = Device(arch, multiprocessors);
      for (const int64_t head_size : {1, 64, 80, 128, 256}) {
        for (const int64_t q_len : {1, 5, 64, 1000}) {
          for (const int64_t kv_len : {1, 64, 129, 4096, 131072}) {
            for (const DataType dtype : {kvant::kF16, kvant::kF32}) {
              const AttentionSpec spec = SpecOf({.batch = 2,
                                                 .heads = 8,
                                                 .kv_heads = 2,
                                                 .q_len = q_len,
                                                 .kv_len = kv_len,
                                                 .head_size = head_size,
                                                 .dtype = dtype,
                                                 .k = Format("u8:token"),
                                                 .v = Format("f16")})
                                             .value();
              SCOPED_TRACE(absl::StrCat(arch, " ", multiprocessors, ": ", spec.ToString()));
              const absl::StatusOr<AttentionPlan> plan = PlanAttention(spec, device);
              ASSERT_TRUE(plan.ok()) << plan.status();
              ExpectSound(*plan, spec, device);
              ++planned;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(planned, 5 * 3 * 5 * 4 * 5 * 2);
}

TEST(AttentionPlanTest, SplitsLongSequencesUntilTheDeviceIsBusy) {
  const auto blocks = [](int64_t batch, int64_t kv_len) {
    const AttentionSpec spec = SpecOf({.batch = batch,
                                       .heads = 32,
                                       .kv_heads = 8,
                                       .kv_len = kv_len,
                                       .head_size = 128,
                                       .dtype = kvant::kF16})
                                   .value();
    return PlanAttention(spec, Device("sm_90a")).value().blocks;
  };
  // No fewer than a multiprocessor has room for, but for what does not divide.
  EXPECT_GE(blocks(1, 131072), 2 * 132 - 8);
  EXPECT_GE(blocks(4, 8192), 2 * 132 - 32);
  // There is nothing to split, or no need to.
  EXPECT_EQ(blocks(1, 64), 8);
  EXPECT_EQ(blocks(256, 8192), 256 * 8);
}

TEST(AttentionPlanTest, KernelsDependNeitherOnLengthsNorOnBatches) {
  const auto source = [](int64_t batch, int64_t q_len, int64_t kv_len, const char* arch) {
    const AttentionSpec spec = SpecOf({.batch = batch,
                                       .heads = 32,
                                       .kv_heads = 8,
                                       .q_len = q_len,
                                       .kv_len = kv_len,
                                       .head_size = 128,
                                       .dtype = kvant::kF16,
                                       .k = Format("u4:g32:zp"),
                                       .v = Format("s8:token"),
                                       .kv_lengths = true,
                                       .single_op = true})
                                   .value();
    return MakeAttentionKernel(PlanAttention(spec, Device(arch)).value()).source.text;
  };
  const std::string decode = source(1, 1, 1024, "sm_90a");
  EXPECT_EQ(decode, source(64, 1, 131072, "sm_90a"));
  EXPECT_EQ(decode, source(1, 2, 1000, "sm_90a"));
  EXPECT_NE(decode, source(1, 512, 1024, "sm_90a"));
}

TEST(AttentionPlanTest, KernelsOfRangesDependNeitherOnLengthsNorOnBatches) {
  const auto source = [](int64_t batch, int64_t kv_len, const char* format) {
    const Graph graph = MakeAttentionGraph({.batch = batch,
                                            .heads = 32,
                                            .kv_heads = 8,
                                            .kv_len = kv_len,
                                            .head_size = 128,
                                            .dtype = kvant::kF16,
                                            .k = Format(format),
                                            .v = Format("u4:g32:nf4"),
                                            .hadamard = 128,
                                            .ring = true})
                            .value();
    const Partition partition = PartitionGraph(graph).value().front();
    const AttentionPlan plan = PlanAttention(*partition.attention(), Device("sm_90a")).value();
    return MakeAttentionKernel(plan).source.text;
  };
  // As packed codes, and by tiles.
  for (const char* format : {"u4:g32:rzp", "u4:channel:g32:rzp"}) {
    EXPECT_EQ(source(1, 1024, format), source(64, 131072, format));
  }
}

// As many as fill the device, and no partial results that are more than K and V.
TEST(AttentionPlanTest, SplitsOfTilesFillTheDeviceOnce) {
  const auto plan = [](const AttentionGraphOptions& options) {
    return PlanAttention(SpecOf(options).value(), Device("sm_90a")).value();
  };
  const AttentionPlan long_queries = plan({.heads = 32,
                                           .kv_heads = 8,
                                           .q_len = 64,
                                           .kv_len = 4096,
                                           .head_size = 128,
                                           .dtype = kvant::kF16});
  EXPECT_GT(long_queries.blocks, 132 / 2);
  EXPECT_LT(long_queries.partial_bytes, size_t{2} * 8 * 4096 * 128 * 2);
  const AttentionPlan one_query = plan(
      {.heads = 8, .kv_heads = 8, .q_len = 1, .kv_len = 65536, .head_size = 128, .dtype = kBF16});
  EXPECT_GT(one_query.blocks, 132 * one_query.blocks_per_multiprocessor / 2);
}

TEST(AttentionPlanTest, TakesBF16OverCodesWhereTheModePermits) {
  const auto arithmetic = [](FpMath mode, bool apply_to_int) {
    AttentionSpec spec = SpecOf({.q_len = 64,
                                 .kv_len = 64,
                                 .head_size = 128,
                                 .dtype = kBF16,
                                 .k = Format("s8:token"),
                                 .v = Format("s8:token")})
                             .value();
    spec.fpmath = mode;
    spec.apply_to_int = apply_to_int;
    return PlanAttention(spec, Device("sm_90a"))->traits.arithmetic;
  };
  EXPECT_EQ(arithmetic(FpMath::kStrict, true), kByTF32);
  EXPECT_EQ(arithmetic(FpMath::kBF16, false), kByTF32);
  EXPECT_EQ(arithmetic(FpMath::kBF16, true), kByBF16);
  EXPECT_EQ(arithmetic(FpMath::kAny, true), kByBF16);
}

TEST(AttentionPlanTest, RefusesInWords) {
  const auto why = [](const AttentionGraphOptions& options) {
    return std::string(PlanAttention(SpecOf(options).value(), Device("sm_90a")).status().message());
  };
  EXPECT_THAT(why({.head_size = 577}), HasSubstr("a head size of 577, more than 576"));
  DeviceProperties tiny = Device("sm_80");
  tiny.shared_bytes_per_block = 8 << 10;
  const AttentionSpec spec = SpecOf({.head_size = 128}).value();
  EXPECT_THAT(std::string(PlanAttention(spec, tiny).status().message()),
              HasSubstr("exceed the 8192 bytes of shared memory of a block"));
}

// Within a page the kernel on packed codes counts bytes in 32 bits.
TEST(AttentionPlanTest, PagesOfTwoGiBAreNotTakenAsPackedCodes) {
  for (const int64_t page_size : {32752, 32832}) {
    const AttentionSpec spec = SpecOf({.heads = 128,
                                       .kv_heads = 128,
                                       .kv_len = page_size,
                                       .head_size = 256,
                                       .dtype = kF16,
                                       .token_major = true,
                                       .page_size = page_size})
                                   .value();
    const AttentionPlan plan = PlanAttention(spec, Device("sm_90a")).value();
    EXPECT_EQ(plan.traits.kernel == kCodesKernel, page_size == 32752) << plan.ToString();
  }
}

TEST(OccupancyTest, RegistersAreGivenByEight) {
  EXPECT_EQ(RegisterLimit(128, 1), 255);
  EXPECT_EQ(RegisterLimit(128, 2), 255);
  EXPECT_EQ(RegisterLimit(128, 3), 168);
  EXPECT_EQ(RegisterLimit(128, 4), 128);
  EXPECT_EQ(RegisterLimit(128, 5), 96);
  EXPECT_EQ(RegisterLimit(256, 1), 255);
}

TEST(OccupancyTest, TheScarcestDecides) {
  const auto blocks = [](const char* arch, int threads, int registers, size_t kib) {
    return BlocksPerMultiprocessor(Device(arch), threads, registers, kib * 1024);
  };
  EXPECT_EQ(blocks("sm_90a", 128, 128, 16), 4);
  EXPECT_EQ(blocks("sm_90a", 128, 129, 16), 3);
  EXPECT_EQ(blocks("sm_90a", 128, 32, 75), 3);  // 76 KiB each of 228
  EXPECT_EQ(blocks("sm_80", 128, 32, 75), 2);   // of 164
  EXPECT_EQ(blocks("sm_86", 256, 16, 0), 6);    // 48 warps
  EXPECT_EQ(blocks("sm_90a", 256, 16, 0), 8);   // 64
}

}  // namespace
}  // namespace kvant::cuda
