// KvCache where its memory is a GPU's, beside one on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/cuda_simt.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_life.h"
#include "kvant/tests/cache/kv_cache_testing.h"
#include "kvant/tests/gpu/gpu.h"
#include "kvant/tools/cuda_stream.h"
#include "kvant/tools/graph_runner.h"

namespace kvant {
namespace {

using cache_testing::Attend;
using cache_testing::AttendByDefinition;
using cache_testing::Contents;
using cache_testing::Difference;
using cache_testing::Live;
using cache_testing::OnEngine;
using cache_testing::Queries;
using cache_testing::SmallOptions;
using cache_testing::Tokens;

constexpr int64_t kQueryHeads = 4, kSize = 64;

std::string NameOf(std::string name) {
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return name;
}

// Of every way to lie in memory: plain, quantized, rotated, sinks, windows that slide and in bulk,
// groups along tokens, zero points that share a byte between heads.
constexpr const char* kSchemes[] = {"f16",
                                    "int8_token",
                                    "int4zp_g64",
                                    "rotKV4_g32",
                                    "u4:g64:pzp+sinks3",
                                    "u4:g64:rzp+rot+sinks2+window5+bf16",
                                    "u2:channel:g4:rzp+bulk8/u2:g16:rzp+window9",
                                    "u4:channel:g8:zp+sinks1+bulk16/s8:token+window11"};

class KvCacheLivesTest : public testing::TestWithParam<const char*> {
 protected:
  static void LiveOn(const std::string& backend, int threads, uint64_t seed, int steps) {
    const Engine engine = Engine::Create(EngineOptionsFor(backend, threads)).value();
    KvCacheOptions options = SmallOptions(GetParam(), 71);
    options.rollback = 3;
    options.keep = {0, 24};
    Live(options, seed, steps, &engine);
  }
};

TEST_P(KvCacheLivesTest, OnTheExecutor) {
  EnableCudaSimt();
  LiveOn("cuda_simt", 2, 3, 60);
}

TEST_P(KvCacheLivesTest, OnAGpu) {
  KVANT_SKIP_WITHOUT_GPU();
  // An emulated one is slow.
  LiveOn("cuda", 0, 5, 12);
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvCacheLivesTest, testing::ValuesIn(kSchemes),
                         [](const auto& info) { return NameOf(info.param); });

// A cache on a GPU, one on the CPU, and tokens for both.
class KvCacheOnGpuTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    KVANT_SKIP_WITHOUT_GPU();
    engine_ = Engine::Create(EngineOptionsFor("cuda", 0)).value();
    stream_.emplace(CudaStream::Create().value());
  }
  Stream OnStream() const { return Stream(engine_, stream_->native()); }

  void Make(const std::string& scheme, int64_t capacity) {
    options_ = SmallOptions(scheme, capacity);
    options_.rollback = 3;
    gpu_ = KvCache::Create(engine_, options_).value();
    cpu_ = KvCache::Create(Engine::Create({.threads = 1}).value(), options_).value();
    k_.emplace(1, options_.batch, options_.heads, capacity + 8, kSize);
    v_.emplace(2, options_.batch, options_.heads, capacity + 8, kSize);
  }

  // Tokens [from, from + count) as they are in memory, dense.
  static std::vector<float> Dense(const Tokens& tokens, const KvCacheOptions& options, int64_t from,
                                  int64_t count) {
    std::vector<float> all;
    for (int64_t b = 0; b < options.batch; ++b) {
      for (int64_t h = 0; h < options.heads; ++h) {
        const float* first = tokens.at(b, h, from);
        all.insert(all.end(), first, first + count * kSize);
      }
    }
    return all;
  }
  Dims DimsOf(int64_t count) const { return {options_.batch, options_.heads, count, kSize}; }
  KvInput Input(const OnEngine& there, int64_t count) const {
    return MakeKvInput(kF32, there.data(), DimsOf(count));
  }

  // To both, in all layers.
  void Append(int64_t from, int64_t count) {
    const std::vector<float> k = Dense(*k_, options_, from, count);
    const std::vector<float> v = Dense(*v_, options_, from, count);
    const OnEngine k_there(engine_, k), v_there(engine_, v);
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const absl::Status status =
          gpu_->Append(OnStream(), layer, Input(k_there, count), Input(v_there, count));
      ASSERT_TRUE(status.ok()) << status;
    }
    AppendToCpu(from, count);
  }
  void AppendToCpu(int64_t from, int64_t count) {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      ASSERT_TRUE(cpu_->Append(layer, k_->Slice(from, count), v_->Slice(from, count)).ok());
    }
  }

  void ExpectTheSame() {
    ASSERT_TRUE(stream_->Synchronize().ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      for (int64_t row = 0; row < options_.batch; ++row) {
        ASSERT_EQ(gpu_->length(layer, row), cpu_->length(layer, row));
        ASSERT_EQ(Contents(*gpu_, layer, row), Contents(*cpu_, layer, row))
            << "layer " << layer << ", row " << row;
      }
    }
  }

  KvCacheOptions options_;
  Engine engine_;
  std::optional<CudaStream> stream_;
  std::unique_ptr<KvCache> gpu_, cpu_;
  std::optional<Tokens> k_, v_;
};

// One step of all layers, captured once and replayed while the sequences grow: through windows that
// fill, slide and leave in bulk.
TEST_P(KvCacheOnGpuTest, ReplaysAStep) {
  constexpr int64_t kPrompt = 13, kSteps = 21;
  Make(GetParam(), 48);
  Append(0, kPrompt);
  const auto attention = gpu_->Attention({.query_heads = kQueryHeads}).value();
  const int64_t queries = options_.batch * kQueryHeads * kSize;
  std::vector<float> none(Dense(*k_, options_, 0, 1).size()), q(queries), out(2 * queries);
  OnEngine k_there(engine_, none), v_there(engine_, none), q_there(engine_, q),
      out_there(engine_, out);
  const auto step = [&]() -> absl::Status {
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      KVANT_RETURN_IF_ERROR(gpu_->Append(OnStream(), layer, Input(k_there, 1), Input(v_there, 1)));
      KVANT_RETURN_IF_ERROR(attention->Execute(
          OnStream(), layer, q_there.tensor(),
          {out_there.data() + layer * queries, static_cast<size_t>(queries) * sizeof(float)}));
    }
    return absl::OkStatus();
  };
  const absl::StatusOr<CudaGraph> graph = stream_->Capture(step);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(gpu_->length(0), kPrompt) << "captured, not executed";

  for (int64_t t = kPrompt; t < kPrompt + kSteps; ++t) {
    const auto put = [&](OnEngine& there, const std::vector<float>& numbers) {
      return stream_->CopyFromHost(there.data(), numbers.data(), numbers.size() * sizeof(float));
    };
    const std::vector<float> k = Dense(*k_, options_, t, 1), v = Dense(*v_, options_, t, 1);
    q = Queries(static_cast<uint64_t>(t), queries);
    ASSERT_TRUE(put(k_there, k).ok() && put(v_there, v).ok() && put(q_there, q).ok());
    ASSERT_TRUE(stream_->Launch(*graph).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    AppendToCpu(t, 1);
    out_there.Fetch();
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const auto first = out.begin() + layer * queries;
      EXPECT_LE(
          Difference({first, first + queries}, AttendByDefinition(*cpu_, layer, q, kQueryHeads)),
          5e-4)
          << "layer " << layer << ", token " << t;
    }
  }
  ExpectTheSame();
  // The host learns what it did not see: all goes on from there.
  for (KvCache* cache : {gpu_.get(), cpu_.get()}) {
    const absl::Status cropped = cache->Crop(kPrompt + kSteps - 3);
    ASSERT_TRUE(cropped.ok()) << cropped;
    ASSERT_TRUE(cache->Reorder(std::vector<int64_t>{1, 0}).ok());
  }
  ExpectTheSame();
  Append(kPrompt + kSteps - 3, 6);
  ExpectTheSame();
  ASSERT_TRUE(stream_->Launch(*graph).ok());
  AppendToCpu(kPrompt + kSteps - 1, 1);
  gpu_ = gpu_->Fork(std::vector<int64_t>{1, 0}, 60).value();
  cpu_ = cpu_->Fork(std::vector<int64_t>{1, 0}, 60).value();
  ExpectTheSame();
  ASSERT_TRUE(gpu_->Crop(0).ok() && cpu_->Crop(0).ok());
  Append(0, 3);
  ExpectTheSame();
}

TEST_P(KvCacheOnGpuTest, GoesNoFurtherThanItsCapacity) {
  Make(GetParam(), 17);
  Append(0, 16);
  const std::vector<float> k = Dense(*k_, options_, 16, 1), v = Dense(*v_, options_, 16, 1);
  const OnEngine k_there(engine_, k), v_there(engine_, v);
  const absl::StatusOr<CudaGraph> graph = stream_->Capture(
      [&] { return gpu_->Append(OnStream(), 1, Input(k_there, 1), Input(v_there, 1)); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  const std::string first_layer = Contents(*gpu_, 0, 1);
  for (int replay = 0; replay < 3; ++replay) ASSERT_TRUE(stream_->Launch(*graph).ok());
  ASSERT_TRUE(stream_->Synchronize().ok());
  ASSERT_TRUE(cpu_->Append(1, k_->Slice(16, 1), v_->Slice(16, 1)).ok());
  const absl::Status status = gpu_->Append(OnStream(), 0, Input(k_there, 1), Input(v_there, 1));
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_EQ(status.message(),
            "layer 1: batch row 0 had 17 tokens, and those that came exceeded the capacity of 17; "
            "nothing was appended from then on");
  EXPECT_EQ(gpu_->length(1), 17);
  EXPECT_EQ(gpu_->length(0), 16);
  EXPECT_EQ(Contents(*gpu_, 0, 1), first_layer);
  EXPECT_EQ(Contents(*gpu_, 1, 1), Contents(*cpu_, 1, 1));
  // Told once. It goes on.
  ASSERT_TRUE(gpu_->Append(OnStream(), 0, Input(k_there, 1), Input(v_there, 1)).ok());
  ASSERT_TRUE(cpu_->Append(0, k_->Slice(16, 1), v_->Slice(16, 1)).ok());
  ExpectTheSame();
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvCacheOnGpuTest, testing::ValuesIn(kSchemes),
                         [](const auto& info) { return NameOf(info.param); });

using KvCacheInPartsOnGpuTest = KvCacheOnGpuTest;

// Caches whose codes have a kernel of their own, beside sinks and windows.
TEST_P(KvCacheInPartsOnGpuTest, SeesAllTokens) {
  Make(GetParam(), 640);
  const auto attention = gpu_->Attention({.query_heads = kQueryHeads}).value();
  EXPECT_NE(attention->compiled(0)->kernel().find("joined with those of other segments"),
            std::string::npos)
      << attention->compiled(0)->kernel();
  int64_t length = 0;
  for (const int64_t to : {2, 70, 71, 600}) {
    Append(length, to - length);
    length = to;
    ASSERT_TRUE(stream_->Synchronize().ok());
    const std::vector<float> q = Queries(9, options_.batch * kQueryHeads * kSize);
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      EXPECT_LE(Difference(Attend(*gpu_, layer, q, kQueryHeads),
                           AttendByDefinition(*cpu_, layer, q, kQueryHeads)),
                5e-4)
          << to << " tokens in layer " << layer;
    }
  }
  ExpectTheSame();
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvCacheInPartsOnGpuTest,
                         testing::Values("u4:g64:rzp+sinks4+window66", "s8:token+sinks3",
                                         "u4:g32:zp+rot+sinks2+window5/s8:g32+sinks7+window60"),
                         [](const auto& info) { return std::to_string(info.index); });

using KvCacheOnGpuErrorsTest = KvCacheOnGpuTest;

TEST_P(KvCacheOnGpuErrorsTest, SaysWhatItDoesNotTake) {
  Make(GetParam(), 40);
  Append(0, 5);
  std::vector<float> k = Dense(*k_, options_, 5, 2);
  const std::vector<float> v = Dense(*v_, options_, 5, 2);
  const OnEngine good_k(engine_, k), v_there(engine_, v);
  const auto message = [](const absl::Status& status) {
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message(gpu_->Append(OnStream(), 1, Input(good_k, 2),
                                 MakeKvInput(kF32, v.data(), DimsOf(2)))),
            "V for layer 1 points to host memory");
  // A number that is not finite is found later, in the second of its rows and the first head.
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 1e38f}) {
    if (bad == 1e38f && gpu_->tensor(0, false).value()->largest() > 1e38) continue;
    std::vector<float> spoilt = k;
    spoilt[2 * 2 * kSize + 3] = bad;
    const OnEngine spoilt_k(engine_, spoilt);
    ASSERT_TRUE(gpu_->Append(OnStream(), 0, Input(good_k, 2), Input(v_there, 2)).ok());
    ASSERT_TRUE(gpu_->Append(OnStream(), 1, Input(spoilt_k, 2), Input(v_there, 2)).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    const std::string told =
        message(gpu_->Append(OnStream(), 1, Input(good_k, 2), Input(v_there, 2)));
    EXPECT_NE(told.find("K for layer 1 had a number in batch row 1, head 0, that is not finite"),
              std::string::npos)
        << told;
    EXPECT_EQ(gpu_->length(0), 7);
    EXPECT_EQ(gpu_->length(1), 5);
    ASSERT_TRUE(gpu_->Reset().ok());
    ASSERT_TRUE(cpu_->Reset().ok());
    Append(0, 5);
  }
  ExpectTheSame();
  EXPECT_EQ(message(stream_
                        ->Capture([&] {
                          return gpu_->Append(OnStream(), 0, Input(good_k, 2), Input(v_there, 2));
                        })
                        .status()),
            "layer 0: a stream that is captured takes one token for each row, not 2");
  Append(5, 2);
  ExpectTheSame();
}

INSTANTIATE_TEST_SUITE_P(Schemes, KvCacheOnGpuErrorsTest,
                         testing::Values("f16", "u4:g64:rzp+rot+sinks2+window5+bf16"),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace kvant
