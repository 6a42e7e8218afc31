// Attention over ranges of segments that only an execution knows, of the cpu and the CUDA backend,
// against f64 loops. Whatever the ranges leave out is NaN or other codes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kvant/backends/cpu/attention_plan.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

constexpr double kTolerance = 5e-4;  // of integer products, see code_test.cc
constexpr float kInf = std::numeric_limits<float>::infinity();

struct SegmentRange {
  int64_t first = 0, tokens = 0;
};
using Ranges = std::vector<std::vector<SegmentRange>>;
struct Stored {
  Format format;
  int64_t tokens;
};

Format ByHead(DataType type) {
  return {.type = type, .group = {1, 1, 1, 1, 32}, .scales = kF16, .zero_points = kF16};
}
Format ByChannel(DataType type, int64_t run) {
  return {.type = type, .group = {1, 1, 1, run, 1}, .scales = kF32, .zero_points = kF32};
}
Format Plain16() { return {.type = kF16}; }

// Overwrites the tokens that do not exist, and parameters that are of such tokens alone, by NaN or
// the highest code.
void Spoil(const View& view, const Dims5& groups,
           const std::function<bool(int64_t, int64_t)>& exists, Case& c) {
  if (!view.present()) return;
  void* const data = c.inputs[view.port].data();
  const auto any = [&](int64_t b0, int64_t t0) {
    for (int64_t b = b0 * groups[0]; b < (b0 + 1) * groups[0]; ++b) {
      for (int64_t t = t0 * groups[3]; t < (t0 + 1) * groups[3]; ++t) {
        if (exists(b, t)) return true;
      }
    }
    return false;
  };
  const double junk = IsFloat(view.type) ? std::nan("") : static_cast<double>(HighestOf(view.type));
  for (int64_t b = 0; b < view.dims[0]; ++b) {
    for (int64_t t = 0; t < view.dims[3]; ++t) {
      if (any(b, t)) continue;
      for (int64_t h = 0; h < view.dims[1]; ++h) {
        for (int64_t d = 0; d < view.dims[4]; ++d) {
          StoreElement(view.type, data, IndexOf(view, {b, h, 0, t, d}), junk);
        }
      }
    }
  }
}

// For each batch or once for all: of K's segments, then V's.
void SetRanges(const Ranges& ranges, Case& c) {
  const auto count = static_cast<int64_t>(c.spec.k.size() + c.spec.v.size());
  const View all =
      c.AddDense(kS32, {static_cast<int64_t>(ranges.size()), 1, 1, count, 2}, [&](const Dims5& p) {
        const SegmentRange& range = ranges[p[0]][p[3]];
        return static_cast<double>(p[4] == 0 ? range.first : range.tokens);
      });
  int64_t segment = 0;
  for (auto* side : {&c.spec.k, &c.spec.v}) {
    for (KvSegment& one : *side) {
      one.range = all;
      one.range.offset += segment++ * all.strides[3];
      one.range.dims[3] = 1;
      one.range.strides[3] = 0;
    }
  }
  size_t row = 0;
  for (auto* side : {&c.spec.k, &c.spec.v}) {
    for (const KvSegment& segment : *side) {
      const int64_t capacity = segment.data.dims[3];
      const auto exists = [&](int64_t b, int64_t token) {
        const SegmentRange& range = ranges[ranges.size() == 1 ? 0 : b][row];
        return (token - range.first + capacity) % capacity < range.tokens;
      };
      Spoil(segment.data, {1, 1, 1, 1, 1}, exists, c);
      if (segment.quantization) {
        Spoil(segment.quantization->scales, segment.quantization->group, exists, c);
        Spoil(segment.quantization->zero_points, segment.quantization->group, exists, c);
      }
      ++row;
    }
  }
}

Case Build(Shape shape, const std::vector<Stored>& k, const std::vector<Stored>& v,
           const Ranges& ranges, uint32_t seed = 1, DataType q = kF32) {
  shape.kv_len = 0;
  for (const Stored& one : k) shape.kv_len += one.tokens;
  Case c(shape, seed);
  c.SetQ(q);
  for (const Stored& one : k) c.spec.k.push_back(c.MakeSegment(one.format, one.tokens, shape.d));
  for (const Stored& one : v) c.spec.v.push_back(c.MakeSegment(one.format, one.tokens, shape.dv));
  SetRanges(ranges, c);
  c.AddScale();
  return c;
}

void AddCausal(Case& c) {
  ScoreStep step;
  step.kind = ScoreStep::Kind::kBand;
  step.operand.constant = -kInf;
  step.right = 0;
  step.alignment = ScoreStep::Alignment::kBottomRight;
  c.spec.steps.push_back(step);
}

// [sinks | quantized | residual], of K and V at different boundaries: full, with wraps and missing
// segments, and without any token.
const Ranges kThreeBatches = {
    {{0, 4}, {0, 192}, {0, 17}, {0, 4}, {0, 128}, {5, 81}},
    {{0, 0}, {0, 64}, {39, 3}, {0, 4}, {7, 0}, {100, 63}},
    {{0, 0}, {0, 0}, {9, 0}, {3, 0}, {0, 0}, {0, 0}},
};

TEST(SegmentRanges, SinksQuantizedAndResidual) {
  for (DataType type : {kU4, kS8, kU2, kF8E4M3, kF16}) {
    for (bool by_channel : {false, true}) {
      if (type == kF16 && by_channel) continue;
      for (int64_t q_len : {1, 3, 20}) {
        for (int64_t ratio : {1, 3}) {
          SCOPED_TRACE(testing::Message()
                       << DataTypeName(type) << by_channel << " " << q_len << " x " << ratio);
          const Format keys = type == kF16 ? Plain16()
                              : by_channel ? ByChannel(type, 32)
                                           : ByHead(type);
          const Format values = type == kF16 ? Plain16() : ByHead(type);
          Case c = Build({.b0 = 3, .b1 = 1, .ratio = ratio, .q_len = q_len, .d = 64, .dv = 32},
                         {{Plain16(), 4}, {keys, 192}, {Plain16(), 40}},
                         {{Plain16(), 4}, {values, 128}, {Plain16(), 104}}, kThreeBatches);
          if (q_len > 1) AddCausal(c);
          c.AddStats();
          c.CheckEverywhere(kTolerance);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Of one segment: rings that wrap within a group, a byte and a tile.
TEST(SegmentRanges, Rings) {
  for (DataType type : {kU4, kS8, kS2, kF8E5M2, kF16, kF32}) {
    for (int layout : {0, 1, 2, 3}) {
      for (int64_t q_len : {1, 18}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << layout << " " << q_len);
        Format f = layout % 2 == 0 ? ByHead(type) : ByChannel(type, 24);
        if (IsComputeFloat(type)) f = {.type = type};
        if (layout >= 2) f.order = Format::Order::kChannelMajor;
        Case c = Build({.b0 = 2, .ratio = 2, .q_len = q_len, .d = 32, .dv = 32}, {{f, 168}},
                       {{f, 168}}, {{{101, 131}, {15, 131}}, {{0, 168}, {167, 168}}});
        c.CheckEverywhere(kTolerance);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SegmentRanges, SharedByTheBatchAndBf16Products) {
  for (int64_t q_len : {1, 40}) {
    SCOPED_TRACE(q_len);
    Case c =
        Build({.b0 = 2, .q_len = q_len, .d = 32, .dv = 32}, {{ByHead(kS8), 100}, {Plain16(), 30}},
              {{Plain16(), 30}, {ByHead(kS8), 100}}, {{{90, 95}, {29, 30}, {4, 27}, {2, 98}}});
    c.spec.fpmath = FpMath::kBF16;
    c.spec.apply_to_int = true;
    AddCausal(c);
    c.CheckEverywhere(q_len > 1 ? 2e-2 : kTolerance);
  }
}

// Operands are indexed by column, and never read beyond the last.
TEST(SegmentRanges, BiasByColumn) {
  Case c = Build({.b0 = 2, .q_len = 2, .d = 32, .dv = 32}, {{ByHead(kU4), 96}, {Plain16(), 64}},
                 {{ByHead(kU4), 64}, {Plain16(), 96}},
                 {{{50, 60}, {3, 11}, {0, 0}, {90, 71}}, {{0, 0}, {0, 2}, {63, 2}, {0, 0}}});
  const Dims5 dims{2, 1, 1, 2, 160};
  ScoreStep step;
  step.kind = ScoreStep::Kind::kAdd;
  step.operand.view = c.AddDense(kF32, dims, [&](const Dims5& p) {
    return p[4] < (p[0] == 0 ? 71 : 2) ? c.Random(-2, 2) : std::nan("");
  });
  c.spec.steps.push_back(step);
  c.CheckEverywhere(kTolerance);
}

// Far fewer tokens than there is room for: chunks are of those that exist.
TEST(SegmentRanges, ShortInALargeCapacity) {
  for (int64_t tokens : {0, 1, 255, 257, 700, 1100}) {
    SCOPED_TRACE(tokens);
    const int64_t recent = std::min<int64_t>(tokens, 128), old = tokens - recent;
    Case c = Build({.b0 = 1, .b1 = 2, .q_len = 1, .d = 32, .dv = 32},
                   {{Plain16(), 4}, {ByChannel(kU4, 32), 8192}, {Plain16(), 128}},
                   {{Plain16(), 4}, {ByHead(kU4), 8192}, {Plain16(), 128}},
                   {{{0, 0}, {0, old}, {77, recent}, {0, 0}, {0, old}, {13, recent}}});
    c.AddStats();
    c.CheckEverywhere(kTolerance);
  }
}

TEST(SegmentRanges, Dropout) {
  Case c = Build({.b0 = 1, .q_len = 2, .d = 32, .dv = 32}, {{ByHead(kU4), 640}, {Plain16(), 64}},
                 {{ByHead(kU4), 640}, {Plain16(), 64}}, {{{600, 630}, {3, 11}, {0, 578}, {5, 63}}});
  Dropout dropout;
  dropout.seed.view = c.AddScalar(kS64, 99);
  dropout.offset.view = c.AddScalar(kS64, 5);
  dropout.probability.view = c.AddScalar(kF32, 0.3);
  const Dims5 dims{1, 2, 3, 2, 704};
  dropout.mask = c.AddOutput(kU8, dims, Dense(dims));
  c.spec.dropout = dropout;
  c.CheckEverywhere(kTolerance);
}

// Whatever segments, formats and ranges.
TEST(SegmentRanges, Random) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(seed);
    Case dice({}, seed + 1000);
    const auto roll = [&](int64_t n) {
      return static_cast<int64_t>(dice.Random(0, static_cast<double>(n)));
    };
    const auto side = [&](int64_t total) {
      std::vector<Stored> segments;
      while (total > 0) {
        const int64_t tokens = std::min(total, 16 * (1 + roll(9)));
        const DataType types[] = {kU4, kS8, kU2, kF8E4M3, kS4};
        const DataType type = types[roll(5)];
        Format f = roll(3) == 0 ? Plain16() : roll(2) == 0 ? ByHead(type) : ByChannel(type, 16);
        if (roll(4) == 0) f.order = Format::Order::kChannelMajor;
        segments.push_back({f, tokens});
        total -= tokens;
      }
      return segments;
    };
    const int64_t capacity = 16 * (1 + roll(40));
    const std::vector<Stored> k = side(capacity), v = side(capacity);
    Ranges ranges(2);
    for (auto& batch : ranges) {
      const int64_t total = roll(capacity + 1);
      for (const auto* segments : {&k, &v}) {
        int64_t left = total, room = capacity;
        for (const Stored& one : *segments) {
          room -= one.tokens;
          const int64_t least = std::max<int64_t>(0, left - room);
          const int64_t tokens = least + roll(std::min(one.tokens, left) - least + 1);
          batch.push_back({roll(one.tokens), tokens});
          left -= tokens;
        }
      }
    }
    Case c =
        Build({.b0 = 2, .b1 = 1, .ratio = 1 + roll(3), .q_len = 1 + roll(7), .d = 32, .dv = 32}, k,
              v, ranges, seed);
    AddCausal(c);
    c.Check(kTolerance);
    // Of more the CUDA backend has no kernel.
    if (k.size() <= 4 && v.size() <= 4) c.CheckOnCudaSimt(kTolerance);
    if (HasFailure()) return;
  }
}

// f16 queries over a ring, which the CUDA backend multiplies as packed codes.
TEST(SegmentRanges, RingsOfPackedCodes) {
  for (const DataType type : {kU4, kS8, kF8E4M3, kF16}) {
    for (const int64_t group : {0, 32}) {
      for (const int64_t q_len : {1, 3}) {
        SCOPED_TRACE(testing::Message() << DataTypeName(type) << group << " " << q_len);
        Format f = ByHead(type);
        f.group[4] = group;
        if (type == kF8E4M3) f.zero_points = kUndef;
        if (type == kF16) f = Plain16();
        Case c =
            Build({.b0 = 2, .ratio = 3, .q_len = q_len, .d = 64, .dv = 64}, {{f, 1400}},
                  {{f, 1400}}, {{{1001, 1333}, {15, 1333}}, {{0, 1400}, {1399, 1400}}}, 1, kF16);
        c.AddStats();
        const std::string kernel = c.CheckOnCudaSimt(kTolerance);
        EXPECT_NE(kernel.find("products of packed codes"), std::string::npos) << kernel;
        if (HasFailure()) return;
      }
    }
  }
}

// Tokens that are side by side, and begin within a byte.
TEST(SegmentRanges, RingsOfChannelMajorCodes) {
  for (const DataType type : {kU4, kU2, kU8}) {
    for (const bool by_channel : {false, true}) {
      SCOPED_TRACE(testing::Message() << DataTypeName(type) << by_channel);
      Format f = by_channel ? ByChannel(type, 200) : ByHead(type);
      f.order = Format::Order::kChannelMajor;
      Case c = Build({.b0 = 2, .ratio = 2, .q_len = 1, .d = 64, .dv = 64}, {{f, 200}},
                     {{Plain16(), 200}}, {{{37, 150}, {37, 150}}, {{0, 200}, {199, 200}}});
      c.Check(1e-3);
      if (HasFailure()) return;
    }
  }
}

// A device cannot refuse: it takes what there is room for.
TEST(SegmentRanges, OnADeviceTheyAreClamped) {
  const int32_t huge = std::numeric_limits<int32_t>::max();
  for (const bool one_segment : {true, false}) {
    const auto bytes_with = [&](const std::vector<SegmentRange>& second) {
      const std::vector<SegmentRange> fine = {{0, 9}, {0, 5}, {0, 4}, {0, 10}};
      Case c = one_segment
                   ? Build({.b0 = 2, .d = 64, .dv = 64}, {{ByHead(kU4), 32}}, {{ByHead(kU4), 32}},
                           {{fine[0], fine[0]}, {fine[0], fine[0]}})
                   : Build({.b0 = 2, .d = 64, .dv = 64}, {{ByHead(kU4), 32}, {Plain16(), 16}},
                           {{Plain16(), 16}, {ByHead(kU4), 32}}, {fine, fine});
      size_t s = 0;
      for (const auto* side : {&c.spec.k, &c.spec.v}) {
        for (const KvSegment& segment : *side) {
          auto* data = static_cast<int32_t*>(c.inputs[segment.range.port].data());
          data[IndexOf(segment.range, {1, 0, 0, 0, 0})] = static_cast<int32_t>(second[s].first);
          data[IndexOf(segment.range, {1, 0, 0, 0, 1})] = static_cast<int32_t>(second[s++].tokens);
        }
      }
      const auto executable = c.CompileForCudaSimt();
      EXPECT_TRUE(executable.ok()) << executable.status();
      const absl::Status status = c.RunOnCudaSimt(**executable);
      EXPECT_TRUE(status.ok()) << status;
      const auto* data = static_cast<const char*>(c.outputs[0].data());
      // Tokens that do not exist are NaN.
      return std::string(data, data + c.outputs[0].bytes() / 2);
    };
    const std::string first = bytes_with({{0, 9}, {0, 5}, {0, 4}, {0, 10}});
    EXPECT_EQ(bytes_with({{-1, huge}, {huge, huge}, {-huge, huge}, {huge, -1}}), first);
    EXPECT_EQ(bytes_with({{huge, -huge}, {0, 0}, {99, 1}, {-5, 77}}), first);
  }
}

}  // namespace
}  // namespace kvant::cpu
