// What a CPU attention kernel is told: plain structs of buffers, strides in
// elements, counts and enums. A kernel has never heard of a graph.
//
// Arrays have five axes, [b0, b1, b2, row, col]; a stride of 0 broadcasts. Rows are
// queries and columns tokens for whatever lies over the scores; for Q, K, V and the
// output a row is a query or token and a column a channel of the head.
#ifndef KVANT_KERNELS_CPU_ATTENTION_ARGS_H_
#define KVANT_KERNELS_CPU_ATTENTION_ARGS_H_

#include <cstdint>
#include <vector>

#include "kvant/graph/data_type.h"

namespace kvant::cpu {

inline constexpr int kAxes = 5;
inline constexpr int kRow = 3;
inline constexpr int kCol = 4;
// Tokens whose scores are computed and normalized together. Also the granularity of splits, so that
// tile boundaries depend on the shape only.
inline constexpr int64_t kTokenTile = 128;
// Tokens that are dequantized at once. Columns are computed in multiples of it.
inline constexpr int64_t kHalfTile = kTokenTile / 2;
// A tile may be taken from several pages where these are multiples of so many tokens.
inline constexpr int64_t kPageUnit = 16;
inline constexpr int kTileBlocks = kTokenTile / kPageUnit;

// Columns are not cut into chunks shorter than this.
inline constexpr int64_t kMinChunk = 256;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns of a tile that are computed for n tokens.
constexpr int64_t WholeHalves(int64_t n) { return CeilDiv(n, kHalfTile) * kHalfTile; }

// A position in an array, or in the problem.
struct Position {
  int64_t at[kAxes] = {};
};

// An array in a buffer of the call, or in constant memory that outlives it.
struct Array {
  int buffer = -1;             // index into AttentionCall::inputs (or outputs)
  const void* data = nullptr;  // used when buffer is -1; null too: absent
  DataType type = kUndef;
  int64_t strides[kAxes] = {};
  int64_t offset = 0;
  // Not null: elements, of 2, 4 or 8 bits and unsigned, are positions in it. It outlives the array.
  const float* codebook = nullptr;

  bool present() const { return buffer >= 0 || data != nullptr; }
  int64_t IndexOf(const Position& p) const {
    int64_t index = offset;
    for (int axis = 0; axis < kAxes; ++axis) index += p.at[axis] * strides[axis];
    return index;
  }
};

// value = (code - zero point) * scale, or code * scale - zero point when zero
// points are in real units. Parameters are indexed by coordinate / group.
struct Dequantization {
  int64_t group[kAxes] = {1, 1, 1, 1, 1};
  Array scales;       // absent: values are stored as they are
  Array zero_points;  // absent: 0
  bool real_zero_points = false;
};

// How products take the codes of a segment as they are stored (code_layout.h).
struct CodeLayout {
  bool usable = false;
  bool floats = false;  // codes stand for floats: f32 products, else integer ones
  int bits = 0;
  bool is_signed = false;
  bool channel_major = false;  // keys, of which tokens, not channels, are side by side
  // Scales vary with the channel, in runs of `run` tokens; else with groups of channels.
  bool by_channel = false;
  int64_t run = 0;
  int64_t group = 0, groups = 0;  // channels in a group, and how many there are
  // Parameters are found by the token's address, or are the same for all tokens: those of a tile
  // are read at once, also where its tokens are in several pages.
  bool addressed = false;
  // CodeColumns, for the keys.
  int64_t columns = 0;
  std::vector<int32_t> part_ends, part_groups;
};

// A run of tokens of K or V, or some of them: s32 over b0 and col, already checked.
struct Segment {
  Array data;  // row: token within the segment, or within a page; col: channel
  Dequantization dequantization;
  int64_t tokens = 0;  // rows of data
  Array range;         // {first, tokens}: of a ring
  Array page_table;    // of a batch row: along axis 0 of the other arrays are pages
  // What a tile has of it is multiplied at once although it is in several pages, of multiples of
  // kPageUnit tokens.
  bool joins_pages = false;
  // Rows are multiplied as they are stored, and scales by channel go on queries and sums.
  bool scaled_rows = false;
  CodeLayout codes;
};

struct Step {
  // Conditions are `condition != inverted`; a band is lower <= col - (row + shift) <= upper.
  enum class Kind : uint8_t {
#define KVANT_SCORE_STEP(name, operands, words) k##name,
#include "kvant/graph/score_steps.inc"
  };
  enum class Alignment : uint8_t { kTopLeft, kBottomRight, kRuntime };
  Kind kind{};
  Array operand;
  Array condition;
  bool inverted = false;
  int64_t lower = 0, upper = 0;
  Alignment alignment = Alignment::kTopLeft;
  Array shift_add, shift_sub;  // absent: 0
};

// value -> code -> value; round half to even, saturating. kUndef: none.
struct Rounding {
  DataType type = kUndef;
  float scale = 1.f;
  int64_t zero_point = 0;
  float unit = 1.f;  // what a step of the code stands for afterwards
};

// How Q x K and P x V are computed; see docs/cpu_kernels.md.
enum class Products : uint8_t {
  kTiles,       // K and V dequantized to f32 tiles that all rows share
  kPairs,       // the same as bf16: what is not bf16 is rounded
  kBytes,       // whole numbers: tiles of K and V stay bytes (byte_tiles.h)
  kStoredRows,  // few rows: token rows of K and V as they are stored, where they can be
};

// Softmax over the columns takes one run of the kernel. Over the rows it takes two, the first on
// the transposed problem; scores come out the same bit for bit in both, so that the maximum of a
// column is one of its scores and no exponent is positive, however large they are.
enum class SoftmaxPass : uint8_t {
  kOnline,         // over columns as they are seen
  kStatistics,     // of rows, to AttentionCall::statistics; nothing else is written
  kProbabilities,  // exp(score - maximum - ln sum) by the statistics of its column
};

// Of whole numbers as bytes: value = byte + offset (byte_tiles.h).
struct ByteOffsets {
  int32_t q = 0, k = 0, probs = 0, v = 0;
};

struct AttentionProblem {
  int64_t batch[3] = {1, 1, 1};
  int64_t q_len = 0, kv_len = 0, head_size = 0, v_head_size = 0;

  Array q;
  Dequantization q_dequantization;
  // Runs of so many channels of queries and of the output are multiplied by a Hadamard matrix,
  // KernelSet::hadamard; 1: no.
  int64_t q_hadamard = 1, output_hadamard = 1;
  const Segment* k = nullptr;
  const Segment* v = nullptr;
  int k_segments = 0, v_segments = 0;
  const Step* steps = nullptr;
  int step_count = 0;

  bool inf_as_zero = true;  // a row without any finite score: zeros, else NaN
  Array sinks;              // joins the denominator only
  // Columns [kv_first, kv_lengths) exist, or all that ranges of segments say: s32 over b0, already
  // checked. Of queries, rows [query_offsets[b0], query_offsets[b0 + 1]) are b0's.
  Array kv_lengths, kv_first, query_offsets;
  bool dropout = false;
  Array seed, dropout_offset, probability;
  Rounding probs_rounding;
  float output_factor = 1.f;
  Rounding output_rounding;  // the output holds the codes

  // Written; buffer is an index into AttentionCall::outputs.
  Array output, stats, dropout_mask;
  float stats_of_empty = 0.f;  // where inf_as_zero made zeros of a row

  // The plan. A row tile is `row_tile` consecutive rows of b2 x q when K and V do
  // not vary over b2, of q otherwise; its columns are cut into chunks (schedule.h), unless there is
  // to be one.
  bool kv_varies_over_b2 = false;
  int64_t row_tile = 1;
  bool may_split = true;
  SoftmaxPass pass = SoftmaxPass::kOnline;  // any other: by kTiles or kPairs
  Products products = Products::kTiles;
  // exact_keys: queries and keys are bf16, and are multiplied as such, exactly. split_probs: with
  // kPairs, values are too, and each probability is multiplied as the sum of two bf16 numbers.
  bool exact_keys = false, split_probs = false;
  // Queries and keys are whole numbers up to 256, whose products are exact: scales are among the
  // steps. f32 holds sums of up to 256 of these to the last bit, and rounds longer ones as those of
  // any numbers.
  bool whole_scores = false;
  ByteOffsets byte_offsets;  // with kBytes
  // Scratch of a row tile, and what those that take turns share.
  int64_t own_floats = 0, shared_floats = 0;
  // With kStoredRows: K is dequantized to [channel][token] tiles, as some of its tokens are side by
  // side and not multiplied where they lie.
  bool k_by_channel = false;
};

// What there is of a batch row: columns [kv_first, kv_len), queries [q_first, q_first + q_len).
struct Extent {
  int64_t kv_first = 0, kv_len = 0, q_first = 0, q_len = 0;
};

// One execution.
struct AttentionCall {
  // Of many rows, and of ragged queries another for batch rows that have few.
  const AttentionProblem *problem = nullptr, *few = nullptr;
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  float* partials = nullptr;    // Schedule::PartialFloats
  float* statistics = nullptr;  // with kStatistics or kProbabilities; see finish.h
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ATTENTION_ARGS_H_
