#include "kvant/tools/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

struct Close {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};
using File = std::unique_ptr<std::FILE, Close>;

absl::Status SystemError(std::string_view doing, const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat(std::string(doing), " ", path, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const File file(path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
  if (!file) return SystemError("cannot open", path);
  std::string bytes;
  char block[1 << 16];
  while (const size_t n = std::fread(block, 1, sizeof(block), file.get())) bytes.append(block, n);
  if (std::ferror(file.get())) return SystemError("cannot read", path);
  return bytes;
}

absl::Status WriteFile(const std::string& path, std::string_view bytes) {
  File file(std::fopen(path.c_str(), "wb"));
  if (!file) return SystemError("cannot write", path);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file.get()) == bytes.size();
  // Closing flushes, and may be where a full disk is noticed.
  if (std::fclose(file.release()) != 0 || !written) return SystemError("cannot write", path);
  return absl::OkStatus();
}

}  // namespace kvant
