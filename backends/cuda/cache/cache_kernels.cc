// The kernels of kernels/cuda/cache.h, loaded.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/substitute.h"
#include "kvant/backends/cuda/cuda_backend.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

// In the order of kernels.inc.
enum class CacheKernel {
#define KVANT_CACHE_KERNEL(Task, entry) k##Task,
#include "kvant/backends/cuda/kernels.inc"
};

struct KernelRow {
  const char* entry;
  const char* task;
};
constexpr KernelRow kKernels[] = {
#define KVANT_CACHE_KERNEL(Task, entry) {#entry, #Task},
#include "kvant/backends/cuda/kernels.inc"
};

constexpr char kText[] = R"(#include "kvant/kernels/cuda/cache.h"

extern "C" __global__ void __launch_bounds__($1, 1)
$0(const __grid_constant__ kvant::$2 params) {
  kvant::cuda::$2Kernel::Run(params);
}
)";

constexpr int kThreads = 128;
// Beyond these, threads take several elements.
constexpr int64_t kMostBlocks = 4096;

int64_t Elements(const CacheSource& source, int64_t batch, int64_t heads, int64_t tokens) {
  return batch * heads * tokens * source.channels;
}

// How many threads there is work for; of a step, those of one block.
int64_t ThreadsFor(const CacheStep&) { return kThreads; }
int64_t ThreadsFor(const CacheCheck& p) {
  return std::max(Elements(p.source[0], p.batch, p.heads, p.tokens),
                  Elements(p.source[1], p.batch, p.heads, p.tokens));
}
int64_t ThreadsFor(const CacheLoad& p) { return Elements(p.source, p.batch, p.heads, p.tokens); }
int64_t ThreadsFor(const CacheLeave& p) {
  return int64_t{p.batch} * p.heads * p.tokens * (p.token_bytes / 2);
}
int64_t ThreadsFor(const CacheCopy& p) { return (p.bytes + 15) / 16 * p.rows; }
int64_t ThreadsFor(const CacheRanges& p) { return p.batch; }

class LoadedCacheKernels : public CacheKernels {
 public:
  LoadedCacheKernels(std::shared_ptr<const Launcher> launcher,
                     std::vector<std::shared_ptr<const LoadedKernel>> kernels)
      : launcher_(std::move(launcher)), kernels_(std::move(kernels)) {}

#define KVANT_CACHE_KERNEL(Task, entry)                             \
  absl::Status Run(const Task& task, void* stream) const override { \
    return Launch(CacheKernel::k##Task, task, stream);              \
  }
#include "kvant/backends/cuda/kernels.inc"

 private:
  template <class Task>
  absl::Status Launch(CacheKernel kernel, const Task& task, void* stream) const {
    const int64_t blocks = (ThreadsFor(task) + kThreads - 1) / kThreads;
    if (blocks == 0) return absl::OkStatus();
    return launcher_->Launch(*kernels_[static_cast<size_t>(kernel)], std::min(blocks, kMostBlocks),
                             &task, sizeof(task), stream);
  }

  const std::shared_ptr<const Launcher> launcher_;
  const std::vector<std::shared_ptr<const LoadedKernel>> kernels_;  // by CacheKernel
};

KernelSpec SpecOf(const KernelRow& row) {
  KernelSpec spec;
  spec.source.name = spec.source.entry = row.entry;
  spec.source.text = absl::Substitute(kText, row.entry, kThreads, row.task);
  spec.threads = kThreads;
  return spec;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CacheKernels>> LoadCacheKernels(std::shared_ptr<Launcher> launcher) {
  std::vector<std::shared_ptr<const LoadedKernel>> kernels;
  for (const KernelRow& row : kKernels) {
    KVANT_ASSIGN_OR_RETURN(kernels.emplace_back(), launcher->Load(SpecOf(row)));
  }
  return std::make_unique<LoadedCacheKernels>(std::move(launcher), std::move(kernels));
}

}  // namespace kvant::cuda
