// Attention over KV caches.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cache.h"
#include "describe.h"
#include "tensor_view.h"

namespace kvant_python {
namespace {

struct Attention {
  AttentionHandle handle;
  int64_t batch;
};

kvant_type TypeOf(const DLTensor& tensor) {
  const DLDataType& type = tensor.dtype;
  if (type.code == kDLFloat && type.bits == 16) return KVANT_F16;
  if (type.code == kDLBfloat) return KVANT_BF16;
  if (type.code == kDLFloat && type.bits == 32) return KVANT_F32;
  Invalid("q must be f32, f16 or bf16");
}

// What is asked of attention beside its shape.
struct Terms {
  float scale, soft_cap;
  int64_t window;
  bool sinks, new_tokens;
  std::vector<int64_t> bias;  // its dims, or none
  bool sees_all, stats;
};

AttentionHandle AttentionOf(const Cache& self, int64_t query_heads, int64_t query_tokens,
                            kvant_type type, const Terms& terms) {
  auto options = Sized<kvant_attention_options>();
  options.query_heads = query_heads;
  options.query_tokens = query_tokens;
  options.type = type;
  options.scale = terms.scale;
  options.soft_cap = terms.soft_cap;
  options.window = terms.window;
  options.sinks = terms.sinks;
  options.new_tokens = terms.new_tokens;
  options.sees_all = terms.sees_all;
  options.stats = terms.stats;
  if (!terms.bias.empty()) {
    if (terms.bias.size() != 4) {
      Invalid("bias must be [batch or 1, query heads or 1, query tokens, columns], but has " +
              std::to_string(terms.bias.size()) + " dims");
    }
    std::copy(terms.bias.begin(), terms.bias.end(), options.bias);
  }
  kvant_attention* attention;
  Run([&] { return kvant_cache_attention(self.handle.get(), &options, &attention); });
  return AttentionHandle(attention);
}

// What an execution takes beside queries and output, None where nothing is given.
class Inputs {
 public:
  Inputs(nb::handle sinks, nb::handle bias, nb::handle k, nb::handle v, const ByRow& starts,
         nb::handle stats, int64_t batch) {
    static const Use kSinks{"sinks"}, kBias{"bias"}, kKeys{"k"}, kValues{"v"},
        kStats{"stats", true};
    inputs_.sinks = Read(sinks, kSinks, sinks_);
    inputs_.bias = Read(bias, kBias, bias_);
    inputs_.k = Read(k, kKeys, k_);
    inputs_.v = Read(v, kValues, v_);
    inputs_.stats = Read(stats, kStats, stats_);
    inputs_.starts = DataOf("starts", starts, batch);
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  const kvant_attention_inputs& get() const { return inputs_; }
  std::vector<int64_t> bias_dims() const {
    if (inputs_.bias == nullptr) return {};
    return {inputs_.bias->shape, inputs_.bias->shape + inputs_.bias->ndim};
  }

 private:
  static const DLTensor* Read(nb::handle given, const Use& use, TensorView& view) {
    if (given.is_none()) return nullptr;
    view.Read(given, use);
    return &view.tensor();
  }

  TensorView sinks_, bias_, k_, v_, stats_;
  kvant_attention_inputs inputs_ = Sized<kvant_attention_inputs>();
};

void ExecuteAttention(const kvant_attention* attention, int64_t layer, const TensorView& q,
                      nb::handle out, const Inputs& inputs) {
  static const Use kOut{"out", true};
  TensorView output;
  output.Read(out, kOut);
  void* const stream = q.stream();
  Run([&] {
    return kvant_attention_execute(attention, stream, layer, &q.tensor(), &output.tensor(),
                                   &inputs.get());
  });
}

const Use kQueries{"q"};

// kvant keeps what it compiled for the shapes and types that were asked for last.
void Attend(const Cache& self, int64_t layer, nb::handle q, nb::handle out, float scale,
            float soft_cap, int64_t window, nb::handle sinks, nb::handle bias, nb::handle k,
            nb::handle v, const ByRow& starts, bool sees_all, nb::handle stats) {
  CheckNotForked();
  TensorView queries;
  queries.Read(q, kQueries);
  const DLTensor& tensor = queries.tensor();
  if (tensor.ndim != 4) {
    Invalid("q must be [batch, query heads, query tokens, head size], but has " +
            std::to_string(tensor.ndim) + " dims");
  }
  if (tensor.shape[1] < 1 || tensor.shape[2] < 1) Invalid("q has no heads or no tokens");
  const Inputs inputs(sinks, bias, k, v, starts, stats, self.batch);
  const AttentionHandle attention =
      AttentionOf(self, tensor.shape[1], tensor.shape[2], TypeOf(tensor),
                  {scale, soft_cap, window, !sinks.is_none(), !k.is_none() || !v.is_none(),
                   inputs.bias_dims(), sees_all, !stats.is_none()});
  ExecuteAttention(attention.get(), layer, queries, out, inputs);
}

}  // namespace

void BindAttention(nb::module_& m, nb::class_<Cache>& cache) {
  cache
      .def("attend", &Attend, nb::arg("layer"), nb::arg("q").none(), nb::arg("out").none(),
           nb::arg("scale"), nb::arg("soft_cap"), nb::arg("window"), nb::arg("sinks").none(),
           nb::arg("bias").none() = nb::none(), nb::arg("k").none() = nb::none(),
           nb::arg("v").none() = nb::none(), nb::arg("starts").none() = nb::none(),
           nb::arg("sees_all") = false, nb::arg("stats").none() = nb::none())
      .def(
          "attention",
          [](const Cache& self, int64_t query_heads, int64_t query_tokens, const char* type,
             float scale, float soft_cap, int64_t window, bool sinks, bool new_tokens,
             std::vector<int64_t> bias, bool sees_all, bool stats) {
            CheckNotForked();
            const Terms terms{scale,      soft_cap,        window,   sinks,
                              new_tokens, std::move(bias), sees_all, stats};
            return Attention{
                AttentionOf(self, query_heads, query_tokens, kvant_python::TypeOf(type), terms),
                self.batch};
          },
          nb::arg("query_heads"), nb::arg("query_tokens"), nb::arg("type"), nb::arg("scale"),
          nb::arg("soft_cap"), nb::arg("window"), nb::arg("sinks"), nb::arg("new_tokens"),
          nb::arg("bias"), nb::arg("sees_all"), nb::arg("stats"));

  nb::class_<Attention>(m, "Attention")
      .def(
          "execute",
          [](const Attention& self, int64_t layer, nb::handle q, nb::handle out, nb::handle sinks,
             nb::handle bias, nb::handle k, nb::handle v, const ByRow& starts, nb::handle stats) {
            CheckNotForked();
            TensorView queries;
            queries.Read(q, kQueries);
            const Inputs inputs(sinks, bias, k, v, starts, stats, self.batch);
            ExecuteAttention(self.handle.get(), layer, queries, out, inputs);
          },
          nb::arg("layer"), nb::arg("q").none(), nb::arg("out").none(), nb::arg("sinks").none(),
          nb::arg("bias").none(), nb::arg("k").none(), nb::arg("v").none(),
          nb::arg("starts").none(), nb::arg("stats").none())
      .def(
          "explain",
          [](const Attention& self, int64_t layer) {
            const char* text;
            Check(kvant_attention_explain(self.handle.get(), layer, &text));
            return text;
          },
          nb::arg("layer"));
}

}  // namespace kvant_python
