// Checks of what says where data lies: lengths, ranges, page tables, offsets. Internal to backends.
#ifndef KVANT_BACKENDS_INDEX_CHECKS_H_
#define KVANT_BACKENDS_INDEX_CHECKS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/op_shapes.h"
#include "kvant/patterns/partition.h"

namespace kvant {

// Those of a partition's ports, before it runs: kernels trust them. Ports must be in memory of the
// host.
class IndexChecks {
 public:
  IndexChecks() = default;
  // `partition` must outlive them. fused: it runs as the spec says, where as many columns of K must
  // exist as of V.
  IndexChecks(const Partition& partition, bool fused);

  bool empty() const { return checks_.empty(); }
  // kInvalidArguments, naming op, row and numbers. `inputs`: of all ports; null are those that are
  // not there yet.
  absl::Status Check(absl::Span<const void* const> inputs) const;

 private:
  enum class Kind : uint8_t { kLengths, kPages, kRanges, kOffsets, kPositions, kColumns };
  // A port's tensor, or a constant; neither: there is none, or the partition computes it.
  struct Source {
    const LogicalTensor* tensor = nullptr;
    int port = kNoPort;
    bool present() const { return tensor != nullptr; }
    const void* Find(absl::Span<const void* const> inputs) const {
      return tensor->value ? tensor->value->data() : inputs[port];
    }
  };
  struct OneCheck {
    Kind kind{};
    const Op* op = nullptr;
    Source source;                    // lengths, page table, ranges, offsets, positions
    Source other;                     // first tokens; lengths beside a page table; ranges of V
    int64_t most = 0;                 // tokens or queries that there is room for
    int64_t page_tokens = 0;          // of a page
    std::vector<int64_t> capacities;  // of what ranges are of
    AppendedTokens to;                // of positions, or slots
  };
  void Add(const Op& op);
  void AddColumns(const AttentionSpec& spec);
  Source Find(const Op& op, std::string_view name) const;
  absl::Status CheckLengths(const OneCheck& check, absl::Span<const void* const> inputs) const;
  absl::Status CheckPages(const OneCheck& check, absl::Span<const void* const> inputs) const;
  absl::Status CheckRanges(const OneCheck& check, absl::Span<const void* const> inputs) const;
  absl::Status CheckOffsets(const OneCheck& check, absl::Span<const void* const> inputs) const;
  absl::Status CheckPositions(const OneCheck& check, absl::Span<const void* const> inputs) const;
  absl::Status CheckColumns(const OneCheck& check, absl::Span<const void* const> inputs) const;

  const Partition* partition_ = nullptr;
  std::vector<OneCheck> checks_;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_INDEX_CHECKS_H_
