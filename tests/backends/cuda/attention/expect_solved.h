// What each problem for the kernel on packed codes is to show.
#ifndef KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_
#define KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/attention/codes_problem.h"
#include "kvant/tests/common/simt_turn.h"

namespace kvant::cuda {

inline void ExpectSolved(CodesProblem problem) {
  // Devices differ in how they make f16 of e4m3.
  if (!problem.converts_e4m3 && (problem.k.type == kFloat8E4M3 || problem.v.type == kFloat8E4M3)) {
    problem.converts_e4m3 = true;
    ExpectSolved(problem);
    problem.converts_e4m3 = false;
  }
  if (!HasSimtTurn()) return;
  SCOPED_TRACE(problem.Name());
  const CodesResult result = Solve(problem, /*watch=*/true);
  ASSERT_EQ(result.refused, "");
  EXPECT_LE(result.error, (problem.q == kFloat32 ? 2e-6 : 1e-3) + result.own_error)
      << "f32 by itself: " << result.own_error;
  EXPECT_EQ(result.wrong_reads, 0) << "what is stored is to be read once";
  EXPECT_THAT(result.report.errors, testing::IsEmpty());
  const simt::Counters& counters = result.report.counters;
  EXPECT_EQ(counters.load_matrix_wavefronts, counters.load_matrix_wavefronts_ideal);
}

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_BACKENDS_CUDA_ATTENTION_EXPECT_SOLVED_H_
