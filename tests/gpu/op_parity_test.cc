// Each operation of the device vocabulary, on a GPU and by the executor: the same words. What of
// this needs no GPU is tested without one.
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/embedded_sources.h"
#include "kvant/backends/cuda/runtime/nvrtc.h"
#include "kvant/tests/gpu/gpu.h"
#include "kvant/tests/gpu/op_kernels.h"

namespace kvant::cuda {
namespace {

class OpParityTest : public testing::TestWithParam<OpKernel> {};

TEST_P(OpParityTest, GpuDoesWhatTheExecutorDoes) {
  const OpKernel& op = GetParam();
  const absl::StatusOr<std::vector<uint32_t>> expected = RunOnExecutor(op);
  ASSERT_TRUE(expected.ok()) << expected.status();
  KVANT_SKIP_WITHOUT_GPU();
  const absl::StatusOr<std::vector<uint32_t>> got = RunOn(**Gpu(), op);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(Compare(op, *expected, *got), "") << op.code;
}

INSTANTIATE_TEST_SUITE_P(Ops, OpParityTest, testing::ValuesIn(OpKernels()),
                         [](const auto& info) { return info.param.name; });

// Not judged: which published model of the tensor core's sums this GPU is most like.
TEST(MmaModelTest, LikestModel) {
  KVANT_SKIP_WITHOUT_GPU();
  const std::pair<const char*, simt::MmaModel> models[] = {
      {"f32_sums", {}}, {"v100", {4, 0}}, {"a100", {8, 1}}, {"h100", {16, 2}}};
  for (const OpKernel& op : OpKernels()) {
    if (op.comparison != OpComparison::kSums) continue;
    const absl::StatusOr<std::vector<uint32_t>> got = RunOn(**Gpu(), op);
    ASSERT_TRUE(got.ok()) << got.status();
    for (const auto& [name, model] : models) {
      const absl::StatusOr<std::vector<uint32_t>> expected = RunOnExecutor(op, model);
      ASSERT_TRUE(expected.ok()) << expected.status();
      size_t equal = 0;
      for (size_t i = 0; i < got->size(); ++i) equal += (*got)[i] == (*expected)[i];
      RecordProperty(absl::StrCat("equal_to_", name, "_percent"),
                     static_cast<int>(equal * 100 / got->size()));
    }
  }
}

std::string PtxHeader() {
  for (const EmbeddedSource& source : EmbeddedSources()) {
    if (std::string(source.name) == "kvant/kernels/device/ptx.h") return source.text;
  }
  return "";
}

TEST(OpKernelsTest, CoverEveryOperation) {
  const std::string header = PtxHeader();
  const std::regex operation(R"(KVANT_DEVICE \w+ (\w+)\()");
  std::set<std::string> names;
  for (std::sregex_iterator it(header.begin(), header.end(), operation), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  EXPECT_GT(names.size(), 50u);
  const std::string code = OpSource(OpKernels());
  for (const std::string& name : names) {
    EXPECT_TRUE(std::regex_search(code, std::regex("\\b" + name + "(<\\d>)?\\(")))
        << name << " has no row in op_kernels.inc";
  }
}

TEST(OpKernelsTest, Compile) {
  const absl::StatusOr<std::shared_ptr<const Nvrtc>> nvrtc = Nvrtc::Open();
  if (!nvrtc.ok()) GTEST_SKIP() << nvrtc.status().message();
  const KernelSource source{
      .name = "op_kernels", .text = OpSource(OpKernels()), .entry = "TestPosition"};
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const absl::StatusOr<Cubin> cubin = (*nvrtc)->Compile(source, arch);
    EXPECT_TRUE(cubin.ok()) << cubin.status();
  }
}

TEST(OpKernelsTest, ComparisonsFindWhatDiffers) {
  for (const OpKernel& op : OpKernels()) {
    const absl::StatusOr<std::vector<uint32_t>> words = RunOnExecutor(op);
    ASSERT_TRUE(words.ok()) << op.name << ": " << words.status();
    EXPECT_EQ(Compare(op, *words, *words), "") << op.name;
    std::vector<uint32_t> other = *words;
    other[other.size() / 2] ^= 0x40404040u;
    EXPECT_NE(Compare(op, *words, other), "") << op.name;
  }
}

}  // namespace
}  // namespace kvant::cuda
