// A KvCache whose memory the host cannot see, as a GPU's is, and whose driver fails at any of its
// calls: the CUDA kernels on the executor, behind a launcher that fails when it is told to. What is
// left must be what the host says that it is: as before, done, or a layer without tokens.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/backends/cuda/simt/launcher.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using cache_testing::Attend;
using cache_testing::AttendByDefinition;
using cache_testing::Bench;
using cache_testing::Contents;
using cache_testing::Difference;
using cache_testing::MakeBench;
using cache_testing::Queries;
using cache_testing::SmallOptions;

// Memory of the host that counts as a GPU's, and the calls that may fail, launches as well.
class FailingMemory : public DeviceMemory {
 public:
  absl::StatusOr<void*> Allocate(size_t bytes) override { return real_->Allocate(bytes); }
  void Free(void* memory) override { real_->Free(memory); }
  absl::StatusOr<void*> AllocateOnHost(size_t bytes) override {
    return real_->AllocateOnHost(bytes);
  }
  void FreeOnHost(void* memory) override { real_->FreeOnHost(memory); }
  absl::Status CopyFromHost(void* to, const void* from, size_t bytes) override {
    KVANT_RETURN_IF_ERROR(Fails());
    return real_->CopyFromHost(to, from, bytes);
  }
  absl::Status CopyToHost(void* to, const void* from, size_t bytes) override {
    KVANT_RETURN_IF_ERROR(Fails());
    return real_->CopyToHost(to, from, bytes);
  }
  absl::Status Synchronize(void*) override { return Fails(); }
  bool asynchronous() const override { return true; }
  std::optional<Unreachable> FindUnreachable(absl::Span<const void* const>) const override {
    return std::nullopt;
  }
  absl::StatusOr<StreamOrder> OrderOf(void*) override { return StreamOrder{1, captured}; }
  absl::StatusOr<bool> IsCaptured(void*) override {
    KVANT_RETURN_IF_ERROR(Fails());
    return captured;
  }
  absl::Status SynchronizeAll() override {
    EXPECT_FALSE(captured) << "waits on a stream that is captured";
    return Fails();
  }
  absl::Status Fails() {
    const int call = calls++;
    if (call < first_failure || call - first_failure >= failures) return absl::OkStatus();
    return absl::InternalError("the driver failed");
  }

  int calls = 0;  // that may fail, since it was set
  int first_failure = std::numeric_limits<int>::max(), failures = 0;
  bool captured = false;

 private:
  const std::shared_ptr<DeviceMemory> real_ = MakeHostMemory();
};

class FailingLauncher : public cuda::Launcher {
 public:
  using Kernel = std::shared_ptr<const cuda::LoadedKernel>;

  explicit FailingLauncher(std::shared_ptr<FailingMemory> memory) : memory_(std::move(memory)) {}
  const cuda::DeviceProperties& properties() const override { return real_->properties(); }
  absl::StatusOr<Kernel> Load(const cuda::KernelSpec& spec) override { return real_->Load(spec); }
  absl::Status Launch(const cuda::LoadedKernel& kernel, int64_t blocks, const void* params,
                      size_t bytes, void* stream) const override {
    KVANT_RETURN_IF_ERROR(memory_->Fails());
    return real_->Launch(kernel, blocks, params, bytes, stream);
  }
  std::shared_ptr<DeviceMemory> memory() const override { return memory_; }

 private:
  const std::shared_ptr<FailingMemory> memory_;
  const std::shared_ptr<cuda::Launcher> real_ = cuda::MakeSimtLauncher();
};

std::shared_ptr<FailingMemory>& TheMemory() {
  static auto& memory = *new std::shared_ptr<FailingMemory>();
  return memory;
}

class KvCacheFailureOnDeviceTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kQueryHeads = 4;
  // From a call that fails to the next; a sanitizer is slow.
#ifdef KVANT_SANITIZED
  static constexpr int kStep = 2;
#else
  static constexpr int kStep = 1;
#endif

  KvCacheFailureOnDeviceTest() {
    TheMemory() = std::make_shared<FailingMemory>();
    SetCudaSimtBackend([]() -> std::unique_ptr<Backend> {
      return cuda::MakeBackend("cuda_simt", std::make_shared<FailingLauncher>(TheMemory()));
    });
    engine_ = Engine::Create({.device = Device::kCudaSimt}).value();
  }
  ~KvCacheFailureOnDeviceTest() override { EnableCudaSimt(); }
  FailingMemory& memory() { return *TheMemory(); }

  Bench MakeOne() const {
    KvCacheOptions options = SmallOptions(GetParam(), 60);
    options.rollback = 3;
    return MakeBench(options, 60, &engine_);
  }

  // All of a cache, and that attention, which goes by the engine's lengths, sees just that.
  static std::string AllOf(KvCache& cache) {
    std::string all;
    const std::vector<float> q = Queries(3, cache.options().batch * kQueryHeads * 64);
    for (int64_t layer = 0; layer < cache.options().layers; ++layer) {
      for (int64_t b = 0; b < cache.options().batch; ++b) {
        all += std::to_string(cache.length(layer, b)) + ":" + Contents(cache, layer, b) + ";";
      }
      EXPECT_LE(Difference(Attend(cache, layer, q, kQueryHeads),
                           AttendByDefinition(cache, layer, q, kQueryHeads)),
                5e-4)
          << "layer " << layer << " of " << cache.length(layer, 0) << " tokens";
    }
    return all;
  }

  Engine engine_;
};

TEST_P(KvCacheFailureOnDeviceTest, HostAndEngineAgree) {
  const std::vector<std::pair<const char*, std::function<absl::Status(const Bench&)>>> calls = {
      {"a step", [](const Bench& b) { return b.Append(30, 31); }},
      {"a prompt", [](const Bench& b) { return b.Append(30, 43); }},
      {"an append by rows",
       [](const Bench& b) {
         return b.cache->Append(1, b.k.Slice(30, 2), b.v.Slice(30, 2), std::vector<int64_t>{2, 1});
       }},
      {"a crop", [](const Bench& b) { return b.cache->Crop(28); }},
      {"a reorder",
       [](const Bench& b) {
         return b.cache->Reorder(std::vector<int64_t>{1, 0});
       }},
      {"a copy",
       [](const Bench& b) {
         return b.cache->Reorder(std::vector<int64_t>{0, 0}, 1);
       }},
      {"a fork", [](const Bench& b) { return b.cache->Fork().status(); }},
      {"a reset", [](const Bench& b) { return b.cache->Reset(); }}};
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    int failed = 0;
    for (const int failures : {1, 1000}) {
      // Until it is beyond all that the call calls.
      bool any_left = true;
      for (int first = 0; any_left; first += kStep + first / 3) {
        SCOPED_TRACE(first);
        const Bench bench = MakeOne();
        ASSERT_TRUE(bench.Append(0, 30).ok());
        memory().calls = 0;
        memory().first_failure = first;
        memory().failures = failures;
        failed += call(bench).ok() ? 0 : 1;
        any_left = memory().calls > first;
        memory().failures = 0;
        AllOf(*bench.cache);
        // It goes on, from whatever is left.
        for (int64_t layer = 0; layer < 2; ++layer) {
          const int64_t length = bench.cache->length(layer, 0);
          ASSERT_TRUE(bench.cache->Append(layer, bench.k.Slice(31, 2), bench.v.Slice(31, 2)).ok());
          EXPECT_EQ(bench.cache->length(layer, 0), length + 2);
        }
        if (failures == 1) AllOf(*bench.cache);
        if (HasFailure()) return;
      }
    }
    EXPECT_GT(failed, 5 / kStep);
  }
}

// An append that kernels refuse leaves nothing behind: not in what rows may be taken back to, nor
// in what is copied of them.
TEST_P(KvCacheFailureOnDeviceTest, WhatWasRefusedNeverWas) {
  const Bench bench = MakeOne();
  ASSERT_TRUE(bench.Append(0, 30).ok());
  const std::string before = AllOf(*bench.cache);
  Bench spoilt = MakeOne();
  spoilt.k.at(1, 0, 55)[3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(bench.cache->Append(0, spoilt.k.Slice(30, 30), spoilt.v.Slice(30, 30)).ok());
  // A stream that is captured must not wait, but is told.
  memory().captured = true;
  for (int again = 0; again < 2; ++again) {
    const absl::Status told = bench.cache->Append(1, bench.k.Slice(30, 1), bench.v.Slice(30, 1));
    EXPECT_NE(told.message().find("K for layer 0 had a number in batch row 1, head 0"),
              std::string::npos)
        << told;
  }
  memory().captured = false;
  // Where the engine cannot be told to go on, it is told the next time.
  for (int first = 0; first < 6; ++first) {
    memory().calls = 0;
    memory().first_failure = first;
    memory().failures = 1;
    EXPECT_FALSE(bench.cache->Crop(30).ok());
    memory().failures = 0;
    if (memory().calls <= first) break;
  }
  ASSERT_TRUE(bench.cache->Crop(30).ok());
  EXPECT_EQ(AllOf(*bench.cache), before);
  const auto fork = bench.cache->Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(AllOf(**fork), before);
  ASSERT_TRUE(bench.cache->Reorder(std::vector<int64_t>{1, 0}).ok());
  ASSERT_TRUE(bench.cache->Reorder(std::vector<int64_t>{1, 0}).ok());
  EXPECT_EQ(AllOf(*bench.cache), before);
  ASSERT_TRUE(bench.cache->Crop(28).ok());
  ASSERT_TRUE(bench.Append(28, 40).ok());
  AllOf(*bench.cache);
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvCacheFailureOnDeviceTest,
                         testing::Values("u4:g64:rzp+rot+sinks2+window5+bf16",
                                         "u2:channel:g4:rzp+bulk8/u2:g16:rzp+window9"),
                         [](const auto& info) { return std::to_string(info.index); });

}  // namespace
}  // namespace kvant
