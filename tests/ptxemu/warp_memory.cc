// The state spaces of memory, and what is checked of each access.
#include <algorithm>
#include <cstring>

#include "kvant/tests/ptxemu/text.h"
#include "kvant/tests/ptxemu/warp.h"

namespace kvant::ptxemu {
namespace {

// Generic addresses say by their window which space they are of.
Space Resolve(Space space, uint64_t* address) {
  if (space != kGeneric) return space;
  const uint64_t window = *address & kWindowMask;
  const Space found = window == kSharedWindow  ? kShared
                      : window == kLocalWindow ? kLocal
                      : window == kParamWindow ? kParam
                                               : kGlobal;
  if (found != kGlobal) *address &= ~kWindowMask;
  return found;
}

// bytes: a power of two.
bool IsAligned(uint64_t address, int bytes) {
  return (address & static_cast<uint64_t>(bytes - 1)) == 0;
}

int WarpOf(uint16_t thread) { return ((thread & 0x7fff) - 1) / kLanes; }

}  // namespace

void Warp::Read(Space space, int lane, uint64_t address, int bytes, void* to, bool coherent,
                bool whole_warp) {
  switch (Resolve(space, &address)) {
    case kGlobal:
    case kConst:
      return ReadGlobal(lane, address, bytes, to, coherent);
    case kShared:
      return ReadShared(lane, address, bytes, to, whole_warp);
    case kParam:
      return ReadParam(lane, address, bytes, to);
    case kLocal: {
      const size_t at = LocalAt(lane, address, bytes);
      if (std::memchr(local_known.data() + at, 0, static_cast<size_t>(bytes)) != nullptr) {
        Fail(kLaunchFailed, "loads local memory never stored", lane);
      }
      std::memcpy(to, local.data() + at, static_cast<size_t>(bytes));
      return;
    }
    default:
      Fail(kIllegalInstruction, "state space", lane);
  }
}

void Warp::Write(Space space, int lane, uint64_t address, int bytes, const void* from) {
  switch (Resolve(space, &address)) {
    case kGlobal:
      return WriteGlobal(lane, address, bytes, from);
    case kShared:
      return WriteShared(lane, address, bytes, from);
    case kLocal: {
      const size_t at = LocalAt(lane, address, bytes);
      std::memset(local_known.data() + at, 1, static_cast<size_t>(bytes));
      std::memcpy(local.data() + at, from, static_cast<size_t>(bytes));
      return;
    }
    default:
      Fail(kIllegalInstruction, "state space", lane);
  }
}

// ---- Global memory

Allocation* Warp::Covering(int lane, uint64_t address, int bytes, const char* does) {
  DeviceMemory& memory = *launch->memory;
  Allocation* a = memory.Covering(address, static_cast<size_t>(bytes));
  if (a != nullptr) return a;
  if (launch->options->host_memory && memory.Find(address) == nullptr) return nullptr;
  Fail(kIllegalAddress, StrCat(does, " ", bytes, " bytes at ", memory.Describe(address)), lane);
}

void Warp::ReadGlobal(int lane, uint64_t address, int bytes, void* to, bool coherent) {
  DeviceMemory& memory = *launch->memory;
  if (!IsAligned(address, bytes)) {
    Fail(kMisaligned,
         StrCat("load from misaligned ", memory.Describe(address), ", ", bytes, " bytes"), lane);
  }
  const auto size = static_cast<size_t>(bytes);
  Allocation* a = Covering(lane, address, bytes, "load of");
  if (a == nullptr) {
    std::memcpy(to, reinterpret_cast<const void*>(address), size);
    return;
  }
  const uint64_t at = address - a->base;
  if (std::memchr(a->known.data() + at, 0, size) != nullptr) {
    Fail(kLaunchFailed, "load of bytes that nobody stored at " + memory.Describe(address), lane);
  }
  const uint32_t* written = a->written.data() + at;
  if (!coherent && std::find(written, written + size, launch->number) != written + size) {
    Fail(kLaunchFailed, "ld.global.nc of what this kernel stored at " + memory.Describe(address),
         lane);
  }
  std::memcpy(to, a->data.data() + at, size);
}

void Warp::WriteGlobal(int lane, uint64_t address, int bytes, const void* from) {
  if (!IsAligned(address, bytes)) {
    Fail(kMisaligned,
         StrCat("store to misaligned ", launch->memory->Describe(address), ", ", bytes, " bytes"),
         lane);
  }
  const auto size = static_cast<size_t>(bytes);
  Allocation* a = Covering(lane, address, bytes, "store of");
  if (a == nullptr) {
    std::memcpy(reinterpret_cast<void*>(address), from, size);
    return;
  }
  const uint64_t at = address - a->base;
  std::memset(a->known.data() + at, 1, size);
  std::fill_n(a->written.data() + at, size, launch->number);
  std::memcpy(a->data.data() + at, from, size);
}

// ---- Shared memory

uint8_t* Warp::SharedAt(int lane, uint64_t address, int bytes) {
  if (!IsAligned(address, bytes)) {
    Fail(kMisaligned, StrCat("misaligned shared address ", address, ", ", bytes, " bytes"), lane);
  }
  const uint64_t at = address - kSharedBase;
  const size_t size = block->shared.size();
  if (at > size || static_cast<uint64_t>(bytes) > size - at) {
    Fail(kIllegalAddress,
         StrCat("shared address ", static_cast<int64_t>(at), " of ", size, " bytes"), lane);
  }
  return block->shared.data() + at;
}

void Warp::ReadShared(int lane, uint64_t address, int bytes, void* to, bool whole_warp) {
  const uint8_t* from = SharedAt(lane, address, bytes);
  const auto at = static_cast<uint32_t>(from - block->shared.data());
  const uint8_t* state = block->state.data() + at;
  for (int n = 0; n < bytes; ++n) {
    if (state[n] == kKnown) continue;
    const char* what = state[n] == kPending ? "loads what cp.async has not been waited for"
                                            : "loads what was never stored";
    Fail(kLaunchFailed, StrCat(what, " at shared ", at + static_cast<uint32_t>(n)), lane);
  }
  if (launch->options->races) TouchShared(lane, at, bytes, false, whole_warp);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void Warp::WriteShared(int lane, uint64_t address, int bytes, const void* from) {
  uint8_t* to = SharedAt(lane, address, bytes);
  const auto at = static_cast<uint32_t>(to - block->shared.data());
  uint8_t* state = block->state.data() + at;
  if (std::memchr(state, kPending, static_cast<size_t>(bytes)) != nullptr) {
    Fail(kLaunchFailed, "stores where cp.async has not been waited for", lane);
  }
  std::memset(state, kKnown, static_cast<size_t>(bytes));
  if (launch->options->races) TouchShared(lane, at, bytes, true, false);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Two accesses race where one of them stores, and neither a barrier of the block nor, in one warp,
// one of the warp is between them. A thread does not race with itself, but with what it does as one
// of its warp.
void Warp::CheckRace(const Touch& touch, int lane, uint32_t at, bool store, bool whole_warp) const {
  const auto me = static_cast<uint16_t>(index * kLanes + lane + 1);
  const auto race = [&](const char* what, uint16_t other) {
    Fail(kLaunchFailed,
         StrCat("race in shared memory at ", at, ": ", what, " thread ", (other & 0x7fff) - 1),
         lane);
  };
  if (touch.writer != 0 && touch.write_bar == block->bars) {
    const bool same = touch.writer == me && !whole_warp;
    const bool ordered = WarpOf(touch.writer) == index && touch.write_sync < syncs;
    if (!same && !ordered)
      race(store ? "stores, as did" : "loads what was stored by", touch.writer);
  }
  if (store && touch.reader != 0 && touch.read_bar == block->bars) {
    if (touch.reader == kSeveralWarps) race("stores what was loaded by several warps,", 1);
    const bool ordered = WarpOf(touch.reader) == index && touch.read_sync < syncs;
    if (touch.reader != me && !ordered) race("stores what was loaded by", touch.reader);
  }
}

void Warp::TouchShared(int lane, uint32_t at, int bytes, bool store, bool whole_warp) {
  const auto me = static_cast<uint16_t>(index * kLanes + lane + 1);
  for (uint32_t n = 0; n < static_cast<uint32_t>(bytes); ++n) {
    Touch& touch = block->touches[at + n];
    CheckRace(touch, lane, at + n, store, whole_warp);
    if (store) {
      touch.writer = me;
      touch.write_bar = block->bars;
      touch.write_sync = syncs;
      continue;
    }
    const bool others = touch.reader != 0 && touch.read_bar == block->bars;
    if (others && (touch.reader == kSeveralWarps || WarpOf(touch.reader) != index)) {
      touch.reader = kSeveralWarps;
    } else {
      const bool several = whole_warp || (others && touch.read_sync == syncs && touch.reader != me);
      touch.reader = several ? static_cast<uint16_t>(me | kWholeWarp) : me;
    }
    touch.read_bar = block->bars;
    touch.read_sync = syncs;
  }
}

void Warp::Land(int lane, size_t most_pending) {
  LaneCopies& own = copies[static_cast<size_t>(lane)];
  while (own.groups.size() > most_pending) {
    for (const Copy& copy : own.groups.front()) {
      const uint32_t at = copy.to - kSharedBase;
      std::memcpy(block->shared.data() + at, copy.data, copy.width);
      std::fill_n(block->state.begin() + at, copy.width, uint8_t{kKnown});
      // For other lanes it is stored now: a barrier before this orders nothing.
      if (launch->options->races) TouchShared(lane, at, copy.width, true, false);
    }
    own.groups.pop_front();
  }
}

// ---- Parameters and local memory

void Warp::ReadParam(int lane, uint64_t address, int bytes, void* to) const {
  if (!IsAligned(address, bytes)) Fail(kMisaligned, "misaligned parameter", lane);
  if (address + static_cast<uint64_t>(bytes) > launch->params->size()) {
    Fail(kIllegalAddress, StrCat("parameter at ", address), lane);
  }
  std::memcpy(to, launch->params->data() + address, static_cast<size_t>(bytes));
}

size_t Warp::LocalAt(int lane, uint64_t address, int bytes) const {
  const size_t all = launch->kernel->local_bytes;
  if (!IsAligned(address, bytes)) Fail(kMisaligned, "misaligned local", lane);
  if (address + static_cast<uint64_t>(bytes) > all) Fail(kIllegalAddress, "local address", lane);
  return static_cast<size_t>(lane) * all + address;
}

}  // namespace kvant::ptxemu
