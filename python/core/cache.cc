// KV caches.
#include "cache.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "describe.h"
#include "module.h"
#include "tensor_view.h"

namespace kvant_python {
namespace {

using Scales = std::vector<std::vector<float>>;

std::vector<kvant_scales> ScalesOf(const Scales& layers) {
  std::vector<kvant_scales> result;
  for (const auto& values : layers) result.push_back({values.data(), values.size()});
  return result;
}

// For the C ABI, for which it would end at a character 0.
const char* SchemeText(const std::string& scheme) {
  if (const size_t end = scheme.find('\0'); end != std::string::npos) {
    Invalid("scheme '" + scheme.substr(0, end) + "' goes on after a character 0");
  }
  return scheme.c_str();
}

struct Options {
  std::vector<std::string> schemes;  // one, or one for each layer
  int64_t layers, batch, heads, head_size, v_head_size, capacity, rollback;
  bool allow_non_finite;
  Scales k_scales, v_scales;
  std::vector<int64_t> keep;  // of no layer, or of each
  std::string fpmath;

  // Calls it with what the C ABI takes.
  template <typename F>
  void Use(const F& call) const {
    std::vector<const char*> names;
    for (const auto& scheme : schemes) names.push_back(SchemeText(scheme));
    CheckCount("schemes", schemes.size() == 1 ? layers : schemes.size());
    if (!k_scales.empty()) CheckCount("k_scales", k_scales.size());
    if (!v_scales.empty()) CheckCount("v_scales", v_scales.size());
    if (!keep.empty()) CheckCount("numbers of tokens to keep", keep.size());
    const auto k = ScalesOf(k_scales), v = ScalesOf(v_scales);
    auto options = Sized<kvant_cache_options>();
    if (names.size() == 1) {
      options.scheme = names[0];
    } else {
      options.layer_schemes = names.data();
    }
    options.layers = layers;
    options.batch = batch;
    options.heads = heads;
    options.head_size = head_size;
    options.v_head_size = v_head_size;
    options.capacity = capacity;
    options.rollback = rollback;
    options.allow_non_finite = allow_non_finite;
    if (!k.empty()) options.k_scales = k.data();
    if (!v.empty()) options.v_scales = v.data();
    if (!keep.empty()) options.keep = keep.data();
    options.fpmath = fpmath.c_str();
    call(options);
  }

 private:
  void CheckCount(const char* what, int64_t count) const {
    // Zero stands for the default in the C ABI, which a caller of Python does not mean.
    if (layers < 1 || batch < 1 || heads < 1) {
      Invalid("a cache of " + std::to_string(layers) + " layers, " + std::to_string(batch) +
              " sequences and " + std::to_string(heads) + " heads: each must be at least 1");
    }
    if (count != layers) {
      Invalid(std::to_string(layers) + " layers need as many " + what + ", not " +
              std::to_string(count));
    }
  }
};

nb::tuple TupleOf(const kvant_cache_bytes& bytes) {
  return nb::make_tuple(bytes.codes, bytes.parameters, bytes.window, bytes.bookkeeping,
                        bytes.total);
}

void Append(const Cache& self, int64_t layer, nb::handle k, nb::handle v, const ByRow& counts,
            const ByRow& starts) {
  CheckNotForked();
  const int64_t* const taken = DataOf("counts", counts, self.batch);
  const int64_t* const first = DataOf("starts", starts, self.batch);
  static const Use kKeys{"k"}, kValues{"v"};
  TensorView keys, values;
  keys.Read(k, kKeys);
  values.Read(v, kValues);
  void* const stream = keys.stream();
  Run([&] {
    return kvant_cache_append(self.handle.get(), stream, layer, &keys.tensor(), &values.tensor(),
                              taken, first);
  });
}

// A read-only array over the cache's memory, which keeps the cache; None for a part that is not
// there.
nb::object Part(nb::handle_t<Cache> self, int64_t layer, bool values, int part) {
  CheckNotForked();
  auto tensor = Sized<kvant_tensor>();
  const void* data = nullptr;
  Check(kvant_cache_part(nb::cast<const Cache&>(self).handle.get(), layer, values,
                         static_cast<kvant_part>(part), &tensor, &data));
  if (tensor.rank < 0 || data == nullptr) return nb::none();
  const int bits = kvant_type_bits(tensor.type);
  std::vector<size_t> dims(tensor.dims, tensor.dims + tensor.rank);
  nb::dlpack::dtype type{static_cast<uint8_t>(nb::dlpack::dtype_code::UInt),
                         static_cast<uint8_t>(std::max(bits, 8)), 1};
  if (tensor.type == KVANT_F32 || tensor.type == KVANT_F16) {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  } else if (tensor.type == KVANT_S8 || tensor.type == KVANT_S32 || tensor.type == KVANT_S64) {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
  }
  const size_t in_byte = bits < 8 ? 8 / bits : 1;
  std::vector<int64_t> strides;
  if (!dims.empty() && dims.back() % in_byte != 0) {
    // Rows share bytes.
    size_t elements = 1;
    for (const size_t dim : dims) elements *= dim;
    dims = {(elements + in_byte - 1) / in_byte};
  } else {
    for (int32_t d = 0; tensor.strides != nullptr && d < tensor.rank; ++d) {
      const bool last = d + 1 == tensor.rank;
      strides.push_back(last ? 1 : tensor.strides[d] / static_cast<int64_t>(in_byte));
    }
    if (!dims.empty()) dims.back() /= in_byte;
  }
  nb::ndarray<nb::numpy, nb::ro> array(data, dims.size(), dims.data(), self,
                                       strides.empty() ? nullptr : strides.data(), type);
  return nb::cast(array, nb::rv_policy::reference);
}

nb::list Ranges(const Cache& self, int64_t layer, bool values, int64_t row) {
  CheckNotForked();
  kvant_range ranges[3];
  Check(kvant_cache_ranges(self.handle.get(), layer, values, row, ranges));
  nb::list result;
  for (const kvant_range& range : ranges) result.append(nb::make_tuple(range.first, range.tokens));
  return result;
}

template <auto call>
void ForRows(const Cache& self, const std::vector<int64_t>& rows, std::optional<int64_t> layer) {
  CheckNotForked();
  if (layer && (*layer < 0 || *layer >= self.layers)) {
    Invalid("there is no layer " + std::to_string(*layer) + ": the cache has " +
            std::to_string(self.layers));
  }
  static constexpr int64_t kNone = 0;  // no rows are not null
  const int64_t* const data = rows.empty() ? &kNone : rows.data();
  Run([&] { return call(self.handle.get(), layer.value_or(KVANT_ALL_LAYERS), data, rows.size()); });
}

// How many bytes a layer with rows of these lengths, None: as they are, is saved as.
int64_t SavedBytes(const Cache& self, int64_t layer, const ByRow& lengths) {
  CheckNotForked();
  std::vector<int64_t> present;
  const int64_t* rows = DataOf("lengths", lengths, self.batch);
  if (rows == nullptr) {
    for (int64_t row = 0; row < self.batch; ++row) {
      present.push_back(kvant_cache_length(self.handle.get(), layer, row));
    }
    rows = present.data();
  }
  int64_t bytes;
  Check(kvant_cache_saved_bytes(self.handle.get(), layer, rows, &bytes));
  return bytes;
}

void Save(const Cache& self, int64_t layer, nb::handle to) {
  CheckNotForked();
  static const Use kTo{"out", true};
  TensorView bytes;
  bytes.Read(to, kTo);
  void* const stream = bytes.stream();
  Run([&] { return kvant_cache_save(self.handle.get(), stream, layer, &bytes.tensor()); });
}

void Load(const Cache& self, int64_t layer, const ByRow& lengths, nb::handle from) {
  CheckNotForked();
  const int64_t* const rows = DataOf("lengths", lengths, self.batch);
  static const Use kFrom{"data"};
  TensorView bytes;
  bytes.Read(from, kFrom);
  void* const stream = bytes.stream();
  Run([&] { return kvant_cache_load(self.handle.get(), stream, layer, rows, &bytes.tensor()); });
}

void BindCache(nb::module_& m) {
  nb::class_<Cache> cache(m, "Cache");
  cache
      .def(
          "__init__",
          [](Cache* self, const Engine& engine, const Options& options) {
            CheckNotForked();
            kvant_cache* cache;
            options.Use([&](const kvant_cache_options& c) {
              Run([&] { return kvant_cache_create(engine.handle.get(), &c, &cache); });
            });
            new (self) Cache{CacheHandle(cache), options.layers, options.batch};
          },
          nb::arg("engine"), nb::arg("options"))
      .def("append", &Append, nb::arg("layer"), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("counts").none() = nb::none(), nb::arg("starts").none() = nb::none())
      .def(
          "length",
          [](const Cache& self, int64_t layer, int64_t row) {
            CheckNotForked();
            return kvant_cache_length(self.handle.get(), layer, row);
          },
          nb::arg("layer"), nb::arg("row"))
      .def("crop", &ForRows<kvant_cache_crop>, nb::arg("tokens"),
           nb::arg("layer").none() = nb::none())
      .def("reorder", &ForRows<kvant_cache_reorder>, nb::arg("rows"),
           nb::arg("layer").none() = nb::none())
      .def("reset",
           [](const Cache& self) {
             CheckNotForked();
             Run([&] { return kvant_cache_reset(self.handle.get()); });
           })
      .def(
          "fork",
          [](const Cache& self, const ByRow& rows, int64_t capacity) {
            CheckNotForked();
            if (rows && rows->empty()) Invalid("a fork of no rows");
            kvant_cache* fork;
            Run([&] {
              return kvant_cache_fork(self.handle.get(), rows ? rows->data() : nullptr,
                                      rows ? rows->size() : 0, capacity, &fork);
            });
            return Cache{CacheHandle(fork), self.layers,
                         rows ? static_cast<int64_t>(rows->size()) : self.batch};
          },
          nb::arg("rows").none() = nb::none(), nb::arg("capacity") = 0)
      .def("columns",
           [](const Cache& self) {
             CheckNotForked();
             return kvant_cache_columns(self.handle.get());
           })
      .def("bytes",
           [](const Cache& self) {
             CheckNotForked();
             auto bytes = Sized<kvant_cache_bytes>();
             Check(kvant_cache_memory(self.handle.get(), &bytes));
             return TupleOf(bytes);
           })
      .def("used_bytes",
           [](const Cache& self) {
             CheckNotForked();
             return kvant_cache_used_bytes(self.handle.get());
           })
      .def("scratch_bytes",
           [](const Cache& self) {
             CheckNotForked();
             return kvant_cache_scratch_bytes(self.handle.get());
           })
      .def(
          "scheme",
          [](const Cache& self, int64_t layer) {
            const char* text;
            Check(kvant_cache_scheme(self.handle.get(), layer, &text));
            return text;
          },
          nb::arg("layer"))
      .def("part", &Part, nb::arg("layer"), nb::arg("values"), nb::arg("part"))
      .def("ranges", &Ranges, nb::arg("layer"), nb::arg("values"), nb::arg("row"))
      .def("saved_bytes", &SavedBytes, nb::arg("layer"), nb::arg("lengths").none())
      .def("save", &Save, nb::arg("layer"), nb::arg("to").none())
      .def("load", &Load, nb::arg("layer"), nb::arg("lengths"), nb::arg("data").none());
  BindAttention(m, cache);
}

nb::list Schemes() {
  nb::list result;
  for (size_t i = 0; i < kvant_schemes(); ++i) {
    const char *name, *what;
    Check(kvant_scheme_at(i, &name, &what));
    result.append(nb::make_tuple(name, what));
  }
  return result;
}

}  // namespace

const int64_t* DataOf(const char* what, const ByRow& rows, int64_t batch) {
  if (!rows) return nullptr;
  if (rows->size() != static_cast<size_t>(batch)) {
    Invalid(std::string(what) + " must be of " + std::to_string(batch) + " rows, not " +
            std::to_string(rows->size()));
  }
  return rows->data();
}

void BindCaches(nb::module_& m) {
  nb::class_<Options>(m, "CacheOptions")
      .def(
          "__init__",
          [](Options* self, std::vector<std::string> schemes, int64_t layers, int64_t batch,
             int64_t heads, int64_t head_size, int64_t v_head_size, int64_t capacity,
             int64_t rollback, bool allow_non_finite, Scales k_scales, Scales v_scales,
             std::vector<int64_t> keep, std::string fpmath) {
            new (self) Options{std::move(schemes),
                               layers,
                               batch,
                               heads,
                               head_size,
                               v_head_size,
                               capacity,
                               rollback,
                               allow_non_finite,
                               std::move(k_scales),
                               std::move(v_scales),
                               std::move(keep),
                               std::move(fpmath)};
          },
          nb::arg("schemes"), nb::arg("layers"), nb::arg("batch"), nb::arg("heads"),
          nb::arg("head_size"), nb::arg("v_head_size"), nb::arg("capacity"), nb::arg("rollback"),
          nb::arg("allow_non_finite"), nb::arg("k_scales"), nb::arg("v_scales"), nb::arg("keep"),
          nb::arg("fpmath"))
      .def("bytes", [](const Options& self) {
        auto bytes = Sized<kvant_cache_bytes>();
        self.Use([&](const kvant_cache_options& c) { Check(kvant_cache_bytes_for(&c, &bytes)); });
        return TupleOf(bytes);
      });

  BindCache(m);

  m.def("schemes", &Schemes);
  m.def(
      "scheme_text",
      [](const std::string& scheme) {
        const char* text;
        Check(kvant_scheme_text(SchemeText(scheme), &text));
        return text;
      },
      nb::arg("scheme"));
  m.def(
      "scheme_bits",
      [](const std::string& scheme, int64_t head_size, int64_t heads) {
        double bits;
        Check(kvant_scheme_bits(SchemeText(scheme), head_size, heads, &bits));
        return bits;
      },
      nb::arg("scheme"), nb::arg("head_size"), nb::arg("heads"));
}

}  // namespace kvant_python
