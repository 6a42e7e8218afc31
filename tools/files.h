// Whole files as strings.
#ifndef KVANT_TOOLS_FILES_H_
#define KVANT_TOOLS_FILES_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvant {

// The bytes of a file, or of standard input for "-". NotFound with the system's
// reason.
absl::StatusOr<std::string> ReadFile(const std::string& path);
absl::Status WriteFile(const std::string& path, std::string_view bytes);

}  // namespace kvant

#endif  // KVANT_TOOLS_FILES_H_
