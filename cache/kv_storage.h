// KvStorage: how a cache stores the tokens of K, or those of V.
//
//   [ sinks | quantized | window ]
//
// The first `sinks` tokens and the most recent ones stay in a floating-point type. A token between
// them is quantized once and then frozen.
#ifndef KVANT_CACHE_KV_STORAGE_H_
#define KVANT_CACHE_KV_STORAGE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvant/cache/number_format.h"
#include "kvant/graph/data_type.h"

namespace kvant {

struct KvStorage {
  // Of the quantized tokens; of all tokens where it is f32, bf16 or f16.
  NumberFormat format{.type = kF16};
  // Tokens are multiplied by a Hadamard matrix / sqrt(block) before they are stored, in blocks of
  // so many channels. Queries (for K) or the output (for V) are multiplied likewise. 0: nothing is.
  static constexpr int64_t kWholeHead = -1;
  int64_t rotation = 0;
  int64_t sinks = 0;
  // Tokens that the window keeps; 0: there is none.
  int64_t residual = 0;
  // Whether all tokens leave the window at once, when there are `residual` and one more comes. Else
  // the oldest leaves for each that comes, and the newest and `residual` before it stay.
  bool bulk = false;
  DataType window_type = kF16;  // of sinks and window

  DataType scale_type() const { return format.scale_type == kUndef ? kF16 : format.scale_type; }
  // All tokens share scales that are given when the cache is made.
  bool static_scales() const { return format.quantized() && !format.group_tokens(); }
  // kInvalidArguments, in words and numbers, where it contradicts itself or the head size.
  absl::Status Check(int64_t head_size) const;
  // Of quantized tokens, the share of scales and zero points included. Errors as of Check.
  absl::StatusOr<double> BitsPerElement(int64_t heads, int64_t head_size) const;
  // The text that parses to this: "u4:g32:rzp+rot64+sinks4+window128".
  std::string ToString() const;
};

// FORMAT[+rot|+rotN][+sinksN][+windowN|+bulkN][+f32|+bf16]. FORMAT is as in number_format.h, N
// counts tokens or channels, and the last is the type of sinks and window, otherwise f16.
// kInvalidArguments with a sentence.
absl::StatusOr<KvStorage> ParseKvStorage(std::string_view text);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_STORAGE_H_
