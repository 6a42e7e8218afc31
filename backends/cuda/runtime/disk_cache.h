// DiskCache: compiled kernels in a folder, shared by processes that come and go.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_DISK_CACHE_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_DISK_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvant/backends/cuda/runtime/kernel_source.h"

namespace kvant::cuda {

// What a compiled kernel is found by, its compiler's version aside.
struct CacheKey {
  std::string name, arch;  // for people, in the file's name; the digest covers them too
  std::string digest;      // DigestOf all that the compiler is given
};

// XXH3 of 128 bits, as 32 hexadecimal digits. It tells apart what differs by chance. Nobody is kept
// from making two texts of one digest: whoever may write into the folder may write any kernel.
std::string DigestOf(std::string_view bytes);

// A library file as it was when it compiled: the same path, size and time are the same compiler.
struct CompilerFile {
  std::string path;
  int64_t bytes = 0;
  int64_t modified_ns = 0;

  // Of the file at `path` now; with an empty path where there is none.
  static CompilerFile At(const std::string& path);
  friend bool operator==(const CompilerFile&, const CompilerFile&) = default;
};

struct StoredKernel {
  Cubin cubin;
  CompilerFile compiler;
};

// A file per kernel and compiler version:
//   <name>.<arch>.<digest>.nvrtc-<major>.<minor>.cubin
//   "KVANTJIT", u32 format version, digest, u64 payload bytes, digest of the payload, payload
// Every byte is compared or covered by the checksum, so a file that is truncated, damaged or not
// ours is a miss. Files appear by renaming a finished one: readers never see half of one, and of
// two writers the last wins.
//
// Beyond `most_bytes` what was not used for longest goes when something is stored: a file's time
// of access is that of its last use. A process that has read a kernel keeps it.
class DiskCache {
 public:
  // The folder is made when something is first stored.
  DiskCache(std::string folder, int64_t most_bytes)
      : folder_(std::move(folder)), most_bytes_(most_bytes) {}
  const std::string& folder() const { return folder_; }

  // The compiler versions, major and minor, of which there is a file; newest first.
  std::vector<std::pair<int, int>> Versions(const CacheKey& key) const;
  std::optional<StoredKernel> Load(const CacheKey& key, std::pair<int, int> version) const;
  // Empty, or why not, in a sentence.
  std::string Store(const CacheKey& key, const StoredKernel& kernel) const;

 private:
  // Up to the compiler's version.
  static std::string FilePrefix(const CacheKey& key);
  std::string FilePath(const CacheKey& key, std::pair<int, int> version) const;

  void MakeRoom() const;

  std::string folder_;
  int64_t most_bytes_;
};

// The environment's KVANT_CACHE_DIR, else $XDG_CACHE_HOME/kvant, else $HOME/.cache/kvant; empty
// where none is set.
std::string DefaultCacheFolder();
// The environment's KVANT_CACHE_MIB, else 1 GiB: some ten thousand kernels.
int64_t DefaultCacheBytes();

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_DISK_CACHE_H_
