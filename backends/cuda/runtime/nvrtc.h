// Nvrtc: NVIDIA's run-time compiler, opened at run time. It needs no GPU.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_NVRTC_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_NVRTC_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/cuda/runtime/kernel_source.h"

namespace kvant::cuda {

struct NvrtcApi;

// Immutable; may be used from several threads at once.
class Nvrtc {
 public:
  // The environment's KVANT_LIBNVRTC alone where it is set; else by name (libnvrtc.so.13, .so.12,
  // .so), then in /usr/local/cuda/lib64, then in a development checkout's .deps/cuda. One of a
  // newer major version than `driver_version` (cuDriverGetVersion's; 0: any) is passed over, since
  // that driver does not load what it makes. kUnimplemented with a sentence: the names and reasons.
  static absl::StatusOr<std::shared_ptr<const Nvrtc>> Open(int driver_version = 0);
  // The same among `names` alone.
  static absl::StatusOr<std::shared_ptr<const Nvrtc>> Open(absl::Span<const std::string> names,
                                                           int driver_version);

  int major() const { return major_; }
  int minor() const { return minor_; }
  // The library's file.
  const std::string& path() const { return path_; }

  // kUnimplemented: this version knows no `arch`. kInternal: it does not compile, with the log.
  absl::StatusOr<Cubin> Compile(const KernelSource& source, std::string_view arch) const;

 private:
  std::shared_ptr<const NvrtcApi> api_;
  int major_ = 0, minor_ = 0;
  std::string path_;
};

// What every kernel is compiled with, beside the architecture: by versions from major.minor on.
struct NvrtcOption {
  const char* text;
  int major = 0, minor = 0;
};
absl::Span<const NvrtcOption> NvrtcOptions();

// From the log of --ptxas-options=-v; nullopt where it does not tell of `entry`.
std::optional<KernelStats> ParsePtxasLog(std::string_view log, std::string_view entry);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_NVRTC_H_
