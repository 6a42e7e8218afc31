// Packed codes of V beside tokens of zeros, of no tokens, and of tiny values: errors are what the
// kernel says, or it multiplies exactly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kvant/backends/backend.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/backends/attention/judge.h"

namespace kvant::cpu {
namespace {

void Set(Case& c, const View& view, const std::function<double(const Dims5&, double)>& value) {
  void* const data = c.inputs[view.port].data();
  ForEachPosition(view.dims, [&](const Dims5& p) {
    const int64_t at = IndexOf(view, p);
    StoreElement(view.type, data, at, value(p, LoadElement(view.type, data, at)));
  });
}

// The error of the output, as an L2 norm over that of what it should be.
double ErrorOnCudaSimt(Case& c, double* rounding) {
  const auto executable = c.CompileForCudaSimt();
  EXPECT_TRUE(executable.ok()) << executable.status();
  if (!executable.ok()) return 0;
  *rounding = (*executable)->rounding();
  EXPECT_THAT((*executable)->kernel(), testing::HasSubstr("packed codes"));
  EXPECT_TRUE(c.RunOnCudaSimt(**executable).ok());
  return c.RelativeError(c.Expected());
}

TEST(CudaCodes, SignedCodesWithRealZeroPointsBesideZeros) {
  for (const DataType q : {kF16, kF32}) {
    for (const double spread : {1.0, 0.3, 0.01, 0.003}) {
      Case c({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 192, .d = 64, .dv = 64});
      c.SetQ(q);
      c.SetK({.type = kS8, .group = {1, 1, 1, 1, 0}, .scales = kF32});
      c.SetV({.type = kS8, .group = {1, 1, 1, 1, 0}, .scales = kF32, .zero_points = kF32});
      c.AddScale();
      // What DynamicQuantize makes of zeros: scale 1, and all of its codes the lowest.
      const auto zeros = [](const Dims5& p) { return p[3] % 3 != 1; };
      const Quantization& v = *c.spec.v[0].quantization;
      Set(c, c.spec.v[0].data, [&](const Dims5& p, double x) { return zeros(p) ? -128 : x; });
      Set(c, v.scales, [&](const Dims5& p, double) { return zeros(p) ? 1 : spread / 64; });
      Set(c, v.zero_points, [&](const Dims5& p, double) { return zeros(p) ? -128 : spread / 9; });
      double rounding = 0;
      const double error = ErrorOnCudaSimt(c, &rounding);
      EXPECT_LT(error, rounding + 1e-5) << DataTypeName(q) << " " << spread;
    }
  }
}

TEST(CudaCodes, ScalesOfNoTokens) {
  for (const double scale : {std::nan(""), std::numeric_limits<double>::infinity(), 1.0}) {
    for (const Dims5& group : {Dims5{1, 1, 1, 0, 0}, Dims5{1, 1, 1, 0, 1}}) {
      Case c({.b0 = 1, .b1 = 2, .ratio = 4, .q_len = 1, .kv_len = 64, .d = 64, .dv = 32});
      c.SetQ(kF16);
      c.SetK({.type = kS8, .group = {1, 1, 1, 1, 0}, .scales = kF16});
      c.SetV({.type = kS8, .group = group, .scales = kF16});
      c.AddScale();
      Set(c, c.spec.v[0].quantization->scales, [&](const Dims5&, double) { return scale; });
      c.spec.kv_lengths = c.AddScalar(kS32, 0);
      c.spec.sinks = c.AddScalar(kF32, 1);
      const auto executable = c.CompileForCudaSimt();
      ASSERT_TRUE(executable.ok()) << executable.status();
      ASSERT_TRUE(c.RunOnCudaSimt(**executable).ok());
      const auto* const out = static_cast<const float*>(c.outputs[0].data());
      for (size_t i = 0; i < c.outputs[0].bytes() / sizeof(float); ++i)
        ASSERT_EQ(out[i], 0) << scale;
    }
  }
}

TEST(CudaCodes, TinyValuesBesideAZeroThatTakesTheWeight) {
  for (const double scale : {1e-3, 1e-20, 1e-24, 1e-28}) {
    Case c({.b0 = 1, .b1 = 1, .ratio = 4, .q_len = 1, .kv_len = 128, .d = 64, .dv = 64});
    c.SetQ(kF32);
    c.SetK({.type = kS8, .group = {1, 1, 1, 1, 0}, .scales = kF32});
    c.SetV({.type = kS8, .group = {0, 0, 0, 0, 0}, .scales = kF32});
    c.AddScale();
    ScoreStep lift{.kind = ScoreStep::Kind::kAdd};
    lift.operand.view =
        c.AddDense(kF32, {1, 1, 1, 1, 128}, [](const Dims5& p) { return p[4] == 70 ? 25 : 0; });
    c.spec.steps.push_back(lift);
    Set(c, c.spec.v[0].data, [&](const Dims5& p, double x) { return p[3] == 70 ? 0 : x; });
    Set(c, c.spec.v[0].quantization->scales, [&](const Dims5&, double) { return scale; });
    double rounding = 0;
    const double error = ErrorOnCudaSimt(c, &rounding);
    EXPECT_LT(error, rounding + 1e-5) << scale;
  }
}

}  // namespace
}  // namespace kvant::cpu
