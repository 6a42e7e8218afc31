// The output of a warp: V transposed, as packed codes, is the A operand of the mma, 16 channels;
// probabilities are B, 8 rows of queries. Scales of V go on the probabilities, so where there are
// groups every group of channels has its own B.
//
//   C, one per 16 channels (pairs 2s, 2s + 1) and 8 rows of queries
//     registers 0, 1:  channel ValueChannel(2s, g),      queries 2c, 2c + 1
//     registers 2, 3:  channel ValueChannel(2s + 1, g),  queries 2c, 2c + 1
//
// What codes have too much, zero points and bias, is summed apart and taken off at the end:
//
//   real, by row      in f32: every lane its own tokens; in groups too where they are f32
//   integer, by row   an mma with the zero point in all rows of A, B as for codes
//   real, in groups   an mma for all groups, channel by group: B is the probabilities alone, A has
//                     the zero point. The groups of U = 8 / groups tokens are rows of a block of A.
//                     Row block 2j is in A's rows 0 .. 7, 2j + 1 in rows 8 .. 15; only their own
//                     tokens' rows count.
//   integer and       an mma for each group with its B, which A takes to row `group`: what a token
//   bias, in groups   of zeros adds is taken off to the last bit, whatever its scale
//
// Scales are normalised: by a power of two, those of a warp's first tile are about 1, so that f16
// has room for the larger and bits for the smaller.
#ifndef KVANT_KERNELS_CUDA_CODES_VALUES_H_
#define KVANT_KERNELS_CUDA_CODES_VALUES_H_

#include "kvant/kernels/cuda/codes_keys.h"

namespace kvant::cuda {

template <class T>
class CodesValues {
 public:
  static constexpr i32 kRowBlocks = T::kMax.row_blocks;
  static constexpr i32 kParts = PartsOf(T::kMax);
  static constexpr i32 kChannelTiles = CeilDiv(T::kMax.v_head_size, 64) * 4;
  using Scores = typename CodesKeys<T>::Scores;

  KVANT_DEVICE static CodeTile Tile() { return CodesRing<T>::Layout().v; }
  KVANT_DEVICE static CodeFormat Format() { return Tile().format; }

  // Of powers of two on scales: in f16, and in f32.
  static constexpr i32 kMostExponent = 15, kLeastExponent = -14, kFarExponent = 40;

  // zero_point: what all tokens have in common.
  KVANT_DEVICE CodesValues(const AttentionParams& p, float zero_point)
      : entries_(CodebookWords::Of(T::k.v[0], p.v[0])) {
    const float both = zero_point + static_cast<float>(Format().Bias());
    common_ = PackF16(both, both);
  }

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
    i32 exponent = static_cast<i32>(AsBits(scale) >> 23 & 255) - 127;
    exponent = MaxOf(-kFarExponent, MinOf(kFarExponent, exponent));
    KVANT_UNROLL
    for (i32 mask = 1; mask < 32; mask *= 2) {
      exponent += static_cast<i32>(ShuffleXor(static_cast<u32>(exponent), mask));
    }
    return -exponent / 32;
  }

  // exponent: of the power of two by which scales are normalised.
  KVANT_DEVICE void Clear(i32 exponent) {
    const bool in_f16 = Format().scale_type == kFloat16;
    if (in_f16) exponent = MaxOf(kLeastExponent, MinOf(kMostExponent, exponent));
    const float power = AsFloat(static_cast<u32>(127 + exponent) << 23);
    normal_ = in_f16 ? PackF16(power, power) : AsBits(power);
    nan_marks_ = 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2 * Format().Halves(); ++s) Zero4(out_[rb][s]);
      Zero4(zero_[rb]);
      KVANT_UNROLL
      for (i32 n = 0; n < Biases(); ++n) Zero4(bias_[rb][n]);
      KVANT_UNROLL
      for (i32 n = 0; n < Format().groups; ++n) real_[rb][n][0] = real_[rb][n][1] = 0.f;
    }
  }

  // Output of queries 2c + h of row block rb times `factor`.
  KVANT_DEVICE void Shrink(i32 rb, i32 h, float factor) {
    KVANT_UNROLL
    for (i32 e = h; e < 4; e += 2) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2 * Format().Halves(); ++s) out_[rb][s][e] *= factor;
      zero_[rb][e] *= factor;
      KVANT_UNROLL
      for (i32 n = 0; n < Biases(); ++n) bias_[rb][n][e] *= factor;
    }
    KVANT_UNROLL
    for (i32 n = 0; n < Format().groups; ++n) real_[rb][n][h] *= factor;
  }

  // Takes a tile in. at: the lane's matrix row in the stage's V; stage: where the stage begins.
  KVANT_DEVICE void Add(SharedAddress at, SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 n = T::k.warp_tile / 8, g = LaneIndex() / 4;
    u32 scales[8], bytes[2][4];
    u32 plain[kRowBlocks][kTokenTiles];            // probabilities, as they are
    u32 columns[kRowBlocks][kParts][kTokenTiles];  // B operands; in groups, of unscaled ones
    if (f.groups == 1 && f.scale_type != kNone) {
      l.LoadOfRow(stage + l.sides[1].offset, BitsOf(f.scale_type), g, scales);
      Normalise(n, scales);
    }
    if (f.zero == Zero::kReal && !RealByMma()) AddReals(stage, probs);
    if (f.groups == 1 && f.zero == Zero::kInteger) LoadZeroBytes(stage, bytes);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 i = 0; i < n; ++i) {
        const float x0 = probs[rb][i / 2][i % 2 * 2], x1 = probs[rb][i / 2][i % 2 * 2 + 1];
        plain[rb][i] = PackF16(x0, x1);
        u32 words[kParts] = {plain[rb][i]};
        if (f.groups == 1) Scaled(x0, x1, plain[rb][i], scales, i, words);
        if (f.groups > 1 && !RealByMma()) continue;
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
      f.MarkNan(low, f.Chunks(), nan_marks_);
      f.MarkNan(high, f.Chunks(), nan_marks_);
      if (f.groups == 1) {
        if (f.TakesOffSums()) AddZeroRows(bytes, j, columns);
        MultiplyRun(0, 0, low, high, columns, 2 * j);
      } else {
        if (RealByMma()) AddRealGroups(stage, j, columns);
        u32 zeros[2];
        KVANT_UNROLL
        for (i32 b = 0; b < 2; ++b) zeros[b] = GroupZeros(stage, 2 * j + b);
        const i32 bytes_of_two = 2 * f.groups * f.ScaleBytes();
        u32 pair[16];
        LoadSharedWords(stage + l.sides[1].offset + l.Token(g, 2 * j) / 2 * bytes_of_two,
                        bytes_of_two / 4, pair);
        Normalise(2 * f.groups, pair);
        KVANT_UNROLL
        for (i32 group = 0; group < f.groups; ++group) {
          u32 b[kRowBlocks][kParts][2];
          KVANT_UNROLL
          for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
            KVANT_UNROLL
            for (i32 h = 0; h < 2; ++h) {
              u32 words[kParts];
              Scaled(probs[rb][j][2 * h], probs[rb][j][2 * h + 1], plain[rb][2 * j + h], pair,
                     h * f.groups + group, words);
              KVANT_UNROLL
              for (i32 part = 0; part < Parts(); ++part) {
                b[rb][part][h] = TransposeMatrix(words[part]);
              }
            }
          }
          if (f.TakesOffSums()) AddGroupZeros(group, zeros, b);
          MultiplyRun(group / f.Halves(), group % f.Halves(), low, high, b, 0);
        }
      }
    }
  }

  // Makes the output of sums: what codes have too much is taken off, and a scale that all tokens
  // have in common multiplied to it, and of_channel(d), of channels. Whether it may have lost more
  // than `limit` of itself (of a row, L2), as it does where f16 overflows: of weights of up to
  // `tokens` tokens 2^-25 each, and 2^-24 of sums that cancel. any: rows that have seen a token.
  template <class OfChannel>
  KVANT_DEVICE bool Complete(float scale, OfChannel of_channel, i32 tokens,
                             const bool (&any)[kRowBlocks][2], float limit) {
    const CodeFormat f = Format();
    const float power = f.scale_type == kFloat16 ? F16Low(normal_) : AsFloat(normal_);
    scale = Divide(scale, power);
    // Roundings add up like random numbers, but for those of a few.
    const float count = static_cast<float>(MaxOf(MinOf(tokens, 64), tokens / 64));
    const float of_weights = count * f.LargestCode() * scale * 0x1p-25f;
    bool loses = CodeFormat::HasNan(nan_marks_);
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 h = 0; h < 2; ++h) {
        float squares = 0.f, errors = 0.f;
        KVANT_UNROLL
        for (i32 run = 0; run < f.Runs(); ++run) {
          const i32 group = GroupOf(run);
          const float off = OffSums(rb, group, h, scale);
          const float less = Fma(RealZero(rb, group, h), RealNormalised() ? scale : 1.f, off);
          const float error = Fma(Abs(off), 0x1p-23f, Abs(of_weights));
          KVANT_UNROLL
          for (i32 q = run * f.PairsPerRun(); q < (run + 1) * f.PairsPerRun(); ++q) {
            float& out = out_[rb][q / 2][h + q % 2 * 2];
            if (f.Halves() == 2 && LaneIndex() / 16 == 1) {
              out = out_[rb][(q + f.Pairs()) / 2][h + q % 2 * 2];
            }
            out = Fma(out, scale / f.Unit() / f.Factor(q), -less);
            if (!Exists(q)) continue;
            const float by = f.output_scales ? of_channel(f.ValueChannel(q, LaneIndex() / 4)) : 1.f;
            out *= by;
            squares = Fma(out, out, squares);
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
        loses |= any[rb][h] && !keeps;
      }
    }
    return loses;
  }

  // Stores the completed output as [8 rb + 2c + h][channel].
  KVANT_DEVICE void Store(SharedAddress rows) const {
    const CodeFormat f = Format();
    const i32 g = LaneIndex() / 4, c = LaneIndex() % 4;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 s = 0; s < Format().Pairs() / 2; ++s) {
        KVANT_UNROLL
        for (i32 h = 0; h < 2; ++h) {
          const u32 low = AsBits(out_[rb][s][h]), high = AsBits(out_[rb][s][h + 2]);
          const SharedAddress row = rows + (8 * rb + 2 * c + h) * T::k.v_head_size * 4;
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
  static constexpr i32 kTokenTiles = T::kMax.warp_tile / 8;
  static constexpr i32 kWords = CeilDiv(T::kMax.v_head_size, 8);

  KVANT_DEVICE static i32 Parts() { return PartsOf(T::k); }
  // Sums of what is taken off groups: each group's in its own row, of sums of its own where
  // registers are left, else of one for all.
  KVANT_DEVICE static i32 Biases() {
    const i32 groups = Format().groups;
    return groups * T::k.row_blocks <= 4 && !HasPages(T::k) ? groups : 1;
  }
  // Whether the lane's channel of pair q is one of the head; chunks may be longer.
  KVANT_DEVICE static bool Exists(i32 q) {
    return Format().ValueChannel(q, LaneIndex() / 4) < T::k.v_head_size;
  }
  // The group of the lane's channels of a run of pairs; one that exists.
  KVANT_DEVICE static i32 GroupOf(i32 run) {
    const i32 halves = Format().Halves();
    if (halves == 1) return run;
    return MinOf(run * halves + LaneIndex() / 16, Format().groups - 1);
  }
  KVANT_DEVICE static void Zero4(float (&c)[4]) {
    KVANT_UNROLL
    for (i32 e = 0; e < 4; ++e) c[e] = 0.f;
  }
  KVANT_DEVICE static bool RealByMma() { return Format().RealByMma(Parts()); }

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
      const u32 a0 = f.Unpack(low, q, entries_), a1 = f.Unpack(low, q + 1, entries_);
      const u32 a2 = f.Unpack(high, q, entries_), a3 = f.Unpack(high, q + 1, entries_);
      KVANT_UNROLL
      for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
        KVANT_UNROLL
        for (i32 part = 0; part < Parts(); ++part) {
          float(&out)[4] = out_[rb][q / 2 + half * (f.Pairs() / 2)];
          MmaF16K16(out, a0, a1, a2, a3, b[rb][part][at], b[rb][part][at + 1]);
        }
      }
    }
  }

  // Every lane those of its own tokens.
  KVANT_DEVICE void AddReals(SharedAddress stage, const Scores& probs) {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 bits = 2 * f.groups * f.ZeroBits();
    KVANT_UNROLL
    for (i32 j = 0; j < T::k.warp_tile / 16; ++j) {
      u32 zeros[16];
      const i32 token = l.Token(LaneIndex() / 4, 2 * j);
      LoadSharedBits(stage + l.sides[3].offset + static_cast<u32>(token * bits / 16), bits, zeros);
      KVANT_UNROLL
      for (i32 i = 0; i < 2 * f.groups; ++i) {
        const float zero = FloatAt(f.zero_type, zeros, i);
        KVANT_UNROLL
        for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
          KVANT_UNROLL
          for (i32 h = 0; h < 2; ++h) {
            float& sum = real_[rb][i % f.groups][h];
            sum = Fma(probs[rb][j][i / f.groups * 2 + h], zero, sum);
          }
        }
      }
    }
  }

  // Row-wise zero points of the tokens of g' = 2c and 2c + 1.
  KVANT_DEVICE static void LoadZeroBytes(SharedAddress stage, u32 (&bytes)[2][4]) {
    const CodesLayout l = CodesRing<T>::Layout();
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = LaneIndex() % 4 * 2 + h;
      l.LoadOfRow(stage + l.sides[3].offset, Format().ZeroBits(), row, bytes[h]);
    }
  }

  // Whether zero points come with the same bias as codes, and so may stay subnormal.
  KVANT_DEVICE static bool ZeroAsBits() {
    const CodeFormat f = Format();
    return f.subnormal && !f.common_zero && (f.zero != Zero::kInteger || f.ZeroBias() == f.Bias());
  }
  // Zero points, one in each half, as what is to be taken off codes.
  KVANT_DEVICE static u32 ZeroNumber(u32 x) {
    const CodeFormat f = Format();
    const u32 flip = 0x64006400u + static_cast<u32>(f.ZeroBias()) * 0x10001u;
    const u32 base = static_cast<u32>(1024 + f.ZeroBias() - f.Bias());
    // As an f16 1024 .. 2047 is its bits from 0x6400 on; below it they are twice as dense.
    const u32 half = base >= 1024 ? 0xe400u + (base - 1024) : 0xe000u + (base - 512) * 2;
    return AddF16x2(x ^ flip, half * 0x10001u);
  }

  KVANT_DEVICE void AddZeroRows(const u32 (&bytes)[2][4], i32 j,
                                const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const CodeFormat f = Format();
    u32 a[2];
    KVANT_UNROLL
    for (i32 h = 0; h < 2; ++h) {
      if (f.zero != Zero::kInteger) {
        a[h] = f.common_zero ? common_ : static_cast<u32>(f.Bias()) * 0x10001u;
        continue;
      }
      // Two zero points of 4 bits share a byte.
      const i32 i = 2 * j + h, byte = f.ZeroBits() == 8 ? i : i / 2;
      const u32 x = Permute(bytes[0][byte / 4], bytes[1][byte / 4],
                            static_cast<u32>(0x0400 + 0x0101 * (byte % 4)));
      a[h] = ZeroPair(f.ZeroBits() == 8 ? x & 0x00ff00ffu : x >> (i % 2 * 4) & 0x000f000fu);
    }
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(bias_[rb][0], a[0], a[0], a[1], a[1], b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }
  // x: a zero point in each half.
  KVANT_DEVICE static u32 ZeroPair(u32 x) {
    if (!ZeroAsBits()) return ZeroNumber(x);
    return x ^ static_cast<u32>(Format().ZeroBias()) * 0x10001u;
  }

  // Tokens whose groups are the 8 rows of a block of A.
  KVANT_DEVICE static i32 UnitTokens() { return 8 / Format().groups; }
  // Whether real zero points go into f16 by the power of two of scales.
  KVANT_DEVICE static bool RealNormalised() {
    return RealByMma() && Format().zero_type == kBFloat16;
  }

  // The real zero point of element g of the `unit`-th UnitTokens() of each of the lanes g' = 2c and
  // 2c + 1.
  KVANT_DEVICE u32 RealUnit(SharedAddress stage, i32 unit) const {
    const CodeFormat f = Format();
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 c = LaneIndex() % 4, of_run = l.v.run * f.groups;
    // The lanes' g are more than elements where a tile is small, or not all rows are needed.
    const i32 g = MinOf(LaneIndex() / 4, MinOf(UnitTokens() * f.groups, of_run) - 1);
    const i32 index = l.Token(2 * c, unit * UnitTokens()) * f.groups + g;
    const SharedAddress zeros = stage + l.sides[3].offset + index * f.ZeroBits() / 8;
    const u32 pair = Permute(LoadShared16(zeros), LoadShared16(zeros + of_run * 2), 0x5410);
    if (!RealNormalised()) return pair;
    return PackF16(BF16Low(pair) * AsFloat(normal_), BF16High(pair) * AsFloat(normal_));
  }

  KVANT_DEVICE void AddRealGroups(SharedAddress stage, i32 j,
                                  const u32 (&b)[kRowBlocks][kParts][kTokenTiles]) {
    const i32 tokens = UnitTokens();
    u32 low = RealUnit(stage, 2 * j / tokens), high = low;
    if (tokens == 1) high = RealUnit(stage, 2 * j + 1);
    // Of four tokens two have rows that are other ones' with the next j.
    if (tokens == 4) low = high = LaneIndex() / 16 == j % 2 ? low : 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(zero_[rb], low, 0, 0, high, b[rb][part][2 * j], b[rb][part][2 * j + 1]);
      }
    }
  }

  // What codes have too much in group g of tokens 2c, 2c + 1 of row block i.
  KVANT_DEVICE static u32 GroupZeros(SharedAddress stage, i32 i) {
    const CodeFormat f = Format();
    if (f.zero != Zero::kInteger) return static_cast<u32>(f.Bias()) * 0x10001u;
    const CodesLayout l = CodesRing<T>::Layout();
    const i32 bits = f.ZeroBits(), group = MinOf(LaneIndex() / 4, f.groups - 1);
    const i32 at = l.Token(LaneIndex() % 4 * 2, i) * f.groups + group;
    const i32 of_lane = l.v.run * f.groups * bits / 8;  // from g' = 2c to 2c + 1
    const SharedAddress zeros = stage + l.sides[3].offset + at * bits / 8;
    const u32 pair = Permute(LoadShared8(zeros), LoadShared8(zeros + of_lane), 0x5410);
    return ZeroPair(bits == 8 ? pair : pair >> (at % 2 * 4) & 0x000f000fu);
  }

  KVANT_DEVICE void AddGroupZeros(i32 group, const u32 (&zeros)[2],
                                  const u32 (&b)[kRowBlocks][kParts][2]) {
    const bool shares = Biases() == 1, mine = !shares || LaneIndex() / 4 == group;
    const u32 low = mine ? zeros[0] : 0, high = mine ? zeros[1] : 0;
    KVANT_UNROLL
    for (i32 rb = 0; rb < T::k.row_blocks; ++rb) {
      float(&sum)[4] = bias_[rb][shares ? 0 : group];
      KVANT_UNROLL
      for (i32 part = 0; part < Parts(); ++part) {
        MmaF16K16(sum, low, 0, high, 0, b[rb][part][0], b[rb][part][1]);
      }
    }
  }

  // What is to be taken off the sums of a group, of queries 2c + h.
  KVANT_DEVICE float OffSums(i32 rb, i32 group, i32 h, float scale) const {
    const CodeFormat f = Format();
    if (!f.TakesOffSums()) return 0.f;
    float sum = bias_[rb][0][h];
    KVANT_UNROLL
    for (i32 n = 0; n < Biases() && f.groups > 1; ++n) {
      const float own = Shuffle(bias_[rb][n][h], group * 4 + LaneIndex() % 4);
      sum = Biases() == 1 || n == group ? own : sum;
    }
    return sum * (ZeroAsBits() ? scale / f.Unit() : scale);
  }
  KVANT_DEVICE float RealZero(i32 rb, i32 group, i32 h) const {
    const CodeFormat f = Format();
    if (f.zero != Zero::kReal) return 0.f;
    float less = 0.f;
    if (!RealByMma()) {
      KVANT_UNROLL
      for (i32 n = 0; n < f.groups; ++n) {
        float sum = real_[rb][n][h];
        KVANT_UNROLL
        for (i32 mask = 4; mask < 32; mask *= 2) sum += ShuffleXor(sum, mask);
        less = n == group ? sum : less;
      }
      return less;
    }
    const i32 tokens = UnitTokens();
    KVANT_UNROLL
    for (i32 token = 0; token < MaxOf(tokens, 2); ++token) {
      const i32 row = token % tokens * f.groups + group;
      less += Shuffle(zero_[rb][h + token % 2 * 2], row * 4 + LaneIndex() % 4);
    }
    return less;
  }

  const CodebookWords entries_;
  u32 common_;  // what is to be taken off all codes
  u32 normal_;  // the power of two on scales: twice as f16 where they are f16, else as f32
  u32 nan_marks_;
  // Of groups that are half a chunk, first with the scales of all chunks' lower halves, then with
  // those of the upper ones.
  float out_[kRowBlocks][2 * kChannelTiles][4];
  float zero_[kRowBlocks][4], bias_[kRowBlocks][4][4], real_[kRowBlocks][kMaxGroups][2];
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_CODES_VALUES_H_
