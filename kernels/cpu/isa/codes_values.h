// Integer products of s16 weights with codes, two tokens at a time: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"
#include "kvant/kernels/cpu/isa/codes_weights.h"
#include "kvant/kernels/cpu/isa/streams.h"

namespace kvant::cpu {
namespace {

// Tokens that are multiplied in one go, and the sums that wait for the next.
template <typename S>
struct ValuesTurn {
  template <int kBits, int kRows>
  static constexpr bool kMayWait = S::kWidth == 8 && kBits == 8 && kRows == 1;
  static constexpr int64_t kMostSums = 64;

  int64_t begin, end;
  typename S::I* waiting;  // null: these are all tokens
};

// kChunks runs of kWidth units of each token times kRows rows of weights; kGroups of
// them share a run. A unit is kUnit bytes, of which a half of a dword holds the codes.
template <typename S, int kBits, bool kSigned, int kUnit, int kRows, int kGroups, int kChunks>
void ValuesBlock(const CodeKernels::Values& args, int64_t row, int64_t byte, ValuesTurn<S>& turn,
                 const float* shrink, float* out) {
  using I = typename S::I;
  using F = typename S::Vector;
  // Else there is one turn.
  constexpr bool kMayWait = ValuesTurn<S>::template kMayWait<kBits, kRows>;
  constexpr int kPlanes = 8 * kUnit / kBits;
  constexpr int64_t kRunBytes = S::kWidth * kUnit;
  constexpr int64_t kChannels = S::kWidth * kPlanes;
  const I flips =
      S::Dword(!args.is_signed ? 0 : static_cast<int32_t>(kBits == 4 ? 0x88888888 : 0xaaaaaaaa));
  const TokenRows& rows = args.rows;
  const int64_t begin = kMayWait ? turn.begin : 0, end = kMayWait ? turn.end : rows.tokens;
  const int64_t bytes = rows.row_bytes - byte;
  const int64_t first_channel = byte * 8 / kBits;
  const int64_t row_step = args.groups * kTokenTile;
  // Lanes past the last channel have no group; what they multiply is not used.
  const int16_t* weights[kChunks][kGroups];
  int64_t groups[kChunks][kGroups];
  for (int ch = 0; ch < kChunks; ++ch) {
    for (int i = 0; i < kGroups; ++i) {
      const int64_t channel = first_channel + ch * kChannels + i * (kChannels / kGroups);
      groups[ch][i] = CodesMin(channel / args.group, args.groups - 1);
      weights[ch][i] = args.weights + (row * args.groups + groups[ch][i]) * kTokenTile;
    }
  }
  I acc[kChunks][kRows][kPlanes];
  // Loops over the sums are unrolled early, or GCC keeps these in memory.
#pragma GCC unroll 16
  for (auto& chunk : acc) {
#pragma GCC unroll 16
    for (auto& of_row : chunk) {
#pragma GCC unroll 16
      for (I& a : of_row) {
        a = kMayWait && begin > 0 ? turn.waiting[&a - &acc[0][0][0]] : S::ZeroDwords();
      }
    }
  }
  // What of the next tile is prefetched with every pair of tokens, so that all passes over the
  // tokens prefetch all of it, line after line.
  constexpr int64_t kAhead = 2 * kChunks * kRunBytes;
  // Requests stand apart where one row waits for memory: a line with each chunk, of AVX-512's size.
  constexpr bool kApart = kRows == 1 && S::kWidth == 16 && kAhead == kChunks * 64;
  const int stream_bits = StreamBits(rows, kCodeStreamBits<S>);
  const uint8_t *p0 = nullptr, *next = nullptr;
  for (int64_t t = begin; t < end; t += 2, p0 += 2 * rows.stride) {
    if (t % kPageUnit == 0) {
      p0 = rows.blocks[t / kPageUnit] + byte;
      next = NextOf(rows, stream_bits, t / kPageUnit, kPageUnit) + byte * kPageUnit;
    }
    const uint8_t* p1 = t + 1 < rows.tokens ? p0 + rows.stride : p0;
    if constexpr (!kApart) {
      for (int64_t line = 0; line < kAhead; line += 64) __builtin_prefetch(next + line, 0, 2);
      next += kAhead;
    }
#pragma GCC unroll 16
    for (int ch = 0; ch < kChunks; ++ch) {
      const int64_t skip = ch * kRunBytes;
      if constexpr (kApart) PrefetchLine(next);
      const I units =
          S::template TokenPair<kUnit>(p0 + skip, p1 + skip, kChunks > 1 ? kRunBytes : bytes);
      I plane[kPlanes];
      ForEachOf<kPlanes>([&](auto k) __attribute__((always_inline)) {
        plane[k.value] = S::template ValueField<kBits, kSigned, k.value>(units, flips);
      });
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const I weight = S::template Weights<kGroups>(weights[ch], r * row_step + t);
#pragma GCC unroll 16
        for (int k = 0; k < kPlanes; ++k) acc[ch][r][k] = S::Dot(acc[ch][r][k], plane[k], weight);
      }
    }
  }
  if (kMayWait && turn.waiting != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < kChunks * kRows * kPlanes; ++i) turn.waiting[i] = (&acc[0][0][0])[i];
    turn.waiting += kChunks * kRows * kPlanes;
    if (end < rows.tokens) return;
  }
  const auto add = [&](auto plain) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int ch = 0; ch < kChunks; ++ch) {
      const int64_t channel = first_channel + ch * kChannels;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* const lanes = args.lanes + (row + r) * kSquareLanes;
        F square = S::Load(lanes);
        F v[kPlanes];
        ForEachOf<kPlanes>([&](auto k) __attribute__((always_inline)) {
          v[k.value] = S::ToFloat(acc[ch][r][k.value]);
          constexpr int kShift = S::template kFieldShift<kBits, k.value>;
          if (kShift != 0) v[k.value] = S::Mul(v[k.value], S::Set1(1.f / (1 << kShift)));
        });
        ZipPlanes<S>(v, v);
#pragma GCC unroll 16
        for (int k = 0; k < kPlanes; ++k) {
          AddToOutput<S, plain.value>(args, row + r, channel + k * S::kWidth,
                                      groups[ch][k * kGroups / kPlanes], shrink, v[k], out,
                                      &square);
        }
        S::Store(lanes, square);
      }
    }
  };
  const bool plain =
      args.channel_scales == nullptr && first_channel + kChunks * kChannels <= args.channels;
  plain ? add(Constant<1>()) : add(Constant<0>());
}

template <typename S, int kBits, bool kSigned, int kUnit, int kRows, int kGroups>
void ValuesOfGroups(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  constexpr int64_t kRunBytes = S::kWidth * kUnit;
  constexpr int kFit = S::kDotAccumulators * kBits / (kRows * 8 * kUnit);
  constexpr int kMostChunks = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const int64_t row_bytes = args.rows.row_bytes;
  const auto run_turn = [&](ValuesTurn<S> turn) {
    int64_t byte = 0;
    const auto run = [&](auto chunks) {
      constexpr int kChunks = decltype(chunks)::value;
      const int64_t needed = kChunks == 1 ? 1 : kChunks * kRunBytes;
      for (; byte + needed <= row_bytes; byte += kChunks * kRunBytes) {
        ValuesBlock<S, kBits, kSigned, kUnit, kRows, kGroups, kChunks>(args, row, byte, turn,
                                                                       shrink, out);
      }
    };
    if constexpr (kMostChunks >= 4) run(Constant<4>());
    if constexpr (kMostChunks >= 2) run(Constant<2>());
    run(Constant<1>());
  };
  // One row waits for memory, which is read slowly where each token is read in several passes over
  // all of them.
  if constexpr (ValuesTurn<S>::template kMayWait<kBits, kRows>) {
    const int64_t sums = (row_bytes + kRunBytes - 1) / kRunBytes * (8 * kUnit / kBits);
    if (row_bytes > kMostChunks * kRunBytes && sums <= ValuesTurn<S>::kMostSums) {
      typename S::I waiting[ValuesTurn<S>::kMostSums];
      for (int64_t begin = 0; begin < args.rows.tokens; begin += kPageUnit) {
        run_turn({begin, CodesMin(begin + kPageUnit, args.rows.tokens), waiting});
      }
      return;
    }
  }
  run_turn({0, args.rows.tokens, nullptr});
}

template <typename S, int kBits, bool kSigned, int kRows>
void ValuesOfRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  const auto are_whole = [&](int64_t n) { return args.groups == 1 || args.group % n == 0; };
  // Of a run of units of two bytes. These are transposed at half the price, but have twice the
  // sums, which must fit the registers.
  constexpr int64_t kChannels = S::kWidth * 16 / kBits;
  if constexpr (kBits == 8) {
    static_assert(kRows * 2 <= S::kDotAccumulators);
    if (are_whole(kChannels)) {
      ValuesOfGroups<S, kBits, kSigned, 2, kRows, 1>(args, row, shrink, out);
    } else {
      ValuesOfGroups<S, kBits, kSigned, 2, kRows, 2>(args, row, shrink, out);
    }
  } else {
    // Weights of several groups cost more than units of two bytes save.
    if constexpr (kBits == 4 && kRows * 4 <= S::kDotAccumulators) {
      if (are_whole(kChannels)) {
        return ValuesOfGroups<S, kBits, kSigned, 2, kRows, 1>(args, row, shrink, out);
      }
    }
    if (are_whole(kChannels / 2)) {
      return ValuesOfGroups<S, kBits, kSigned, 1, kRows, 1>(args, row, shrink, out);
    }
    // Groups that share a run, at least 16 channels each.
    if constexpr (kChannels > 64) {
      if (args.group % (kChannels / 4) != 0) {
        return ValuesOfGroups<S, kBits, kSigned, 1, kRows, 4>(args, row, shrink, out);
      }
    }
    if constexpr (kChannels > 32) {
      ValuesOfGroups<S, kBits, kSigned, 1, kRows, 2>(args, row, shrink, out);
    }
  }
}

template <typename S, int kBits, bool kSigned>
void ValuesOf(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
              float* out) {
  ForRowBlocks(query_rows, [&](auto block, int64_t row) {
    ValuesOfRows<S, kBits, kSigned, decltype(block)::value>(args, row, shrink, out);
  });
}

template <typename S>
void Values(const CodeKernels::Values& args, int64_t query_rows, const float* shrink, float* out) {
  const auto run = args.bits == 2   ? ValuesOf<S, 2, false>
                   : args.bits == 4 ? ValuesOf<S, 4, false>
                   : args.is_signed ? ValuesOf<S, 8, true>
                                    : ValuesOf<S, 8, false>;
  run(args, query_rows, shrink, out);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
