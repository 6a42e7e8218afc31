// KV caches.
#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/integrations/c/call.h"
#include "kvant/integrations/c/handles.h"

namespace kvant::c {
namespace {

absl::StatusOr<KvCacheOptions> OptionsOf(const kvant_cache_options* options) {
  KVANT_RETURN_IF_ERROR(NotNull({{"options", options}}));
  kvant_cache_options given;
  KVANT_RETURN_IF_ERROR(Read("kvant_cache_options", options, given));
  const auto or_one = [](int64_t count) { return count == 0 ? 1 : count; };
  KvCacheOptions result;
  result.layers = or_one(given.layers);
  result.batch = or_one(given.batch);
  result.heads = or_one(given.heads);
  result.head_size = given.head_size;
  result.v_head_size = given.v_head_size;
  result.capacity = given.capacity;
  result.rollback = given.rollback;
  result.allow_non_finite = given.allow_non_finite;
  KVANT_ASSIGN_OR_RETURN(result.fpmath, FpMathOf(given.fpmath));
  if (given.layer_schemes != nullptr) {
    result.schemes.clear();
    for (int64_t i = 0; i < result.layers; ++i) {
      const std::string what = absl::StrCat("the scheme of layer ", i);
      KVANT_RETURN_IF_ERROR(NotNull({{what.c_str(), given.layer_schemes[i]}}));
      KVANT_ASSIGN_OR_RETURN(result.schemes.emplace_back(),
                             ParseCacheScheme(given.layer_schemes[i]));
    }
  } else if (given.scheme != nullptr) {
    KVANT_ASSIGN_OR_RETURN(result.schemes[0], ParseCacheScheme(given.scheme));
  }
  if (given.keep != nullptr) result.keep.assign(given.keep, given.keep + result.layers);
  for (const auto& [from, to] :
       {std::pair(given.k_scales, &result.k_scales), std::pair(given.v_scales, &result.v_scales)}) {
    for (int64_t i = 0; from != nullptr && i < result.layers; ++i) {
      if (from[i].count > 0) KVANT_RETURN_IF_ERROR(NotNull({{"scales", from[i].values}}));
      to->emplace_back(from[i].values, from[i].values + from[i].count);
    }
  }
  return result;
}

kvant_cache_bytes Convert(const KvCacheBytes& bytes) {
  kvant_cache_bytes result = {};
  result.codes = bytes.codes;
  result.parameters = bytes.parameters;
  result.window = bytes.window;
  result.bookkeeping = bytes.bookkeeping;
  result.total = bytes.total();
  return result;
}

// `what`: "k" or "v". What the cache says of types and shapes needs no repetition here.
absl::StatusOr<KvInput> InputOf(const char* what, const DLTensor& tensor, const DLDevice& device) {
  const auto error = [&](auto... words) {
    return InvalidArguments(what, " is ", Describe(tensor), words...);
  };
  if (tensor.ndim != 4 || tensor.shape == nullptr) {
    return InvalidArguments(what, " has ", tensor.ndim, " dims",
                            tensor.shape == nullptr ? " and no shape" : "",
                            ", but must be [batch, heads, tokens, head size]");
  }
  if (!Reaches(device, tensor.device)) {
    return error(" on ", DeviceText(tensor.device), ", and the cache is on ", DeviceText(device));
  }
  const std::optional<DataType> type = TypeOf(tensor.dtype);
  if (!type || !IsComputeFloat(*type)) return error(", but must be f32, f16 or bf16");
  KvInput input = MakeKvInput(*type, nullptr, Dims(tensor.shape, tensor.shape + 4));
  if (tensor.strides != nullptr) input.desc.strides = Dims(tensor.strides, tensor.strides + 4);
  if (tensor.data == nullptr) return input;
  input.data = ConstTensor(DataOf(tensor), static_cast<size_t>(KvInputBytes(input.desc)));
  return input;
}

absl::Status CheckRow(const kvant_cache& cache, int64_t layer, int64_t row) {
  const KvCacheOptions& options = cache.cache->options();
  if (layer < 0 || layer >= options.layers) {
    return InvalidArguments("there is no layer ", layer, ": the cache has ", options.layers);
  }
  if (row < 0 || row >= options.batch) {
    return InvalidArguments("there is no batch row ", row, ": the cache has ", options.batch);
  }
  return absl::OkStatus();
}

// KVANT_ALL_LAYERS: none of its own.
std::optional<int64_t> OneLayer(int64_t layer) {
  return layer == KVANT_ALL_LAYERS ? std::nullopt : std::optional(layer);
}

Port PortOf(const char* name, const kvant_cache& cache, DataType type, Dims dims) {
  LogicalTensor tensor;
  tensor.type = type;
  tensor.dims = std::move(dims);
  return Port(name, tensor, cache.device, /*of_graph=*/false);
}

// Memory of u8 in one dim.
absl::StatusOr<Tensor> BytesOf(const char* name, const kvant_cache& cache, const DLTensor& tensor) {
  if (tensor.ndim != 1) {
    return InvalidArguments(name, " has ", tensor.ndim, " dims, but bytes have one");
  }
  const int64_t bytes = tensor.shape != nullptr ? tensor.shape[0] : 0;
  return PortOf(name, cache, kU8, {bytes}).Take(&tensor);
}

absl::Span<const int64_t> LengthsOf(const kvant_cache& cache, const int64_t* lengths) {
  return absl::MakeConstSpan(lengths, static_cast<size_t>(cache.cache->options().batch));
}

static_assert(static_cast<int>(KvPart::kSinks) == KVANT_PART_SINKS);
static_assert(static_cast<int>(KvPart::kCodes) == KVANT_PART_CODES);
static_assert(static_cast<int>(KvPart::kScales) == KVANT_PART_SCALES);
static_assert(static_cast<int>(KvPart::kZeroPoints) == KVANT_PART_ZERO_POINTS);
static_assert(static_cast<int>(KvPart::kWindow) == KVANT_PART_WINDOW);

}  // namespace

extern "C" {

kvant_status kvant_cache_create(const kvant_engine* engine, const kvant_cache_options* options,
                                kvant_cache** cache) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"engine", engine}, {"cache", cache}}));
    KVANT_ASSIGN_OR_RETURN(KvCacheOptions given, OptionsOf(options));
    KVANT_ASSIGN_OR_RETURN(std::shared_ptr<KvCache> made,
                           KvCache::Create(engine->engine, std::move(given)));
    *cache = new kvant_cache{std::move(made), engine->device};
    return absl::OkStatus();
  });
}

void kvant_cache_destroy(kvant_cache* cache) { delete cache; }

kvant_status kvant_cache_bytes_for(const kvant_cache_options* options, kvant_cache_bytes* bytes) {
  return Call([&]() -> absl::Status {
    KVANT_ASSIGN_OR_RETURN(const KvCacheOptions given, OptionsOf(options));
    KVANT_ASSIGN_OR_RETURN(const KvCacheBytes wanted, KvCache::BytesFor(given));
    return Write("bytes", Convert(wanted), bytes);
  });
}

kvant_status kvant_cache_memory(const kvant_cache* cache, kvant_cache_bytes* bytes) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}}));
    return Write("bytes", Convert(cache->cache->bytes()), bytes);
  });
}

int64_t kvant_cache_used_bytes(const kvant_cache* cache) {
  return CallFor<int64_t>(0, [&] { return cache == nullptr ? 0 : cache->cache->used_bytes(); });
}

int64_t kvant_cache_scratch_bytes(const kvant_cache* cache) {
  return CallFor<int64_t>(0, [&] { return cache == nullptr ? 0 : cache->cache->scratch_bytes(); });
}

kvant_status kvant_cache_scheme(const kvant_cache* cache, int64_t layer, const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"text", text}}));
    KVANT_ASSIGN_OR_RETURN(const CacheScheme scheme, cache->cache->scheme(layer));
    *text = Keep(scheme.ToString());
    return absl::OkStatus();
  });
}

kvant_status kvant_cache_append(kvant_cache* cache, void* stream, int64_t layer, const DLTensor* k,
                                const DLTensor* v, const int64_t* counts, const int64_t* starts) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"k", k}, {"v", v}}));
    KVANT_ASSIGN_OR_RETURN(const KvInput key, InputOf("k", *k, cache->device));
    KVANT_ASSIGN_OR_RETURN(const KvInput value, InputOf("v", *v, cache->device));
    const auto by_row = [&](const int64_t* numbers) {
      const int64_t rows = numbers == nullptr ? 0 : cache->cache->options().batch;
      return absl::MakeConstSpan(numbers, static_cast<size_t>(rows));
    };
    return cache->cache->Append(Stream(cache->cache->engine(), stream), layer, key, value,
                                by_row(counts), by_row(starts));
  });
}

int64_t kvant_cache_length(const kvant_cache* cache, int64_t layer, int64_t row) {
  return CallFor<int64_t>(0,
                          [&] { return cache == nullptr ? 0 : cache->cache->length(layer, row); });
}

kvant_status kvant_cache_crop(kvant_cache* cache, int64_t layer, const int64_t* tokens,
                              size_t tokens_count) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"tokens", tokens}}));
    if (tokens_count != 1) {
      return cache->cache->Crop(absl::MakeConstSpan(tokens, tokens_count), OneLayer(layer));
    }
    const std::vector<int64_t> all(cache->cache->options().batch, tokens[0]);
    return cache->cache->Crop(all, OneLayer(layer));
  });
}

kvant_status kvant_cache_reset(kvant_cache* cache) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}}));
    return cache->cache->Reset();
  });
}

kvant_status kvant_cache_reorder(kvant_cache* cache, int64_t layer, const int64_t* rows,
                                 size_t rows_count) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"rows", rows}}));
    return cache->cache->Reorder(absl::MakeConstSpan(rows, rows_count), OneLayer(layer));
  });
}

kvant_status kvant_cache_fork(const kvant_cache* cache, const int64_t* rows, size_t rows_count,
                              int64_t capacity, kvant_cache** fork) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"fork", fork}}));
    std::optional<absl::Span<const int64_t>> taken;
    if (rows != nullptr) taken = absl::MakeConstSpan(rows, rows_count);
    KVANT_ASSIGN_OR_RETURN(std::shared_ptr<KvCache> made, cache->cache->Fork(taken, capacity));
    *fork = new kvant_cache{std::move(made), cache->device};
    return absl::OkStatus();
  });
}

kvant_status kvant_cache_saved_bytes(const kvant_cache* cache, int64_t layer,
                                     const int64_t* lengths, int64_t* bytes) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"lengths", lengths}, {"bytes", bytes}}));
    KVANT_ASSIGN_OR_RETURN(*bytes, cache->cache->SavedBytes(layer, LengthsOf(*cache, lengths)));
    return absl::OkStatus();
  });
}

kvant_status kvant_cache_save(const kvant_cache* cache, void* stream, int64_t layer,
                              const DLTensor* out) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"out", out}}));
    KVANT_ASSIGN_OR_RETURN(const Tensor bytes, BytesOf("out", *cache, *out));
    return cache->cache->Save(Stream(cache->cache->engine(), stream), layer, bytes);
  });
}

kvant_status kvant_cache_load(kvant_cache* cache, void* stream, int64_t layer,
                              const int64_t* lengths, const DLTensor* data) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"lengths", lengths}, {"data", data}}));
    KVANT_ASSIGN_OR_RETURN(const Tensor bytes, BytesOf("data", *cache, *data));
    return cache->cache->Load(Stream(cache->cache->engine(), stream), layer,
                              LengthsOf(*cache, lengths), bytes);
  });
}

int64_t kvant_cache_columns(const kvant_cache* cache) {
  return CallFor<int64_t>(0, [&] { return cache == nullptr ? 0 : cache->cache->columns(); });
}

kvant_status kvant_cache_part(const kvant_cache* cache, int64_t layer, bool values, kvant_part part,
                              kvant_tensor* tensor, const void** data) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"data", data}}));
    if (static_cast<unsigned>(part) >= kKvParts) {
      return InvalidArguments("there is no part ", static_cast<int>(part));
    }
    const auto which = static_cast<KvPart>(part);
    KVANT_ASSIGN_OR_RETURN(const KvTensor* stored, cache->cache->tensor(layer, values));
    KVANT_RETURN_IF_ERROR(Write("tensor", Describe(stored->part(which)), tensor));
    *data = cache->cache->part(layer, values, which).data;
    return absl::OkStatus();
  });
}

kvant_status kvant_cache_ranges(const kvant_cache* cache, int64_t layer, bool values, int64_t row,
                                kvant_range* ranges) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"cache", cache}, {"ranges", ranges}}));
    KVANT_RETURN_IF_ERROR(CheckRow(*cache, layer, row));
    for (const KvRange& range : cache->cache->Ranges(layer, values, row)) {
      *ranges++ = {range.first, range.tokens};
    }
    return absl::OkStatus();
  });
}

kvant_status kvant_cache_attention(kvant_cache* cache, const kvant_attention_options* options,
                                   kvant_attention** attention) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(
        NotNull({{"cache", cache}, {"options", options}, {"attention", attention}}));
    kvant_attention_options given;
    KVANT_RETURN_IF_ERROR(Read("kvant_attention_options", options, given));
    KvAttentionOptions wanted;
    wanted.query_heads = given.query_heads;
    if (given.query_tokens != 0) wanted.query_tokens = given.query_tokens;
    wanted.scale = given.scale;
    wanted.soft_cap = given.soft_cap;
    wanted.window = given.window;
    wanted.sinks = given.sinks;
    wanted.new_tokens = given.new_tokens;
    wanted.sees_all = given.sees_all;
    wanted.stats = given.stats;
    if (std::any_of(std::begin(given.bias), std::end(given.bias), [](auto d) { return d != 0; })) {
      wanted.bias.assign(std::begin(given.bias), std::end(given.bias));
    }
    if (given.type != KVANT_UNDEF) {
      KVANT_ASSIGN_OR_RETURN(wanted.type, TypeOf(given.type));
    }
    KVANT_ASSIGN_OR_RETURN(auto made, cache->cache->Attention(wanted));
    const KvCacheOptions& sizes = cache->cache->options();
    const auto port = [&](const char* name, int64_t heads, int64_t channels) {
      return PortOf(name, *cache, wanted.type, {sizes.batch, heads, wanted.query_tokens, channels});
    };
    *attention = new kvant_attention{
        cache->cache,
        std::move(made),
        port("q", wanted.query_heads, sizes.head_size),
        port("out", wanted.query_heads, sizes.value_size()),
        PortOf("sinks", *cache, kF32, {wanted.query_heads}),
        PortOf("bias", *cache, kF32, wanted.bias),
        port("k", sizes.heads, sizes.head_size),
        port("v", sizes.heads, sizes.value_size()),
        PortOf("stats", *cache, kF32, {sizes.batch, wanted.query_heads, wanted.query_tokens, 1})};
    return absl::OkStatus();
  });
}

void kvant_attention_destroy(kvant_attention* attention) { delete attention; }

kvant_status kvant_attention_execute(const kvant_attention* attention, void* stream, int64_t layer,
                                     const DLTensor* q, const DLTensor* out,
                                     const kvant_attention_inputs* inputs) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"attention", attention}}));
    KVANT_ASSIGN_OR_RETURN(const Tensor queries, attention->q.Take(q));
    KVANT_ASSIGN_OR_RETURN(const Tensor result, attention->out.Take(out));
    kvant_attention_inputs given;
    KVANT_RETURN_IF_ERROR(Read("kvant_attention_inputs", inputs, given));
    const auto take = [](const Port& port, const DLTensor* tensor, auto& to) -> absl::Status {
      if (tensor == nullptr) return absl::OkStatus();
      KVANT_ASSIGN_OR_RETURN(to, port.Take(tensor));
      return absl::OkStatus();
    };
    KvAttentionInputs taken;
    Tensor stats;
    KVANT_RETURN_IF_ERROR(take(attention->stats, given.stats, stats));
    KVANT_RETURN_IF_ERROR(take(attention->sinks, given.sinks, taken.sinks));
    if (given.bias != nullptr && attention->attention->options().bias.empty()) {
      return InvalidArguments("attention without biases is executed with them");
    }
    KVANT_RETURN_IF_ERROR(take(attention->bias, given.bias, taken.bias));
    KVANT_RETURN_IF_ERROR(take(attention->k, given.k, taken.k));
    KVANT_RETURN_IF_ERROR(take(attention->v, given.v, taken.v));
    if (given.starts != nullptr) {
      const int64_t batch = attention->cache->options().batch;
      taken.starts = absl::MakeConstSpan(given.starts, static_cast<size_t>(batch));
    }
    return attention->attention->Execute(Stream(attention->cache->engine(), stream), layer, queries,
                                         result, taken, stats);
  });
}

kvant_status kvant_attention_kernel(const kvant_attention* attention, int64_t layer,
                                    const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"attention", attention}, {"text", text}}));
    KVANT_ASSIGN_OR_RETURN(const CompiledPartition compiled, attention->attention->compiled(layer));
    *text = Keep(compiled.kernel());
    return absl::OkStatus();
  });
}

kvant_status kvant_attention_explain(const kvant_attention* attention, int64_t layer,
                                     const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"attention", attention}, {"text", text}}));
    KVANT_ASSIGN_OR_RETURN(const CompiledPartition compiled, attention->attention->compiled(layer));
    *text = Keep(compiled.ToString());
    return absl::OkStatus();
  });
}

size_t kvant_schemes(void) { return NamedCacheSchemes().size(); }

kvant_status kvant_scheme_at(size_t at, const char** name, const char** what) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"name", name}, {"what", what}}));
    const auto schemes = NamedCacheSchemes();
    if (at >= schemes.size()) {
      return InvalidArguments("there is no scheme ", at, " of ", schemes.size());
    }
    *name = schemes[at].name.data();  // of literals, which end with 0
    *what = schemes[at].what.data();
    return absl::OkStatus();
  });
}

kvant_status kvant_scheme_text(const char* scheme, const char** text) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"scheme", scheme}, {"text", text}}));
    KVANT_ASSIGN_OR_RETURN(const CacheScheme parsed, ParseCacheScheme(scheme));
    *text = Keep(parsed.ToString());
    return absl::OkStatus();
  });
}

kvant_status kvant_scheme_bits(const char* scheme, int64_t head_size, int64_t heads, double* bits) {
  return Call([&]() -> absl::Status {
    KVANT_RETURN_IF_ERROR(NotNull({{"scheme", scheme}, {"bits", bits}}));
    KVANT_ASSIGN_OR_RETURN(const CacheScheme parsed, ParseCacheScheme(scheme));
    KVANT_ASSIGN_OR_RETURN(const double k, parsed.k.BitsPerElement(heads, head_size));
    KVANT_ASSIGN_OR_RETURN(const double v, parsed.v.BitsPerElement(heads, head_size));
    *bits = (k + v) / 2;
    return absl::OkStatus();
  });
}

}  // extern "C"
}  // namespace kvant::c
