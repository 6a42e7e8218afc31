// Hadamard ops on Q, K, V and the output, as one rotation of Q and one of the output.
//
// Sylvester's matrix of 2^n is a product of one factor H_2 for each bit of a channel's number, and
// that in blocks of 2^m has the factors of the lowest m bits alone. These factors commute, and each
// is its own inverse. So any rotations of a head are a set of bits, here `rotated`: blocks of b are
// b - 1, and one after another is the exclusive or of both. Nothing but blocks can be expressed.
#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/patterns/resolver.h"

namespace kvant {
namespace {

// "16 and 64": blocks whose rotations, one after another, are this one.
std::string BlocksInWords(int64_t rotated) {
  std::vector<int64_t> blocks;
  for (uint64_t ends = rotated ^ rotated >> 1; ends != 0; ends &= ends - 1) {
    blocks.push_back(int64_t{2} << std::countr_zero(ends));
  }
  return absl::StrJoin(blocks, " and ");
}

std::string InWords(int64_t rotated) {
  return rotated == 0 ? "not rotated"
                      : absl::StrCat("rotated in blocks of ", BlocksInWords(rotated));
}

// Whether runs of `block` places are runs of `block` coordinates of axis `col`. Places are numbers
// of mixed radix, an atom for each digit: where the lowest digit is a multiple of the block, so are
// the strides of all others.
bool RunsAlong(const FoldedView& places, int col, int64_t block) {
  const auto digits = places.axis(col);
  return !digits.empty() && digits.back().stride == 1 && digits.back().extent % block == 0;
}

}  // namespace

// Adds the rotations to `rotated`. `dims` are what the operand is broadcast to, or the output's;
// `col` is the axis of the channels.
bool Resolver::AddRotations(Rotations& rotations, absl::Span<const int64_t> dims, int col,
                            int64_t* rotated) {
  const bool empty = std::ranges::count(dims, 0) > 0;
  for (Rotation& rotation : rotations) {
    const int64_t block = op(rotation.op).Get<Attr::kBlock>();
    if (block == 1) continue;
    if (!empty && (!rotation.places.BroadcastTo(dims) || !RunsAlong(rotation.places, col, block))) {
      return Fail(op(rotation.op), "its blocks of ", block, " are no runs of the ", dims[col],
                  " channels of a head");
    }
    *rotated ^= block - 1;
  }
  return true;
}

// All segments have to be rotated like the first, as Q is there but once.
bool Resolver::CheckSegmentRotation(const Chain& chain, bool first, int64_t rotated,
                                    int64_t* of_first) {
  if (first) *of_first = rotated;
  if (rotated == *of_first) return true;
  return Fail(tensor(chain.source).Label(), ": a segment that is ", InWords(rotated),
              ", where the first is ", InWords(*of_first));
}

bool Resolver::ResolveRotation(const Op& matmul, const char* what, int64_t rotated,
                               int64_t* block) {
  if ((rotated & (rotated + 1)) != 0) {
    return Fail(matmul, "rotations of ", what, " in blocks of ", BlocksInWords(rotated),
                " are not one rotation in blocks");
  }
  *block = rotated == 0 ? 0 : rotated + 1;
  return true;
}

}  // namespace kvant
