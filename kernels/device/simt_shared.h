// The shared memory of a block, and who touched each byte of it when.
#ifndef KVANT_KERNELS_DEVICE_SIMT_SHARED_H_
#define KVANT_KERNELS_DEVICE_SIMT_SHARED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvant/kernels/device/simt_calls.h"
#include "kvant/kernels/device/simt_errors.h"
#include "kvant/kernels/device/simt_moment.h"

namespace kvant::simt {

class SharedMemory {
 public:
  // With `check` false only bounds and alignment are checked.
  SharedMemory(size_t bytes, bool check, Errors* errors);

  // Forgets what was written. `now` is what the block's first accesses will say.
  void BeginBlock(Moment now);

  // The bytes at an address that the actor reads, or null where they are out of bounds. With
  // `for_warp` other lanes get them too, so even what the actor wrote itself needs a barrier.
  const unsigned char* Read(uint32_t from, size_t bytes, const Actor& actor, Moment now,
                            bool for_warp = false);
  unsigned char* Write(uint32_t to, size_t bytes, const Actor& actor, Moment now);

  // The bytes that a copy will write: garbage that nobody may touch until FinishCopy.
  unsigned char* StartCopy(uint32_t to, size_t bytes, const Actor& actor, Moment now);
  // The bytes again, written at this moment.
  unsigned char* FinishCopy(uint32_t to, size_t bytes, const Actor& actor, Moment now);

 private:
  struct Access {
    Moment when;
    int thread = -1;
    Site site;
  };
  // One word, or one byte of a word that was accessed by bytes.
  //
  // Readers since the last write: the latest, and another one. If threads of two warps read
  // between two barriers of the block, these are of different warps; so whoever writes next,
  // one of the two tells whether a barrier is missing.
  struct Cell {
    Access write;
    Access read;
    Access other_read;
    bool copying = false;
  };

  bool InBounds(uint32_t address, size_t bytes, const Actor& actor, const char* what);
  // Calls visit(cell, offset) for the cells of these bytes.
  template <typename Visit>
  void ForCells(size_t offset, size_t bytes, Visit visit);
  bool Unordered(const Access& earlier, const Actor& actor, Moment now) const;
  void CheckRead(Cell& cell, size_t offset, const Actor& actor, Moment now, bool for_warp);
  void CheckWrite(Cell& cell, size_t offset, const Actor& actor, Moment now);
  void NoteRead(Cell& cell, const Access& read) const;
  void ReportPair(Check check, size_t offset, const Actor& actor, const char* does,
                  const Access& earlier, const char* did, const char* why);

  size_t bytes_;
  bool check_;
  Errors* errors_;
  uint32_t first_barrier_ = 0;  // what was written before it, another block wrote
  struct Free {
    void operator()(unsigned char* p) const;
  };
  std::unique_ptr<unsigned char, Free> data_;
  std::vector<Cell> words_;
  std::vector<bool> by_bytes_;  // per word: look at bytes_of_words_ instead
  std::vector<Cell> bytes_of_words_;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_SHARED_H_
