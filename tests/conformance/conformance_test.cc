// Every case on every engine, against the oracle.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/harness.h"
#include "kvant_test_config.h"

namespace kvant::conformance {
namespace {

struct EngineUnderTest {
  std::string backend;
  bool fused = false;
};

std::vector<EngineUnderTest> EnginesUnderTest() {
  std::vector<EngineUnderTest> engines;
  const char* const chosen = std::getenv("KVANT_CONFORMANCE_ENGINES");
  const auto add = [&](const char* backend, bool fused, bool by_default) {
    const std::vector<std::string> names = absl::StrSplit(chosen == nullptr ? "" : chosen, ',');
    const bool named = std::find(names.begin(), names.end(), backend) != names.end();
    if (chosen == nullptr ? by_default : named) engines.push_back({backend, fused});
  };
#define KVANT_CONFORMANCE_ENGINE(backend, fused, by_default) add(backend, fused, by_default);
#include "kvant/tests/conformance/engines.inc"
#undef KVANT_CONFORMANCE_ENGINE
  return engines;
}

std::string NameOf(const testing::TestParamInfo<Case>& info) { return info.param.name; }

class ConformanceTest : public testing::TestWithParam<Case> {};

TEST_P(ConformanceTest, MatchesTheOracle) {
  const absl::StatusOr<Prepared> prepared = Prepare(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const absl::StatusOr<Outcome> expected = RunOn("oracle", *prepared, prepared->inputs);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const EngineUnderTest& engine : EnginesUnderTest()) {
    SCOPED_TRACE(engine.backend);
    const absl::StatusOr<Outcome> got = RunOn(engine.backend, *prepared, prepared->inputs);
    if (!got.ok()) {
      ADD_FAILURE() << got.status();
      continue;
    }
    EXPECT_EQ(std::string(got->compiled.backend()), engine.backend);
    EXPECT_EQ(got->compiled.fused(), engine.fused);
    const std::string why =
        Judge(got->compiled.partition(), expected->outputs, got->outputs, got->compiled.rounding(),
              GetParam().magnitudes == Case::Magnitudes::kOrdinary);
    EXPECT_EQ(why, "") << got->compiled.ToString();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ConformanceTest, testing::ValuesIn(AllCases()), NameOf);

class ThreadsTest : public testing::TestWithParam<Case> {};

TEST_P(ThreadsTest, ResultDoesNotDependOnTheirNumber) {
  const absl::StatusOr<Prepared> prepared = Prepare(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  for (const EngineUnderTest& engine : EnginesUnderTest()) {
    if (!engine.fused) continue;  // oneDNN promises no such thing
    SCOPED_TRACE(engine.backend);
    const absl::StatusOr<Outcome> one = RunOn(engine.backend, *prepared, prepared->inputs, 1);
    ASSERT_TRUE(one.ok()) << one.status();
    for (const int threads : {2, 5}) {
      const absl::StatusOr<Outcome> many =
          RunOn(engine.backend, *prepared, prepared->inputs, threads);
      ASSERT_TRUE(many.ok()) << many.status();
      for (size_t i = 0; i < one->outputs.size(); ++i) {
        const TestBuffer &a = one->outputs[i], &b = many->outputs[i];
        EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0)
            << threads << " threads, output " << i << ", " << one->compiled.ToString();
      }
    }
  }
}

std::vector<Case> EveryNinth() {
  std::vector<Case> some;
  const std::vector<Case> all = AllCases();
  for (size_t i = 0; i < all.size(); i += 9) some.push_back(all[i]);
  return some;
}

INSTANTIATE_TEST_SUITE_P(Cases, ThreadsTest, testing::ValuesIn(EveryNinth()), NameOf);

TEST(ConformanceCasesTest, NamesAreUnique) {
  std::set<std::string> names;
  for (const Case& c : AllCases()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
}

}  // namespace
}  // namespace kvant::conformance
