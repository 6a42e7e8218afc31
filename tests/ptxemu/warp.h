// What handlers see: a warp, its registers, and its block's memory.
//
// A warp is a set of groups of lanes, each of which stands at one instruction. The group that
// stands first in the program goes on, and groups that meet are one again. An instruction that
// needs other lanes (".sync") waits for them. Where they never come, that is a fault.
#ifndef KVANT_TESTS_PTXEMU_WARP_H_
#define KVANT_TESTS_PTXEMU_WARP_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvant/tests/ptxemu/device_memory.h"
#include "kvant/tests/ptxemu/kernel.h"
#include "kvant/tests/ptxemu/machine.h"

namespace kvant::ptxemu {

// A cp.async that has not been waited for.
struct Copy {
  uint32_t to;
  uint64_t from;
  uint8_t width, valid;
  uint8_t data[16];
};
struct LaneCopies {
  std::vector<Copy> open;  // not yet committed
  std::deque<std::vector<Copy>> groups;
};

// Of a byte of shared memory.
enum ByteState : uint8_t { kUnknown, kKnown, kPending };

// The last accesses to a byte of shared memory, by which races are found.
struct Touch {
  uint16_t writer = 0, write_bar = 0, write_sync = 0;  // thread + 1
  uint16_t reader = 0, read_bar = 0, read_sync = 0;    // thread + 1, or one of those below
};
inline constexpr uint16_t kWholeWarp = 0x8000, kSeveralWarps = 0xffff;

struct Block {
  unsigned index[3];
  std::vector<uint8_t> shared, state;
  std::vector<Touch> touches;
  uint16_t bars = 0;  // barriers of the block so far
  std::vector<std::unique_ptr<Warp>> warps;
};

struct Launch {
  const Kernel* kernel;
  const LaunchShape* shape;
  const std::vector<uint8_t>* params;
  DeviceMemory* memory;
  const Options* options;
  uint32_t number;
  bool copies_early;      // cp.async arrives at once
  uint64_t instructions;  // that warps began, in this process
  std::mt19937_64 random;
};

struct Group {
  int pc;
  uint32_t mask;
  bool waits;
};

struct Warp {
  Launch* launch;
  Block* block;
  int index;
  uint32_t live;  // lanes that have not left the kernel
  std::vector<Group> groups;
  bool at_barrier = false;
  uint32_t barrier = 0;
  uint16_t syncs = 0;  // barriers of the warp so far
  std::unique_ptr<uint8_t[]> file;
  std::vector<uint32_t> valid;  // by register, the lanes in which it is defined
  std::array<LaneCopies, kLanes> copies;
  std::vector<uint8_t> local, local_known;

  // Of the instruction that runs.
  uint32_t active = 0;
  const Instruction* now = nullptr;

  // Runs up to `budget` instructions. False once the warp cannot go on by itself.
  bool Run(int budget);

  template <class T>
  const T* Src(const Slot& s) const {
    if (s.constant != nullptr) return static_cast<const T*>(s.constant);
    return reinterpret_cast<const T*>(file.get() + s.offset);
  }
  template <class T>
  T* Dst(const Slot& s) {
    return reinterpret_cast<T*>(file.get() + s.offset);
  }
  uint32_t Predicate(const Slot& s) const {
    const uint32_t p = *Src<uint32_t>(s);
    return s.negated ? ~p : p;
  }
  void SetPredicate(const Slot& s, uint32_t value) {
    if (s.reg < 0) return;
    auto* p = Dst<uint32_t>(s);
    *p = (*p & ~active) | (value & active);
  }
  template <class F>
  void ForActive(F f) const {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (active >> lane & 1) f(lane);
    }
  }
  // d = f(lane) in the active lanes. f may be called for others.
  template <class T, class F>
  void Put(const Slot& d, F f) {
    if (d.reg < 0) return;
    T* p = Dst<T>(d);
    if (active == kAllLanes) {
      for (int lane = 0; lane < kLanes; ++lane) p[lane] = f(lane);
    } else {
      const uint32_t m = active;
      for (int lane = 0; lane < kLanes; ++lane) p[lane] = (m >> lane & 1) ? f(lane) : p[lane];
    }
  }
  // Any register, from its low bytes; and into it, with zeros above.
  uint64_t Get(const Slot& s, int lane) const {
    switch (s.bytes) {
      case 1:
        return Src<uint8_t>(s)[lane];
      case 2:
        return Src<uint16_t>(s)[lane];
      case 4:
        return Src<uint32_t>(s)[lane];
      default:
        return Src<uint64_t>(s)[lane];
    }
  }
  void Set(const Slot& d, int lane, uint64_t value) {
    if (d.reg < 0) return;
    switch (d.bytes) {
      case 2:
        Dst<uint16_t>(d)[lane] = static_cast<uint16_t>(value);
        break;
      case 4:
        Dst<uint32_t>(d)[lane] = static_cast<uint32_t>(value);
        break;
      default:
        Dst<uint64_t>(d)[lane] = value;
        break;
    }
  }

  [[noreturn]] void Fail(int code, const std::string& what, int lane = -1) const;

  // Memory of a lane; bytes: 1, 2, 4, 8 or 16. Both check what they touch. whole_warp: the access
  // is one of all lanes together.
  void Read(Space space, int lane, uint64_t address, int bytes, void* to, bool coherent,
            bool whole_warp = false);
  void Write(Space space, int lane, uint64_t address, int bytes, const void* from);
  // Bytes of global memory, and null for memory of the host where that is permitted.
  Allocation* Covering(int lane, uint64_t address, int bytes, const char* does);
  uint8_t* SharedAt(int lane, uint64_t address, int bytes);
  void TouchShared(int lane, uint32_t at, int bytes, bool store, bool whole_warp);
  // Groups of copies before the last `most_pending` arrive.
  void Land(int lane, size_t most_pending);

 private:
  enum class Step { kGoOn, kRegroup, kStop };
  Group* FirstGroup();
  void Join(int pc, uint32_t mask);
  void Leave(Group* group);
  Step StepGroup(Group* group);
  Step Branch(Group* group, const Instruction& i);
  Step Exit(Group* group);
  uint32_t Needed(const Instruction& i) const;
  Step Execute(Group* group, const Instruction& i);
  void CheckDefined(uint32_t defined) const;

  void ReadGlobal(int lane, uint64_t address, int bytes, void* to, bool coherent);
  void ReadShared(int lane, uint64_t address, int bytes, void* to, bool whole_warp);
  void ReadParam(int lane, uint64_t address, int bytes, void* to) const;
  void WriteGlobal(int lane, uint64_t address, int bytes, const void* from);
  void WriteShared(int lane, uint64_t address, int bytes, const void* from);
  size_t LocalAt(int lane, uint64_t address, int bytes) const;
  void CheckRace(const Touch& touch, int lane, uint32_t at, bool store, bool whole_warp) const;
};

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_WARP_H_
