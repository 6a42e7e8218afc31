// The GPU that tests run on, if there is one.
#ifndef KVANT_TESTS_GPU_GPU_H_
#define KVANT_TESTS_GPU_GPU_H_

#include <memory>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

// Device 0, opened once.
const absl::StatusOr<std::shared_ptr<Launcher>>& Gpu();

// Why there is none, in a test that needs it.
#define KVANT_SKIP_WITHOUT_GPU() \
  if (!::kvant::cuda::Gpu().ok()) GTEST_SKIP() << ::kvant::cuda::Gpu().status().message()

}  // namespace kvant::cuda

#endif  // KVANT_TESTS_GPU_GPU_H_
