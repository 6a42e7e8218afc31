// Files that the command reads and writes.
#ifndef KVANT_TOOLS_FILES_H_
#define KVANT_TOOLS_FILES_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvant {

// A file, or standard input for "-", from its start to its end. Errors are NotFound with the path
// and the system's reason.
class InputFile {
 public:
  static absl::StatusOr<InputFile> Open(const std::string& path);

  // The next bytes; fewer only at the end.
  absl::StatusOr<std::string> Read(uint64_t bytes);
  // Nothing where it cannot be known: pipes and devices, which may have no end.
  std::optional<uint64_t> size() const { return size_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
  };
  InputFile(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::optional<uint64_t> size_;
};

// All of a file. InvalidArgument with its size for one of more than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes);

// Calls write(file), a new file beside `path`, and puts it in the place of `path`. On an error,
// that of `write` included, `path` stays as it was. What is no regular file, such as a pipe, is
// written directly.
absl::Status ReplaceFile(const std::string& path,
                         absl::FunctionRef<absl::Status(const std::string& file)> write);
// ReplaceFile by these bytes.
absl::Status WriteFile(const std::string& path, std::string_view bytes);

}  // namespace kvant

#endif  // KVANT_TOOLS_FILES_H_
