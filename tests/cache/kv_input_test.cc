// What a cache reads of the keys and values that come: what each row takes, by its strides, and
// nothing beyond.
#include "kvant/cache/kv_input.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvant/cache/kv_cache.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Bench;
using cache_testing::Contents;
using cache_testing::MakeBench;
using cache_testing::SmallOptions;
using cache_testing::Tokens;

constexpr int64_t kRows = 2, kHeads = 2, kTokens = 9, kSize = 64;  // SmallOptions

// The same with tokens, not channels, side by side, up to where memory ends.
class Transposed {
 public:
  explicit Transposed(const Tokens& from)
      : memory_(kRows * kHeads * kTokens * kSize * sizeof(float)) {
    auto* to = static_cast<float*>(memory_.data());
    for (int64_t line = 0; line < kRows * kHeads * kSize; ++line) {
      const int64_t head = line / kSize;
      for (int64_t t = 0; t < kTokens; ++t) {
        *to++ = from.at(head / kHeads, head % kHeads, t)[line % kSize];
      }
    }
  }
  KvInput Input() const {
    KvInput input;
    input.desc.type = kF32;
    input.desc.dims = Dims{kRows, kHeads, kTokens, kSize};
    input.desc.strides = Dims{kHeads * kSize * kTokens, kSize * kTokens, 1, kTokens};
    input.data = {memory_.data(), memory_.bytes()};
    return input;
  }

 private:
  cpu::GuardedBuffer memory_;
};

TEST(KvInput, IsReadByItsStridesAndNotBeyond) {
  for (const std::string scheme : {"int8_token", "int4_g64_R128_s4", "kivi2"}) {
    SCOPED_TRACE(scheme);
    const Bench dense = MakeBench(SmallOptions(scheme, 64), kTokens);
    const Bench strided = MakeBench(SmallOptions(scheme, 64), kTokens);
    // The last row has no token left while the first still has.
    const int64_t counts[] = {kTokens, 2}, starts[] = {0, 5};
    const Transposed k(dense.k), v(dense.v);
    for (int64_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(
          dense.cache
              ->Append(layer, dense.k.Slice(0, kTokens), dense.v.Slice(0, kTokens), counts, starts)
              .ok());
      ASSERT_TRUE(strided.cache->Append(layer, k.Input(), v.Input(), counts, starts).ok());
    }
    for (int64_t row = 0; row < kRows; ++row) {
      EXPECT_EQ(Contents(*strided.cache, 1, row), Contents(*dense.cache, 1, row)) << row;
    }
  }
}

}  // namespace
}  // namespace kvant
