// f32 products on codes that stand for floats, f8 and positions in a codebook, against f64 loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/attention/judge.h"

namespace kvant::cpu {
namespace {

constexpr DataType kCodeTypes[] = {kF8E4M3, kF8E5M2, kU4};

// Groups along the head; 0: the whole of it. kU4 is for positions in a codebook.
Format ByHead(DataType type, int64_t group, DataType scales = kF16) {
  Format format{.type = type, .group = {1, 1, 1, 1, group}, .scales = scales};
  if (type == kU4) format.codebook = {std::begin(kNf4Codebook), std::end(kNf4Codebook)};
  return format;
}

std::string KernelOf(const Case& c) {
  return (*CompileAttention(c.spec, HighestKernels()))->kernel();
}

bool HighestTakesThem() {
  return HighestKernels().codes != nullptr && HighestKernels().codes->floats != nullptr;
}

// The highest set's kernel multiplies both as codes, so that what passes here did.
void CheckOnCodes(Case& c) {
  if (HighestTakesThem()) {
    EXPECT_NE(KernelOf(c).find("K by f32 products on codes, V by f32 products on codes"),
              std::string::npos)
        << KernelOf(c);
  }
  c.Check();
}

TEST(CpuFloatCodes, EveryTypeHeadSizeAndNumberOfRows) {
  for (DataType type : kCodeTypes) {
    for (int64_t d : {16, 32, 48, 64, 80, 128, 256}) {
      for (int64_t ratio : {1, 2, 3, 4, 5, 15}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d << " " << ratio);
        Case c = Plain({.b0 = 1, .ratio = ratio, .q_len = 1, .kv_len = 83, .d = d, .dv = d},
                       ByHead(type, d >= 32 && d % 32 == 0 ? 32 : 0), ByHead(type, 0, kF32));
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

// Rows that end within 16 bytes.
TEST(CpuFloatCodes, OddHeadSizes) {
  for (DataType type : kCodeTypes) {
    const int64_t step = type == kU4 ? 2 : 1;
    for (int64_t d : {1, 3, 9, 21, 37, 65}) {
      for (int64_t ratio : {1, 3, 4}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d * step << " " << ratio);
        Case c = Plain({.b0 = 1,
                        .ratio = ratio,
                        .q_len = 1,
                        .kv_len = 70,
                        .d = d * step,
                        .dv = (d + 2) * step},
                       ByHead(type, 0), ByHead(type, 0, kBF16));
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuFloatCodes, EveryLength) {
  for (DataType type : kCodeTypes) {
    for (int64_t s : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 95, 128, 257}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << s);
      Case c = Plain({.ratio = 5, .q_len = 2, .kv_len = s, .d = 64, .dv = 32}, ByHead(type, 32),
                     ByHead(type, 0));
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuFloatCodes, GroupsAlongTheHead) {
  for (DataType type : kCodeTypes) {
    for (int64_t group : {16, 32, 48, 64, 96, 192, 0}) {
      // A vector of 4-bit codes has 32 channels of a token.
      if (type == kU4 && group % 32 != 0) continue;
      for (int64_t ratio : {1, 3, 4}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << group << " " << ratio);
        Case c = Plain({.b0 = 1, .ratio = ratio, .q_len = 1, .kv_len = 100, .d = 192, .dv = 192},
                       ByHead(type, group, kBF16), ByHead(type, group, kF16));
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuFloatCodes, F8WithoutScales) {
  for (DataType type : {kF8E4M3, kF8E5M2}) {
    for (int64_t d : {40, 64, 128}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d);
      Case c = Plain({.ratio = 4, .q_len = 1, .kv_len = 83, .d = d, .dv = d}, {.type = type},
                     {.type = type});
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

// One scale per run of tokens and group of channels, per head, or for all.
TEST(CpuFloatCodes, CoarseGroups) {
  const Dims5 groups[] = {{1, 1, 1, 10, 32}, {1, 1, 1, 64, 64}, {1, 1, 1, 0, 0}, {0, 0, 1, 0, 0}};
  for (DataType type : kCodeTypes) {
    for (const Dims5& group : groups) {
      Format format = ByHead(type, 0, kF32);
      format.group = group;
      Case c = Plain({.ratio = 2, .q_len = 1, .kv_len = 320, .d = 64, .dv = 64}, format, format);
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << testing::PrintToString(group));
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuFloatCodes, EveryLayoutWithDenseChannels) {
  using Order = Format::Order;
  for (Order order : {Order::kTokenMajor, Order::kPadded, Order::kInterleaved}) {
    for (DataType type : kCodeTypes) {
      Format format = ByHead(type, 32);
      format.order = order;
      Case c = Plain({.ratio = 4, .q_len = 1, .kv_len = 131, .d = 64, .dv = 64}, format, format);
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << static_cast<int>(order));
      c.Check();
      if (HasFailure()) return;
    }
  }
}

// Beside recent tokens in full precision, cut at different tokens for K and V.
TEST(CpuFloatCodes, SegmentsWithDifferentBoundaries) {
  for (DataType type : kCodeTypes) {
    for (int64_t k_cut : {32, 64, 160}) {
      for (int64_t v_cut : {5, 64, 95}) {
        Case c(Shape{.b0 = 1, .ratio = 3, .q_len = 1, .kv_len = 200, .d = 64, .dv = 64});
        c.SetQ(kF32);
        c.SetK(ByHead(type, 32), {k_cut, 200 - k_cut});
        c.spec.k[1] = c.MakeSegment({.type = kF16}, 200 - k_cut, 64);
        c.SetV(ByHead(type, 0), {v_cut, 200 - v_cut});
        c.spec.v[1] = c.MakeSegment({.type = kF32}, 200 - v_cut, 64);
        c.AddScale();
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << k_cut << " " << v_cut);
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

// Bytes 0 to 255 in turn, but for those that are no number, and in an order that differs from row
// to row.
void FillWithNumbers(Case& c, int port, DataType type) {
  auto* bytes = static_cast<uint8_t*>(c.inputs[port].data());
  for (size_t i = 0; i < c.inputs[port].bytes(); ++i) {
    const auto byte = static_cast<uint8_t>(i * 29 + i / 256);
    const int largest = type == kF8E4M3 ? 0x7e : type == kF8E5M2 ? 0x7b : 0xff;
    bytes[i] = (byte & 0x7f) > largest ? byte & 0x80 : byte;
  }
}

TEST(CpuFloatCodes, EveryCode) {
  for (DataType type : kCodeTypes) {
    Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 128, .d = 64, .dv = 64},
                   ByHead(type, 0, kF32), ByHead(type, 0, kF32));
    FillWithNumbers(c, c.spec.k[0].data.port, type);
    FillWithNumbers(c, c.spec.v[0].data.port, type);
    if (type == kF8E5M2) {
      // Where values of 2^15 cancel, f32 sums of the rest are not as near as Check wants them.
      auto* v = static_cast<uint8_t*>(c.inputs[c.spec.v[0].data.port].data());
      for (size_t i = 0; i < c.inputs[c.spec.v[0].data.port].bytes(); ++i) v[i] &= 0xbf;
    }
    // K's values so small that each counts.
    auto* scales = static_cast<float*>(c.inputs[c.spec.k[0].quantization->scales.port].data());
    for (int t = 0; t < 128; ++t) scales[t] = type == kF8E5M2 ? 1e-6f : 1e-4f;
    SCOPED_TRACE(DataTypeName(type));
    CheckOnCodes(c);
    if (HasFailure()) return;
  }
}

// Numbers of 2^-9 or 2^-16 alone: a kernel that took them for zero would be off by all of it.
TEST(CpuFloatCodes, NumbersBelowTheNormalOnes) {
  for (DataType type : {kF8E4M3, kF8E5M2}) {
    Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 3, .q_len = 1, .kv_len = 70, .d = 32, .dv = 32},
                   ByHead(type, 0, kF32), ByHead(type, 0, kF32));
    for (const int port : {c.spec.k[0].data.port, c.spec.v[0].data.port}) {
      auto* bytes = static_cast<uint8_t*>(c.inputs[port].data());
      for (size_t i = 0; i < c.inputs[port].bytes(); ++i) {
        bytes[i] = static_cast<uint8_t>(i * 5 % (type == kF8E4M3 ? 8 : 4) | (i % 3 == 0 ? 128 : 0));
      }
    }
    for (const int port :
         {c.spec.k[0].quantization->scales.port, c.spec.v[0].quantization->scales.port}) {
      auto* scales = static_cast<float*>(c.inputs[port].data());
      for (int t = 0; t < 70; ++t) scales[t] = (type == kF8E4M3 ? 128.f : 16384.f) + t;
    }
    SCOPED_TRACE(DataTypeName(type));
    CheckOnCodes(c);
    if (HasFailure()) return;
  }
}

// Products of codes with such queries exceed f32 before the scales are applied, scores do not.
TEST(CpuFloatCodes, QueriesThatOnlyScalesMakeSmall) {
  for (DataType type : kCodeTypes) {
    Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 3, .q_len = 1, .kv_len = 70, .d = 64, .dv = 64},
                   ByHead(type, 0, kF32), ByHead(type, 0, kF32));
    FillWithNumbers(c, c.spec.k[0].data.port, type);
    auto* q = static_cast<float*>(c.inputs[c.spec.q.port].data());
    for (int i = 0; i < 3 * 64; ++i) q[i] *= 1e36f;
    auto* scales = static_cast<float*>(c.inputs[c.spec.k[0].quantization->scales.port].data());
    for (int t = 0; t < 70; ++t) scales[t] = type == kU4 ? 1e-36f : 1e-38f;
    SCOPED_TRACE(DataTypeName(type));
    c.Check();
    // One row's NaN hides no other's size.
    q[64] = std::nanf("");
    for (int i = 2 * 64; i < 3 * 64; ++i) q[i] *= 1e-36f;
    c.Check();
    if (HasFailure()) return;
  }
}

// Products of such scales with probabilities, or of ordinary ones with small probabilities, have
// few bits left; products with codes have all.
TEST(CpuFloatCodes, WeightsNearTheEndOfF32) {
  struct Sizes {
    double number, scale, of_zeros, bias;
  };
  for (const Sizes& sizes : {Sizes{40960, 1e-37, 1e-37, 12}, Sizes{40960, 1e-37, 1, 12},
                             Sizes{40960, 1e-10, 1e-10, 74}, Sizes{1e20, 1e-19, 1e-19, 60}}) {
    const bool in_codebook = sizes.number > 57344;
    Format format = ByHead(in_codebook ? kU4 : kF8E5M2, 0, kF32);
    for (float& x : format.codebook) x *= static_cast<float>(sizes.number);
    Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 1, .kv_len = 40, .d = 32, .dv = 32},
                   format, format);
    ForEachPosition(c.spec.q.dims, [&](const Dims5& p) {
      StoreElement(kF32, c.inputs[c.spec.q.port].data(), IndexOf(c.spec.q, p), 0);
    });
    // All but the first token, which takes the probability and has no values.
    const KvSegment& v = c.spec.v[0];
    ForEachPosition(v.data.dims, [&](const Dims5& p) {
      const double zero = in_codebook ? 7 : 0, code = in_codebook ? 15 : sizes.number;
      StoreElement(v.data.type, c.inputs[v.data.port].data(), IndexOf(v.data, p),
                   p[3] == 0 ? zero : code);
    });
    const View& scales = v.quantization->scales;
    ForEachPosition(scales.dims, [&](const Dims5& p) {
      StoreElement(kF32, c.inputs[scales.port].data(), IndexOf(scales, p),
                   p[3] == 0 ? sizes.of_zeros : sizes.scale);
    });
    ScoreStep bias;
    bias.kind = ScoreStep::Kind::kAdd;
    bias.operand.view = c.AddDense(kF32, {1, 1, 1, 1, c.shape.kv_len},
                                   [&](const Dims5& p) { return p[4] == 0 ? sizes.bias : 0; });
    c.spec.steps.push_back(bias);
    const std::vector<double> expected = c.Expected();
    for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
      ASSERT_TRUE(c.Run(*set, 1).ok());
      EXPECT_LE(c.RelativeError(expected), 1e-6)
          << set->name << ", " << sizes.scale << ", " << sizes.of_zeros;
    }
  }
}

// What is not finite in one head stays there, and shows there: a query, a code of K or V, a scale.
TEST(CpuFloatCodes, NotFiniteValuesStayInTheirHead) {
  for (DataType type : {kF8E4M3, kF8E5M2}) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (int where : {0, 1, 2, 3, 4}) {
        Case c = Plain({.b0 = 2, .b1 = 2, .ratio = 2, .q_len = 1, .kv_len = 100, .d = 32, .dv = 32},
                       ByHead(type, 16, kF32), ByHead(type, 0, kF32));
        const auto& k = c.spec.k[0];
        const auto& v = c.spec.v[0];
        if (where < 3) {
          const int port = where == 0   ? c.spec.q.port
                           : where == 1 ? k.quantization->scales.port
                                        : v.quantization->scales.port;
          static_cast<float*>(c.inputs[port].data())[40] = bad;
        } else {
          const uint8_t code = type == kF8E5M2 && std::isinf(bad) ? 0x7c : 0x7f;
          const int port = where == 3 ? k.data.port : v.data.port;
          static_cast<uint8_t*>(c.inputs[port].data())[1000] = code;
        }
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << bad << " " << where);
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuFloatCodes, TheKernelSaysWhyItDoesNotRunOnCodes) {
  if (!HighestTakesThem()) GTEST_SKIP() << "this CPU has no products on such codes";
  const Shape shape{.q_len = 1, .d = 64, .dv = 64};
  EXPECT_NE(KernelOf(Plain(shape, ByHead(kU4, 16), {})).find("groups of 16 channels"),
            std::string::npos);
  Format infinite = ByHead(kU4, 32);
  infinite.codebook[3] = std::numeric_limits<float>::infinity();
  EXPECT_NE(KernelOf(Plain(shape, infinite, {})).find("numbers that are not finite"),
            std::string::npos);
  Format by_channel = ByHead(kU4, 1);
  by_channel.group = {1, 1, 1, 32, 1};
  EXPECT_NE(KernelOf(Plain({.q_len = 1, .kv_len = 64, .d = 64, .dv = 64}, by_channel, {}))
                .find("scales by channel"),
            std::string::npos);
}

}  // namespace
}  // namespace kvant::cpu
