#include "kvant/tools/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace kvant {
namespace {

absl::Status SystemError(std::string_view doing, const std::string& path) {
  return absl::NotFoundError(
      absl::StrCat(std::string(doing), " ", path, ": ", std::strerror(errno)));
}

// Errors name `path`, for which the file stands.
absl::Status WriteOver(const std::string& name, std::string_view bytes, const std::string& path) {
  std::FILE* const file = std::fopen(name.c_str(), "wb");
  if (file == nullptr) return SystemError("cannot write", path);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  const int failed = errno;
  // Closing flushes, and may be where a full disk is noticed.
  const bool closed = std::fclose(file) == 0;
  if (written && closed) return absl::OkStatus();
  if (!written) errno = failed;
  return SystemError("cannot write", path);
}

// Makes an empty file in the folder of `path` that nobody else has; its name, or nothing.
std::optional<std::string> MakeFileBeside(const std::string& path, mode_t mode) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  // What an earlier process of this number left behind may be in the way.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::string name = absl::StrCat(folder, ".kvant-", getpid(), "-", attempt);
    const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0) {
      close(file);
      return name;
    }
    if (errno != EEXIST) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  InputFile file(path, path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
  struct stat info;
  if (file.file_ == nullptr || fstat(fileno(file.file_.get()), &info) != 0) {
    return SystemError("cannot open", path);
  }
  // Those of /proc say 0 and hold something.
  if (S_ISREG(info.st_mode) && info.st_size > 0) file.size_ = static_cast<uint64_t>(info.st_size);
  return file;
}

absl::StatusOr<std::string> InputFile::Read(uint64_t bytes) {
  std::string text;
  // Memory is taken as bytes come, not as they are asked for.
  char block[1 << 16];
  while (text.size() < bytes) {
    const size_t most = std::min<uint64_t>(sizeof(block), bytes - text.size());
    const size_t count = std::fread(block, 1, most, file_.get());
    if (count == 0) break;
    text.append(block, count);
  }
  if (std::ferror(file_.get())) return SystemError("cannot read", path_);
  return text;
}

absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t max_bytes) {
  absl::StatusOr<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  const auto too_long = [&](const std::string& has) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", has, " bytes; at most ", max_bytes, " are read"));
  };
  if (file->size().value_or(0) > max_bytes) return too_long(absl::StrCat(*file->size()));
  absl::StatusOr<std::string> text = file->Read(max_bytes + 1);
  if (text.ok() && text->size() > max_bytes) return too_long(absl::StrCat("more than ", max_bytes));
  return text;
}

absl::Status ReplaceFile(const std::string& path,
                         absl::FunctionRef<absl::Status(const std::string&)> write) {
  if (path.empty()) return absl::NotFoundError("cannot write to a file without a name");
  struct stat info;
  const bool exists = stat(path.c_str(), &info) == 0;
  if (!exists && errno != ENOENT) return SystemError("cannot write", path);
  if (exists && !S_ISREG(info.st_mode)) return write(path);
  // A link stays one: what it leads to is made or replaced.
  if (!exists && lstat(path.c_str(), &info) == 0) return write(path);
  std::string target = path;
  if (char* const real = realpath(path.c_str(), nullptr); real != nullptr) {
    target = real;
    std::free(real);
  }
  const std::optional<std::string> fresh = MakeFileBeside(target, 0666);
  if (!fresh) return SystemError("cannot make a file beside", path);
  absl::Cleanup remove = [&] { unlink(fresh->c_str()); };
  if (exists && chmod(fresh->c_str(), info.st_mode & 07777) != 0) {
    return SystemError("cannot make a file beside", path);
  }
  if (absl::Status written = write(*fresh); !written.ok()) return written;
  if (std::rename(fresh->c_str(), target.c_str()) != 0) return SystemError("cannot replace", path);
  std::move(remove).Cancel();
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, std::string_view bytes) {
  return ReplaceFile(path, [&](const std::string& file) { return WriteOver(file, bytes, path); });
}

}  // namespace kvant
