// Every case on every engine, against the oracle.
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/harness.h"

namespace kvant::conformance {
namespace {

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
