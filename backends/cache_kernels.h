// CacheKernels: what a KvCache has to be done in an engine's memory beside storing and attention.
#ifndef KVANT_BACKENDS_CACHE_KERNELS_H_
#define KVANT_BACKENDS_CACHE_KERNELS_H_

#include <memory>

#include "absl/status/status.h"
#include "kvant/graph/cache_tasks.h"

namespace kvant {

// Each call puts a task (graph/cache_tasks.h) onto the stream, Stream::native(). It neither
// allocates nor waits, so a stream may be captured. May be called from several threads at once.
class CacheKernels {
 public:
  virtual ~CacheKernels() = default;
  virtual absl::Status Run(const CacheStep& step, void* stream) const = 0;
  virtual absl::Status Run(const CacheCheck& check, void* stream) const = 0;
  virtual absl::Status Run(const CacheLoad& load, void* stream) const = 0;
  virtual absl::Status Run(const CacheLeave& leave, void* stream) const = 0;
  virtual absl::Status Run(const CacheCopy& copy, void* stream) const = 0;
  virtual absl::Status Run(const CacheRanges& ranges, void* stream) const = 0;
};

// Of a sequence of that length, what CacheStep stores for attention.
void StoreRangesOfRow(const CacheLayout& layout, int length, int* to);

// In the host's memory, on the calling thread. Of CacheCheck it does nothing: the host sees the
// numbers, and can say more of them.
std::unique_ptr<CacheKernels> MakeHostCacheKernels();

}  // namespace kvant

#endif  // KVANT_BACKENDS_CACHE_KERNELS_H_
