// KernelSet's round over a vector wrapper such as simd.h's.
#ifndef KVANT_KERNELS_CPU_ISA_ROUND_H_
#define KVANT_KERNELS_CPU_ISA_ROUND_H_

#include <cstdint>

#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {
namespace {

template <typename S>
void Round(const RoundedCodes& codes, int64_t rows, int64_t columns, const float* divisors,
           float* values) {
  const auto lowest = S::Set1(codes.lowest), highest = S::Set1(codes.highest);
  const auto of_nan = S::Set1(codes.of_nan), unit = S::Set1(codes.unit);
  const auto magic = S::Set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t r = 0; r < rows; ++r, values += kTokenTile) {
    const auto divisor = S::Set1(divisors[r]);
    for (int64_t i = 0; i < columns; i += S::kWidth) {
      const auto x = S::Div(S::Load(values + i), divisor);
      const auto within = S::Min(S::Max(x, lowest), highest);
      const auto whole = S::Sub(S::Add(within, magic), magic);
      const auto code = S::Add(S::ZeroNan(x, S::Sub(whole, of_nan)), of_nan);
      S::Store(values + i, S::Mul(code, unit));
    }
  }
}

}  // namespace
}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ISA_ROUND_H_
