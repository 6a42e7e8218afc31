// Dropout's decisions: Philox4x32-10, the same numbers as kernels/philox.h gives.
#ifndef KVANT_KERNELS_CUDA_DROPOUT_H_
#define KVANT_KERNELS_CUDA_DROPOUT_H_

#include "kvant/kernels/cuda/elements.h"

namespace kvant::cuda {

inline constexpr i32 kPhiloxRounds = 10;

KVANT_DEVICE u32 PhiloxWord(u64 seed, u64 offset, u64 index) {
  u32 counter[4] = {static_cast<u32>(index / 4), static_cast<u32>(index / 4 >> 32),
                    static_cast<u32>(offset), static_cast<u32>(offset >> 32)};
  u32 key[2] = {static_cast<u32>(seed), static_cast<u32>(seed >> 32)};
  KVANT_NO_UNROLL
  for (i32 round = 0; round < kPhiloxRounds; ++round) {
    const u32 next[4] = {
        MultiplyHigh(0xCD9E8D57u, counter[2]) ^ counter[1] ^ key[0], 0xCD9E8D57u * counter[2],
        MultiplyHigh(0xD2511F53u, counter[0]) ^ counter[3] ^ key[1], 0xD2511F53u * counter[0]};
    KVANT_UNROLL
    for (i32 i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const u32 which = static_cast<u32>(index % 4);
  // No index that is known only at run time: it would move the counter out of registers.
  const u32 first = which == 0 ? counter[0] : counter[1];
  const u32 second = which == 2 ? counter[2] : counter[3];
  return which < 2 ? first : second;
}

// What a launch's dropout is told, read once by every thread.
struct Dropout {
  u64 seed = 0, offset = 0;
  double threshold = 0;  // words below it are dropped
  float factor = 1.f;    // what is kept is multiplied by

  template <class T>
  KVANT_DEVICE static Dropout Of(const AttentionParams& p) {
    Dropout dropout;
    if (!T::k.dropout) return dropout;
    const auto integer = [](const ArrayTraits& traits, const Scalar& scalar) {
      return static_cast<u64>(traits.type == kNone ? scalar.integer
                                                   : LoadInteger(traits.type, scalar.data, 0));
    };
    dropout.seed = integer(T::k.seed, p.seed);
    dropout.offset = integer(T::k.dropout_offset, p.dropout_offset);
    const double probability = T::k.probability.type == kNone
                                   ? p.probability.real
                                   : LoadElement(T::k.probability.type, p.probability.data, 0);
    dropout.threshold = probability * 4294967296.0;
    dropout.factor = static_cast<float>(1.0 / (1.0 - probability));
    return dropout;
  }

  KVANT_DEVICE bool Keeps(u64 index) const {
    return static_cast<double>(PhiloxWord(seed, offset, index)) >= threshold;
  }

  // The dense row-major index of [at, 0] in the probabilities.
  KVANT_DEVICE static u64 RowIndex(const AttentionParams& p, const Position& at) {
    const u64 head = (static_cast<u64>(at.b0) * p.batch[1] + at.b1) * p.batch[2] + at.b2;
    return (head * p.q_len + at.row) * p.kv_len;
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_DROPOUT_H_
