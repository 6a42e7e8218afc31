// What a CUDA attention kernel is told. AttentionTraits is known when the kernel is compiled: it is
// ints only, so that they, in order, are its initializer in the source that NVRTC gets. The
// executor (kernels/device/simt.h) runs the same code with traits that are variables.
// AttentionParams comes with each launch.
//
// Arrays have five axes, [b0, b1, b2, row, col]; a stride of 0 broadcasts. Rows are queries and
// columns tokens for whatever lies over the scores; for Q, K, V and the output a row is a query or
// token and a column a channel of the head.
#ifndef KVANT_KERNELS_CUDA_ATTENTION_PARAMS_H_
#define KVANT_KERNELS_CUDA_ATTENTION_PARAMS_H_

#include "kvant/kernels/device/device.h"

namespace kvant::cuda {

using namespace device;  // NOLINT: the vocabulary

inline constexpr i32 kAxes = 5;
inline constexpr i32 kRow = 3;
inline constexpr i32 kCol = 4;
inline constexpr i32 kMaxSegments = 4;  // of K, and of V
inline constexpr i32 kMaxSteps = 8;
inline constexpr i32 kMaxParametersAhead = 4;

KVANT_DEVICE constexpr i32 MinOf(i32 a, i32 b) { return a < b ? a : b; }
KVANT_DEVICE constexpr i32 MaxOf(i32 a, i32 b) { return a > b ? a : b; }
KVANT_DEVICE constexpr i32 CeilDiv(i32 a, i32 b) { return (a + b - 1) / b; }

// Of the elements of an array. kNone: there is no array.
enum ElementType : i32 {
  kNone,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt8,
  kUint8,
  kInt4,
  kUint4,
  kInt2,
  kUint2,
  kBool,
};

// Bits of an element.
KVANT_DEVICE constexpr i32 BitsOf(i32 type) {
  switch (type) {
    case kInt64:
      return 64;
    case kFloat32:
    case kInt32:
      return 32;
    case kFloat16:
    case kBFloat16:
      return 16;
    case kInt4:
    case kUint4:
      return 4;
    case kInt2:
    case kUint2:
      return 2;
    case kNone:
      return 0;
    default:
      return 8;
  }
}

struct ArrayTraits {
  i32 type;    // ElementType
  i32 varies;  // bit a: its stride along axis a is not 0
};

// How K or V is stored: value = (code - zero point) * scale, or code * scale - zero point where
// zero points are in real units. Scales and zero points are indexed by coordinate / group.
struct SegmentTraits {
  ArrayTraits data, scales, zero_points;
  i32 real_zero_points;
  i32 codebook;  // entries, of which codes are positions: code becomes that entry; 0: there is none
  i32 group[kAxes];
  i32 contiguous;  // the axis along which elements are side by side: kCol, kRow, or -1
  i32 vectors;     // runs of 8 elements along it are aligned to their size
  // How tiles come to shared memory; but for kLoaded, by cp.async a tile ahead, copy_width (4, 8 or
  // 16) bytes at a time.
  i32 staging, copy_width;
  // Scales and zero points of a tile are read a tile ahead, so many by each thread; 0: when they
  // are needed.
  i32 parameters_ahead;
  i32 codebook_table;     // tiles are made of codes by a CodebookTable
  i32 load, load_varies;  // TokenLoad, and whether it differs between entries of b0
};

// Which tokens of a segment the columns are.
enum TokenLoad : i32 {
  kAllTokens,
  kByRange,  // first, first + 1, ..., and token 0 after the last
  kByPages,  // those of the pages of b0; axis b0 of the arrays is pages, a row a token of one
};

enum Staging : i32 {
  kLoaded,   // element by element, or 8 at a time, through registers
  kCopied,   // codes as they are stored, and dequantized from there
  kInPlace,  // stored in what products are computed in: copied to where those read them
};

enum StepKind : i32 {
#define KVANT_SCORE_STEP(name, operands, words) k##name,
#include "kvant/graph/score_steps.inc"
};
// By the table's second column.
enum StepOperands : i32 { kStepNone, kStepOne, kStepOther };
KVANT_DEVICE constexpr bool HasOperand(i32 kind) {
  constexpr StepOperands kOperands[] = {
#define KVANT_SCORE_STEP(name, operands, words) kStep##operands,
#include "kvant/graph/score_steps.inc"
  };
  return kOperands[kind] != kStepNone;
}
enum Alignment : i32 { kTopLeft, kBottomRight, kRuntime };

struct StepTraits {
  i32 kind, inverted, alignment;
  ArrayTraits operand;                          // kNone: StepParams::constant
  ArrayTraits condition, shift_add, shift_sub;  // kNone of a shift: in StepParams::shift
  // Of a band: columns out of it end up at -inf whatever follows, so that they need not be visited.
  i32 hides;
};

// What the products are computed in.
enum Arithmetic : i32 {
  kByF16,   // f16 operands, f32 sums
  kByBF16,  // bf16 operands, f32 sums
  kByTF32,  // f32 operands rounded to tf32: the bits of f16, the range of bf16
  kByF32,   // f32 operands as sums of two tf32, three products each: f32 but for the last bits
};
KVANT_DEVICE constexpr bool TakesF32(i32 arithmetic) {
  return arithmetic == kByTF32 || arithmetic == kByF32;
}

enum KernelKind : i32 { kTilesKernel, kCodesKernel };

// Which tokens a block has (attention_parts.h).
enum AttentionPart : i32 {
  kWhole,
  kCodesPart,   // those that K and V both have as codes
  kOthersPart,  // the others
};
inline constexpr i32 kParts = 2;

struct AttentionTraits {
  i32 arithmetic;
  i32 head_size, v_head_size;
  // Channels of the output that a block computes; a multiple of 16.
  i32 v_block;
  // A block is row_warps x token_warps warps; each has 16 rows and tile / token_warps tokens of a
  // tile.
  i32 row_warps, token_warps;
  i32 tile;  // tokens that are dequantized and multiplied together
  // K or V (or their scales) differ between the heads of b2: rows are those of one head.
  i32 kv_varies_over_b2;
  i32 k_segments, v_segments;
  i32 v_in_k;  // V is the first channels of K, and tiles of K have all that a block needs of it
  i32 one_codebook;  // K and V are positions in the same one
  SegmentTraits q;
  SegmentTraits k[kMaxSegments], v[kMaxSegments];
  i32 step_count;
  StepTraits steps[kMaxSteps];
  i32 inf_as_zero;   // a row without any finite score: zeros, else NaN
  i32 empty_is_ln0;  // and statistics of such zeros: -inf, else 0
  ArrayTraits sinks;
  i32 has_lengths, lengths_vary;  // kv_lengths, and whether they differ between entries of b0
  i32 has_first;                  // kv_first
  i32 ragged;                     // query_offsets
  i32 dropout;
  ArrayTraits seed, dropout_offset, probability, dropout_mask;
  i32 probs_type;  // probabilities are rounded to codes of this type, once they are final; or kNone
  i32 rounds_output;  // the output holds codes
  ArrayTraits output, stats;
  // Runs of so many channels of queries and of the output are multiplied by a Hadamard matrix /
  // sqrt(run); 0: none.
  i32 q_hadamard, output_hadamard;
  i32 kernel;  // KernelKind
  i32 part;    // AttentionPart
  // Of parts: how many segments lie before that of codes. It is there twice, for what kOthersPart
  // has before and behind the columns of kCodesPart. kCodesPart has traits of this segment alone,
  // as its first.
  i32 k_codes, v_codes;
  // What follows is for kCodesKernel alone (attention_codes.h).
  i32 row_blocks;        // of 8 rows, that a block has
  i32 channel_warps;     // warps that share tiles, each with a slice of channels (codes_slices.h)
  i32 warp_tile;         // tokens that a warp takes at once: 16, 32 or 64
  i32 stages;            // of such tiles in shared memory, per warp: 2, 3 or 4
  i32 k_copy, v_copy;    // bytes by which codes are copied: 8 or 16
  i32 side_copy;         // bytes by which scales and zero points are copied: 4, 8 or 16
  i32 k_pitch, v_pitch;  // bytes from token to token
  i32 k_page, v_page;    // tokens of a page; 0: there are no pages
  i32 converts_e4m3;     // e4m3 becomes f16 by an instruction, else bit by bit
  i32 subnormal_codes;   // codes are multiplied as subnormal f16, else made normal first
};

// Of a block, but for kCodesKernel.
KVANT_DEVICE constexpr i32 Threads(const AttentionTraits& t) {
  return t.row_warps * t.token_warps * 32;
}
// Of a block; and how many of these there are for `rows`.
KVANT_DEVICE constexpr i32 RowsOf(const AttentionTraits& t) {
  return t.kernel == kCodesKernel ? t.row_blocks * 8 : t.row_warps * 16;
}
KVANT_DEVICE constexpr i32 RowTiles(const AttentionTraits& t, i32 rows) {
  return CeilDiv(rows, RowsOf(t));
}
// Blocks that share the channels of the output.
KVANT_DEVICE constexpr i32 ChannelBlocks(const AttentionTraits& t) {
  return MaxOf(1, CeilDiv(t.v_head_size, t.v_block));
}

struct Array {
  void* data;
  i64 offset;
  i64 strides[kAxes];  // in elements
};

// What does not vary over rows and columns.
struct BatchArray {
  void* data;
  i64 offset;
  i64 strides[3];
};

// s32 over b0, and elements side by side `step` apart.
struct IndexArray {
  void* data;
  i64 offset;
  i32 stride, step;
};

// Q, or a segment of K or V.
struct StoredParams {
  Array data, scales, zero_points;
  const float* codebook;  // its entries, and of 16 what a CodebookTable is made of
};

// Columns [begin, begin + columns) of K or V, but where there are ranges; `data` has `tokens` rows,
// or `pages` pages of them.
struct SegmentParams : StoredParams {
  i32 begin, columns, tokens, pages;
  IndexArray load;  // {first, tokens} of a range, or a row of the page table
};

struct StepParams {
  Array operand, condition;
  BatchArray shift_add, shift_sub;
  float constant;
  i64 shift;  // what of the shift comes by value
  i64 lower, upper;
};

// A number by value, or, where it has a type, where it lies.
union Scalar {
  i64 integer;
  double real;
  const void* data;
};

// code = value / scale + zero_point, rounded to even and saturated.
struct RoundingParams {
  float scale, zero_point;
};

// What tokens are split into. With splits > 1, from `partials` and `done` on in the params' arrays
// of that name: [row tile of the grid][split] states (see finish.h), and for each tile a count of
// the splits that are done.
struct SplitParams {
  i64 partials;
  i32 done;
  i32 splits;
};

struct AttentionParams {
  i32 batch[3];
  i32 q_len, kv_len;
  // Rows that share K and V: q_len, or q_len * batch[2].
  i32 rows;
  i32 codes_block;  // of parts, the first block that has codes
  StoredParams q;
  SegmentParams k[kMaxSegments], v[kMaxSegments];
  StepParams steps[kMaxSteps];
  BatchArray sinks;
  // Columns [kv_first, kv_lengths) exist; query_offsets: where b0's rows begin, and those of the
  // next.
  IndexArray kv_lengths, kv_first, query_offsets;
  Array stats, output, dropout_mask;
  Scalar seed, dropout_offset, probability;
  RoundingParams probs_rounding, output_rounding;
  // Of a kernel of one kind, and of parts those of kOthersPart; those of kCodesPart.
  SplitParams split, codes_split;
  // Of parts, first what they leave of rows (LeftRows), and how many blocks have left theirs. Then
  // what SplitParams say. Counts are 0 between launches.
  float* partials;
  u32* done;
};
static_assert(sizeof(AttentionParams) <= 4096, "what a kernel takes on every driver");

template <class T>
KVANT_DEVICE const SplitParams& SplitOf(const AttentionParams& p) {
  return T::k.part == kCodesPart ? p.codes_split : p.split;
}
// Those of kCodesKernel.
template <class T>
KVANT_DEVICE const SegmentParams& KeySegment(const AttentionParams& p) {
  return p.k[T::k.k_codes];
}
template <class T>
KVANT_DEVICE const SegmentParams& ValueSegment(const AttentionParams& p) {
  return p.v[T::k.v_codes];
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_ATTENTION_PARAMS_H_
