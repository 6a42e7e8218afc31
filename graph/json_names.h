// Spellings of the JSON format that its reader and its writer share.
#ifndef KVANT_GRAPH_JSON_NAMES_H_
#define KVANT_GRAPH_JSON_NAMES_H_

#include <array>
#include <string_view>
#include <variant>

#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/op.h"

namespace kvant {

// By enumerator.
inline constexpr std::array<std::string_view, 4> kLayoutNames = {"undef", "any", "strided",
                                                                 "opaque"};
inline constexpr std::array<std::string_view, 4> kPropertyNames = {"undef", "variable", "constant",
                                                                   "host_scalar"};
// By alternative of AttrValue.
inline constexpr std::array<std::string_view, 6> kAttrTypeNames = {"s64",    "f32",   "bool",
                                                                   "string", "s64[]", "f32[]"};
static_assert(kAttrTypeNames.size() == std::variant_size_v<AttrValue>);

}  // namespace kvant

#endif  // KVANT_GRAPH_JSON_NAMES_H_
