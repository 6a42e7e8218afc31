// CacheScheme: how a layer of a cache stores its keys and its values.
#ifndef KVANT_CACHE_CACHE_SCHEME_H_
#define KVANT_CACHE_CACHE_SCHEME_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/cache/kv_storage.h"

namespace kvant {

struct CacheScheme {
  KvStorage k, v;
  // Its name where it has one. Else the text of K, and that of V behind a slash if it is another.
  std::string ToString() const;
  bool operator==(const CacheScheme& other) const { return ToString() == other.ToString(); }
};

// A row of cache_schemes.inc.
struct NamedCacheScheme {
  std::string_view name;
  std::string_view alias;  // parses as well; empty: none
  std::string_view k, v, what;
};
absl::Span<const NamedCacheScheme> NamedCacheSchemes();

// A name or an alias; or the text of a KvStorage for both K and V; or two such texts, "K/V".
// kInvalidArguments with a sentence.
absl::StatusOr<CacheScheme> ParseCacheScheme(std::string_view text);

}  // namespace kvant

#endif  // KVANT_CACHE_CACHE_SCHEME_H_
