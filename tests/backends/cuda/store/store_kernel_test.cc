// Append, Hadamard and codebooks on CUDA's kernels, run by the SIMT executor: what tests of all
// backends do not ask. Memory ends where an unreadable page begins.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/runtime/jit.h"
#include "kvant/backends/cuda/simt/bodies.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/backends/cuda/store/quantize_plan.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/codebooks.h"
#include "kvant/kernels/device/simt.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/store/append_harness.h"

namespace kvant::testing {
namespace {

// As on a GPU, of whose memory the host reads nothing.
std::unique_ptr<Executable> CompileUnchecked(const Partition& partition, uint64_t seed = 0) {
  return std::move(
      *cuda::MakeBackend("cuda", cuda::MakeSimtLauncher({.seed = seed}))->Compile(partition));
}

std::unique_ptr<Executable> CompileOnCpu(const Partition& partition) {
  return std::move(*cpu::CompileStore(*partition.store(), *cpu::KernelsAt(0)));
}

// A kernel for each way that a launch may take, with rows that fit and rows that do not.
std::vector<AppendCase> PositionCases() {
  const int64_t capacity = 24, many = 2147483647;
  const std::vector<int64_t> any = {21, 22, -1, 0, many, 24},
                             grouped = {20, 24, 8, 6, -4, many - 3};
  const QuantizeTypes u4{kF32, kU4, kF16, kU4}, u2{kF16, kU2, kF32, kF16};
  std::vector<AppendCase> cases = {
      {"runs", {6, 2, 3, 32}, capacity, any, {1, 1, 1, 16}, u4},
      {"runs_of_odd_heads", {6, 3, 3, 12}, capacity, any, {1, 1, 1, 4}, u4},
      {"columns", {6, 2, 4, 40}, capacity, grouped, {1, 1, 4, 1}, u2},
      {"columns_that_share_bytes", {6, 2, 4, 9}, capacity, grouped, {1, 1, 4, 1}, u4},
      {"blocks", {6, 2, 4, 32}, capacity, grouped, {1, 2, 4, 16}, u2},
      {"elements", {6, 2, 3, 40}, capacity, any, {1, 1, 24, 40}, u2, /*given=*/true},
      {"elements_that_share_bytes", {6, 2, 3, 7}, capacity, any, {1, 1, 24, 7}, u2, true},
      {"numbers", {6, 2, 3, 40}, capacity, any, {}, {kF32, kBF16, kUndef, kUndef}},
      {"one_position", {6, 2, 3, 32}, capacity, {22}, {1, 1, 1, 16}, u4},
  };
  // Runs would go through several rows.
  const Dims rows_inside{1, 24 * 8 * 6, 8 * 6, 6};
  cases.push_back(
      {"rows_inside", {6, 2, 3, 8}, capacity, any, {1, 1, 1, 8}, {kF32, kS8, kF16, kU8}});
  cases.back().dst_strides = rows_inside;
  cases.push_back({"numbers_of_rows_inside", {6, 2, 3, 8}, capacity, any, {}, {kF32, kF16}});
  cases.back().types.scales = kUndef;
  cases.back().dst_strides = rows_inside;
  const size_t slots = cases.size();
  const std::vector<int64_t> any_slots = {95, 22, -1, 96, many, 0};
  cases.push_back({"slots", {6, 2, 1, 32}, capacity, any_slots, {1, 1, 1, 16}, u4});
  cases.push_back({"slots_of_groups", {6, 2, 1, 32}, capacity, any_slots, {1, 2, 1, 16}, u2});
  cases.push_back({"slots_given", {6, 2, 1, 40}, capacity, any_slots, {1, 1, 24, 40}, u2, true});
  cases.push_back({"slots_of_numbers", {6, 2, 1, 40}, capacity, any_slots, {}, {kF32, kBF16}});
  cases.back().types.scales = kUndef;
  for (size_t i = slots; i < cases.size(); ++i) cases[i].pages = 4;
  for (size_t i = slots; i < slots + 4; ++i) {
    cases.push_back(cases[i]);
    cases.back().name += "_of_64_bits";
    cases.back().position_type = kS64;
    cases.back().positions[4] = (int64_t{1} << 32) + 1;
  }
  return cases;
}

class CudaPositionsTest : public ::testing::TestWithParam<AppendCase> {};

TEST_P(CudaPositionsTest, RowsThatDoNotFitWriteNothing) {
  const AppendCase& test = GetParam();
  AppendCase fitting = test;
  for (int64_t& position : fitting.positions) {
    const int64_t unit = test.given || test.converts() ? 1 : test.group[2];
    if (position + test.dims[2] > test.Room() || position % unit != 0) position = -1;
  }
  const Bytes src = Pack(test.src(), QuantizeNumbers(test.dims));
  const QuantizeMemory before = MemoryBefore(test);
  const auto executor = MakeSerialExecutor();
  const QuantizeMemory want =
      *RunAppend(fitting, *CompileOnCpu(*fitting.MakePartition()), *executor, src, before);
  for (const uint64_t seed : {0, 5}) {
    const auto executable = CompileUnchecked(*test.MakePartition(), seed);
    SCOPED_TRACE(executable->kernel());
    const auto after = RunAppend(test, *executable, *executor, src, before);
    ASSERT_TRUE(after.ok()) << after.status();
    EXPECT_TRUE(*after == want);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaPositionsTest, ::testing::ValuesIn(PositionCases()),
                         [](const auto& info) { return info.param.name; });

// A launch of each kernel of a partition, over memory of zeros.
struct Watched {
  std::vector<simt::Report> reports;  // reads: of the inputs, in order
};

Watched RunWatched(const Partition& partition) {
  const auto plan = cuda::PlanStore(*partition.store(), cuda::MakeSimtLauncher()->properties());
  EXPECT_TRUE(plan.ok()) << plan.status();
  std::vector<std::unique_ptr<cpu::GuardedBuffer>> buffers;
  const auto allocate = [&buffers](size_t bytes) {
    buffers.push_back(std::make_unique<cpu::GuardedBuffer>(bytes));
    return buffers.back()->data();
  };
  simt::Options watching;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    const auto bytes = static_cast<size_t>(partition.input(static_cast<int>(i)).memory_bytes());
    inputs.push_back(allocate(bytes));
    watching.watches.push_back({inputs.back(), bytes});
  }
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    outputs.push_back(
        allocate(static_cast<size_t>(partition.output(static_cast<int>(i)).memory_bytes())));
  }
  std::byte* const scratch = static_cast<std::byte*>(allocate(plan->scratch_bytes));
  Watched watched;
  for (const cuda::QuantizeLaunch& launch : plan->launches) {
    cuda::QuantizeParams params = launch.params;
    cuda::FillParams(launch.binding, inputs, outputs, launch.binding.constant_bytes.data(), scratch,
                     &params);
    const cuda::KernelSpec kernel = cuda::MakeQuantizeKernel(launch);
    const cuda::SimtBody body = cuda::BodyOf(kernel);
    watched.reports.push_back(simt::Launch({launch.blocks, kernel.threads, kernel.shared_bytes},
                                           watching, [&] { body(&params); }));
    EXPECT_THAT(watched.reports.back().errors, ::testing::IsEmpty());
  }
  return watched;
}

// One launch that reads what is appended once, and positions.
TEST(CudaAppend, ReadsItsSourceOnce) {
  const QuantizeTypes u4{kF16, kU4, kF16, kF16}, u4_codes{kF16, kU4, kF16, kU4};
  const AppendCase cases[] = {
      {"token", {4, 8, 1, 128}, 256, {0}, {1, 1, 1, 32}, u4},
      {"tokens", {2, 4, 16, 128}, 256, {0, 0}, {1, 1, 1, 32}, u4},
      {"zero_points_in_a_byte", {2, 4, 16, 128}, 256, {0, 0}, {1, 1, 1, 32}, u4_codes},
      {"heads", {2, 4, 16, 128}, 256, {0, 0}, {1, 1, 1, 128}, {kF32, kS8, kF32, kUndef}},
      {"given", {2, 4, 16, 128}, 256, {0, 0}, {1, 1, 256, 1}, u4, /*given=*/true},
      {"numbers", {2, 4, 16, 128}, 256, {0, 0}, {}, {kF32, kF16, kUndef, kUndef}},
  };
  for (const AppendCase& test : cases) {
    SCOPED_TRACE(test.name);
    const Watched watched = RunWatched(*test.MakePartition());
    ASSERT_EQ(watched.reports.size(), 1u);
    const simt::Report& report = watched.reports[0];
    const std::vector<uint32_t>& reads = report.reads[0];
    EXPECT_EQ(std::count(reads.begin(), reads.end(), 1u), static_cast<int64_t>(reads.size()));
    EXPECT_THAT(report.reads[1], ::testing::Each(::testing::Gt(0u)));
    const simt::Counters& c = report.counters;
    // A run of f32 is two loads, of half of its sector each; given scales are loaded one by one.
    if (test.types.src == kF32 || test.given) continue;
    EXPECT_EQ(c.global_load_sectors, c.global_load_sectors_ideal) << c;
  }
}

TEST(CudaAppend, PlanSaysWhatRuns) {
  const auto text = [](const AppendCase& test) {
    return cuda::PlanStore(*test.MakePartition()->store(), cuda::MakeSimtLauncher()->properties())
        ->ToString();
  };
  EXPECT_EQ(text({"", {2, 2, 4, 64}, 16, {0}, {1, 1, 1, 32}, {kF32, kU4, kF16, kU4}}),
            "append, groups of 32 elements, each by 2 lanes");
  EXPECT_EQ(text({"", {2, 2, 4, 64}, 16, {0}, {}, {kF32, kF16, kUndef, kUndef}}),
            "append, convert");
  EXPECT_EQ(text({"", {1, 2, 4, 9}, 16, {0}, {1, 1, 1, 9}, {kF32, kU4, kF16, kU4}}),
            "append, parameters of groups, each by 32 threads, then codes, byte by byte, then "
            "codes, byte by byte");
}

// Bytes that rows share where rows are not what lies outermost.
TEST(CudaAppend, RefusesRowsThatInterleave) {
  const auto plan = [](const AppendCase& test) {
    return cuda::PlanStore(*test.MakePartition()->store(), cuda::MakeSimtLauncher()->properties());
  };
  const QuantizeTypes types{kF32, kU4, kF32, kUndef};
  AppendCase test{"tokens_first", {2, 1, 3, 7}, 8, {0, 4}, {1, 1, 1, 7}, types};
  EXPECT_TRUE(plan(test).ok());
  test.dst_strides = Dims{7, 7, 14, 1};
  EXPECT_EQ(
      plan(test).status().message(),
      "does not take codes of less than a byte whose groups or rows end within bytes that others "
      "write");
  test.positions = {4};
  EXPECT_TRUE(plan(test).ok());
  const AppendCase tiny{"rows_in_a_byte", {6, 1, 1, 1}, 1, {0, 0, 0, 0, 0, 0}, {1, 1, 1, 1}, types};
  EXPECT_FALSE(plan(tiny).ok());
}

// Several tokens, whose slots are in any order, have no owner of a byte that is of two.
TEST(CudaAppendPages, RefusesTokensThatShareBytes) {
  const auto why = [](AppendCase test) {
    test.pages = 4;
    test.axis = test.dims[1] == 1 ? 1 : 2;
    return std::string(
        cuda::PlanStore(*test.MakePartition()->store(), cuda::MakeSimtLauncher()->properties())
            .status()
            .message());
  };
  const QuantizeTypes u4{kF32, kU4, kF32, kUndef}, u4_zero_points{kF32, kU4, kF32, kU4};
  EXPECT_EQ(
      why({"odd", {2, 2, 1, 7}, 8, {1, 0}, {1, 1, 1, 7}, u4}),
      "does not take codes of less than a byte whose groups or rows end within bytes that others "
      "write");
  EXPECT_EQ(why({"odd", {2, 2, 1, 16}, 8, {1, 0}, {1, 1, 1, 16}, u4_zero_points}),
            "does not take zero points of less than a byte whose rows end within bytes that others "
            "write");
  EXPECT_EQ(why({"one", {1, 2, 1, 7}, 8, {1}, {1, 1, 1, 7}, u4}), "");
  EXPECT_EQ(why({"even", {2, 2, 1, 16}, 8, {1, 0}, {1, 1, 1, 8}, u4_zero_points}), "");
  EXPECT_EQ(why({"heads", {2, 1, 2, 16}, 8, {1, 0}, {1, 1, 1, 16}, u4_zero_points}), "");
}

struct Rotation {
  DataType src = kF32;
  Dims dims;
  int64_t block = 1;
};

Graph StoreGraph(const Rotation& rotation, bool appends) {
  GraphBuilder g;
  const Value x = g.Hadamard(g.Input("x", rotation.src, rotation.dims), rotation.block);
  if (!appends) {
    g.Output("y", x);
  } else {
    const Value positions = g.Input("positions", kS32, {1});
    const auto cache = g.Append(
        x, positions, 64, {.group_shape = {1, 1, 1, 32}, .type = kU4, .zero_point_type = kU4});
    g.Output("codes", cache.codes);
    g.Output("scales", cache.scales);
    g.Output("zero_points", *cache.zero_points);
  }
  absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

TEST(CudaHadamard, HasTheBitsOfTheCpu) {
  for (const int64_t block : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 32768}) {
    for (const DataType src : {kF32, kF16}) {
      const Rotation rotation{src,
                              {2, 3,
                               block < 16     ? 28
                               : block < 2048 ? 3 * block
                                              : block},
                              block};
      if (rotation.dims.back() % block != 0) continue;
      const Graph graph = StoreGraph(rotation, false);
      const Values inputs{{graph.inputs()[0], QuantizeNumbers(rotation.dims)}};
      const auto got = RunGraph(graph, inputs, "cuda_simt");
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->at(graph.outputs()[0]), RunGraph(graph, inputs, "cpu")->at(graph.outputs()[0]))
          << "blocks of " << block;
    }
  }
}

TEST(CudaHadamard, BeforeAnAppendIsOnePartition) {
  const Rotation rotation{kF16, {2, 3, 5, 64}, 64};
  const Graph graph = StoreGraph(rotation, true);
  ASSERT_EQ(PartitionGraph(graph)->size(), 1u);
  const Values inputs{{graph.inputs()[0], QuantizeNumbers(rotation.dims)},
                      {graph.inputs()[1], {7}}};
  const auto got = RunGraph(graph, inputs, "cuda_simt");
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, *RunGraph(graph, inputs, "cpu"));
}

TEST(CudaHadamard, ReadsAndWritesEachSectorOnce) {
  for (const int64_t block : {8, 64, 128, 512, 4096}) {
    const Graph graph = StoreGraph({kF16, {4, 4096}, block}, false);
    const Watched watched = RunWatched(PartitionGraph(graph)->front());
    ASSERT_EQ(watched.reports.size(), 1u);
    EXPECT_THAT(watched.reports[0].reads[0], ::testing::Each(1u)) << block;
    const simt::Counters& c = watched.reports[0].counters;
    EXPECT_EQ(c.global_load_sectors, c.global_load_sectors_ideal) << block << ": " << c;
    EXPECT_EQ(c.global_store_sectors, c.global_store_sectors_ideal) << block << ": " << c;
    EXPECT_EQ(c.shared_load_wavefronts, c.shared_load_wavefronts_ideal) << block << ": " << c;
  }
}

TEST(CudaHadamard, RefusesBlocksThatNoBlockOfThreadsHolds) {
  const Graph graph = StoreGraph({kF32, {1, 65536}, 65536}, false);
  const auto plan = cuda::PlanStore(*PartitionGraph(graph)->front().store(),
                                    cuda::MakeSimtLauncher()->properties());
  EXPECT_EQ(plan.status().message(),
            "does not take Hadamard blocks of 65536 elements, more than 32768");
}

TEST(CudaHadamard, RefusesBlocksThatSharedMemoryDoesNotHold) {
  const Graph graph = StoreGraph({kF32, {1, 32768}, 32768}, false);
  const auto plan = [&](const char* arch) {
    return cuda::PlanStore(*PartitionGraph(graph)->front().store(),
                           cuda::PropertiesOf(arch).value());
  };
  EXPECT_TRUE(plan("sm_90a").ok());
  EXPECT_EQ(plan("sm_86").status().message(),
            "does not take Hadamard blocks of 32768 elements, which take 131072 bytes of shared "
            "memory; the device has 101376");
}

// What is written for GPUs compiles for them, and nothing is spilled.
TEST(CudaStore, CompilesWithoutSpills) {
  std::vector<Partition> partitions;
  for (const AppendCase& test : PositionCases()) partitions.push_back(*test.MakePartition());
  const auto nf4 = FindCodebook("nf4")->values;
  AppendCase codebook{"nf4", {2, 8, 16, 128}, 64, {0}, {1, 1, 1, 32}, {kF16, kU4, kF16, kUndef}};
  codebook.codebook.assign(nf4.begin(), nf4.end());
  partitions.push_back(*codebook.MakePartition());
  codebook.codebook.assign(std::begin(kIq4NlCodebook), std::end(kIq4NlCodebook));
  codebook.ggml = true;
  partitions.push_back(*codebook.MakePartition());
  for (const int64_t block : {4, 128, 1024, 32768}) {
    const Graph graph = StoreGraph({kF16, {2, 32768}, block}, false);
    partitions.push_back(PartitionGraph(graph)->front());
  }
  cuda::Jit jit({.disk_cache = false});
  for (const char* arch : {"sm_80", "sm_90a", "sm_100a"}) {
    for (const Partition& partition : partitions) {
      const auto plan = cuda::PlanStore(*partition.store(), cuda::MakeSimtLauncher()->properties());
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (const cuda::QuantizeLaunch& launch : plan->launches) {
        const cuda::KernelSpec spec = cuda::MakeQuantizeKernel(launch);
        const auto cubin = jit.Get(spec.source, arch);
        if (cubin.status().code() == absl::StatusCode::kUnimplemented) {
          GTEST_SKIP() << cubin.status();
        }
        ASSERT_TRUE(cubin.ok()) << cubin.status();
        ASSERT_TRUE((*cubin)->stats.has_value());
        const cuda::KernelStats& stats = *(*cubin)->stats;
        EXPECT_EQ(stats.spill_store_bytes + stats.spill_load_bytes, 0)
            << plan->ToString() << " " << arch << ", " << stats.registers << " registers";
        // A block of 1024 threads has 64 registers for each.
        EXPECT_LE(stats.registers, spec.threads > 512 ? 64 : 128) << plan->ToString();
      }
    }
  }
}

// Lengths are no traits: a cache that grows needs no new kernel.
TEST(CudaStore, KernelsDoNotDependOnLengths) {
  const auto sources = [](const AppendCase& test) {
    std::vector<std::string> texts;
    const auto plan =
        cuda::PlanStore(*test.MakePartition()->store(), cuda::MakeSimtLauncher()->properties());
    for (const cuda::QuantizeLaunch& launch : plan->launches) {
      texts.push_back(cuda::MakeQuantizeKernel(launch).source.text);
    }
    return texts;
  };
  const QuantizeTypes u4{kF16, kU4, kF16, kU4}, none{kF32, kF16, kUndef, kUndef};
  for (const Dims& group : {Dims{1, 1, 1, 32}, Dims{1, 1, 1, 128}, Dims{}}) {
    const QuantizeTypes& types = group.empty() ? none : u4;
    const auto wanted = sources({"", {2, 8, 2, 128}, 64, {0, 0}, group, types});
    EXPECT_EQ(sources({"", {3, 4, 9, 128}, 8192, {0, 0, 0}, group, types}), wanted);
    EXPECT_EQ(sources({"", {1, 8, 1, 128}, 64, {0}, group, types}), wanted);
    EXPECT_EQ(sources({"", {3, 8, 1, 128}, 64, {0}, group, types}), wanted);
    AppendCase paged{"", {1, 8, 1, 128}, 16, {0}, group, types};
    paged.pages = 4;
    if (!group.empty()) paged.types.zero_points = kF16;
    const auto wanted_of_pages = sources(paged);
    paged.dims = {3, 4, 1, 128};
    paged.capacity = 64;
    paged.positions = {0, 1, 2};
    paged.pages = 900;
    EXPECT_EQ(sources(paged), wanted_of_pages);
  }
}

}  // namespace
}  // namespace kvant::testing
