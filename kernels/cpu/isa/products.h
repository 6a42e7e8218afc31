// KernelSet's products over a vector wrapper such as simd.h's: of f32 tiles, and
// of K and V rows as they are stored.
#ifndef KVANT_KERNELS_CPU_ISA_PRODUCTS_H_
#define KVANT_KERNELS_CPU_ISA_PRODUCTS_H_

#include <cstdint>

#include "kvant/kernels/cpu/isa/load.h"
#include "kvant/kernels/cpu/isa/streams.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

// Vectors of a block of kRows rows: as many accumulators as there are registers for,
// and a power of two that divides a tile.
template <typename S, int kRows>
constexpr int VectorsFor(int most) {
  int vectors = 1;
  while (vectors * 2 <= most && vectors * 2 * kRows <= S::kAccumulators) vectors *= 2;
  return vectors;
}

template <int kRows>
struct Rows {
  static constexpr int value = kRows;
};

// Calls f(Rows<n>(), first row) for blocks of six rows, then for what is left.
template <typename F>
void ForBlocksOfRows(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) f(Rows<6>(), r);
  switch (rows - r) {
    case 5:
      return f(Rows<5>(), r);
    case 4:
      return f(Rows<4>(), r);
    case 3:
      return f(Rows<3>(), r);
    case 2:
      return f(Rows<2>(), r);
    case 1:
      return f(Rows<1>(), r);
    default:
      return;
  }
}

// Calls f(Stored<...>()) for the types that products take as they are stored.
template <typename S, typename F>
void WithStored(DataType type, F f) {
  switch (type) {
    case kF32:
      return f(Stored<32, S::FromF32>());
    case kF16:
      return f(Stored<16, S::FromF16>());
    case kBF16:
      return f(Stored<16, S::FromBF16>());
    case kF8E4M3:
      return f(Stored<8, S::FromE4M3>());
    case kF8E5M2:
      return f(Stored<8, S::FromE5M2>());
    default:
      return;  // not StoredProductsTake(type)
  }
}

// The vector at element `i` of the row at `row`, or its first `n` elements.
template <typename S, typename Type>
inline typename S::Vector LoadStored(const uint8_t* row, int64_t i) {
  constexpr int kBytes = S::kWidth * Type::kBits / 8;
  return Type::kConvert(S::template LoadRaw<kBytes>(row + i * Type::kBits / 8));
}
template <typename S, typename Type>
inline typename S::Vector LoadStoredSome(const uint8_t* row, int64_t i, int64_t n) {
  return Type::kConvert(S::LoadRawSome(row + i * Type::kBits / 8, n * Type::kBits / 8));
}

// Head sizes are summed in blocks: the error of a long f32 sum grows with its length.
inline constexpr int64_t kSumBlock = 64;

// Keys of which tokens are side by side: those of a tile, or as they are stored, with channels
// `stride` bytes apart. The latter prefetch what lies `ahead` of them.
template <typename S>
struct TileChannels {
  using Type = Stored<32, S::FromF32>;
  static constexpr bool kAsks = false;
  static constexpr int64_t ahead = 0;
  const float* at;

  const uint8_t* Channel(int64_t d, int64_t token) const {
    return reinterpret_cast<const uint8_t*>(at + d * kHalfTile + token);
  }
};
template <typename T>
struct StoredChannels {
  using Type = T;
  static constexpr bool kAsks = true;
  const uint8_t* at;
  int64_t stride, ahead;

  const uint8_t* Channel(int64_t d, int64_t token) const {
    return at + d * stride + token * Type::kBits / 8;
  }
};

// kRows rows of queries and kVectors vectors of tokens from `token` on; or, if not kWhole, one
// vector of which `last` tokens exist.
template <typename S, int kRows, int kVectors, bool kWhole, typename Keys>
void QkBlock(const float* q, int64_t head_size, const Keys& keys, int64_t token, int64_t last,
             float* scores) {
  using Type = typename Keys::Type;
  constexpr int64_t kBytes = kVectors * S::kWidth * Type::kBits / 8;
  for (int64_t begin = 0; begin < head_size; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < head_size ? begin + kSumBlock : head_size;
    typename S::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = S::Zero();
    }
    for (int64_t d = begin; d < end; ++d) {
      const uint8_t* const channel = keys.Channel(d, token);
#pragma GCC unroll 8
      for (int64_t b = 0; Keys::kAsks && b < kBytes; b += kLineBytes) {
        __builtin_prefetch(channel + keys.ahead + b, 0, 2);
      }
      typename S::Vector right[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        right[v] = kWhole ? LoadStored<S, Type>(channel, v * S::kWidth)
                          : LoadStoredSome<S, Type>(channel, 0, last);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto left = S::Set1(q[r * head_size + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = S::Fma(left, right[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* to = scores + r * kTokenTile + token + v * S::kWidth;
        if (kWhole) {
          S::Store(to, begin == 0 ? sum[r][v] : S::Add(S::Load(to), sum[r][v]));
        } else {
          S::StoreSome(to, begin == 0 ? sum[r][v] : S::Add(S::LoadSome(to, last), sum[r][v]), last);
        }
      }
    }
  }
}

template <typename S>
void Qk(const float* q, int64_t rows, int64_t head_size, const float* k, int64_t tokens,
        float* scores) {
  const TileChannels<S> keys{k};
  ForBlocksOfRows(rows, [&](auto block, int64_t r) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kVectors = VectorsFor<S, kRows>(kHalfTile / S::kWidth);
    constexpr int64_t kStep = kVectors * S::kWidth;
    const float* const queries = q + r * head_size;
    float* const to = scores + r * kTokenTile;
    int64_t t = 0;
    for (; tokens - t > kStep / 2; t += kStep) {
      QkBlock<S, kRows, kVectors, true>(queries, head_size, keys, t, 0, to);
    }
    for (; t < tokens; t += S::kWidth) {
      QkBlock<S, kRows, 1, true>(queries, head_size, keys, t, 0, to);
    }
  });
}

template <typename S>
void QkChannels(DataType type, const uint8_t* k, const uint8_t* next, int64_t stride,
                int64_t tokens, const float* q, int64_t rows, int64_t head_size, float* scores) {
  WithStored<S>(type, [&](auto stored) {
    const StoredChannels<decltype(stored)> keys{k, stride, next - k};
    ForBlocksOfRows(rows, [&](auto block, int64_t r) {
      constexpr int kRows = decltype(block)::value;
      constexpr int kVectors = VectorsFor<S, kRows>(kTokenTile / S::kWidth);
      const float* const queries = q + r * head_size;
      float* const to = scores + r * kTokenTile;
      int64_t t = 0;
      for (; t + kVectors * S::kWidth <= tokens; t += kVectors * S::kWidth) {
        QkBlock<S, kRows, kVectors, true>(queries, head_size, keys, t, 0, to);
      }
      for (; t + S::kWidth <= tokens; t += S::kWidth) {
        QkBlock<S, kRows, 1, true>(queries, head_size, keys, t, 0, to);
      }
      if (t < tokens) QkBlock<S, kRows, 1, false>(queries, head_size, keys, t, tokens - t, to);
    });
  });
}

// Whether each row is multiplied and prefetched whole before the next. Else kWidth rows take turns,
// vector by vector. Of one query, memory delivers rows of more than two lines 1.3 to 1.5 times as
// fast whole (f16 and bf16, heads of 128 and 256; 16 rows on a Zen 5, 8 on a Zen 3).
template <typename S, typename Type, int kRows>
inline bool TakesRowsWhole(int64_t head_size) {
  return S::kWidth >= 8 && kRows == 1 && head_size * Type::kBits / 8 > 2 * kLineBytes;
}

// Scores of kRows queries and S::kWidth / kRows tokens from `first` on: an accumulator for each,
// with lanes over channels, which FoldEach then sums.
template <typename S, typename Type, int kRows>
inline void QkStoredBlock(const TokenRows& rows, int64_t first, int stream_bits, const float* q,
                          int64_t head_size, float* scores) {
  constexpr int kTokens = S::kWidth / kRows;
  const int64_t tokens = rows.tokens - first;
  const uint8_t *row[kTokens], *next[kTokens];
  const uint8_t *const k = rows.At(first), *const after = rows.Next(first);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    row[t] = k + (t < tokens ? t : tokens - 1) * rows.stride;
    next[t] =
        stream_bits == 0 ? after + t * rows.next_stride : NextOf(rows, stream_bits, first + t, 1);
  }
  typename S::Vector sum[S::kWidth];
#pragma GCC unroll 16
  for (auto& s : sum) s = S::Zero();
  int64_t d = 0;
  if (TakesRowsWhole<S, Type, kRows>(head_size)) {
    constexpr int64_t kOfLine = kLineBytes * 8 / Type::kBits;
    const int64_t whole = head_size / S::kWidth * S::kWidth;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      // Two sums, as one would wait for itself.
      auto even = S::Zero(), odd = S::Zero();
      const auto add = [&](int64_t i, auto& to) {
        to = S::Fma(S::Load(q + i), LoadStored<S, Type>(row[t], i), to);
      };
      const uint8_t* line = next[t];
      for (d = 0; d + kOfLine <= whole; d += kOfLine, line += kLineBytes) {
        __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kOfLine; i += S::kWidth) add(d + i, i / S::kWidth % 2 ? odd : even);
      }
      if (d < whole) __builtin_prefetch(line, 0, 2);
      for (; d < whole; d += S::kWidth) add(d, even);
      sum[t] = S::Add(even, odd);
    }
  } else {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      for (int64_t b = 0; b < rows.row_bytes; b += kLineBytes)
        __builtin_prefetch(next[t] + b, 0, 2);
    }
  }
  for (; d + S::kWidth <= head_size; d += S::kWidth) {
    typename S::Vector left[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) left[r] = S::Load(q + r * head_size + d);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const auto right = LoadStored<S, Type>(row[t], d);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sum[r * kTokens + t] = S::Fma(left[r], right, sum[r * kTokens + t]);
      }
    }
  }
  if (d < head_size) {
    const int64_t rest = head_size - d;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const auto right = LoadStoredSome<S, Type>(row[t], d, rest);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const auto left = S::LoadSome(q + r * head_size + d, rest);
        sum[r * kTokens + t] = S::Fma(left, right, sum[r * kTokens + t]);
      }
    }
  }
  float sums[S::kWidth];
  S::Store(sums, S::FoldEach(sum, [](auto a, auto b) { return S::Add(a, b); }));
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < (tokens < kTokens ? tokens : kTokens); ++t) {
      scores[r * kTokenTile + first + t] = sums[r * kTokens + t];
    }
  }
}

template <typename S, typename Type, int kRows>
void QkStoredRows(const TokenRows& tokens, const float* q, int64_t head_size, float* scores) {
  const int stream_bits = StreamBits(tokens, S::kStreamBits);
  for (int64_t t = 0; t < tokens.tokens; t += S::kWidth / kRows) {
    QkStoredBlock<S, Type, kRows>(tokens, t, stream_bits, q, head_size, scores);
  }
}

template <typename S>
void QkStored(DataType type, const TokenRows& tokens, const float* q, int64_t rows,
              int64_t head_size, float* scores) {
  WithStored<S>(type, [&](auto stored) {
    using Type = decltype(stored);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      QkStoredRows<S, Type, 4>(tokens, q + r * head_size, head_size, scores + r * kTokenTile);
    }
    for (; r + 2 <= rows; r += 2) {
      QkStoredRows<S, Type, 2>(tokens, q + r * head_size, head_size, scores + r * kTokenTile);
    }
    if (r < rows) {
      QkStoredRows<S, Type, 1>(tokens, q + r * head_size, head_size, scores + r * kTokenTile);
    }
  });
}

// Channels that are summed over a tile before they are added to the output.
inline constexpr int64_t kPvChannels = 256;

// Adds to sums, [kRows][kPvChannels], what tokens [begin, end) give, from a page unit's first on,
// and begins them at the first: kVectors vectors of channels from `d` on; or, if not kWhole, one
// vector of which `last` channels exist. kTile: tokens are those of a tile, so none is prefetched.
template <typename S, typename Type, bool kTile, int kRows, int kVectors, bool kWhole>
void PvBlock(const float* probs, const TokenRows& tokens, int64_t begin, int64_t end, int64_t d,
             int64_t last, int stream_bits, NextLines& next, float* sums) {
  typename S::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      sum[r][i] = begin == 0 ? S::Zero() : S::Load(sums + r * kPvChannels + i * S::kWidth);
    }
  }
  constexpr int64_t kBlockBytes = kVectors * S::kWidth * Type::kBits / 8;
  const int64_t first = d * Type::kBits / 8;
  const int64_t lines = LinesOf(first + kBlockBytes) - LinesOf(first);
  const uint8_t* row = tokens.At(begin);
  for (int64_t t = begin; t < end; ++t, row += tokens.stride) {
    if (!kTile && t % kPageUnit == 0 && t > begin) {
      row = tokens.At(t);
      next = {tokens, stream_bits, t, 0};
    }
    for (int64_t i = 0; !kTile && i < lines; ++i) next.Ask();
    const auto load = [&](int i) {
      return kWhole ? LoadStored<S, Type>(row, d + i * S::kWidth)
                    : LoadStoredSome<S, Type>(row, d, last);
    };
    // What is read more often comes first, so that registers hold it.
    if constexpr (kRows < kVectors) {
      typename S::Vector left[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) left[r] = S::Set1(probs[r * kTokenTile + t]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        const auto right = load(i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r][i] = S::Fma(left[r], right, sum[r][i]);
      }
    } else {
      typename S::Vector right[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) right[i] = load(i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto left = S::Set1(probs[r * kTokenTile + t]);
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sum[r][i] = S::Fma(left, right[i], sum[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) S::Store(sums + r * kPvChannels + i * S::kWidth, sum[r][i]);
  }
}

template <typename S, typename Type, bool kTile>
void PvRows(const TokenRows& tokens, const float* probs, int64_t rows, const float* shrink,
            int64_t head_size, float* out) {
  const int stream_bits = StreamBits(tokens, S::kStreamBits);
  ForBlocksOfRows(rows, [&](auto block, int64_t r) {
    constexpr int kRows = decltype(block)::value;
    constexpr int kVectors = VectorsFor<S, kRows>(8);
    const float* p = probs + r * kTokenTile;
    alignas(64) float sums[kRows * kPvChannels];
    for (int64_t first = 0; first < head_size; first += kPvChannels) {
      const int64_t channels = head_size - first < kPvChannels ? head_size - first : kPvChannels;
      // Where a row in memory takes several passes, a few tokens are read by all of them before the
      // next: it delivers what lies side by side, and not every other line. Without a token the
      // sums are 0.
      const bool whole = kTile || head_size == kVectors * S::kWidth;
      const int64_t turn = whole ? kTokenTile : kPageUnit;
      int64_t begin = 0;
      do {
        const int64_t left = tokens.tokens - begin, end = begin + (left < turn ? left : turn);
        NextLines next(tokens, stream_bits, begin,
                       (end - begin) * LinesOf(first * Type::kBits / 8));
        int64_t d = 0;
        const auto pass = [&](auto add, int64_t step, int64_t needed) {
          for (; d + needed <= channels; d += step) {
            add(p, tokens, begin, end, first + d, channels - d, stream_bits, next, sums + d);
          }
        };
        constexpr int64_t kStep = kVectors * S::kWidth;
        pass(PvBlock<S, Type, kTile, kRows, kVectors, true>, kStep, kStep);
        pass(PvBlock<S, Type, kTile, kRows, 1, true>, S::kWidth, S::kWidth);
        pass(PvBlock<S, Type, kTile, kRows, 1, false>, S::kWidth, 1);
        begin = end;
      } while (begin < tokens.tokens);
      for (int i = 0; i < kRows; ++i) {
        float* const to = out + (r + i) * head_size + first;
        const auto factor = S::Set1(shrink[r + i]);
        for (int64_t d = 0; d < channels; d += S::kWidth) {
          const int64_t n = channels - d;
          const auto sum = S::Load(sums + i * kPvChannels + d);
          if (n >= S::kWidth) {
            S::Store(to + d, S::Fma(S::Load(to + d), factor, sum));
          } else {
            S::StoreSome(to + d, S::Fma(S::LoadSome(to + d, n), factor, sum), n);
          }
        }
      }
    }
  });
}

template <typename S>
void Pv(const float* probs, int64_t rows, int64_t tokens, const float* v, int64_t head_size,
        const float* shrink, float* out) {
  const int64_t bytes = head_size * static_cast<int64_t>(sizeof(float));
  PvRows<S, Stored<32, S::FromF32>, true>(RowsFrom(v, bytes, bytes, tokens), probs, rows, shrink,
                                          head_size, out);
}

template <typename S>
void PvStored(DataType type, const TokenRows& tokens, const float* probs, int64_t rows,
              const float* shrink, int64_t head_size, float* out) {
  WithStored<S>(type, [&](auto stored) {
    PvRows<S, decltype(stored), false>(tokens, probs, rows, shrink, head_size, out);
  });
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_PRODUCTS_H_
