#include "kvant/tools/memory_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "kvant/tools/buffer.h"

namespace kvant {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// "32768K" or "260M"; 0 if it is neither.
int64_t ParseCacheSize(const std::string& text) {
  int64_t size = 0;
  size_t i = 0;
  for (; i < text.size() && i < 12 && text[i] >= '0' && text[i] <= '9'; ++i) {
    size = size * 10 + (text[i] - '0');
  }
  const char unit = i < text.size() ? text[i] : '\0';
  return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : unit == 'G' ? size << 30 : size;
}

// Sums a chunk as so many streams, a line of each in turn. Of one stream a core has only those
// lines under way that its own prefetching asks for: an Emerald Rapids reads eight twice as fast.
// In vectors: GCC keeps an array of words in memory, and the sums would be slower than reading.
template <int kStreams>
uint64_t Sum(const std::byte* data, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(16)));
  constexpr int64_t kLine = 64;
  const int64_t stream_bytes = bytes / kStreams / kLine * kLine;
  Words sums[kLine / sizeof(Words)] = {};
  for (int64_t i = 0; i < stream_bytes; i += kLine) {
    for (int stream = 0; stream < kStreams; ++stream) {
      Words line[std::size(sums)];
      std::memcpy(line, data + stream * stream_bytes + i, sizeof(line));
      for (size_t j = 0; j < std::size(sums); ++j) sums[j] += line[j];
    }
  }
  uint64_t sum = 0;
  for (const Words& words : sums) sum += words[0] + words[1];
  return sum;
}

}  // namespace

int64_t LastLevelCacheBytes() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    std::string text;
    if (file >> text) largest = std::max(largest, ParseCacheSize(text));
  }
  return largest > 0 ? largest : 64 * kMiB;
}

double MeasureReadGbPerSecond(Executor& executor) {
  constexpr int64_t kChunk = kMiB;
  constexpr int kSweeps = 14;
  const int64_t bytes =
      std::clamp(4 * LastLevelCacheBytes(), 64 * kMiB, 1024 * kMiB) / kChunk * kChunk;
  const Buffer memory(static_cast<size_t>(bytes));  // zeroed, so its pages exist
  std::atomic<uint64_t> total{0};                   // keeps the sums from being optimised out
  double best = std::numeric_limits<double>::infinity();
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    const auto start = std::chrono::steady_clock::now();
    executor.ParallelFor(bytes / kChunk, [&](int64_t chunk, int) {
      const std::byte* const from = memory.data() + chunk * kChunk;
      total.fetch_add(sweep % 2 == 0 ? Sum<1>(from, kChunk) : Sum<8>(from, kChunk),
                      std::memory_order_relaxed);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  return static_cast<double>(bytes) / best * 1e-9;
}

}  // namespace kvant
