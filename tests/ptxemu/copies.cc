// cp.async: copies from global to shared memory that a thread waits for by groups.
#include <cstring>
#include <utility>

#include "kvant/tests/ptxemu/decoder.h"
#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

// The bytes that a copy reads. What it does not read may lie outside.
void Fetch(Warp& w, int lane, Copy* copy) {
  if (copy->from % copy->width != 0) {
    w.Fail(kMisaligned, "cp.async from " + w.launch->memory->Describe(copy->from), lane);
  }
  if (copy->valid == 0) return;
  const Allocation* a = w.Covering(lane, copy->from, copy->valid, "cp.async of");
  if (a == nullptr) {
    std::memcpy(copy->data, reinterpret_cast<const void*>(copy->from), copy->valid);
    return;
  }
  const uint64_t at = copy->from - a->base;
  if (std::memchr(a->known.data() + at, 0, copy->valid) != nullptr) {
    w.Fail(kLaunchFailed, "cp.async of bytes that nobody stored", lane);
  }
  std::memcpy(copy->data, a->data.data() + at, copy->valid);
}

// mode: the width. src: to, from, and how many bytes are read; zeros follow them.
void Begin(Warp& w, const Instruction& i) {
  w.ForActive([&](int l) {
    Copy copy{};
    copy.to = static_cast<uint32_t>(w.Get(i.src[0], l) + static_cast<uint64_t>(i.offset));
    copy.from = w.Get(i.src[1], l) + static_cast<uint64_t>(i.source_offset);
    copy.width = static_cast<uint8_t>(i.mode);
    const uint64_t valid = i.srcs > 2 ? w.Get(i.src[2], l) : i.mode;
    if (valid > i.mode) w.Fail(kLaunchFailed, StrCat("cp.async of ", valid, " bytes"), l);
    copy.valid = static_cast<uint8_t>(valid);
    Fetch(w, l, &copy);

    uint8_t* to = w.SharedAt(l, copy.to, copy.width);
    const auto at = static_cast<uint32_t>(to - w.block->shared.data());
    for (uint32_t n = at; n < at + copy.width; ++n) {
      uint8_t& state = w.block->state[n];
      if (state == kPending) {
        w.Fail(kLaunchFailed, StrCat("two cp.async under way to shared ", n), l);
      }
      state = kPending;
    }
    if (w.launch->options->races) w.TouchShared(l, at, copy.width, true, false);
    if (w.launch->copies_early) {
      std::memcpy(to, copy.data, copy.width);
    } else {
      std::memset(to, 0xfe, copy.width);
    }
    w.copies[static_cast<size_t>(l)].open.push_back(copy);
  });
}

void Commit(Warp& w, const Instruction&) {
  w.ForActive([&](int l) {
    LaneCopies& own = w.copies[static_cast<size_t>(l)];
    own.groups.push_back(std::exchange(own.open, {}));
  });
}

// mode: how many groups may stay under way.
void Wait(Warp& w, const Instruction& i) {
  w.ForActive([&](int l) { w.Land(l, i.mode); });
}

void WaitAll(Warp& w, const Instruction& i) {
  Commit(w, i);
  w.ForActive([&](int l) { w.Land(l, 0); });
}

// The handler takes both addresses from registers.
void DecodeBegin(Decoder& d, bool is_cg) {
  Instruction& i = d.now();
  i.run = Begin;
  i.sink = true;
  const bool to = d.AddAddress(d.operand(0), &i.offset);
  const bool from = d.AddAddress(d.operand(1), &i.source_offset);
  if (!to || !from) d.Unknown("address without a register");
  const uint64_t width = d.operand(2).bits;
  if (width != 16 && (is_cg || (width != 4 && width != 8))) d.Unknown("width");
  i.mode = static_cast<uint32_t>(width);
  if (d.operands() > 3) d.AddSource(d.operand(3), 4);
}

}  // namespace

void DecodeCopy(Decoder& d) {
  if (d.opcode().size() < 3 || d.opcode()[1] != "async") d.Unknown("copy");
  const std::string& what = d.opcode()[2];
  if (what == "commit_group") {
    d.now().run = Commit;
  } else if (what == "wait_group") {
    d.now().run = Wait;
    d.now().mode = static_cast<uint32_t>(d.operand(0).bits);
  } else if (what == "wait_all") {
    d.now().run = WaitAll;
  } else if (what == "cg" || what == "ca") {
    DecodeBegin(d, what == "cg");
  } else {
    d.Unknown("copy");
  }
}

}  // namespace kvant::ptxemu
