// KvLayout: where the tokens of a sequence lie, by their number alone.
//
// A segment holds consecutive tokens. Token u behind the sinks goes to slot u mod (slots) of the
// quantized segment, which has a slot for each, or is a ring where a layer keeps only the last
// tokens. While the window has it, it is in slot u mod (slots of the window): that is a ring too.
#ifndef KVANT_CACHE_KV_LAYOUT_H_
#define KVANT_CACHE_KV_LAYOUT_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "kvant/cache/kv_storage.h"

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
  KvLayout(const KvStorage& storage, int64_t capacity, int64_t rollback, int64_t keep)
      : bulk_(storage.bulk), residual_(storage.residual), keep_(keep < capacity ? keep : 0) {
    const int64_t sinks = std::min(storage.sinks, capacity);
    slots_[Index(KvSegmentKind::kSinks)] = sinks;
    const int64_t behind = capacity - sinks;
    const int64_t group = storage.format.group_tokens().value_or(1);
    // There is one group at least, even where no token ever gets there.
    int64_t main = std::max({MainOf(behind), group, int64_t{1}});
    if (keep_ > 0) {
      // Whole groups, and whole windows where these leave in bulk, take the place of older ones.
      const int64_t unit = bulk_ ? residual_ : group;
      main = std::min(main, (keep_ + std::min(rollback, capacity) + unit - 1) / unit * unit);
    }
    slots_[Index(KvSegmentKind::kMain)] = main;
    if (residual_ == 0) return;
    // Short sequences need no more than themselves.
    slots_[Index(KvSegmentKind::kWindow)] =
        std::clamp<int64_t>(behind, 1, window() + std::min(rollback, capacity));
  }

  int64_t slots(KvSegmentKind kind) const { return slots_[Index(kind)]; }
  int64_t total_slots() const { return slots_[0] + slots_[1] + slots_[2]; }
  // Makes the segments of K and V add up to the same.
  void AddSlots(int64_t more) {
    slots_[Index(residual_ > 0 ? KvSegmentKind::kWindow : KvSegmentKind::kMain)] += more;
  }

  int64_t keep() const { return keep_; }
  int64_t residual() const { return residual_; }
  bool bulk() const { return bulk_; }
  int64_t sinks() const { return slots(KvSegmentKind::kSinks); }
  // The most tokens that the window has. A token leaves when the next one comes. So a window that
  // slides has the newest token beside its `residual`, and one in bulk stays full until then.
  int64_t window() const { return bulk_ || residual_ == 0 ? residual_ : residual_ + 1; }
  // How many of `behind` tokens, which are behind the sinks, are in the main segment.
  int64_t MainOf(int64_t behind) const {
    if (residual_ == 0 || behind == 0) return behind;
    const int64_t older = behind - 1;
    return bulk_ ? older / residual_ * residual_ : std::max<int64_t>(0, older - residual_);
  }
  int64_t Behind(int64_t tokens) const { return std::max<int64_t>(0, tokens - sinks()); }

  // The first token of account.
  int64_t First(int64_t tokens) const {
    return keep_ == 0 ? 0 : std::max<int64_t>(0, tokens - keep_);
  }
  // By segment, for a sequence of so many tokens: those of account.
  std::array<KvRange, kKvSegmentKinds> Ranges(int64_t tokens) const {
    const int64_t behind = Behind(tokens), main = MainOf(behind), first = First(tokens);
    const auto range = [this](KvSegmentKind kind, int64_t from, int64_t to) {
      return from >= to ? KvRange{} : KvRange{from % slots(kind), to - from};
    };
    const int64_t from = Behind(first);
    return {range(KvSegmentKind::kSinks, first, tokens - behind),
            range(KvSegmentKind::kMain, from, main),
            range(KvSegmentKind::kWindow, std::max(from, main), behind)};
  }

  // What a sequence that grows to so many tokens loses: later ones take the slots of those before.
  void Lose(int64_t tokens, KvKept& kept) const {
    const int64_t behind = Behind(tokens);
    kept.main = std::max(kept.main, MainOf(behind) - slots(KvSegmentKind::kMain));
    kept.window = std::max(kept.window, behind - slots(KvSegmentKind::kWindow));
  }

 private:
  static constexpr int Index(KvSegmentKind kind) { return static_cast<int>(kind); }

  bool bulk_;
  int64_t residual_;
  int64_t keep_;
  std::array<int64_t, kKvSegmentKinds> slots_{};
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_LAYOUT_H_
