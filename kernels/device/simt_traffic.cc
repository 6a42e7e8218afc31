#include "kvant/kernels/device/simt_traffic.h"

#include <algorithm>
#include <bit>

namespace kvant::simt {
namespace {

constexpr int kLanes = 32;
constexpr int kBanks = 32;
constexpr size_t kBankBytes = 4;
constexpr size_t kSectorBytes = 32;

size_t Hash(WarpTraffic::Kind kind, Site site, size_t bytes) {
  const auto file = reinterpret_cast<uintptr_t>(site.file);
  const uint64_t key = file ^ static_cast<uint64_t>(site.line) << 40 ^
                       static_cast<uint64_t>(kind) << 36 ^ uint64_t { bytes } << 58;
  return static_cast<size_t>((key * 0x9e3779b97f4a7c15u) >> 32);
}

// The most different words in one bank.
uint64_t WavefrontsOfPart(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes) {
  // Words seen, as one list per bank.
  int head[kBanks];
  std::fill(head, head + kBanks, -1);
  uint64_t words[kBanks];
  int next[kBanks];
  int lengths[kBanks] = {};
  int count = 0;
  int most = 0;
  for (; lanes != 0; lanes &= lanes - 1) {
    const uint64_t address = addresses[std::countr_zero(lanes)];
    const uint64_t last = (address + bytes - 1) / kBankBytes;
    for (uint64_t word = address / kBankBytes; word <= last && count < kBanks; ++word) {
      const int bank = static_cast<int>(word % kBanks);
      int i = head[bank];
      while (i >= 0 && words[i] != word) i = next[i];
      if (i >= 0) continue;
      words[count] = word;
      next[count] = head[bank];
      head[bank] = count++;
      most = std::max(most, ++lengths[bank]);
    }
  }
  return static_cast<uint64_t>(most);
}

}  // namespace

Cost SectorsOf(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes) {
  std::array<uint64_t, 2 * kLanes> sectors;
  std::array<uint64_t, kLanes> distinct;
  size_t sector_count = 0;
  size_t distinct_count = 0;
  for (; lanes != 0; lanes &= lanes - 1) {
    const uint64_t address = addresses[std::countr_zero(lanes)];
    distinct[distinct_count++] = address;
    sectors[sector_count++] = address / kSectorBytes;
    const uint64_t last = (address + bytes - 1) / kSectorBytes;
    if (last != address / kSectorBytes) sectors[sector_count++] = last;
  }
  const auto count = [](auto begin, auto end) {
    std::sort(begin, end);
    return static_cast<uint64_t>(std::unique(begin, end) - begin);
  };
  const uint64_t moved = count(distinct.begin(), distinct.begin() + distinct_count) * bytes;
  return {count(sectors.begin(), sectors.begin() + sector_count),
          (moved + kSectorBytes - 1) / kSectorBytes};
}

Cost WavefrontsOf(const std::array<uint64_t, 32>& addresses, uint32_t lanes, size_t bytes) {
  const int part = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;
  Cost cost;
  for (int lane = 0; lane < kLanes; lane += part) {
    const uint32_t mask = (part == 32 ? ~0u : (1u << part) - 1) << lane;
    if ((lanes & mask) == 0) continue;
    cost.actual += WavefrontsOfPart(addresses, lanes & mask, bytes);
    ++cost.ideal;
  }
  return cost;
}

WarpTraffic::Group& WarpTraffic::Find(Kind kind, Site site, size_t bytes) {
  if (groups_.size() * 2 >= table_.size()) {
    table_.assign(std::max<size_t>(64, table_.size() * 2), -1);
    for (size_t i = 0; i < groups_.size(); ++i) {
      size_t slot = Hash(groups_[i].kind, groups_[i].site, groups_[i].bytes) % table_.size();
      while (table_[slot] >= 0) slot = (slot + 1) % table_.size();
      table_[slot] = static_cast<int>(i);
    }
  }
  size_t slot = Hash(kind, site, bytes) % table_.size();
  for (; table_[slot] >= 0; slot = (slot + 1) % table_.size()) {
    Group& group = groups_[table_[slot]];
    if (group.kind == kind && group.site.line == site.line && group.site.file == site.file &&
        group.bytes == bytes) {
      return group;
    }
  }
  table_[slot] = static_cast<int>(groups_.size());
  groups_.push_back({kind, site, bytes, {}, {}});
  return groups_.back();
}

void WarpTraffic::Add(Kind kind, Site site, int lane, size_t bytes, uint64_t address, uint64_t to,
                      bool reads) {
  Group& group = Find(kind, site, bytes);
  if (group.requests.empty()) active_.push_back(static_cast<int>(&group - groups_.data()));
  const uint32_t index = group.accesses[lane]++;
  if (index == group.requests.size()) group.requests.emplace_back();
  Request& request = group.requests[index];
  request.addresses[lane] = address;
  request.to[lane] = to;
  request.lanes |= 1u << lane;
  if (reads) request.readers |= 1u << lane;
}

void WarpTraffic::Count(const Group& group, const Request& request, Counters* counters) {
  Counters& c = *counters;
  switch (group.kind) {
    case Kind::kGlobalLoad: {
      const Cost cost = SectorsOf(request.addresses, request.lanes, group.bytes);
      ++c.global_loads;
      c.global_load_sectors += cost.actual;
      c.global_load_sectors_ideal += cost.ideal;
      return;
    }
    case Kind::kGlobalStore: {
      const Cost cost = SectorsOf(request.addresses, request.lanes, group.bytes);
      ++c.global_stores;
      c.global_store_sectors += cost.actual;
      c.global_store_sectors_ideal += cost.ideal;
      return;
    }
    case Kind::kSharedLoad: {
      const Cost cost = WavefrontsOf(request.addresses, request.lanes, group.bytes);
      ++c.shared_loads;
      c.shared_load_wavefronts += cost.actual;
      c.shared_load_wavefronts_ideal += cost.ideal;
      return;
    }
    case Kind::kSharedStore: {
      const Cost cost = WavefrontsOf(request.addresses, request.lanes, group.bytes);
      ++c.shared_stores;
      c.shared_store_wavefronts += cost.actual;
      c.shared_store_wavefronts_ideal += cost.ideal;
      return;
    }
    case Kind::kCopy: {
      const Cost sectors = SectorsOf(request.addresses, request.readers, group.bytes);
      const Cost wavefronts = WavefrontsOf(request.to, request.lanes, group.bytes);
      ++c.copies;
      c.copy_sectors += sectors.actual;
      c.copy_sectors_ideal += sectors.ideal;
      c.copy_wavefronts += wavefronts.actual;
      c.copy_wavefronts_ideal += wavefronts.ideal;
      return;
    }
  }
}

void WarpTraffic::Flush(Counters* counters) {
  for (const int i : active_) {
    for (const Request& request : groups_[i].requests) Count(groups_[i], request, counters);
    groups_[i].requests.clear();
    groups_[i].accesses.fill(0);
  }
  active_.clear();
}

}  // namespace kvant::simt
