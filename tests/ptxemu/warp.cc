#include "kvant/tests/ptxemu/warp.h"

#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {

void Warp::Fail(int code, const std::string& what, int lane) const {
  const std::string who =
      lane < 0 ? StrCat("warp ", index) : StrCat("thread ", index * kLanes + lane);
  std::string text =
      StrCat("kernel ", launch->kernel->name, ", block ", block->index[0], ", ", who, ": ", what);
  if (now != nullptr) text += StrCat("\n  PTX line ", now->text->line, ": ", now->text->text);
  throw Fault(code, text);
}

// The first in the program of those that do not wait.
Group* Warp::FirstGroup() {
  Group* first = nullptr;
  for (Group& one : groups) {
    if (!one.waits && (first == nullptr || one.pc < first->pc)) first = &one;
  }
  return first;
}

// Puts lanes at `pc`, with those that are there.
void Warp::Join(int pc, uint32_t mask) {
  for (Group& one : groups) {
    if (one.pc != pc) continue;
    one.mask |= mask;
    one.waits = false;
    return;
  }
  groups.push_back({pc, mask, false});
}

void Warp::Leave(Group* group) {
  *group = groups.back();
  groups.pop_back();
}

bool Warp::Run(int budget) {
  while (budget > 0) {
    Group* const group = FirstGroup();
    if (group == nullptr) return false;
    const bool alone = groups.size() == 1;
    Step step = Step::kGoOn;
    while (step == Step::kGoOn && budget > 0) {
      --budget;
      step = StepGroup(group);
      if (step != Step::kGoOn || alone) continue;
      // It may have come to where others are.
      const Group moved = *group;
      Leave(group);
      Join(moved.pc, moved.mask);
      step = Step::kRegroup;
    }
    if (step == Step::kStop) return false;
  }
  return true;
}

Warp::Step Warp::StepGroup(Group* group) {
  const Kernel& kernel = *launch->kernel;
  const Instruction& i = kernel.program[static_cast<size_t>(group->pc)];
  ++launch->instructions;
  now = &i;
  active = group->mask;
  if (i.guard >= 0) {
    const auto guard = static_cast<size_t>(i.guard);
    CheckDefined(valid[guard]);
    const uint32_t p =
        *reinterpret_cast<const uint32_t*>(file.get() + kernel.register_offsets[guard]);
    active &= i.guard_negated ? ~p : p;
  }
  kernel.executed[static_cast<size_t>(group->pc)] += active != 0;
  if (i.flow == Flow::kBranch) return Branch(group, i);
  if (i.flow == Flow::kExit) return Exit(group);
  if (active == 0) {
    ++group->pc;
    return Step::kGoOn;
  }
  if (i.together != Together::kNobody && (Needed(i) & ~active) != 0) {
    // The others come, or they do not.
    const uint32_t pass = group->mask & ~active;
    const int next = group->pc + 1;
    group->mask = active;
    group->waits = true;
    if (pass != 0) Join(next, pass);
    return Step::kRegroup;
  }
  return Execute(group, i);
}

Warp::Step Warp::Branch(Group* group, const Instruction& i) {
  const uint32_t stay = group->mask & ~active;
  if (active == 0 || stay == 0) {
    group->pc = active == 0 ? group->pc + 1 : i.target;
    return Step::kGoOn;
  }
  group->mask = stay;
  ++group->pc;
  Join(i.target, active);
  return Step::kRegroup;
}

Warp::Step Warp::Exit(Group* group) {
  live &= ~active;
  group->mask &= ~active;
  ++group->pc;
  if (group->mask == 0) Leave(group);
  // Who waits for lanes that are gone finds out.
  for (Group& one : groups) one.waits = false;
  return Step::kRegroup;
}

// The lanes without which an instruction does not begin.
uint32_t Warp::Needed(const Instruction& i) const {
  uint32_t needed = 0;
  if (i.together == Together::kWarp) {
    needed = i.flow == Flow::kBarrier ? live : kAllLanes;
  } else {
    const auto* members = Src<uint32_t>(i.members);
    ForActive([&](int lane) {
      if (needed == 0) needed = members[lane];
      if (members[lane] != needed || !(needed >> lane & 1)) {
        Fail(kIllegalInstruction, "membermask", lane);
      }
    });
  }
  if ((needed & ~live) != 0) Fail(kLaunchFailed, "waits for lanes that have left the kernel");
  return needed;
}

void Warp::CheckDefined(uint32_t defined) const {
  if ((active & ~defined) == 0) return;
  Fail(kLaunchFailed, StrCat("uses a register that is not defined, lanes ", active & ~defined));
}

Warp::Step Warp::Execute(Group* group, const Instruction& i) {
  uint32_t defined = active;
  for (int s = i.first_needed; s < i.srcs; ++s) {
    if (i.src[s].reg >= 0) defined &= valid[static_cast<size_t>(i.src[s].reg)];
  }
  if (i.sink) CheckDefined(defined);
  if (i.flow == Flow::kBarrier) {
    at_barrier = true;
    barrier = i.mode;
    group->waits = true;
    return Step::kStop;
  }
  for (int d = 0; d < i.dsts; ++d) {
    if (i.dst[d].reg < 0) continue;
    uint32_t& v = valid[static_cast<size_t>(i.dst[d].reg)];
    v = (v & ~active) | defined;
  }
  i.run(*this, i);
  ++group->pc;
  return Step::kGoOn;
}

}  // namespace kvant::ptxemu
