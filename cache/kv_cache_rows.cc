// Sequences of a KvCache taken back, put in another order, and taken into another cache.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Layers [first, last): all, or one.
std::pair<int64_t, int64_t> Span(std::optional<int64_t> layer, int64_t layers) {
  return layer ? std::pair(*layer, *layer + 1) : std::pair(int64_t{0}, layers);
}

}  // namespace

absl::Status KvCache::CheckRows(absl::Span<const int64_t> rows) const {
  for (const int64_t row : rows) {
    if (row >= 0 && row < options_.batch) continue;
    return InvalidArguments("there is no batch row ", row, ": the cache has ", options_.batch);
  }
  return absl::OkStatus();
}

absl::Status KvCache::CheckCrop(int64_t index, int64_t row, int64_t tokens) const {
  const Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  const auto more = [&] {
    return absl::StrCat(options_.rollback == 0 ? "a rollback keeps more"
                                               : absl::StrCat("a rollback of more than ",
                                                              options_.rollback, " keeps more"),
                        ", but not of what was loaded");
  };
  const auto error = [&](auto... words) {
    return InvalidArguments("layer ", index, ": batch row ", row, words...);
  };
  if (tokens < 0 || tokens > layer.lengths[row]) {
    return error(" has ", layer.lengths[row], " tokens and cannot be cropped to ", tokens);
  }
  for (const auto& [tensor, rows] :
       {std::pair(&group.k, layer.k_kept.data()), std::pair(&group.v, layer.v_kept.data())}) {
    const KvLayout& layout = tensor->layout();
    const KvKept& kept = rows[row];
    const int64_t sinks = layout.sinks();
    const int64_t behind = layout.Behind(tokens);
    const KvKept needed = layout.Needed(tokens);
    if (needed.main < layout.MainOf(behind) && needed.main < kept.main) {
      return error(" cropped to ", tokens, " tokens needs token ", needed.main + sinks, " of ",
                   tensor->name(), ", of which only those from ", kept.main + sinks,
                   " on are left, as the layer keeps ", layout.keep(), "; ", more());
    }
    if (layout.residual() == 0 || behind == 0 || needed.window >= kept.window) continue;
    return error(" cropped to ", tokens, " tokens needs token ", needed.window + sinks, " of ",
                 tensor->name(), " in full precision, of which only those from ",
                 kept.window + sinks, " on are left; ", more());
  }
  return absl::OkStatus();
}

absl::Status KvCache::Crop(int64_t tokens) {
  const std::unique_lock<KvLock> lock(lock_);
  std::fill(counts_.begin(), counts_.end(), tokens);
  return CropTo(counts_, std::nullopt);
}

absl::Status KvCache::Crop(absl::Span<const int64_t> tokens, std::optional<int64_t> layer) {
  if (layer) KVANT_RETURN_IF_ERROR(CheckLayer(*layer));
  if (static_cast<int64_t>(tokens.size()) != options_.batch) {
    return InvalidArguments(tokens.size(), " lengths for a batch of ", options_.batch);
  }
  const std::unique_lock<KvLock> lock(lock_);
  return CropTo(tokens, layer);
}

absl::Status KvCache::CropTo(absl::Span<const int64_t> tokens, std::optional<int64_t> only) {
  KVANT_RETURN_IF_ERROR(Settle());
  const auto [first, last] = Span(only, options_.layers);
  for (int64_t layer = first; layer < last; ++layer) {
    for (int64_t b = 0; b < options_.batch; ++b) {
      KVANT_RETURN_IF_ERROR(CheckCrop(layer, b, tokens[b]));
    }
  }
  for (int64_t layer = first; layer < last; ++layer) {
    Layer& at = layers_[layer];
    const Group& group = groups_[at.group];
    for (int64_t b = 0; b < options_.batch; ++b) {
      at.lengths[b] = static_cast<int32_t>(tokens[b]);
      // A window begins anew where no token is left behind the sinks.
      if (group.k.layout().Behind(tokens[b]) == 0) at.k_kept[b] = {};
      if (group.v.layout().Behind(tokens[b]) == 0) at.v_kept[b] = {};
    }
    Publish(layer);
  }
  return Push(first, last);
}

absl::Status KvCache::Reset() {
  const std::unique_lock<KvLock> lock(lock_);
  KVANT_RETURN_IF_ERROR(memory().SynchronizeAll());
  for (int64_t layer = 0; layer < options_.layers; ++layer) Clear(layer);
  KVANT_RETURN_IF_ERROR(Push(0, options_.layers));
  const absl::Status told = TakeNews(/*captured=*/false);
  return has_news() ? told : absl::OkStatus();
}

void KvCache::Clear(int64_t index) {
  Layer& layer = layers_[index];
  std::fill_n(layer.lengths, options_.batch, 0);
  for (auto* kept : {&layer.k_kept, &layer.v_kept}) kept->assign(options_.batch, KvKept{});
  Publish(index);
}

absl::Status KvCache::CopyRow(int64_t index, int64_t from, KvCache& target, int64_t to) const {
  const Layer& layer = layers_[index];
  Layer& there = target.layers_[index];
  const Group &group = groups_[layer.group], &other = target.groups_[there.group];
  const int32_t tokens = layer.lengths[from];
  KvKept k = layer.k_kept[from], v = layer.v_kept[from];
  KVANT_RETURN_IF_ERROR(group.k.CopyRow(mover(), layer.k, from, other.k, there.k, to, tokens, k));
  KVANT_RETURN_IF_ERROR(group.v.CopyRow(mover(), layer.v, from, other.v, there.v, to, tokens, v));
  there.k_kept[to] = k;
  there.v_kept[to] = v;
  there.lengths[to] = tokens;
  return absl::OkStatus();
}

absl::Status KvCache::ExchangeRows(int64_t index, int64_t a, int64_t b) {
  Layer& layer = layers_[index];
  const Group& group = groups_[layer.group];
  const int64_t tokens = std::max(layer.lengths[a], layer.lengths[b]);
  KVANT_RETURN_IF_ERROR(group.k.SwapRows(mover(), layer.k, a, b, tokens));
  KVANT_RETURN_IF_ERROR(group.v.SwapRows(mover(), layer.v, a, b, tokens));
  std::swap(layer.lengths[a], layer.lengths[b]);
  for (auto* kept : {&layer.k_kept, &layer.v_kept}) std::swap((*kept)[a], (*kept)[b]);
  return absl::OkStatus();
}

absl::Status KvCache::Reorder(absl::Span<const int64_t> rows, std::optional<int64_t> only) {
  if (only) KVANT_RETURN_IF_ERROR(CheckLayer(*only));
  const int64_t batch = options_.batch;
  if (static_cast<int64_t>(rows.size()) != batch) {
    return InvalidArguments(rows.size(), " rows for a batch of ", batch);
  }
  KVANT_RETURN_IF_ERROR(CheckRows(rows));
  const std::unique_lock<KvLock> lock(lock_);
  KVANT_RETURN_IF_ERROR(Settle());
  const auto [first, last] = Span(only, options_.layers);
  absl::Status done;
  int64_t layer = first;
  while (layer < last && done.ok()) done = ReorderLayer(layer++, rows);
  // What comes next may be on another stream.
  if (done.ok()) done = memory().Synchronize(stream_.native());
  if (done.ok()) return Push(first, last);
  ClearAfterFailure(first, layer);
  return done;
}

absl::Status KvCache::ReorderLayer(int64_t layer, absl::Span<const int64_t> rows) {
  const int64_t batch = options_.batch;
  // from[i]: which of the rows as they lie now i is to be; -1: it is that already.
  std::vector<int64_t>&from = counts_, &wanted = starts_;
  std::copy(rows.begin(), rows.end(), from.begin());
  std::fill(wanted.begin(), wanted.end(), 0);  // by how many other rows
  for (int64_t i = 0; i < batch; ++i) {
    if (from[i] == i) from[i] = -1;
    if (from[i] >= 0) ++wanted[from[i]];
  }
  // Rows that no other is waiting for can be overwritten; then only cycles are left.
  for (int64_t done = 1; done > 0;) {
    done = 0;
    for (int64_t i = 0; i < batch; ++i) {
      if (from[i] < 0 || wanted[i] > 0) continue;
      KVANT_RETURN_IF_ERROR(CopyRow(layer, from[i], *this, i));
      --wanted[from[i]];
      from[i] = -1;
      ++done;
    }
  }
  for (int64_t i = 0; i < batch; ++i) {
    if (from[i] < 0) continue;
    const int64_t other = std::exchange(from[i], -1);
    KVANT_RETURN_IF_ERROR(ExchangeRows(layer, i, other));
    // Who waits for what was in i finds it in `other` now.
    const auto waiting = std::find(from.begin(), from.end(), i);
    if (waiting != from.end()) *waiting = waiting - from.begin() == other ? -1 : other;
  }
  Publish(layer);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Fork(
    std::optional<absl::Span<const int64_t>> rows, int64_t capacity) const {
  std::vector<int64_t> all(options_.batch);
  std::iota(all.begin(), all.end(), 0);
  const absl::Span<const int64_t> taken = rows.value_or(all);
  KVANT_RETURN_IF_ERROR(CheckRows(taken));
  KvCacheOptions options = options_;
  options.batch = static_cast<int64_t>(taken.size());
  if (capacity != 0) options.capacity = capacity;
  KVANT_ASSIGN_OR_RETURN(auto fork, Create(engine_, std::move(options)));
  const KvReadLock lock(lock_, /*with_readers=*/on_host());
  KVANT_RETURN_IF_ERROR(Settle());
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    for (const int64_t row : taken) {
      const int64_t tokens = layers_[layer].lengths[row];
      if (tokens <= fork->options_.capacity) continue;
      return InvalidArguments("layer ", layer, ": batch row ", row, " has ", tokens,
                              " tokens, more than a capacity of ", capacity);
    }
  }
  for (int64_t layer = 0; layer < options_.layers; ++layer) {
    for (size_t i = 0; i < taken.size(); ++i) {
      KVANT_RETURN_IF_ERROR(CopyRow(layer, taken[i], *fork, static_cast<int64_t>(i)));
    }
    fork->Publish(layer);
  }
  KVANT_RETURN_IF_ERROR(memory().Synchronize(stream_.native()));
  KVANT_RETURN_IF_ERROR(fork->Push(0, options_.layers));
  return fork;
}

}  // namespace kvant
