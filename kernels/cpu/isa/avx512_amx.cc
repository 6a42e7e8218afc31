// What AMX adds to the AVX-512 BF16 set: products of bf16 pairs by tile registers.
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "kvant/kernels/cpu/isa/pairs.h"
#include "kvant/kernels/cpu/isa/pairs_avx512.h"
#include "kvant/kernels/cpu/isa/simd.h"
#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

const KernelSet& avx512_bf16_kernels();

namespace {

// A tile register has up to 16 rows of 16 dwords: sums in f32, or pairs.
constexpr int64_t kTile = 16;
constexpr int64_t kBlock = 2 * kTile;

// a x b: pairs [rows][pairs] and [pairs][columns], to c, f32 [rows][columns]; strides in dwords.
struct Product {
  const uint32_t* a;
  int64_t a_row;
  const uint32_t* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
};

// Of a block, at most kBlock rows and columns, and of the pairs that one instruction takes.
struct Shape {
  int64_t rows = 0, columns = 0, pairs = 0;
  bool operator==(const Shape&) const = default;
};

// The registers' shapes, for the thread, until it ends:
//
//            6 | 7    pairs of b
//       4    0 | 1
//       5    2 | 3    sums
//     pairs of a
class BlockRegisters {
 public:
  BlockRegisters() = default;
  BlockRegisters(const BlockRegisters&) = delete;
  BlockRegisters& operator=(const BlockRegisters&) = delete;
  ~BlockRegisters() { _tile_release(); }

  void Set(const Shape& shape) {
    if (shape == shape_) return;
    shape_ = shape;
    const int64_t upper = First(shape.rows), lower = shape.rows - upper;
    const int64_t left = First(shape.columns), right = shape.columns - left;
    Config config;
    config.Set(0, upper, left);
    config.Set(1, upper, right);
    config.Set(2, lower, left);
    config.Set(3, lower, right);
    config.Set(4, upper, shape.pairs);
    config.Set(5, lower, shape.pairs);
    config.Set(6, shape.pairs, left);
    config.Set(7, shape.pairs, right);
    // GCC's intrinsics do not say all that they read.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

 private:
  // As LDTILECFG reads it.
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // A register without rows or columns is not there.
    void Set(int tile, int64_t tile_rows, int64_t dwords) {
      if (tile_rows == 0 || dwords == 0) return;
      rows[tile] = static_cast<uint8_t>(tile_rows);
      row_bytes[tile] = static_cast<uint16_t>(dwords * 4);
    }
  };
  static int64_t First(int64_t n) { return n < kTile ? n : kTile; }

  Shape shape_;
};

// A block: kLower, kRight: it has more than kTile rows, columns. `steps` times as many pairs as
// the shape has. kOnto: added to c.
template <bool kLower, bool kRight, bool kOnto>
void MultiplyBlock(const Product& p, int64_t pairs, int64_t steps) {
  const int64_t a_bytes = p.a_row * 4, b_bytes = p.b_row * 4, c_bytes = p.c_row * 4;
  float* const lower = p.c + kTile * p.c_row;
  asm volatile("" : : : "memory");  // as in Set
  if constexpr (kOnto) {
    _tile_loadd(0, p.c, c_bytes);
    if constexpr (kRight) _tile_loadd(1, p.c + kTile, c_bytes);
    if constexpr (kLower) _tile_loadd(2, lower, c_bytes);
    if constexpr (kLower && kRight) _tile_loadd(3, lower + kTile, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kRight) _tile_zero(1);
    if constexpr (kLower) _tile_zero(2);
    if constexpr (kLower && kRight) _tile_zero(3);
  }
  const uint32_t *a = p.a, *b = p.b;
  for (int64_t i = 0; i < steps; ++i, a += pairs, b += pairs * p.b_row) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) {
      _tile_loadd(7, b + kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLower) {
      _tile_loadd(5, a + kTile * p.a_row, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRight) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, p.c, c_bytes);
  if constexpr (kRight) _tile_stored(1, p.c + kTile, c_bytes);
  if constexpr (kLower) _tile_stored(2, lower, c_bytes);
  if constexpr (kLower && kRight) _tile_stored(3, lower + kTile, c_bytes);
}

void MultiplyBlockOf(const Shape& shape, const Product& p, int64_t steps, bool onto) {
  const auto multiply = [&](auto lower, auto right) {
    constexpr bool kLower = decltype(lower)::value, kRight = decltype(right)::value;
    (onto ? MultiplyBlock<kLower, kRight, true>
          : MultiplyBlock<kLower, kRight, false>)(p, shape.pairs, steps);
  };
  const auto with_lower = [&](auto lower) {
    shape.columns > kTile ? multiply(lower, std::true_type()) : multiply(lower, std::false_type());
  };
  shape.rows > kTile ? with_lower(std::true_type()) : with_lower(std::false_type());
}

// c = a x b, or, with `onto`, c + a x b. What pairs are left over take registers of another shape,
// and so a second pass.
void Multiply(BlockRegisters& registers, const Product& p, int64_t rows, int64_t columns,
              int64_t pairs, bool onto) {
  const int64_t steps = pairs / kTile, whole = steps * kTile;
  const auto pass = [&](int64_t from, int64_t block_pairs, int64_t block_steps, bool add) {
    for (int64_t r = 0; r < rows; r += kBlock) {
      for (int64_t t = 0; t < columns; t += kBlock) {
        const Shape shape{rows - r < kBlock ? rows - r : kBlock,
                          columns - t < kBlock ? columns - t : kBlock, block_pairs};
        registers.Set(shape);
        MultiplyBlockOf(shape,
                        {p.a + r * p.a_row + from, p.a_row, p.b + from * p.b_row + t, p.b_row,
                         p.c + r * p.c_row + t, p.c_row},
                        block_steps, add);
      }
    }
  };
  if (steps > 0) pass(0, kTile, steps, onto);
  if (whole < pairs) pass(whole, pairs - whole, 1, onto || steps > 0);
}

void Qk(const uint32_t* q, int64_t rows, int64_t pairs, const uint32_t* k, float* scores) {
  BlockRegisters registers;
  Multiply(registers, {q, pairs, k, kHalfTile, scores, kTokenTile}, rows, kHalfTile, pairs,
           /*onto=*/false);
}

void Shrink(float factor, int64_t n, float* row) {
  if (factor == 1.f) return;
  const auto by = Simd::Set1(factor);
  int64_t i = 0;
  for (; i + Simd::kWidth <= n; i += Simd::kWidth) {
    Simd::Store(row + i, Simd::Mul(Simd::Load(row + i), by));
  }
  if (i < n) Simd::StoreSome(row + i, Simd::Mul(Simd::LoadSome(row + i, n - i), by), n - i);
}

// kFirst: with probabilities rounded to bf16. kRest: adds the product of what that loses of them.
template <bool kFirst, bool kRest>
void MultiplyValues(const float* probs, int64_t rows, int64_t tokens, const uint32_t* v,
                    int64_t head_size, const float* shrink, float* out) {
  constexpr int64_t kRowPairs = kTokenTile / 2;
  BlockRegisters registers;
  for (int64_t first = 0; first < rows; first += kBlock) {
    const int64_t n = rows - first < kBlock ? rows - first : kBlock;
    alignas(64) uint32_t p[kBlock * kRowPairs];
    const auto add = [&](auto pairs_of) {
      for (int64_t r = 0; r < n; ++r) {
        pairs_of(probs + (first + r) * kTokenTile, WholeHalves(tokens), p + r * kRowPairs);
      }
      Multiply(registers, {p, kRowPairs, v, head_size, out + first * head_size, head_size}, n,
               head_size, (tokens + 1) / 2, /*onto=*/true);
    };
    if constexpr (kFirst) {
      for (int64_t r = first; r < first + n; ++r) {
        Shrink(shrink[r], head_size, out + r * head_size);
      }
      add(Avx512Pairs::PairLine);
    }
    if constexpr (kRest) add(Avx512Pairs::PairRest);
  }
}

}  // namespace

const KernelSet& avx512_amx_kernels() {
  // Products take so little of the time that dequantizing for more rows shows.
  static constexpr PairKernels kPairs = {
      .load = LoadRounded<Avx512Pairs>,
      .zip = Avx512Pairs::Zip,
      .qk = Qk,
      .pv = MultiplyValues<true, false>,
      .pv_split = PvSplit<MultiplyValues<true, false>, MultiplyValues<false, true>,
                          MultiplyValues<true, true>>,
      .qk_stored = nullptr,
      .most_rows = 512,
      .stored_rows_of_codes = 24};
  static const KernelSet set = [] {
    KernelSet all = avx512_bf16_kernels();
    all.name = "avx512_amx";
    all.pairs = &kPairs;
    all.bytes = nullptr;  // tiles of bf16 take fewer cycles
    return all;
  }();
  return set;
}

}  // namespace kvant::cpu
