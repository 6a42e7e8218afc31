#include "kvant/backends/cuda/runtime/nvrtc.h"

#include <cstdlib>
#include <regex>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/embedded_sources.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"
#include "kvant/tests/backends/cuda/runtime/vocabulary_kernel.h"
#include "kvant_test_config.h"

namespace kvant::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Skips where there is no NVRTC; fails where one is required.
class NvrtcTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto nvrtc = Nvrtc::Open();
    if (nvrtc.ok()) {
      nvrtc_ = *nvrtc;
      return;
    }
    ASSERT_EQ(std::getenv("KVANT_REQUIRE_SHARED"), nullptr)
        << "KVANT_REQUIRE_SHARED is set, but " << nvrtc.status().message();
    GTEST_SKIP() << nvrtc.status().message();
  }
  std::shared_ptr<const Nvrtc> nvrtc_;
};

class NvrtcArchTest : public NvrtcTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(NvrtcArchTest, CompilesTheWholeVocabulary) {
  const auto cubin = nvrtc_->Compile({"vocabulary", kVocabularyKernel, "vocabulary"}, GetParam());
  ASSERT_TRUE(cubin.ok()) << cubin.status();
  EXPECT_EQ(cubin->bytes.substr(0, 4), "\177ELF");
  EXPECT_THAT(cubin->bytes, HasSubstr(".text.vocabulary"));
  EXPECT_EQ(cubin->arch, GetParam());
  EXPECT_EQ(cubin->nvrtc_major, nvrtc_->major());
  EXPECT_EQ(cubin->nvrtc_minor, nvrtc_->minor());
  ASSERT_TRUE(cubin->stats);
  EXPECT_GT(cubin->stats->registers, 16);
  EXPECT_LE(cubin->stats->registers, 128);
  EXPECT_EQ(cubin->stats->spill_store_bytes, 0);
  EXPECT_EQ(cubin->stats->spill_load_bytes, 0);
  EXPECT_EQ(cubin->stats->stack_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Archs, NvrtcArchTest, ::testing::Values("sm_80", "sm_90a", "sm_100a"),
                         [](const auto& info) { return std::string(info.param); });

// What is added to the vocabulary is to be compiled too.
TEST(VocabularyTest, KernelUsesEveryFunction) {
  const std::string header = ReadWholeFile(std::string(KVANT_SOURCE_DIR) + "/kernels/device/ptx.h");
  const std::regex function(R"(KVANT_DEVICE [A-Za-z0-9_]+ ([A-Z][A-Za-z0-9]+)\()");
  std::set<std::string> names;
  for (std::sregex_iterator m(header.begin(), header.end(), function), end; m != end; ++m) {
    names.insert((*m)[1]);
  }
  EXPECT_GT(names.size(), 50u);
  for (const std::string& name : names) {
    EXPECT_TRUE(
        std::regex_search(std::string(kVocabularyKernel), std::regex("\\b" + name + "[(<]")))
        << name;
  }
}

TEST_F(NvrtcTest, StatsOfOneEntryAmongSeveral) {
  const std::string text = R"(
extern "C" __global__ void small(float* const p) { p[threadIdx.x] = 1; }
extern "C" __global__ void stacked(float* const p) {
  __shared__ float tile[256];
  float own[200];
  for (int i = 0; i < 200; ++i) own[i] = p[i];
  tile[threadIdx.x] = own[static_cast<int>(p[0])];
  __syncthreads();
  p[threadIdx.x] = tile[threadIdx.x ^ 1];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* const p) {
  float own[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) own[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 2048 + threadIdx.x] = own[i] * own[(i * 7) % 64];
}
)";
  const auto stats = [&](const char* entry) {
    return nvrtc_->Compile({"three", text, entry}, "sm_90a").value().stats.value();
  };
  const KernelStats small = stats("small"), stacked = stats("stacked"),
                    spilling = stats("spilling");
  EXPECT_LT(small.registers, 16);
  EXPECT_EQ(small.stack_bytes, 0);
  EXPECT_EQ(small.static_shared_bytes, 0);
  EXPECT_GE(stacked.stack_bytes, 800);
  // Some compilers' tools count bytes that the system reserves.
  EXPECT_GE(stacked.static_shared_bytes, 1024);
  EXPECT_EQ(stacked.spill_store_bytes, 0);
  EXPECT_EQ(spilling.registers, 32);
  EXPECT_GT(spilling.spill_store_bytes, 0);
  EXPECT_GT(spilling.spill_load_bytes, 0);
}

TEST_F(NvrtcTest, ErrorShowsTheLog) {
  const auto cubin = nvrtc_->Compile(
      {"broken", "#include \"kvant/kernels/device/device.h\"\nint f() { return nonsense; }\n", "f"},
      "sm_90a");
  EXPECT_EQ(cubin.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(cubin.status().message()),
              AllOf(HasSubstr("kernel 'broken' for sm_90a with NVRTC"),
                    HasSubstr("NVRTC_ERROR_COMPILATION"), HasSubstr("broken.cu(2): error"),
                    HasSubstr("nonsense")));
}

TEST_F(NvrtcTest, HeadersAreTheEmbeddedOnesAlone) {
  const auto cubin = nvrtc_->Compile({"lost", "#include \"kvant/graph/graph.h\"\n", "f"}, "sm_80");
  EXPECT_THAT(std::string(cubin.status().message()), HasSubstr("kvant/graph/graph.h"));
}

TEST_F(NvrtcTest, UnknownArchitectureNamesTheKnown) {
  const auto cubin = nvrtc_->Compile({"any", "", "f"}, "sm_999");
  EXPECT_EQ(ErrorKindOf(cubin.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(cubin.status().message()),
              AllOf(HasSubstr("sm_999"), HasSubstr("knows only sm_"), HasSubstr(", sm_90")));
}

TEST(NvrtcOpenTest, SaysWhatWasTried) {
  const ScopedVariable variable("KVANT_LIBNVRTC", "/nowhere/libnvrtc.so");
  const auto nvrtc = Nvrtc::Open();
  EXPECT_EQ(ErrorKindOf(nvrtc.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(nvrtc.status().message()),
              AllOf(HasSubstr("no NVRTC"), HasSubstr("/nowhere/libnvrtc.so"),
                    HasSubstr("KVANT_LIBNVRTC"), Not(HasSubstr("libnvrtc.so.13"))));
}

TEST(NvrtcOpenTest, PassesOverWhatIsNoneAndWhatIsTooNew) {
  FakeEnvironment fake;
  const auto good = Nvrtc::Open({KVANT_FAKE_LIBCUDA, KVANT_FAKE_LIBNVRTC}, 13000);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ((*good)->path(), KVANT_FAKE_LIBNVRTC);
  EXPECT_EQ((*good)->major(), 13);
  const auto too_new = Nvrtc::Open({KVANT_FAKE_LIBCUDA, KVANT_FAKE_LIBNVRTC}, 12080);
  EXPECT_THAT(std::string(too_new.status().message()),
              AllOf(HasSubstr("has no nvrtcGetErrorString"), HasSubstr("is version 13.0")));
  const ScopedVariable older("KVANT_FAKE_NVRTC", "12.8");
  EXPECT_TRUE(Nvrtc::Open({KVANT_FAKE_LIBNVRTC}, 12000).ok());
}

TEST(PtxasLogTest, UnderstandsEveryLayout) {
  const auto hopper = ParsePtxasLog(
      "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
      "ptxas info    : Function properties for a\n"
      "ptxas         .     800 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
      "ptxas info    : Used 28 registers, used 1 barriers, 800 bytes cumulative stack size\n"
      "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
      "ptxas info    : Function properties for b\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Function properties for called_by_b\n"
      "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
      "ptxas info    : Used 255 registers, 1024 bytes smem, 376 bytes cmem[0]",
      "b");
  ASSERT_TRUE(hopper);
  EXPECT_EQ(hopper->registers, 255);
  EXPECT_EQ(hopper->static_shared_bytes, 1024);
  EXPECT_EQ(hopper->stack_bytes, 8);
  EXPECT_EQ(hopper->spill_store_bytes, 4);
  EXPECT_EQ(hopper->spill_load_bytes, 4);
}

TEST(PtxasLogTest, IsAbsentWhereItDoesNotTell) {
  EXPECT_FALSE(ParsePtxasLog("", "a"));
  EXPECT_FALSE(ParsePtxasLog("Compiling entry function 'ab' for 'sm_90a'\nUsed 8 registers", "a"));
  EXPECT_FALSE(ParsePtxasLog("Compiling entry function 'a' for 'sm_90a'\nUsed 8 registers", "a"));
  EXPECT_FALSE(ParsePtxasLog("Compiling entry function 'a'\n0 bytes spill stores", "a"));
}

TEST(EmbeddedSourcesTest, AreTheFilesOfTheTree) {
  std::set<std::string> names;
  for (const EmbeddedSource& source : EmbeddedSources()) {
    names.insert(source.name);
    const std::string below = std::string(source.name).substr(std::string("kvant/").size());
    EXPECT_EQ(source.text, ReadWholeFile(std::string(KVANT_SOURCE_DIR) + "/" + below))
        << source.name;
  }
  EXPECT_TRUE(names.contains("kvant/kernels/device/device.h"));
  EXPECT_TRUE(names.contains("kvant/kernels/device/ptx.h"));
}

}  // namespace
}  // namespace kvant::cuda
