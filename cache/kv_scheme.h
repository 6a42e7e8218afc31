// KvScheme: how a cache keeps the keys, or the values, of a layer.
//
//   [ sinks | quantized | window ]
//
// The first `sinks` tokens and the most recent ones stay in a floating-point type; what is between
// them is quantized once and then frozen.
#ifndef KVANT_CACHE_KV_SCHEME_H_
#define KVANT_CACHE_KV_SCHEME_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/cache/kv_format.h"
#include "kvant/graph/data_type.h"

namespace kvant {

struct KvScheme {
  // When tokens leave the window.
  enum class Flush : uint8_t {
    kSliding,  // one for each that comes: the newest and the `residual` before it stay
    kBulk,     // all `residual` at once, when there are so many and one more comes
  };

  // Of the quantized tokens, or of all where it is f32, bf16 or f16. Scales are f16 unless it
  // says otherwise.
  KvFormat format{.type = kF16};
  // Tokens are multiplied by a Hadamard matrix / sqrt(block) in blocks of so many channels before
  // they are stored, and queries (for K) or the output (for V) likewise; 0: not.
  static constexpr int64_t kWholeHead = -1;
  int64_t rotation = 0;
  int64_t sinks = 0;
  int64_t residual = 0;
  Flush flush = Flush::kSliding;
  DataType window_type = kF16;  // of sinks and window

  DataType scale_type() const { return format.scale_type == kUndef ? kF16 : format.scale_type; }
  // The scales are for all tokens, and given when the cache is made.
  bool static_scales() const { return format.quantized() && !format.group_tokens(); }
  // kInvalidArguments, in words and numbers, where it contradicts itself or the head size.
  absl::Status Check(int64_t head_size) const;
  // Bits per element in the long run, the share of scales and zero points included.
  double BitsPerElement(int64_t heads, int64_t head_size) const;
  // The text that parses to this: "u4:g32:rzp+rot64+sinks4+window128".
  std::string ToString() const;
};

// FORMAT[+rotN][+sinksN][+windowN|+bulkN][+f32|+bf16], with FORMAT as in kv_format.h, N
// tokens or channels, and the type of sinks and window if it is not f16. kInvalidArguments with a
// sentence.
absl::StatusOr<KvScheme> ParseKvScheme(std::string_view text);

// Of one layer.
struct KvCacheScheme {
  KvScheme k, v;
  // The name that the table has for it, else K's text, and V's behind a slash if it is another.
  std::string ToString() const;
  bool operator==(const KvCacheScheme& other) const { return ToString() == other.ToString(); }
};

// A row of the table of named schemes (kv_schemes.inc).
struct NamedKvScheme {
  std::string_view name;
  std::string_view alias;  // also parsed; empty: none
  std::string_view k, v, what;
};
absl::Span<const NamedKvScheme> NamedKvSchemes();

// A name or an alias of the table, one scheme's text for both, or "K/V" with two texts.
// kInvalidArguments.
absl::StatusOr<KvCacheScheme> ParseKvCacheScheme(std::string_view text);

}  // namespace kvant

#endif  // KVANT_CACHE_KV_SCHEME_H_
