// Engines of every test may be of Device::kCudaSimt.
#include "kvant/backends/cuda_simt.h"

namespace kvant {
namespace {

[[maybe_unused]] const bool enabled = [] {
  EnableCudaSimt();
  return true;
}();

}  // namespace
}  // namespace kvant
