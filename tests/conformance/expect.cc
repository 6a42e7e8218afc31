#include "kvant/tests/conformance/expect.h"

#include <cstring>
#include <string>

#include "gtest/gtest.h"

namespace kvant::conformance {

void ExpectTheOracle(const Prepared& prepared, bool by_point) {
  const absl::StatusOr<Outcome> expected = RunOn("oracle", prepared, prepared.inputs);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const EngineUnderTest& engine : EnginesUnderTest()) {
    SCOPED_TRACE(engine.backend);
    const absl::StatusOr<Outcome> got = RunOn(engine.backend, prepared, prepared.inputs);
    if (!got.ok()) {
      ADD_FAILURE() << got.status();
      continue;
    }
    EXPECT_EQ(std::string(got->compiled.backend()), engine.backend);
    EXPECT_EQ(got->compiled.fused(), engine.fused);
    const std::string why = Judge(got->compiled.partition(), expected->outputs, got->outputs,
                                  got->compiled.rounding(), by_point);
    EXPECT_EQ(why, "") << got->compiled.ToString();
  }
}

void ExpectTheSameOnAnyThreads(const Prepared& prepared) {
  for (const EngineUnderTest& engine : EnginesUnderTest()) {
    if (!engine.fused) continue;
    SCOPED_TRACE(engine.backend);
    const absl::StatusOr<Outcome> one = RunOn(engine.backend, prepared, prepared.inputs, 1);
    ASSERT_TRUE(one.ok()) << one.status();
    for (const int threads : {2, 5}) {
      const absl::StatusOr<Outcome> many =
          RunOn(engine.backend, prepared, prepared.inputs, threads);
      ASSERT_TRUE(many.ok()) << many.status();
      for (size_t i = 0; i < one->outputs.size(); ++i) {
        const TestBuffer &a = one->outputs[i], &b = many->outputs[i];
        EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0)
            << threads << " threads, output " << i << ", " << one->compiled.ToString();
      }
    }
  }
}

}  // namespace kvant::conformance
