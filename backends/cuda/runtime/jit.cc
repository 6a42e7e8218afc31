#include "kvant/backends/cuda/runtime/jit.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvant/backends/cuda/runtime/disk_cache.h"
#include "kvant/backends/cuda/runtime/embedded_sources.h"
#include "kvant/backends/cuda/runtime/nvrtc.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

using Kernel = std::shared_ptr<const Cubin>;

// Each part with its length, so that no two lists of parts are the same bytes.
void Add(std::string& all, std::string_view part) {
  all.append(std::to_string(part.size())).append(":").append(part);
}

// Of what all kernels have in common.
const std::string& CommonDigest() {
  static const std::string kDigest = [] {
    std::string all;
    for (const NvrtcOption& option : NvrtcOptions()) Add(all, option.text);
    Add(all, "headers");
    for (const EmbeddedSource& header : EmbeddedSources()) {
      Add(all, header.name);
      Add(all, header.text);
    }
    return DigestOf(all);
  }();
  return kDigest;
}

CacheKey KeyOf(const KernelSource& source, std::string_view arch) {
  std::string all;
  Add(all, CommonDigest());
  Add(all, source.name);
  Add(all, source.text);
  Add(all, source.entry);
  Add(all, arch);
  return {source.name, std::string(arch), DigestOf(all)};
}

// A kernel that is there, or being made.
struct Slot {
  bool done = false;
  absl::StatusOr<Kernel> kernel;  // once done
};

}  // namespace

struct Jit::State {
  JitOptions options;
  std::optional<DiskCache> cache;
  std::atomic<int64_t> compiled = 0, from_disk = 0, from_memory = 0;

  std::mutex mutex;  // of the slots, what is in them, and the note
  std::condition_variable slot_done;
  absl::flat_hash_map<std::string, std::shared_ptr<Slot>> slots;
  std::string note;

  std::mutex nvrtc_mutex;  // apart, since opening takes long
  std::optional<absl::StatusOr<std::shared_ptr<const Nvrtc>>> nvrtc;

  // Opened by the first that needs it.
  absl::StatusOr<std::shared_ptr<const Nvrtc>> OpenNvrtc() {
    const std::lock_guard<std::mutex> lock(nvrtc_mutex);
    if (!nvrtc) nvrtc = Nvrtc::Open(options.driver_version);
    return *nvrtc;
  }

  Kernel FromDisk(const CacheKey& key);
  absl::StatusOr<Kernel> Make(const KernelSource& source, const CacheKey& key);
};

Kernel Jit::State::FromDisk(const CacheKey& key) {
  std::vector<StoredKernel> stored;  // newest first
  for (const auto& version : cache->Versions(key)) {
    if (options.driver_version != 0 && version.first > options.driver_version / 1000) continue;
    std::optional<StoredKernel> kernel = cache->Load(key, version);
    if (!kernel) continue;
    const CompilerFile& compiler = kernel->compiler;
    if (!compiler.path.empty() && compiler == CompilerFile::At(compiler.path)) {
      return std::make_shared<const Cubin>(std::move(kernel->cubin));
    }
    stored.push_back(*std::move(kernel));
  }
  if (stored.empty()) return nullptr;
  const auto opened = OpenNvrtc();
  for (StoredKernel& kernel : stored) {
    const Cubin& cubin = kernel.cubin;
    if (!opened.ok() ||
        (cubin.nvrtc_major == (*opened)->major() && cubin.nvrtc_minor == (*opened)->minor())) {
      return std::make_shared<const Cubin>(std::move(kernel.cubin));
    }
  }
  return nullptr;
}

absl::StatusOr<Kernel> Jit::State::Make(const KernelSource& source, const CacheKey& key) {
  if (cache) {
    if (Kernel kernel = FromDisk(key)) {
      ++from_disk;
      return kernel;
    }
  }
  KVANT_ASSIGN_OR_RETURN(const std::shared_ptr<const Nvrtc> compiler, OpenNvrtc());
  KVANT_ASSIGN_OR_RETURN(Cubin cubin, compiler->Compile(source, key.arch));
  ++compiled;
  if (cache) {
    StoredKernel kernel{std::move(cubin), CompilerFile::At(compiler->path())};
    std::string reason = cache->Store(key, kernel);
    cubin = std::move(kernel.cubin);
    const std::lock_guard<std::mutex> lock(mutex);
    if (!reason.empty()) note = std::move(reason);
  }
  return std::make_shared<const Cubin>(std::move(cubin));
}

Jit::Jit(const JitOptions& options) : state_(std::make_unique<State>()) {
  state_->options = options;
  if (!options.disk_cache) return;
  const std::string folder = options.cache_dir.empty() ? DefaultCacheFolder() : options.cache_dir;
  if (!folder.empty()) {
    state_->cache.emplace(folder, DefaultCacheBytes());
    return;
  }
  state_->note =
      "compiled kernels are not kept: none of KVANT_CACHE_DIR, XDG_CACHE_HOME and HOME is set";
}

Jit::~Jit() = default;

absl::StatusOr<Kernel> Jit::Get(const KernelSource& source, std::string_view arch) {
  const CacheKey key = KeyOf(source, arch);
  std::unique_lock<std::mutex> lock(state_->mutex);
  std::shared_ptr<Slot>& found = state_->slots[key.digest];
  if (found != nullptr) {
    const std::shared_ptr<Slot> slot = found;
    state_->slot_done.wait(lock, [&] { return slot->done; });
    if (slot->kernel.ok()) ++state_->from_memory;
    return slot->kernel;
  }
  const auto slot = std::make_shared<Slot>();
  found = slot;
  lock.unlock();
  // Whatever happens, others wait for it.
  absl::StatusOr<Kernel> kernel = WithoutExceptions([&] { return state_->Make(source, key); });
  lock.lock();
  slot->kernel = kernel;
  slot->done = true;
  // Whoever waits gets the error, whoever comes later tries again.
  if (!kernel.ok()) state_->slots.erase(key.digest);
  state_->slot_done.notify_all();
  return kernel;
}

std::string Jit::cache_note() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->note;
}

std::string Jit::cache_dir() const { return state_->cache ? state_->cache->folder() : ""; }

JitCounts Jit::counts() const { return {state_->compiled, state_->from_disk, state_->from_memory}; }

}  // namespace kvant::cuda
