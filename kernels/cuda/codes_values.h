// The output of a warp: V transposed, as packed codes, is the A operand of the mma, 16 channels;
// probabilities are B, 8 rows of queries. Scales of V go on the probabilities, so where there are
// groups every group of channels has its own B.
//
//   C, one per 16 channels (pairs 2s, 2s + 1) and 8 rows of queries
//     registers 0, 1:  channel ValueChannel(2s, g),      queries 2c, 2c + 1
//     registers 2, 3:  channel ValueChannel(2s + 1, g),  queries 2c, 2c + 1
//
// What codes have too much, zero points and bias, is summed apart and taken off at the end
// (codes_offsets.h).
//
// Scales are normalised: by a power of two, those of a warp's first tile are about 1, so that f16
// has room for the larger and bits for the smaller.
#ifndef KVANT_KERNELS_CUDA_CODES_VALUES_H_
#define KVANT_KERNELS_CUDA_CODES_VALUES_H_

#include "kvant/kernels/cuda/codes_offsets.h"

namespace kvant::cuda {

template <class T>
class CodesValues {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kChannelTiles = CeilDiv(ValueSlice(T::kMax), 64) * 4;
  using Scores = typename CodesKeys<T>::Scores;
  using Offsets = CodesOffsets<T>;

  KVANT_DEVICE static CodeTile Tile() { return CodesRing<T>::Layout().v; }
  KVANT_DEVICE static CodeFormat Format() { return Tile().format; }

  // Of powers of two on scales: in f16, and in f32.
  static constexpr i32 kMostExponent = 15, kLeastExponent = -14, kFarExponent = 40;

  // zero_point: what all tokens have in common; codebook: where a CodebookTable lies.
  KVANT_DEVICE CodesValues(float zero_point, SharedAddress codebook)
      : table_(codebook), offsets_(zero_point) {}

  // The exponent of a power of two that brings scales to about 1: those of the first tile, by their
  // geometric mean. first: the stage, which has tokens [begin, end).
  KVANT_DEVICE static i32 NormalExponent(SharedAddress first, i32 begin, i32 end) {
    const CodeFormat f = Format();
    if (f.scale_type == kNone || end <= begin) return 0;
    const i32 count = (MinOf(end, T::k.warp_tile) - begin) * f.groups;
    const i32 bytes = f.ScaleBytes(), index = begin * f.groups + LaneIndex() * count / 32;
    const SharedAddress at =
        first + static_cast<u32>(CodesRing<T>::Layout().sides[1].offset + index * bytes);
    const float scale =
        bytes == 4 ? LoadSharedFloat(at) : CodeToFloat(f.scale_type, LoadShared16(at));
    const i32 exponent = static_cast<i32>(AsBits(scale) >> 23 & 255) - 127;
    // How many there are, above the sum of exponents. Zeros, as of tokens that were never written,
    // do not count.
    constexpr i32 kOne = 4096;
    static_assert(32 * kFarExponent < kOne / 2);
    i32 all = scale == 0.f ? 0 : kOne + MaxOf(-kFarExponent, MinOf(kFarExponent, exponent));
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) {
      all += static_cast<i32>(ShuffleXor(static_cast<u32>(all), mask));
    }
    const i32 counted = (all + kOne / 2) / kOne;
    return counted == 0 ? 0 : -(all - counted * kOne) / counted;
  }

  // exponent: of the power of two by which scales are normalised.
  KVANT_DEVICE void Clear(i32 exponent) {
    const bool in_f16 = Format().scale_type == kFloat16;
    if (in_f16) exponent = MaxOf(kLeastExponent, MinOf(kMostExponent, exponent));
    const float power = AsFloat(static_cast<u32>(127 + exponent) << 23);
    normal_ = in_f16 ? PackF16(power, power) : AsBits(power);
    nan_marks_ = largest_code_ = 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2 * Format().Halves(); ++s) {
        KVANT_UNROLL
        for (i32 e = 0; e < 4; ++e) out_[rb][s][e] = 0.f;
      }
    }
    offsets_.Clear();
  }

  // Output of queries 2c + h of row block rb times `factor`.
  KVANT_DEVICE void Shrink(i32 rb, i32 h, float factor) {
    KVANT_UNROLL
    for (i32 e = h; e < 4; e += 2) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2 * Format().Halves(); ++s) out_[rb][s][e] *= factor;
    }
    offsets_.Shrink(rb, h, factor);
  }

  // Takes a tile in. at: the lane's matrix row in the stage's V; stage: where the stage begins.
  KVANT_DEVICE void Add(SharedAddress at, SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 scales[32];
    typename Offsets::RowZeros zero_points;
    u32 plain[kRowBlocks][kTokenTiles];            // probabilities, as they are
    u32 columns[kRowBlocks][kParts][kTokenTiles];  // B operands; in groups, of unscaled ones
    if (f.groups == 1 && f.scale_type != kNone) {
      l.LoadOfRow(stage + l.sides[1].offset, BitsOf(f.scale_type), g, scales);
      Normalise(n, scales);
    }
    if (f.zero == Zero::kReal && !Offsets::RealByMma()) offsets_.AddReals(stage, probs);
    if (f.groups == 1 && f.zero == Zero::kInteger) Offsets::Load(stage, zero_points);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 i = 0; i < n; ++i) {
        const float x0 = probs[rb][i / 2][i % 2 * 2], x1 = probs[rb][i / 2][i % 2 * 2 + 1];
        plain[rb][i] = PackF16(x0, x1);
        u32 words[kParts] = {plain[rb][i]};
        if (f.groups == 1) Scaled(x0, x1, plain[rb][i], scales, i, words);
        if (f.groups > 1 && !Offsets::RealByMma()) continue;
        KVANT_UNROLL
        for (i32 part = 0; part < Parts(); ++part) {
          columns[rb][part][i] = TransposeMatrix(words[part]);
        }
      }
    }
    KVANT_UNROLL
    for (i32 j = 0; j < n / 2; ++j) {
      u32 low[kWords], high[kWords];
      Tile().LoadPair(at, j, true, low, high);
      if (!T::k.v_in_k) {  // of K's codes it is known
        f.MarkNan(low, f.Chunks(), nan_marks_);
        f.MarkNan(high, f.Chunks(), nan_marks_);
      }
      if (f.groups == 1) {
        if (f.TakesOffSums()) offsets_.AddRows(zero_points, j, columns);
        MultiplyRun(0, 0, low, high, columns, 2 * j);
      } else {
        if (Offsets::RealByMma()) offsets_.AddRealGroups(stage, AsFloat(normal_), j, columns);
        u32 zeros[2];
        KVANT_UNROLL
        for (i32 b = 0; b < 2; ++b) zeros[b] = Offsets::OfGroups(stage, 2 * j + b);
        const i32 bytes_of_two = 2 * f.groups * f.ScaleBytes();
        const i32 at_once = l.PairsAtOnce(bytes_of_two / 4), of_pair = j % at_once * 2 * f.groups;
        if (j % at_once == 0) {
          LoadSharedWords(stage + l.sides[1].offset + l.Token(g, 2 * j) / 2 * bytes_of_two,
                          bytes_of_two / 4 * at_once, scales);
          Normalise(2 * f.groups * at_once, scales);
        }
        KVANT_UNROLL
        for (i32 group = 0; group < f.groups; ++group) {
          u32 b[kRowBlocks][kParts][2];
          KVANT_UNROLL
          for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
            KVANT_UNROLL
            for (i32 h = 0; h < 2; ++h) {
              u32 words[kParts];
              Scaled(probs[rb][j][2 * h], probs[rb][j][2 * h + 1], plain[rb][2 * j + h], scales,
                     of_pair + h * f.groups + group, words);
              KVANT_UNROLL
              for (i32 part = 0; part < Parts(); ++part) {
                b[rb][part][h] = TransposeMatrix(words[part]);
              }
            }
          }
          if (f.TakesOffSums()) offsets_.AddGroup(group, zeros, b);
          MultiplyRun(group / f.Halves(), group % f.Halves(), low, high, b, 0);
        }
      }
    }
  }

  // Makes the output of sums: what codes have too much is taken off, and a scale that all tokens
  // have in common multiplied to it, and of_channel(d), of channels. Whether it may have lost more
  // than `limit` of itself (of a row, L2), as it does where f16 overflows: of weights of up to
  // `tokens` tokens 2^-25 each, and 2^-24 of sums that cancel. saw_any(row block, h): whether
  // its row has seen a token.
  template <class OfChannel, class SawAny>
  KVANT_DEVICE bool Complete(float scale, OfChannel of_channel, i32 tokens, SawAny saw_any,
                             float limit) {
    const CodeFormat f = Format();
    const float power = f.scale_type == kFloat16 ? F16Low(normal_) : AsFloat(normal_);
    scale = Divide(scale, power);
    // Roundings add up like random numbers, but for those of a few.
    const float count = static_cast<float>(MaxOf(MinOf(tokens, 64), tokens / 64));
    const float of_weights = count * f.LargestCode(largest_code_) * scale * 0x1p-25f;
    // Real zero points may cancel most of the sum. Weights times scales are rounded to 2^-12 of
    // each, so to some 2^-14 of the sum of several.
    const bool rounds_real = f.is_signed && f.zero == Zero::kReal;
    const float of_real = !rounds_real ? 0.f : Parts() == 1 ? 0x1p-14f : 0x1p-24f;
    // Squares are of the output over the scale: those of small values would be 0.
    const float unit = Divide(1.f, Max(Abs(scale), 0x1p-126f));
    bool loses = CodeFormat::HasNan(nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        const bool seen = saw_any(rb, h);
        float squares = 0.f, errors = 0.f;
        KVANT_UNROLL
        for (i32 run = 0; run < f.Runs(); ++run) {
          const i32 group = GroupOf(run);
          const float off = offsets_.OfCodes(rb, group, h, scale);
          const float real = offsets_.Real(rb, group, h, scale), less = off + real;
          const float error =
              Fma(Abs(real), of_real, Fma(Abs(off), 0x1p-23f, Abs(of_weights))) * unit;
          KVANT_UNROLL
          for (i32 q = run * f.PairsPerRun(); q < (run + 1) * f.PairsPerRun(); ++q) {
            float& out = out_[rb][q / 2][h + q % 2 * 2];
            if (f.Halves() == 2 && LaneIndex() / 16 == 1) {
              out = out_[rb][(q + f.Pairs()) / 2][h + q % 2 * 2];
            }
            // The scale of no tokens may be anything.
            out = seen ? Fma(out, scale / f.Unit() / f.Factor(q), -less) : 0.f;
            if (!Exists(q) || !seen) continue;
            const float by = f.output_scales ? of_channel(f.ValueChannel(q, LaneIndex() / 4)) : 1.f;
            out *= by;
            squares = Fma(out * unit, out * unit, squares);
            errors = Fma(error * by, error * by, errors);
          }
        }
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) {
          squares += ShuffleXor(squares, mask);
          errors += ShuffleXor(errors, mask);
        }
        // A sum that is not finite loses, too.
        const float allowed = limit * limit * squares;
        const bool keeps = errors <= allowed && allowed < Infinity();
        loses |= seen && !keeps;
      }
    }
    return loses;
  }

  // Stores the completed output as [8 rb + 2c + h][channel], of the warp's slice of channels.
  KVANT_DEVICE void Store(SharedAddress rows) const {
    const CodeFormat f = Format();
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4, slice = WarpSlice<T>::ValueChannel(0);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2; ++s) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          const u32 low = AsBits(out_[rb][s][h]), high = AsBits(out_[rb][s][h + 2]);
          const SharedAddress row = rows + ((8 * rb + 2 * c + h) * T::k.v_head_size + slice) * 4;
          if (!Exists(2 * s)) continue;
          if (f.bits == 16) {
            StoreShared32(row + f.ValueChannel(2 * s, g) * 4, low);
            StoreShared32(row + f.ValueChannel(2 * s + 1, g) * 4, high);
          } else {
            StoreShared64(row + f.ValueChannel(2 * s, g) * 4, {{low, high}});
          }
        }
      }
    }
  }

 private:
  static constexpr i32 kTokenTiles = Offsets::kTokenTiles;
  static constexpr i32 kWords = CeilDiv(ValueSlice(T::kMax), 8);

  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  // Whether the lane's channel of pair q is one of the head; chunks may be longer.
  KVANT_DEVICE static bool Exists(i32 q) {
    return Format().ValueChannel(q, LaneIndex() / 4) < ValueSlice(T::k);
  }
  // The group of the lane's channels of a run of pairs; one that exists.
  KVANT_DEVICE static i32 GroupOf(i32 run) {
    const i32 halves = Format().Halves();
    if (halves == 1) return run;
    return MinOf(run * halves + LaneIndex() / 16, Format().groups - 1);
  }

  // Of words of `count` scales.
  template <i32 kScales>
  KVANT_DEVICE void Normalise(i32 count, u32 (&scales)[kScales]) const {
    if (Format().scale_type != kFloat16) return;
    KVANT_UNROLL
    for (i32 i = 0; i < count / 2; ++i) scales[i] = MultiplyF16x2(scales[i], normal_);
  }

  // Probabilities (in f32, and packed) times scale `index`.
  template <i32 kScales>
  KVANT_DEVICE void Scaled(float x0, float x1, u32 packed, const u32 (&scales)[kScales], i32 index,
                           u32 (&words)[kParts]) const {
    const CodeFormat f = Format();
    if (f.scale_type == kFloat16 && Parts() == 1) {
      words[0] = index % 2 == 0 ? MultiplyByLowF16(packed, scales[index / 2])
                                : MultiplyByHighF16(packed, scales[index / 2]);
      return;
    }
    float scale = f.scale_type == kNone ? 1.f : FloatAt(f.scale_type, scales, index);
    if (f.scale_type == kFloat32 || f.scale_type == kBFloat16) scale *= AsFloat(normal_);
    PackParts(Parts(), x0 * scale, x1 * scale, words);
  }

  // Channels of a run of pairs. half: whose scales `b` has; only its lanes' sums count.
  template <i32 kColumns>
  KVANT_DEVICE void MultiplyRun(i32 run, i32 half, const u32 (&low)[kWords],
                                const u32 (&high)[kWords],
                                const u32 (&b)[kRowBlocks][kParts][kColumns], i32 at) {
    const CodeFormat f = Format();
    KVANT_UNROLL
    for (i32 q = run * f.PairsPerRun(); q < (run + 1) * f.PairsPerRun(); q += 2) {
      u32 a_low[2], a_high[2];
      f.UnpackValues(low, q, table_, a_low);
      f.UnpackValues(high, q, table_, a_high);
      f.See(a_low, largest_code_);
      f.See(a_high, largest_code_);
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 part = 0; part < Parts(); ++part) {
          float(&out)[4] = out_[rb][q / 2 + half * (f.Pairs() / 2)];
          MmaF16K16(out, a_low[0], a_low[1], a_high[0], a_high[1], b[rb][part][at],
                    b[rb][part][at + 1]);
        }
      }
    }
  }

  const CodebookTable table_;
  u32 normal_;  // the power of two on scales: twice as f16 where they are f16, else as f32
  u32 nan_marks_, largest_code_;
  // Of groups that are half a chunk, first with the scales of all chunks' lower halves, then with
  // those of the upper ones.
  float out_[kRowBlocks][2 * kChannelTiles][4];
  Offsets offsets_;
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_VALUES_H_
