// docs/kv_cache.md lists the schemes as they are in cache_schemes.inc; KVANT_UPDATE_DOCS=1 writes
// them.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kvant/cache/cache_scheme.h"
#include "kvant/tests/common/doc_table.h"

namespace kvant {
namespace {

TEST(CacheSchemesDoc, HoldsTheTable) {
  std::string table = "| name | K | V | bits (heads of 128) | |\n|---|---|---|---|---|\n";
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    const CacheScheme scheme = ParseCacheScheme(named.name).value();
    const std::string k(named.k), v(named.v);
    const double bits =
        (scheme.k.BitsPerElement(8, 128).value() + scheme.v.BitsPerElement(8, 128).value()) / 2;
    const std::string alias =
        named.alias.empty() ? "" : absl::StrCat(", also ", std::string(named.alias));
    absl::StrAppend(&table, "| ", std::string(named.name), alias, " | `", k, "` | ",
                    k == v ? "the same" : absl::StrCat("`", v, "`"), " | ",
                    absl::StrFormat("%.4g", bits), " | ", std::string(named.what), " |\n");
  }
  ExpectDocTable("kv_cache.md", table);
}

}  // namespace
}  // namespace kvant
