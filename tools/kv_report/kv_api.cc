#include "kvant/tools/kv_report/kv_api.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/status.h"

struct kvant_kv {
  kvant::Engine engine;
  std::unique_ptr<kvant::KvCache> cache;
  std::shared_ptr<const kvant::KvAttention> last;  // what attended last
  std::string kernel;
  std::vector<float> q, out;  // of one token
};

namespace {

using kvant::Dims;
using kvant::KvCacheOptions;

thread_local std::string last_error;

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  last_error = std::string(status.message());
  return 1;
}

absl::StatusOr<std::unique_ptr<kvant_kv>> Create(const char* scheme, KvCacheOptions options,
                                                 int threads) {
  KVANT_ASSIGN_OR_RETURN(options.schemes[0], kvant::ParseCacheScheme(scheme));
  kvant::EngineOptions engine_options;
  engine_options.threads = threads;
  KVANT_ASSIGN_OR_RETURN(kvant::Engine engine, kvant::Engine::Create(engine_options));
  KVANT_ASSIGN_OR_RETURN(auto cache, kvant::KvCache::Create(engine, std::move(options)));
  return std::make_unique<kvant_kv>(
      kvant_kv{std::move(engine), std::move(cache), nullptr, "", {}, {}});
}

Dims TokensOf(const kvant_kv* kv, int64_t heads, int64_t tokens) {
  const KvCacheOptions& options = kv->cache->options();
  return {options.batch, heads, tokens, options.head_size};
}

absl::StatusOr<std::shared_ptr<const kvant::KvAttention>> AttentionOf(kvant_kv* kv,
                                                                      int64_t query_heads,
                                                                      int64_t tokens) {
  kvant::KvAttentionOptions options;
  options.query_heads = query_heads;
  options.query_tokens = tokens;
  KVANT_ASSIGN_OR_RETURN(kv->last, kv->cache->Attention(options));
  return kv->last;
}

absl::Status Attend(kvant_kv* kv, int64_t layer, const float* q, float* out, int64_t query_heads,
                    int64_t tokens) {
  KVANT_ASSIGN_OR_RETURN(const auto attention, AttentionOf(kv, query_heads, tokens));
  const size_t bytes = *kvant::CheckedProduct(TokensOf(kv, query_heads, tokens)) * sizeof(float);
  return attention->Execute(kvant::Stream(kv->engine), layer, {q, bytes}, {out, bytes});
}

absl::Status TeacherForce(kvant_kv* kv, int64_t layer, const float* q, const float* k,
                          const float* v, float* out, int64_t query_heads, int64_t tokens) {
  const KvCacheOptions& options = kv->cache->options();
  const int64_t size = options.head_size, rows = options.batch * query_heads;
  KVANT_ASSIGN_OR_RETURN(const auto attention, AttentionOf(kv, query_heads, 1));
  const kvant::Stream stream(kv->engine);
  kv->q.resize(rows * size);
  kv->out.resize(rows * size);
  kvant::KvInput key = kvant::MakeKvInput(kvant::kF32, k, TokensOf(kv, options.heads, tokens));
  key.desc.strides = kvant::DenseStrides(*key.desc.dims);
  (*key.desc.dims)[2] = 1;
  kvant::KvInput value = key;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto at = [&](const float* all) {
      return kvant::ConstTensor(all + t * size, kvant::KvInputBytes(key.desc));
    };
    key.data = at(k);
    value.data = at(v);
    KVANT_RETURN_IF_ERROR(kv->cache->Append(layer, key, value));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(q + (row * tokens + t) * size, size, kv->q.data() + row * size);
    }
    const size_t bytes = kv->q.size() * sizeof(float);
    KVANT_RETURN_IF_ERROR(
        attention->Execute(stream, layer, {kv->q.data(), bytes}, {kv->out.data(), bytes}));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(kv->out.data() + row * size, size, out + (row * tokens + t) * size);
    }
  }
  return absl::OkStatus();
}

}  // namespace

const char* kvant_kv_error(void) { return last_error.c_str(); }

kvant_kv* kvant_kv_create(const char* scheme, int64_t layers, int64_t batch, int64_t heads,
                          int64_t head_size, int64_t capacity, int threads) {
  KvCacheOptions options;
  options.layers = layers;
  options.batch = batch;
  options.heads = heads;
  options.head_size = head_size;
  options.capacity = capacity;
  absl::StatusOr<std::unique_ptr<kvant_kv>> made = Create(scheme, std::move(options), threads);
  if (Report(made.status()) != 0) return nullptr;
  return made->release();
}

void kvant_kv_destroy(kvant_kv* kv) { delete kv; }

int kvant_kv_reset(kvant_kv* kv) {
  kv->cache->Reset();
  return 0;
}

int kvant_kv_append(kvant_kv* kv, int64_t layer, const float* k, const float* v, int64_t tokens) {
  const Dims dims = TokensOf(kv, kv->cache->options().heads, tokens);
  return Report(kv->cache->Append(layer, kvant::MakeKvInput(kvant::kF32, k, dims),
                                  kvant::MakeKvInput(kvant::kF32, v, dims)));
}

int kvant_kv_attend(kvant_kv* kv, int64_t layer, const float* q, float* out, int64_t query_heads,
                    int64_t tokens) {
  return Report(Attend(kv, layer, q, out, query_heads, tokens));
}

int kvant_kv_teacher_force(kvant_kv* kv, int64_t layer, const float* q, const float* k,
                           const float* v, float* out, int64_t query_heads, int64_t tokens) {
  return Report(TeacherForce(kv, layer, q, k, v, out, query_heads, tokens));
}

int64_t kvant_kv_bytes(const kvant_kv* kv) { return kv->cache->bytes().total(); }

int64_t kvant_kv_used_bytes(const kvant_kv* kv) { return kv->cache->used_bytes(); }

double kvant_kv_bits_per_element(const kvant_kv* kv) {
  const KvCacheOptions& options = kv->cache->options();
  const kvant::CacheScheme& scheme = options.schemes[0];
  return (scheme.k.BitsPerElement(options.heads, options.head_size) +
          scheme.v.BitsPerElement(options.heads, options.head_size)) /
         2;
}

const char* kvant_kv_kernel(kvant_kv* kv) {
  kv->kernel = kv->last == nullptr ? "" : kv->last->compiled(0)->kernel();
  return kv->kernel.c_str();
}

const void* kvant_kv_part(const kvant_kv* kv, int64_t layer, int values, int part, int64_t* bytes,
                          int64_t* dims) {
  const auto which = static_cast<kvant::KvPart>(part);
  const kvant::ConstTensor memory = kv->cache->part(layer, values != 0, which);
  if (bytes != nullptr) *bytes = static_cast<int64_t>(memory.bytes);
  const auto tensor = kv->cache->tensor(layer, values != 0);
  if (dims != nullptr && tensor.ok() && (*tensor)->has(which)) {
    const Dims& of = *(*tensor)->part(which).dims;
    std::copy(of.begin(), of.end(), dims);
  }
  return memory.data;
}

const char* kvant_kv_part_type(const kvant_kv* kv, int64_t layer, int values, int part) {
  const auto tensor = kv->cache->tensor(layer, values != 0);
  const auto which = static_cast<kvant::KvPart>(part);
  if (!tensor.ok() || !(*tensor)->has(which)) return "";
  return kvant::DataTypeName((*tensor)->part(which).type).data();
}
