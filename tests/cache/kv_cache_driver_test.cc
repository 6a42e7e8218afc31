// What a KvCache on a GPU asks of the driver, and what becomes of it where that fails. The driver
// is one without a GPU: kernels do nothing.
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/driver_api.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant {
namespace {

using cache_testing::SmallOptions;

constexpr const char* kScheme = "u4:g64:rzp+rot+sinks2+window5+bf16";

class KvCacheDriverTest : public testing::Test {
 protected:
  static Engine MakeEngine() { return Engine::Create({.device = Device::kCuda}).value(); }

  // A cache, attention, and memory for both.
  struct Made {
    explicit Made(const Engine& engine)
        : memory(KvBlock::Allocate(engine.shared_memory(), 1 << 16).value()) {}
    KvBlock memory;
    std::unique_ptr<KvCache> cache;
    std::shared_ptr<const KvAttention> attention;

    KvInput Input() const { return MakeKvInput(kF32, memory.bytes().data(), {2, 2, 1, 64}); }
    absl::Status Append() const { return cache->Append(1, Input(), Input()); }
    absl::Status Execute() const {
      const size_t bytes = 2 * 4 * 64 * sizeof(float);
      std::byte* const data = memory.bytes().data();
      return attention->Execute(Stream(cache->engine()), 1, {data, bytes}, {data + bytes, bytes});
    }
  };
  static absl::Status Make(const Engine& engine, Made& made) {
    KVANT_ASSIGN_OR_RETURN(made.cache, KvCache::Create(engine, SmallOptions(kScheme, 40)));
    KVANT_ASSIGN_OR_RETURN(made.attention, made.cache->Attention({.query_heads = 4}));
    return absl::OkStatus();
  }

  cuda::FakeEnvironment fake_;
  const cuda::ScopedVariable folder_{"KVANT_CACHE_DIR", testing::TempDir() + "kvant_driver_test"};
};

TEST_F(KvCacheDriverTest, AStepLaunchesAndNothingElse) {
  const Engine engine = MakeEngine();
  Made made(engine);
  ASSERT_TRUE(Make(engine, made).ok());
  fake_.cuda().calls.clear();
  const absl::Status appended = made.Append();
  ASSERT_TRUE(appended.ok()) << appended;
  ASSERT_TRUE(made.Execute().ok());
  std::set<std::string> calls;
  for (const auto& [call, times] : fake_.cuda().calls) calls.insert(call);
  EXPECT_EQ(calls,
            (std::set<std::string>{"cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuLaunchKernel",
                                   "cuPointerGetAttributes", "cuStreamIsCapturing"}));
}

TEST_F(KvCacheDriverTest, ADriverThatFailsIsAStatus) {
  const std::vector<std::string> entries = {
#define KVANT_CUDA_SYMBOL(member, symbol, parameters) #symbol,
      KVANT_CUDA_DRIVER_ENTRIES(KVANT_CUDA_SYMBOL)
#undef KVANT_CUDA_SYMBOL
  };
  int failed = 0;
  for (const std::string& entry : entries) {
    SCOPED_TRACE(entry);
    const int modules = fake_.cuda().modules;
    const size_t blocks = fake_.cuda().memory.size();
    {
      const Engine engine = MakeEngine();
      Made made(engine);
      fake_.cuda().failures = {{entry, 719}};
      const absl::Status first = Make(engine, made);
      failed += first.ok() ? 0 : 1;
      fake_.cuda().failures.clear();
      if (!first.ok()) {
        EXPECT_FALSE(first.message().empty());
        ASSERT_TRUE(Make(engine, made).ok());
      }
      const std::vector<std::function<absl::Status()>> calls = {
          [&] { return made.Append(); },
          [&] { return made.Execute(); },
          [&] { return made.cache->Crop(0); },
          [&] {
            return made.cache->Reorder(std::vector<int64_t>{1, 1});
          },
          [&] { return made.cache->Fork().status(); },
          [&] { return made.cache->Reset(); }};
      for (const auto& call : calls) {
        ASSERT_TRUE(made.Append().ok());
        fake_.cuda().failures = {{entry, 719}};
        const absl::Status status = call();
        made.cache->length(0);
        fake_.cuda().failures.clear();
        failed += status.ok() ? 0 : 1;
        EXPECT_TRUE(status.ok() || !status.message().empty());
        ASSERT_TRUE(made.cache->Reset().ok());
        EXPECT_EQ(made.cache->length(1), 0);
      }
    }
    // Nothing is left but what could not be given back.
    EXPECT_TRUE(fake_.cuda().modules == modules || entry == "cuModuleUnload");
    EXPECT_TRUE(fake_.cuda().memory.size() == blocks || entry == "cuMemFree_v2");
  }
  // Of what a call cannot do without, it fails at least once.
  EXPECT_GT(failed, 20);
}

}  // namespace
}  // namespace kvant
