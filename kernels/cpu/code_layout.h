// Whether a segment's codes are multiplied as they are stored, and how they are cut for it.
#ifndef KVANT_KERNELS_CPU_CODE_LAYOUT_H_
#define KVANT_KERNELS_CPU_CODE_LAYOUT_H_

#include <cstdint>
#include <string>

#include "kvant/kernels/cpu/attention_args.h"

namespace kvant::cpu {

// Runs of tokens that have scales by channel of their own are at least so long.
inline constexpr int64_t kMinRun = 16;
// Runs that a tile has tokens of, at most.
inline constexpr int64_t kMostRuns = kTokenTile / kMinRun + 1;
// Sums of f32 are taken in blocks of channels: their error grows with their length.
inline constexpr int64_t kMaxFloatPart = 64;

// Sets segment.codes for tokens of `channels` channels; returns why it stays unusable, in words,
// or nothing. Only keys may be channel-major.
std::string DescribeCodes(int64_t channels, bool keys, Segment& segment);

// Groups that a token has parameters of, at most, for these to be found by its address.
inline constexpr int64_t kMostAddressedGroups = 16;
// Whether an array of the described segment's parameters has entries for tokens, or for pages, that
// TokenAddresses finds.
bool HasTokens(const Segment& segment, const Array& array);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODE_LAYOUT_H_
