// Attention whose probabilities are used elsewhere too cannot be one kernel that
// never stores them. kvant says so when asked, and never falls back when told not to.
#include <iostream>

#include "kvant/kvant.h"

namespace {

absl::Status Run() {
  kvant::GraphBuilder g;
  const auto q = g.Input("q", kvant::kF32, {1, 8, 16, 64});
  const auto k = g.Input("k", kvant::kF32, {1, 8, 256, 64});
  const auto v = g.Input("v", kvant::kF32, {1, 8, 256, 64});
  const auto probs = g.SoftMax(g.MatMul(q, k, {.transpose_b = true}));
  const auto most = g.AddOp(kvant::OpKind::kReduceMax, "confidence", {probs}, {kvant::kF32},
                            {{kvant::Attr::kAxes, std::vector<int64_t>{-1}}});
  g.Output("confidence", most[0]);
  g.Output("o", g.MatMul(probs, v));
  KVANT_ASSIGN_OR_RETURN(const kvant::Graph graph, std::move(g).Build());

  // Whoever wants fused kernels or nothing gets an error with the reasons.
  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create({.backends = {"cpu", "oracle"}}));
  const auto fused = engine.Compile(graph, {.require_fused = true});
  std::cout << "with require_fused: " << fused.status().message() << "\n";
  if (fused.ok()) return absl::InternalError("fused after all");

  // Otherwise it runs op by op, and says that and why: what runs each partition, and near misses.
  KVANT_ASSIGN_OR_RETURN(const auto compiled, engine.Compile(graph));
  for (const std::string& explanation : compiled.explanations()) std::cout << explanation << "\n";
  if (compiled.explanations().size() <= compiled.partitions().size()) {
    return absl::InternalError("no near miss was explained");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
