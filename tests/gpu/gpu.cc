#include "kvant/tests/gpu/gpu.h"

#include "kvant/backends/cuda/runtime/driver_launcher.h"

namespace kvant::cuda {

const absl::StatusOr<std::shared_ptr<Launcher>>& Gpu() {
  static const auto* const gpu =
      new absl::StatusOr<std::shared_ptr<Launcher>>(MakeDriverLauncher(0));
  return *gpu;
}

}  // namespace kvant::cuda
