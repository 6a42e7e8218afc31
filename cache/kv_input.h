// KvInput: new keys or values, as a caller has them.
#ifndef KVANT_CACHE_KV_INPUT_H_
#define KVANT_CACHE_KV_INPUT_H_

#include <cstdint>
#include <optional>

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
// Dense. Of dims that no memory has (unknown, negative, more than 64 bits count) it holds 0 bytes,
// and Append says what is wrong with them.
KvInput MakeKvInput(DataType type, const void* data, const Dims& dims);
// From the first element of a tensor to its last, which is all that is read of it; 0 where its
// type, dims or strides are not those of memory.
int64_t KvInputBytes(const LogicalTensor& desc);

// Whether `input` is tokens that `tensor` stores; kInvalidArguments, naming the layer and what is
// wrong. Without `tokens` it may have any number of them.
absl::Status CheckKvInput(int64_t layer, const KvTensor& tensor, const KvInput& input,
                          std::optional<int64_t> tokens = std::nullopt);
// Whether `tensor` can store the numbers of tokens [0, counts[b]) of each batch row b, no more than
// the input has, which CheckKvInput takes; kInvalidArguments with the place of one that it cannot
// (not finite, or beyond what the scheme's types hold).
absl::Status CheckKvNumbers(int64_t layer, const KvTensor& tensor, const KvInput& input,
                            absl::Span<const int64_t> counts);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_INPUT_H_
