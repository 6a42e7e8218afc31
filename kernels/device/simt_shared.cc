#include "kvant/kernels/device/simt_shared.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace kvant::simt {
namespace {

// As f16, bf16 and f32 this is NaN.
constexpr int kGarbage = 0xff;

}  // namespace

void SharedMemory::Free::operator()(unsigned char* p) const { free(p); }

SharedMemory::SharedMemory(size_t bytes, bool check, Errors* errors)
    : bytes_(bytes), check_(check), errors_(errors) {
  data_.reset(static_cast<unsigned char*>(malloc(bytes + 1)));
  if (data_ == nullptr) throw std::bad_alloc();
  if (!check) return;
  words_.resize((bytes + 3) / 4);
  by_bytes_.resize(words_.size());
}

void SharedMemory::BeginBlock(Moment now) {
  first_barrier_ = now.block_barriers;
  memset(data_.get(), kGarbage, bytes_);
  by_bytes_.assign(by_bytes_.size(), false);
  // Cells of earlier blocks are known by their moments; only this flag has none.
  for (Cell& cell : words_) cell.copying = false;
}

bool SharedMemory::InBounds(uint32_t address, size_t bytes, const Actor& actor, const char* what) {
  const int64_t offset = int64_t{address} - kSharedBase;
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > static_cast<int64_t>(bytes_)) {
    errors_->Add(Check::kBounds, actor,
                 std::string(what) + " " + std::to_string(bytes) + " bytes at shared address " +
                     std::to_string(offset) + ", outside of the block's " + std::to_string(bytes_) +
                     " bytes,");
    return false;
  }
  if (offset % static_cast<int64_t>(bytes) != 0) {
    errors_->Add(Check::kAlignment, actor,
                 std::string(what) + " " + std::to_string(bytes) + " bytes at shared address " +
                     std::to_string(offset) + ", which is not aligned to them,");
  }
  return true;
}

template <typename Visit>
void SharedMemory::ForCells(size_t offset, size_t bytes, Visit visit) {
  const size_t end = offset + bytes;
  while (offset < end) {
    const size_t word = offset / 4;
    if (offset % 4 == 0 && end - offset >= 4 && !by_bytes_[word]) {
      visit(words_[word], offset);
      offset += 4;
      continue;
    }
    if (!by_bytes_[word]) {
      by_bytes_[word] = true;
      bytes_of_words_.resize(words_.size() * 4);
      for (int i = 0; i < 4; ++i) bytes_of_words_[word * 4 + i] = words_[word];
    }
    visit(bytes_of_words_[offset], offset);
    ++offset;
  }
}

bool SharedMemory::Unordered(const Access& earlier, const Actor& actor, Moment now) const {
  return earlier.thread >= 0 && !IsOrdered(earlier.thread, earlier.when, actor.thread, now);
}

void SharedMemory::ReportPair(Check check, size_t offset, const Actor& actor, const char* does,
                              const Access& earlier, const char* did, const char* why) {
  if (!errors_->IsNew(check, actor.site, earlier.site)) return;
  errors_->Add(check, Errors::Describe(actor) + " " + does + " shared address " +
                          std::to_string(offset) + " at " + ToString(actor.site) +
                          ", which thread " + std::to_string(earlier.thread) + " " + did + " at " +
                          ToString(earlier.site) + ", " + why);
}

void SharedMemory::NoteRead(Cell& cell, const Access& read) const {
  const bool first =
      cell.read.thread < 0 || cell.read.when.block_barriers != read.when.block_barriers;
  if (first) {
    cell.other_read.thread = -1;
  } else if (cell.read.thread != read.thread) {
    const bool keeps_other =
        cell.other_read.thread >= 0 && !SameWarp(cell.other_read.thread, read.thread);
    const bool ordered = SameWarp(cell.read.thread, read.thread) &&
                         cell.read.when.warp_barriers != read.when.warp_barriers;
    if (!keeps_other && !ordered) cell.other_read = cell.read;
  }
  cell.read = read;
}

void SharedMemory::CheckRead(Cell& cell, size_t offset, const Actor& actor, Moment now,
                             bool for_warp) {
  const Access& write = cell.write;
  if (cell.copying) {
    ReportPair(Check::kPendingCopy, offset, actor, "reads", write, "has been copying to",
               "before that thread has waited for the copy");
  } else if (write.thread < 0 || write.when.block_barriers < first_barrier_) {
    errors_->Add(Check::kUninitialised, actor,
                 "reads shared address " + std::to_string(offset) +
                     ", which nobody of the block has written,");
  } else if (Unordered(write, actor, now) ||
             (for_warp && write.when.block_barriers == now.block_barriers &&
              write.thread == actor.thread && write.when.warp_barriers == now.warp_barriers)) {
    ReportPair(Check::kRace, offset, actor, for_warp ? "reads for its warp" : "reads", write,
               "wrote", "without a barrier between them");
  }
  NoteRead(cell, {now, actor.thread, actor.site});
}

void SharedMemory::CheckWrite(Cell& cell, size_t offset, const Actor& actor, Moment now) {
  if (cell.copying) {
    ReportPair(Check::kPendingCopy, offset, actor, "writes", cell.write, "has been copying to",
               "before that thread has waited for the copy");
  } else if (Unordered(cell.write, actor, now)) {
    ReportPair(Check::kRace, offset, actor, "writes", cell.write, "wrote",
               "without a barrier between them");
  }
  for (const Access* read : {&cell.read, &cell.other_read}) {
    if (!Unordered(*read, actor, now)) continue;
    ReportPair(Check::kRace, offset, actor, "writes", *read, "read",
               "without a barrier between them");
  }
  cell.write = {now, actor.thread, actor.site};
  cell.read.thread = -1;
  cell.other_read.thread = -1;
}

const unsigned char* SharedMemory::Read(uint32_t from, size_t bytes, const Actor& actor, Moment now,
                                        bool for_warp) {
  if (!InBounds(from, bytes, actor, "reads")) return nullptr;
  const size_t start = from - kSharedBase;
  if (check_) {
    ForCells(start, bytes,
             [&](Cell& cell, size_t offset) { CheckRead(cell, offset, actor, now, for_warp); });
  }
  return data_.get() + start;
}

unsigned char* SharedMemory::Write(uint32_t to, size_t bytes, const Actor& actor, Moment now) {
  if (!InBounds(to, bytes, actor, "writes")) return nullptr;
  const size_t start = to - kSharedBase;
  if (check_) {
    ForCells(start, bytes, [&](Cell& cell, size_t offset) {
      CheckWrite(cell, offset, actor, now);
      cell.copying = false;
    });
  }
  return data_.get() + start;
}

unsigned char* SharedMemory::StartCopy(uint32_t to, size_t bytes, const Actor& actor, Moment now) {
  if (!InBounds(to, bytes, actor, "copies")) return nullptr;
  const size_t start = to - kSharedBase;
  if (check_) {
    ForCells(start, bytes, [&](Cell& cell, size_t offset) {
      CheckWrite(cell, offset, actor, now);
      cell.copying = true;
    });
  }
  memset(data_.get() + start, kGarbage, bytes);
  return data_.get() + start;
}

unsigned char* SharedMemory::FinishCopy(uint32_t to, size_t bytes, const Actor& actor, Moment now) {
  const size_t start = to - kSharedBase;
  if (check_) {
    ForCells(start, bytes, [&](Cell& cell, size_t) {
      if (!cell.copying || cell.write.thread != actor.thread) return;
      cell.write = {now, actor.thread, actor.site};
      cell.copying = false;
    });
  }
  return data_.get() + start;
}

}  // namespace kvant::simt
