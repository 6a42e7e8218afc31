// Arithmetic of several types and of integers against values worked out by hand, on the oracle and
// on the reference engine.
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "kvant/tests/backends/ops/op_testing.h"
#include "kvant_test_config.h"

namespace kvant::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

OpCase Of(std::string name, OpKind kind, const PortValues& a, const PortValues& b,
          const PortValues& result) {
  return {std::move(name), kind, {}, {a, b}, {result}};
}

std::vector<OpCase> AllCases() {
  return {
      Of("integers", OpKind::kAdd, {kS32, {2}, {2147483646, -5}, {}}, {kS32, {1}, {1}, {}},
         {kS32, {2}, {2147483647, -4}, {}}),
      Of("saturates", OpKind::kMultiply, {kS32, {2}, {65536, -65536}, {}}, {kS32, {}, {65536}, {}},
         {kS32, {2}, {2147483647, -2147483648.0}, {}}),
      Of("integer_quotient", OpKind::kDivide, {kS32, {2}, {7, -7}, {}}, {kS32, {}, {2}, {}},
         {kS32, {2}, {3, -3}, {}}),
      Of("integers_to_floats", OpKind::kDivide, {kS32, {2}, {7, -7}, {}}, {kS32, {}, {2}, {}},
         {kF32, {2}, {3.5, -3.5}, {}}),
      // To even.
      Of("floats_to_integers", OpKind::kAdd, {kF32, {6}, {2, 3, -2.25, 3e9, -kInf, kNan}, {}},
         {kF32, {}, {0.5}, {}}, {kS32, {6}, {2, 4, -2, 2147483647, -2147483648.0, 0}, {}}),
      // Rounded, not cut.
      Of("floats_to_integer_quotient", OpKind::kDivide, {kF32, {2}, {7, -7}, {}},
         {kS32, {}, {4}, {}}, {kS32, {2}, {2, -2}, {}}),
      Of("integers_and_floats", OpKind::kSubtract, {kS32, {2}, {7, -7}, {}}, {kF32, {}, {0.25}, {}},
         {kF32, {2}, {6.75, -7.25}, {}}),
      Of("f32_and_bf16", OpKind::kMultiply, {kF32, {2}, {3, 5}, {}}, {kBF16, {}, {0.5}, {}},
         {kF32, {2}, {1.5, 2.5}, {}}),
      // 0.99 is no bf16, and neither are the quotients.
      Of("bf16_and_f32_to_bf16", OpKind::kDivide, {kBF16, {2}, {1.0078125, 3}, {}},
         {kF32, {}, {0.99}, {}}, {kBF16, {2}, {1.015625, 3.03125}, {}}),
      Of("halves", OpKind::kAdd, {kF16, {2}, {1.0009765625, -2}, {}}, {kBF16, {2}, {256, 0.5}, {}},
         {kF16, {2}, {257, -1.5}, {}}),
      Of("f32_to_f16", OpKind::kMaximum, {kF32, {2}, {1.0001, -3}, {}}, {kF32, {2}, {-1, -2}, {}},
         {kF16, {2}, {1, -2}, {}}),
  };
}

class ArithmeticTest : public ::testing::TestWithParam<OpCase> {};

TEST_P(ArithmeticTest, OnTheOracle) { ExpectOpCase(GetParam(), "oracle"); }
#ifdef KVANT_WITH_ONEDNN
TEST_P(ArithmeticTest, OnTheReferenceEngine) { ExpectOpCase(GetParam(), "reference"); }
#endif

INSTANTIATE_TEST_SUITE_P(Types, ArithmeticTest, ::testing::ValuesIn(AllCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvant::testing
