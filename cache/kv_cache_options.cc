#include "kvant/cache/kv_cache_options.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr int64_t kMostLayers = int64_t{1} << 16;

// So that sizes in bits fit 64 bits.
absl::Status CheckSize(const KvCacheOptions& o, int64_t slots) {
  const Dims extents{o.layers, o.batch, o.heads, std::max(o.head_size, o.value_size()), slots};
  const std::optional<int64_t> elements = CheckedProduct(extents);
  if (elements && *elements <= int64_t{1} << 52) return absl::OkStatus();
  return InvalidArguments("a cache of [", DimsToString(extents),
                          "] (layers, batch, heads, head size and capacity) has more than 2^52 "
                          "elements");
}

absl::Status CheckStatic(const KvCacheOptions& options, bool values) {
  const char* name = values ? "V" : "K";
  const auto& scales = values ? options.v_scales : options.k_scales;
  bool wanted = false;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const CacheScheme& scheme = CacheSchemeOf(options, layer);
    const KvStorage& storage = values ? scheme.v : scheme.k;
    if (!storage.static_scales()) continue;
    wanted = true;
    if (storage.format.zero_points != NumberFormat::ZeroPoints::kNone) {
      return InvalidArguments(name, " of layer ", layer, ": storage '", storage.ToString(),
                              "' has static scales, which go without zero points");
    }
    if (storage.format.ggml_formula) {
      return InvalidArguments(name, " of layer ", layer, ": storage '", storage.ToString(),
                              "' has static scales, which ggml's formula would compute");
    }
    const int64_t channels = values ? options.value_size() : options.head_size;
    const int64_t each = storage.format.groups == NumberFormat::Groups::kTensor ? 1
                         : storage.format.groups == NumberFormat::Groups::kHead
                             ? options.heads
                             : options.heads * channels;
    const int64_t given = layer < static_cast<int64_t>(scales.size())
                              ? static_cast<int64_t>(scales[layer].size())
                              : 0;
    if (given != each) {
      return InvalidArguments(name, " of layer ", layer, ": storage '", storage.ToString(),
                              "' takes ", each, " static scales, but there are ", given);
    }
    for (const float scale : scales[layer]) {
      if (scale > 0 && std::isfinite(RoundScale(storage.scale_type(), scale))) continue;
      return InvalidArguments(name, " of layer ", layer, ": a static scale is ", scale,
                              ", which is not above 0 or beyond ",
                              DataTypeName(storage.scale_type()));
    }
  }
  if (static_cast<int64_t>(scales.size()) > options.layers) {
    return InvalidArguments("static scales of ", name, " for ", scales.size(), " layers of ",
                            options.layers);
  }
  if (wanted || scales.empty()) return absl::OkStatus();
  return InvalidArguments("static scales of ", name, ", which no layer's scheme takes");
}

}  // namespace

absl::Status CheckKvCacheOptions(const KvCacheOptions& o) {
  for (const auto& [name, value] :
       {std::pair("layers", o.layers), std::pair("batch", o.batch), std::pair("heads", o.heads),
        std::pair("head_size", o.head_size), std::pair("capacity", o.capacity)}) {
    if (value < 1) return InvalidArguments("a cache with ", name, " of ", value);
  }
  if (o.v_head_size < 0) return InvalidArguments("a cache with v_head_size of ", o.v_head_size);
  if (o.rollback < 0) return InvalidArguments("a cache with a rollback of ", o.rollback);
  if (o.capacity > kMostTokens) {
    return InvalidArguments("a cache with a capacity of ", o.capacity, " tokens, of at most ",
                            kMostTokens);
  }
  if (o.layers > kMostLayers) {
    return InvalidArguments("a cache with ", o.layers, " layers, of at most ", kMostLayers);
  }
  KVANT_RETURN_IF_ERROR(CheckSize(o, o.capacity));
  if (o.batch > kMostTokens) {
    return InvalidArguments("a cache with a batch of ", o.batch, ", of at most ", kMostTokens);
  }
  if (o.keep.size() > 1 && static_cast<int64_t>(o.keep.size()) != o.layers) {
    return InvalidArguments(o.keep.size(), " numbers of tokens to keep for ", o.layers,
                            " layers; give one, or all");
  }
  for (const int64_t keep : o.keep) {
    if (keep < 0) return InvalidArguments("a cache that keeps ", keep, " tokens");
  }
  if (o.schemes.size() != 1 && static_cast<int64_t>(o.schemes.size()) != o.layers) {
    return InvalidArguments(o.schemes.size(), " schemes for ", o.layers,
                            " layers; give one, or all");
  }
  for (const CacheScheme& scheme : o.schemes) {
    KVANT_RETURN_IF_ERROR(scheme.k.Check(o.head_size));
    KVANT_RETURN_IF_ERROR(scheme.v.Check(o.value_size()));
    // A group may be longer than the capacity.
    KVANT_RETURN_IF_ERROR(CheckSize(o, KvLayoutsOf(scheme, o, 0).first.total_slots()));
  }
  KVANT_RETURN_IF_ERROR(CheckStatic(o, false));
  return CheckStatic(o, true);
}

const CacheScheme& CacheSchemeOf(const KvCacheOptions& options, int64_t layer) {
  return options.schemes[options.schemes.size() == 1 ? 0 : layer];
}

int64_t KeepOf(const KvCacheOptions& options, int64_t layer) {
  if (options.keep.empty()) return 0;
  return options.keep[options.keep.size() == 1 ? 0 : layer];
}

std::pair<KvLayout, KvLayout> KvLayoutsOf(const CacheScheme& scheme, const KvCacheOptions& o,
                                          int64_t keep) {
  KvLayout k(scheme.k, o.capacity, o.rollback, keep), v(scheme.v, o.capacity, o.rollback, keep);
  const int64_t more = k.total_slots() - v.total_slots();
  KvLayout &fewer = more > 0 ? v : k, &other = more > 0 ? k : v;
  const int64_t missing = more > 0 ? more : -more;
  // A window makes up for a few more.
  const int64_t added = other.residual() > 0 ? fewer.WholeSlots(missing) : missing;
  fewer.AddSlots(added);
  other.AddSlots(added - missing);
  return {k, v};
}

}  // namespace kvant
