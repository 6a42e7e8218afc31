// KvInput: new keys or values, as a caller has them.
#ifndef KVANT_CACHE_KV_INPUT_H_
#define KVANT_CACHE_KV_INPUT_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "kvant/backends/tensor.h"
#include "kvant/cache/kv_tensor.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

// [batch, heads, tokens, head size] of f32, f16 or bf16, dense or with strides.
struct KvInput {
  ConstTensor data;
  LogicalTensor desc;
};
// A dense one. It has 0 bytes for dims that no memory has (unknown, negative, more than 64 bits
// count); Append says what is wrong with those.
KvInput MakeKvInput(DataType type, const void* data, const Dims& dims);
// Bytes from the first element of a tensor to its last: no others are read. 0 where its type, dims
// or strides are not those of memory.
int64_t KvInputBytes(const LogicalTensor& desc);

// Checks that `tensor` can store tokens of this type, shape and memory. The error,
// kInvalidArguments, names the layer and what is wrong. Without `tokens` any number of them will
// do.
absl::Status CheckKvInput(int64_t layer, const KvTensor& tensor, const KvInput& input,
                          std::optional<int64_t> tokens = std::nullopt);
// Checks that `tensor` can store the numbers of what each batch row takes of the input. The
// error, kInvalidArguments, names the place of one that is not finite or beyond what the types
// hold. CheckKvInput must have taken the input, with as many tokens.
absl::Status CheckKvNumbers(int64_t layer, const KvTensor& tensor, const KvInput& input,
                            const KvTaken& taken);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_INPUT_H_
