// DynamicQuantize, and Append:
//   QuantizeRows      groups that are short runs: a warp, or part of one, has each in registers
//   QuantizeTiles     groups of any size and shape: a block has a tile of them, and reads it twice
//   QuantizeElements  codes alone, scales and zero points being given, or conversions
//
// A byte of codes has one owner, so that those of less than a byte can be written side by side.
#ifndef KVANT_KERNELS_CUDA_QUANTIZE_H_
#define KVANT_KERNELS_CUDA_QUANTIZE_H_

#include "kvant/kernels/cuda/ggml_groups.h"

namespace kvant::cuda {

KVANT_DEVICE bool HasValueVectors(const QuantizeTraits& t, const QuantizeParams& p) {
  return t.value_vectors && IsAligned(p.values, RunAlignment(t.values));
}
KVANT_DEVICE bool HasCodeVectors(const QuantizeTraits& t, const QuantizeParams& p) {
  return t.code_vectors && IsAligned(p.codes, RunAlignment(t.codes));
}
// Threads of the grid that come before this one.
KVANT_DEVICE i64 ThreadOfGrid() { return BlockIndex() * BlockThreads() + ThreadIndex(); }

// Groups are runs of up to 8 * kMaxLaneRuns * 32 elements; a lane's runs lie `lanes` runs apart.
template <class T>
class QuantizeRows {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) {
    const i32 lanes = T::k.lanes, lane = LaneIndex() % lanes;
    const i64 first = ThreadOfGrid() / 32 * (32 / lanes);  // the warp's
    const i64 group = first + LaneIndex() / lanes;
    const bool inside = group < p.count;
    LoadCodebook<T>(p, false);
    QuantizePlace at;
    at.Move(p.outer, T::k.outer_axes, inside ? static_cast<u32>(group) : 0);

    float x[T::kMax.lane_runs][kRun];
    if (HasValueVectors(T::k, p)) {
      LoadRuns(p, at, inside, true, x);
    } else {
      LoadRuns(p, at, inside, false, x);
    }
    const bool live = MoveToPosition<T>(p, at) && inside;
    RangeFinder<T> found;
    i32 counts[T::kMax.lane_runs];
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      const i32 n = counts[r] = inside ? Elements(p, r) : 0;
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        if (i < n) found.Add(x[r][i]);
      }
    }
    ValueRange range = found.Result();
    KVANT_UNROLL
    for (i32 mask = lanes / 2; mask > 0; mask /= 2) {
      range.Join({ShuffleXor(range.min, mask), ShuffleXor(range.max, mask)});
    }
    if (T::k.ggml != kNoGgml) {
      const GgmlGroup<T> group_codes(x, counts, range);
      if (!live) return;
      if (lane == 0) StoreParameters<T>(p, at, group_codes.parameters());
      StoreRuns(p, at, x, [&](const float(&run)[kRun]) { return group_codes.Encode(run); });
      return;
    }
    const ComputedParameters parameters = ParametersOf<T>(range, p);
    if (live && lane == 0) StoreParameters<T>(p, at, parameters);
    if (T::k.zero_point_kind == kCodeZeroPoints && BitsOf(T::k.zero_points) < 8) {
      StoreZeroPoints(p, first, live ? at.zero_points : -1,
                      static_cast<u32>(static_cast<i32>(parameters.zero_point)));
    }
    if (!live) return;
    Coder<T> coders[kRun];
    coders[0] = Coder<T>(parameters);
    StoreRuns(p, at, x, [&](const float(&run)[kRun]) { return Encode<T>(coders, false, run); });
  }

 private:
  // Of the lane's run r: its first element, and how many there are.
  KVANT_DEVICE static i32 First(i32 r) {
    return (r * T::k.lanes + LaneIndex() % T::k.lanes) * kRun;
  }
  KVANT_DEVICE static i32 Elements(const QuantizeParams& p, i32 r) {
    return ElementsOfRun<T>(p, First(r));
  }

  // All loads before anything needs one.
  KVANT_DEVICE static void LoadRuns(const QuantizeParams& p, const QuantizePlace& at, bool live,
                                    bool vectors, float (&x)[T::kMax.lane_runs][kRun]) {
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      i32 n = live ? Elements(p, r) : 0, first = First(r);
      if (vectors && T::k.whole_runs && n == 0) {
        // Rather than branch: a run that there is.
        n = kRun;
        first = 0;
      }
      LoadRun(T::k.values, p.values, at.values + first * p.run.values, p.run.values, n, vectors,
              x[r]);
    }
  }

  template <class EncodeRun>
  KVANT_DEVICE static void StoreRuns(const QuantizeParams& p, const QuantizePlace& at,
                                     const float (&x)[T::kMax.lane_runs][kRun], EncodeRun encode) {
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      if (Elements(p, r) == 0) continue;
      StoreCodes(T::k.codes, p.codes, at.codes + First(r) * p.run.codes, p.run.codes,
                 Elements(p, r), HasCodeVectors(T::k, p), encode(x[r]));
    }
  }

  // Those that share a byte are of neighbouring groups, which a warp has all of. `place`: of the
  // lane's group; negative: it has none.
  KVANT_DEVICE static void StoreZeroPoints(const QuantizeParams& p, i64 first, i64 place,
                                           u32 mine) {
    const i32 bits = BitsOf(T::k.zero_points), per_byte = 8 / bits;
    u32 byte = 0;
    KVANT_UNROLL
    for (i32 i = 0; i < per_byte; ++i) {
      const u32 code = Shuffle(mine, (LaneIndex() * per_byte + i) * T::k.lanes % 32);
      byte |= (code & ((1u << bits) - 1)) << i * bits;
    }
    const i32 from = LaneIndex() * per_byte * T::k.lanes % 32;
    const u32 low = Shuffle(static_cast<u32>(place), from);
    const u32 high = Shuffle(static_cast<u32>(place >> 32), from);
    const i64 begin = static_cast<i64>(static_cast<u64>(high) << 32 | low);
    const i64 rest = p.count - (first + LaneIndex() * per_byte);
    if (LaneIndex() * per_byte * T::k.lanes >= 32 || begin < 0) return;
    u8* const to = static_cast<u8*>(p.zero_points) + begin / per_byte;
    if (rest >= per_byte) {
      Store(to, static_cast<u8>(byte));
    } else {
      StoreBits(to, byte, (1u << static_cast<i32>(rest) * bits) - 1);
    }
  }
};

// Shared memory of QuantizeTiles, behind the codebook: ranges of warps, or of columns by row; then
// columns' parameters.
KVANT_DEVICE constexpr i32 QuantizeTilesSharedBytes(const QuantizeTraits& t, i32 threads) {
  return t.run_in_group ? threads / 32 * 8 : threads * kRun * 8 + t.columns * kRun * 8;
}

// A tile is a group, or `columns` runs of groups that lie side by side. It consists of lines, and
// of runs of these: a group's threads take one run after another; of columns, thread (x, y) takes
// run x of lines y, y + rows, ...
template <class T>
class QuantizeTiles {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) { QuantizeTiles(p).Run(); }

 private:
  KVANT_DEVICE explicit QuantizeTiles(const QuantizeParams& p)
      : p_(p), shared_(SharedBase() + CodebookBytes(T::k, false)) {
    part_ = static_cast<u32>(BlockIndex()) % p.parts;
    tile_ = static_cast<u32>(BlockIndex()) / p.parts;
    u32 group = tile_;
    if (!T::k.run_in_group) {
      const u32 tiles = (static_cast<u32>(p.run.extent) + Columns() - 1) / Columns();
      group = tile_ / tiles;
      column_ = static_cast<i32>((tile_ - group * tiles) * Columns());
      row_ = ThreadIndex() / T::k.columns;
      rows_ = BlockThreads() / T::k.columns;
    }
    at_.Move(p.outer, T::k.outer_axes, group);
  }

  KVANT_DEVICE static u32 Columns() { return static_cast<u32>(T::k.columns * kRun); }
  // Groups whose ranges a thread finds.
  KVANT_DEVICE static i32 Groups() { return T::k.run_in_group ? 1 : kRun; }

  KVANT_DEVICE void Run() {
    // Rather than return: barriers follow.
    const bool written = MoveToPosition<T>(p_, at_);
    LoadCodebook<T>(p_, false);
    Coder<T> coders[kRun];
    if (T::k.run_in_group) {
      const ValueRange range = GroupRange();
      if (T::k.pass == kPartRanges) {
        if (ThreadIndex() == 0) StoreRange(0, range);
        return;
      }
      const ComputedParameters parameters = ParametersOf<T>(range, p_);
      if (written && part_ == 0 && ThreadIndex() == 0) StoreParameters<T>(p_, at_, parameters);
      coders[0] = Coder<T>(parameters);
    } else {
      FindColumns(written);
      if (T::k.pass == kPartRanges) return;
      BlockSync();
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        const Words2 words = LoadShared64(ParametersAt(RunOfThread() * kRun + i));
        coders[i] = Coder<T>(ComputedParameters{AsFloat(words.v[0]), AsFloat(words.v[1])});
      }
    }
    if (!T::k.encodes || !written) return;
    const bool vectors = HasValueVectors(T::k, p_), code_vectors = HasCodeVectors(T::k, p_);
    ForEachRun([&](const QuantizePlace& at, i32 n) {
      float x[kRun];
      LoadRun(T::k.values, p_.values, at.values, p_.run.values, n, vectors, x);
      StoreCodes(T::k.codes, p_.codes, at.codes, p_.run.codes, n, code_vectors,
                 Encode<T>(coders, !T::k.run_in_group, x));
    });
  }

  // use(place, elements) for each run of the block's part that is this thread's.
  template <class Use>
  KVANT_DEVICE void ForEachRun(Use use) const {
    const u32 all = T::k.run_in_group ? p_.line_count * p_.line_runs : p_.line_count;
    const u32 begin = part_ * p_.part_size;
    const u32 end = all - begin < p_.part_size ? all : begin + p_.part_size;
    const u32 step = static_cast<u32>(T::k.run_in_group ? BlockThreads() : rows_);
    KVANT_NO_UNROLL
    for (u32 i = begin + static_cast<u32>(T::k.run_in_group ? ThreadIndex() : row_); i < end;
         i += step) {
      const u32 line = T::k.run_in_group ? (T::k.line_axes == 0 ? 0 : i / p_.line_runs) : i;
      const i32 first = T::k.run_in_group ? static_cast<i32>(i - line * p_.line_runs) * kRun
                                          : column_ + RunOfThread() * kRun;
      QuantizePlace at = at_;
      at.Move(p_.lines, T::k.line_axes, line);
      at.Move(p_.run, first);
      const i32 n = ElementsOfRun<T>(p_, first);
      if (n > 0) use(at, n);
    }
  }
  KVANT_DEVICE i32 RunOfThread() const { return ThreadIndex() % T::k.columns; }

  // Of what this thread reads.
  KVANT_DEVICE void FindRanges(RangeFinder<T> (&found)[kRun]) const {
    const bool vectors = HasValueVectors(T::k, p_);
    ForEachRun([&](const QuantizePlace& at, i32 n) {
      float x[kRun];
      LoadRun(T::k.values, p_.values, at.values, p_.run.values, n, vectors, x);
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        if (i < n) found[T::k.run_in_group ? 0 : i].Add(x[i]);
      }
    });
  }

  // Of the group, or of the block's part of it; all threads get it.
  KVANT_DEVICE ValueRange GroupRange() const {
    ValueRange range = ValueRange::Nothing();
    if (T::k.pass == kJoinParts) {
      KVANT_NO_UNROLL
      for (u32 part = static_cast<u32>(ThreadIndex()); part < p_.parts;
           part += static_cast<u32>(BlockThreads())) {
        range.Join(LoadRange(part, 0));
      }
    } else {
      RangeFinder<T> found[kRun];
      FindRanges(found);
      range = found[0].Result();
    }
    KVANT_UNROLL
    for (i32 mask = 16; mask > 0; mask /= 2) {
      range.Join({ShuffleXor(range.min, mask), ShuffleXor(range.max, mask)});
    }
    const i32 warp_of_thread = WarpIndex();
    if (LaneIndex() == 0) StoreShared64(shared_ + warp_of_thread * 8, Bits(range));
    BlockSync();
    KVANT_NO_UNROLL
    for (i32 warp = 0; warp < BlockThreads() / 32; ++warp) {
      range.Join(LoadSharedRange(shared_ + warp * 8));
    }
    return range;
  }

  // Leaves columns' parameters in shared and global memory, or the ranges of a part.
  KVANT_DEVICE void FindColumns(bool written) const {
    if (T::k.pass != kJoinParts) {
      RangeFinder<T> found[kRun];
      FindRanges(found);
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        StoreShared64(RangeAt(row_, RunOfThread() * kRun + i), Bits(found[i].Result()));
      }
      BlockSync();
    }
    KVANT_NO_UNROLL
    for (i32 column = ThreadIndex(); column < T::k.columns * kRun; column += BlockThreads()) {
      ValueRange range = ValueRange::Nothing();
      if (T::k.pass == kJoinParts) {
        for (u32 part = 0; part < p_.parts; ++part) range.Join(LoadRange(part, column));
      } else {
        for (i32 row = 0; row < rows_; ++row) range.Join(LoadSharedRange(RangeAt(row, column)));
      }
      if (T::k.pass == kPartRanges) {
        StoreRange(column, range);
        continue;
      }
      const ComputedParameters parameters = ParametersOf<T>(range, p_);
      StoreShared64(ParametersAt(column),
                    {{AsBits(parameters.scale), AsBits(parameters.zero_point)}});
      if (!written || part_ != 0 || column_ + column >= p_.run.extent) continue;
      QuantizePlace at = at_;
      at.Move(p_.run, column_ + column);
      StoreParameters<T>(p_, at, parameters);
    }
  }

  KVANT_DEVICE SharedAddress RangeAt(i32 row, i32 column) const {
    return shared_ + (row * static_cast<i32>(Columns()) + column) * 8;
  }
  KVANT_DEVICE SharedAddress ParametersAt(i32 column) const { return RangeAt(rows_, column); }
  KVANT_DEVICE static Words2 Bits(const ValueRange& range) {
    return {{AsBits(range.min), AsBits(range.max)}};
  }
  KVANT_DEVICE static ValueRange LoadSharedRange(SharedAddress at) {
    const Words2 words = LoadShared64(at);
    return {AsFloat(words.v[0]), AsFloat(words.v[1])};
  }

  KVANT_DEVICE float* PartRange(u32 part, i32 column) const {
    const i64 parts = static_cast<i64>(tile_) * p_.parts + part;
    return p_.ranges + (parts * (T::k.run_in_group ? 1 : Columns()) + column) * 2;
  }
  KVANT_DEVICE ValueRange LoadRange(u32 part, i32 column) const {
    const float* from = PartRange(part, column);
    return {Load(from), Load(from + 1)};
  }
  KVANT_DEVICE void StoreRange(i32 column, const ValueRange& range) const {
    float* to = PartRange(part_, column);
    Store(to, range.min);
    Store(to + 1, range.max);
  }

  const QuantizeParams& p_;
  const SharedAddress shared_;
  u32 tile_, part_;
  QuantizePlace at_;        // of the group, or of the first column's
  i32 column_ = 0;          // the tile's first
  i32 row_ = 0, rows_ = 1;  // the thread's, and the block's
};

// Of codes with given parameters, or of numbers that are only converted. A thread has a run; or,
// where elements of different runs share bytes, 8 elements in a row of all axes, less those whose
// byte begins before them, and with those that share their last byte.
template <class T>
class QuantizeElements {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) {
    LoadCodebook<T>(p, false);
    const i64 i = ThreadOfGrid();
    if (T::k.shares_bytes) {
      if (i * kRun < p.count) EncodeBytes(p, static_cast<u32>(i) * kRun);
    } else if (i < p.count) {
      EncodeRun(p, static_cast<u32>(i));
    }
  }

 private:
  KVANT_DEVICE static void EncodeRun(const QuantizeParams& p, u32 index) {
    const u32 line = index / p.line_runs;
    const i32 first = static_cast<i32>(index - line * p.line_runs) * kRun;
    const i32 n = ElementsOfRun<T>(p, first);
    QuantizePlace at;
    at.Move(p.outer, T::k.outer_axes, line);
    at.Move(p.run, first);
    float x[kRun];
    LoadRun(T::k.values, p.values, at.values, p.run.values, n, HasValueVectors(T::k, p), x);
    if (!MoveToPosition<T>(p, at)) return;
    if (BitsOf(T::k.codes) >= 16) {
      return StoreRun(T::k.codes, p.codes, at.codes, p.run.codes, n, HasCodeVectors(T::k, p), x);
    }
    const bool varies = T::k.scales_vary || T::k.zero_points_vary;
    Coder<T> coders[kRun];
    QuantizePlace element = at;
    KVANT_UNROLL
    for (i32 e = 0; e < (varies ? kRun : 1); ++e) {
      coders[e] = Coder<T>(LoadScale<T>(p, element), LoadZeroPoint<T>(p, element));
      if (e + 1 < n) element.Move(p.run, 1);
    }
    StoreCodes(T::k.codes, p.codes, at.codes, p.run.codes, n, HasCodeVectors(T::k, p),
               Encode<T>(coders, varies, x));
  }

  // False: it is not written.
  KVANT_DEVICE static bool Find(const QuantizeParams& p, u32 element, QuantizePlace& at) {
    const u32 extent = static_cast<u32>(p.run.extent), line = element / extent;
    at.Move(p.outer, T::k.outer_axes, line);
    at.Move(p.run, element - line * extent);
    return MoveToPosition<T>(p, at);
  }

  KVANT_DEVICE static void EncodeBytes(const QuantizeParams& p, u32 begin) {
    const i32 bits = BitsOf(T::k.codes), per_byte = 8 / bits;
    i64 last = -1;
    if (QuantizePlace before; begin > 0 && Find(p, begin - 1, before)) {
      last = before.codes / per_byte;
    }
    bool mine = false;
    KVANT_NO_UNROLL
    for (u32 i = begin; i < p.count; ++i) {
      QuantizePlace at;
      const bool written = Find(p, i, at);
      const i64 byte = written ? at.codes / per_byte : -1;
      if (byte != last || !written) {
        if (i >= begin + kRun) return;
        mine = written;
      }
      last = byte;
      if (mine) {
        const i32 shift = static_cast<i32>(at.codes % per_byte) * bits;
        const Coder<T> coder(LoadScale<T>(p, at), LoadZeroPoint<T>(p, at));
        const u32 code = coder.Code(LoadElement(T::k.values, p.values, at.values), coder.divides());
        StoreBits(static_cast<u8*>(p.codes) + byte, code << shift, ((1u << bits) - 1) << shift);
      } else if (i >= begin + kRun) {
        return;
      }
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_QUANTIZE_H_
