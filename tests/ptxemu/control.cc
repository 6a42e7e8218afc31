// Branches, barriers, and what the lanes of a warp do together: votes and shuffles.
#include <string>
#include <unordered_map>

#include "kvant/tests/ptxemu/decoder.h"

namespace kvant::ptxemu {
namespace {

enum ShuffleMode : uint32_t { kUp, kDown, kButterfly, kIndex };

// The lane that `lane` reads, and whether that is in range. b, c: operands of shfl.
int ShuffleSource(uint32_t mode, int lane, int b, int c, bool* in_range) {
  const int by = b & 31, clamp = c & 31, mask = c >> 8 & 31;
  const int first = lane & mask;
  const int last = first | (clamp & ~mask);
  int from = 0;
  switch (mode) {
    case kUp:
      from = lane - by;
      *in_range = from >= last;
      break;
    case kDown:
      from = lane + by;
      *in_range = from <= last;
      break;
    case kButterfly:
      from = lane ^ by;
      *in_range = from <= last;
      break;
    default:
      from = first | (by & ~mask);
      *in_range = from <= last;
      break;
  }
  return *in_range ? from : lane;
}

// dst: d, and the predicate that the lane read was in range.
void Shuffle(Warp& w, const Instruction& i) {
  const auto* a = w.Src<uint32_t>(i.src[0]);
  const auto* b = w.Src<int>(i.src[1]);
  const auto* c = w.Src<int>(i.src[2]);
  uint32_t value[kLanes] = {}, in_range = 0;
  w.ForActive([&](int l) {
    bool in = false;
    const int from = ShuffleSource(i.mode, l, b[l], c[l], &in);
    if (!(w.active >> from & 1)) w.Fail(kLaunchFailed, "shfl from a lane that takes no part", l);
    value[l] = a[from];
    in_range |= static_cast<uint32_t>(in) << l;
  });
  w.Put<uint32_t>(i.dst[0], [&](int l) { return value[l]; });
  if (i.dsts > 1) w.SetPredicate(i.dst[1], in_range);
}

void VoteAny(Warp& w, const Instruction& i) {
  w.SetPredicate(i.dst[0], (w.Predicate(i.src[0]) & w.active) != 0 ? kAllLanes : 0);
}
void VoteAll(Warp& w, const Instruction& i) {
  w.SetPredicate(i.dst[0], (w.Predicate(i.src[0]) & w.active) == w.active ? kAllLanes : 0);
}
void VoteBallot(Warp& w, const Instruction& i) {
  const uint32_t p = w.Predicate(i.src[0]) & w.active;
  w.Put<uint32_t>(i.dst[0], [&](int) { return p; });
}
void ActiveMask(Warp& w, const Instruction& i) {
  w.Put<uint32_t>(i.dst[0], [&](int) { return w.active; });
}
void WarpBarrier(Warp& w, const Instruction&) { ++w.syncs; }
// Memory is seen by all lanes in program order.
void Fence(Warp&, const Instruction&) {}

}  // namespace

void DecodeBranch(Decoder& d) {
  d.now().flow = Flow::kBranch;
  d.now().target = d.label(d.operand(0));
}

void DecodeExit(Decoder& d) { d.now().flow = Flow::kExit; }

void DecodeBarrier(Decoder& d) {
  Instruction& i = d.now();
  if (d.Has("warp")) {
    i.run = WarpBarrier;
    return d.AddMembers(d.operand(0));
  }
  if (!d.Has("sync") || d.operands() != 1 || d.operand(0).kind != OperandText::kImmediate) {
    d.Unknown("barrier");
  }
  i.flow = Flow::kBarrier;
  i.together = Together::kWarp;
  i.mode = static_cast<uint32_t>(d.operand(0).bits);
}

void DecodeFence(Decoder& d) { d.now().run = Fence; }

void DecodeShuffle(Decoder& d) {
  static const auto* const modes = new std::unordered_map<std::string, ShuffleMode>{
      {"up", kUp}, {"down", kDown}, {"bfly", kButterfly}, {"idx", kIndex}};
  // shfl.sync.MODE.b32
  const auto mode = d.opcode().size() == 4 ? modes->find(d.opcode()[2]) : modes->end();
  if (mode == modes->end() || d.opcode()[1] != "sync") d.Unknown("shuffle");
  d.now().run = Shuffle;
  d.now().mode = mode->second;
  d.AddResult(d.operand(0), 4);
  d.AddSecondResult(d.operand(0));
  for (size_t n = 1; n < 4; ++n) d.AddSource(d.operand(n), 4);
  d.AddMembers(d.operand(4));
}

void DecodeVote(Decoder& d) {
  static const auto* const handlers = new std::unordered_map<std::string, Handler>{
      {"any", VoteAny}, {"all", VoteAll}, {"ballot", VoteBallot}};
  // vote.sync.MODE.TYPE
  const auto handler = d.opcode().size() == 4 ? handlers->find(d.opcode()[2]) : handlers->end();
  if (handler == handlers->end() || d.opcode()[1] != "sync") d.Unknown("vote");
  d.now().run = handler->second;
  d.now().sink = true;
  d.AddResult(d.operand(0), 0);
  d.AddPredicate(d.operand(1));
  d.AddMembers(d.operand(2));
}

void DecodeActiveMask(Decoder& d) { d.Use({ActiveMask, 4, {}}); }

}  // namespace kvant::ptxemu
