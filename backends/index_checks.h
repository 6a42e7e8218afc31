// Checks of what says where data lies: lengths, ranges, page tables, offsets. Internal to backends.
#ifndef KVANT_BACKENDS_INDEX_CHECKS_H_
#define KVANT_BACKENDS_INDEX_CHECKS_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/patterns/partition.h"

namespace kvant {

// Those of a partition's ports, before it runs: kernels trust them. Ports must be in memory of the
// host.
class IndexChecks {
 public:
  // `partition` must outlive them. fused: it runs as the spec says, where as many columns of K must
  // exist as of V.
  IndexChecks(const Partition& partition, bool fused);

  // kInvalidArguments, naming op, row and numbers. `inputs`: of all ports; null are those that are
  // not there yet.
  absl::Status Check(absl::Span<const void* const> inputs) const;

 private:
  std::vector<std::function<absl::Status(absl::Span<const void* const> inputs)>> checks_;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_INDEX_CHECKS_H_
