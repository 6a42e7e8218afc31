// Error kinds that ride along on an absl::Status, so that an integration can
// map an error to its own codes.
#ifndef KVANT_GRAPH_STATUS_H_
#define KVANT_GRAPH_STATUS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvant {

// oneDNN Graph's status codes where it has them.
enum class ErrorKind {
  kNone,              // an OK status, or one that kvant did not make
  kInvalidGraph,      // cycles, two producers, tensors that disagree
  kInvalidGraphOp,    // schema: counts, types, attributes
  kInvalidShape,      // shapes that contradict each other
  kInvalidDataType,   // a type that the op does not take
  kInvalidArguments,  // a bad argument to a call, a bad group_shape or scale shape
  kUnimplemented,     // nothing here can run it
  kInvalidJson,       // malformed text, or not a graph
};

std::string_view ErrorKindName(ErrorKind kind);

// A status that carries `kind`. kUnimplemented maps to absl's kUnimplemented,
// every other kind to kInvalidArgument. The message is made printable.
absl::Status MakeError(ErrorKind kind, std::string_view message);

// A part of a message as absl::StrCat takes it, whose string_view may be another than std's.
inline absl::string_view MessagePart(std::string_view part) { return {part.data(), part.size()}; }
template <typename T>
const T& MessagePart(const T& part) {
  return part;
}

// The same with a message in parts, which are put together as by absl::StrCat.
template <typename... Parts>
absl::Status MakeError(ErrorKind kind, const Parts&... parts) {
  return MakeError(kind, std::string_view(absl::StrCat(MessagePart(parts)...)));
}

template <typename... Parts>
absl::Status InvalidArguments(const Parts&... parts) {
  return MakeError(ErrorKind::kInvalidArguments, parts...);
}

// The payload of a status made by MakeError; kNone otherwise.
ErrorKind ErrorKindOf(const absl::Status& status);

// Text that holds names from outside, as one line for people: control characters and what is not
// UTF-8 are written as \n or \x1b.
std::string Printable(std::string_view text);

// Of the exception that is being handled: kResourceExhausted for std::bad_alloc, else kInternal
// with what it says.
absl::Status StatusOfException();

// f(), an absl::Status or absl::StatusOr, or the status of what it throws. Every call of the API
// that allocates or runs the caller's code goes through it, so that no exception leaves kvant.
template <typename F>
auto WithoutExceptions(const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (...) {
    return StatusOfException();
  }
}

}  // namespace kvant

#define KVANT_RETURN_IF_ERROR(expr)                                                  \
  do {                                                                               \
    if (absl::Status kvant_status = (expr); !kvant_status.ok()) return kvant_status; \
  } while (0)

#define KVANT_CONCAT_INNER(a, b) a##b
#define KVANT_CONCAT(a, b) KVANT_CONCAT_INNER(a, b)
// KVANT_ASSIGN_OR_RETURN(auto x, F()): the value, or returns the error.
#define KVANT_ASSIGN_OR_RETURN(lhs, expr) \
  KVANT_ASSIGN_OR_RETURN_IMPL(KVANT_CONCAT(kvant_or_, __LINE__), lhs, expr)
#define KVANT_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!(tmp).ok()) return (tmp).status();           \
  lhs = *std::move(tmp)

#endif  // KVANT_GRAPH_STATUS_H_
