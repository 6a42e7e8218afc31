#include "kvant/cache/cache_scheme.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr NamedCacheScheme kNamed[] = {
#define KVANT_CACHE_SCHEME(name, alias, k, v, what) {name, alias, k, v, what},
#include "kvant/cache/cache_schemes.inc"
};

// Null if there is none.
const NamedCacheScheme* FindNamed(std::string_view name) {
  for (const NamedCacheScheme& named : kNamed) {
    if (!name.empty() && (named.name == name || named.alias == name)) return &named;
  }
  return nullptr;
}

// "f32, bf16, .., quanto4 (or hqq4), .."
std::string AllNames() {
  return absl::StrJoin(kNamed, ", ", [](std::string* out, const NamedCacheScheme& named) {
    out->append(named.name);
    if (!named.alias.empty()) out->append(" (or ").append(named.alias).append(")");
  });
}

}  // namespace

absl::Span<const NamedCacheScheme> NamedCacheSchemes() { return kNamed; }

std::string CacheScheme::ToString() const {
  const std::string k_text = k.ToString(), v_text = v.ToString();
  for (const NamedCacheScheme& named : kNamed) {
    if (named.k == k_text && named.v == v_text) return std::string(named.name);
  }
  return k_text == v_text ? k_text : absl::StrCat(k_text, "/", v_text);
}

absl::StatusOr<CacheScheme> ParseCacheScheme(std::string_view text) {
  std::string_view k = text, v = text;
  if (const size_t slash = text.find('/'); slash != std::string_view::npos) {
    k = text.substr(0, slash);
    v = text.substr(slash + 1);
  }
  if (const NamedCacheScheme* const named = FindNamed(text)) {
    k = named->k;
    v = named->v;
  } else if (text.find_first_of(":+/") == std::string_view::npos && !DataTypeFromName(text)) {
    // A lone word that is no type was meant as a name.
    return InvalidArguments("scheme '", text, "': neither a number format nor one of ", AllNames());
  } else {
    for (const std::string_view side : {k, v}) {
      const std::string_view word = side.substr(0, side.find_first_of(":+"));
      const NamedCacheScheme* const whole = FindNamed(word);
      if (whole == nullptr || DataTypeFromName(word)) continue;
      return InvalidArguments("scheme '", text, "': ", word,
                              " is a whole scheme, to which nothing is added; it stands for ",
                              whole->k, "/", whole->v);
    }
  }
  CacheScheme scheme;
  KVANT_ASSIGN_OR_RETURN(scheme.k, ParseKvStorage(k));
  KVANT_ASSIGN_OR_RETURN(scheme.v, ParseKvStorage(v));
  return scheme;
}

}  // namespace kvant
