// A cache whose engine's executor, the caller's, fails in the middle of an Append.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::Bench;
using cache_testing::Contents;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;

// Runs all there is to run, but the last index of one call: then it throws.
class FailsOnce : public Executor {
 public:
  int max_concurrency() const override { return 2; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    const bool fails = n > 1 && left_-- == 0;
    for (int64_t i = 0; i < n - fails; ++i) body(i, 0);
    if (fails) throw std::runtime_error("out of order");
  }
  // After so many calls.
  void FailAfter(int64_t calls) { left_ = calls; }
  bool has_failed() const { return left_ < 0; }

 private:
  std::atomic<int64_t> left_{int64_t{1} << 40};
};

TEST(KvCacheFailure, LeavesALayerEmptyAndNeverWrong) {
  const auto executor = std::make_shared<FailsOnce>();
  const Engine engine = Engine::Create({.executor = executor}).value();
  KvCacheOptions options = SmallOptions("u4:g32:rzp+sinks2+window64/u4:channel:g8:rzp+bulk64", 240);
  options.heads = 16;  // so that storing 64 tokens is work for several threads
  const Bench other = MakeBench(options, 240);
  ASSERT_TRUE(other.Append(0, 100).ok());
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    const auto cache = KvCache::Create(engine, options).value();
    const auto append = [&](int64_t layer, int64_t from, int64_t to) {
      return cache->Append(layer, other.k.Slice(from, to - from), other.v.Slice(from, to - from));
    };
    ASSERT_TRUE(append(0, 0, 100).ok());
    ASSERT_TRUE(append(1, 0, 100).ok());
    executor->FailAfter(failures);
    const absl::Status status = append(1, 100, 240);
    failed = executor->has_failed();
    executor->FailAfter(int64_t{1} << 40);
    ASSERT_EQ(status.ok(), !failed) << status;
    if (!failed) break;
    EXPECT_NE(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    for (const int64_t row : {0, 1}) {
      EXPECT_EQ(cache->length(1, row), 0);
      EXPECT_EQ(Contents(*cache, 0, row), Contents(*other.cache, 0, row));
    }
    // Which begins anew.
    ASSERT_TRUE(append(1, 0, 100).ok());
    EXPECT_EQ(Contents(*cache, 1, 1), Contents(*other.cache, 1, 1));
  }
  EXPECT_GT(failures, 4);
}

TEST(KvCacheFailure, OfAttentionKeepsItsScratch) {
  const auto executor = std::make_shared<FailsOnce>();
  const Engine engine = Engine::Create({.executor = executor}).value();
  const Bench bench = MakeBench(SmallOptions("int4_g32", 200), 200, &engine);
  ASSERT_TRUE(bench.Append(0, 200).ok());
  const auto attention = bench.cache->Attention({.query_heads = 4}).value();
  const std::vector<float> q = Queries(5, 2 * 4 * 64);
  std::vector<float> out(q.size());
  const size_t bytes = q.size() * sizeof(float);
  const auto execute = [&] {
    return attention->Execute(Stream(engine), 0, {q.data(), bytes}, {out.data(), bytes});
  };
  ASSERT_TRUE(execute().ok());
  const int64_t scratch = bench.cache->scratch_bytes();
  EXPECT_GT(scratch, 0);
  for (int i = 0; i < 3; ++i) {
    executor->FailAfter(0);
    EXPECT_FALSE(execute().ok());
    EXPECT_TRUE(executor->has_failed());
    EXPECT_TRUE(execute().ok());
    EXPECT_EQ(bench.cache->scratch_bytes(), scratch);
  }
}

// Compiles nothing, and so keeps nothing.
TEST(KvCacheFailure, AnEngineWithoutBackendsMakesNoCache) {
  EXPECT_FALSE(KvCache::Create(Engine(), SmallOptions("int4_g32", 20)).ok());
}

}  // namespace
}  // namespace kvant
