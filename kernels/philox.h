// The random bits of Dropout: Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011), a pure function of seed, offset and
// element, so that any order of evaluation gives the same mask.
#ifndef KVANT_KERNELS_PHILOX_H_
#define KVANT_KERNELS_PHILOX_H_

#include <cmath>
#include <cstdint>

namespace kvant {

// Elements that one counter gives bits for.
inline constexpr int64_t kPhiloxBlock = 4;

// 32 random bits for each of the elements kPhiloxBlock * block, ..., in dense row-major order.
inline void PhiloxWords(uint64_t seed, uint64_t offset, uint64_t block, uint32_t* words) {
  uint32_t counter[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                         static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  for (int i = 0; i < 4; ++i) words[i] = counter[i];
}

// The least word whose element Dropout with this probability keeps; 2^32: there is none, as where
// the probability is NaN.
inline uint64_t DropoutThreshold(double probability) {
  constexpr double kWords = 4294967296.0;
  const double least = std::ceil(probability * kWords);
  if (!(least < kWords)) return uint64_t{1} << 32;
  return least > 0 ? static_cast<uint64_t>(least) : 0;
}

// Whether Dropout with this probability keeps the element at `index`.
inline bool DropoutKeeps(uint64_t seed, uint64_t offset, uint64_t index, double probability) {
  uint32_t words[kPhiloxBlock];
  PhiloxWords(seed, offset, index / kPhiloxBlock, words);
  return words[index % kPhiloxBlock] >= DropoutThreshold(probability);
}

}  // namespace kvant

#endif  // KVANT_KERNELS_PHILOX_H_
