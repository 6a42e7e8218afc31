#include "kvant/cache/kv_scratch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "kvant/backends/engine.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

bool IsZero(absl::Span<const std::byte> block) {
  return std::all_of(block.begin(), block.end(), [](std::byte b) { return b == std::byte{0}; });
}

TEST(KvScratch, HasAsManyBlocksAsAreTakenAtOnce) {
  KvScratch scratch(Engine::Create({.threads = 1}).value());
  EXPECT_EQ(scratch.bytes(), 0);
  for (int i = 0; i < 3; ++i) {
    // The larger one comes back first.
    const auto second = scratch.Take(192), first = scratch.Take(1024);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_EQ(first->block().size(), 1024u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(second->block().data()) % 64, 0u);
    EXPECT_EQ(scratch.bytes(), 1216);
  }
  // The smallest that will do.
  const auto small = scratch.Take(150), large = scratch.Take(900);
  EXPECT_EQ(small->block().size(), 192u);
  EXPECT_EQ(large->block().size(), 1024u);
  EXPECT_EQ(scratch.bytes(), 1216);
}

TEST(KvScratch, GrowsInPlaceOfABlockThatIsTooSmall) {
  KvScratch scratch(Engine::Create({.threads = 1}).value());
  for (size_t bytes = 64; bytes <= size_t{1} << 20; bytes += 4096) {
    const auto block = scratch.Take(bytes);
    ASSERT_TRUE(block.ok());
    EXPECT_GE(block->block().size(), bytes);
    EXPECT_LE(scratch.bytes(), static_cast<int64_t>(bytes * 5 / 4));
  }
  EXPECT_TRUE(scratch.Take(0)->block().empty());
#ifndef KVANT_SANITIZED
  EXPECT_FALSE(scratch.Take(size_t{1} << 60).ok());
  EXPECT_EQ(scratch.bytes(), 0);  // the one that was too small is gone
  EXPECT_EQ(scratch.Take(64)->block().size(), 64u);
#endif
}

TEST(KvScratch, IsZeroedForKernelsThatCountInIt) {
  KvScratch scratch(Engine::Create({.device = Device::kCudaSimt}).value());
  for (const size_t bytes : {512, 100, 512}) {
    const auto block = scratch.Take(bytes);
    ASSERT_TRUE(block.ok());
    EXPECT_TRUE(IsZero(block->block()));
    std::memset(block->block().data(), 7, block->block().size());
  }
}

}  // namespace
}  // namespace kvant
