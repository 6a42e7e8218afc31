// What each problem for the kernel on packed codes is to show.
#ifndef KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_
#define KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/codes_problem.h"

namespace kvant::cuda {

inline void ExpectSolved(const CodesProblem& problem) {
  SCOPED_TRACE(problem.Name());
  const CodesResult result = Solve(problem, /*watch=*/true);
  ASSERT_EQ(result.refused, "");
  EXPECT_LE(result.error, problem.q == kFloat32 ? 2e-6 : 1e-3);
  EXPECT_EQ(result.wrong_reads, 0) << "what is stored is to be read once";
  EXPECT_THAT(result.report.errors, testing::IsEmpty());
  const simt::Counters& counters = result.report.counters;
  EXPECT_EQ(counters.load_matrix_wavefronts, counters.load_matrix_wavefronts_ideal);
}

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_
