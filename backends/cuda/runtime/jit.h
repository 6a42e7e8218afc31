// Jit: kernels compiled at run time, each once: kept in memory and in a folder on disk.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_JIT_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_JIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvant/backends/cuda/runtime/kernel_source.h"

namespace kvant::cuda {

struct JitOptions {
  // The folder of compiled kernels. Empty: the environment's KVANT_CACHE_DIR, else
  // $XDG_CACHE_HOME/kvant, else ~/.cache/kvant.
  std::string cache_dir;
  // False: memory only.
  bool disk_cache = true;
  // What the driver supports, as cuDriverGetVersion gives it: 12040 for CUDA 12.4. An NVRTC or a
  // stored kernel of a newer major version is passed over: the driver would not load it. 0: any.
  int driver_version = 0;
};

// How many kernels came from where.
struct JitCounts {
  int64_t compiled = 0;
  int64_t from_disk = 0;
  int64_t from_memory = 0;
};

// May be used from several threads at once: one compiles a kernel, others that ask for it wait;
// different kernels compile side by side.
//
// On disk a kernel is found by a hash of its source, the embedded headers, the architecture and
// the compiler's options, and by NVRTC's version. Opening NVRTC takes longer than reading a kernel,
// so a stored kernel is taken without it while the very library file that made it is still there.
// Else NVRTC is opened, and its version decides; where none can be opened, the newest that is
// stored will do.
class Jit {
 public:
  explicit Jit(const JitOptions& options = {});
  ~Jit();
  Jit(const Jit&) = delete;
  Jit& operator=(const Jit&) = delete;

  // arch: "sm_80", "sm_90a". kUnimplemented: no NVRTC and not stored. kInternal: it does not
  // compile, with NVRTC's log; that is forgotten again.
  absl::StatusOr<std::shared_ptr<const Cubin>> Get(const KernelSource& source,
                                                   std::string_view arch);

  // Why kernels are not kept on disk, a sentence; empty if they are. Never an error.
  std::string cache_note() const;
  // The folder; empty without one.
  std::string cache_dir() const;
  JitCounts counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_JIT_H_
