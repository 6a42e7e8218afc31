// Hadamard: each `block` elements in a row of a line, times H / sqrt(block). Sums and differences
// of elements 1, 2, 4, ... apart, of numbers that are scaled first: the same ones in the same order
// as kernels/cpu/isa/hadamard.h takes, so the same bits.
//   RotateRuns    a warp, or part of one, has each block in registers
//   RotateBlocks  larger ones: a block of threads has each, 1024 elements to a warp
#ifndef KVANT_KERNELS_CUDA_HADAMARD_H_
#define KVANT_KERNELS_CUDA_HADAMARD_H_

#include "kvant/kernels/cuda/quantize_runs.h"

namespace kvant::cuda {

// Elements of a Hadamard block that a warp holds.
inline constexpr i32 kMaxWarpBlock = kRun * kMaxLaneRuns * 32;
// Warps that hold one together, at most.
inline constexpr i32 kMaxJoinedWarps = 32;

KVANT_DEVICE void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Element 8 * (r * lanes + lane) + i of a block, or of 1024 elements of one, is x[r][i].
template <class T>
class LaneBlock {
 public:
  float x[T::kMax.lane_runs][kRun];

  // All lanes of the warp take part.
  KVANT_DEVICE void Rotate(float norm) {
    const i32 lanes = T::k.lanes, runs = T::k.lane_runs, block = T::k.block;
    KVANT_UNROLL
    for (i32 r = 0; r < runs; ++r) {
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; ++i) {
        // Opaque: the product is rounded before anything is added.
        x[r][i] = AsFloat(Opaque(AsBits(x[r][i] * norm)));
      }
    }
    KVANT_UNROLL
    for (i32 step = 1; step < kRun; step *= 2) {
      KVANT_UNROLL
      for (i32 r = 0; r < runs; ++r) {
        KVANT_UNROLL
        for (i32 i = 0; i < kRun; ++i) {
          if (step < block && (i & step) == 0) Butterfly(x[r][i], x[r][i + step]);
        }
      }
    }
    KVANT_UNROLL
    for (i32 step = 1; step < lanes; step *= 2) {
      const bool upper = (LaneIndex() & step) != 0;
      KVANT_UNROLL
      for (i32 r = 0; r < runs; ++r) {
        KVANT_UNROLL
        for (i32 i = 0; i < kRun; ++i) {
          const float mine = x[r][i], other = ShuffleXor(mine, step);
          x[r][i] = upper ? other - mine : mine + other;
        }
      }
    }
    KVANT_UNROLL
    for (i32 step = 1; step < runs; step *= 2) {
      KVANT_UNROLL
      for (i32 r = 0; r < runs; ++r) {
        if ((r & step) != 0) continue;
        KVANT_UNROLL
        for (i32 i = 0; i < kRun; ++i) Butterfly(x[r][i], x[r + step][i]);
      }
    }
  }
};

template <class T>
class RotateRuns {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) {
    const i32 lanes = T::k.lanes;
    const i64 thread = BlockIndex() * BlockThreads() + ThreadIndex();
    const i64 index = thread / lanes;
    const u32 part = index < p.count ? static_cast<u32>(index) : 0, line = part / p.line_runs;
    const i32 per_part = lanes * T::k.lane_runs * kRun;
    const i32 begin = static_cast<i32>(part - line * p.line_runs) * per_part +
                      static_cast<i32>(thread % lanes) * kRun;
    QuantizePlace at;
    at.Move(p.outer, T::k.outer_axes, line);
    at.Move(p.run, begin);
    LaneBlock<T> rows;
    if (T::k.value_vectors && IsAligned(p.values, RunAlignment(T::k.values))) {
      LoadRuns(p, at, begin, true, rows);
    } else {
      LoadRuns(p, at, begin, false, rows);
    }
    rows.Rotate(p.norm);
    if (index >= p.count) return;
    const bool vectors = T::k.code_vectors && IsAligned(p.codes, RunAlignment(T::k.codes));
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      const i32 first = r * lanes * kRun;
      StoreRun(T::k.codes, p.codes, at.codes + first * p.run.codes, p.run.codes,
               ElementsOfRun<T>(p, begin + first), vectors, rows.x[r]);
    }
  }

 private:
  KVANT_DEVICE static void LoadRuns(const QuantizeParams& p, const QuantizePlace& at, i32 begin,
                                    bool vectors, LaneBlock<T>& rows) {
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      const i32 first = r * T::k.lanes * kRun;
      LoadRun(T::k.values, p.values, at.values + first * p.run.values, p.run.values,
              ElementsOfRun<T>(p, begin + first), vectors, rows.x[r]);
    }
  }
};

// block / 1024 warps, each with all of its lanes and lane_runs runs; then each thread has the
// elements that lie 1024 apart. Shared memory holds the block in f32.
template <class T>
class RotateBlocks {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) {
    const u32 index = static_cast<u32>(BlockIndex()), line = index / p.line_runs;
    const i32 begin = static_cast<i32>(index - line * p.line_runs) * T::k.block;
    QuantizePlace at;
    at.Move(p.outer, T::k.outer_axes, line);
    at.Move(p.run, begin);
    const bool from_vectors = T::k.value_vectors && IsAligned(p.values, RunAlignment(T::k.values));
    LaneBlock<T> rows;
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      LoadRun(T::k.values, p.values, at.values + First(r) * p.run.values, p.run.values, kRun,
              from_vectors, rows.x[r]);
    }
    rows.Rotate(p.norm);
    KVANT_UNROLL
    for (i32 r = 0; r < T::k.lane_runs; ++r) {
      KVANT_UNROLL
      for (i32 i = 0; i < kRun; i += 4) {
        StoreShared128(SharedBase() + 4 * (First(r) + i),
                       {{AsBits(rows.x[r][i]), AsBits(rows.x[r][i + 1]), AsBits(rows.x[r][i + 2]),
                         AsBits(rows.x[r][i + 3])}});
      }
    }
    BlockSync();
    KVANT_NO_UNROLL
    for (i32 column = ThreadIndex(); column < kMaxWarpBlock; column += BlockThreads()) {
      JoinWarps(p, at, column);
    }
  }

 private:
  KVANT_DEVICE static i32 First(i32 r) {
    return WarpIndex() * kMaxWarpBlock + (r * 32 + LaneIndex()) * kRun;
  }

  KVANT_DEVICE static void JoinWarps(const QuantizeParams& p, const QuantizePlace& at, i32 column) {
    const i32 warps = T::k.block / kMaxWarpBlock;
    float x[kMaxJoinedWarps];
    KVANT_UNROLL
    for (i32 w = 0; w < kMaxJoinedWarps; ++w) {
      if (w < warps) x[w] = AsFloat(LoadShared32(SharedBase() + 4 * (w * kMaxWarpBlock + column)));
    }
    KVANT_UNROLL
    for (i32 step = 1; step < kMaxJoinedWarps; step *= 2) {
      KVANT_UNROLL
      for (i32 w = 0; w < kMaxJoinedWarps; ++w) {
        if (w + step < warps && (w & step) == 0) Butterfly(x[w], x[w + step]);
      }
    }
    KVANT_UNROLL
    for (i32 w = 0; w < kMaxJoinedWarps; ++w) {
      if (w < warps) {
        StoreElement(T::k.codes, p.codes, at.codes + (w * kMaxWarpBlock + column) * p.run.codes,
                     x[w]);
      }
    }
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_HADAMARD_H_
