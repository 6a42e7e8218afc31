// The text of the device headers, in the library: what NVRTC finds kernels' includes in.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_EMBEDDED_SOURCES_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_EMBEDDED_SOURCES_H_

#include "absl/types/span.h"

namespace kvant::cuda {

struct EmbeddedSource {
  const char* name;  // as it is included: "kvant/kernels/device/ptx.h"
  const char* text;
};

// By name. The build generates the table (cmake/EmbedSources.cmake).
absl::Span<const EmbeddedSource> EmbeddedSources();

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_EMBEDDED_SOURCES_H_
