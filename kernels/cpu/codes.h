// Attention on the stored codes of K and V, with integer dot products.
//
// A row of queries becomes s16 integers under one scale, so that
//
//   score = scale_q * sum_g scale_g * (sum_{d in g} q16[d] * code[d] - zero_g * sum_{d in g}
//   q16[d])
//
// and the probabilities of a tile, times the values' scales, become s16 weights under
// one scale per row and group. Codes are unsigned in the products: the sign bit of signed
// ones is flipped, which adds `offset` to their zero point. Sums are s32 and exact.
//
// Numbers are rounded to s16 after a dither was added (isa/codes_common.h).
//
// What rounding to s16 costs is estimated for every tile, see docs/cpu_codes.md. A tile that it
// would cost too much is multiplied once more, by what rounding lost, which becomes s16 likewise.
#ifndef KVANT_KERNELS_CPU_CODES_H_
#define KVANT_KERNELS_CPU_CODES_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/token_rows.h"

namespace kvant::cpu {

// Where queries lie for the products. A dword of codes holds 32 / bits of them, and so
// many pairs of them side by side in its halves: pair k is the k-th of the low half and
// the k-th of the high half. Row -> dword of the token's codes -> pair -> {low, high} as s16. Sets
// that multiply bytes have as many dwords of bytes there instead (isa/codes_neon.h), and x86 has
// other orders where there is one row (isa/codes_tokens.h).

// Rows are multiplied in blocks of up to four.
inline int64_t RowBlock(int64_t rows_left) { return rows_left < 4 ? rows_left : 4; }

// Dword columns that are multiplied in one go, whatever the instruction set: a row of
// queries is padded with zeros to a multiple of it.
inline constexpr int64_t kColumnChunk = 16;

// Runs of columns that share parameters are multiples of this, 16 channels.
constexpr int PartUnit(int bits) { return bits / 2; }

// The same of codes that stand for floats, 16 bytes.
inline constexpr int kFloatPartUnit = 4;

struct CodeQueries {
  int32_t* pairs = nullptr;  // rows * columns * pairs per dword, as above
  // [rows][parts]: -offset * sum of the part's queries, and that sum, or see prepare.
  int32_t* starts = nullptr;
  float* sums = nullptr;
  float* scales = nullptr;  // [rows]
  // [rows][channels], queries, times the factors, less what became of them, and [rows], the largest
  // magnitude among these; null: not wanted.
  float* lost = nullptr;
  float* most_lost = nullptr;
};

// Channels of a token, by dword columns: runs of columns ("parts") that share parameters.
struct CodeColumns {
  int bits = 8;
  int64_t channels = 0;
  int64_t columns = 0;  // a multiple of kColumnChunk
  int64_t parts = 0;
  const int32_t* part_ends = nullptr;    // [parts]: the column after the part
  const int32_t* part_groups = nullptr;  // [parts]: the row of the parameter tile
};

// A tile of parameters: [groups][kTokenTile], of which WholeHalves of the tokens are set: zeros
// beyond the last token. Biases, zero points in codes or times the scale, are null where there are
// none.
struct CodeParameters {
  const float* scales = nullptr;
  const float* biases = nullptr;
};

// Parameters that vary with the channel and so move to the queries; null where there are none.
struct CodeFactors {
  const float* scales = nullptr;
  const float* zero_points = nullptr;  // in codes
};

// Biases are zero points, 0 where null, plus an offset, in codes or times the scales; where `real`,
// zero points are in real units already.
struct CodeBiases {
  bool real = false;
  bool in_codes = false;
  float offset = 0.f;
};

// Of a tile of parameters: whether all are finite, the largest magnitude of a scale, and what zero
// points are between; where biases are in codes, these. 0 where there are none.
struct CodeLimits {
  bool finite = true;
  float scale = 0.f;
  float low = 0.f, high = 0.f;
};

// What codes as they are multiplied are between: middle - half and middle + half, the latter
// exclusive. Their distance from a zero point is at most |zero point - middle| + half.
struct CodeRange {
  float middle = 0.f;
  float half = 0.f;
};

// Those of up to kTokenTile tokens, [token][groups] in blocks that may lie in different pages;
// kUndef where there are none.
struct StoredParameters {
  DataType type = kUndef;
  const uint8_t* blocks[kTileBlocks];

  bool present() const { return type != kUndef; }
};
// Groups of which CodeKernels::transpose_parameters takes parameters, of these types.
inline bool TransposesGroups(int64_t groups) { return groups <= 8; }
inline bool TransposesType(DataType type) {
  return type == kF32 || type == kF16 || type == kBF16 || type == kS8 || type == kU8 ||
         type == kS4 || type == kU4;
}

// Codes that stand for floats: f8, or positions of 4 bits in a codebook where that is not null.
struct FloatCodes {
  DataType type = kUndef;
  const float* codebook = nullptr;
};

// The same products of such codes, in f32.
struct FloatCodeKernels {
  // Queries, [rows][channels], as `scores` takes them: out_channels of each, as many as the columns
  // of CodeColumns hold, with zeros beyond `channels`.
  void (*queries)(const FloatCodes& codes, const float* q, int64_t rows, int64_t channels,
                  float* out, int64_t out_channels);

  // scores[r][t] = sum_g scales[g][t] * sum_{d in g} q[r][d] * value[t][d], for t < tokens; other
  // columns of the 16 that hold t may be written. Parts are multiples of kFloatPartUnit.
  void (*scores)(const TokenRows& rows, const FloatCodes& codes, const CodeColumns& columns,
                 const float* q, int64_t query_rows, const float* scales, float* scores);

  // weights[r][g][t] = probs[r][t] * scales[g][t] for t < columns; rows are kTokenTile apart. False
  // if the magnitude of a scale that is not 0 is below `least`.
  bool (*weights)(const float* probs, int64_t rows, int64_t columns, const float* scales,
                  int64_t groups, float least, float* weights);

  // out[r][d] = out[r][d] * shrink[r] + sum_t weights[r][d / group][t] * value[t][d].
  struct Values {
    TokenRows rows;
    FloatCodes codes;
    int64_t channels = 0;
    int64_t group = 0;  // a multiple of 16, or at least `channels`
    int64_t groups = 0;
    const float* weights = nullptr;
  };
  void (*values)(const Values& args, int64_t query_rows, const float* shrink, float* out);
};

// Lanes of a sum of squares, whatever the instruction set.
inline constexpr int kSquareLanes = 16;

struct CodeKernels {
  // q: [rows][channels], times the factors' scales if there are any: then the sums are 0 but for
  // the first part's, that of all queries times zero points. False, and nothing prepared, if
  // a product is not finite.
  bool (*prepare)(const float* q, int64_t rows, const CodeFactors& factors,
                  const CodeColumns& columns, int32_t offset, const CodeQueries& out);

  // scores[r][t] for t < tokens; other columns of the 16 that hold t may be written. True if it
  // left the codes in `transposed`, columns * kTokenTile dwords, for `norms`.
  bool (*scores)(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
                 const CodeQueries& queries, int64_t query_rows, const CodeParameters& parameters,
                 int32_t* transposed, float* scores);

  // Leaves the codes in `transposed`, where `scores` did not.
  void (*transpose_codes)(const TokenRows& rows, uint8_t flip, const CodeColumns& columns,
                          int32_t* transposed);

  // The largest of what `norms` may give for any codes: with biases times the scales, and `range`
  // as below,  max_t sqrt(sum_g channels of g * (|bias - middle * scale| + half * |scale|)^2).
  float (*reach)(const CodeParameters& parameters, const CodeRange& range, int64_t columns,
                 int64_t group, int64_t channels);

  // squares[t] = sum_d (scale * code - bias)^2, the square of a token's L2 norm, for t < tokens;
  // other columns of the 16 that hold t may be written. `middle`: that of the range, or 0 where
  // flipping signs is no part of the biases.
  void (*norms)(const int32_t* transposed, const CodeColumns& columns,
                const CodeParameters& parameters, float middle, int64_t tokens, float* squares);

  // sum_i (|biases[i] - middle * scales[i]| + half * |scales[i]|)^2 for i < n, of the group of
  // kTokenTile that has the most for each i; scales are 1, biases 0 where null.
  float (*spread)(const float* scales, const float* biases, int64_t n, int64_t groups,
                  const CodeRange& range);

  // Null biases are not written.
  CodeLimits (*biases)(const float* scales, const float* zero_points, const CodeBiases& how,
                       int64_t n, float* biases);

  // The same for stored parameters of `columns`, and parameter tiles of scales and of biases; see
  // TransposesGroups.
  CodeLimits (*transpose_parameters)(const StoredParameters& stored_scales,
                                     const StoredParameters& stored_points, const CodeBiases& how,
                                     int64_t columns, int64_t groups, float* scales, float* biases);

  // weights[r][g][t] = round(probs[r][t] * scales[g][t] / weight_scales[r][g]),
  // weight_biases[r][g] = weight_scales[r][g] * sum_t weights[r][g][t] * biases[g][t], with
  // biases in codes, for t < columns, and units[r] = 1 / max_g weight_scales[r][g], 0 if that is 0;
  // null: not wanted. Rows are kTokenTile apart.
  void (*weights)(const float* probs, int64_t rows, int64_t columns,
                  const CodeParameters& parameters, int64_t groups, int16_t* weights,
                  float* weight_scales, float* weight_biases, float* units);

  // out[r][d] = out[r][d] * shrink[r]
  //           + sum_t weights[r][g][t] * code[t][d] * weight_scales[r][g] - weight_biases[r][g]
  // with g = d / group; where channel_scales is not null, the sum is multiplied by
  // channel_scales[d] and the bias by channel_biases[d].
  struct Values {
    TokenRows rows;
    int bits = 8;
    bool is_signed = false;  // of 8 bits: read as such; narrower ones are flipped to unsigned
    int64_t channels = 0;
    int64_t group = 0;  // a multiple of 16, or at least `channels`
    int64_t groups = 0;
    const int16_t* weights = nullptr;
    const float* weight_scales = nullptr;
    const float* weight_biases = nullptr;
    const float* channel_scales = nullptr;
    const float* channel_biases = nullptr;
    // Is set to what out was.
    float* saved = nullptr;
    // lanes[r][i] += (what is added to out[r][d] * units[r])^2, of which only the sum over i
    // counts.
    const float* units = nullptr;
    float* lanes = nullptr;  // [rows][kSquareLanes]
  };
  void (*values)(const Values& args, int64_t query_rows, const float* shrink, float* out);

  // errors[r] = sum_g (weight_scales[r][g] * units[r])^2, squares[r] = sum_i lanes[r][i].
  void (*costs)(const float* weight_scales, const float* units, const float* lanes, int64_t rows,
                int64_t groups, float* errors, float* squares);

  const FloatCodeKernels* floats = nullptr;  // optional
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_CODES_H_
