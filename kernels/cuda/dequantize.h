// DynamicDequantize: a thread has a run of the values that are written.
#ifndef KVANT_KERNELS_CUDA_DEQUANTIZE_H_
#define KVANT_KERNELS_CUDA_DEQUANTIZE_H_

#include "kvant/kernels/cuda/quantize_runs.h"

namespace kvant::cuda {

template <class T>
class DequantizeElements {
 public:
  KVANT_DEVICE static void Run(const QuantizeParams& p) {
    LoadCodebook<T>(p, true);
    const i64 index = BlockIndex() * BlockThreads() + ThreadIndex();
    if (index >= p.count) return;
    const u32 line = static_cast<u32>(index) / p.line_runs;
    const i32 first = static_cast<i32>(static_cast<u32>(index) - line * p.line_runs) * kRun;
    const i32 n = ElementsOfRun<T>(p, first);
    QuantizePlace at;
    at.Move(p.outer, T::k.outer_axes, line);
    at.Move(p.run, first);
    float x[kRun];
    LoadRun(T::k.codes, p.codes, at.codes, p.run.codes, n,
            T::k.code_vectors && IsAligned(p.codes, RunAlignment(T::k.codes)), x);
    float scale = LoadScale<T>(p, at);
    float zero_point = ZeroPointOf(p, at);
    QuantizePlace element = at;
    KVANT_UNROLL
    for (i32 e = 0; e < kRun; ++e) {
      if (e > 0 && e < n) {
        element.Move(p.run, 1);
        if (T::k.scales_vary) scale = LoadScale<T>(p, element);
        if (T::k.zero_points_vary) zero_point = ZeroPointOf(p, element);
      }
      if (T::k.codebook_bits > 0) {
        x[e] = AsFloat(LoadShared32(SharedBase() + 4 * static_cast<i32>(x[e]))) * scale;
        continue;
      }
      x[e] = T::k.zero_point_kind == kRealZeroPoints ? Fma(x[e], scale, -zero_point)
                                                     : (x[e] - zero_point) * scale;
    }
    StoreRun(T::k.values, p.values, at.values, p.run.values, n,
             T::k.value_vectors && IsAligned(p.values, RunAlignment(T::k.values)), x);
  }

 private:
  KVANT_DEVICE static float ZeroPointOf(const QuantizeParams& p, const QuantizePlace& at) {
    const ZeroPoint zero_point = LoadZeroPoint<T>(p, at);
    return T::k.zero_point_kind == kRealZeroPoints ? zero_point.real
                                                   : static_cast<float>(zero_point.code);
  }
};

}  // namespace kvant::cuda

#endif  // KVANT_KERNELS_CUDA_DEQUANTIZE_H_
