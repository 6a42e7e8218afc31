// What the CUDA kernels of DynamicQuantize, DynamicDequantize, Append, AppendPages and Hadamard are
// told: traits, which are known when a kernel is compiled, and parameters, which come with each
// launch (see attention_params.h).
//
// Tensors are walked along axes: rows that have positions, then outer to inner as codes (of
// DynamicDequantize: values) lie in memory. Each dimension is an axis of groups and one within
// groups; axes of one element are left out, and neighbours merged. The innermost is the run axis:
// threads take runs of 8 elements along it.
//
// Append: what a row of batches writes is moved by its position, which is read when the kernel
// runs, too late for an error: a row that does not fit, or would begin within a group, writes
// nothing.
#ifndef KVANT_KERNELS_CUDA_QUANTIZE_PARAMS_H_
#define KVANT_KERNELS_CUDA_QUANTIZE_PARAMS_H_

#include "kvant/kernels/cuda/attention_params.h"

namespace kvant::cuda {

inline constexpr i32 kRun = 8;
inline constexpr i32 kMaxQuantizeAxes = 8;
// QuantizeRows: runs that a lane holds.
inline constexpr i32 kMaxLaneRuns = 4;

enum ZeroPointKind : i32 {
  kNoZeroPoints,    // value = code * scale
  kCodeZeroPoints,  // value = (code - zero point) * scale
  kRealZeroPoints,  // value = code * scale - zero point
};

// Block formats of ggml, whose own formulas give scales, zero points and codes.
enum GgmlFormat : i32 { kNoGgml, kGgmlQ8_0, kGgmlQ4_0, kGgmlQ4_1, kGgmlIq4Nl };

// QuantizeTiles: what a launch does. Where tiles are few and large, parts of them are searched for
// their ranges by one launch, and the next joins these.
enum TilePass : i32 {
  kWholeTiles,  // ranges, parameters, codes
  kPartRanges,  // ranges of parts, to QuantizeParams::ranges
  kJoinParts,   // parameters from them, codes
};

struct QuantizeTraits {
  i32 values, codes, scales, zero_points;  // ElementType, as stored
  i32 zero_point_kind;

  // Scales and zero points are computed: the rest of the paragraph.
  i32 computes;
  i32 zero_point_codes;  // the type whose range zero points are clamped to
  i32 power_of_two;
  i32 ggml;  // GgmlFormat; of QuantizeRows

  i32 positions;  // their ElementType; kNone: there are none
  i32 pages;      // they are slots of pages
  // Codes are positions in a table of 2^codebook_bits numbers; 0: they are not.
  i32 codebook_bits;

  i32 outer_axes, line_axes;
  // Runs are aligned to their size wherever they begin, if the first element is.
  i32 value_vectors, code_vectors;
  i32 whole_runs;  // a line has so many elements that all of its runs are of 8
  // Elements of a run have scales, or zero points, of their own.
  i32 scales_vary, zero_points_vary;

  // QuantizeRows: lanes that share a group, a power of two, and runs that each holds. RotateRuns:
  // the same of a Hadamard block, or 1 lane with several blocks in a run.
  i32 lanes, lane_runs;

  // QuantizeTiles
  i32 pass;
  i32 run_in_group;  // a tile is a group; else it is `columns` runs of groups side by side
  i32 columns;
  i32 encodes;  // writes codes, not only scales and zero points

  // QuantizeElements: elements of different runs share bytes.
  i32 shares_bytes;

  // RotateRuns, RotateBlocks: elements of a Hadamard block, a power of two.
  i32 block;
};

// Elements by which an index on an axis moves.
struct QuantizeAxis {
  i64 values, codes, scales, zero_points, positions;
  i32 extent, unused;
};

struct QuantizeParams {
  void *values, *codes, *scales, *zero_points;
  // kPartRanges, kJoinParts: [tile][part][column or 1]{min, max}
  float* ranges;
  const void* positions;
  // DynamicDequantize: the numbers that codes stand for. Else Codebook::nodes of
  // kernels/cpu/codebook.h, and for ggml's formula the numbers as well.
  const u32* codebook;

  QuantizeAxis outer[kMaxQuantizeAxes];  // QuantizeRows, QuantizeTiles: of groups; else all
  QuantizeAxis lines[kMaxQuantizeAxes];  // of lines within a group
  QuantizeAxis run;
  // Positions are multiples of position_unit. Each unit of a position moves what is written by
  // per_position. With pages, each page_units of them are a page, which moves it by per_page.
  QuantizeAxis per_position, per_page;
  i32 position_unit, last_position, page_units;
  // Threads' work, all in all: groups (QuantizeRows), runs, or elements if these share bytes.
  u32 count;
  u32 line_count;  // per group
  u32 line_runs;   // per line
  // QuantizeTiles: runs (if run_in_group) or lines that a part has, and parts of a tile.
  u32 part_size, parts;
  float scale_floor;
  float norm;                                    // RotateRuns, RotateBlocks: 1 / sqrt(block)
  double codebook_largest, codebook_reciprocal;  // magnitude, and 1 / that
};

// The table's bytes at the begin of the shared memory.
KVANT_DEVICE constexpr i32 CodebookBytes(const QuantizeTraits& t, bool dequantizes) {
  if (t.codebook_bits == 0) return 0;
  const i32 numbers = 4 << t.codebook_bits, nodes = 8 << t.codebook_bits;
  return dequantizes ? numbers : t.ggml == kNoGgml ? nodes : nodes + numbers;
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_QUANTIZE_PARAMS_H_
