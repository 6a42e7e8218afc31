#include "kvant/integrations/c/call.h"

#include <optional>

namespace kvant::c {
namespace {

thread_local std::string last_error, last_text;

kvant_status StatusOf(const absl::Status& status) {
  if (const ErrorKind kind = ErrorKindOf(status); kind != ErrorKind::kNone) {
    return static_cast<kvant_status>(kind);
  }
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return KVANT_OK;
    case absl::StatusCode::kInvalidArgument:
      return KVANT_INVALID_ARGUMENTS;
    case absl::StatusCode::kUnimplemented:
      return KVANT_UNIMPLEMENTED;
    case absl::StatusCode::kResourceExhausted:
      return KVANT_OUT_OF_MEMORY;
    default:
      return KVANT_INTERNAL;
  }
}

// By which kinds are converted.
static_assert(static_cast<int>(ErrorKind::kInvalidGraph) == KVANT_INVALID_GRAPH);
static_assert(static_cast<int>(ErrorKind::kInvalidGraphOp) == KVANT_INVALID_GRAPH_OP);
static_assert(static_cast<int>(ErrorKind::kInvalidShape) == KVANT_INVALID_SHAPE);
static_assert(static_cast<int>(ErrorKind::kInvalidDataType) == KVANT_INVALID_DATA_TYPE);
static_assert(static_cast<int>(ErrorKind::kInvalidArguments) == KVANT_INVALID_ARGUMENTS);
static_assert(static_cast<int>(ErrorKind::kUnimplemented) == KVANT_UNIMPLEMENTED);
static_assert(static_cast<int>(ErrorKind::kInvalidJson) == KVANT_INVALID_JSON);

}  // namespace

kvant_status Report(const absl::Status& status) {
  if (status.ok()) return KVANT_OK;
  try {
    last_error = std::string(status.message());
  } catch (...) {
    last_error.clear();  // there is no memory for the sentence
  }
  return StatusOf(status);
}

const char* Keep(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

absl::Status NotNull(std::initializer_list<std::pair<const char*, const void*>> pointers) {
  for (const auto& [name, pointer] : pointers) {
    if (pointer == nullptr) return InvalidArguments(name, " is null");
  }
  return absl::OkStatus();
}

absl::StatusOr<FpMath> FpMathOf(const char* name) {
  if (name == nullptr) return FpMath::kStrict;
  const std::optional<FpMath> mode = FpMathFromName(name);
  if (!mode) return InvalidArguments("there is no fpmath mode '", name, "'");
  return *mode;
}

extern "C" {

int32_t kvant_abi_version(void) { return KVANT_ABI_VERSION; }

const char* kvant_version(void) { return KVANT_VERSION; }

const char* kvant_error(void) { return last_error.c_str(); }

const char* kvant_status_name(kvant_status status) {
  static constexpr const char* kNames[] = {"ok",
                                           "invalid_graph",
                                           "invalid_graph_op",
                                           "invalid_shape",
                                           "invalid_data_type",
                                           "invalid_arguments",
                                           "unimplemented",
                                           "invalid_json",
                                           "out_of_memory",
                                           "internal"};
  const auto at = static_cast<size_t>(status);
  return at < std::size(kNames) ? kNames[at] : "unknown";
}

}  // extern "C"
}  // namespace kvant::c
