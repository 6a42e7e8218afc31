// Attention stated as one op instead of matched from many: a sliding window, a soft
// cap and sink logits over an int8 cache. Checked against the oracle, which
// computes any graph in f64.
#include <cmath>
#include <iostream>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr int kHeads = 4, kKvHeads = 2, kQueries = 5, kTokens = 70, kHeadSize = 48;

kvant::ConstTensor In(const auto& data) { return {data.data(), data.size() * sizeof(data[0])}; }

absl::StatusOr<kvant::Graph> WindowedAttention() {
  kvant::GraphBuilder g;
  const auto q = g.Input("q", kvant::kF32, {1, kHeads, kQueries, kHeadSize});
  const auto k = g.Input("k", kvant::kS8, {1, kKvHeads, kTokens, kHeadSize});
  const auto v = g.Input("v", kvant::kS8, {1, kKvHeads, kTokens, kHeadSize});
  const auto scales = g.Input("scales", kvant::kF32, {1, kKvHeads, kTokens, 1});
  const auto values = [&](kvant::Value codes) {
    return g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, kHeadSize}});
  };
  const auto [o, stats] = g.ScaledDotProductAttention(
      q, values(k), values(v),
      {.scale = 0.1f,
       .soft_cap = 20.0f,
       .bottom_right = true,  // the last query sees up to the last token
       .left_window = 31,
       .right_window = 0,
       .sinks = g.Input("sinks", kvant::kF32, {kHeads})});
  g.Output("o", o);
  return std::move(g).Build();
}

absl::StatusOr<std::vector<float>> RunOn(const std::string& backend, const kvant::Graph& graph) {
  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create({.backends = {backend}}));
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(graph));
  std::cout << attention << "\n";

  std::vector<float> q(kHeads * kQueries * kHeadSize), o(q.size());
  std::vector<int8_t> k(kKvHeads * kTokens * kHeadSize), v(k.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.7f * i) + 0.2f;
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<int8_t>(i * 73 % 251);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<int8_t>(i * 29 % 241);
  const std::vector<float> scales(kKvHeads * kTokens, 0.02f), sinks{0.5f, -1.0f, 2.0f, 0.0f};
  KVANT_RETURN_IF_ERROR(attention.Execute(
      kvant::Stream(engine),
      {{"q", In(q)}, {"k", In(k)}, {"v", In(v)}, {"scales", In(scales)}, {"sinks", In(sinks)}},
      {{"o", {o.data(), o.size() * sizeof(float)}}}));
  return o;
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const kvant::Graph graph, WindowedAttention());
  KVANT_ASSIGN_OR_RETURN(const auto fused, RunOn("cpu", graph));
  KVANT_ASSIGN_OR_RETURN(const auto exact, RunOn("oracle", graph));
  for (size_t i = 0; i < fused.size(); ++i) {
    if (!(std::abs(fused[i] - exact[i]) < 1e-4f)) return absl::InternalError("not what f64 gives");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
