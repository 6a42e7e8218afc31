#include "kvant/cache/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache_options.h"
#include "kvant/graph/status.h"

namespace kvant {
// Places arrays one after another, and counts what is for what. Without memory it only counts.
class KvCache::Arena {
 public:
  explicit Arena(std::byte* memory) : memory_(memory) {}

  std::byte* Take(int64_t bytes, int64_t KvCacheBytes::*what) {
    const int64_t at = used_;
    used_ += KvAligned(bytes);
    bytes_.*what += bytes;
    bytes_.bookkeeping += KvAligned(bytes) - bytes;
    return memory_ == nullptr ? nullptr : memory_ + at;
  }
  template <typename T>
  T* TakeOf(int64_t count) {
    return reinterpret_cast<T*>(Take(count * sizeof(T), &KvCacheBytes::bookkeeping));
  }
  KvPointers TakeParts(const KvTensor& tensor) {
    KvPointers pointers{};
    for (int i = 0; i < kKvParts; ++i) {
      const KvPart part = static_cast<KvPart>(i);
      if (!tensor.has(part)) continue;
      const bool window = part == KvPart::kSinks || part == KvPart::kWindow;
      pointers[i] =
          Take(tensor.part(part).memory_bytes(), part == KvPart::kCodes ? &KvCacheBytes::codes
                                                 : window               ? &KvCacheBytes::window
                                                          : &KvCacheBytes::parameters);
    }
    return pointers;
  }
  const KvCacheBytes& bytes() const { return bytes_; }

 private:
  std::byte* const memory_;
  int64_t used_ = 0;
  KvCacheBytes bytes_;
};

KvCache::KvCache(const Engine& engine, KvCacheOptions options)
    : engine_(engine),
      stream_(engine),
      options_(std::move(options)),
      stride_(static_cast<int>(KvAligned(kvant::BytesFor(kS32, options_.batch)) / sizeof(int32_t))),
      scratch_(engine) {}

KvCache::~KvCache() { memory().FreeOnHost(news_); }

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(const Engine& engine,
                                                         KvCacheOptions options) {
  KVANT_RETURN_IF_ERROR(CheckKvCacheOptions(options));
  constexpr int64_t kMostLayersOnGpu = 1 << 14, kMostRowsOnGpu = 1 << 16;  // CacheNews
  if (engine.memory().asynchronous() &&
      (options.layers > kMostLayersOnGpu || options.batch > kMostRowsOnGpu)) {
    return InvalidArguments("a cache on a GPU with ", options.layers, " layers and a batch of ",
                            options.batch, ", of at most ", kMostLayersOnGpu, " and ",
                            kMostRowsOnGpu);
  }
  auto cache = std::unique_ptr<KvCache>(new KvCache(engine, std::move(options)));
  cache->MakeGroups();
  KVANT_ASSIGN_OR_RETURN(cache->kernels_, engine.MakeCacheKernels());
  for (Group& group : cache->groups_) {
    KVANT_RETURN_IF_ERROR(group.k.Compile(engine));
    KVANT_RETURN_IF_ERROR(group.v.Compile(engine));
  }
  Arena sizes(nullptr);
  cache->Place(sizes);
  cache->bytes_ = sizes.bytes();
  KVANT_ASSIGN_OR_RETURN(cache->memory_,
                         KvBlock::Allocate(engine.shared_memory(), cache->bytes_.total()));
  KVANT_ASSIGN_OR_RETURN(void* news, cache->memory().AllocateOnHost(sizeof(*cache->news_)));
  cache->news_ = static_cast<long long*>(news);
  Arena arena(cache->memory_.bytes().data());
  cache->Place(arena);
  KVANT_RETURN_IF_ERROR(WithoutExceptions([&] {
    cache->MakeHostArrays();
    return absl::OkStatus();
  }));
  KVANT_RETURN_IF_ERROR(cache->FillStaticScales());
  return cache;
}

absl::StatusOr<KvCacheBytes> KvCache::BytesFor(const KvCacheOptions& options) {
  KVANT_RETURN_IF_ERROR(CheckKvCacheOptions(options));
  KVANT_ASSIGN_OR_RETURN(const Engine engine, Engine::Create({.threads = 1}));
  KvCache cache(engine, options);
  cache.MakeGroups();
  Arena sizes(nullptr);
  cache.Place(sizes);
  return sizes.bytes();
}

void KvCache::MakeGroups() {
  const KvCacheOptions& o = options_;
  for (int64_t i = 0; i < o.layers; ++i) {
    const CacheScheme& scheme = CacheSchemeOf(o, i);
    const int64_t keep = KeepOf(o, i);
    const auto same = std::find_if(groups_.begin(), groups_.end(), [&](const Group& group) {
      return group.scheme == scheme && group.keep == keep;
    });
    layers_.emplace_back().group = static_cast<int>(same - groups_.begin());
    if (same != groups_.end()) continue;
    const auto [k, v] = KvLayoutsOf(scheme, o, keep);
    groups_.push_back({scheme, keep, KvTensor("K", scheme.k, {o.batch, o.heads, o.head_size}, k),
                       KvTensor("V", scheme.v, {o.batch, o.heads, o.value_size()}, v)});
  }
}

void KvCache::Place(Arena& arena) {
  const int64_t stride = stride_;
  size_t working = 0;
  for (const Group& group : groups_) {
    working = std::max({working, group.k.working_bytes(), group.v.working_bytes()});
  }
  int64_t state = 0;
  for (Layer& layer : layers_) {
    const Group& group = groups_[layer.group];
    layer.k = arena.TakeParts(group.k);
    layer.v = arena.TakeParts(group.v);
    state += stride * (1 + 2 * group.k.segments() + 2 * group.v.segments());
  }
  state_size_ = state + stride;
  engine_state_ = arena.TakeOf<int32_t>(state_size_);
  places_ = arena.TakeOf<int32_t>(2 * kCachePlaces * stride);
  taken_ = arena.TakeOf<int32_t>(2 * stride);
  zeros_ = arena.TakeOf<int32_t>(stride);
  working_ = arena.TakeOf<std::byte>(static_cast<int64_t>(working));
}

void KvCache::MakeHostArrays() {
  const auto batch = static_cast<size_t>(options_.batch);
  counts_.resize(batch);
  starts_.resize(batch);
  lengths_.resize(batch);
  given_.resize(2 * static_cast<size_t>(stride_));
  if (!on_host()) host_state_.resize(state_size_);
  int32_t* next = state_ = on_host() ? engine_state_ : host_state_.data();
  const auto take = [&](int64_t each) { return std::exchange(next, next + stride_ * each); };
  for (Layer& layer : layers_) {
    const Group& group = groups_[layer.group];
    layer.lengths = take(1);
    layer.k_ranges = take(2 * group.k.segments());
    layer.v_ranges = take(2 * group.v.segments());
    layer.k_kept.resize(batch);
    layer.v_kept.resize(batch);
  }
  stopped_ = next;
}

absl::Status KvCache::FillStaticScales() {
  for (int64_t i = 0; i < options_.layers; ++i) {
    const Layer& layer = layers_[i];
    const Group& group = groups_[layer.group];
    const auto fill = [&](const KvTensor& tensor, const KvPointers& pointers,
                          const auto& scales) -> absl::Status {
      if (!tensor.storage().static_scales()) return absl::OkStatus();
      const LogicalTensor& desc = tensor.part(KvPart::kScales);
      std::vector<std::byte> stored(
          kvant::BytesFor(desc.type, static_cast<int64_t>(scales[i].size())));
      for (size_t j = 0; j < scales[i].size(); ++j) {
        StoreElement(desc.type, stored.data(), static_cast<int64_t>(j),
                     RoundScale(desc.type, scales[i][j]));
      }
      return memory().CopyFromHost(pointers[static_cast<int>(KvPart::kScales)], stored.data(),
                                   stored.size());
    };
    KVANT_RETURN_IF_ERROR(fill(group.k, layer.k, options_.k_scales));
    KVANT_RETURN_IF_ERROR(fill(group.v, layer.v, options_.v_scales));
  }
  return absl::OkStatus();
}

void KvCache::Publish(int64_t index) {
  const Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  for (int64_t b = 0; b < options_.batch; ++b) {
    const CacheLayout &k = group.k.layout().plain(), &v = group.v.layout().plain();
    StoreRangesOfRow(k, layer.lengths[b], layer.k_ranges + b * k.segments() * 2);
    StoreRangesOfRow(v, layer.lengths[b], layer.v_ranges + b * v.segments() * 2);
  }
}

absl::Status KvCache::CheckLayer(int64_t layer) const {
  if (layer >= 0 && layer < options_.layers) return absl::OkStatus();
  return InvalidArguments("there is no layer ", layer, ": the cache has ", options_.layers);
}

absl::StatusOr<std::shared_ptr<const KvAttention>> KvCache::Attention(
    const KvAttentionOptions& options) {
  if (options.query_heads < 1 || options.query_heads % options_.heads != 0) {
    return InvalidArguments(options.query_heads, " query heads over ", options_.heads, " KV heads");
  }
  // Of new tokens some may be padding.
  const bool of_others = options.new_tokens || options.sees_all;
  const int64_t most = of_others ? kMostTokens : options_.capacity;
  if (options.query_tokens < 1 || options.query_tokens > most) {
    return InvalidArguments("attention of ", options.query_tokens, " query tokens, where ",
                            of_others ? "the most" : "the capacity", " is ", most);
  }
  if (options.sees_all && (options.new_tokens || options.window != 0)) {
    return InvalidArguments("attention that sees all tokens with ",
                            options.new_tokens ? "new tokens" : "a window");
  }
  if (!IsComputeFloat(options.type)) {
    return InvalidArguments("attention of queries of type ", DataTypeName(options.type),
                            ", which must be f32, f16 or bf16");
  }
  if (!std::isfinite(options.scale)) {
    return InvalidArguments("attention with a scale of ", options.scale);
  }
  if (!(options.soft_cap >= 0) || !std::isfinite(options.soft_cap)) {
    return InvalidArguments("attention with a soft cap of ", options.soft_cap);
  }
  if (options.window < 0) {
    return InvalidArguments("attention with a window of ", options.window, " tokens");
  }
  if (!options.bias.empty()) {
    const int64_t least = columns() + (options.new_tokens ? options.query_tokens : 0);
    const Dims& bias = options.bias;
    const auto one_or = [](int64_t dim, int64_t whole) { return dim == 1 || dim == whole; };
    if (bias.size() != 4 || !one_or(bias[0], options_.batch) ||
        !one_or(bias[1], options.query_heads) || bias[2] != options.query_tokens ||
        bias[3] < least) {
      return InvalidArguments("attention with a bias of [", DimsToString(bias),
                              "], which must be [1 or ", options_.batch, ", 1 or ",
                              options.query_heads, ", ", options.query_tokens, ", at least ", least,
                              "]: batch, heads, query tokens, columns");
    }
  }
  const std::lock_guard<std::mutex> lock(attentions_mutex_);
  const auto found =
      std::find_if(attentions_.begin(), attentions_.end(),
                   [&](const auto& attention) { return attention->options() == options; });
  if (found != attentions_.end()) {
    std::rotate(found, found + 1, attentions_.end());
    return attentions_.back();
  }
  KVANT_ASSIGN_OR_RETURN(auto attention, KvAttention::Compile(*this, options));
  if (attentions_.size() == kKeptAttentions) attentions_.erase(attentions_.begin());
  attentions_.push_back(std::move(attention));
  return attentions_.back();
}

int64_t KvCache::columns() const {
  int64_t most = 0;
  for (const Group& group : groups_) most = std::max(most, group.k.layout().total_slots());
  return most;
}

int64_t KvCache::length(int64_t layer, int64_t row) const {
  if (!CheckLayer(layer).ok() || row < 0 || row >= options_.batch) return 0;
  Refresh().IgnoreError();
  const std::shared_lock<KvLock> lock(lock_);
  return layers_[layer].lengths[row];
}

absl::StatusOr<CacheScheme> KvCache::scheme(int64_t layer) const {
  KVANT_RETURN_IF_ERROR(CheckLayer(layer));
  return groups_[layers_[layer].group].scheme;
}

absl::StatusOr<const KvTensor*> KvCache::tensor(int64_t layer, bool values) const {
  KVANT_RETURN_IF_ERROR(CheckLayer(layer));
  const Group& group = groups_[layers_[layer].group];
  return values ? &group.v : &group.k;
}

ConstTensor KvCache::part(int64_t layer, bool values, KvPart part) const {
  const auto tensor = this->tensor(layer, values);
  if (!tensor.ok() || !(*tensor)->has(part)) return {};
  const KvPointers& pointers = values ? layers_[layer].v : layers_[layer].k;
  return {pointers[static_cast<int>(part)],
          static_cast<size_t>((*tensor)->part(part).memory_bytes())};
}

std::array<KvRange, kKvSegmentKinds> KvCache::Ranges(int64_t layer, bool values,
                                                     int64_t row) const {
  const auto tensor = this->tensor(layer, values);
  if (!tensor.ok()) return {};
  return (*tensor)->layout().Ranges(length(layer, row));
}

int64_t KvCache::scratch_bytes() const {
  int64_t bytes = scratch_.bytes();
  const std::lock_guard<std::mutex> lock(attentions_mutex_);
  for (const auto& attention : attentions_) bytes += attention->scratch_bytes();
  for (const Group& group : groups_) bytes += group.k.scratch_bytes() + group.v.scratch_bytes();
  return bytes;
}

int64_t KvCache::used_bytes() const {
  Refresh().IgnoreError();
  const std::shared_lock<KvLock> lock(lock_);
  int64_t bytes = 0;
  for (const Layer& layer : layers_) {
    const Group& group = groups_[layer.group];
    const absl::Span<const int32_t> lengths(layer.lengths, options_.batch);
    bytes += group.k.UsedBytes(lengths) + group.v.UsedBytes(lengths);
  }
  return bytes;
}

}  // namespace kvant
