// Probabilities as s16 weights, and their integer products with codes: see kernels/cpu/codes.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
#define KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_

#include <immintrin.h>

#include <cstdint>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// What Weights keeps of kWidth (row, group) until it reduces across lanes for all of them.
template <typename S>
struct WeightBatch {
  alignas(64) float most[S::kWidth][S::kWidth];
  const float* probs[S::kWidth];
  const float* scales[S::kWidth];
  const float* zero_points[S::kWidth];
};

// The sum, or the highest, of each of kWidth vectors, as one vector.
template <typename S, bool kHighest>
typename S::Vector ReduceEach(const float (&rows)[S::kWidth][S::kWidth]) {
  using F = typename S::Vector;
  F v[S::kWidth];
  for (int i = 0; i < S::kWidth; ++i) v[i] = S::Load(rows[i]);
  return S::FoldEach(v, [](F a, F b) { return kHighest ? S::Max(a, b) : S::Add(a, b); });
}

// Rounds the first n of the batch to weights.
template <typename S>
void FinishWeights(WeightBatch<S>& batch, int64_t n, int16_t* weights, float* weight_scales,
                   float* weight_biases) {
  using F = typename S::Vector;
  constexpr float kTop = 32767.f;
  // So small that the reciprocal would overflow; nothing that counts is lost.
  constexpr float kTiny = 1e-33f;
  const F most = ReduceEach<S, true>(batch.most);
  const F scales = S::Mul(most, S::Set1(1.f / kTop));
  alignas(64) float factors[S::kWidth];
  S::Store(factors, S::ZeroBelow(most, S::Set1(kTiny), S::Div(S::Set1(kTop), most)));
  for (int64_t i = 0; i < n; ++i) {
    const float *p = batch.probs[i], *s = batch.scales[i], *z = batch.zero_points[i];
    const F factor = S::Set1(factors[i]);
    F bias = S::Set1(0.f);
    for (int t = 0; t < kTokenTile; t += 2 * S::kWidth) {
      F a = S::Mul(S::Load(p + t), S::Load(s + t));
      F b = S::Mul(S::Load(p + t + S::kWidth), S::Load(s + t + S::kWidth));
      S::RoundToHalves(weights + i * kTokenTile + t, a, b, factor);
      if (z == nullptr) continue;
      // With the weights as rounded, so that what rounding loses multiplies code - zero point.
      bias = S::Fma(a, S::Load(z + t), S::Fma(b, S::Load(z + t + S::kWidth), bias));
    }
    S::Store(batch.most[i], bias);
  }
  StorePart<S>(weight_scales, n, scales);
  StorePart<S>(weight_biases, n, S::Mul(ReduceEach<S, false>(batch.most), scales));
}

template <typename S>
void Weights(const float* probs, int64_t rows, const CodeParameters& parameters, int64_t groups,
             int16_t* weights, float* weight_scales, float* weight_biases) {
  using F = typename S::Vector;
  constexpr int kVectors = kTokenTile / S::kWidth;
  WeightBatch<S> batch;
  int64_t done = 0, n = 0;
  for (int64_t row = 0; row < rows; ++row) {
    F p[kVectors];
    for (int i = 0; i < kVectors; ++i) p[i] = S::Load(probs + row * kTokenTile + i * S::kWidth);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = group * kTokenTile;
      const float* s = parameters.scales + at;
      F most = S::Mul(p[0], S::Load(s));
      for (int i = 1; i < kVectors; ++i) {
        most = S::MaxAbs(most, S::Mul(p[i], S::Load(s + i * S::kWidth)));
      }
      S::Store(batch.most[n], S::MaxAbs(most, most));
      batch.probs[n] = probs + row * kTokenTile;
      batch.scales[n] = s;
      batch.zero_points[n] = parameters.biases == nullptr ? nullptr : parameters.biases + at;
      if (++n < S::kWidth && (row + 1 < rows || group + 1 < groups)) continue;
      // Lanes past n hold what was there before, and are not used.
      FinishWeights<S>(batch, n, weights + done * kTokenTile, weight_scales + done,
                       weight_biases + done);
      done += n;
      n = 0;
    }
  }
}

template <typename S>
inline __attribute__((always_inline)) void AddToOutput(const CodeKernels::Values& args, int64_t row,
                                                       int64_t channel, int64_t group,
                                                       const float* shrink, typename S::Vector sum,
                                                       float* out) {
  using F = typename S::Vector;
  const int64_t n = args.channels - channel;
  if (n <= 0) return;
  const int64_t at = row * args.groups + group;
  F x = S::Mul(sum, S::Set1(args.weight_scales[at]));
  F bias = S::Set1(args.weight_biases[at]);
  if (args.channel_scales != nullptr) {
    x = S::Mul(x, LoadPart<S>(args.channel_scales + channel, n));
    bias = S::Mul(bias, LoadPart<S>(args.channel_biases + channel, n));
  }
  float* to = out + row * args.channels + channel;
  StorePart<S>(to, n, S::Fma(LoadPart<S>(to, n), S::Set1(shrink[row]), S::Sub(x, bias)));
}

// kChunks runs of kWidth bytes of each token times kRows rows of weights; kGroups of
// them share a run.
template <typename S, int kBits, bool kSigned, int kRows, int kGroups, int kChunks>
void ValuesBlock(const CodeKernels::Values& args, int64_t row, int64_t byte, const float* shrink,
                 float* out) {
  using I = typename S::I;
  using F = typename S::Vector;
  constexpr int kPlanes = 8 / kBits;
  constexpr int64_t kChannels = S::kWidth * kPlanes;
  const I flips = S::Dword(!args.is_signed ? 0 : kBits == 4 ? 0x00880088 : 0x00aa00aa);
  const CodeRows& rows = args.rows;
  const int64_t bytes = rows.row_bytes - byte;
  const int64_t row_step = args.groups * kTokenTile;
  // Lanes past the last channel have no group; what they multiply is not used.
  const int16_t* weights[kChunks][kGroups];
  int64_t groups[kChunks][kGroups];
  for (int ch = 0; ch < kChunks; ++ch) {
    for (int i = 0; i < kGroups; ++i) {
      const int64_t channel = byte * kPlanes + ch * kChannels + i * (kChannels / kGroups);
      groups[ch][i] = CodesMin(channel / args.group, args.groups - 1);
      weights[ch][i] = args.weights + (row * args.groups + groups[ch][i]) * kTokenTile;
    }
  }
  I acc[kChunks][kRows][kPlanes];
  for (auto& chunk : acc) {
    for (auto& of_row : chunk) {
      for (I& a : of_row) a = S::ZeroDwords();
    }
  }
  // What of the next tile is asked for with every pair of tokens, so that all passes over the
  // tokens ask for all of it, line after line.
  constexpr int64_t kAhead = 2 * kChunks * S::kWidth;
  const char* next = reinterpret_cast<const char*>(rows.next) + byte * rows.tokens;
  for (int64_t t = 0; t < rows.tokens; t += 2) {
    const uint8_t* p0 = rows.data + t * rows.stride + byte;
    const uint8_t* p1 = t + 1 < rows.tokens ? p0 + rows.stride : p0;
    for (int64_t line = 0; line < kAhead; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
    next += kAhead;
    for (int ch = 0; ch < kChunks; ++ch) {
      const int64_t skip = ch * S::kWidth;
      I word =
          S::template TokenPair<kSigned>(p0 + skip, p1 + skip, kChunks > 1 ? S::kWidth : bytes);
      I plane[kPlanes];
      if constexpr (kPlanes == 1) {
        plane[0] = word;  // of either sign
      } else {
        Fields<S, kBits, kPlanes>(S::Xor(word, flips), plane);
      }
      for (int r = 0; r < kRows; ++r) {
        const I weight = S::template Weights<kGroups>(weights[ch], r * row_step + t);
        for (int k = 0; k < kPlanes; ++k) acc[ch][r][k] = S::Dot(acc[ch][r][k], plane[k], weight);
      }
    }
  }
  for (int ch = 0; ch < kChunks; ++ch) {
    const int64_t channel = byte * kPlanes + ch * kChannels;
    for (int r = 0; r < kRows; ++r) {
      F v[kPlanes];
      for (int k = 0; k < kPlanes; ++k) v[k] = S::ToFloat(acc[ch][r][k]);
      // Lane j of plane k is channel j * kPlanes + k.
      if constexpr (kPlanes == 2) S::Zip(v[0], v[1], &v[0], &v[1]);
      if constexpr (kPlanes == 4) {
        F even[2], odd[2];
        S::Zip(v[0], v[2], &even[0], &even[1]);
        S::Zip(v[1], v[3], &odd[0], &odd[1]);
        S::Zip(even[0], odd[0], &v[0], &v[1]);
        S::Zip(even[1], odd[1], &v[2], &v[3]);
      }
      for (int k = 0; k < kPlanes; ++k) {
        AddToOutput<S>(args, row + r, channel + k * S::kWidth, groups[ch][k * kGroups / kPlanes],
                       shrink, v[k], out);
      }
    }
  }
}

template <typename S, int kBits, bool kSigned, int kRows, int kGroups>
void ValuesRows(const CodeKernels::Values& args, int64_t row, const float* shrink, float* out) {
  constexpr int kFit = S::kDotAccumulators / (kRows * (8 / kBits));
  constexpr int kChunks = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  int64_t byte = 0;
  for (; byte + kChunks * S::kWidth <= args.rows.row_bytes; byte += kChunks * S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, kChunks>(args, row, byte, shrink, out);
  }
  for (; byte < args.rows.row_bytes; byte += S::kWidth) {
    ValuesBlock<S, kBits, kSigned, kRows, kGroups, 1>(args, row, byte, shrink, out);
  }
}

template <typename S, int kBits, bool kSigned, int kGroups>
void ValuesOf(const CodeKernels::Values& args, int64_t query_rows, const float* shrink,
              float* out) {
  for (int64_t row = 0; row < query_rows; row += RowBlock(query_rows - row)) {
    const auto run = RowBlock(query_rows - row) == 4   ? ValuesRows<S, kBits, kSigned, 4, kGroups>
                     : RowBlock(query_rows - row) == 2 ? ValuesRows<S, kBits, kSigned, 2, kGroups>
                                                       : ValuesRows<S, kBits, kSigned, 1, kGroups>;
    run(args, row, shrink, out);
  }
}

template <typename S>
void Values(const CodeKernels::Values& args, int64_t query_rows, const float* shrink, float* out) {
  // Groups that share a run of kWidth bytes, at least 16 channels each.
  const int64_t channels = S::kWidth * 8 / args.bits;
  const bool whole = args.groups == 1 || args.group % channels == 0;
  const bool halves = args.group % (channels / 2) == 0;
  const auto pick = [&]() -> decltype(&ValuesOf<S, 8, true, 1>) {
    if (args.bits == 8) return args.is_signed ? ValuesOf<S, 8, true, 1> : ValuesOf<S, 8, false, 1>;
    if (args.bits == 4) {
      if constexpr (S::kWidth * 2 > 16) {
        if (!whole) return ValuesOf<S, 4, false, 2>;
      }
      return ValuesOf<S, 4, false, 1>;
    }
    if (whole) return ValuesOf<S, 2, false, 1>;
    if constexpr (S::kWidth * 4 > 32) {
      if (!halves) return ValuesOf<S, 2, false, 4>;
    }
    return ValuesOf<S, 2, false, 2>;
  };
  pick()(args, query_rows, shrink, out);
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_VALUES_H_
