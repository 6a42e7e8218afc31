// How long sequences get within a given memory, by construction and by filling it; and that a step
// allocates nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/tests/cache/kv_cache_testing.h"
#include "kvant_test_config.h"

#ifdef KVANT_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;

namespace {
std::atomic<int64_t> allocations{0};

void* Counted(size_t bytes, size_t alignment) {
  ++allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

// The compiler sees only one half of a pair where it inlines the other.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(size_t bytes) { return Counted(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Counted(bytes, std::max<size_t>(16, static_cast<size_t>(alignment)));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

namespace kvant {
namespace {

using cache_testing::Bench;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;

constexpr int64_t kBudget = int64_t{1} << 30;

// Llama-2-7B's.
KvCacheOptions Llama(const std::string& scheme, int64_t capacity) {
  KvCacheOptions options;
  options.layers = 32;
  options.heads = 32;
  options.head_size = 128;
  options.capacity = capacity;
  options.schemes = {ParseCacheScheme(scheme).value()};
  return options;
}

int64_t BytesAt(const std::string& scheme, int64_t capacity) {
  return KvCache::BytesFor(Llama(scheme, capacity)).value().total();
}

// The longest sequence that the budget has room for.
int64_t LongestWithin(const std::string& scheme, int64_t budget) {
  int64_t fits = 1, too_long = int64_t{1} << 20;
  while (too_long - fits > 1) {
    const int64_t middle = (fits + too_long) / 2;
    (BytesAt(scheme, middle) <= budget ? fits : too_long) = middle;
  }
  return fits;
}

// A field of /proc/self/status in bytes; -1 where there is none.
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return -1;
}

TEST(KvCacheMemory, Int4WithAWindowIsThreePointFourTimesSmaller) {
  const double f16 = static_cast<double>(BytesAt("f16", 32768));
  EXPECT_GE(f16 / static_cast<double>(BytesAt("int4_g64_R128", 32768)), 3.4);
  // The formula: 16 bits against 4.5, but 16 for the window.
  EXPECT_NEAR(f16, 32768. * 32 * 32 * 128 * 2 * 2, 0.001 * f16);
  const double int4 = (32768. - 129) * 4.5 / 8 + 129. * 2;
  EXPECT_NEAR(static_cast<double>(BytesAt("int4_g64_R128", 32768)), int4 * 32 * 32 * 128 * 2,
              0.001 * f16);
}

TEST(KvCacheMemory, SchemesReachAsFarAsTheirBitsSay) {
  const int64_t f16 = LongestWithin("f16", kBudget);
  EXPECT_GE(f16, 2030);
  EXPECT_LE(f16, 2048);
  for (const auto& [scheme, least] :
       {std::pair("int8_th", 1.9), std::pair("int4_g32", 3.1), std::pair("int4_g64_R128", 3.2),
        std::pair("kivi2", 4.5), std::pair("q4_0", 3.5), std::pair("int2_g32_R128", 4.5)}) {
    const int64_t longest = LongestWithin(scheme, kBudget);
    std::printf("%-14s %6d tokens in 1 GiB, %.2f of f16\n", scheme, static_cast<int>(longest),
                static_cast<double>(longest) / static_cast<double>(f16));
    EXPECT_GE(static_cast<double>(longest), least * static_cast<double>(f16)) << scheme;
  }
}

TEST(KvCacheMemory, FillingTheBudgetTakesWhatIsAccounted) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep memory of their own";
  for (const char* scheme : {"int4_g64_R128", "f16"}) {
    const int64_t capacity = LongestWithin(scheme, kBudget);
    const Engine engine = Engine::Create({.threads = 2}).value();
    constexpr int64_t kPiece = 128;
    const cache_testing::Tokens tokens(3, 1, 32, kPiece, 128);
    // Forgets the peak so far.
    std::ofstream("/proc/self/clear_refs") << "5";
    const int64_t before = StatusBytes("VmRSS");
    const auto cache = KvCache::Create(engine, Llama(scheme, capacity));
    ASSERT_TRUE(cache.ok()) << cache.status();
    for (int64_t t = 0; t < capacity; t += kPiece) {
      const int64_t count = std::min(kPiece, capacity - t);
      for (int64_t layer = 0; layer < 32; ++layer) {
        const absl::Status status =
            (*cache)->Append(layer, tokens.Slice(0, count), tokens.Slice(0, count));
        ASSERT_TRUE(status.ok()) << status;
      }
    }
    EXPECT_EQ((*cache)->length(31), capacity);
    EXPECT_FALSE((*cache)->Append(0, tokens.Slice(0, 1), tokens.Slice(0, 1)).ok());
    const int64_t accounted = (*cache)->bytes().total();
    EXPECT_LE(accounted, kBudget);
    EXPECT_GE((*cache)->used_bytes(), accounted * 97 / 100);
    const int64_t peak = StatusBytes("VmHWM");
    if (before < 0 || peak < 0) GTEST_SKIP() << "no /proc/self/status";
    EXPECT_NEAR(static_cast<double>(peak - before), static_cast<double>(accounted),
                0.03 * static_cast<double>(accounted))
        << scheme;
  }
}

// A window that no sequence fills has only the slots that sequences have.
TEST(KvCacheMemory, ShortCachesHaveShortWindows) {
  KvCacheOptions options = SmallOptions("int4_g64_R128_s4", 100);
  options.rollback = int64_t{1} << 60;
  const KvCacheBytes bytes = KvCache::BytesFor(options).value();
  EXPECT_EQ(bytes.window, 2 * 2 * 2 * 2 * 100 * 64 * 2);
}

TEST(KvCacheMemory, BytesAreThoseOfItsParts) {
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    const KvCacheOptions options = SmallOptions(std::string(named.name), 200);
    const Bench bench = MakeBench(options, 200);
    const KvCacheBytes bytes = bench.cache->bytes();
    EXPECT_EQ(bytes.total(), KvCache::BytesFor(options)->total());
    ASSERT_TRUE(bench.Append(0, 200).ok());
    int64_t parts = 0;
    for (const bool values : {false, true}) {
      for (int i = 0; i < kKvParts; ++i) {
        parts +=
            static_cast<int64_t>(2 * bench.cache->part(0, values, static_cast<KvPart>(i)).bytes);
      }
    }
    EXPECT_EQ(parts, bytes.codes + bytes.parameters + bytes.window) << named.name;
    EXPECT_LE(bench.cache->used_bytes(), parts);
  }
}

// Rows of an odd number of zero points share bytes.
TEST(KvCacheMemory, WhatIsUsedIsNeverMoreThanWhatThereIs) {
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    for (const int64_t capacity : {1, 33, 135}) {
      KvCacheOptions options = SmallOptions(std::string(named.name), capacity);
      options.batch = 3;
      options.heads = 1;
      for (auto* scales : {&options.k_scales, &options.v_scales}) {
        for (std::vector<float>& of : *scales) of.resize(of.size() > 1 ? 64 : 1);
      }
      const Bench bench = MakeBench(options, capacity);
      EXPECT_EQ(bench.cache->used_bytes(), 0);
      ASSERT_TRUE(bench.Append(0, capacity, 32).ok());
      const KvCacheBytes bytes = bench.cache->bytes();
      EXPECT_LE(bench.cache->used_bytes(), bytes.codes + bytes.parameters + bytes.window)
          << named.name << " " << capacity;
    }
  }
}

// The last token and the 32 before it are in the window, however many a rollback keeps beside it.
TEST(KvCacheMemory, WhatIsUsedIsWhatTheTokensTake) {
  for (const int64_t rollback : {0, 16}) {
    KvCacheOptions options = SmallOptions("u4:g32:zp+window32", 300);
    options.rollback = rollback;
    const Bench bench = MakeBench(options, 100);
    ASSERT_TRUE(bench.Append(0, 100).ok());
    // Codes, two scales of f16 and two zero points of a token that has left it.
    EXPECT_EQ(bench.cache->used_bytes(), 2 * 2 * 2 * 2 * (67 * (32 + 4 + 2) + 33 * 64 * 2));
  }
}

// Runs everything in the first of many slots.
class SerialExecutor : public Executor {
 public:
  int max_concurrency() const override { return 40; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t i, int slot)> body) override {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
  }
};

TEST(KvCacheMemory, AStepAllocatesNothing) {
#ifdef KVANT_SANITIZED
  GTEST_SKIP() << "allocations are the sanitizer's";
#else
  const Engine many = Engine::Create({.executor = std::make_shared<SerialExecutor>()}).value();
  for (const auto& [scheme, engine] :
       std::initializer_list<std::pair<const char*, const Engine*>>{{"f16", nullptr},
                                                                    {"int4_g32", nullptr},
                                                                    {"int4_g32", &many},
                                                                    {"kivi2", nullptr},
                                                                    {"rotKV4_g64_R128_s4", nullptr},
                                                                    {"rotKV4_g64_R128_s4", &many},
                                                                    {"q4_0", nullptr}}) {
    const Bench bench = MakeBench(SmallOptions(scheme, 300), 300, engine);
    ASSERT_TRUE(bench.Append(0, 100).ok());
    const auto attention = bench.cache->Attention({.query_heads = 4}).value();
    const std::vector<float> q = Queries(5, 2 * 4 * 64);
    std::vector<float> out(q.size());
    const size_t bytes = q.size() * sizeof(float);
    const Stream stream(bench.cache->engine());
    const auto step = [&](int64_t t) {
      for (int64_t layer = 0; layer < 2; ++layer) {
        EXPECT_TRUE(bench.cache->Append(layer, bench.k.Slice(t, 1), bench.v.Slice(t, 1)).ok());
        EXPECT_TRUE(attention->Execute(stream, layer, {q.data(), bytes}, {out.data(), bytes}).ok());
      }
    };
    for (int64_t t = 100; t < 130; ++t) step(t);
    const int64_t before = allocations;
    for (int64_t t = 130; t < 300; ++t) step(t);
    EXPECT_EQ(allocations - before, 0) << scheme << (engine == nullptr ? "" : ", 40 slots");
  }
#endif
}

// A server: chunks of any length by two threads, and a step of decoding between any two of them.
TEST(KvCacheMemory, ChunksOfAnyLengthTakeNoMoreThanTheLargest) {
  KvCacheOptions options;
  options.heads = 8;
  options.head_size = 128;
  options.capacity = 768;
  options.schemes = {*ParseCacheScheme("f16")};
  constexpr int64_t kMost = 256, kQueryHeads = 8, kThreads = 2, kStep = 16;
  const Bench bench = MakeBench(options, options.capacity);
  ASSERT_TRUE(bench.Append(0, options.capacity).ok());
  EXPECT_EQ(bench.cache->bytes().codes, 3 << 20);
  const Stream stream(bench.cache->engine());
  const std::vector<float> q = Queries(5, kQueryHeads * kMost * options.head_size);
  std::vector<std::vector<float>> out(kThreads, std::vector<float>(q.size()));
  const auto bytes_of = [&](int64_t tokens) {
    return kQueryHeads * tokens * options.head_size * sizeof(float);
  };
  const auto step = bench.cache->Attention({.query_heads = kQueryHeads}).value();
  const auto execute = [&](const KvAttention& attention, std::vector<float>& o) {
    const size_t bytes = bytes_of(attention.options().query_tokens);
    EXPECT_TRUE(attention.Execute(stream, 0, {q.data(), bytes}, {o.data(), bytes}).ok());
  };
  std::atomic<int64_t> largest{0};
  const auto serve = [&](int64_t from, std::vector<float>& o) {
    for (int64_t tokens = from; tokens <= kMost; tokens += kStep) {
      const auto attention =
          bench.cache->Attention({.query_heads = kQueryHeads, .query_tokens = tokens});
      ASSERT_TRUE(attention.ok()) << attention.status();
      const auto scratch = static_cast<int64_t>((*attention)->compiled(0)->scratch_bytes());
      for (int64_t most = largest; most < scratch; most = largest) {
        if (largest.compare_exchange_weak(most, scratch)) break;
      }
      execute(**attention, o);
      execute(*step, o);
    }
  };
  EXPECT_EQ(bench.cache->scratch_bytes(), 0);
  execute(*step, out[0]);
  const auto of_step = static_cast<int64_t>(step->compiled(0)->scratch_bytes());
  EXPECT_GE(bench.cache->scratch_bytes(), of_step);
  EXPECT_LE(bench.cache->scratch_bytes(), of_step * 5 / 4);
  const int64_t before = StatusBytes("VmRSS");
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { serve(1 + i * kStep / 2, out[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  const int64_t after = StatusBytes("VmRSS");
  // What the header says, for an engine of two threads.
  std::printf("scratch of one %.2f MiB, of all %.2f MiB; resident %+.1f MiB\n",
              static_cast<double>(largest) / (1 << 20),
              static_cast<double>(bench.cache->scratch_bytes()) / (1 << 20),
              static_cast<double>(after - before) / (1 << 20));
  EXPECT_LE(largest, (8 << 20) + 2 * (1 << 20));
  EXPECT_LE(bench.cache->scratch_bytes(), kThreads * largest * 5 / 4);
  // Beside it, what the allocator keeps for itself.
  if (!kSanitized && before >= 0) {
    EXPECT_LE(after - before, 96 << 20);
  }
#ifndef KVANT_SANITIZED
  const int64_t counted = allocations;
  for (int i = 0; i < 10; ++i) execute(*step, out[0]);
  EXPECT_EQ(allocations - counted, 0);
#endif
}

TEST(KvCacheMemory, AttentionsAreKeptForAsLongAsTheyAreAskedFor) {
  const Bench bench = MakeBench(SmallOptions("int4_g32", 64), 64);
  ASSERT_TRUE(bench.Append(0, 64).ok());
  const auto ask = [&](int64_t tokens) {
    return bench.cache->Attention({.query_heads = 2, .query_tokens = tokens}).value();
  };
  const auto held = ask(1);
  const std::weak_ptr<const KvAttention> second = ask(2), third = ask(3);
  for (size_t others = 3; others < KvCache::kKeptAttentions; ++others) {
    ask(static_cast<int64_t>(others) + 1);
  }
  EXPECT_EQ(ask(1), held);
  EXPECT_EQ(ask(2), second.lock());
  ask(60);  // in place of the one that was asked for longest ago
  EXPECT_TRUE(third.expired());
  EXPECT_FALSE(second.expired());
  for (int64_t tokens = 20; tokens < 40; ++tokens) ask(tokens);
  EXPECT_TRUE(second.expired());
  // Gone from the cache, and as good as ever.
  EXPECT_NE(ask(1), held);
  const std::vector<float> q = Queries(5, 2 * 2 * 64);
  std::vector<float> out(q.size());
  const size_t bytes = q.size() * sizeof(float);
  EXPECT_TRUE(
      held->Execute(Stream(bench.cache->engine()), 1, {q.data(), bytes}, {out.data(), bytes}).ok());
}

}  // namespace
}  // namespace kvant
