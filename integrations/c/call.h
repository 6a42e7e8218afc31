// What every function of the ABI does: no exception leaves it, and its error is kept for this
// thread.
#ifndef KVANT_INTEGRATIONS_C_CALL_H_
#define KVANT_INTEGRATIONS_C_CALL_H_

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/graph/status.h"
#include "kvant/integrations/c/kvant_c.h"

namespace kvant::c {

// Keeps the sentence for kvant_error.
kvant_status Report(const absl::Status& status);
// Keeps a text of this thread.
const char* Keep(std::string text);

template <typename F>
kvant_status Call(const F& body) {
  return Report(WithoutExceptions(body));
}
// `body`'s, or `otherwise` if it throws.
template <typename T, typename F>
T CallFor(T otherwise, const F& body) {
  try {
    return body();
  } catch (...) {
    return otherwise;
  }
}

// kInvalidArguments for the first that is null.
absl::Status NotNull(std::initializer_list<std::pair<const char*, const void*>> pointers);

// "strict", "bf16", .. as GraphOptions has it; null: strict.
absl::StatusOr<FpMath> FpMathOf(const char* name);

// A caller's struct: what it does not have is zero. Null: all is.
template <typename T>
absl::Status Read(const char* name, const T* given, T& out) {
  out = {};
  out.size = sizeof(T);
  if (given == nullptr) return absl::OkStatus();
  if (given->size < sizeof(size_t)) return InvalidArguments(name, "'s size is not set");
  std::memcpy(&out, given, std::min(given->size, sizeof(T)));
  out.size = sizeof(T);
  return absl::OkStatus();
}
// The element of a caller's list, whose structs may be longer or shorter than T.
template <typename T>
const T* At(const T* list, size_t at) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(list) + at * list->size);
}
// Fills a caller's struct as far as it goes.
template <typename T>
absl::Status Write(const char* name, T from, T* to) {
  KVANT_RETURN_IF_ERROR(NotNull({{name, to}}));
  if (to->size < sizeof(size_t)) return InvalidArguments(name, "'s size is not set");
  from.size = to->size;
  std::memcpy(to, &from, std::min(to->size, sizeof(T)));
  return absl::OkStatus();
}

}  // namespace kvant::c

#endif  // KVANT_INTEGRATIONS_C_CALL_H_
