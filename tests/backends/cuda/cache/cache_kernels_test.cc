// The tasks of a cache as CUDA kernels, beside the same on the host: the same bytes, and none
// elsewhere.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"

namespace kvant::cuda {
namespace {

// A task's memory, once for each kind of kernels. Behind each array lies what nobody may touch.
class Memory {
 public:
  static constexpr size_t kGuard = 64;

  template <class T>
  T* Put(const std::vector<T>& values) {
    std::vector<std::byte>& block =
        blocks_.emplace_back(values.size() * sizeof(T) + kGuard, std::byte{0x5a});
    std::memcpy(block.data(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(block.data());
  }
  bool operator==(const Memory& other) const { return blocks_ == other.blocks_; }

 private:
  std::vector<std::vector<std::byte>> blocks_;
};

class CacheKernelsTest : public testing::Test {
 protected:
  // make(memory) gives the same task each time.
  template <class Make>
  void Compare(const Make& make) {
    Memory mine, theirs;
    ASSERT_TRUE(MakeHostCacheKernels()->Run(make(mine), nullptr).ok());
    const absl::Status status = kernels_->Run(make(theirs), nullptr);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(mine == theirs);
  }
  int Below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  std::vector<int> Numbers(int count, int below) {
    std::vector<int> numbers(count);
    for (int& number : numbers) number = Below(below);
    return numbers;
  }
  // Of every kind: with sinks or none, a window that slides or leaves in bulk, tokens that are
  // kept.
  CacheLayout Layout() {
    CacheLayout layout;
    layout.sinks = Below(2) * 3;
    layout.residual = Below(3) == 0 ? 0 : 1 + Below(9);
    layout.bulk = layout.residual > 0 ? Below(2) : 0;
    layout.keep = Below(2) * 30;
    layout.main = layout.bulk != 0 ? layout.residual * 8 : 64;
    layout.window = layout.residual > 0 ? layout.MostInWindow() + Below(4) : 0;
    return layout;
  }

  std::mt19937 random_{7};
  const std::unique_ptr<CacheKernels> kernels_ = LoadCacheKernels(MakeSimtLauncher()).value();
};

TEST_F(CacheKernelsTest, Steps) {
  for (int round = 0; round < 60; ++round) {
    const int batch = round % 3 == 0 ? 1 + Below(4) : 1 + Below(300),
              stride = (batch + 15) / 16 * 16;
    const std::vector<int> lengths = Numbers(batch, 100), counts = Numbers(batch, 7);
    CacheStep step;
    step.batch = batch;
    step.stride = stride;
    step.capacity = 200;
    step.taken.count = 5;
    step.done = Below(4);
    step.tokens = 1 + Below(3);
    step.advance = Below(2);
    step.sides = 1 + Below(2);
    const bool by_row = Below(2) == 0, placed = Below(3) > 0;
    for (CacheSide& side : step.side) side.layout = Layout();
    Compare([&](Memory& memory) {
      CacheStep task = step;
      task.lengths = memory.Put(lengths);
      if (by_row) task.taken.counts = memory.Put(counts);
      for (CacheSide& side : task.side) {
        if (placed) side.places = memory.Put(std::vector<int>(kCachePlaces * stride, 9));
        side.ranges = memory.Put(std::vector<int>(batch * side.layout.segments() * 2, 9));
      }
      task.trouble = {memory.Put(std::vector<unsigned>{0}), memory.Put(std::vector<long long>{0})};
      return task;
    });
  }
}

// Nothing is placed or advanced, of no row; and nothing while the host has not read what was found.
TEST_F(CacheKernelsTest, ARowBeyondItsCapacityStopsAll) {
  std::vector<int> lengths(40, 3), places(kCachePlaces * 48, 7), ranges(80, 7);
  unsigned stopped = 0;
  long long news = 0;
  CacheStep step;
  step.lengths = lengths.data();
  step.batch = 40;
  step.stride = 48;
  step.capacity = 10;
  step.layer = 12;
  step.tokens = step.taken.count = step.advance = step.sides = 1;
  step.side[0].layout.main = 10;
  step.side[0].places = places.data();
  step.side[0].ranges = ranges.data();
  step.trouble = {&stopped, &news};
  lengths[33] = lengths[35] = 10;
  // The second time they have room, but nobody has read the first.
  for (const int length : {10, 3}) {
    lengths[33] = lengths[35] = length;
    const std::vector<int> before = lengths;
    ASSERT_TRUE(kernels_->Run(step, nullptr).ok());
    EXPECT_EQ(lengths, before);
    EXPECT_EQ(ranges, std::vector<int>(80, 7));
    for (int row = 0; row < 40; ++row) EXPECT_EQ(places[kRestAt * 48 + row], -1);
    const CacheNews found = CacheNews::Of(news);
    EXPECT_EQ(found.kind, CacheNewsKind::kBeyondCapacity);
    EXPECT_EQ(std::tuple(found.layer, found.row, found.detail), std::tuple(12, 33, 10));
    EXPECT_NE(stopped, 0);
  }
  stopped = 0;
  ASSERT_TRUE(kernels_->Run(step, nullptr).ok());
  EXPECT_EQ(lengths, std::vector<int>(40, 4));
}

TEST_F(CacheKernelsTest, LoadsOfEveryType) {
  for (int round = 0; round < 30; ++round) {
    CacheLoad load;
    load.batch = 1 + Below(3);
    load.stride = 16;
    load.heads = 1 + Below(3);
    load.tokens = 1 + Below(4);
    load.done = Below(3);
    const int starts_below = 3, all_tokens = load.tokens + load.done + starts_below;
    load.source.channels = 1 + Below(70);
    load.source.type = static_cast<CacheFloat>(round % 3);
    // Tokens before heads, and gaps between channels.
    const int gap = 1 + Below(2);
    load.source.strides[3] = gap;
    load.source.strides[1] = load.source.channels * gap;
    load.source.strides[2] = load.heads * load.source.strides[1];
    load.source.strides[0] = all_tokens * load.source.strides[2];
    std::vector<uint16_t> numbers(2 * load.batch * load.source.strides[0]);
    for (uint16_t& number : numbers) number = static_cast<uint16_t>(Below(0x7000));
    std::vector<int> places(kCachePlaces * load.stride, -1);
    for (int row = 0; row < load.batch; ++row) {
      places[(Below(2) == 0 ? kSinksAt : kRestAt) * load.stride + row] = Below(3) - 1;
    }
    const std::vector<int> starts = Numbers(load.batch, starts_below);
    const bool with_starts = Below(2) == 0;
    Compare([&](Memory& memory) {
      CacheLoad task = load;
      task.source.data = memory.Put(numbers);
      task.places = memory.Put(places);
      if (with_starts) task.starts = memory.Put(starts);
      task.to = memory.Put(
          std::vector<float>(load.batch * load.heads * load.tokens * load.source.channels, 0.5f));
      return task;
    });
  }
}

TEST_F(CacheKernelsTest, LeavesRings) {
  for (int round = 0; round < 30; ++round) {
    CacheLeave leave;
    leave.batch = 1 + Below(3);
    leave.stride = 16;
    leave.heads = 1 + Below(3);
    leave.slots = 1 + Below(20);
    leave.tokens = 1 + Below(leave.slots);
    leave.token_bytes = 2 * (1 + Below(130));
    std::vector<int> places(kCachePlaces * leave.stride, 3);
    for (int row = 0; row < leave.batch; ++row) {
      places[kLeavingFrom * leave.stride + row] = Below(leave.slots + 1) - 1;
    }
    const int lines = leave.batch * leave.heads;
    const std::vector<int> ring =
        Numbers((lines * leave.slots * leave.token_bytes + 3) / 4, 1 << 30);
    Compare([&](Memory& memory) {
      CacheLeave task = leave;
      task.ring = memory.Put(ring);
      task.places = memory.Put(places);
      task.to = memory.Put(std::vector<char>(lines * leave.tokens * leave.token_bytes, 1));
      return task;
    });
  }
}

TEST_F(CacheKernelsTest, CopiesAndExchangesRows) {
  for (int round = 0; round < 40; ++round) {
    CacheCopy copy;
    const int unit = round % 2 == 0 ? 16 : 1;
    copy.bytes = unit * (1 + Below(40));
    copy.rows = 1 + Below(9);
    copy.from_pitch = copy.bytes + unit * Below(3);
    copy.to_pitch = copy.bytes + unit * Below(3);
    copy.exchange = Below(2);
    const auto bytes = [&](long long pitch) {
      std::vector<unsigned char> all(pitch * copy.rows);
      for (unsigned char& byte : all) byte = static_cast<unsigned char>(Below(256));
      return all;
    };
    const auto from = bytes(copy.from_pitch), to = bytes(copy.to_pitch);
    Compare([&](Memory& memory) {
      CacheCopy task = copy;
      task.from = memory.Put(from);
      task.to = memory.Put(to);
      return task;
    });
  }
}

TEST_F(CacheKernelsTest, JoinsRanges) {
  for (int round = 0; round < 20; ++round) {
    CacheRanges ranges;
    ranges.batch = 1 + Below(200);
    ranges.segments = 1 + Below(3);
    ranges.new_tokens = 1 + Below(9);
    const std::vector<int> kept = Numbers(ranges.batch * ranges.segments * 2, 100);
    const std::vector<int> starts = Numbers(ranges.batch, ranges.new_tokens + 1);
    const bool with_starts = Below(2) == 0;
    Compare([&](Memory& memory) {
      CacheRanges task = ranges;
      task.kept = memory.Put(kept);
      if (with_starts) task.starts = memory.Put(starts);
      task.to = memory.Put(std::vector<int>(ranges.batch * (ranges.segments + 1) * 2, 5));
      return task;
    });
  }
}

TEST_F(CacheKernelsTest, FindsNumbersThatTheCacheDoesNotHold) {
  constexpr int kBatch = 2, kHeads = 3, kTokens = 4, kChannels = 20;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  unsigned stopped = 0;
  long long news = 0;
  std::vector<float> numbers[2];
  for (auto& side : numbers) side.assign(kBatch * kHeads * kTokens * kChannels, -65504.f);
  const std::vector<int> counts{3, 2}, starts{1, 0};
  CacheCheck check;
  for (int side : {0, 1}) {
    check.source[side] = {numbers[side].data(),
                          kCacheF32,
                          {kHeads * kTokens * kChannels, kTokens * kChannels, kChannels, 1},
                          kChannels};
    check.largest[side] = 65504;
  }
  check.taken = {counts.data(), starts.data(), kTokens};
  check.batch = kBatch;
  check.heads = kHeads;
  check.tokens = kTokens;
  check.layer = 5;
  check.trouble = {&stopped, &news};
  ASSERT_TRUE(kernels_->Run(check, nullptr).ok());
  EXPECT_EQ(stopped, 0);
  for (const float bad : {nan, infinity, -infinity, 65505.f}) {
    for (int side : {0, 1}) {
      // Row 1 takes tokens 0 and 1, row 0 tokens 1, 2 and 3.
      for (const auto& [row, token, taken] : {std::tuple(1, 1, true), std::tuple(1, 2, false),
                                              std::tuple(0, 0, false), std::tuple(0, 3, true)}) {
        float& number = numbers[side][((row * kHeads + 2) * kTokens + token) * kChannels + 19];
        const float good = std::exchange(number, bad);
        stopped = 0;
        news = 0;
        ASSERT_TRUE(kernels_->Run(check, nullptr).ok());
        number = good;
        EXPECT_EQ(stopped != 0, taken);
        const CacheNews found = CacheNews::Of(news);
        if (!taken) {
          EXPECT_EQ(found.kind, CacheNewsKind::kNone);
          continue;
        }
        EXPECT_EQ(found.kind, side == 0 ? CacheNewsKind::kNumberOfK : CacheNewsKind::kNumberOfV);
        EXPECT_EQ(std::tuple(found.layer, found.row, found.detail), std::tuple(5, row, 2));
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cuda
