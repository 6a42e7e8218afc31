// KvInput: new keys or values, as a caller has them.
#ifndef KVANT_CACHE_KV_INPUT_H_
#define KVANT_CACHE_KV_INPUT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/backends/tensor.h"
#include "kvant/cache/kv_tensor.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// [batch, heads, tokens, head size] of f32, f16 or bf16, dense or with strides.
struct KvInput {
  ConstTensor data;
  LogicalTensor desc;
};
KvInput MakeKvInput(DataType type, const void* data, const Dims& dims);
// From the first element of a tensor to its last, which is all that is read of it.
int64_t KvInputBytes(const LogicalTensor& desc);

// Whether `tensor` can store tokens [0, counts[b]) of each batch row of an input that has `tokens`
// of them; kInvalidArguments, naming the layer, what is wrong, and of a number that cannot be
// stored (not finite, or beyond what the scheme's types hold) its place. Numbers are not looked at
// with `any_number`.
absl::Status CheckKvInput(int64_t layer, const KvTensor& tensor, const KvInput& input,
                          int64_t tokens, absl::Span<const int64_t> counts, bool any_number);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_INPUT_H_
