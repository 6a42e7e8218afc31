// KernelSet::philox over a vector wrapper such as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_PHILOX_H_
#define KVANT_KERNELS_CPU_ISA_PHILOX_H_

#include <cstdint>

namespace kvant::cpu {
namespace {

// What kernels/philox.h defines, of kVectors * kWidth / 2 blocks at a time. A word is the low half
// of a qword; what is above it is not read by the next round's multiplication.
template <typename S, int kVectors>
inline void PhiloxAtOnce(uint64_t seed, uint64_t offset, uint64_t block, uint32_t* words) {
  using Raw = typename S::Raw;
  constexpr int kLanes = S::kWidth / 2;
  Raw word[kVectors][4];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    word[v][0] = S::AddQwords(S::Qwords(block + v * kLanes), S::QwordOrder());
    word[v][1] = S::HighDwords(word[v][0]);
    word[v][2] = S::Qwords(offset);
    word[v][3] = S::Qwords(offset >> 32);
  }
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const Raw first = S::Qwords(key[0]), second = S::Qwords(key[1]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Raw a = S::MulDwords(word[v][0], S::Qwords(0xD2511F53));
      const Raw b = S::MulDwords(word[v][2], S::Qwords(0xCD9E8D57));
      word[v][0] = S::XorEach(S::HighDwords(b), word[v][1], first);
      word[v][1] = b;
      word[v][2] = S::XorEach(S::HighDwords(a), word[v][3], second);
      word[v][3] = a;
    }
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) S::StoreInFours(words + v * 4 * kLanes, word[v]);
}

template <typename S>
void Philox(uint64_t seed, uint64_t offset, uint64_t block, int64_t blocks, uint32_t* words) {
  constexpr int kLanes = S::kWidth / 2;
  // Enough of them to hide how long a multiplication takes.
  constexpr int kVectors = 16 / kLanes;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= blocks; i += kVectors * kLanes) {
    PhiloxAtOnce<S, kVectors>(seed, offset, block + i, words + 4 * i);
  }
  for (; i + kLanes <= blocks; i += kLanes) {
    PhiloxAtOnce<S, 1>(seed, offset, block + i, words + 4 * i);
  }
  if (i == blocks) return;
  uint32_t rest[4 * kLanes];
  PhiloxAtOnce<S, 1>(seed, offset, block + i, rest);
  __builtin_memcpy(words + 4 * i, rest, (blocks - i) * 4 * sizeof(uint32_t));
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PHILOX_H_
