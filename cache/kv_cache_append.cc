// New tokens of a KvCache, and what the host knows of those that it has.
#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "absl/strings/str_cat.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

CacheSource SourceOf(const KvInput& input) {
  CacheSource source;
  source.data = input.data.data;
  source.type = input.desc.type == kF32   ? kCacheF32
                : input.desc.type == kF16 ? kCacheF16
                                          : kCacheBF16;
  const Dims strides = input.desc.StridesOrDense();
  std::copy(strides.begin(), strides.end(), source.strides);
  source.channels = static_cast<int>((*input.desc.dims)[3]);
  return source;
}

}  // namespace

absl::Status KvCache::TakeNews(bool captured) const {
  if (on_host() || (!has_news() && !stale())) return absl::OkStatus();
  if (captured && stale()) {
    return InvalidArguments(
        "the cache's lengths are not on the GPU since a call failed, which a stream that "
        "is captured must not wait for");
  }
  if (captured) return Tell(CacheNews::Of(std::atomic_ref(*news_).load()));
  KVANT_RETURN_IF_ERROR(memory().SynchronizeAll());
  if (stale()) KVANT_RETURN_IF_ERROR(Push(stale_first_, stale_last_));
  if (!has_news()) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(FetchLengths());
  // First this: a graph that runs meanwhile finds something as soon as it is permitted to.
  const long long packed = std::atomic_ref(*news_).exchange(0);
  *stopped_ = 0;
  const absl::Status cleared =
      memory().CopyFromHost(InEngine(stopped_), stopped_, sizeof(*stopped_));
  if (cleared.ok()) return Tell(CacheNews::Of(packed));
  std::atomic_ref(*news_).store(packed);
  return cleared;
}

absl::Status KvCache::Tell(CacheNews news) const {
  const std::string row = absl::StrCat("batch row ", news.row);
  if (news.kind == CacheNewsKind::kBeyondCapacity) {
    return InvalidArguments("layer ", news.layer, ": ", row, " had ", news.detail,
                            " tokens, and those that came exceeded the capacity of ",
                            options_.capacity, "; nothing was appended from then on");
  }
  const Group& group = groups_[layers_[news.layer].group];
  const KvTensor& tensor = news.kind == CacheNewsKind::kNumberOfK ? group.k : group.v;
  return InvalidArguments(tensor.name(), " for layer ", news.layer, " had a number in ", row,
                          ", head ", news.detail, ", that is not finite or beyond the ",
                          tensor.largest(), " that '", tensor.storage().ToString(),
                          "' holds; nothing was appended from then on; allow_non_finite stores "
                          "it all the same");
}

absl::Status KvCache::FetchLengths() const {
  KVANT_RETURN_IF_ERROR(memory().CopyToHost(state_, engine_state_, state_size_ * sizeof(*state_)));
  for (Layer& layer : layers_) {
    const Group& group = groups_[layer.group];
    for (int64_t b = 0; b < options_.batch; ++b) {
      group.k.layout().Lose(layer.lengths[b], layer.k_kept[b]);
      group.v.layout().Lose(layer.lengths[b], layer.v_kept[b]);
    }
  }
  return absl::OkStatus();
}

absl::Status KvCache::Settle() const {
  if (on_host()) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(memory().SynchronizeAll());
  KVANT_RETURN_IF_ERROR(TakeNews(/*captured=*/false));
  return FetchLengths();
}

absl::Status KvCache::Refresh() const {
  if (on_host() || (!replayed_ && !has_news())) return absl::OkStatus();
  const std::unique_lock<KvLock> lock(lock_);
  if (stale()) KVANT_RETURN_IF_ERROR(Push(stale_first_, stale_last_));
  KVANT_RETURN_IF_ERROR(memory().SynchronizeAll());
  return FetchLengths();
}

absl::Status KvCache::Push(int64_t first, int64_t last) const {
  if (on_host()) return absl::OkStatus();
  stale_first_ = first;
  stale_last_ = last;
  KVANT_RETURN_IF_ERROR(memory().SynchronizeAll());
  const int32_t* const begin = layers_[first].lengths;
  const int32_t* const end = last == options_.layers ? stopped_ : layers_[last].lengths;
  KVANT_RETURN_IF_ERROR(
      memory().CopyFromHost(InEngine(begin), begin, (end - begin) * sizeof(*begin)));
  stale_last_ = first;
  return absl::OkStatus();
}

void KvCache::ClearAfterFailure(int64_t first, int64_t last) {
  for (int64_t layer = first; layer < last; ++layer) Clear(layer);
  Push(first, last).IgnoreError();
}

absl::Status KvCache::Take(int64_t index, int64_t tokens, absl::Span<const int64_t> counts,
                           absl::Span<const int64_t> starts, bool known) {
  for (const auto& [name, given] :
       {std::pair("counts of", counts), std::pair("starts of", starts)}) {
    if (given.empty() || static_cast<int64_t>(given.size()) == options_.batch) continue;
    return InvalidArguments("layer ", index, ": ", given.size(), " ", name,
                            " tokens for a batch of ", options_.batch);
  }
  const Layer& layer = layers_[index];
  for (int64_t b = 0; b < options_.batch; ++b) {
    starts_[b] = starts.empty() ? 0 : starts[b];
    if (starts_[b] < 0 || starts_[b] > tokens) {
      return InvalidArguments("layer ", index, ": batch row ", b, " begins at token ", starts_[b],
                              " of ", tokens);
    }
    counts_[b] = counts.empty() ? tokens - starts_[b] : counts[b];
    if (counts_[b] < 0 || counts_[b] > tokens - starts_[b]) {
      return InvalidArguments("layer ", index, ": batch row ", b, " takes ", counts_[b], " of ",
                              tokens - starts_[b], " tokens");
    }
    if (!known || counts_[b] <= options_.capacity - layer.lengths[b]) continue;
    return InvalidArguments("layer ", index, ": batch row ", b, " has ", layer.lengths[b],
                            " tokens, and ", counts_[b], " more exceed the capacity of ",
                            options_.capacity);
  }
  return absl::OkStatus();
}

absl::Status KvCache::CheckReach(int64_t index, const KvInput& k, const KvInput& v) const {
  const void* const data[] = {k.data.data, v.data.data};
  const auto found = memory().FindUnreachable(data);
  if (!found) return absl::OkStatus();
  return InvalidArguments(found->index == 0 ? "K" : "V", " for layer ", index, " ", found->why);
}

absl::Status KvCache::Append(const Stream& stream, int64_t index, const KvInput& k,
                             const KvInput& v, absl::Span<const int64_t> counts,
                             absl::Span<const int64_t> starts) {
  KVANT_RETURN_IF_ERROR(CheckLayer(index));
  if (stream.engine() != engine_.identity()) return InvalidArguments("a stream of another engine");
  const Group& group = groups_[layers_[index].group];
  KVANT_RETURN_IF_ERROR(CheckKvInput(index, group.k, k));
  const int64_t tokens = (*k.desc.dims)[2];
  if (tokens > kMostTokens) {
    return InvalidArguments("layer ", index, ": ", tokens, " tokens at once, of at most ",
                            kMostTokens);
  }
  KVANT_RETURN_IF_ERROR(CheckKvInput(index, group.v, v, tokens));
  const bool by_row = !counts.empty() || !starts.empty();
  const bool one = tokens == 1 && !by_row;
  const std::unique_lock<KvLock> lock(lock_);
  KVANT_ASSIGN_OR_RETURN(const bool captured, memory().IsCaptured(stream.native()));
  KVANT_RETURN_IF_ERROR(TakeNews(captured));
  KVANT_RETURN_IF_ERROR(CheckReach(index, k, v));
  if (captured && !one) {
    return InvalidArguments("layer ", index,
                            ": a stream that is captured takes one token for "
                            "each row, not ",
                            tokens, by_row ? " with counts or starts" : "");
  }
  // From now on, for good: the graph may run at any time.
  if (captured) replayed_ = true;
  // What a step puts onto the stream does not depend on them.
  const bool known = !one || !replayed_;
  if (!one && (by_row || replayed_)) KVANT_RETURN_IF_ERROR(Settle());
  if (absl::Status taken = Take(index, tokens, counts, starts, known); !taken.ok()) {
    // A kernel may have refused what the host has counted.
    if (on_host() || captured) return taken;
    KVANT_RETURN_IF_ERROR(Settle());
    KVANT_RETURN_IF_ERROR(Take(index, tokens, counts, starts, known));
  }
  if (tokens == 0) return absl::OkStatus();
  const KvTaken taken{counts_, starts_};
  if (!options_.allow_non_finite && on_host()) {
    KVANT_RETURN_IF_ERROR(CheckKvNumbers(index, group.k, k, taken));
    KVANT_RETURN_IF_ERROR(CheckKvNumbers(index, group.v, v, taken));
  }
  bool touched = false;
  absl::Status stored = Store(stream, index, k, v, by_row, known, touched);
  if (stored.ok()) {
    if (known) Advance(index);
  } else if (touched && !captured) {
    // A window may have lost tokens to those that came.
    ClearAfterFailure(index, index + 1);
  }
  return stored;
}

absl::Status KvCache::Store(const Stream& stream, int64_t index, const KvInput& k, const KvInput& v,
                            bool by_row, bool known, bool& touched) {
  const Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  const int64_t batch = options_.batch, tokens = (*k.desc.dims)[2];
  const CacheSource source_k = SourceOf(k), source_v = SourceOf(v);
  KvArrival arrival{*kernels_, stream, {}, {}, {counts_, starts_}, working_};
  CacheStep& step = arrival.step;
  step.lengths = InEngine(layer.lengths);
  step.batch = static_cast<int>(batch);
  step.stride = stride_;
  step.capacity = static_cast<int>(options_.capacity);
  step.layer = static_cast<int>(index);
  step.trouble = trouble();
  step.taken.count = static_cast<int>(tokens);
  if (by_row) {
    std::copy(counts_.begin(), counts_.end(), given_.begin());
    std::copy(starts_.begin(), starts_.end(), given_.begin() + stride_);
    KVANT_RETURN_IF_ERROR(
        memory().CopyFromHost(taken_, given_.data(), given_.size() * sizeof(int32_t)));
    step.taken.counts = taken_;
    step.taken.starts = taken_ + stride_;
  }
  // As they are before the step: where the host's state is the engine's, that changes them.
  std::copy_n(layer.lengths, batch, lengths_.begin());
  if (known) arrival.lengths = lengths_;
  if (!options_.allow_non_finite && !on_host()) {
    CacheCheck check;
    check.source[0] = source_k;
    check.source[1] = source_v;
    check.largest[0] = static_cast<float>(group.k.largest());
    check.largest[1] = static_cast<float>(group.v.largest());
    check.taken = step.taken;
    check.batch = step.batch;
    check.heads = static_cast<int>(options_.heads);
    check.tokens = static_cast<int>(tokens);
    check.layer = step.layer;
    check.trouble = step.trouble;
    KVANT_RETURN_IF_ERROR(kernels_->Run(check, stream.native()));
  }
  int32_t* const places_of_v = places_ + kCachePlaces * stride_;
  CacheStep last = step;
  last.advance = 1;
  last.sides = 2;
  last.side[0] = {group.k.layout().plain(), nullptr, InEngine(layer.k_ranges)};
  last.side[1] = {group.v.layout().plain(), nullptr, InEngine(layer.v_ranges)};
  if (tokens == 1) {
    last.tokens = 1;
    last.side[0].places = places_;
    last.side[1].places = places_of_v;
    KVANT_RETURN_IF_ERROR(kernels_->Run(last, stream.native()));
    touched = true;
    KVANT_RETURN_IF_ERROR(group.k.StorePiece(arrival, source_k, layer.k, places_, 0, 1,
                                             group.k.NeedsOf(arrival, 0, 1)));
    return group.v.StorePiece(arrival, source_v, layer.v, places_of_v, 0, 1,
                              group.v.NeedsOf(arrival, 0, 1));
  }
  touched = true;
  KVANT_RETURN_IF_ERROR(group.k.Store(arrival, source_k, layer.k, places_));
  KVANT_RETURN_IF_ERROR(group.v.Store(arrival, source_v, layer.v, places_of_v));
  return kernels_->Run(last, stream.native());
}

// The host's part of it: the engine has advanced its own state. What a kernel may still refuse is
// not yet kept, or lost: FetchLengths says when it is.
void KvCache::Advance(int64_t index) {
  Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  for (int64_t b = 0; b < options_.batch; ++b) {
    if (!on_host()) {
      layer.lengths[b] += static_cast<int32_t>(counts_[b]);
      continue;
    }
    group.k.layout().Lose(layer.lengths[b], layer.k_kept[b]);
    group.v.layout().Lose(layer.lengths[b], layer.v_kept[b]);
  }
}

}  // namespace kvant
