// Grouped-query attention with a causal mask, as oneDNN Graph writes it: query
// heads that share a key/value head have an axis of their own, R, over which keys
// and values broadcast.
#include <cmath>
#include <iostream>
#include <limits>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr int kHeads = 2, kRatio = 3, kTokens = 40, kHeadSize = 16;

kvant::ConstTensor In(const auto& data) { return {data.data(), data.size() * sizeof(data[0])}; }

absl::Status Run() {
  kvant::GraphBuilder g;
  const auto q = g.Input("q", kvant::kF32, {1, kHeads, kRatio, kTokens, kHeadSize});
  const auto k = g.Input("k", kvant::kF32, {1, kHeads, 1, kTokens, kHeadSize});
  const auto v = g.Input("v", kvant::kF32, {1, kHeads, 1, kTokens, kHeadSize});
  const auto root = g.Scalar(std::sqrt(float{kHeadSize}));
  const auto hidden = g.Scalar(-std::numeric_limits<float>::infinity());
  const auto scores = g.Divide(g.MatMul(q, k, {.transpose_b = true}), root);
  g.Output("o", g.MatMul(g.SoftMax(g.CausalMask(scores, hidden)), v));
  KVANT_ASSIGN_OR_RETURN(const kvant::Graph graph, std::move(g).Build());

  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create());
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(graph, {.require_fused = true}));
  std::cout << attention << "\n";

  std::vector<float> q_data(kHeads * kRatio * kTokens * kHeadSize), o(q_data.size());
  std::vector<float> k_data(kHeads * kTokens * kHeadSize), v_data(k_data.size());
  for (size_t i = 0; i < q_data.size(); ++i) q_data[i] = std::sin(0.7f * i);
  for (size_t i = 0; i < k_data.size(); ++i) k_data[i] = std::cos(1.3f * i);
  for (size_t i = 0; i < v_data.size(); ++i) v_data[i] = std::sin(0.1f * i) + 0.5f;
  KVANT_RETURN_IF_ERROR(attention.Execute(kvant::Stream(engine),
                                          {{"q", In(q_data)}, {"k", In(k_data)}, {"v", In(v_data)}},
                                          {{"o", {o.data(), o.size() * sizeof(float)}}}));

  // Token 0 sees only itself, so its output is its value, for every query head.
  for (int head = 0; head < kHeads * kRatio; ++head) {
    for (int d = 0; d < kHeadSize; ++d) {
      const float expected = v_data[head / kRatio * kTokens * kHeadSize + d];
      if (std::abs(o[head * kTokens * kHeadSize + d] - expected) > 1e-6f) {
        return absl::InternalError("the first token attends to more than itself");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
