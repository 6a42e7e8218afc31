// Attention over K and V of codebooks, on the kernels of every instruction set and on those of the
// CUDA backend.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/common/simt_turn.h"

namespace kvant::cpu {
namespace {

std::vector<float> TableOf(DataType type) {
  if (type == kU4) return {std::begin(kNf4Codebook), std::end(kNf4Codebook)};
  std::vector<float> values;
  for (int i = 0; i < 1 << BitsOf(type); ++i) {
    values.push_back(static_cast<float>((i * 37 + 11) % 101) / 50 - 1);
  }
  return values;
}

Format WithTable(DataType type, const Dims5& group, Format::Order order = {}) {
  return {.type = type, .group = group, .scales = kF16, .codebook = TableOf(type), .order = order};
}

TEST(CodebookAttention, EveryTableGroupLayoutAndNumberOfRows) {
  using Order = Format::Order;
  const Dims5 groups[] = {{1, 1, 1, 1, 0},  {1, 1, 1, 1, 32}, {1, 1, 1, 1, 16}, {1, 1, 1, 1, 8},
                          {1, 1, 1, 32, 1}, {1, 1, 1, 0, 1},  {1, 1, 1, 4, 16}, {0, 0, 1, 0, 0}};
  for (const DataType type : {kU2, kU4, kU8}) {
    for (const Dims5& group : groups) {
      for (const Order order :
           {Order::kTokenMajor, Order::kChannelMajor, Order::kPadded, Order::kInterleaved}) {
        // 3 rows go by stored rows, 18 by tiles.
        for (const int64_t q_len : {1, 6}) {
          SCOPED_TRACE(testing::Message() << DataTypeName(type) << testing::PrintToString(group)
                                          << static_cast<int>(order) << " " << q_len);
          Case c = Plain({.b0 = 1, .ratio = 3, .q_len = q_len, .kv_len = 96, .d = 64, .dv = 32},
                         WithTable(type, group, order), WithTable(type, group, order));
          c.CheckEverywhere();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CodebookAttention, OddSizesAndSegments) {
  for (const DataType type : {kU2, kU4, kU8}) {
    for (const int64_t d : {1, 3, 7, 24, 40, 80}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d);
      Case c = Plain({.q_len = 2, .kv_len = 75, .d = d, .dv = d + 2}, {}, {});
      const Format format = WithTable(type, {1, 1, 1, 1, 0});
      c.SetK(format, {64, 11});
      c.SetV(format, {7, 68});
      c.CheckEverywhere();
      if (HasFailure()) return;
    }
  }
}

TEST(CodebookAttention, KernelSaysWhyItDoesNotMultiplyCodes) {
  if (HighestKernels().codes == nullptr) GTEST_SKIP() << "no integer products here";
  Case c = Plain({.q_len = 1, .kv_len = 64, .d = 64, .dv = 64}, WithTable(kU8, {1, 1, 1, 1, 32}),
                 WithTable(kU8, {1, 1, 1, 1, 32}));
  const std::string kernel = (*CompileAttention(c.spec, HighestKernels()))->kernel();
  EXPECT_NE(kernel.find("f32 products (codes are positions in a codebook of 256)"),
            std::string::npos)
      << kernel;
}

// Entries of any size, of which no two are alike.
TEST(CodebookAttention, SixteenEntriesAreMultipliedAsPackedCodes) {
  for (const float size : {1e-6f, 1.f, 3e5f}) {
    for (const int64_t group : {0, 16, 32}) {
      for (const int64_t d : {64, 128}) {
        for (const int64_t q_len : {1, 3}) {
          SCOPED_TRACE(testing::Message() << size << " " << group << " " << d << " " << q_len);
          Format keys = WithTable(kU4, {1, 1, 1, 1, group});
          Format values = keys;
          for (size_t i = 0; i < 16; ++i) {
            keys.codebook[i] = static_cast<float>((i * 7 + 3) % 16) - 6.3f;
            values.codebook[i] = size * (static_cast<float>((i * 11 + 5) % 16) - 4.7f);
          }
          Case c = Plain({.b0 = 2, .ratio = 3, .q_len = q_len, .kv_len = 332, .d = d, .dv = d},
                         keys, values);
          c.SetQ(kF16);
          const auto executable = c.CompileForCudaSimt();
          ASSERT_TRUE(executable.ok()) << executable.status();
          const std::string kernel = (*executable)->kernel();
          EXPECT_NE(kernel.find("products of packed codes"), std::string::npos) << kernel;
          if (!HasSimtTurn()) continue;
          const absl::Status status = c.RunOnCudaSimt(**executable);
          ASSERT_TRUE(status.ok()) << status;
          c.CompareWithOracle(2e-3 * std::max(size, 1e-6f));
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CodebookAttention, CudaKernelSaysWhyItDoesNotMultiplyCodes) {
  Case c = Plain({.q_len = 1, .kv_len = 64, .d = 64, .dv = 64}, WithTable(kU8, {1, 1, 1, 1, 32}),
                 WithTable(kU4, {1, 1, 1, 1, 32}));
  c.SetQ(kF16);
  std::string kernel = c.CheckOnCudaSimt();
  EXPECT_NE(kernel.find("K's codebook has 256 entries, not 16"), std::string::npos) << kernel;
  c = Plain({.q_len = 1, .kv_len = 64, .d = 64, .dv = 64}, {.type = kF16},
            WithTable(kU4, {1, 1, 1, 1, 32}));
  kernel = c.CheckOnCudaSimt();
  EXPECT_NE(kernel.find("V's codebook would be rounded to f16 for f32 queries"), std::string::npos)
      << kernel;
}

}  // namespace
}  // namespace kvant::cpu
