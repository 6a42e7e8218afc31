#include "kvant/kernels/device/simt_global.h"

#include <algorithm>
#include <string>

namespace kvant::simt {

void GlobalMemory::BeginBlock() {
  first_store_of_block_ = stores_.size();
  fences_.clear();
  atomics_.clear();
}

void GlobalMemory::EndBlock() {
  const auto is_ordered = [](const Step& a, const Step& b) {
    return a.order < b.order && IsOrdered(a.thread, a.when, b.thread, b.when);
  };
  // Fences that some atomic follows.
  std::erase_if(fences_, [&](const Step& fence) {
    return std::none_of(atomics_.begin(), atomics_.end(),
                        [&](const Step& atomic) { return is_ordered(fence, atomic); });
  });
  for (size_t i = first_store_of_block_; i < stores_.size(); ++i) {
    StoreEvent& store = stores_[i];
    store.published = std::any_of(fences_.begin(), fences_.end(),
                                  [&](const Step& fence) { return is_ordered(store.step, fence); });
  }
}

void GlobalMemory::Fence(int thread, Moment now) { fences_.push_back({thread, now, ++clock_}); }

void GlobalMemory::Atomic(int thread, Moment now) { atomics_.push_back({thread, now, ++clock_}); }

GlobalMemory::Page* GlobalMemory::FindPage(uintptr_t address) {
  const auto found = pages_.find(address / kPageBytes);
  return found == pages_.end() ? nullptr : found->second.get();
}

const char* GlobalMemory::WhyUnordered(const StoreEvent& store, const Actor& actor,
                                       Moment now) const {
  const Step& step = store.step;
  if (store.block == actor.block) {
    return IsOrdered(step.thread, step.when, actor.thread, now) ? nullptr
                                                                : "without a barrier between them";
  }
  if (!store.published) return "without a fence and an atomic after it";
  const bool acquired = std::any_of(atomics_.begin(), atomics_.end(), [&](const Step& atomic) {
    return IsOrdered(atomic.thread, atomic.when, actor.thread, now);
  });
  return acquired ? nullptr : "without an atomic of its own block before";
}

template <typename Why>
void GlobalMemory::CheckBytes(uintptr_t address, size_t bytes, const Actor& actor, const char* does,
                              Why why) {
  uint32_t last = 0;
  for (uintptr_t a = address; a < address + bytes;) {
    const Page* page = FindPage(a);
    const uintptr_t end = std::min<uintptr_t>(address + bytes, (a / kPageBytes + 1) * kPageBytes);
    for (; a < end; ++a) {
      const uint32_t number = page == nullptr ? 0 : (*page)[a % kPageBytes];
      if (number == 0 || number == last) continue;
      last = number;
      const StoreEvent& store = stores_[number - 1];
      const char* reason = why(store);
      if (reason == nullptr || !errors_->IsNew(Check::kRace, actor.site, store.site)) continue;
      errors_->Add(Check::kRace, Errors::Describe(actor) + " " + does + " global memory at " +
                                     ToString(actor.site) + ", which thread " +
                                     std::to_string(store.step.thread) + " of block " +
                                     std::to_string(store.block) + " stored at " +
                                     ToString(store.site) + ", " + reason);
    }
  }
}

void GlobalMemory::Load(uintptr_t from, size_t bytes, const Actor& actor, Moment now,
                        bool coherent) {
  if (stores_.empty()) return;
  CheckBytes(from, bytes, actor, "loads", [&](const StoreEvent& store) {
    return coherent ? WhyUnordered(store, actor, now)
                    : "though Load is for what nobody writes during the launch";
  });
}

void GlobalMemory::Store(uintptr_t to, size_t bytes, const Actor& actor, Moment now) {
  CheckBytes(to, bytes, actor, "stores to",
             [&](const StoreEvent& store) { return WhyUnordered(store, actor, now); });
  stores_.push_back({actor.block, actor.site, {actor.thread, now, ++clock_}});
  const auto number = static_cast<uint32_t>(stores_.size());
  for (uintptr_t a = to; a < to + bytes;) {
    std::unique_ptr<Page>& page = pages_[a / kPageBytes];
    if (page == nullptr) page = std::make_unique<Page>();
    const uintptr_t end = std::min<uintptr_t>(to + bytes, (a / kPageBytes + 1) * kPageBytes);
    std::fill(page->begin() + a % kPageBytes, page->begin() + a % kPageBytes + (end - a), number);
    a = end;
  }
}

}  // namespace kvant::simt
