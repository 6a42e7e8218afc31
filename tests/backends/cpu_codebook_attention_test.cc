// Attention over K and V of codebooks, on the kernels of every instruction set.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvant/backends/cpu/plan.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/cpu_attention_harness.h"

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

TEST(CpuCodebookAttention, EveryTableGroupLayoutAndNumberOfRows) {
  using Order = Format::Order;
  const Dims5 groups[] = {{1, 1, 1, 1, 0},  {1, 1, 1, 1, 32}, {1, 1, 1, 1, 16}, {1, 1, 1, 1, 8},
                          {1, 1, 1, 32, 1}, {1, 1, 1, 0, 1},  {1, 1, 1, 4, 16}, {0, 0, 1, 0, 0}};
  for (const DataType type : {kU2, kU4, kU8}) {
    for (const Dims5& group : groups) {
      for (const Order order :
           {Order::kTokenMajor, Order::kChannelMajor, Order::kPadded, Order::kInterleaved}) {
        // Few rows by stored rows, many by tiles.
        for (const int64_t q_len : {1, 40}) {
          SCOPED_TRACE(testing::Message() << DataTypeName(type) << testing::PrintToString(group)
                                          << static_cast<int>(order) << " " << q_len);
          Case c = Plain({.b0 = 1, .ratio = 3, .q_len = q_len, .kv_len = 96, .d = 64, .dv = 32},
                         WithTable(type, group, order), WithTable(type, group, order));
          c.Check();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuCodebookAttention, OddSizesAndSegments) {
  for (const DataType type : {kU2, kU4, kU8}) {
    for (const int64_t d : {1, 3, 7, 24, 40, 80}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d);
      Case c = Plain({.q_len = 2, .kv_len = 75, .d = d, .dv = d + 2}, {}, {});
      const Format format = WithTable(type, {1, 1, 1, 1, 0});
      c.SetK(format, {64, 11});
      c.SetV(format, {7, 68});
      c.Check();
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodebookAttention, KernelSaysWhyItDoesNotMultiplyCodes) {
  if (HighestKernels().codes == nullptr) GTEST_SKIP() << "no integer products here";
  Case c = Plain({.q_len = 1, .kv_len = 64, .d = 64, .dv = 64}, WithTable(kU4, {1, 1, 1, 1, 32}),
                 WithTable(kU4, {1, 1, 1, 1, 32}));
  const std::string kernel = (*CompileAttention(c.spec, HighestKernels()))->kernel();
  EXPECT_NE(kernel.find("f32 products (codes are positions in a codebook)"), std::string::npos)
      << kernel;
}

}  // namespace
}  // namespace kvant::cpu
