// Every case on every engine, against the oracle.
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/expect.h"

namespace kvant::conformance {
namespace {

std::string NameOf(const testing::TestParamInfo<Case>& info) { return info.param.name; }

class ConformanceTest : public testing::TestWithParam<Case> {};

TEST_P(ConformanceTest, MatchesTheOracle) {
  const absl::StatusOr<Prepared> prepared = Prepare(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ExpectTheOracle(*prepared, GetParam().magnitudes == Case::Magnitudes::kOrdinary);
}

INSTANTIATE_TEST_SUITE_P(Cases, ConformanceTest, testing::ValuesIn(AllCases()), NameOf);

class ThreadsTest : public testing::TestWithParam<Case> {};

TEST_P(ThreadsTest, ResultDoesNotDependOnTheirNumber) {
  const absl::StatusOr<Prepared> prepared = Prepare(GetParam());
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ExpectTheSameOnAnyThreads(*prepared);
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
