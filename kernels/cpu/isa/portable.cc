// The inner loops in plain C++, in the shape that compilers vectorise for
// whatever the build's baseline is. Sums are kept in fixed lanes, so results do not
// depend on how wide that is.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvant/kernels/cpu/isa/hadamard.h"
#include "kvant/kernels/cpu/isa/portable_load.h"
#include "kvant/kernels/cpu/isa/quantize.h"
#include "kvant/kernels/cpu/isa/round.h"
#include "kvant/kernels/cpu/isa/simd_one_lane.h"
#include "kvant/kernels/cpu/kernels.h"
#include "kvant/kernels/philox.h"

namespace kvant::cpu {
namespace {

constexpr int kLanes = 4;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

Lanes Load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
void Store(float* p, Lanes v) { std::memcpy(p, &v, sizeof(v)); }

// kRows x kVectors * kLanes sums of a[r * a_row + i * a_step] * b[i * b_row + c] over
// i < n, held in registers.
template <int kRows, int kVectors>
struct Block {
  Lanes sum[kRows][kVectors];

  void Accumulate(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t n) {
    for (auto& row : sum) {
      for (Lanes& s : row) s = Lanes{};
    }
    for (int64_t i = 0; i < n; ++i) {
      Lanes right[kVectors];
      for (int v = 0; v < kVectors; ++v) right[v] = Load(b + i * b_row + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const float left = a[r * a_row + i];
        for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
      }
    }
  }
};

// Head sizes are summed in blocks: the error of a long f32 sum grows with its length.
constexpr int64_t kSumBlock = 64;

template <int kRows, int kVectors>
void QkBlock(const float* q, int64_t head_size, const float* k, float* scores) {
  Lanes total[kRows][kVectors] = {};
  for (int64_t d = 0; d < head_size; d += kSumBlock) {
    Block<kRows, kVectors> block;
    const int64_t n = head_size - d < kSumBlock ? head_size - d : kSumBlock;
    block.Accumulate(q + d, head_size, k + d * kHalfTile, kHalfTile, n);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) total[r][v] += block.sum[r][v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) Store(scores + r * kTokenTile + v * kLanes, total[r][v]);
  }
}

template <int kRows, int kVectors>
void QkRows(const float* q, int64_t head_size, const float* k, int64_t tokens, float* scores) {
  for (int64_t t = 0; t < tokens; t += kVectors * kLanes) {
    QkBlock<kRows, kVectors>(q, head_size, k + t, scores + t);
  }
}

void Qk(const float* q, int64_t rows, int64_t head_size, const float* k, int64_t tokens,
        float* scores) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    QkRows<4, 2>(q + r * head_size, head_size, k, tokens, scores + r * kTokenTile);
  }
  for (; r < rows; ++r) {
    QkRows<1, 8>(q + r * head_size, head_size, k, tokens, scores + r * kTokenTile);
  }
}

template <int kRows, int kVectors>
void PvBlock(const float* probs, int64_t tokens, const float* v, int64_t head_size,
             const float* shrink, float* out) {
  Block<kRows, kVectors> block;
  block.Accumulate(probs, kTokenTile, v, head_size, tokens);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      float* o = out + r * head_size + i * kLanes;
      Store(o, Load(o) * shrink[r] + block.sum[r][i]);
    }
  }
}

template <int kRows, int kVectors>
void PvRows(const float* probs, int64_t tokens, const float* v, int64_t head_size,
            const float* shrink, float* out) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= head_size; d += kVectors * kLanes) {
    PvBlock<kRows, kVectors>(probs, tokens, v + d, head_size, shrink, out + d);
  }
  for (; d < head_size; ++d) {
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.f;
      for (int64_t t = 0; t < tokens; ++t) sum += probs[r * kTokenTile + t] * v[t * head_size + d];
      out[r * head_size + d] = out[r * head_size + d] * shrink[r] + sum;
    }
  }
}

void Pv(const float* probs, int64_t rows, int64_t tokens, const float* v, int64_t head_size,
        const float* shrink, float* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    PvRows<4, 2>(probs + r * kTokenTile, tokens, v, head_size, shrink + r, out + r * head_size);
  }
  for (; r < rows; ++r) {
    PvRows<1, 8>(probs + r * kTokenTile, tokens, v, head_size, shrink + r, out + r * head_size);
  }
}

// exp(x) for x <= 0 or NaN, within 1.3e-7 of it relatively; 0 below -87.3 where
// the result would be subnormal. Cephes' polynomial.
inline float Exp(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  // The integer sits in the low bits of `shifted`; modulo 2^32 in unsigned arithmetic.
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  const float value = p * std::bit_cast<float>(exponent);
  return x < -87.3f ? 0.f : value;
}

void ExpRow(float* scores, int64_t columns, float max) {
  for (int64_t i = 0; i < columns; ++i) scores[i] = Exp(scores[i] - max);
}

// Combines the values of a row in a fixed order.
template <typename Op>
float Reduce(const float* row, int64_t columns, Op op) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = row[i];
  for (int64_t block = 16; block < columns; block += 16) {
    for (int i = 0; i < 16; ++i) lanes[i] = op(lanes[i], row[block + i]);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = op(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

void Softmax(float* scores, int64_t rows, int64_t columns, const float* factors, float* max,
             float* sum, float* shrink) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * kTokenTile;
    for (int64_t t = 0; factors != nullptr && t < columns; ++t) row[t] *= factors[r];
    const float seen = Reduce(row, columns, [](float a, float b) { return a > b ? a : b; });
    const float now = seen > max[r] ? seen : max[r];
    // With nothing but -inf so far, any finite stand-in gives exp(-inf) = 0.
    const float base = now == kNegInf ? 0.f : now;
    ExpRow(row, columns, base);
    shrink[r] = Exp(max[r] - base);
    sum[r] = sum[r] * shrink[r] + Reduce(row, columns, [](float a, float b) { return a + b; });
    max[r] = now;
  }
}

// A rational approximation, odd over even, within 4 ulp; Eigen's coefficients.
inline float TanhOf(float x) {
  constexpr float kBound = 7.90531110763549805f;  // rounds to 1 beyond
  x = x > kBound ? kBound : (x < -kBound ? -kBound : x);
  const float x2 = x * x;
  float p = -2.76076847742355e-16f;
  p = p * x2 + 2.00018790482477e-13f;
  p = p * x2 + -8.60467152213735e-11f;
  p = p * x2 + 5.12229709037114e-08f;
  p = p * x2 + 1.48572235717979e-05f;
  p = p * x2 + 6.37261928875436e-04f;
  p = p * x2 + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f;
  q = q * x2 + 1.18534705686654e-04f;
  q = q * x2 + 2.26843463243900e-03f;
  q = q * x2 + 4.89352518554385e-03f;
  return x * (p / q);  // in this order a small x loses no bits
}

void Tanh(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = TanhOf(values[i]);
}

void Expand(const float* in, int64_t group, int64_t into_group, int64_t n, float* out) {
  int64_t run = group - into_group;
  for (int64_t i = 0; i < n; i += run, run = group, ++in) {
    run = run < n - i ? run : n - i;
    for (int64_t j = 0; j < run; ++j) out[i + j] = *in;
  }
}

void ScaleRun(const Scaling& how, int64_t at, int64_t n, float* values) {
  const float scale = how.scales[at];
  const float zp = how.zero_points == nullptr ? 0.f : how.zero_points[at];
  if (how.real) {
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] * scale - zp;
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = (values[i] - zp) * scale;
  }
}

void ScaleEach(const Scaling& how, int64_t n, float* values) {
  const float *const scales = how.scales, *const zps = how.zero_points;
  if (zps == nullptr) {
    for (int64_t i = 0; i < n; ++i) values[i] *= scales[i];
  } else if (how.real) {
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] * scales[i] - zps[i];
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = (values[i] - zps[i]) * scales[i];
  }
}

void Scale(const Scaling& how, int64_t n, float* values) {
  if (how.group == 1) return ScaleEach(how, n, values);
  for (int64_t i = 0, at = 0; i < n; i += how.group, ++at) {
    ScaleRun(how, at, how.group < n - i ? how.group : n - i, values + i);
  }
}

void LoadEntries(const float* codebook, DataType type, const void* data, int64_t index, int64_t n,
                 float* out) {
  portable::Load(type, data, index, n, out);
  for (int64_t i = 0; i < n; ++i) out[i] = codebook[static_cast<int>(out[i])];
}

void LoadScaled(DataType type, const void* data, int64_t index, int64_t n, const Scaling& how,
                float* out) {
  if (how.codebook != nullptr) {
    LoadEntries(how.codebook, type, data, index, n, out);
  } else {
    portable::Load(type, data, index, n, out);
  }
  Scale(how, n, out);
}

void Transpose(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
               int64_t out_stride) {
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) out[c * out_stride + r] = in[r * in_stride + c];
  }
}

void Philox(uint64_t seed, uint64_t offset, uint64_t block, int64_t blocks, uint32_t* words) {
  for (int64_t i = 0; i < blocks; ++i) {
    PhiloxWords(seed, offset, block + static_cast<uint64_t>(i), words + i * kPhiloxBlock);
  }
}

}  // namespace

const KernelSet& portable_kernels() {
  static constexpr KernelSet kSet = {
      .name = "portable",
      .load = portable::Load,
      .load_entries = LoadEntries,
      .expand = Expand,
      .scale = Scale,
      .load_scaled = LoadScaled,
      .transpose = Transpose,
      .qk = Qk,
      .softmax = Softmax,
      .exp_row = ExpRow,
      .round = Round<OneLane>,
      .pv = Pv,
      .tanh = Tanh,
      .hadamard = Hadamard<OneLane>,
      .philox = Philox,
      .quantize = &kQuantizeKernels<OneLane>,
  };
  return kSet;
}

}  // namespace kvant::cpu
