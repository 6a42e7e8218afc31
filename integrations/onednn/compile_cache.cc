#include "kvant/integrations/onednn/compile_cache.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvant/integrations/onednn/guard.h"

namespace kvant::dnnl_abi {
namespace {

struct Cache {
  using Entry = std::pair<std::string, std::shared_ptr<const Compiled>>;
  std::mutex mutex;
  std::list<Entry> entries;  // the last used first
  absl::flat_hash_map<std::string, std::list<Entry>::iterator> places;
};

// Never destroyed: clients' static objects may compile after main.
Cache& TheCache() {
  static auto* const cache = new Cache();
  return *cache;
}

// oneDNN's, below 0 until it was asked. It is asked once: after main its cache may be gone.
std::atomic<int> capacity = -1;

size_t Capacity() {
  if (capacity < 0) {
    int asked = 0;
    next::get_compiled_partition_cache_capacity(&asked);
    capacity = std::max(asked, 0);
  }
  return static_cast<size_t>(capacity);
}

template <typename T>
void Append(std::string* key, const T& value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendDescs(std::string* key, absl::Span<const TensorDesc* const> descs) {
  Append(key, descs.size());
  for (const TensorDesc* desc : descs) {
    Append(key, desc->id);
    Append(key, desc->data_type);
    Append(key, desc->layout_type);
    Append(key, desc->property);
    Append(key, desc->ndims);
    // What is beyond is not set.
    for (int d = 0; d < std::clamp(desc->ndims, 0, kMostDims); ++d) {
      Append(key, desc->dims[d]);
      Append(key, desc->layout.strides[d]);
    }
  }
}

}  // namespace

std::string CompileKey(const Piece& piece, const Engine& threads,
                       absl::Span<const TensorDesc* const> inputs,
                       absl::Span<const TensorDesc* const> outputs, dnnl_engine* engine) {
  std::string key = piece.content;  // not the id: a graph may be built anew
  Append(&key, threads.identity().get());
  Append(&key, engine);
  AppendDescs(&key, inputs);
  AppendDescs(&key, outputs);
  return key;
}

std::shared_ptr<const Compiled> FindCompiled(const std::string& key) {
  Cache& cache = TheCache();
  if (Capacity() == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(cache.mutex);
  const auto found = cache.places.find(key);
  if (found == cache.places.end()) return nullptr;
  cache.entries.splice(cache.entries.begin(), cache.entries, found->second);
  return found->second->second;
}

void KeepCompiled(const std::string& key, const std::shared_ptr<const Compiled>& compiled) {
  Cache& cache = TheCache();
  const size_t most = Capacity();
  std::list<Cache::Entry> gone;  // destroyed without the lock
  const std::lock_guard<std::mutex> lock(cache.mutex);
  if (most > 0 && !cache.places.contains(key)) {
    cache.entries.emplace_front(key, compiled);
    cache.places.emplace(key, cache.entries.begin());
  }
  while (cache.entries.size() > most) {
    cache.places.erase(cache.entries.back().first);
    gone.splice(gone.begin(), cache.entries, std::prev(cache.entries.end()));
  }
}

KVANT_DNNL_EXPORT Status dnnl_graph_set_compiled_partition_cache_capacity(int most) {
  const Status status = next::set_compiled_partition_cache_capacity(most);
  if (status == kSuccess) capacity = most;
  return status;
}

}  // namespace kvant::dnnl_abi
