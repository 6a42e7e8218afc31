// KvLayout: the slots of a cache's storage, and where the tokens of a sequence lie in them
// (graph/cache_layout.h).
#ifndef KVANT_CACHE_KV_LAYOUT_H_
#define KVANT_CACHE_KV_LAYOUT_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "kvant/cache/kv_storage.h"
#include "kvant/graph/cache_layout.h"

namespace kvant {

enum class KvSegmentKind : uint8_t { kSinks, kMain, kWindow };
inline constexpr int kKvSegmentKinds = 3;

// What a sequence has of a segment: slots first, first + 1, ... (in a ring).
struct KvRange {
  int64_t first = 0, tokens = 0;
};

// The first tokens behind the sinks that are still in the quantized segment and in the window.
struct KvKept {
  int64_t main = 0, window = 0;
};

class KvLayout {
 public:
  // For sequences of up to `capacity` tokens, of which the last `rollback` can be taken back. Only
  // the last `keep` tokens of a sequence are of account; 0: all.
  KvLayout(const KvStorage& storage, int64_t capacity, int64_t rollback, int64_t keep) {
    layout_.residual = storage.residual;
    layout_.bulk = storage.bulk ? 1 : 0;
    layout_.keep = keep < capacity ? keep : 0;
    layout_.sinks = std::min(storage.sinks, capacity);
    const int64_t behind = capacity - layout_.sinks;
    const int64_t group = storage.format.group_tokens().value_or(1);
    // There is one group at least, even where no token ever gets there.
    int64_t main = std::max({MainOf(behind), group, int64_t{1}});
    if (layout_.keep > 0) {
      // Whole groups, and whole windows where these leave in bulk, take the place of older ones.
      const int64_t unit = storage.bulk ? storage.residual : group;
      main = std::min(main, (this->keep() + std::min(rollback, capacity) + unit - 1) / unit * unit);
    }
    // Heads begin at whole words, scales of a row too, as kernels on packed codes want them.
    if (storage.format.quantized() && group == 1 && layout_.keep == 0) unit_ = 8;
    layout_.main = (main + unit_ - 1) / unit_ * unit_;
    if (storage.residual == 0) return;
    // Short sequences need no more than themselves.
    layout_.window = std::clamp<int64_t>(behind, 1, window() + std::min(rollback, capacity));
  }

  // As kernels are told it.
  const CacheLayout& plain() const { return layout_; }
  int64_t slots(KvSegmentKind kind) const {
    return kind == KvSegmentKind::kSinks  ? layout_.sinks
           : kind == KvSegmentKind::kMain ? layout_.main
                                          : layout_.window;
  }
  int64_t total_slots() const { return layout_.sinks + layout_.main + layout_.window; }
  // Makes the segments of K and V add up to the same.
  void AddSlots(int64_t more) { (residual() > 0 ? layout_.window : layout_.main) += more; }
  // `more`, rounded up so that each head still begins at a whole word.
  int64_t WholeSlots(int64_t more) const {
    return residual() > 0 ? more : (more + unit_ - 1) / unit_ * unit_;
  }

  int64_t keep() const { return layout_.keep; }
  int64_t residual() const { return layout_.residual; }
  bool bulk() const { return layout_.bulk != 0; }
  int64_t sinks() const { return layout_.sinks; }
  // CacheLayout says what these are.
  int64_t window() const { return layout_.MostInWindow(); }
  int64_t MainOf(int64_t behind) const { return layout_.MainOf(behind); }
  int64_t Behind(int64_t tokens) const { return layout_.Behind(tokens); }

  // By segment, for a sequence of so many tokens: those of account.
  std::array<KvRange, kKvSegmentKinds> Ranges(int64_t tokens) const {
    return {Convert(layout_.Sinks(tokens)), Convert(layout_.Main(tokens)),
            Convert(layout_.Window(tokens))};
  }

  // The first tokens that a sequence of so many needs: attention reads those of account, and a
  // window that leaves in bulk is quantized as a whole.
  KvKept Needed(int64_t tokens) const {
    const int64_t main = MainOf(Behind(tokens)), first = Behind(layout_.First(tokens));
    return {std::min(first, main), bulk() ? main : std::max(first, main)};
  }

  // What a sequence that grows to so many tokens loses: later ones take the slots of those before.
  void Lose(int64_t tokens, KvKept& kept) const {
    const int64_t behind = Behind(tokens);
    kept.main = std::max(kept.main, MainOf(behind) - slots(KvSegmentKind::kMain));
    kept.window = std::max(kept.window, behind - slots(KvSegmentKind::kWindow));
  }

 private:
  static KvRange Convert(const CacheRange& range) { return {range.first, range.tokens}; }

  CacheLayout layout_;
  int64_t unit_ = 1;  // of the quantized segment's slots
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_LAYOUT_H_
