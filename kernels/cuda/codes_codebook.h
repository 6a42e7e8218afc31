// Codebooks of 16 entries beside codes: a table in shared memory of both entries of a byte, as f16.
// Every lane has a copy in a bank of its own, so that lookups do not meet:
//
//   entries of byte b, lane l    at 128 b + 4 l: {that of the low nibble, that of the high one}
//
// Entries are divided by a power of two, so that they fit into f16.
//
// Or as bf16, which has the range of f32 but not its bits: in two parts. 16 lanes, which are what
// meets in loads of 8 bytes, have a copy each:
//
//   entries of byte b, lane l    at 128 b + 8 (l % 16): {the first parts of both}, {what they
//   leave}
#ifndef KVANT_KERNELS_CUDA_CODES_CODEBOOK_H_
#define KVANT_KERNELS_CUDA_CODES_CODEBOOK_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

class CodebookTable {
 public:
  // Behind the entries in f32 lie those in f16, and what these were divided by.
  static constexpr i32 kEntries = 16, kHalvesAt = kEntries, kFactorAt = kHalvesAt + kEntries / 2;
  static constexpr i32 kBytes = 256 * 128;

  // The power of two that entries were divided by, as a product: what a table's entries are
  // multiplied with, and what is left to scales.
  struct Factors {
    float entries, scales;
  };
  // Of entries that meet scales in f16: these stay as they are where f16 has room for entries.
  KVANT_DEVICE static Factors FactorsOf(const SegmentParams& segment) {
    const float factor = Load(segment.codebook + kFactorAt);
    if (1.f <= factor && factor <= 16384.f) return {factor, 1.f};
    return {1.f, factor};
  }

  // By all threads; done by the block's next barrier.
  KVANT_DEVICE static void Fill(const SegmentParams& segment, float factor, SharedAddress table) {
    const u32 times = PackF16(factor, factor);
    const auto* halves = reinterpret_cast<const u16*>(segment.codebook + kHalvesAt);
    KVANT_NO_UNROLL
    for (i32 byte = ThreadIndex() / 32; byte < 256; byte += BlockThreads() / 32) {
      const u32 low = Load(halves + byte % 16), high = Load(halves + byte / 16);
      StoreShared32(table + static_cast<u32>(byte * 128 + LaneIndex() * 4),
                    MultiplyF16x2(low | high << 16, times));
    }
  }

  KVANT_DEVICE static void FillInTwo(const SegmentParams& segment, SharedAddress table) {
    KVANT_NO_UNROLL
    for (i32 byte = ThreadIndex() / 32; byte < 256; byte += BlockThreads() / 32) {
      const float low = Load(segment.codebook + byte % 16);
      const float high = Load(segment.codebook + byte / 16);
      const float first_low = FirstPart(low), first_high = FirstPart(high);
      const u32 word = LaneIndex() % 2 == 0 ? PackBF16(first_low, first_high)
                                            : PackBF16(low - first_low, high - first_high);
      StoreShared32(table + static_cast<u32>(byte * 128 + LaneIndex() * 4), word);
    }
  }
  KVANT_DEVICE explicit CodebookTable(SharedAddress table) : table_(table) {}

  // The entries of byte i of a word.
  KVANT_DEVICE u32 Entries(u32 w, i32 i) const {
    return LoadShared32(table_ + static_cast<u32>(LaneIndex() * 4) + PlaceOf(w, i));
  }
  KVANT_DEVICE Words2 EntriesInTwo(u32 w, i32 i) const {
    return LoadShared64(table_ + static_cast<u32>(LaneIndex() % 16 * 8) + PlaceOf(w, i));
  }

 private:
  // It is cut out by a permutation, so that one instruction, of the ALU or not, makes an address of
  // it: a mask would be put behind the shift.
  KVANT_DEVICE static u32 PlaceOf(u32 w, i32 i) {
    return Permute(w, 0, 0x4440 + static_cast<u32>(i)) << 7;
  }
  // x but for its lower bits, and for its last one where it has no lower ones: what it leaves has
  // x's sign and is not 0, so that an infinite scale leaves both parts what x times it is.
  KVANT_DEVICE static float FirstPart(float x) {
    return AsFloat((AsBits(x) - (Abs(x) > 0x1p-100f ? 1u : 0u)) & 0xffff0000u);
  }

  const SharedAddress table_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_CODEBOOK_H_
