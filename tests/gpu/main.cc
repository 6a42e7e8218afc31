// The tests that a GPU is needed for, as a program: 2 where there is none.
#include <cstdio>
#include <string>

#include "gtest/gtest.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/tests/gpu/gpu.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  kvant::EnableCudaSimt();
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  if (const auto& gpu = kvant::cuda::Gpu(); !gpu.ok()) {
    std::fprintf(stderr, "kvant_gpu_tests: no GPU: %s\n",
                 std::string(gpu.status().message()).c_str());
    return 2;
  }
  return RUN_ALL_TESTS();
}
