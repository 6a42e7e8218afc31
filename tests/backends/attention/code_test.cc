// Integer products on stored codes, against f64 loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr DataType kCodeTypes[] = {kS8, kU8, kS4, kU4, kS2, kU2};
// Queries and weights have 15 bits; values here are about 1 and scores a few units.
constexpr double kTolerance = 5e-4;

int BitsOfType(DataType type) { return static_cast<int>(BitsOf(type)); }

Format ByHead(DataType type, int64_t group, DataType scales = kF16, DataType zps = kUndef) {
  return {.type = type, .group = {1, 1, 1, 1, group}, .scales = scales, .zero_points = zps};
}
Format ByChannel(DataType type, int64_t run, DataType scales = kF32, DataType zps = kUndef) {
  return {.type = type, .group = {1, 1, 1, run, 1}, .scales = scales, .zero_points = zps};
}

// The highest set's kernel runs integer products for both, so that what passes here ran them.
void CheckOnCodes(Case& c) {
  const std::string kernel = (*CompileAttention(c.spec, HighestKernels()))->kernel();
  if (HighestKernels().codes != nullptr) {
    EXPECT_NE(kernel.find("K by integer products"), std::string::npos) << kernel;
    EXPECT_NE(kernel.find("V by integer products"), std::string::npos) << kernel;
  }
  c.Check(kTolerance);
}

TEST(CpuCodes, EveryTypeHeadSizeAndNumberOfRows) {
  for (DataType type : kCodeTypes) {
    for (int64_t d : {16, 48, 64, 80, 128, 256}) {
      for (int64_t ratio : {1, 2, 3, 4, 5, 8, 15}) {
        for (int64_t group : {0, 16}) {
          SCOPED_TRACE(testing::Message()
                       << DataTypeName(type) << " " << d << " " << ratio << " " << group);
          Case c = Plain({.b0 = 1, .ratio = ratio, .q_len = 1, .kv_len = 83, .d = d, .dv = d},
                         ByHead(type, 16), ByHead(type, group));
          CheckOnCodes(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// More rows than those of other formats, whose tiles need not be dequantized.
TEST(CpuCodes, ManyRows) {
  for (DataType type : {kS8, kU4, kS2}) {
    for (int64_t q_len : {33, 47, 64}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << q_len);
      Case c = Plain({.b0 = 1, .ratio = 1, .q_len = q_len, .kv_len = 150, .d = 64, .dv = 48},
                     ByHead(type, 16, kF16, kS8), ByHead(type, 16));
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, HowManyRowsAreMultipliedAsStored) {
  const Format codes = ByHead(kU4, 32), f16{.type = kF16};
  const struct {
    Format k, v;
    bool coded, short_runs = false;
  } cases[] = {{codes, codes, true},
               {ByChannel(kS8, 128), ByHead(kS8, 0), true},
               {ByChannel(kS8, 64), codes, false},
               {codes, ByChannel(kS8, 16), false, true},
               {ByChannel(kF8E4M3, 64), codes, false, true},
               {codes, ByHead(kU4, 8), false},
               {codes, f16, false},
               {f16, f16, false}};
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    for (const auto& [k, v, coded, short_runs] : cases) {
      for (FpMath fpmath : {FpMath::kStrict, FpMath::kAny}) {
        const bool by_pairs = fpmath == FpMath::kAny && set->pairs != nullptr;
        const bool on_codes = set->codes != nullptr && (k.type != kF16 || v.type != kF16);
        int64_t most = by_pairs ? set->pairs->stored_rows_of_codes : set->stored_rows_of_codes;
        if (!coded || set->codes == nullptr) most = std::min(most, set->stored_rows);
        if (short_runs && set->codes != nullptr) most = std::min(most, set->stored_rows_of_runs);
        for (const int64_t rows : {most, most + 1}) {
          Case c =
              Plain({.b0 = 1, .b1 = 1, .ratio = 1, .q_len = rows, .kv_len = 128, .d = 32, .dv = 32},
                    k, v);
          c.spec.fpmath = fpmath;
          c.spec.apply_to_int = true;
          const Plan plan(c.spec, *set);
          SCOPED_TRACE(testing::Message() << set->name << " " << rows << ": " << plan.ToString());
          const bool stored = rows == most && set->qk_stored != nullptr;
          EXPECT_EQ(plan.problem().products, stored     ? Products::kStoredRows
                                             : by_pairs ? Products::kPairs
                                                        : Products::kTiles);
          const double of_tiles = by_pairs ? 1e-2 : 0;
          EXPECT_EQ(plan.rounding(), !stored ? of_tiles : on_codes ? kRoundingOfCodes : 0);
          if (set != &HighestKernels()) continue;  // Check runs them all
          // Relative to the output; `rounding` is to what it would be if no values cancelled.
          c.Check(stored ? kTolerance : std::max(1.5 * of_tiles, kTolerance));
          if (HasFailure()) return;
        }
        // So are ragged sequences of so few, beside longer ones.
        Case c = Plain(
            {.b0 = 1, .b1 = 1, .ratio = 1, .q_len = 100, .kv_len = 128, .d = 32, .dv = 32}, k, v);
        c.spec.fpmath = fpmath;
        c.spec.apply_to_int = true;
        c.spec.query_offsets = c.AddDense(kS32, {2, 1, 1, 1, 1}, [](const Dims5&) { return 0; });
        const std::string text = Plan(c.spec, *set).ToString();
        const std::string few = absl::StrCat("of sequences with at most ", most, " rows K by ");
        EXPECT_EQ(absl::StrContains(text, few), set->qk_stored != nullptr) << set->name << text;
      }
    }
  }
}

// Head sizes that fill neither a vector nor a dword of codes, as far as rows begin at bytes.
TEST(CpuCodes, OddHeadSizes) {
  for (DataType type : kCodeTypes) {
    const int64_t step = 8 / BitsOfType(type);
    for (int64_t d : {3, 5, 9, 21, 37}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << d * step);
      Case c = Plain({.b0 = 1, .q_len = 1, .kv_len = 70, .d = d * step, .dv = d * step},
                     ByHead(type, 0), ByHead(type, 0, kF32, kF32));
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, EveryLength) {
  for (int64_t s : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 95, 128, 257}) {
    SCOPED_TRACE(s);
    Case c = Plain({.ratio = 5, .q_len = 2, .kv_len = s, .d = 64, .dv = 32},
                   ByHead(kU4, 32, kF16, kU8), ByHead(kS8, 16));
    CheckOnCodes(c);
    if (HasFailure()) return;
  }
}

TEST(CpuCodes, GroupsAlongTheHead) {
  for (DataType type : kCodeTypes) {
    for (int64_t group : {16, 32, 48, 64, 96, 192, 0}) {
      for (DataType zps : {kUndef, kS8, kF32}) {
        SCOPED_TRACE(testing::Message()
                     << DataTypeName(type) << " " << group << " " << DataTypeName(zps));
        Case c = Plain({.b0 = 1, .ratio = 3, .q_len = 1, .kv_len = 100, .d = 192, .dv = 192},
                       ByHead(type, group, kBF16, zps), ByHead(type, group, kF16, zps));
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuCodes, GroupsAlongTokens) {
  for (DataType type : kCodeTypes) {
    for (int64_t run : {16, 32, 64, 96, 0}) {
      for (DataType zps : {kUndef, kS8, kF32}) {
        SCOPED_TRACE(testing::Message()
                     << DataTypeName(type) << " " << run << " " << DataTypeName(zps));
        Case c = Plain({.b0 = 1, .ratio = 3, .q_len = 1, .kv_len = 192, .d = 64, .dv = 48},
                       ByChannel(type, run, kF16, zps), ByChannel(type, run, kF32, zps));
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

// One set of parameters per run of tokens and group of channels, per head, or for all.
TEST(CpuCodes, CoarseGroups) {
  const Dims5 groups[] = {{1, 1, 1, 10, 32}, {1, 1, 1, 64, 16}, {1, 1, 1, 0, 0}, {0, 0, 1, 0, 0}};
  for (const Dims5& group : groups) {
    for (DataType zps : {kUndef, kU8, kF16}) {
      const Format format{.type = kU4, .group = group, .scales = kF32, .zero_points = zps};
      Case c = Plain({.ratio = 2, .q_len = 1, .kv_len = 320, .d = 64, .dv = 64}, format, format);
      SCOPED_TRACE(testing::Message() << testing::PrintToString(group) << DataTypeName(zps));
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, EveryLayoutWithDenseChannels) {
  using Order = Format::Order;
  for (Order order : {Order::kTokenMajor, Order::kPadded, Order::kInterleaved}) {
    for (DataType type : kCodeTypes) {
      Format format = ByHead(type, 32, kF16, kS8);
      format.order = order;
      Case c = Plain({.ratio = 4, .q_len = 1, .kv_len = 131, .d = 64, .dv = 64}, format, format);
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << static_cast<int>(order));
      c.Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

// Keys of which tokens, not channels, are side by side, in whole bytes.
TEST(CpuCodes, ChannelMajorKeys) {
  const Format values = ByHead(kU4, 32, kF16, kU8);
  for (DataType type : kCodeTypes) {
    for (DataType zps : {kUndef, kS8, kF32}) {
      for (Format k : {ByHead(type, 16, kF16, zps), ByHead(type, 48, kBF16, zps),
                       ByHead(type, 0, kF32, zps), ByChannel(type, 16, kF16, zps),
                       ByChannel(type, 64, kF32, zps), ByChannel(type, 0, kF32, zps)}) {
        k.order = Format::Order::kChannelMajor;
        SCOPED_TRACE(testing::Message()
                     << DataTypeName(type) << DataTypeName(zps) << testing::PrintToString(k.group));
        Case c =
            Plain({.b0 = 1, .ratio = 3, .q_len = 1, .kv_len = 192, .d = 96, .dv = 64}, k, values);
        CheckOnCodes(c);
        if (HasFailure()) return;
      }
    }
  }
}

// Of which many are read at a time, runs of tokens side by side.
TEST(CpuCodes, ParametersOfChannelsByChannel) {
  using Order = Format::Order;
  for (Order order : {Order::kTokenMajor, Order::kChannelMajor}) {
    for (int64_t run : {16, 48}) {
      Format k = ByChannel(kU4, run, kF16, kS8);
      k.parameters_by_channel = true;
      Format v = k;
      k.order = order;
      SCOPED_TRACE(testing::Message() << static_cast<int>(order) << " " << run);
      Case c = Plain({.ratio = 3, .q_len = 1, .kv_len = 37 * run, .d = 24, .dv = 40}, k, v);
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, ChannelMajorKeysOfEveryLengthAndHeadSize) {
  for (DataType type : kCodeTypes) {
    const int64_t step = 8 / BitsOfType(type);
    for (int64_t s : {1, 7, 16, 17, 33, 65, 67}) {
      for (int64_t d : {3, 16, 65, 130}) {
        for (int64_t ratio : {1, 2, 7}) {
          Format k = ByHead(type, 0, kF16, kS8);
          k.order = Format::Order::kChannelMajor;
          SCOPED_TRACE(testing::Message() << DataTypeName(type) << s << " " << d << " " << ratio);
          Case c =
              Plain({.b0 = 1, .ratio = ratio, .q_len = 1, .kv_len = s * step, .d = d, .dv = 32}, k,
                    ByHead(kS8, 0));
          CheckOnCodes(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Channels that do not begin at bytes, and floats, are dequantized; V is multiplied as it is stored
// all the same.
TEST(CpuCodes, ValuesBesideKeysThatLieByChannel) {
  for (DataType type : {kU4, kS2, kF16}) {
    Format k{.type = type, .order = Format::Order::kChannelMajor};
    if (IsInteger(type)) {
      k.group = {1, 1, 1, 1, 32};
      k.scales = kF16;
    }
    Case c = Plain({.ratio = 3, .q_len = 2, .kv_len = 133, .d = 64, .dv = 64}, k,
                   ByHead(kU4, 32, kF16, kU8));
    c.Check(kTolerance);
    if (HasFailure()) return;
  }
}

// Quantized tokens beside recent ones in full precision, cut at different tokens for K and V.
TEST(CpuCodes, SegmentsWithDifferentBoundaries) {
  for (int64_t k_cut : {32, 64, 160}) {
    for (int64_t v_cut : {5, 64, 95}) {
      Case c(Shape{.b0 = 1, .ratio = 3, .q_len = 1, .kv_len = 200, .d = 64, .dv = 64});
      c.SetQ(kF32);
      c.SetK(ByChannel(kS4, 32), {k_cut, 200 - k_cut});
      c.spec.k[1] = c.MakeSegment({.type = kF16}, 200 - k_cut, 64);
      c.SetV(ByHead(kU4, 32, kF16, kF16), {v_cut, 200 - v_cut});
      c.spec.v[1] = c.MakeSegment({.type = kF32}, 200 - v_cut, 64);
      c.AddScale();
      SCOPED_TRACE(testing::Message() << k_cut << " " << v_cut);
      CheckOnCodes(c);
      if (HasFailure()) return;
    }
  }
}

void FillWith(Case& c, int port, int byte) {
  std::memset(c.inputs[port].data(), byte, c.inputs[port].bytes());
}

// The largest sums that can occur: equal queries, codes at their lowest or highest.
TEST(CpuCodes, CodesAtTheirLimits) {
  for (DataType type : kCodeTypes) {
    for (int byte : {0x80, 0x88, 0xaa, 0xff, 0x00, 0x7f, 0x77, 0x55}) {
      // More channels than one sum holds.
      Case c = Plain({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 64, .d = 576, .dv = 256},
                     ByHead(type, 0), ByHead(type, 0));
      auto* q = static_cast<float*>(c.inputs[c.spec.q.port].data());
      for (size_t i = 0; i < c.inputs[c.spec.q.port].bytes() / 4; ++i) q[i] = 1e-3f;
      FillWith(c, c.spec.k[0].data.port, byte);
      FillWith(c, c.spec.v[0].data.port, byte);
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << " " << byte);
      c.Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

// On scores and values with ordinary statistics: what docs/cpu_codes.md says.
TEST(CpuCodes, RelativeErrorIsBelowTwoInTenThousand) {
  for (DataType type : kCodeTypes) {
    for (const Format& format : {ByHead(type, 32, kF16, kS8), ByChannel(type, 64, kF16, kS8)}) {
      Case c =
          Plain({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 2048, .d = 128, .dv = 128},
                format, format);
      const View& o = c.spec.output;
      ASSERT_TRUE(c.Run(*KernelsAt(0), 1).ok());
      const size_t n = c.outputs[o.port].bytes() / 4;
      std::vector<float> want(n);
      std::memcpy(want.data(), c.outputs[o.port].data(), 4 * n);
      for (int i = 1; const KernelSet* set = KernelsAt(i); ++i) {
        ASSERT_TRUE(c.Run(*set, 1).ok());
        const auto* got = static_cast<const float*>(c.outputs[o.port].data());
        double error = 0, norm = 0;
        for (size_t e = 0; e < n; ++e) {
          error += (got[e] - want[e]) * double{got[e] - want[e]};
          norm += want[e] * double{want[e]};
        }
        EXPECT_LE(std::sqrt(error / norm), 2e-4) << set->name << " " << DataTypeName(type);
      }
    }
  }
}

// An error of a score is one of the probability. Here scores are hundreds, and many tokens' are
// within one of each other: equal but for small differences between the queries' channels.
TEST(CpuCodes, LargeScores) {
  for (DataType type : {kS4, kU4, kS2, kU2}) {
    const Format format{.type = type, .group = {0, 0, 1, 0, 0}, .scales = kF32};
    Case c = Plain({.ratio = 3, .q_len = 1, .kv_len = 200, .d = 16, .dv = 16}, format, format);
    auto* q = static_cast<float*>(c.inputs[c.spec.q.port].data());
    for (size_t i = 0; i < c.inputs[c.spec.q.port].bytes() / 4; ++i) q[i] = 500 + q[i] / 10;
    SCOPED_TRACE(DataTypeName(type));
    CheckOnCodes(c);
    if (HasFailure()) return;
  }
}

// Small integers are exact in s16 under a power of two: scores have no error but f32's.
TEST(CpuCodes, IntegerQueriesAreExact) {
  Case c = Plain({.b0 = 1, .q_len = 1, .kv_len = 70, .d = 64, .dv = 64}, ByHead(kS8, 32),
                 {.type = kF32});
  auto* q = static_cast<float*>(c.inputs[c.spec.q.port].data());
  for (size_t i = 0; i < c.inputs[c.spec.q.port].bytes() / 4; ++i) {
    q[i] = static_cast<float>(static_cast<int>(i % 9) - 4);
  }
  c.spec.steps.clear();
  FillWith(c, c.spec.k[0].quantization->scales.port, 0x10);
  c.Check();
}

// Beside keys for which all are dequantized.
TEST(CpuCodes, DequantizedCodesRoundNothing) {
  Case c = Plain({.q_len = 1, .kv_len = 128, .d = 64, .dv = 64}, {}, {});
  c.SetK(ByHead(kU8, 32), {64, 64});
  Format apart = ByHead(kS8, 8);
  apart.order = Format::Order::kChannelMajor;
  c.spec.k[1] = c.MakeSegment(apart, 64, 64);
  c.Check();
  for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
    EXPECT_EQ((*CompileAttention(c.spec, *set))->rounding(), 0) << set->name;
  }
}

// What is not finite in one head stays there, and shows there.
TEST(CpuCodes, NotFiniteValuesStayInTheirHead) {
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (int where : {0, 1, 2}) {
      Case c = Plain({.b0 = 2, .b1 = 2, .ratio = 2, .q_len = 1, .kv_len = 100, .d = 32, .dv = 32},
                     ByHead(kU4, 16, kF32, kS8), ByHead(kS8, 16, kF32));
      const int port = where == 0   ? c.spec.q.port
                       : where == 1 ? c.spec.k[0].quantization->scales.port
                                    : c.spec.v[0].quantization->scales.port;
      static_cast<float*>(c.inputs[port].data())[40] = bad;
      SCOPED_TRACE(testing::Message() << bad << " " << where);
      c.Check(kTolerance);
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, ScalesOfZeroAndOfExtremeSize) {
  for (float scale : {0.f, 1e-30f, 1e-38f, 1e30f}) {
    for (DataType zps : {kUndef, kS8}) {
      Case c = Plain({.b0 = 1, .b1 = 1, .q_len = 1, .kv_len = 70, .d = 32, .dv = 32},
                     ByHead(kU4, 0, kF32), ByHead(kS4, 0, kF32, zps));
      auto* scales = static_cast<float*>(c.inputs[c.spec.v[0].quantization->scales.port].data());
      scales[3] = scale;
      SCOPED_TRACE(testing::Message() << scale << " " << DataTypeName(zps));
      c.Check(kTolerance * std::max(1.f, 16 * scale));
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodes, TheKernelSaysWhyItDoesNotRunOnCodes) {
  if (HighestKernels().codes == nullptr) GTEST_SKIP() << "this CPU has no integer products";
  const auto kernel = [&](const Case& c) {
    return (*CompileAttention(c.spec, HighestKernels()))->kernel();
  };
  const Shape shape{.q_len = 1, .d = 64, .dv = 64};
  EXPECT_NE(kernel(Plain(shape, ByHead(kS8, 8), {})).find("groups of 8 channels"),
            std::string::npos);
  EXPECT_NE(kernel(Plain(shape, ByChannel(kS8, 4), {})).find("groups of 1 channel and 4 tokens"),
            std::string::npos);
  EXPECT_NE(kernel(Plain({.q_len = 1, .d = 21, .dv = 21}, ByHead(kU4, 0), {}))
                .find("tokens do not begin at whole bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace kvant::cpu
