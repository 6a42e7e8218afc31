// A paged int8 cache as a server keeps it: the tokens of all sequences come packed, AppendPages
// puts each into its slot of a pool, and attention over ragged queries reads the pool by page
// tables. Checked against the oracle, which computes any graph in f64.
#include <cmath>
#include <iostream>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr int kHeads = 2, kQueryHeads = 8, kSize = 64;
constexpr int kPages = 8, kPageTokens = 16, kRows = 2, kPagesOfRow = 3, kMostTokens = 48;

kvant::ConstTensor In(const auto& data) { return {data.data(), data.size() * sizeof(data[0])}; }
kvant::Tensor Out(auto& data) { return {data.data(), data.size() * sizeof(data[0])}; }

// Of K or V: a scale for each token and head.
struct Pool {
  std::vector<int8_t> codes = std::vector<int8_t>(kPages * kHeads * kPageTokens * kSize);
  std::vector<float> scales = std::vector<float>(kPages * kHeads * kPageTokens);
};

absl::StatusOr<kvant::Graph> Writing() {
  kvant::GraphBuilder g;
  const auto x = g.Input("x", kvant::kF32, {kMostTokens, kHeads, kSize});
  const auto slots = g.Input("slots", kvant::kS64, {kMostTokens});
  const auto pool = g.AppendPages(x, slots, {.pages = kPages, .page_size = kPageTokens},
                                  {.group_shape = {1, 1, 1, kSize}, .type = kvant::kS8});
  g.Output("codes", pool.codes);
  g.Output("scales", pool.scales);
  return std::move(g).Build();
}

absl::StatusOr<kvant::Graph> Attention() {
  kvant::GraphBuilder g;
  const auto table = g.Input("table", kvant::kS32, {kRows, kPagesOfRow});
  const auto lengths = g.Input("lengths", kvant::kS32, {kRows});
  const auto load = [&](const std::string& name) {
    const auto codes = g.Input(name, kvant::kS8, {kPages, kHeads, kPageTokens, kSize});
    const auto scales = g.Input(name + "_scales", kvant::kF32, {kPages, kHeads, kPageTokens, 1});
    return g.LoadPages(g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, kSize}}), table,
                       lengths);
  };
  const auto k = load("k"), v = load("v");
  const auto [o, stats] = g.ScaledDotProductAttention(
      g.Input("q", kvant::kF32, {kMostTokens, kQueryHeads, kSize}), k, v,
      {.bottom_right = true,
       .right_window = 0,
       .kv_lengths = lengths,
       .query_offsets = g.Input("offsets", kvant::kS32, {kRows + 1})});
  g.Output("o", o);
  return std::move(g).Build();
}

absl::StatusOr<std::vector<float>> Serve(const std::string& backend) {
  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create({.backends = {backend}}));
  KVANT_ASSIGN_OR_RETURN(const auto writing_graph, Writing());
  KVANT_ASSIGN_OR_RETURN(const auto attention_graph, Attention());
  KVANT_ASSIGN_OR_RETURN(const auto writing, engine.Compile(writing_graph));
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(attention_graph));
  std::cout << writing << "\n" << attention << "\n";
  const kvant::Stream stream(engine);
  Pool k, v;
  std::vector<float> x(kMostTokens * kHeads * kSize), q(kMostTokens * kQueryHeads * kSize);
  std::vector<float> o(q.size());
  const std::vector<int32_t> table = {6, 1, 4, 0, 3, 7};
  std::vector<int32_t> lengths = {0, 0};
  // Two prompts, then two tokens of each.
  for (const auto& [first, second] : {std::pair(30, 11), std::pair(1, 1), std::pair(1, 1)}) {
    const std::vector<int32_t> offsets = {0, first, first + second};
    std::vector<int64_t> slots(kMostTokens, -1);  // beyond the last token there is nothing
    for (int row = 0; row < kRows; ++row) {
      for (int i = offsets[row]; i < offsets[row + 1]; ++i) {
        const int token = lengths[row]++, page = table[row * kPagesOfRow + token / kPageTokens];
        slots[i] = page * kPageTokens + token % kPageTokens;
      }
    }
    for (size_t i = 0; i < q.size(); ++i) q[i] = std::cos(0.3f * i + lengths[0]);
    for (Pool* pool : {&k, &v}) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin((pool == &k ? 0.9f : 1.7f) * i);
      KVANT_RETURN_IF_ERROR(
          writing.Execute(stream, {{"x", In(x)}, {"slots", In(slots)}},
                          {{"codes", Out(pool->codes)}, {"scales", Out(pool->scales)}}));
    }
    KVANT_RETURN_IF_ERROR(attention.Execute(stream,
                                            {{"q", In(q)},
                                             {"k", In(k.codes)},
                                             {"k_scales", In(k.scales)},
                                             {"v", In(v.codes)},
                                             {"v_scales", In(v.scales)},
                                             {"table", In(table)},
                                             {"lengths", In(lengths)},
                                             {"offsets", In(offsets)}},
                                            {{"o", Out(o)}}));
  }
  return o;
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const auto fused, Serve("cpu"));
  KVANT_ASSIGN_OR_RETURN(const auto exact, Serve("oracle"));
  for (size_t i = 0; i < fused.size(); ++i) {
    if (!(std::abs(fused[i] - exact[i]) < 1e-3f)) return absl::InternalError("not what f64 gives");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  std::cout << status << "\n";
  return status.ok() ? 0 : 1;
}
