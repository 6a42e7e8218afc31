// Runs of up to 8 elements: where they lie, their parameters, numbers to codes, and how both are
// loaded and stored.
//
// Codes in a codebook are looked up in shared memory, whose first bytes are the table.
#ifndef KVANT_KERNELS_CUDA_QUANTIZE_RUNS_H_
#define KVANT_KERNELS_CUDA_QUANTIZE_RUNS_H_

#include "kvant/kernels/cuda/group_parameters.h"

namespace kvant::cuda {

// Indices of an element in each array.
struct QuantizePlace {
  i64 values = 0, codes = 0, scales = 0, zero_points = 0, positions = 0;

  KVANT_DEVICE void Move(const QuantizeAxis& axis, i64 by) {
    values += axis.values * by;
    codes += axis.codes * by;
    scales += axis.scales * by;
    zero_points += axis.zero_points * by;
    positions += axis.positions * by;
  }
  // By an index into the product of axes.
  KVANT_DEVICE void Move(const QuantizeAxis* axes, i32 count, u32 index) {
    KVANT_UNROLL
    for (i32 a = count - 1; a > 0; --a) {
      const u32 extent = static_cast<u32>(axes[a].extent), rest = index / extent;
      Move(axes[a], index - rest * extent);
      index = rest;
    }
    if (count > 0) Move(axes[0], index);
  }
};

// To where the tokens of its row go; false: the row writes nothing.
template <class T>
KVANT_DEVICE bool MoveToPosition(const QuantizeParams& p, QuantizePlace& at) {
  if (T::k.positions == kNone) return true;
  const i64 wide = LoadInteger(T::k.positions, p.positions, at.positions);
  if (wide < 0 || wide > p.last_position) return false;
  const i32 position = static_cast<i32>(wide);
  i32 units = position / p.position_unit;
  if (units * p.position_unit != position) return false;
  if (T::k.pages) {
    const i32 page = units / p.page_units;
    units -= page * p.page_units;
    at.codes += p.per_page.codes * page;
    at.scales += p.per_page.scales * page;
    at.zero_points += p.per_page.zero_points * page;
  }
  at.codes += p.per_position.codes * units;
  at.scales += p.per_position.scales * units;
  at.zero_points += p.per_position.zero_points * units;
  return true;
}

// Of the run that begins at element `first` of a line; none beyond its end.
template <class T>
KVANT_DEVICE i32 ElementsOfRun(const QuantizeParams& p, i32 first) {
  if (T::k.whole_runs) return first < p.run.extent ? kRun : 0;
  return MaxOf(0, MinOf(kRun, p.run.extent - first));
}

KVANT_DEVICE bool IsAligned(const void* p, i32 bytes) {
  return reinterpret_cast<u64>(p) % static_cast<u64>(bytes) == 0;
}
// What LoadEight, and stores of 8, need.
KVANT_DEVICE constexpr i32 RunAlignment(i32 type) { return BitsOf(type) < 16 ? BitsOf(type) : 16; }

// The first n of 8 elements `stride` apart; the rest are 0. `vectors`: 8 that are dense are
// aligned.
KVANT_DEVICE void LoadRun(i32 type, const void* data, i64 index, i64 stride, i32 n, bool vectors,
                          float (&values)[kRun]) {
  if (vectors && n == kRun) return Unpack(type, LoadEight(type, data, index), values);
  KVANT_UNROLL
  for (i32 i = 0; i < kRun; ++i) {
    values[i] = i < n ? LoadElement(type, data, index + i * stride) : 0.f;
  }
}

// Floats, f32 or of 16 bits.
KVANT_DEVICE void StoreRun(i32 type, void* data, i64 index, i64 stride, i32 n, bool vectors,
                           const float (&x)[kRun]) {
  if (vectors && n == kRun && BitsOf(type) == 32) {
    auto* to = reinterpret_cast<Words4*>(static_cast<float*>(data) + index);
    Store(to, Words4{{AsBits(x[0]), AsBits(x[1]), AsBits(x[2]), AsBits(x[3])}});
    Store(to + 1, Words4{{AsBits(x[4]), AsBits(x[5]), AsBits(x[6]), AsBits(x[7])}});
  } else if (vectors && n == kRun) {
    Words4 words{};
    KVANT_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      words.v[i] =
          type == kFloat16 ? PackF16(x[2 * i], x[2 * i + 1]) : PackBF16(x[2 * i], x[2 * i + 1]);
    }
    Store(reinterpret_cast<Words4*>(static_cast<u16*>(data) + index), words);
  } else {
    KVANT_UNROLL
    for (i32 i = 0; i < kRun; ++i) {
      if (i < n) StoreElement(type, data, index + i * stride, x[i]);
    }
  }
}

// Bits of a byte, the rest of which stays. Nobody else may write to it.
KVANT_DEVICE void StoreBits(u8* byte, u32 bits, u32 mask) {
  Store(byte, static_cast<u8>((LoadCoherent(byte) & ~mask) | (bits & mask)));
}

// 8 codes of up to 8 bits, packed.
struct PackedRun {
  u32 words[2] = {0, 0};

  KVANT_DEVICE void Set(i32 bits, i32 i, u32 code) {
    words[i * bits / 32] |= code << i * bits % 32;
  }
};

// The first n of 8 codes. Those of less than a byte begin with one and are dense.
KVANT_DEVICE void StoreCodes(i32 type, void* data, i64 index, i64 stride, i32 n, bool vectors,
                             const PackedRun& run) {
  const i32 bits = BitsOf(type);
  u8* const to = static_cast<u8*>(data) + BytesTo(bits, index);
  if (vectors && n == kRun) {
    if (bits == 8) {
      Store(reinterpret_cast<Words2*>(to), Words2{{run.words[0], run.words[1]}});
    } else if (bits == 4) {
      Store(reinterpret_cast<u32*>(to), run.words[0]);
    } else {
      Store(reinterpret_cast<u16*>(to), static_cast<u16>(run.words[0]));
    }
    return;
  }
  KVANT_UNROLL
  for (i32 byte = 0; byte < bits; ++byte) {
    const i32 per_byte = 8 / bits, valid = n - byte * per_byte;
    const u32 value = run.words[byte / 4] >> byte % 4 * 8;
    if (valid >= per_byte) {
      Store(to + (bits == 8 ? byte * stride : byte), static_cast<u8>(value));
    } else if (valid > 0) {
      StoreBits(to + byte, value, (1u << valid * bits) - 1);
    }
  }
}

// By its kind; the other number is 0.
struct ZeroPoint {
  i32 code;
  float real;
};

template <class T>
KVANT_DEVICE float LoadScale(const QuantizeParams& p, const QuantizePlace& at) {
  return T::k.scales == kNone ? 1.f : LoadElement(T::k.scales, p.scales, at.scales);
}
template <class T>
KVANT_DEVICE ZeroPoint LoadZeroPoint(const QuantizeParams& p, const QuantizePlace& at) {
  const i32 type = T::k.zero_points;
  if (T::k.zero_point_kind == kRealZeroPoints) {
    return {0, LoadElement(type, p.zero_points, at.zero_points)};
  }
  if (T::k.zero_point_kind == kNoZeroPoints) return {0, 0.f};
  return {static_cast<i32>(LoadInteger(type, p.zero_points, at.zero_points)), 0.f};
}

// Of at least 8 bits.
template <class T>
KVANT_DEVICE void StoreParameters(const QuantizeParams& p, const QuantizePlace& at,
                                  const ComputedParameters& parameters) {
  StoreElement(T::k.scales, p.scales, at.scales, parameters.scale);
  if (T::k.zero_point_kind == kNoZeroPoints || BitsOf(T::k.zero_points) < 8) return;
  if (T::k.zero_points == kInt32) {
    Store(static_cast<i32*>(p.zero_points) + at.zero_points,
          static_cast<i32>(parameters.zero_point));
  } else {
    StoreElement(T::k.zero_points, p.zero_points, at.zero_points, parameters.zero_point);
  }
}

// The table of a codebook, to shared memory; by all threads of the block.
template <class T>
KVANT_DEVICE void LoadCodebook(const QuantizeParams& p, bool dequantizes) {
  const i32 words = CodebookBytes(T::k, dequantizes) / 4;
  if (words == 0) return;
  KVANT_NO_UNROLL
  for (i32 i = ThreadIndex(); i < words; i += BlockThreads()) {
    StoreShared32(SharedBase() + 4 * i, Load(p.codebook + i));
  }
  BlockSync();
}

// Numbers of a group to codes: round(x / scale) + zero point, or round((x + zero point) / scale).
template <class T>
class Coder {
 public:
  Coder() = default;
  KVANT_DEVICE Coder(float scale, const ZeroPoint& zero_point)
      : scale_(scale), reciprocal_(Divide(1.f, scale)), zero_point_(zero_point) {
    const float magnitude = Abs(scale);
    // Of large numbers halves are taken, whose sum with the zero point f32 holds.
    if (T::k.zero_point_kind == kRealZeroPoints && magnitude >= 1.f) {
      half_ = .5f;
      scale_ *= half_;
      reciprocal_ = Divide(1.f, scale_);
      zero_point_.real *= half_;
    }
    // Else the remainder of a quotient, or what it is multiplied by, may be out of f32's range.
    divides_ = !(magnitude > 0x1p-100f && magnitude < 0x1p100f);
    if (!IsF8(T::k.codes)) {
      const float zero = IsFar() ? 0.f : static_cast<float>(zero_point.code);
      lowest_ = static_cast<float>(LowestCode(T::k.codes)) - zero;
      highest_ = static_cast<float>(HighestCode(T::k.codes)) - zero;
    }
  }

  KVANT_DEVICE explicit Coder(const ComputedParameters& p)
      : Coder(p.scale, T::k.zero_point_kind == kRealZeroPoints
                           ? ZeroPoint{0, p.zero_point}
                           : ZeroPoint{static_cast<i32>(p.zero_point), 0.f}) {}

  // Whether Code must divide: hoisted, so that the 8 of a run branch once.
  KVANT_DEVICE bool divides() const { return divides_ || IsFar(); }

  KVANT_DEVICE u32 Code(float x, bool divides) const {
    const float number = x;
    if (T::k.zero_point_kind == kRealZeroPoints) x = Fma(x, half_, zero_point_.real);
    if (divides && IsFar()) return FarCode(x);
    const float q = divides ? Divide(x, scale_) : Quotient(x);
    if (T::k.codebook_bits > 0) return q != q ? 0 : NearestEntry(q);
    if (IsF8(T::k.codes)) {
      const bool added = T::k.zero_point_kind == kCodeZeroPoints;
      const float code = added ? q + static_cast<float>(zero_point_.code) : q;
      return FloatToF8(SaturateF8(T::k.codes, number, code), T::k.codes);
    }
    // Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits.
    const float within = Min(Max(q, lowest_), highest_);
    const u32 code = AsBits(within + 12582912.f) + static_cast<u32>(zero_point_.code);
    // What is computed from finite numbers is finite.
    const bool may_be_nan = divides || !T::k.computes;
    return may_be_nan && q != q ? 0 : code & Mask();
  }

  // Down the tree of thresholds: a bank each, up to 32 nodes.
  KVANT_DEVICE static u32 NearestEntry(float q) {
    const SharedAddress nodes = SharedBase();
    i32 node = 1;
    KVANT_UNROLL
    for (i32 level = 0; level < T::k.codebook_bits; ++level) {
      node = 2 * node + (q > AsFloat(LoadShared32(nodes + 4 * node)) ? 1 : 0);
    }
    return LoadShared32(nodes + 4 * node);
  }

 private:
  static constexpr i32 kLargestZeroPoint = 1 << 15;
  static constexpr float kLargestQuotient = 16777216.f;

  KVANT_DEVICE static u32 Mask() { return (1u << BitsOf(T::k.codes)) - 1; }
  // A given zero point so large that f32 would not hold the sum with a quotient.
  KVANT_DEVICE bool IsFar() const {
    return !T::k.computes && T::k.zero_points == kInt32 && !IsF8(T::k.codes) &&
           (zero_point_.code > kLargestZeroPoint || zero_point_.code < -kLargestZeroPoint);
  }

  // x / scale, to the bit: a product with the reciprocal, corrected by its remainder.
  KVANT_DEVICE float Quotient(float x) const {
    const float near = x * reciprocal_;
    const float exact = Fma(Fma(-near, scale_, x), reciprocal_, near);
    // The quotient may be infinite, and the remainder NaN.
    return Abs(near) < kLargestQuotient ? exact : near;
  }

  KVANT_DEVICE u32 FarCode(float x) const {
    const double q = static_cast<double>(x) / scale_;
    if (q != q) return 0;
    const double code = RoundToInteger(Clamp(q, -0x1p40, 0x1p40)) + zero_point_.code;
    const i32 within =
        static_cast<i32>(Clamp(code, LowestCode(T::k.codes), HighestCode(T::k.codes)));
    return static_cast<u32>(within) & Mask();
  }

  float scale_, reciprocal_, lowest_, highest_, half_ = 1.f;
  ZeroPoint zero_point_;
  bool divides_;
};

// `varies`: each element has a coder of its own.
template <class T>
KVANT_DEVICE PackedRun Encode(const Coder<T> (&coders)[kRun], bool varies, const float (&x)[kRun]) {
  bool divides = coders[0].divides();
  if (varies) {
    KVANT_UNROLL
    for (i32 i = 1; i < kRun; ++i) divides |= coders[i].divides();
  }
  PackedRun run;
  if (divides) {
    KVANT_UNROLL
    for (i32 i = 0; i < kRun; ++i) {
      run.Set(BitsOf(T::k.codes), i, coders[varies ? i : 0].Code(x[i], true));
    }
  } else {
    KVANT_UNROLL
    for (i32 i = 0; i < kRun; ++i) {
      run.Set(BitsOf(T::k.codes), i, coders[varies ? i : 0].Code(x[i], false));
    }
  }
  return run;
}

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_QUANTIZE_RUNS_H_
