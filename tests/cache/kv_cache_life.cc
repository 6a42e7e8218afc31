#include "kvant/tests/cache/kv_cache_life.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/kv_cache_testing.h"

namespace kvant::cache_testing {
namespace {

constexpr int64_t kPool = 300;  // different tokens
constexpr int64_t kSize = 64;   // of a head
constexpr int64_t kQueryHeads = 4;
constexpr int64_t kMostCapacity = 250;

// A batch row of a layer: which tokens of the pool it has, and of K and V the most that it has had
// since it last had none behind the sinks.
struct Row {
  std::vector<int64_t> tokens;
  int64_t most[2] = {0, 0};
};

class Life {
 public:
  Life(const KvCacheOptions& options, uint64_t seed, const Engine* engine)
      : random_(seed),
        options_(options),
        cpu_(Engine::Create({.threads = 2}).value()),
        cache_(KvCache::Create(engine == nullptr ? cpu_ : *engine, options).value()),
        judge_(KvCache::Create(cpu_, JudgeOptions(options)).value()),
        pool_{Tokens(seed, 1, options.heads, kPool, kSize),
              Tokens(seed + 1, 1, options.heads, kPool, kSize)},
        rows_(options.layers, std::vector<Row>(options.batch)) {}

  void Live(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE(step);
      switch (Below(10)) {
        case 0:
          Reorder();
          break;
        case 1:
          Fork();
          break;
        case 2:
        case 3:
        case 4:
          Crop();
          break;
        case 5:
          if (Below(4) == 0) Reset();
          break;
        case 6:
          SaveAndLoad();
          break;
        default:
          Append();
      }
      if (!testing::Test::HasFatalFailure()) Check(Below(options_.layers), Below(options_.batch));
    }
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      for (int64_t b = 0; b < options_.batch; ++b) Check(layer, b);
    }
    if (!testing::Test::HasFatalFailure()) CheckAttention();
  }

 private:
  // It keeps all tokens of the longest sequence that there can be.
  static KvCacheOptions JudgeOptions(KvCacheOptions options) {
    options.batch = 1;
    options.rollback = 0;
    options.capacity = kMostCapacity;
    options.keep = {};
    return options;
  }
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  const KvTensor& Tensor(int64_t layer, int part) const {
    return **cache_->tensor(layer, part == 1);
  }

  // [rows][heads][tokens][size] of tokens of the pool.
  std::vector<float> Gather(int part, const std::vector<std::vector<int64_t>>& rows) const {
    std::vector<float> all;
    for (const auto& tokens : rows) {
      for (int64_t h = 0; h < options_.heads; ++h) {
        for (const int64_t token : tokens) {
          const float* values = pool_[part].at(0, h, token);
          all.insert(all.end(), values, values + kSize);
        }
      }
    }
    return all;
  }
  absl::Status AppendTo(KvCache& cache, int64_t layer,
                        const std::vector<std::vector<int64_t>>& tokens,
                        absl::Span<const int64_t> counts = {},
                        absl::Span<const int64_t> starts = {}) const {
    const Dims dims{static_cast<int64_t>(tokens.size()), options_.heads,
                    static_cast<int64_t>(tokens[0].size()), kSize};
    const std::vector<float> k = Gather(0, tokens), v = Gather(1, tokens);
    const OnEngine k_there(cache.engine(), k), v_there(cache.engine(), v);
    return cache.Append(layer, MakeKvInput(kF32, k_there.data(), dims),
                        MakeKvInput(kF32, v_there.data(), dims), counts, starts);
  }

  void Append() {
    const int64_t count = Below(4) == 0 ? Below(50) : Below(12);
    std::vector<std::vector<int64_t>> tokens(options_.batch, std::vector<int64_t>(count));
    for (auto& row : tokens) {
      for (int64_t& token : row) token = Below(kPool);
    }
    std::vector<int64_t> starts(options_.batch, 0), counts(options_.batch, count);
    const bool with_starts = Below(2) == 0, with_counts = Below(2) == 0;
    for (int64_t b = 0; b < options_.batch; ++b) {
      if (with_starts) starts[b] = Below(count + 1);
      counts[b] = count - starts[b];
      if (with_counts) counts[b] = Below(counts[b] + 1);
    }
    // Layers are mostly of the same length.
    const int64_t only = Below(6) == 0 ? Below(options_.layers) : -1;
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      if (only >= 0 && only != layer) continue;
      bool fits = true;
      for (int64_t b = 0; b < options_.batch; ++b) {
        fits &= Length(rows_[layer][b]) + counts[b] <= options_.capacity;
      }
      const absl::Status status =
          AppendTo(*cache_, layer, tokens, with_counts ? counts : absl::Span<const int64_t>(),
                   with_starts ? starts : absl::Span<const int64_t>());
      ASSERT_EQ(status.ok(), fits) << status;
      for (int64_t b = 0; b < options_.batch && fits; ++b) {
        Row& row = rows_[layer][b];
        const auto first = tokens[b].begin() + starts[b];
        row.tokens.insert(row.tokens.end(), first, first + counts[b]);
        for (int64_t& most : row.most) most = std::max(most, Length(row));
      }
    }
  }

  static int64_t Length(const Row& row) { return static_cast<int64_t>(row.tokens.size()); }

  // Whether a crop is sure to be taken: no token has left the window or what is kept, or it takes
  // back no more than the rollback, or so much that none is left behind the sinks.
  bool Promised(int64_t layer, const Row& row, int64_t to) const {
    if (to == Length(row)) return true;
    for (const int part : {0, 1}) {
      const KvLayout& layout = Tensor(layer, part).layout();
      bool left = layout.keep() > 0 && row.most[part] > layout.keep();
      left |= layout.residual() > 0 && row.most[part] > layout.sinks() + layout.window();
      if (!left || to <= layout.sinks()) continue;
      if (row.most[part] - to > options_.rollback) return false;
    }
    return true;
  }

  int64_t Target(int64_t length) {
    switch (Below(5)) {
      case 0:
        return 0;
      case 1:
        return std::min<int64_t>(length, Below(6));  // within the sinks, where there are any
      case 2:
        return Below(length + 1);
      default:
        return std::max<int64_t>(0, length - Below(options_.rollback + 2));
    }
  }

  // All layers, or one.
  std::optional<int64_t> Some() {
    return Below(3) == 0 ? std::optional(Below(options_.layers)) : std::nullopt;
  }

  void Crop() {
    const std::optional<int64_t> only = Some();
    const int64_t first = only.value_or(0), last = only ? *only + 1 : options_.layers;
    std::vector<int64_t> to(options_.batch);
    for (int64_t b = 0; b < options_.batch; ++b) {
      int64_t shortest = options_.capacity;
      for (int64_t layer = first; layer < last; ++layer) {
        shortest = std::min(shortest, Length(rows_[layer][b]));
      }
      to[b] = Target(shortest);
    }
    const bool alike = !only && Below(2) == 0;
    if (alike) std::fill(to.begin(), to.end(), *std::min_element(to.begin(), to.end()));
    bool promised = true;
    for (int64_t layer = first; layer < last; ++layer) {
      for (int64_t b = 0; b < options_.batch; ++b) {
        promised &= Promised(layer, rows_[layer][b], to[b]);
      }
    }
    const absl::Status status = alike ? cache_->Crop(to[0]) : cache_->Crop(to, only);
    if (!status.ok()) {
      ASSERT_FALSE(promised) << status;
      EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
      return;
    }
    for (int64_t layer = first; layer < last; ++layer) {
      for (int64_t b = 0; b < options_.batch; ++b) Shorten(layer, rows_[layer][b], to[b]);
    }
  }

  void Shorten(int64_t layer, Row& row, int64_t to) const {
    row.tokens.resize(to);
    for (const int part : {0, 1}) {
      if (to <= Tensor(layer, part).layout().sinks()) row.most[part] = to;
    }
  }

  void Reset() {
    ASSERT_TRUE(cache_->Reset().ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      for (Row& row : rows_[layer]) Shorten(layer, row, 0);
    }
  }

  std::vector<int64_t> RandomRows(int64_t count) {
    std::vector<int64_t> rows(count);
    for (int64_t& row : rows) row = Below(options_.batch);
    return rows;
  }
  static std::vector<Row> Taken(const std::vector<Row>& rows, const std::vector<int64_t>& order) {
    std::vector<Row> taken;
    for (const int64_t row : order) taken.push_back(rows[row]);
    return taken;
  }

  void Reorder() {
    const std::optional<int64_t> only = Some();
    const std::vector<int64_t> order = RandomRows(options_.batch);
    ASSERT_TRUE(cache_->Reorder(order, only).ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      if (!only || layer == *only) rows_[layer] = Taken(rows_[layer], order);
    }
  }

  // Goes on with a cache of another capacity and other rows before, which has loaded all layers.
  void SaveAndLoad() {
    KvCacheOptions options = options_;
    int64_t longest = 1;
    for (const std::vector<Row>& layer : rows_) {
      for (const Row& row : layer) longest = std::max(longest, Length(row));
    }
    options.capacity = std::min(kMostCapacity, longest + Below(20));
    auto other = KvCache::Create(cache_->engine(), options).value();
    const Stream stream(cache_->engine());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      const std::vector<std::vector<int64_t>> before(
          options.batch, std::vector<int64_t>(Below(options.capacity), Below(kPool)));
      ASSERT_TRUE(AppendTo(*other, layer, before).ok());
      std::vector<int64_t> lengths;
      for (const Row& row : rows_[layer]) lengths.push_back(Length(row));
      const int64_t bytes = cache_->SavedBytes(layer, lengths).value();
      KvBlock block = KvBlock::Allocate(cache_->engine().shared_memory(), bytes).value();
      ASSERT_TRUE(cache_->Save(stream, layer, {block.bytes().data(), block.bytes().size()}).ok());
      ASSERT_TRUE(
          other->Load(stream, layer, lengths, {block.bytes().data(), block.bytes().size()}).ok());
      // No token comes back that has left a window.
      for (Row& row : rows_[layer]) {
        for (int64_t& most : row.most) most = Length(row) + options_.rollback;
      }
    }
    options_ = options;
    cache_ = std::move(other);
  }

  // Goes on with the fork, or with what it is a fork of while the other changes.
  void Fork() {
    const std::vector<int64_t> order = RandomRows(1 + Below(4));
    int64_t longest = 0;
    for (const std::vector<Row>& layer : rows_) {
      for (const Row& row : Taken(layer, order)) longest = std::max(longest, Length(row));
    }
    // Often no more than there must be, which may be less than there was.
    const int64_t capacity =
        Below(2) == 0 ? 1 + Below(kMostCapacity) : std::max<int64_t>(1, longest - 1 + Below(4));
    const bool same = Below(3) == 0;
    auto fork = same ? cache_->Fork() : cache_->Fork(order, capacity);
    ASSERT_EQ(fork.ok(), same || longest <= capacity) << fork.status();
    if (!fork.ok()) return;
    if (Below(2) == 0) {
      std::swap(*fork, cache_);
      if (!same) {
        options_ = cache_->options();
        for (std::vector<Row>& layer : rows_) layer = Taken(layer, order);
      }
    }
    const std::vector<std::vector<int64_t>> one((*fork)->options().batch, {Below(kPool)});
    ASSERT_TRUE((*fork)->Reset().ok());
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      ASSERT_TRUE(AppendTo(**fork, layer, one).ok());
    }
  }

  void Check(int64_t layer, int64_t b) {
    const Row& row = rows_[layer][b];
    ASSERT_EQ(cache_->length(layer, b), Length(row));
    ASSERT_TRUE(judge_->Reset().ok());
    ASSERT_TRUE(AppendTo(*judge_, layer, {row.tokens}).ok());
    const int64_t keep = KeepOf(options_, layer);
    const int64_t kept = keep == 0 ? Length(row) : std::min(keep, Length(row));
    for (const bool values : {false, true}) {
      for (int64_t head = 0; head < options_.heads; ++head) {
        std::vector<double> all = Stored(*judge_, layer, values, 0, head);
        all.erase(all.begin(), all.end() - kept * kSize);
        ASSERT_EQ(Stored(*cache_, layer, values, b, head), all)
            << "layer " << layer << ", row " << b << " of " << Length(row) << " tokens, head "
            << head << (values ? " of V" : " of K");
      }
    }
    for (const int part : {0, 1}) CheckValues(layer, b, part, Below(options_.heads));
  }

  // Tokens as they are, or rounded: sinks and windows to their type, others to codes.
  void CheckValues(int64_t layer, int64_t b, int part, int64_t head) const {
    const Row& row = rows_[layer][b];
    const KvTensor& tensor = Tensor(layer, part);
    const auto ranges = cache_->Ranges(layer, part == 1, b);
    std::vector<double> stored = Stored(*cache_, layer, part == 1, b, head);
    const int64_t kept = static_cast<int64_t>(stored.size()) / kSize;
    if (tensor.rotation() != 0) Rotate(tensor.rotation(), stored);
    const double bound = ErrorBound(tensor.storage(), 25);
    const bool plain = tensor.rotation() == 0;
    for (int64_t t = 0; t < kept; ++t) {
      const bool quantized = t >= ranges[0].tokens && t < ranges[0].tokens + ranges[1].tokens &&
                             tensor.storage().format.quantized();
      const DataType type = tensor.storage().format.quantized() ? tensor.storage().window_type
                                                                : tensor.storage().format.type;
      for (int64_t d = 0; d < kSize; ++d) {
        const double want = pool_[part].at(0, head, row.tokens[Length(row) - kept + t])[d];
        const double got = stored[t * kSize + d];
        if (quantized || !plain) {
          ASSERT_NEAR(got, want, bound) << "token " << t << ", channel " << d;
        } else {
          ASSERT_EQ(got, RoundTo(type, want)) << "token " << t << ", channel " << d;
        }
      }
    }
  }

  void CheckAttention() const {
    const std::vector<float> q = Queries(5, options_.batch * kQueryHeads * kSize);
    for (int64_t layer = 0; layer < options_.layers; ++layer) {
      EXPECT_LE(Difference(Attend(*cache_, layer, q, kQueryHeads),
                           AttendByDefinition(*cache_, layer, q, kQueryHeads)),
                5e-4)
          << "layer " << layer;
    }
  }

  std::mt19937_64 random_;
  KvCacheOptions options_;  // of cache_
  const Engine cpu_;
  std::unique_ptr<KvCache> cache_;
  const std::unique_ptr<KvCache> judge_;
  const Tokens pool_[2];
  std::vector<std::vector<Row>> rows_;  // by layer
};

}  // namespace

void Live(const KvCacheOptions& options, uint64_t seed, int steps, const Engine* engine) {
  Life(options, seed, engine).Live(steps);
}

}  // namespace kvant::cache_testing
