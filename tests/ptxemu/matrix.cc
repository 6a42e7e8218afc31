// mma.sync, ldmatrix and movmatrix, by the fragment layouts of the PTX ISA (section "Warp level
// matrix instructions"). In a lane, g = lane / 4 and t = lane % 4.
#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

#include "kvant/tests/ptxemu/decoder.h"
#include "kvant/tests/ptxemu/numbers.h"

namespace kvant::ptxemu {
namespace {

constexpr int kRows = 16, kColumns = 8, kMostK = 16;

// A and B of a product; C and D are in registers.
struct Operands {
  double a[kRows][kMostK];
  double b[kMostK][kColumns];
};

// ---- Sums

// Tensor cores are measured to align terms to the largest, to cut them off so many bits below it,
// to add them as integers, and to cut the sum off to f32.
constexpr int kKeptBits = 25;

// c and `count` terms, added at once.
float TruncatedSum(const double* terms, int count, float c) {
  constexpr int kNone = -10000;
  int largest = kNone;
  bool is_finite = true;
  const auto look = [&](double t) {
    is_finite = is_finite && std::isfinite(t);
    if (t != 0 && std::isfinite(t)) largest = std::max(largest, std::ilogb(t));
  };
  for (int n = 0; n < count; ++n) look(terms[n]);
  look(static_cast<double>(c));
  if (!is_finite) {
    auto sum = static_cast<double>(c);
    for (int n = 0; n < count; ++n) sum += terms[n];
    return Canonical(static_cast<float>(sum));
  }
  if (largest == kNone) return c;
  const double scale = std::ldexp(1.0, kKeptBits - largest);
  double sum = std::trunc(static_cast<double>(c) * scale);
  for (int n = 0; n < count; ++n) sum += std::trunc(terms[n] * scale);
  sum /= scale;
  const auto rounded = static_cast<float>(sum);
  const bool is_away = std::fabs(static_cast<double>(rounded)) > std::fabs(sum);
  return std::isfinite(rounded) && is_away ? std::nextafter(rounded, 0.0f) : rounded;
}

// D = A B + C. `step` terms at once, where sums are truncated. c0 and c1 are in row g,
// c2 and c3 in row g + 8; in columns 2t and 2t + 1.
template <int kK>
void Multiply(Warp& w, const Instruction& i, const Operands& x, int step) {
  const bool truncate = w.launch->options->truncate_mma;
  double sums[kRows][kColumns];
  for (int row = 0; row < kRows && !truncate; ++row) {
    double sum[kColumns] = {};
    for (int n = 0; n < kK; ++n) {
      for (int column = 0; column < kColumns; ++column) sum[column] += x.a[row][n] * x.b[n][column];
    }
    std::copy(sum, sum + kColumns, sums[row]);
  }
  const Slot* c_slots = i.src + i.srcs - 4;
  float d[4][kLanes];
  for (int e = 0; e < 4; ++e) {
    const auto* c = w.Src<float>(c_slots[e]);
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4 + (e >= 2 ? 8 : 0), column = l % 4 * 2 + (e & 1);
      if (!truncate) {
        d[e][l] = Canonical(static_cast<float>(sums[row][column] + static_cast<double>(c[l])));
        continue;
      }
      double terms[kMostK];
      for (int n = 0; n < kK; ++n) terms[n] = x.a[row][n] * x.b[n][column];
      float sum = c[l];
      for (int n = 0; n < kK; n += step) sum = TruncatedSum(terms + n, std::min(step, kK - n), sum);
      d[e][l] = sum;
    }
  }
  // D may be in the registers of C.
  for (int e = 0; e < 4; ++e) std::copy(d[e], d[e] + kLanes, w.Dst<float>(i.dst[e]));
}

// ---- Fragments. src: words of A, then of B, then C.

struct F16 {
  static double Of(uint32_t word, int half) {
    return static_cast<double>(OfF16(static_cast<uint16_t>(word >> (16 * half))));
  }
};
struct Bf16 {
  static double Of(uint32_t word, int half) {
    return static_cast<double>(OfBf16(static_cast<uint16_t>(word >> (16 * half))));
  }
};

// Of 16-bit types, two elements in a word. A, of k = 16: words 0 and 2 are in row g, 1 and 3 in row
// g + 8; words 0 and 1 in columns 2t and 2t + 1, 2 and 3 in those and 8. B: word 0 in rows 2t and
// 2t + 1, word 1 in those and 8; in column g. Of k = 8, only the first half of the words is there.
template <class Type, int kK>
void MmaHalves(Warp& w, const Instruction& i) {
  constexpr int kWordsOfA = kK / 4, kWordsOfB = kK / 8;
  Operands x;
  for (int e = 0; e < 2 * kWordsOfA; ++e) {
    const int word = e / 2, half = e & 1;
    const auto* words = w.Src<uint32_t>(i.src[word]);
    for (int l = 0; l < kLanes; ++l) {
      x.a[l / 4 + word % 2 * 8][l % 4 * 2 + half + word / 2 * 8] = Type::Of(words[l], half);
    }
  }
  for (int e = 0; e < 2 * kWordsOfB; ++e) {
    const int word = e / 2, half = e & 1;
    const auto* words = w.Src<uint32_t>(i.src[kWordsOfA + word]);
    for (int l = 0; l < kLanes; ++l) {
      x.b[l % 4 * 2 + half + word * 8][l / 4] = Type::Of(words[l], half);
    }
  }
  Multiply<kK>(w, i, x, 8);
}

double Tf32(uint32_t word) { return static_cast<double>(FloatOf(word & 0xffffe000u)); }

// Of tf32, one element in a word. A, of k = 8: words 0 and 2 are in row g, 1 and 3 in row g + 8;
// words 0 and 1 in column t, 2 and 3 in t + 4. B: word 0 in row t, word 1 in t + 4; in column g. Of
// k = 4, only the first half of the words is there.
template <int kK>
void MmaTf32(Warp& w, const Instruction& i) {
  constexpr int kWordsOfA = kK / 2, kWordsOfB = kK / 4;
  Operands x;
  for (int word = 0; word < kWordsOfA; ++word) {
    const auto* words = w.Src<uint32_t>(i.src[word]);
    for (int l = 0; l < kLanes; ++l) {
      x.a[l / 4 + word % 2 * 8][l % 4 + word / 2 * 4] = Tf32(words[l]);
    }
  }
  for (int word = 0; word < kWordsOfB; ++word) {
    const auto* words = w.Src<uint32_t>(i.src[kWordsOfA + word]);
    for (int l = 0; l < kLanes; ++l) x.b[l % 4 + word * 4][l / 4] = Tf32(words[l]);
  }
  Multiply<kK>(w, i, x, 4);
}

struct Shape {
  Handler run;
  size_t words_of_a, words_of_b;
};
const std::unordered_map<std::string, Shape>& Shapes() {
  static const auto* const table = new std::unordered_map<std::string, Shape>{
      {"m16n8k16.row.col.f32.f16.f16.f32", {MmaHalves<F16, 16>, 4, 2}},
      {"m16n8k8.row.col.f32.f16.f16.f32", {MmaHalves<F16, 8>, 2, 1}},
      {"m16n8k16.row.col.f32.bf16.bf16.f32", {MmaHalves<Bf16, 16>, 4, 2}},
      {"m16n8k8.row.col.f32.bf16.bf16.f32", {MmaHalves<Bf16, 8>, 2, 1}},
      {"m16n8k8.row.col.f32.tf32.tf32.f32", {MmaTf32<8>, 4, 2}},
      {"m16n8k4.row.col.f32.tf32.tf32.f32", {MmaTf32<4>, 2, 1}}};
  return *table;
}

// ---- Matrices of 8 x 8 16-bit elements

// Word n of a lane holds elements 2t and 2t + 1 of row g of matrix n; transposed, of column g.
uint32_t WordOf(const uint16_t (&matrix)[8][8], bool transposed, int lane) {
  const int g = lane / 4, t = lane % 4 * 2;
  const uint32_t low = transposed ? matrix[t][g] : matrix[g][t];
  const uint32_t high = transposed ? matrix[t + 1][g] : matrix[g][t + 1];
  return high << 16 | low;
}

// Lane 8n + r has the address of row r of matrix n. mode: transposed.
void LoadMatrix(Warp& w, const Instruction& i) {
  uint16_t matrices[4][8][8];
  for (int l = 0; l < 8 * i.count; ++l) {
    const uint64_t address = (w.Get(i.src[0], l) + static_cast<uint64_t>(i.offset)) & 0xffffffffu;
    w.Read(kShared, l, address, 16, matrices[l / 8][l % 8], true, true);
  }
  for (int n = 0; n < i.count; ++n) {
    w.Put<uint32_t>(i.dst[n], [&](int l) { return WordOf(matrices[n], i.mode != 0, l); });
  }
}

void TransposeMatrix(Warp& w, const Instruction& i) {
  const auto* a = w.Src<uint32_t>(i.src[0]);
  uint16_t matrix[8][8];
  for (int l = 0; l < kLanes; ++l) {
    matrix[l / 4][l % 4 * 2] = static_cast<uint16_t>(a[l]);
    matrix[l / 4][l % 4 * 2 + 1] = static_cast<uint16_t>(a[l] >> 16);
  }
  w.Put<uint32_t>(i.dst[0], [&](int l) { return WordOf(matrix, true, l); });
}

}  // namespace

// mma.sync.aligned.SHAPE.row.col.D.A.B.C
void DecodeMma(Decoder& d) {
  std::string shape;
  for (size_t n = 3; n < d.opcode().size(); ++n) {
    shape.append(shape.empty() ? "" : ".").append(d.opcode()[n]);
  }
  const auto found = Shapes().find(shape);
  if (found == Shapes().end()) d.Unknown("shape or types");
  const auto count = [&](size_t n) { return d.operand(n).parts.size(); };
  if (count(0) != 4 || count(1) != found->second.words_of_a ||
      count(2) != found->second.words_of_b || count(3) != 4) {
    d.Unknown("vector");
  }
  d.now().run = found->second.run;
  d.now().together = Together::kWarp;
  d.now().sink = true;
  d.AddResults(d.operand(0), 4);
  for (size_t n = 1; n < 4; ++n) d.AddSources(d.operand(n), 4);
}

// ldmatrix.sync.aligned.m8n8.COUNT{.trans}.shared.b16
void DecodeLoadMatrix(Decoder& d) {
  Instruction& i = d.now();
  if (!d.Has("m8n8") || d.type() != "b16") d.Unknown("shape");
  i.run = LoadMatrix;
  i.mode = d.Has("trans") ? 1 : 0;
  i.count = d.Has("x4") ? 4 : d.Has("x2") ? 2 : 1;
  i.together = Together::kWarp;
  i.sink = true;
  d.AddResults(d.operand(0), 4);
  if (i.dsts != i.count) d.Unknown("vector");
  if (!d.AddAddress(d.operand(1), &i.offset)) d.Unknown("address without a register");
}

void DecodeMoveMatrix(Decoder& d) {
  if (!d.Has("m8n8") || !d.Has("trans") || d.type() != "b16") d.Unknown("shape");
  d.now().together = Together::kWarp;
  d.Use({TransposeMatrix, 4, {4}});
}

}  // namespace kvant::ptxemu
