// From stored codes to f32: lines and tiles of an array under a Dequantization.
#ifndef KVANT_KERNELS_CPU_DEQUANTIZE_H_
#define KVANT_KERNELS_CPU_DEQUANTIZE_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/cpu/pieces.h"

namespace kvant::cpu {

// Reads arrays of one call.
struct Reader {
  const KernelSet* kernels = nullptr;
  const void* const* inputs = nullptr;

  const void* Data(const Array& array) const {
    return array.buffer >= 0 ? inputs[array.buffer] : array.data;
  }
  // The n elements from `p` on along `axis`.
  void Line(const Array& array, const Position& p, int axis, int64_t n, float* out) const;
  float Scalar(const Array& array, const Position& p) const;
  // Exactly, for integer types; floats are truncated. 0 if absent.
  int64_t Integer(const Array& array, const Position& p) const;
};

// Prefetches all lines that hold any of these bytes, in the second-level cache: a page may begin
// and end within a line, and one that nobody has prefetched is a wait for memory.
inline void PrefetchBytes(const uint8_t* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
  __builtin_prefetch(p + bytes - 1, 0, 2);
}
// The same of n rows, `stride` bytes apart.
inline void PrefetchRows(const uint8_t* first, int64_t stride, int64_t bytes, int64_t n) {
  if (stride <= 64 || stride == bytes) return PrefetchBytes(first, (n - 1) * stride + bytes);
  for (int64_t i = 0; i < n; ++i) PrefetchBytes(first + i * stride, bytes);
}

// The n values from `p` on along `axis`. `scratch`: 3 * n floats.
void DequantizeLine(const Reader& reader, const Array& data, const Dequantization& how,
                    const Position& p, int axis, int64_t n, float* out, float* scratch);

// Whether tokens, not channels, are side by side.
inline bool LiesAlongTokens(const Array& data) {
  return data.strides[kRow] == 1 && data.strides[kCol] != 1;
}

// Lines that DequantizeTile handles at a time, and the floats of scratch that it needs
// for them and their parameters.
inline constexpr int64_t kLineBatch = 16;
inline int64_t TileScratchFloats(int64_t channels) {
  return 4 * kLineBatch * (channels > kTokenTile ? channels : kTokenTile);
}

// Columns [column, column + n) at batch position `p`, all `channels`, up to kHalfTile of
// them as out[channel][kHalfTile], of which those beyond n are left undefined (by_channel), or as
// out[token][channels]. `scratch`: TileScratchFloats(channels).
void DequantizeTile(const Reader& reader, const Pieces& pieces, const Position& p, int64_t column,
                    int64_t n, int64_t channels, bool by_channel, float* out, float* scratch);

inline int64_t Pairs(int64_t n) { return (n + 1) / 2; }

// The same columns, up to kHalfTile, as PairKernels take them: pairs of channels,
// out[pair][kHalfTile], of which those beyond n are left undefined, or of tokens,
// out[pair][channels]. `lines`: kHalfTile * 2 * Pairs(channels) numbers of bf16. `scratch` as
// above.
enum class PairsOf { kChannels, kTokens };
void PairTile(const Reader& reader, const Pieces& pieces, const Position& p, int64_t column,
              int64_t n, int64_t channels, PairsOf of, uint32_t* out, uint16_t* lines,
              float* scratch);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_DEQUANTIZE_H_
