#include "kvant/kernels/device/simt_calls.h"

#include <cstring>

#include "kvant/kernels/device/simt_execution.h"

namespace kvant::simt {
namespace {

using Kind = WarpTraffic::Kind;

Thread* Current() { return current_thread; }

void CountAccess(Thread* t, Kind kind, Site site, size_t bytes, uint64_t address) {
  if (!t->execution->options().count) return;
  t->warp->traffic.Add(kind, site, t->lane, bytes, address);
}

struct ShuffleArguments {
  uint32_t value;
  int from;  // lane
  uint32_t result;
};

uint32_t ShuffleLanes(const char* name, uint32_t value, int from, Site site) {
  Thread* t = Current();
  ShuffleArguments mine{value, from & (kLanes - 1), 0};
  t->execution->Collect(t, name, site, &mine, [t](ShuffleArguments* const* lanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i]->result = lanes[lanes[i]->from]->value;
    ++t->execution->counters().shuffles;
  });
  return mine.result;
}

void CountMma(MmaKind kind, Counters* counters) {
  switch (kind) {
    case MmaKind::kF16K16:
      ++counters->mma_f16_k16;
      return;
    case MmaKind::kF16K8:
      ++counters->mma_f16_k8;
      return;
    case MmaKind::kBF16K16:
      ++counters->mma_bf16_k16;
      return;
    case MmaKind::kTF32K8:
      ++counters->mma_tf32_k8;
      return;
  }
}

}  // namespace

Position CurrentPosition() { return Current()->execution->PositionOf(*Current()); }

void BlockBarrier(Site site) { Current()->execution->BlockBarrier(Current(), site); }

void WarpBarrier(Site site) {
  Thread* t = Current();
  t->execution->Collect<void>(t, "WarpSync", site, nullptr, [t](void* const*) {
    ++t->warp->barriers;
    ++t->execution->counters().warp_barriers;
  });
}

uint32_t ShuffleXor(uint32_t value, int mask, Site site) {
  return ShuffleLanes("ShuffleXor", value, Current()->lane ^ mask, site);
}

uint32_t ShuffleFrom(uint32_t value, int from, Site site) {
  return ShuffleLanes("Shuffle", value, from, site);
}

bool AnyLane(bool value, Site site) {
  Thread* t = Current();
  bool mine = value;
  t->execution->Collect(t, "Any", site, &mine, [t](bool* const* lanes) {
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any = any || *lanes[i];
    for (int i = 0; i < kLanes; ++i) *lanes[i] = any;
    ++t->execution->counters().votes;
  });
  return mine;
}

bool BeginGlobalLoad(const void* from, size_t bytes, bool coherent, Site site) {
  Thread* t = Current();
  Execution& execution = *t->execution;
  CountAccess(t, Kind::kGlobalLoad, site, bytes, reinterpret_cast<uintptr_t>(from));
  execution.CheckAlignment(t, from, bytes, "loads", site);
  if (!execution.BeginGlobal(t, from, bytes, "loads", site)) return false;
  execution.CountReads(from, bytes);
  if (execution.options().races) {
    execution.global().Load(reinterpret_cast<uintptr_t>(from), bytes, execution.ActorOf(*t, site),
                            execution.MomentOf(*t), coherent);
  }
  return true;
}

bool BeginGlobalStore(const void* to, size_t bytes, Site site) {
  Thread* t = Current();
  Execution& execution = *t->execution;
  CountAccess(t, Kind::kGlobalStore, site, bytes, reinterpret_cast<uintptr_t>(to));
  execution.CheckAlignment(t, to, bytes, "stores", site);
  if (!execution.BeginGlobal(t, to, bytes, "stores", site)) return false;
  if (execution.options().races) {
    execution.global().Store(reinterpret_cast<uintptr_t>(to), bytes, execution.ActorOf(*t, site),
                             execution.MomentOf(*t));
  }
  return true;
}

bool BeginAtomic(const void* at, size_t bytes, Site site) {
  Thread* t = Current();
  Execution& execution = *t->execution;
  ++execution.counters().atomics;
  execution.CheckAlignment(t, at, bytes, "updates", site);
  if (!execution.BeginGlobal(t, at, bytes, "updates", site)) return false;
  execution.global().Atomic(t->index, execution.MomentOf(*t));
  return true;
}

void FenceGlobal() {
  Thread* t = Current();
  ++t->execution->counters().fences;
  t->execution->global().Fence(t->index, t->execution->MomentOf(*t));
}

void ReadShared(uint32_t from, size_t bytes, void* to, Site site) {
  Thread* t = Current();
  Execution& execution = *t->execution;
  CountAccess(t, Kind::kSharedLoad, site, bytes, from);
  const unsigned char* data =
      execution.shared().Read(from, bytes, execution.ActorOf(*t, site), execution.MomentOf(*t));
  if (data == nullptr) {
    memset(to, 0, bytes);
  } else {
    memcpy(to, data, bytes);
  }
}

void WriteShared(uint32_t to, size_t bytes, const void* from, Site site) {
  Thread* t = Current();
  Execution& execution = *t->execution;
  CountAccess(t, Kind::kSharedStore, site, bytes, to);
  unsigned char* data =
      execution.shared().Write(to, bytes, execution.ActorOf(*t, site), execution.MomentOf(*t));
  if (data != nullptr) memcpy(data, from, bytes);
}

void StartCopy(size_t bytes, uint32_t to, const void* from, size_t valid, Site site) {
  Current()->execution->StartCopy(Current(), {bytes, to, from, valid, site});
}

void CommitCopies() {
  Thread* t = Current();
  t->group_ends.push_back(t->copies.size());
}

void WaitForCopies(int pending) {
  Current()->execution->WaitForCopies(Current(), static_cast<size_t>(pending));
}

void LoadMatrices(uint32_t row, bool transposed, uint32_t (&words)[4], Site site) {
  struct Arguments {
    Thread* thread;
    uint32_t row;
    uint32_t (*words)[4];
  };
  Thread* t = Current();
  Arguments mine{t, row, &words};
  const char* name = transposed ? "LoadMatrix4Transposed" : "LoadMatrix4";
  t->execution->Collect(t, name, site, &mine, [&](Arguments* const* lanes) {
    static constexpr unsigned char kZeros[16] = {};
    Execution& execution = *t->execution;
    const unsigned char* rows[kLanes];
    uint32_t(*results[kLanes])[4];
    std::array<uint64_t, kLanes> addresses;
    for (int i = 0; i < kLanes; ++i) {
      const Thread& lane = *lanes[i]->thread;
      rows[i] = execution.shared().Read(lanes[i]->row, 16, execution.ActorOf(lane, site),
                                        execution.MomentOf(lane), /*for_warp=*/true);
      if (rows[i] == nullptr) rows[i] = kZeros;
      results[i] = lanes[i]->words;
      addresses[i] = lanes[i]->row;
    }
    DealMatrices(rows, transposed, results);
    Counters& counters = execution.counters();
    ++counters.load_matrices;
    if (!execution.options().count) return;
    const Cost cost = WavefrontsOf(addresses, ~0u, 16);
    counters.load_matrix_wavefronts += cost.actual;
    counters.load_matrix_wavefronts_ideal += cost.ideal;
  });
}

uint32_t TransposeWord(uint32_t word, Site site) {
  Thread* t = Current();
  t->execution->Collect(t, "TransposeMatrix", site, &word, [t](uint32_t* const* lanes) {
    TransposeWords(lanes);
    ++t->execution->counters().transposes;
  });
  return word;
}

void Mma(MmaKind kind, float (&d)[4], const uint32_t* a, const uint32_t* b, Site site) {
  static constexpr const char* kNames[] = {"MmaF16K16", "MmaF16K8", "MmaBF16K16", "MmaTF32K8"};
  Thread* t = Current();
  MmaArguments mine{d, a, b};
  t->execution->Collect(t, kNames[static_cast<int>(kind)], site, &mine,
                        [&](MmaArguments* const* lanes) {
                          MultiplyMatrices(kind, t->execution->options().accumulate, lanes);
                          CountMma(kind, &t->execution->counters());
                        });
}

}  // namespace kvant::simt
