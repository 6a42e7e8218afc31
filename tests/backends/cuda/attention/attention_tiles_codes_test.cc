// Tiles of prompts over codes, which become 16-bit values in pairs: every type of codes and of zero
// points, groups along channels and tokens, tails, scales of all magnitudes, codebooks.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr DataType kCodes[] = {kS8, kU8, kS4, kU4, kS2, kU2};

// 40 rows, more than the kernel on packed codes takes.
constexpr Shape kPrompt{.b0 = 1, .b1 = 2, .ratio = 1, .q_len = 40, .kv_len = 97, .d = 64, .dv = 96};

Case Prompt(const Shape& shape, DataType queries, const Format& k, const Format& v) {
  Case c(shape);
  c.SetQ(queries);
  c.SetK(k);
  c.SetV(v);
  c.AddScale();
  // What `kvant make` asks for: products of 16 bits, over integers too.
  c.spec.fpmath = queries == kBF16 ? FpMath::kBF16 : FpMath::kF16;
  c.spec.apply_to_int = true;
  c.spec.output =
      c.AddOutput(queries, Dims5{shape.b0, shape.b1, shape.ratio, shape.q_len, shape.dv},
                  Dense({shape.b0, shape.b1, shape.ratio, shape.q_len, shape.dv}));
  return c;
}

void Check(const Shape& shape, DataType queries, const Format& k, const Format& v) {
  Case c = Prompt(shape, queries, k, v);
  const std::string kernel = c.CheckOnCudaSimt();
  EXPECT_TRUE(absl::StrContains(kernel, "products of tiles")) << kernel;
}

TEST(AttentionTilesCodesTest, EveryTypeOfZeroPoints) {
  for (const DataType queries : {kF16, kBF16}) {
    for (const DataType codes : kCodes) {
      for (const DataType zeros : {kUndef, kU8, kS8, kU4, kS4, queries}) {
        SCOPED_TRACE(testing::Message()
                     << DataTypeName(queries) << " queries, " << DataTypeName(codes)
                     << ", zero points " << DataTypeName(zeros));
        const Format format{
            .type = codes, .group = {1, 1, 1, 1, 32}, .scales = queries, .zero_points = zeros};
        Check(kPrompt, queries, format, format);
      }
    }
  }
}

TEST(AttentionTilesCodesTest, F8) {
  for (const DataType queries : {kF16, kBF16}) {
    for (const DataType codes : {kF8E4M3, kF8E5M2}) {
      for (const DataType scales : {kF16, kBF16, kF32}) {
        for (const Dims5& group : std::vector<Dims5>{
                 {1, 1, 1, 1, 0}, {1, 1, 1, 1, 16}, {1, 1, 1, 0, 0}, {1, 1, 1, 0, 1}}) {
          SCOPED_TRACE(testing::Message()
                       << DataTypeName(queries) << " queries, " << DataTypeName(codes)
                       << ", scales of " << DataTypeName(scales) << ", groups of " << group[kRow]
                       << " by " << group[kCol]);
          const Format format{.type = codes, .group = group, .scales = scales};
          Check(kPrompt, queries, format, format);
        }
      }
    }
  }
}

// Codes of 0 stand where there is no token, and are less their zero point too small for f16.
TEST(AttentionTilesCodesTest, WhatDoesNotExistIsZero) {
  const Format k{.type = kU8, .group = {1, 1, 1, 1, 0}, .scales = kF16};
  for (const Dims5& group :
       std::vector<Dims5>{{1, 1, 1, 0, 1}, {1, 1, 1, 0, 32}, {1, 1, 1, 1, 0}}) {
    Case c =
        Prompt(kPrompt, kF16, k, {.type = kU8, .group = group, .scales = kF16, .zero_points = kU8});
    KvSegment& v = c.spec.v[0];
    v.data =
        c.AddDense(kU8, v.data.dims, [&](const Dims5&) { return std::floor(c.Random(128, 256)); });
    Quantization& q = *v.quantization;
    q.scales = c.AddDense(kF16, q.scales.dims, [](const Dims5&) { return 300; });
    q.zero_points = c.AddDense(kU8, q.zero_points.dims, [](const Dims5&) { return 255; });
    SCOPED_TRACE(testing::Message() << "groups of " << group[kRow] << " by " << group[kCol]);
    c.CheckOnCudaSimt();
  }
}

TEST(AttentionTilesCodesTest, EveryGroup) {
  for (const DataType queries : {kF16, kBF16}) {
    for (const Dims5& group : std::vector<Dims5>{{1, 1, 1, 1, 8},
                                                 {1, 1, 1, 1, 16},
                                                 {1, 1, 1, 1, 12},
                                                 {1, 1, 1, 1, 0},
                                                 {1, 1, 1, 0, 0},
                                                 {1, 1, 1, 0, 1},
                                                 {1, 1, 1, 16, 1},
                                                 {1, 1, 1, 32, 1},
                                                 {1, 1, 1, 96, 1},
                                                 {1, 1, 1, 128, 1},
                                                 {1, 1, 1, 32, 8},
                                                 {1, 1, 1, 48, 16},
                                                 {1, 1, 1, 64, 32}}) {
      for (const DataType codes : {kS8, kU4, kU2}) {
        Shape shape = kPrompt;
        if (group[kCol] == 12) shape.d = 96;
        if (group[kRow] > 1) shape.kv_len = 192;
        if (group[kRow] == 48) shape.kv_len = 144;
        if (group[kRow] == 128) shape.kv_len = 256;
        SCOPED_TRACE(testing::Message()
                     << DataTypeName(queries) << " queries, " << DataTypeName(codes)
                     << ", groups of " << group[kRow] << " by " << group[kCol]);
        // Scales of another type are floats beside codes.
        for (const DataType scales : {queries, kF32}) {
          const Format format{.type = codes, .group = group, .scales = scales, .zero_points = kU8};
          Check(shape, queries, format, format);
        }
      }
    }
  }
}

TEST(AttentionTilesCodesTest, EveryHeadAndTypeOfScales) {
  for (const int64_t d : {16, 32, 80, 112, 128, 192, 256, 320}) {
    for (const DataType scales : {kF16, kBF16, kF32}) {
      for (const DataType codes : {kU8, kS4}) {
        SCOPED_TRACE(testing::Message() << "heads of " << d << ", " << DataTypeName(codes)
                                        << " with scales of " << DataTypeName(scales));
        Shape shape = kPrompt;
        shape.d = shape.dv = d;
        shape.q_len = d % 32 == 0 ? 40 : 130;
        const Format format{
            .type = codes, .group = {1, 1, 1, 1, 0}, .scales = scales, .zero_points = kS8};
        Check(shape, kF16, format, format);
        Check(shape, kBF16, format, format);
      }
    }
  }
}

TEST(AttentionTilesCodesTest, Codebooks) {
  const auto entries = [](const char* name, float factor) {
    const absl::Span<const float> values = FindCodebook(name)->values;
    std::vector<float> scaled(values.begin(), values.end());
    for (float& x : scaled) x *= factor;
    return scaled;
  };
  for (const DataType queries : {kF16, kBF16}) {
    for (const int64_t group : {1, 8, 16, 32, 0}) {
      for (const float factor : {1.f, 0x1p-5f, 77.f}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(queries) << " queries, groups of " << group
                                        << ", entries times " << factor);
        const Format nf4{.type = kU4,
                         .group = {1, 1, 1, group == 1 ? 0 : 1, group},
                         .scales = queries,
                         .codebook = entries("nf4", factor)};
        Format iq4_nl = nf4;
        iq4_nl.codebook = entries("iq4_nl", factor / 127);
        Check(kPrompt, queries, nf4, nf4);
        Check(kPrompt, queries, nf4, iq4_nl);
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
