#include "kvant/backends/cuda/runtime/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

// Compiled in: nothing else has to be linked, neither here nor where kvant is installed.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

constexpr std::string_view kMagic = "KVANTJIT";
constexpr uint32_t kFormatVersion = 2;
constexpr size_t kDigestBytes = 2 * sizeof(XXH128_canonical_t);
constexpr std::string_view kVersionMark = ".nvrtc-";
constexpr std::string_view kSuffix = ".cubin";
// More than any kernel; keeps a file that is not ours from being read whole.
constexpr off_t kMaxFileBytes = off_t{64} << 20;

// Integers are little-endian, text and bytes follow their length.
class Writer {
 public:
  template <class T>
  void Integer(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void Raw(std::string_view bytes) { bytes_.append(bytes); }
  void Text(std::string_view text) {
    Integer<uint64_t>(text.size());
    Raw(text);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// The same backwards; what is not there reads as zeros and leaves ok() false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  template <class T>
  void Integer(T& to) {
    const std::string_view raw = Raw(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < raw.size(); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(raw[i])) << (8 * i);
    }
    to = static_cast<T>(value);
  }
  std::string_view Raw(size_t bytes) {
    if (bytes > left_.size()) {
      ok_ = false;
      left_ = {};
      return {};
    }
    const std::string_view raw = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return raw;
  }
  void Text(std::string& to) {
    uint64_t bytes = 0;
    Integer(bytes);
    to = std::string(Raw(bytes));
  }
  std::string_view left() const { return left_; }
  bool ok() const { return ok_; }

 private:
  std::string_view left_;
  bool ok_ = true;
};

// Writes all of a kernel, or reads it.
template <class File>
void Exchange(File& file, StoredKernel& kernel) {
  Cubin& cubin = kernel.cubin;
  KernelStats stats = cubin.stats.value_or(KernelStats());
  uint8_t has_stats = cubin.stats.has_value();
  file.Integer(cubin.nvrtc_major);
  file.Integer(cubin.nvrtc_minor);
  file.Integer(has_stats);
  file.Integer(stats.registers);
  file.Integer(stats.spill_store_bytes);
  file.Integer(stats.spill_load_bytes);
  file.Integer(stats.stack_bytes);
  file.Integer(stats.static_shared_bytes);
  file.Text(kernel.compiler.path);
  file.Integer(kernel.compiler.bytes);
  file.Integer(kernel.compiler.modified_ns);
  file.Text(cubin.arch);
  file.Text(cubin.bytes);
  if (has_stats != 0) cubin.stats = stats;
}

std::string FileContents(const CacheKey& key, StoredKernel kernel) {
  Writer of_payload, out;
  Exchange(of_payload, kernel);
  const std::string& payload = of_payload.bytes();
  out.Raw(kMagic);
  out.Integer(kFormatVersion);
  out.Raw(key.digest);
  out.Integer<uint64_t>(payload.size());
  out.Raw(DigestOf(payload));
  out.Raw(payload);
  return out.bytes();
}

std::optional<StoredKernel> ParseFile(const CacheKey& key, std::string_view contents) {
  Reader in(contents);
  const bool is_ours = in.Raw(kMagic.size()) == kMagic;
  uint32_t version = 0;
  in.Integer(version);
  if (!is_ours || version != kFormatVersion || in.Raw(kDigestBytes) != key.digest) {
    return std::nullopt;
  }
  uint64_t payload_bytes = 0;
  in.Integer(payload_bytes);
  const std::string_view checksum = in.Raw(kDigestBytes);
  if (!in.ok() || in.left().size() != payload_bytes) return std::nullopt;
  if (DigestOf(in.left()) != checksum) return std::nullopt;
  StoredKernel kernel;
  Exchange(in, kernel);
  if (!in.ok() || !in.left().empty()) return std::nullopt;
  return kernel;
}

// Closed at the end of its scope.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() { Close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }
  // False where bytes written before were lost after all.
  bool Close() {
    const int descriptor = std::exchange(descriptor_, -1);
    return descriptor < 0 || close(descriptor) == 0;
  }

 private:
  int descriptor_;
};

std::optional<std::string> ReadFile(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (file.get() < 0 || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_size > kMaxFileBytes) {
    return std::nullopt;
  }
  std::string contents(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t count = read(file.get(), contents.data() + done, contents.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    done += static_cast<size_t>(count);
  }
  return contents;
}

bool WriteAll(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

std::string WithoutOddCharacters(std::string_view text, size_t limit) {
  std::string plain(text.substr(0, limit));
  for (char& c : plain) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '-') c = '_';
  }
  return plain;
}

// "13.0" and nothing else.
std::optional<std::pair<int, int>> ParseVersion(std::string_view text) {
  std::pair<int, int> version;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, version.first);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') return std::nullopt;
  const auto minor = std::from_chars(major.ptr + 1, end, version.second);
  if (minor.ec != std::errc() || minor.ptr != end) return std::nullopt;
  return version;
}

}  // namespace

std::string DigestOf(std::string_view bytes) {
  XXH128_canonical_t digest;
  XXH128_canonicalFromHash(&digest, XXH3_128bits(bytes.data(), bytes.size()));
  return absl::BytesToHexString(
      {reinterpret_cast<const char*>(digest.digest), sizeof(digest.digest)});
}

CompilerFile CompilerFile::At(const std::string& path) {
  struct stat info;
  if (path.empty() || stat(path.c_str(), &info) != 0) return {};
  return {path, info.st_size, info.st_mtim.tv_sec * int64_t{1000000000} + info.st_mtim.tv_nsec};
}

std::string DiskCache::FilePrefix(const CacheKey& key) {
  return absl::StrCat(WithoutOddCharacters(key.name, 96), ".", WithoutOddCharacters(key.arch, 16),
                      ".", key.digest, std::string(kVersionMark));
}

std::string DiskCache::FilePath(const CacheKey& key, std::pair<int, int> version) const {
  return absl::StrCat(folder_, "/", FilePrefix(key), version.first, ".", version.second,
                      std::string(kSuffix));
}

std::vector<std::pair<int, int>> DiskCache::Versions(const CacheKey& key) const {
  const std::string prefix = FilePrefix(key);
  std::vector<std::pair<int, int>> versions;
  std::error_code error;
  std::filesystem::directory_iterator file(folder_, error);
  for (; !error && file != std::filesystem::directory_iterator(); file.increment(error)) {
    const std::string name = file->path().filename().string();
    std::string_view rest = name;
    if (!rest.starts_with(prefix) || !rest.ends_with(kSuffix)) continue;
    rest = rest.substr(prefix.size(), rest.size() - prefix.size() - kSuffix.size());
    if (const auto version = ParseVersion(rest)) versions.push_back(*version);
  }
  std::sort(versions.rbegin(), versions.rend());
  return versions;
}

std::optional<StoredKernel> DiskCache::Load(const CacheKey& key,
                                            std::pair<int, int> version) const {
  const std::optional<std::string> contents = ReadFile(FilePath(key, version));
  if (!contents) return std::nullopt;
  std::optional<StoredKernel> kernel = ParseFile(key, *contents);
  if (!kernel || std::pair(kernel->cubin.nvrtc_major, kernel->cubin.nvrtc_minor) != version) {
    return std::nullopt;
  }
  // Mounts that keep no time of access by themselves keep this one.
  const timespec now_and_as_it_was[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
  utimensat(AT_FDCWD, FilePath(key, version).c_str(), now_and_as_it_was, 0);
  return kernel;
}

void DiskCache::MakeRoom() const {
  struct Used {
    std::pair<int64_t, int64_t> when;  // seconds and nanoseconds
    int64_t bytes;
    std::string path;
  };
  std::vector<Used> files;
  int64_t total = 0;
  std::error_code error;
  std::filesystem::directory_iterator file(folder_, error);
  for (; !error && file != std::filesystem::directory_iterator(); file.increment(error)) {
    const std::string name = file->path().filename().string();
    if (name.find(kVersionMark) == std::string::npos || !name.ends_with(kSuffix)) continue;
    struct stat info;
    if (stat(file->path().c_str(), &info) != 0) continue;  // another process took it away
    total += info.st_size;
    files.push_back(
        {{info.st_atim.tv_sec, info.st_atim.tv_nsec}, info.st_size, file->path().string()});
  }
  if (total <= most_bytes_) return;
  std::sort(files.begin(), files.end(),
            [](const Used& a, const Used& b) { return a.when < b.when; });
  for (const Used& used : files) {
    if (total <= most_bytes_) return;
    if (unlink(used.path.c_str()) == 0) total -= used.bytes;
  }
}

std::string DiskCache::Store(const CacheKey& key, const StoredKernel& kernel) const {
  const auto reason = [&](std::string_view what, int error) {
    return absl::StrCat("compiled kernels are not kept in ", folder_, ": cannot ",
                        std::string(what), ": ", std::generic_category().message(error));
  };
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return reason("make the folder", error.value());

  std::string temporary = folder_ + "/.new-XXXXXX";
  File file(mkostemp(temporary.data(), O_CLOEXEC));
  if (file.get() < 0) return reason("make a file", errno);
  // mkostemp keeps others out; a folder filled ahead of time is for every user of the machine.
  const bool written = fchmod(file.get(), 0644) == 0 &&
                       WriteAll(file.get(), FileContents(key, kernel)) && file.Close();
  const std::string path = FilePath(key, {kernel.cubin.nvrtc_major, kernel.cubin.nvrtc_minor});
  if (written && rename(temporary.c_str(), path.c_str()) == 0) {
    MakeRoom();
    return "";
  }
  const int failed = errno;
  unlink(temporary.c_str());
  return reason(written ? "rename a file" : "write a file", failed);
}

int64_t DefaultCacheBytes() {
  constexpr int64_t kDefaultBytes = int64_t{1} << 30;
  int64_t mib = 0;
  const char* const text = std::getenv("KVANT_CACHE_MIB");
  if (text == nullptr || *text == '\0') return kDefaultBytes;
  if (absl::SimpleAtoi(text, &mib) && mib > 0 && mib < 1 << 30) return mib << 20;
  std::fprintf(stderr, "kvant: KVANT_CACHE_MIB: '%.64s' is no number from 1 to %d: 1024 holds\n",
               text, (1 << 30) - 1);
  return kDefaultBytes;
}

std::string DefaultCacheFolder() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  if (std::string folder = variable("KVANT_CACHE_DIR"); !folder.empty()) return folder;
  // The XDG specification has relative paths ignored.
  if (const std::string cache = variable("XDG_CACHE_HOME"); cache.starts_with('/')) {
    return cache + "/kvant";
  }
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/kvant";
  return "";
}

}  // namespace kvant::cuda
