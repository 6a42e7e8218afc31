#include "kvant/bench/scaling/attention_case.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "kvant/graph/builder.h"
#include "kvant/kernels/cpu/attention_args.h"

namespace kvant {
namespace {

constexpr int64_t kPage = 64;

int64_t PagesOf(int64_t tokens) { return cpu::CeilDiv(tokens, kPage); }

int64_t Longest(const AttentionCase& of) {
  return *std::max_element(of.lengths.begin(), of.lengths.end());
}

void FillBytes(Buffer& buffer, std::mt19937_64& random) {
  for (size_t at = 0; at < buffer.bytes(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(buffer.data() + at, &word, std::min(sizeof(word), buffer.bytes() - at));
  }
}

void FillFloats(Buffer& buffer, float low, float high, std::mt19937_64& random) {
  std::uniform_real_distribution<float> values(low, high);
  auto* const data = reinterpret_cast<float*>(buffer.data());
  for (size_t i = 0; i < buffer.bytes() / sizeof(float); ++i) data[i] = values(random);
}

}  // namespace

absl::StatusOr<Graph> MakeCaseGraph(const AttentionCase& of) {
  GraphBuilder g({.fpmath = of.bf16 ? FpMath::kBF16 : FpMath::kStrict, .apply_to_int = true});
  const auto rows = static_cast<int64_t>(of.lengths.size());
  const bool paged = rows > 1;
  int64_t pages = 0;
  for (int64_t tokens : of.lengths) pages += PagesOf(tokens);
  const Dims dims{paged ? pages : 1, of.kv_heads, 1, paged ? kPage : of.lengths[0], of.head_size};
  Dims groups = dims;
  groups.back() /= of.group;
  std::optional<Value> table, lengths;
  if (paged) {
    table = g.Input("pages", kS32, {rows, PagesOf(Longest(of))});
    lengths = g.Input("lengths", kS32, {rows});
  }
  const auto input = [&](const std::string& name, DataType type, const Dims& as) {
    if (!of.by_tokens) return g.Input(name, type, as);
    const int64_t token = as[1] * as[4];
    return g.Input(name, type, as, Dims{as[3] * token, as[4], as[4], token, 1});
  };
  const auto cache = [&](const std::string& name) {
    const Value codes = input(name, of.type, dims);
    const Value scales = input(name + "_scales", kF32, groups);
    const GraphBuilder::DequantizeOptions how{.group_shape = {1, 1, 1, 1, of.group}};
    const Value values =
        of.zero_points
            ? g.DynamicDequantize(codes, scales, input(name + "_zero_points", of.type, groups), how)
            : g.DynamicDequantize(codes, scales, how);
    return paged ? g.LoadPages(values, *table, *lengths) : values;
  };
  const Value q = g.Input("q", kF32, {rows, of.kv_heads, of.ratio, of.queries, of.head_size});
  const Value scores = g.MatMul(q, cache("k"), {.transpose_b = true});
  const Value probs = g.SoftMax(g.Divide(scores, g.Scalar(11.3f)), {.lengths = lengths});
  g.Output("o", g.MatMul(probs, cache("v")));
  return std::move(g).Build();
}

BufferMap MakeCaseInputs(const AttentionCase& of, const Graph& graph) {
  std::mt19937_64 random(1);
  BufferMap inputs;
  for (TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    const std::string& name = tensor.name;
    Buffer buffer(static_cast<size_t>(tensor.memory_bytes()));
    auto* const integers = reinterpret_cast<int32_t*>(buffer.data());
    if (name == "lengths") {
      std::copy(of.lengths.begin(), of.lengths.end(), integers);
    } else if (name == "pages") {
      const int64_t width = PagesOf(Longest(of));
      int32_t next = 0;
      for (size_t row = 0; row < of.lengths.size(); ++row) {
        const int64_t own = PagesOf(of.lengths[row]);
        std::iota(integers + row * width, integers + row * width + own, next);
        next += static_cast<int32_t>(own);
      }
    } else if (name == "q") {
      FillFloats(buffer, -1, 1, random);
    } else if (name.ends_with("_scales")) {
      FillFloats(buffer, 0.01f, 0.03f, random);
    } else if (name.ends_with("_zero_points")) {
      std::memset(buffer.data(), 0x88, buffer.bytes());
    } else {
      FillBytes(buffer, random);
    }
    inputs.emplace(id, std::move(buffer));
  }
  return inputs;
}

}  // namespace kvant
