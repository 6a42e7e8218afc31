// One decode step over an int4 cache that has room for more tokens than it holds.
// Compiled once for the capacity; the real lengths, one per sequence, are an input of the graph.
#include <cmath>
#include <iostream>
#include <vector>

#include "kvant/kvant.h"

namespace {

constexpr int kBatch = 2, kHeads = 2, kRatio = 4, kCapacity = 256, kHeadSize = 64, kGroup = 32;
constexpr int kTokenBytes = kHeadSize / 2;  // two codes per byte
constexpr int kCodeBytes = kBatch * kHeads * kCapacity * kTokenBytes;

kvant::ConstTensor In(const auto& data) { return {data.data(), data.size() * sizeof(data[0])}; }

// O = softmax(Q K^T / 8) V with K and V in groups of 32 along the head: (code - zero) * scale.
absl::StatusOr<kvant::Graph> DecodeGraph() {
  kvant::GraphBuilder g({.fpmath = kvant::FpMath::kF16, .apply_to_int = true});
  const auto cache = [&](const std::string& name) {
    const kvant::Dims groups{kBatch, kHeads, 1, kCapacity, kHeadSize / kGroup};
    const auto codes = g.Input(name, kvant::kU4, {kBatch, kHeads, 1, kCapacity, kHeadSize});
    const auto scales = g.Input(name + "_scales", kvant::kF32, groups);
    const auto zeros = g.Input(name + "_zeros", kvant::kU4, groups);
    return g.DynamicDequantize(codes, scales, zeros, {.group_shape = {1, 1, 1, 1, kGroup}});
  };
  const auto q = g.Input("q", kvant::kF32, {kBatch, kHeads, kRatio, 1, kHeadSize});
  const auto lengths = g.Input("lengths", kvant::kS32, {kBatch});
  const auto products = g.MatMul(q, g.LoadTokens(cache("k"), lengths), {.transpose_b = true});
  const auto scores = g.Multiply(products, g.Scalar(0.125));
  const auto probabilities = g.SoftMax(scores, {.lengths = lengths});
  g.Output("o", g.MatMul(probabilities, g.LoadTokens(cache("v"), lengths)));
  return std::move(g).Build();
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const auto graph, DecodeGraph());
  KVANT_ASSIGN_OR_RETURN(const auto engine, kvant::Engine::Create());
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(graph, {.require_fused = true}));
  std::cout << attention << "\n";
  const std::vector<int32_t> length{100, 37};
  std::vector<float> q(kBatch * kHeads * kRatio * kHeadSize), o(q.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.7f * i);
  // All values are (9 - 8) * 0.5; beyond each length they are something else.
  std::vector<uint8_t> k(kCodeBytes), v(kCodeBytes, 0x99);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<uint8_t>(i * 37);
  for (int token = 0; token < kBatch * kHeads * kCapacity; ++token) {
    if (token % kCapacity < length[token / (kHeads * kCapacity)]) continue;
    for (int i = 0; i < kTokenBytes; ++i) v[token * kTokenBytes + i] = 0xff;
  }
  const std::vector<float> scales(2 * kCodeBytes / kGroup, 0.5f);
  const std::vector<uint8_t> zeros(kCodeBytes / kGroup, 0x88);
  KVANT_RETURN_IF_ERROR(attention.Execute(kvant::Stream(engine),
                                          {{"q", In(q)},
                                           {"k", In(k)},
                                           {"k_scales", In(scales)},
                                           {"k_zeros", In(zeros)},
                                           {"v", In(v)},
                                           {"v_scales", In(scales)},
                                           {"v_zeros", In(zeros)},
                                           {"lengths", In(length)}},
                                          {{"o", {o.data(), o.size() * sizeof(float)}}}));
  for (const float x : o) {
    // Probabilities are rounded to 15 bits on their way to the values.
    if (std::abs(x - 0.5f) > 1e-4f) return absl::InternalError("read beyond a sequence's length");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
