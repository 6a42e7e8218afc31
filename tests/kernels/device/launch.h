// Launches on the SIMT executor, for tests.
#ifndef KVANT_TESTS_KERNELS_DEVICE_LAUNCH_H_
#define KVANT_TESTS_KERNELS_DEVICE_LAUNCH_H_

#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "kvant/kernels/device/device.h"
#include "kvant/kernels/device/simt.h"

namespace kvant::simt {

// One block of one warp unless the shape says otherwise; expects no errors.
inline Report LaunchCleanly(const LaunchShape& shape, const std::function<void()>& body,
                            const Options& options = {}) {
  Report report = Launch(shape, options, body);
  EXPECT_THAT(report.errors, testing::IsEmpty());
  return report;
}

MATCHER_P2(IsError, check, text, "") {
  return arg.check == check && arg.message.find(text) != std::string::npos;
}

// "this_file:line", as the executor's messages name it.
inline std::string At(int line, const char* file = __builtin_FILE()) {
  return std::string(file) + ":" + std::to_string(line);
}

}  // namespace kvant::simt

#endif  // KVANT_TESTS_KERNELS_DEVICE_LAUNCH_H_
