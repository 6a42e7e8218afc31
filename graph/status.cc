#include "kvant/graph/status.h"

#include <iterator>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace kvant {
namespace {

constexpr char kPayloadUrl[] = "kvant/error_kind";

constexpr std::string_view kNames[] = {"none",          "invalid_graph",     "invalid_graph_op",
                                       "invalid_shape", "invalid_data_type", "invalid_arguments",
                                       "unimplemented", "invalid_json"};

}  // namespace

std::string_view ErrorKindName(ErrorKind kind) { return kNames[static_cast<size_t>(kind)]; }

absl::Status MakeError(ErrorKind kind, std::string_view message) {
  const auto code = kind == ErrorKind::kUnimplemented ? absl::StatusCode::kUnimplemented
                                                      : absl::StatusCode::kInvalidArgument;
  absl::Status status(code, absl::string_view(message.data(), message.size()));
  const std::string_view name = ErrorKindName(kind);
  status.SetPayload(kPayloadUrl, absl::Cord(absl::string_view(name.data(), name.size())));
  return status;
}

ErrorKind ErrorKindOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload) return ErrorKind::kNone;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (*payload == absl::string_view(kNames[i].data(), kNames[i].size())) {
      return static_cast<ErrorKind>(i);
    }
  }
  return ErrorKind::kNone;
}

}  // namespace kvant
