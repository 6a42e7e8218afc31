// FloatCodeKernels of kernels/cpu/codes.h: f32 products on codes that stand for floats, over the
// primitives of floats_<set>.h.
#ifndef KVANT_KERNELS_CPU_ISA_CODES_FLOATS_H_
#define KVANT_KERNELS_CPU_ISA_CODES_FLOATS_H_

#include <cstdint>
#include <type_traits>

#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/isa/codes_common.h"

namespace kvant::cpu {
namespace {

// Calls f with what decodes the codes.
template <typename S, typename F>
void WithFloatCodes(const FloatCodes& codes, F f) {
  if (codes.codebook != nullptr) return f(typename S::Entries(codes));
  f(typename S::Bytes(codes));
}

// Bytes of a token that a vector holds, and the channels that they stand for.
inline constexpr int kPieceBytes = 16;
inline constexpr int64_t kLineOfNext = 64;
template <typename Codes>
constexpr int kPieceChannels = kPieceBytes * 8 / Codes::kBits;

// Lanes of a vector that are channels of one token.
template <typename S>
constexpr int kTokenLanes = S::kWidth / S::kTokensOfVector;

// Queries by blocks of rows: [piece][value][row][kTokenLanes], with Codes::PlaceOf in a piece.
template <typename S>
void FloatQueries(const FloatCodes& float_codes, const float* q, int64_t rows, int64_t channels,
                  float* out, int64_t out_channels) {
  WithFloatCodes<S>(float_codes, [&](const auto& codes) {
    using Codes = std::remove_cvref_t<decltype(codes)>;
    constexpr int kChannels = kPieceChannels<Codes>, kLanes = kTokenLanes<S>;
    ForRowBlocks(rows, [&](auto block, int64_t row) {
      constexpr int kRows = decltype(block)::value;
      float* const to = out + row * out_channels;
      for (int r = 0; r < kRows; ++r) {
        const float* const from = q + (row + r) * channels;
        for (int64_t c = 0; c < out_channels; ++c) {
          const int place = Codes::PlaceOf(static_cast<int>(c % kChannels));
          const int64_t piece = c / kChannels * kChannels * kRows;
          to[piece + (place / kLanes * kRows + r) * kLanes + place % kLanes] =
              c < channels ? from[c] : 0.f;
        }
      }
    });
  });
}

// kWidth tokens from `token` on, which all exist unless not kWhole, times kRows rows of queries.
// Of kVectors vectors, the l-th token of vector i is kVectors * l + i.
template <typename S, int kRows, bool kWhole, typename Codes>
void FloatScoresBlock(const TokenRows& rows, const Codes& tables, const CodeColumns& columns,
                      const float* q, const float* scales, int64_t token, float* scores) {
  const Codes codes = tables;  // in registers
  using F = typename S::Vector;
  constexpr int kLanes = kTokenLanes<S>, kValues = kPieceChannels<Codes> / kLanes;
  // Vectors that share what is read of the queries.
  constexpr int kShared = S::template kShared<kRows>;
  constexpr int kVectorsOfLine = kLineOfNext / (kPieceBytes * S::kTokensOfVector);
  constexpr int kVectors = S::kWidth / S::kTokensOfVector;
  // Vectors whose sums are in registers together.
  constexpr int kAtOnce = S::template kAtOnce<kRows>;
  const int64_t stride = rows.stride, last = rows.tokens - 1;
  const uint8_t* first[kVectors];
  for (int i = 0; i < kVectors; ++i) first[i] = rows.At(token) + i * stride;
  const uint8_t* next = rows.Next(token);
  const float* const scale = scales + token;
  F total[kRows];
#pragma GCC unroll 4
  for (F& sum : total) sum = S::Zero();
  int64_t byte = 0;
  for (int64_t part = 0; part < columns.parts; ++part) {
    F acc[kRows][kVectors];
    const float* const part_q = q;
    const int64_t part_byte = byte;
#pragma GCC unroll 4
    for (int begin = 0; begin < kVectors; begin += kAtOnce) {
#pragma GCC unroll 4
      for (auto& row : acc) {
#pragma GCC unroll 8
        for (int i = begin; i < begin + kAtOnce; ++i) row[i] = S::Zero();
      }
      if (kAtOnce < kVectors) {
        q = part_q;
        byte = part_byte;
      }
      for (; byte < columns.part_ends[part] * 4; byte += kPieceBytes) {
#pragma GCC unroll 8
        for (int i = begin; i < begin + kAtOnce; i += kShared) {
          typename Codes::Words words[kShared];
#pragma GCC unroll 4
          for (int s = 0; s < kShared; ++s) {
            // The next tile, line after line.
            if ((i + s) % kVectorsOfLine == 0) {
              __builtin_prefetch(next, 0, 2);
              next += kLineOfNext;
            }
            if constexpr (kWhole) {
              words[s] = codes.Open(S::LoadPieces(first[i + s], kVectors * stride));
              first[i + s] += kPieceBytes;
            } else {
              const uint8_t* at[S::kTokensOfVector];
              for (int l = 0; l < S::kTokensOfVector; ++l) {
                at[l] = rows.At(CodesMin(token + kVectors * l + i + s, last)) + byte;
              }
              words[s] =
                  codes.Open(S::LoadSomePieces(at, CodesMin(rows.row_bytes - byte, kPieceBytes)));
            }
          }
          ForEachOf<kValues>([&](auto k) __attribute__((always_inline)) {
            F value[kShared];
#pragma GCC unroll 4
            for (int s = 0; s < kShared; ++s) value[s] = codes.template Value<k.value>(words[s]);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              const F query = S::QueriesOfTokens(q + (k.value * kRows + r) * kLanes);
#pragma GCC unroll 4
              for (int s = 0; s < kShared; ++s) {
                acc[r][i + s] = S::Fma(value[s], query, acc[r][i + s]);
              }
            }
          });
          // Queries are read again: there are no registers to keep them in.
          asm("" : : : "memory");
        }
        q += kRows * kPieceChannels<Codes>;
      }
    }
    const F of_group = S::Load(scale + columns.part_groups[part] * kTokenTile);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      total[r] = S::Fma(S::SumsOfTokens(acc[r]), of_group, total[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    S::Store(scores + r * kTokenTile + token, codes.Worth(total[r]));
  }
}

template <typename S>
void FloatScores(const TokenRows& rows, const FloatCodes& float_codes, const CodeColumns& columns,
                 const float* q, int64_t query_rows, const float* scales, float* scores) {
  WithFloatCodes<S>(float_codes, [&](const auto& codes) {
    using Codes = std::remove_cvref_t<decltype(codes)>;
    const int64_t row_size = columns.columns * 32 / columns.bits;
    const bool whole_pieces = rows.row_bytes % kPieceBytes == 0;
    ForRowBlocks(query_rows, [&](auto block, int64_t row) {
      constexpr int kRows = decltype(block)::value;
      for (int64_t token = 0; token < rows.tokens; token += S::kWidth) {
        const bool whole = whole_pieces && token + S::kWidth <= rows.tokens;
        const auto run = whole ? FloatScoresBlock<S, kRows, true, Codes>
                               : FloatScoresBlock<S, kRows, false, Codes>;
        run(rows, codes, columns, q + row * row_size, scales, token, scores + row * kTokenTile);
      }
    });
  });
}

template <typename S>
bool FloatWeights(const float* probs, int64_t rows, int64_t columns, const float* scales,
                  int64_t groups, float least, float* weights) {
  using F = typename S::Vector;
  F most_below = S::Zero();
  for (int64_t r = 0; r < rows; ++r, probs += kTokenTile) {
    for (int64_t g = 0; g < groups; ++g, weights += kTokenTile) {
      for (int64_t t = 0; t < columns; t += S::kWidth) {
        const F scale = S::Load(scales + g * kTokenTile + t);
        S::Store(weights + t, S::Mul(S::Load(probs + t), scale));
        if (r > 0) continue;
        const F size = S::Abs(scale);
        most_below = S::Max(most_below, S::Sub(size, S::ZeroBelow(size, S::Set1(least), size)));
      }
    }
  }
  return S::MaxOf(most_below) == 0.f;
}

// kChunks runs of channels, from byte `byte` of each token on, times kRows rows of weights; kGroups
// share a run.
template <typename S, int kRows, int kGroups, int kChunks, typename Codes>
void FloatValuesBlock(const FloatCodeKernels::Values& args, const Codes& codes, int64_t row,
                      int64_t byte, const float* shrink, float* out) {
  using F = typename S::Vector;
  constexpr int kChunkBytes = Codes::kRunBytes;
  constexpr int kChannels = kChunkBytes * 8 / Codes::kBits;
  constexpr int kPlanes = kChannels / S::kWidth;
  const TokenRows& rows = args.rows;
  const int64_t bytes = kChunks > 1 ? kChunkBytes : rows.row_bytes - byte;
  const int64_t row_step = args.groups * kTokenTile;
  const int64_t first_channel = byte * 8 / Codes::kBits;
  // Lanes past the last channel have no group; what they multiply is not used.
  const float* weights[kChunks][kGroups];
  for (int ch = 0; ch < kChunks; ++ch) {
    for (int i = 0; i < kGroups; ++i) {
      const int64_t channel = first_channel + ch * kChannels + i * (kChannels / kGroups);
      const int64_t group = CodesMin(channel / args.group, args.groups - 1);
      weights[ch][i] = args.weights + (row * args.groups + group) * kTokenTile;
    }
  }
  F acc[kChunks][kRows][kPlanes];
#pragma GCC unroll 4
  for (auto& chunk : acc) {
#pragma GCC unroll 4
    for (auto& of_row : chunk) {
#pragma GCC unroll 4
      for (F& sum : of_row) sum = S::Zero();
    }
  }
  constexpr int64_t kAhead = kChunks * kChunkBytes;
  const uint8_t *p = nullptr, *next = nullptr;
  for (int64_t t = 0; t < rows.tokens; ++t, p += rows.stride, next += kAhead) {
    if (t % kPageUnit == 0) {
      p = rows.blocks[t / kPageUnit] + byte;
      next = rows.next[t / kPageUnit] + byte * kPageUnit;
    }
    for (int64_t line = 0; line < kAhead; line += 64) __builtin_prefetch(next + line, 0, 2);
#pragma GCC unroll 4
    for (int ch = 0; ch < kChunks; ++ch) {
      const auto words = codes.Open(Codes::LoadRun(p + ch * kChunkBytes, bytes));
      F v[kPlanes];
      ForEachOf<kPlanes>([&](auto k) __attribute__((always_inline)) {
        v[k.value] = codes.template Value<k.value>(words);
      });
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F weight = S::FloatWeights(weights[ch], r * row_step + t);
#pragma GCC unroll 4
        for (int k = 0; k < kPlanes; ++k) acc[ch][r][k] = S::Fma(v[k], weight, acc[ch][r][k]);
      }
    }
  }
#pragma GCC unroll 4
  for (int ch = 0; ch < kChunks; ++ch) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      F v[kPlanes];
      Codes::Sort(acc[ch][r], v);
      const F factor = S::Set1(shrink[row + r]);
#pragma GCC unroll 4
      for (int k = 0; k < kPlanes; ++k) {
        const int64_t channel = first_channel + ch * kChannels + k * S::kWidth;
        const int64_t n = args.channels - channel;
        if (n <= 0) break;
        float* to = out + (row + r) * args.channels + channel;
        StorePart<S>(to, n, S::Fma(LoadPart<S>(to, n), factor, codes.Worth(v[k])));
      }
    }
  }
}

template <typename S, int kGroups, typename Codes>
void FloatValuesOf(const FloatCodeKernels::Values& args, const Codes& codes, int64_t query_rows,
                   const float* shrink, float* out) {
  constexpr int64_t kChunkBytes = Codes::kRunBytes;
  ForRowBlocks(query_rows, [&](auto block, int64_t row) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kChunks =
        S::template kValueSums<kRows> * S::kWidth * Codes::kBits / 8 / kChunkBytes;
    int64_t byte = 0;
    for (; byte + kChunks * kChunkBytes <= args.rows.row_bytes; byte += kChunks * kChunkBytes) {
      FloatValuesBlock<S, kRows, kGroups, kChunks>(args, codes, row, byte, shrink, out);
    }
    for (; byte < args.rows.row_bytes; byte += kChunkBytes) {
      FloatValuesBlock<S, kRows, kGroups, 1>(args, codes, row, byte, shrink, out);
    }
  });
}

template <typename S>
void FloatValues(const FloatCodeKernels::Values& args, int64_t query_rows, const float* shrink,
                 float* out) {
  WithFloatCodes<S>(args.codes, [&](const auto& codes) {
    using Codes = std::remove_cvref_t<decltype(codes)>;
    // Groups are whole pieces.
    constexpr int64_t kChannels = Codes::kRunBytes * 8 / Codes::kBits;
    if constexpr (Codes::kRunBytes > kPieceBytes) {
      if (args.groups > 1 && args.group % (kChannels / 2) != 0) {
        return FloatValuesOf<S, 4>(args, codes, query_rows, shrink, out);
      }
      if (args.groups > 1 && args.group % kChannels != 0) {
        return FloatValuesOf<S, 2>(args, codes, query_rows, shrink, out);
      }
    }
    FloatValuesOf<S, 1>(args, codes, query_rows, shrink, out);
  });
}

template <typename S>
constexpr FloatCodeKernels kFloatCodeKernels = {FloatQueries<S>, FloatScores<S>, FloatWeights<S>,
                                                FloatValues<S>};

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_CODES_FLOATS_H_
