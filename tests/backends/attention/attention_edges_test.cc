// The cpu backend against f64 loops, as attention_test.cc: what is at the edges of steps, dropout,
// parameters and lengths.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/kernels/philox.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

using Kind = ScoreStep::Kind;
using Alignment = ScoreStep::Alignment;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

Format Quantized(DataType type, Dims5 group, DataType scales, DataType zero_points) {
  return {.type = type, .group = group, .scales = scales, .zero_points = zero_points};
}

// What hides columns hides them no more: -inf becomes +inf or NaN in columns of tiles, too, in
// which nothing is seen before.
TEST(CpuAttentionEdges, FactorsThatDoNotKeepMinusInfinity) {
  for (const Kind kind : {Kind::kMultiply, Kind::kDivide}) {
    for (const float factor : {-1.f, 0.f, std::numeric_limits<float>::infinity(), 2.f}) {
      Case c = Plain({.b0 = 1, .q_len = 1, .kv_len = 200, .d = 16, .dv = 16});
      ScoreStep band{.kind = Kind::kBand, .right = 63};
      band.operand.constant = kNegInf;
      ScoreStep after{.kind = kind};
      after.operand.constant = factor;
      c.spec.steps.push_back(band);
      c.spec.steps.push_back(after);
      SCOPED_TRACE(testing::Message() << static_cast<int>(kind) << " " << factor);
      c.Check();
      if (HasFailure()) return;
    }
  }
}

// As far away as 64 bits say.
TEST(CpuAttentionEdges, DiagonalsFarAway) {
  for (const double shift : {-9.2e18, -3e9, 3e9, 9.2e18}) {
    for (const bool to_the_right : {false, true}) {
      Case c = Plain({.b0 = 1, .q_len = 2, .kv_len = 70, .d = 16, .dv = 16});
      ScoreStep band{.kind = Kind::kBand, .alignment = Alignment::kRuntime};
      (to_the_right ? band.right : band.left) = 5;
      band.operand.constant = kNegInf;
      band.shift_add.view = c.AddScalar(kS64, shift);
      c.spec.steps.push_back(band);
      c.spec.softmax_mode = SoftmaxMode::kInfAsZero;
      SCOPED_TRACE(testing::Message() << shift << to_the_right);
      c.Check();
      if (HasFailure()) return;
    }
  }
  // Statistics show the distance.
  Case c = Plain({.b0 = 1, .q_len = 2, .kv_len = 70, .d = 16, .dv = 16});
  ScoreStep alibi{.kind = Kind::kAlibi, .alignment = Alignment::kRuntime};
  alibi.operand.constant = 1e-9f;
  alibi.shift_sub.view = c.AddScalar(kS64, 3e9);
  c.spec.steps.push_back(alibi);
  c.AddStats();
  c.Check();
}

// K or V that query heads share, as a view of stride 0 says, with parameters of their own.
TEST(CpuAttentionEdges, ParametersOfQueryHeadsThatShareCodes) {
  for (const bool keys : {false, true}) {
    for (const bool scales_too : {false, true}) {
      Format format = Quantized(kU8, {1, 1, 1, 1, 16}, kF32, kU8);
      format.per_query_head = true;
      Case c = Plain({.b0 = 1, .ratio = 3, .q_len = 2, .kv_len = 70, .d = 32, .dv = 32},
                     keys ? format : Format{}, keys ? Format{} : format);
      KvSegment& segment = keys ? c.spec.k[0] : c.spec.v[0];
      segment.data.strides[2] = 0;
      (scales_too ? segment.quantization->zero_points : segment.quantization->scales).strides[2] =
          0;
      SCOPED_TRACE(testing::Message() << keys << scales_too);
      c.Check(1e-3);
      if (HasFailure()) return;
    }
  }
}

// Some of the batch rows, and of the heads, share parameters.
TEST(CpuAttentionEdges, GroupsOfSomeBatchRowsAndHeads) {
  for (const Dims5& group : {Dims5{2, 1, 1, 1, 16}, Dims5{1, 2, 1, 1, 16}, Dims5{2, 2, 1, 1, 32},
                             Dims5{2, 1, 1, 0, 1}}) {
    for (const DataType type : {kU8, kU4, kF8E4M3}) {
      for (const auto order : {Format::Order::kTokenMajor, Format::Order::kByToken}) {
        Format format = Quantized(type, group, kF16, IsInteger(type) ? kU8 : kUndef);
        format.order = order;
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << testing::PrintToString(group)
                                        << static_cast<int>(order));
        Plain({.b0 = 4, .b1 = 4, .ratio = 2, .q_len = 1, .kv_len = 70, .d = 32, .dv = 32}, format,
              format)
            .Check(1e-3);
        if (HasFailure()) return;
      }
    }
  }
}

// Zero points of 4 bits, one for each of an odd number of tokens; codes that begin within a byte.
TEST(CpuAttentionEdges, WhatBeginsWithinAByte) {
  for (const int64_t kv_len : {65, 130, 131}) {
    for (const DataType type : {kU8, kU4}) {
      const Format format = Quantized(type, {1, 1, 1, 1, 0}, kF16, kU4);
      const Shape shape{
          .b0 = 2, .b1 = 3, .ratio = 2, .q_len = 1, .kv_len = kv_len, .d = 32, .dv = 32};
      SCOPED_TRACE(testing::Message() << kv_len << DataTypeName(type));
      Plain(shape, format, format).Check(1e-3);
      if (HasFailure()) return;
      Case c = Plain(shape, format, format);
      for (KvSegment* segment : {&c.spec.k[0], &c.spec.v[0]}) {
        const View& data = segment->data;
        segment->data = c.AddInput(
            type, data.dims, Dense(data.dims),
            [&](const Dims5&) { return std::floor(c.Random(0, 16)); }, 1);
      }
      c.Check(1e-3);
      if (HasFailure()) return;
    }
  }
}

// Offsets are of two numbers where there is one sequence.
TEST(CpuAttentionEdges, RaggedQueriesOfOneSequence) {
  for (const int64_t q_len : {5, 100}) {
    Case c = Plain({.b0 = 1, .q_len = q_len, .kv_len = 70, .d = 16, .dv = 16});
    View offsets = c.AddDense(kS32, {2, 1, 1, 1, 1},
                              [&](const Dims5& p) { return static_cast<double>(p[0] * q_len); });
    offsets.dims[0] = 1;
    c.spec.query_offsets = offsets;
    c.Check();
  }
}

// First tokens may be behind a row's last.
TEST(CpuAttentionEdges, FirstTokensBehindTheLength) {
  for (const int64_t q_len : {1, 40}) {
    Case c = Plain({.b0 = 3, .q_len = q_len, .kv_len = 400, .d = 16, .dv = 16});
    const double lengths[] = {300, 0, 20}, first[] = {0, 300, 20};
    c.spec.kv_lengths =
        c.AddDense(kS32, {3, 1, 1, 1, 1}, [&](const Dims5& p) { return lengths[p[0]]; });
    c.spec.kv_first =
        c.AddDense(kS32, {3, 1, 1, 1, 1}, [&](const Dims5& p) { return first[p[0]]; });
    c.spec.softmax_mode = SoftmaxMode::kInfAsZero;
    c.AddStats();
    c.Check();
  }
}

// NaN has the code 0.
TEST(CpuAttentionEdges, RoundedProbabilitiesThatAreNoNumbers) {
  for (const int64_t zero_point : {0, 3}) {
    for (const bool empty : {false, true}) {
      for (const SoftmaxMode mode : {SoftmaxMode::kNone, SoftmaxMode::kInfAsZero}) {
        // Then the output would be a sum of values.
        if (empty && mode == SoftmaxMode::kNone && zero_point != 0) continue;
        Case c = Plain({.b0 = 1, .q_len = 2, .kv_len = 70});
        auto* const q = static_cast<float*>(c.inputs[c.spec.q.port].data());
        if (!empty) q[5] = std::nanf("");
        ScoreStep band{.kind = Kind::kBand, .right = 0, .alignment = Alignment::kRuntime};
        band.shift_sub.constant = empty ? 1 : -100;  // the first row sees nothing
        band.operand.constant = kNegInf;
        c.spec.steps.push_back(band);
        c.spec.softmax_mode = mode;
        c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, zero_point};
        SCOPED_TRACE(testing::Message() << zero_point << empty << static_cast<int>(mode));
        c.Check(5e-3);
      }
    }
  }
}

// A NaN has the code 0, which counts in every column where the zero point is another: bands hide
// none of them.
TEST(CpuAttentionEdges, NanBehindABandCounts) {
  for (const int64_t kv_len : {60, 300, 700}) {
    for (const int64_t q_len : {3, 150}) {
      Case c = Plain({.b0 = 1, .q_len = q_len, .kv_len = kv_len});
      static_cast<float*>(c.inputs[c.spec.q.port].data())[5] = std::nanf("");
      ScoreStep band{.kind = Kind::kBand, .right = 0};
      band.operand.constant = kNegInf;
      c.spec.steps.push_back(band);
      c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 3};
      c.Check(5e-3);
    }
  }
}

// Of 1100 tokens, which are cut into four splits, three chunks are made.
TEST(CpuAttentionEdges, DropoutMasksOfEveryTypeAndLayout) {
  for (const DataType type : {kU8, kBoolean, kS8, kF32, kF16}) {
    for (const int64_t gap : {1, 2}) {
      for (const int64_t kv_len : {67, 521, 1100}) {
        Case c =
            Plain({.b0 = 1, .b1 = 20, .ratio = 1, .q_len = 1, .kv_len = kv_len, .d = 8, .dv = 8});
        Dropout& dropout = c.spec.dropout.emplace();
        dropout.seed.view = c.AddScalar(kS64, 12345);
        dropout.offset.view = c.AddScalar(kS64, 77);
        dropout.probability.view = c.AddScalar(kF32, 0.3);
        const Dims5 dims{1, 20, 1, 1, kv_len};
        Dims5 strides = Dense(dims);
        for (int64_t& stride : strides) stride *= gap;
        dropout.mask = c.AddOutput(type, dims, strides);
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << gap << " " << kv_len);
        c.Check();
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuAttentionEdges, DropoutReadsAllBitsOfItsSeed) {
  const int64_t seed = (int64_t{1} << 62) + 1, offset = (int64_t{1} << 61) + 1;
  Case c = Plain({.b0 = 1, .kv_len = 67});
  Dropout& dropout = c.spec.dropout.emplace();
  dropout.seed.view = c.AddScalar(kS64, 0);
  dropout.offset.view = c.AddScalar(kS64, 0);
  dropout.probability.view = c.AddScalar(kF32, 0.5);
  std::memcpy(c.inputs[dropout.seed.view.port].data(), &seed, sizeof(seed));
  std::memcpy(c.inputs[dropout.offset.view.port].data(), &offset, sizeof(offset));
  const Dims5 dims{1, 2, 3, 2, 67};
  dropout.mask = c.AddOutput(kU8, dims, Dense(dims));
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    ASSERT_TRUE(c.Run(*set, 1).ok());
    const auto* const mask = static_cast<const uint8_t*>(c.outputs[dropout.mask.port].data());
    for (int64_t at = 0; at < 2 * 3 * 2 * 67; ++at) {
      ASSERT_EQ(mask[at], DropoutKeeps(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset),
                                       static_cast<uint64_t>(at), 0.5))
          << set->name << " " << at;
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
