// What loads from a cache, and a SoftMax over what exists, on values worked out by hand.
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/tests/backends/ops/op_testing.h"

namespace kvant::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

PortValues F32(Dims dims, std::vector<double> values) {
  return {kF32, std::move(dims), std::move(values)};
}
PortValues S32(Dims dims, std::vector<double> values) {
  return {kS32, std::move(dims), std::move(values)};
}

std::vector<OpCase> Cases() {
  const Attributes along_1{{Attr::kTokenAxis, int64_t{1}}};
  return {
      {"of_two_rows",
       OpKind::kLoadTokens,
       {},
       {F32({2, 3, 1}, {1, 2, kNan, 4, 5, 6}), S32({2}, {2, 3}), S32({2}, {1, 0})},
       {F32({2, 3, 1}, {0, 2, 0, 4, 5, 6})}},
      {"one_length_of_codes_along_the_last_axis",
       OpKind::kLoadTokens,
       {{Attr::kTokenAxis, int64_t{-1}}},
       {{kU4, {2, 2, 4}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1}}, S32({1}, {3})},
       {{kU4, {2, 2, 4}, {1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11, 0, 13, 14, 15, 0}}}},
      {"a_row_for_two_tokens",
       OpKind::kLoadTokens,
       {{Attr::kTokenGroup, int64_t{2}}},
       {F32({2, 3, 1}, {1, 2, 3, 4, 5, 6}), S32({2}, {3, 6}), S32({2}, {1, 4})},
       {F32({2, 3, 1}, {1, 2, 0, 0, 0, 6})}},
      // Of two pages of two tokens each; the pool has four.
      {"in_any_order",
       OpKind::kLoadPages,
       {},
       {F32({4, 2, 2, 1}, {0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33}),
        S32({2, 2}, {3, 0, 1, -9}), S32({2}, {3, 1})},
       {F32({2, 2, 4, 1}, {30, 31, 0, 0, 32, 33, 2, 0, 10, 0, 0, 0, 12, 0, 0, 0})}},
      {"tokens_before_heads",
       OpKind::kLoadPages,
       along_1,
       {F32({2, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8}), S32({1, 2}, {1, 0}), S32({1}, {3})},
       {F32({1, 4, 2}, {5, 6, 7, 8, 1, 2, 0, 0})}},
      {"rows_for_two_tokens",
       OpKind::kLoadPages,
       {{Attr::kTokenGroup, int64_t{2}}},
       {F32({2, 2, 1}, {1, 2, 3, 4}), S32({1, 2}, {1, 0}), S32({1}, {5})},
       {F32({1, 4, 1}, {3, 4, 1, 0})}},
      {"of_no_page",
       OpKind::kLoadPages,
       {},
       {F32({0, 2, 2, 1}, {}), S32({2, 1}, {-1, -1}), S32({2}, {0, 0})},
       {F32({2, 2, 2, 1}, {0, 0, 0, 0, 0, 0, 0, 0})}},
      {"no_token",
       OpKind::kLoadPages,
       {},
       {F32({1, 2, 1}, {kNan, kNan}), S32({1, 1}, {77}), S32({1}, {0})},
       {F32({1, 2, 1}, {0, 0})}},
      {"two_rings",
       OpKind::kLoadRanges,
       {},
       {S32({2, 2, 2}, {1, 2, 2, 2, 0, 0, 1, 3}), F32({2, 2, 1}, {1, 2, 3, 4}),
        F32({2, 3, 1}, {10, 11, 12, 20, 21, 22})},
       {F32({2, 5, 1}, {2, 1, 12, 10, 0, 21, 22, 20, 0, 0}), S32({2}, {4, 3})}},
      {"one_cache_for_all_rows",
       OpKind::kLoadRanges,
       along_1,
       {S32({2, 1, 2}, {1, 2, 2, 3}), F32({1, 3}, {1, 2, 3})},
       {F32({2, 3}, {2, 3, 0, 3, 1, 2})}},
      {"over_what_exists",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{-1}}, {Attr::kMode, std::string("inf_as_zero")}},
       {F32({3, 4}, {kNan, 5, 5, kNan, 7, kNan, 1, 1, 2, 2, 2, 2}), S32({3}, {3, 1, 2}),
        S32({3}, {1, 0, 2})},
       {F32({3, 4}, {0, 0.5, 0.5, 0, 1, 0, 0, 0, 0, 0, 0, 0})}},
      {"one_length_along_the_first_axis",
       OpKind::kSoftMax,
       {{Attr::kAxis, int64_t{0}}},
       {F32({3, 1}, {2, 2, 90}), S32({1}, {2})},
       {F32({3, 1}, {0.5, 0.5, 0})}},
  };
}

class LoadOpsTest : public ::testing::TestWithParam<std::tuple<OpCase, std::string>> {};

TEST_P(LoadOpsTest, GivesWhatIsWorkedOutByHand) {
  ExpectOpCase(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, LoadOpsTest,
                         ::testing::Combine(::testing::ValuesIn(Cases()),
                                            ::testing::Values("oracle"
#ifdef KVANT_WITH_ONEDNN
                                                              ,
                                                              "reference"
#endif
                                                              )),
                         [](const auto& info) {
                           const OpCase& test = std::get<0>(info.param);
                           return std::string(OpKindName(test.kind)) + "_" + test.name + "_" +
                                  std::get<1>(info.param);
                         });

}  // namespace
}  // namespace kvant::testing
