// KvMover: elements of an engine's memory, copied and exchanged there.
#ifndef KVANT_CACHE_KV_MOVER_H_
#define KVANT_CACHE_KV_MOVER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kvant/backends/cache_kernels.h"
#include "kvant/backends/device_memory.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/data_type.h"

namespace kvant {

// Rows of `count` elements, the first from element `first` on.
struct KvElements {
  DataType type = kUndef;
  std::byte* data = nullptr;
  int64_t first = 0;
  int64_t pitch = 0;  // from row to row, in elements
};

class KvMover {
 public:
  KvMover(const CacheKernels& kernels, DeviceMemory& memory, const Stream& stream)
      : kernels_(kernels), memory_(memory), stream_(stream) {}

  // `rows` rows of `count` elements of one type, put onto the stream.
  absl::Status Copy(const KvElements& from, const KvElements& to, int64_t rows,
                    int64_t count) const {
    return Move(from, to, rows, count, false);
  }
  absl::Status Exchange(const KvElements& a, const KvElements& b, int64_t rows,
                        int64_t count) const {
    return Move(a, b, rows, count, true);
  }

 private:
  absl::Status Move(const KvElements& from, const KvElements& to, int64_t rows, int64_t count,
                    bool exchange) const;
  // A row that shares bytes with others, by way of the host.
  absl::Status MoveOnHost(const KvElements& from, const KvElements& to, int64_t count,
                          bool exchange) const;

  const CacheKernels& kernels_;
  DeviceMemory& memory_;
  const Stream& stream_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_MOVER_H_
