// The inner loops of attention, one set per instruction set.
#ifndef KVANT_KERNELS_CPU_KERNELS_H_
#define KVANT_KERNELS_CPU_KERNELS_H_

#include <cstdint>
#include <string_view>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/codes.h"
#include "kvant/kernels/cpu/quantize_kernels.h"
#include "kvant/kernels/cpu/token_rows.h"

namespace kvant::cpu {

// Groups of so many elements, or of a multiple, are whole vectors on any set.
inline constexpr int64_t kGroupUnit = 16;

// Parameters of a run of codes, side by side: one set per `group` elements, which is 1, a multiple
// of kGroupUnit, or the whole run or more.
struct Scaling {
  const float* scales = nullptr;
  const float* zero_points = nullptr;  // null: 0
  int64_t group = 1;
  bool real = false;  // code * scale - zero point; else (code - zero point) * scale
  // For load_scaled, not null: what codes of type u2, u4 or u8 stand for, before all else.
  const float* codebook = nullptr;
};

// The codes of 8 bits or less that numbers are rounded to, less their zero point, and what 1 then
// stands for. NaN has the code 0.
struct RoundedCodes {
  float lowest = 0, highest = 0, of_nan = 0, unit = 1;
};

// Products of tiles in bf16: a pair is two bf16, the lower one first, in a dword.
struct PairKernels {
  // KernelSet's load, load_entries or load_scaled, rounded to bf16: load where how.scales is null.
  // For scaled ones of fewer than 8 bits, `index` is a byte's first; none of type s64.
  void (*load)(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
               uint16_t* out);
  // out[i] = pair(a[i], b[i]) for i < n; with a null b, of a[i] and 0.
  void (*zip)(const uint16_t* a, const uint16_t* b, int64_t n, uint32_t* out);
  // qk, of kHalfTile tokens, and pv below, with pairs of channels, [.][pairs] and
  // [pairs][kHalfTile], and with pairs of tokens, [(tokens + 1) / 2][head_size]. Probabilities
  // beyond `tokens`, up to WholeHalves of them, are 0.
  void (*qk)(const uint32_t* q, int64_t rows, int64_t pairs, const uint32_t* k, float* scores);
  void (*pv)(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v, int64_t head_size,
             const float* shrink, float* out);
  // pv with each probability as the sum of two bf16 numbers. What is not finite in v may be
  // overwritten.
  void (*pv_split)(const float* probs, int64_t rows, int64_t tokens, uint32_t* v, int64_t head_size,
                   const float* shrink, float* out);
  // KernelSet::qk_stored of keys of bf16, of which two are a pair. Null where it is known not to be
  // faster than f32.
  void (*qk_stored)(const TokenRows& tokens, const uint32_t* q, int64_t rows, int64_t pairs,
                    float* scores);
  // A plan makes tiles of at most so many rows, of heads of 128.
  int64_t most_rows;
  // KernelSet::stored_rows_of_codes, where tiles would be pairs; floats are of no more rows.
  int64_t stored_rows_of_codes;
};

// What is added to the sums of a row and of a column.
struct ByteTerms {
  const int32_t* rows;
  const int32_t* columns;
};

// Products of tiles of bytes, exact in s32: signed ones of rows by unsigned ones of columns, four
// to a dword, the lowest first.
struct ByteKernels {
  // out[i] = values[i] - shift for i < n, zeros up to the next multiple of four. Returns their sum.
  int32_t (*bytes)(const float* values, int64_t n, float shift, int8_t* out);
  // Byte j of out[i] is rows[j][i] ^ flip for i < n; of a null row 0.
  void (*zip)(const uint8_t* const (&rows)[4], int64_t n, uint8_t flip, uint32_t* out);
  // out[c] = factor * the sum of the bytes of columns[i * stride + c] over i < quads, for c < n.
  void (*sums)(const uint32_t* columns, int64_t stride, int64_t quads, int64_t n, int32_t factor,
               int32_t* out);
  // KernelSet's qk, of kHalfTile tokens, and pv: [rows][quads] by [quads][kHalfTile], and
  // [rows][kTokenTile / 4] by [quads][head_size]. Sums with their terms become floats.
  void (*qk)(const int8_t* q, int64_t rows, int64_t quads, const uint32_t* k,
             const ByteTerms& terms, float* scores);
  void (*pv)(const int8_t* probs, int64_t rows, int64_t quads, const uint32_t* v, int64_t head_size,
             const ByteTerms& terms, const float* shrink, float* out);
};

// Types that qk_channels, qk_stored and pv_stored take as they lie in memory.
inline bool StoredProductsTake(DataType type) {
  return type == kF32 || type == kF16 || type == kBF16 || type == kF8E4M3 || type == kF8E5M2;
}

struct KernelSet {
  const char* name;

  // Elements [index, index + n) of the array at `data` as f32; any element type, any
  // alignment, and no byte outside those elements is read.
  void (*load)(DataType type, const void* data, int64_t index, int64_t n, float* out);

  // The same of elements of type u2, u4 or u8 as positions in a table.
  void (*load_entries)(const float* codebook, DataType type, const void* data, int64_t index,
                       int64_t n, float* out);

  // Parameters of any groups as those of elements: out[i] = in[(into_group + i) / group].
  void (*expand)(const float* in, int64_t group, int64_t into_group, int64_t n, float* out);
  // Codes become values.
  void (*scale)(const Scaling& how, int64_t n, float* values);
  // Both at once.
  void (*load_scaled)(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                      float* out);

  // out[c * out_stride + r] = in[r * in_stride + c].
  void (*transpose)(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                    int64_t out_stride);

  // scores[r][t] = sum_d q[r][d] * k[d][t] for t < tokens; others below kHalfTile are undefined.
  // q: [rows][head_size], k: [head_size][kHalfTile], scores: [rows][kTokenTile].
  void (*qk)(const float* q, int64_t rows, int64_t head_size, const float* k, int64_t tokens,
             float* scores);

  // One step of online softmax on scores [rows][kTokenTile], times a factor > 0 for each row where
  // `factors` is not null. Of them `columns`, whole halves, become exp(score - max): updates each
  // row's running max and sum, and leaves the factor by which what was accumulated so far must
  // shrink.
  void (*softmax)(float* scores, int64_t rows, int64_t columns, const float* factors, float* max,
                  float* sum, float* shrink);

  // scores[i] = exp(scores[i] - max) for i < columns, which are whole halves; scores <= max.
  void (*exp_row)(float* scores, int64_t columns, float max);

  // values[r][t] / divisors[r] become whole numbers, ties to even, and these values. values:
  // [rows][kTokenTile], of which `columns`, whole halves.
  void (*round)(const RoundedCodes& codes, int64_t rows, int64_t columns, const float* divisors,
                float* values);

  // out[r][d] = out[r][d] * shrink[r] + sum_{t < tokens} probs[r][t] * v[t][d].
  // probs: [rows][kTokenTile], v: [tokens][head_size], out: [rows][head_size].
  void (*pv)(const float* probs, int64_t rows, int64_t tokens, const float* v, int64_t head_size,
             const float* shrink, float* out);

  void (*tanh)(float* values, int64_t n);

  // Each run of `block` values, a power of two that divides n, times Sylvester's Hadamard matrix
  // / sqrt(block). All sets give the same bits.
  void (*hadamard)(float* values, int64_t n, int64_t block);

  // PhiloxWords of blocks [block, block + blocks).
  void (*philox)(uint64_t seed, uint64_t offset, uint64_t block, int64_t blocks, uint32_t* words);

  // DynamicQuantize.
  const QuantizeKernels* quantize;

  // Up to so many rows, products of what is stored beat those of tiles (docs/cpu_kernels.md).
  // stored_rows_of_runs holds for scales by channel that fewer than 32 tokens share, or of f8.
  int64_t stored_rows = 32, stored_rows_of_codes = 64, stored_rows_of_runs = 32;

  // Optional from here on; null where the set has no such kernel.

  // Integer dot products on stored codes.
  const CodeKernels* codes = nullptr;

  // qk for few rows, of keys as they are stored of which tokens, not channels, are side by side:
  // channel d of them is at k + d * stride bytes. What lies likewise at `next`, which need not be
  // readable, is prefetched. No other byte is read; scores beyond the tokens stay as they are.
  void (*qk_channels)(DataType type, const uint8_t* k, const uint8_t* next, int64_t stride,
                      int64_t tokens, const float* q, int64_t rows, int64_t head_size,
                      float* scores) = nullptr;

  // qk and pv for few rows, of tokens as they are stored. No other byte is read; scores beyond the
  // tokens stay as they are.
  void (*qk_stored)(DataType type, const TokenRows& tokens, const float* q, int64_t rows,
                    int64_t head_size, float* scores) = nullptr;
  void (*pv_stored)(DataType type, const TokenRows& tokens, const float* probs, int64_t rows,
                    const float* shrink, int64_t head_size, float* out) = nullptr;

  const PairKernels* pairs = nullptr;
  const ByteKernels* bytes = nullptr;
};

// The highest set that this CPU has, chosen once; or the one that the environment
// variable KVANT_CPU_ISA names. Null if it names none that this CPU has.
const KernelSet* ChosenKernels();

// Every set in the table that this CPU has, lowest first, with its position: null past the end.
const KernelSet* KernelsAt(int position);
// The names in the table, for messages: "portable".
std::string_view KernelNames();

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_KERNELS_H_
