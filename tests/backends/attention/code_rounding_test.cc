// Integer products keep what Plan::rounding promises whatever the magnitudes: outlier channels,
// tokens and groups take no bits from the others.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

struct Spoiler {
  const char* name;
  std::function<void(Case&)> spoil;
  double limit = 7.5e-4;  // of the error: one standard deviation of the four that are promised
};

const View& Codes(const Case& c, bool keys) { return (keys ? c.spec.k : c.spec.v)[0].data; }
const Quantization& Parameters(const Case& c, bool keys) {
  return *(keys ? c.spec.k : c.spec.v)[0].quantization;
}

double Read(const Case& c, const View& view, const Dims5& p) {
  return LoadElement(view.type, c.inputs[view.port].data(), IndexOf(view, p));
}
void Write(Case& c, const View& view, const Dims5& p, double value) {
  StoreElement(view.type, c.inputs[view.port].data(), IndexOf(view, p), value);
}

// Sets each element to value(position, what it was).
void Change(Case& c, const View& view, const std::function<double(const Dims5&, double)>& value) {
  Dims5 p;
  for (p[0] = 0; p[0] < view.dims[0]; ++p[0]) {
    for (p[1] = 0; p[1] < view.dims[1]; ++p[1]) {
      for (p[2] = 0; p[2] < view.dims[2]; ++p[2]) {
        for (p[3] = 0; p[3] < view.dims[3]; ++p[3]) {
          for (p[4] = 0; p[4] < view.dims[4]; ++p[4]) {
            Write(c, view, p, value(p, Read(c, view, p)));
          }
        }
      }
    }
  }
}

void ScaleAll(Case& c, const View& view, double factor) {
  Change(c, view, [&](const Dims5&, double x) { return x * factor; });
}

// Where real, the offset that belongs to code 0 instead.
double ZeroCode(const Case& c, bool keys, Dims5 p) {
  const Quantization& q = Parameters(c, keys);
  if (!q.zero_points.present() || IsFloat(q.zero_points.type)) return 0;
  for (int a = 0; a < kViewRank; ++a) p[a] = q.zero_points.dims[a] == 1 ? 0 : p[a] / q.group[a];
  return Read(c, q.zero_points, p);
}

// What a token of zeros becomes: codes at their zero points, and a scale that means nothing.
void ZeroToken(Case& c, bool keys, int64_t token, double scale) {
  const Quantization& q = Parameters(c, keys);
  Change(c, Codes(c, keys),
         [&](const Dims5& p, double x) { return p[3] == token ? ZeroCode(c, keys, p) : x; });
  const int64_t group = token / q.group[3];
  Change(c, q.scales, [&](const Dims5& p, double x) { return p[3] == group ? scale : x; });
  if (!q.zero_points.present() || !IsFloat(q.zero_points.type)) return;
  Change(c, q.zero_points, [&](const Dims5& p, double x) { return p[3] == group ? 0 : x; });
}

// Real zero points follow the scales.
void ScaleTensor(Case& c, bool keys, double factor) {
  const Quantization& q = Parameters(c, keys);
  ScaleAll(c, q.scales, factor);
  if (q.zero_points.present() && IsFloat(q.zero_points.type)) ScaleAll(c, q.zero_points, factor);
}

// Between 10^low and 10^high, evenly in the exponent.
double PowerOfTen(Case& c, double low, double high) { return std::pow(10, c.Random(low, high)); }

void OutlierChannel(Case& c, double size, bool keys_are_zero) {
  const int64_t channel = c.shape.d / 3;
  Change(c, c.spec.q, [&](const Dims5& p, double x) { return p[4] == channel ? size : x; });
  if (!keys_are_zero) return;
  Change(c, Codes(c, true),
         [&](const Dims5& p, double x) { return p[4] == channel ? ZeroCode(c, true, p) : x; });
}

void SmallWhereLarge(Case& c) {
  const int64_t token = c.shape.kv_len - 1;
  Change(c, Codes(c, false), [&](const Dims5& p, double x) {
    return p[3] == token ? ZeroCode(c, false, p) + (p[4] % 5 == 0) : x;
  });
  // That token's keys are the query.
  Change(c, Codes(c, true), [&](const Dims5& p, double x) {
    if (p[3] != token) return x;
    return p[4] % 2 == 0 ? static_cast<double>(HighestOf(Codes(c, true).type)) : x;
  });
}

// Channels that round alike, beside one whose size takes their bits, and keys that add them all up.
void AlikeChannels(Case& c, double size) {
  Change(c, c.spec.q, [](const Dims5&, double) { return 1.37; });
  Change(c, Codes(c, true), [&](const Dims5& p, double) {
    const double most = HighestOf(Codes(c, true).type) - ZeroCode(c, true, p);
    return ZeroCode(c, true, p) + std::floor(most * static_cast<double>(p[3] % 7) / 7);
  });
  Change(c, Parameters(c, true).scales, [](const Dims5&, double) { return 1e-2; });
  OutlierChannel(c, size, true);
}

// Tokens whose weights round alike, beside one that takes most, and values of one sign.
void AlikeTokens(Case& c, double score) {
  const Quantization& k = Parameters(c, true);
  const double q = score * std::sqrt(static_cast<double>(c.shape.d));
  Change(c, c.spec.q, [&](const Dims5&, double) { return q; });
  Change(c, k.scales, [](const Dims5&, double) { return 1; });
  if (k.zero_points.present() && IsFloat(k.zero_points.type)) ScaleAll(c, k.zero_points, 0);
  Change(c, Codes(c, true),
         [&](const Dims5& p, double) { return ZeroCode(c, true, p) + (p[3] == 1 && p[4] == 0); });
  Change(c, Codes(c, false),
         [&](const Dims5& p, double x) { return std::max(x, ZeroCode(c, false, p)); });
  Change(c, Parameters(c, false).scales, [](const Dims5&, double) { return 0.1; });
}

// Channels of V of large scales, of which nothing is left when zero points are subtracted.
void ZeroChannels(Case& c, double size) {
  const Quantization& q = Parameters(c, false);
  if (q.scales.dims[4] != c.shape.dv) return;
  const bool is_real = q.zero_points.present() && IsFloat(q.zero_points.type);
  Change(c, q.scales, [&](const Dims5& p, double x) { return p[4] % 8 == 3 ? size * x : x; });
  Change(c, Codes(c, false), [&](const Dims5& p, double x) {
    return p[4] % 8 != 3 ? x : is_real ? 1 : ZeroCode(c, false, p);
  });
  if (!is_real) return;
  Change(c, q.zero_points,
         [&](const Dims5& p, double x) { return p[4] % 8 == 3 ? Read(c, q.scales, p) : x; });
}

// Queries that are `size` times as large in the first of K's groups, whose scales are so much
// smaller.
void LargeWhereKeysAreSmall(Case& c, double size) {
  const Quantization& k = Parameters(c, true);
  const int64_t channels = k.scales.dims[4] > 1 ? k.group[4] : 0;
  if (channels == 0) return OutlierChannel(c, size, true);
  Change(c, c.spec.q, [&](const Dims5& p, double x) { return p[4] < channels ? x * size : x; });
  const auto shrink = [&](const Dims5& p, double x) { return p[4] == 0 ? x / size : x; };
  Change(c, k.scales, shrink);
  if (k.zero_points.present() && IsFloat(k.zero_points.type)) Change(c, k.zero_points, shrink);
}

// Every other token's keys, or run's, moved by more than their codes say, and queries that sum to
// 0.
void FarFromZero(Case& c) {
  const Quantization& k = Parameters(c, true);
  if (!k.zero_points.present() || !IsFloat(k.zero_points.type)) return;
  const auto number = [](int64_t d) { return std::sin(1.7 * static_cast<double>(d)); };
  Change(c, c.spec.q, [&](const Dims5& p, double) {
    double sum = 0;
    for (int64_t d = 0; d < 16; ++d) sum += number(p[4] / 16 * 16 + d);
    return number(p[4]) - sum / 16;
  });
  Change(c, k.zero_points, [&](const Dims5& p, double) {
    return p[3] % 2 == 0 ? 0 : k.group[3] == 1 ? -3000 : -300;
  });
  Change(c, Codes(c, false),
         [&](const Dims5& p, double x) { return p[3] / k.group[3] % 2 == 0 ? 1 : x; });
}

ScoreStep StepOf(ScoreStep::Kind kind, float operand = 0) {
  ScoreStep step;
  step.kind = kind;
  if (kind != ScoreStep::Kind::kTanh) step.operand.constant = operand;
  return step;
}

// Groups of V of which the weights of all tokens that count are just below what has a reciprocal in
// f32, beside others where they are above.
void TinyGroups(Case& c, double score, double ratio) {
  AlikeTokens(c, score);
  const auto of_group = [=](const Dims5& p, double) { return p[4] % 2 == 0 ? 1 : ratio; };
  Change(c, Parameters(c, false).scales, of_group);
  // Of one sign, so that what is lost adds up.
  const double most = static_cast<double>(HighestOf(Codes(c, false).type));
  Change(c, Codes(c, false), [=](const Dims5&, double) { return most; });
  ZeroToken(c, false, 1, 0);
}

// Keys so large that sums over codes leave f32 unless they are multiplied by the queries' scale
// first, with whole numbers as queries, which lose nothing.
void HugeKeys(Case& c, double size) {
  Change(c, c.spec.q, [](const Dims5&, double x) { return std::floor(4 * x) * 0x1p-68; });
  ScaleTensor(c, true, size);
  c.spec.steps = {StepOf(ScoreStep::Kind::kMultiply, 5e-16f)};
}

// Steps that multiply what scores are off by, after others that queries do not take; queries are
// smaller by as much.
std::vector<Spoiler> LaterFactors() {
  using Kind = ScoreStep::Kind;
  std::vector<Spoiler> all;
  for (const float cap : {30.f, 1000.f}) {
    for (const double size : {1., 300.}) {
      all.push_back(
          {"a soft cap", [=](Case& c) {
             OutlierChannel(c, size, true);
             for (const ScoreStep& step :
                  {StepOf(Kind::kDivide, cap), StepOf(Kind::kTanh), StepOf(Kind::kMultiply, cap)}) {
               c.spec.steps.push_back(step);
             }
           }});
    }
  }
  all.push_back({"a factor after a mask", [](Case& c) {
                   OutlierChannel(c, 300, true);
                   ScaleAll(c, c.spec.q, 1e-2);
                   c.spec.steps = {StepOf(Kind::kAdd, 0.01f), StepOf(Kind::kMultiply, 12.f)};
                 }});
  all.push_back({"factors after a mask that differ by column", [](Case& c) {
                   OutlierChannel(c, 300, true);
                   ScaleAll(c, c.spec.q, 1e-2);
                   ScoreStep step;
                   step.kind = Kind::kMultiply;
                   step.operand.view = c.AddDense(kF32, {1, 1, 1, 1, c.shape.kv_len},
                                                  [&](const Dims5&) { return c.Random(8, 15); });
                   c.spec.steps = {StepOf(Kind::kAdd, 0.01f), step};
                 }});
  all.push_back({"factors after a mask that differ by row, and in sign", [](Case& c) {
                   OutlierChannel(c, 300, true);
                   ScaleAll(c, c.spec.q, 1e-2);
                   ScoreStep step;
                   step.kind = Kind::kMultiply;
                   step.operand.view =
                       c.AddDense(kF32, {1, 1, c.shape.ratio, 1, 1},
                                  [](const Dims5& p) { return p[2] == 0 ? 0.01 : -12; });
                   c.spec.steps = {StepOf(Kind::kAdd, 0.01f), step};
                 }});
  all.push_back({"a factor that queries do not take", [](Case& c) {
                   OutlierChannel(c, 300, true);
                   ScaleAll(c, c.spec.q, 1e-18);
                   c.spec.steps = {StepOf(Kind::kMultiply, 1e17f)};
                 }});
  return all;
}

std::vector<Spoiler> Spoilers() {
  std::vector<Spoiler> all = LaterFactors();
  all.push_back({"as it is", [](Case&) {}});
  for (const double scale : {1e-1, 1e-3, 1e-5, 1e-8}) {
    all.push_back({"a zero token of V of scale 1", [=](Case& c) {
                     ScaleTensor(c, false, scale);
                     ZeroToken(c, false, c.shape.kv_len / 2, 1);
                   }});
    all.push_back({"zero tokens of K of scale 1", [=](Case& c) {
                     ScaleTensor(c, true, scale);
                     ScaleAll(c, c.spec.q, 1 / scale);
                     ZeroToken(c, true, 3, 1);
                   }});
  }
  for (const double size : {30., 300., 1e4, 1e10, 1e12}) {
    all.push_back({"an outlier channel of Q", [=](Case& c) { OutlierChannel(c, size, true); }});
  }
  for (const double size : {1e5, 1e7, 1e9, 1e12}) {
    all.push_back({"channels of Q that are large where K is small",
                   [=](Case& c) { LargeWhereKeysAreSmall(c, size); }});
  }
  // Of which K has something, so that one token takes all.
  all.push_back({"an outlier channel of Q and K", [](Case& c) { OutlierChannel(c, 20, false); }});
  all.push_back({"scales of V over ten decades", [](Case& c) {
                   Change(c, Parameters(c, false).scales,
                          [&](const Dims5&, double) { return PowerOfTen(c, -6, 4); });
                 }});
  all.push_back({"scales of K over four decades", [](Case& c) {
                   Change(c, Parameters(c, true).scales,
                          [&](const Dims5&, double x) { return x * PowerOfTen(c, -4, 0); });
                 }});
  all.push_back({"codes of V that are small where probabilities are large", SmallWhereLarge});
  for (const double size : {1e-6, 1e-3, 1e4}) {
    all.push_back({"small or large V", [=](Case& c) { ScaleTensor(c, false, size); }});
    all.push_back({"small or large Q", [=](Case& c) {
                     ScaleAll(c, c.spec.q, size);
                     ScaleTensor(c, true, 1 / size);
                   }});
  }
  // Squares and reciprocals of these leave f32.
  for (const double size : {1e-33, 1e-29, 1e-20, 1e12, 1e25}) {
    all.push_back({"V beyond what squares have room for", [=](Case& c) {
                     ScaleTensor(c, false, size);
                     ZeroToken(c, false, c.shape.kv_len / 2, size * 1e4);
                   }});
    all.push_back({"the same, and an outlier channel",
                   [=](Case& c) {
                     SmallWhereLarge(c);
                     Change(c, c.spec.q, [](const Dims5&, double x) { return 8 * std::fabs(x); });
                     ScaleTensor(c, false, size);
                     if (Parameters(c, false).scales.dims[4] != c.shape.dv) return;
                     const auto outlier = [](const Dims5& p, double x) {
                       return p[4] == 7 ? 1e3 * x : x;
                     };
                     Change(c, Parameters(c, false).scales, outlier);
                   },
                   1.5e-3});
  }
  for (const double size : {40., 300., 1000.}) {
    all.push_back(
        {"channels of Q that are alike", [=](Case& c) { AlikeChannels(c, size); }, 2.5e-4});
  }
  for (const double score : {8.4, 9.1, 9.99, 10.7}) {
    all.push_back({"tokens that are alike", [=](Case& c) { AlikeTokens(c, score); }, 4e-4});
  }
  for (const double score : {76., 76.5, 78.}) {
    for (const double ratio : {4, 100, 400}) {
      all.push_back({"groups of tiny weights", [=](Case& c) { TinyGroups(c, score, ratio); }});
    }
  }
  for (const double size : {1e32, 1e33, 1e34}) {
    all.push_back({"huge keys", [=](Case& c) { HugeKeys(c, size); }});
  }
  all.push_back({"keys far from zero", FarFromZero});
  all.push_back({"keys whose squares are 0 in f32", [](Case& c) {
                   ScaleAll(c, c.spec.q, 1e25);
                   ScaleTensor(c, true, 1e-25);
                   OutlierChannel(c, 3e27, true);
                 }});
  for (const double size : {1e2, 1e4, 1e6}) {
    all.push_back({"zero channels of large scales", [=](Case& c) { ZeroChannels(c, size); }});
  }
  all.push_back(
      {"a zero V", [](Case& c) {
         for (int64_t t = 0; t < c.shape.kv_len; ++t) ZeroToken(c, false, t, 1);
         // But for one element, without which there is no relative error.
         Write(c, Codes(c, false), {0, 0, 0, 5, 0}, 1 + ZeroCode(c, false, {0, 0, 0, 5, 0}));
       }});
  return all;
}

// Beside what the same sums in f32 are off by.
void ExpectPromised(const std::string& what, const std::function<Case()>& make) {
  for (const Spoiler& spoiler : Spoilers()) {
    Case c = make();
    spoiler.spoil(c);
    ASSERT_TRUE(c.Run(*KernelsAt(0), 1).ok());
    const std::vector<double> expected = c.Expected();
    const double of_f32 = c.RelativeError(expected);
    for (int i = 1; const KernelSet* set = KernelsAt(i); ++i) {
      if (set->codes == nullptr) continue;  // f32 products, whose errors grow with the scores
      EXPECT_LE(spoiler.limit, (*CompileAttention(c.spec, *set))->rounding());
      ASSERT_TRUE(c.Run(*set, 1).ok());
      const double error = c.RelativeError(expected);
      EXPECT_LE(error, spoiler.limit + 2 * of_f32 + 1e-6)
          << what << ", " << set->name << ": " << spoiler.name << "; f32 has " << of_f32;
    }
  }
}

TEST(CpuCodeRounding, HoldsForEveryMagnitude) {
  for (DataType type : {kS8, kU8, kS4, kU4, kS2, kU2}) {
    for (DataType zero_points : {kUndef, kU8, kF32}) {
      for (int64_t group : {32, 0}) {
        const Format by_head{
            .type = type, .group = {1, 1, 1, 1, group}, .scales = kF32, .zero_points = zero_points};
        const std::string what = std::string(DataTypeName(type)) + ", zero points " +
                                 std::string(DataTypeName(zero_points)) + ", groups of " +
                                 std::to_string(group);
        ExpectPromised(what, [&] {
          return Plain({.b0 = 1, .b1 = 1, .ratio = 3, .q_len = 1, .kv_len = 150, .d = 64, .dv = 64},
                       by_head, by_head);
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CpuCodeRounding, HoldsWithScalesByChannel) {
  for (DataType type : {kS8, kU4, kS2}) {
    for (DataType zero_points : {kUndef, kU8, kF32}) {
      const Format by_channel{
          .type = type, .group = {1, 1, 1, 16, 1}, .scales = kF32, .zero_points = zero_points};
      ExpectPromised(std::string("by channel ") + std::string(DataTypeName(type)), [&] {
        return Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 1, .kv_len = 144, .d = 48, .dv = 80},
                     by_channel, by_channel);
      });
      if (HasFailure()) return;
    }
  }
}

TEST(CpuCodeRounding, HoldsForChannelMajorKeys) {
  for (DataType type : {kS8, kU8, kU4, kS2}) {
    for (const Dims5& group : {Dims5{1, 1, 1, 1, 32}, Dims5{1, 1, 1, 16, 1}}) {
      for (DataType zero_points : {kUndef, kU8}) {
        Format k{.type = type, .group = group, .scales = kF32, .zero_points = zero_points};
        const Format v = k;
        k.order = Format::Order::kChannelMajor;
        ExpectPromised(std::string("channel-major ") + std::string(DataTypeName(type)), [&] {
          return Plain({.b0 = 1, .b1 = 1, .ratio = 2, .q_len = 1, .kv_len = 144, .d = 96, .dv = 64},
                       k, v);
        });
        if (HasFailure()) return;
      }
    }
  }
}

// What rounding moves the score of one token by, it moves that of a token with the opposite key by
// in the other direction. Where one is a sink, whose values are next to nothing, outputs are off by
// both.
TEST(CpuCodeRounding, HoldsForASinkOfOppositeKeys) {
  for (const DataType type : {kS8, kS4}) {
    const Format by_token{.type = type, .group = {1, 1, 1, 1, 0}, .scales = kF32};
    // What one score may be off by, root mean square.
    for (const double off : {5e-5, 1e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4}) {
      Case c = Plain({.b0 = 4, .b1 = 64, .ratio = 1, .q_len = 1, .kv_len = 40, .d = 64, .dv = 32},
                     by_token, by_token);
      const double size = 128, most = static_cast<double>(HighestOf(type));
      OutlierChannel(c, size, false);
      std::vector<double> key(4 * 64 * 64);
      for (double& x : key) x = c.Random(-1, 1) < 0 ? -most : most;
      Change(c, Codes(c, true), [&](const Dims5& p, double) {
        if (p[4] == c.shape.d / 3) return 0.;  // the outlier's
        const double x = key[static_cast<size_t>((p[0] * 64 + p[1]) * 64 + p[4])];
        return p[3] == 0 ? -x : x;
      });
      const double step = size / 32639, norm = most * std::sqrt(63.);
      Change(c, Parameters(c, true).scales,
             [&](const Dims5&, double) { return off * std::sqrt(6.) / (step * norm); });
      Change(c, Codes(c, false),
             [&](const Dims5& p, double x) { return p[3] == 0 ? 0. : std::max(1., std::fabs(x)); });
      ScoreStep bias;
      bias.kind = ScoreStep::Kind::kAdd;
      bias.operand.view = c.AddDense(kF32, {1, 1, 1, 1, c.shape.kv_len},
                                     [](const Dims5& p) { return p[4] == 0 ? 10 : 0; });
      c.spec.steps = {bias};
      const std::vector<double> expected = c.Expected();
      for (int i = 1; const KernelSet* set = KernelsAt(i); ++i) {
        if (set->codes == nullptr) continue;
        ASSERT_TRUE(c.Run(*set, 1).ok());
        EXPECT_LE(c.RelativeError(expected), 7.5e-4)
            << DataTypeName(type) << " " << set->name << ", off by " << off;
      }
    }
  }
}

// A probability next to where it is rounded the other way takes a whole step by any error.
TEST(CpuCodeRounding, RoundedProbabilitiesAreThoseOfF32) {
  for (const DataType type : {kS8, kS4}) {
    const Format by_token{.type = type, .group = {1, 1, 1, 1, 0}, .scales = kF32};
    Case c = Plain({.b0 = 4, .b1 = 64, .ratio = 1, .q_len = 1, .kv_len = 8, .d = 64, .dv = 32},
                   by_token, by_token);
    const double size = 128, most = static_cast<double>(HighestOf(type));
    OutlierChannel(c, size, false);
    Change(c, Codes(c, true), [&](const Dims5& p, double) {
      return p[4] == c.shape.d / 3 ? 0 : c.Random(-1, 1) < 0 ? -most : most;
    });
    // Scores are off by 2e-4, root mean square.
    const double step = size / 32639, norm = most * std::sqrt(63.);
    Change(c, Parameters(c, true).scales,
           [&](const Dims5&, double) { return 2e-4 * std::sqrt(6.) / (step * norm); });
    c.spec.steps.clear();
    c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
    const std::vector<double> expected = c.Expected();
    for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
      const auto plan = *CompileAttention(c.spec, *set);
      const bool on_codes = plan->kernel().find("K by integer products") != std::string::npos;
      EXPECT_EQ(on_codes, set->codes != nullptr) << plan->kernel();
      EXPECT_EQ(plan->rounding(), 0);
      ASSERT_TRUE(c.Run(*set, 1).ok());
      // Two probabilities may be rounded otherwise by f32 as well.
      EXPECT_LE(c.RelativeError(expected), 1.2e-3) << DataTypeName(type) << " " << set->name;
    }
  }
}

// Zero points cost f32's sums more than such probabilities allow.
TEST(CpuCodeRounding, KeysWithZeroPointsAreNoCodesBesideRoundedProbabilities) {
  for (const DataType type : {kU8, kU4}) {
    const Format with_points{
        .type = type, .group = {1, 1, 1, 1, 0}, .scales = kF32, .zero_points = kF32};
    Case c = Plain({.b0 = 1, .b1 = 2, .ratio = 2, .q_len = 1, .kv_len = 40, .d = 64, .dv = 32},
                   with_points, {});
    c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
    const std::vector<double> expected = c.Expected();
    for (int i = 0; const KernelSet* set = KernelsAt(i); ++i) {
      const std::string kernel = (*CompileAttention(c.spec, *set))->kernel();
      EXPECT_EQ(kernel.find("integer products"), std::string::npos) << kernel;
      EXPECT_EQ(kernel.find("zero points cost too much") != std::string::npos,
                set->codes != nullptr)
          << kernel;
      ASSERT_TRUE(c.Run(*set, 1).ok());
      EXPECT_LE(c.RelativeError(expected), 1.2e-3) << DataTypeName(type) << " " << set->name;
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
