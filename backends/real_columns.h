// The checks of what only an execution knows about the columns of the scores.
#ifndef KVANT_BACKENDS_REAL_COLUMNS_H_
#define KVANT_BACKENDS_REAL_COLUMNS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

// kInvalidArguments if a KV length is not in [0, capacity]; or if a segment's range does not lie in
// it, or K and V do not add up to as many columns.
absl::Status CheckColumns(const AttentionSpec& spec, absl::Span<const void* const> inputs);

}  // namespace kvant

#endif  // KVANT_BACKENDS_REAL_COLUMNS_H_
