// Attention through the installed package. With a zero query every key weighs the same, so the
// output must be the mean of the values.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kvant/kvant.h"

namespace {

absl::Status Run(std::vector<float>& out) {
  kvant::GraphBuilder g;
  auto q = g.Input("q", kvant::kF32, {1, 1, 1, 4});
  auto k = g.Input("k", kvant::kF32, {1, 1, 3, 4});
  auto v = g.Input("v", kvant::kF32, {1, 1, 3, 4});
  auto probs = g.SoftMax(g.MatMul(q, k, {.transpose_b = true}));
  g.Output("o", g.MatMul(probs, v));
  auto graph = std::move(g).Build();
  if (!graph.ok()) return graph.status();
  auto partitions = kvant::PartitionGraph(*graph);
  if (!partitions.ok()) return partitions.status();
  auto engine = kvant::Engine::Create();
  if (!engine.ok()) return engine.status();
  auto attention = engine->Compile(partitions->front(), {.require_fused = true});
  if (!attention.ok()) return attention.status();

  const std::vector<float> q_data(4, 0.0f);
  std::vector<float> k_data(12);
  std::vector<float> v_data(12);
  for (int i = 0; i < 12; ++i) {
    k_data[i] = std::sin(1.0f + i);
    v_data[i] = static_cast<float>(i);
  }
  const auto bytes = [](const auto& values) { return values.size() * sizeof(float); };
  return attention->Execute(kvant::Stream(*engine),
                            {{"q", {q_data.data(), bytes(q_data)}},
                             {"k", {k_data.data(), bytes(k_data)}},
                             {"v", {v_data.data(), bytes(v_data)}}},
                            {{"o", {out.data(), bytes(out)}}});
}

}  // namespace

int main() {
  std::vector<float> out(4, -1.0f);
  if (absl::Status status = Run(out); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  for (int i = 0; i < 4; ++i) {
    if (std::fabs(out[i] - (i + 4.0f)) > 1e-5f) {
      std::fprintf(stderr, "o[%d] is %g, not %g\n", i, out[i], i + 4.0f);
      return 1;
    }
  }
  return 0;
}
