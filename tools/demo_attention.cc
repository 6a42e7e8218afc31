#include "kvant/tools/demo_attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/safetensors.h"

namespace kvant {
namespace {

constexpr int kTimedRuns = 5;

absl::Status BadFile(const std::string& path, const std::string& why) {
  return MakeError(ErrorKind::kInvalidArguments, absl::StrCat(path, ": ", why));
}

absl::StatusOr<const SafeTensor*> Find(const SafeTensors& tensors, const std::string& path,
                                       const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return BadFile(path, absl::StrCat("no tensor '", name, "'"));
  if (found->second.type != kF16 || found->second.dims.size() != 3) {
    return BadFile(path, absl::StrCat("'", name, "' is not f16 [heads, tokens, head size]"));
  }
  return &found->second;
}

std::vector<float> ToFloats(const SafeTensor& tensor) {
  std::vector<float> values(tensor.data.size() / sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(LoadElement(kF16, tensor.data.data(), i));
  }
  return values;
}

absl::StatusOr<Layer> ReadLayer(const SafeTensors& tensors, const std::string& path, int number) {
  const std::string prefix = absl::StrCat("layer", number, ".");
  KVANT_ASSIGN_OR_RETURN(const SafeTensor* q, Find(tensors, path, prefix + "q"));
  KVANT_ASSIGN_OR_RETURN(const SafeTensor* k, Find(tensors, path, prefix + "k"));
  KVANT_ASSIGN_OR_RETURN(const SafeTensor* v, Find(tensors, path, prefix + "v"));
  const int64_t heads = k->dims[0], tokens = k->dims[1], head_size = k->dims[2];
  if (k->dims != v->dims || heads == 0 || tokens == 0 || head_size == 0 || q->dims[0] == 0 ||
      q->dims[0] % heads != 0 || q->dims[1] != tokens || q->dims[2] != head_size) {
    return BadFile(path, absl::StrCat("shapes of layer ", number, " do not go together: q ",
                                      DimsToString(q->dims), ", k ", DimsToString(k->dims), ", v ",
                                      DimsToString(v->dims)));
  }
  Layer layer;
  layer.number = number;
  layer.q = MakeTensor(kF16, {1, heads, q->dims[0] / heads, tokens, head_size});
  std::copy(q->data.begin(), q->data.end(), layer.q.data.data());
  layer.kv_dims = {1, heads, 1, tokens, head_size};
  layer.k = ToFloats(*k);
  layer.v = ToFloats(*v);
  return layer;
}

// The input `name` of the graph; dequantized if it is stored in codes.
Value Read(GraphBuilder& g, const std::string& name, const StoredTensor& stored) {
  const auto input = [&](const std::string& suffix, const LogicalTensor& desc) {
    return g.Input(name + suffix, desc.type, *desc.dims);
  };
  const Value data = input("", stored.data.desc);
  if (!stored.quantized()) return data;
  const Value scales = input("_scales", stored.scales.desc);
  const GraphBuilder::DequantizeOptions options{.group_shape = stored.group_shape};
  if (stored.zero_points.desc.type == kUndef) return g.DynamicDequantize(data, scales, options);
  return g.DynamicDequantize(data, scales, input("_zero_points", stored.zero_points.desc), options);
}

absl::StatusOr<Graph> AttentionGraph(const LogicalTensor& q, const StoredTensor& k,
                                     const StoredTensor& v) {
  GraphBuilder g;
  const Value queries = g.Input("q", q.type, *q.dims);
  Value scores = g.MatMul(queries, Read(g, "k", k), {.transpose_b = true, .type = kF32});
  scores = g.Divide(scores, g.Input("divisor", kF32, {}));
  scores = g.CausalMask(scores, g.Input("masked", kF32, {}));
  const Value probs = g.SoftMax(scores, {.type = q.type});
  g.Output("o", g.MatMul(probs, Read(g, "v", v), {.type = kF32}));
  return std::move(g).Build();
}

}  // namespace

absl::StatusOr<std::vector<Layer>> ReadLayers(const std::string& path) {
  KVANT_ASSIGN_OR_RETURN(const SafeTensors tensors, ReadSafeTensors(path));
  std::vector<int> numbers;
  for (const auto& [name, tensor] : tensors) {
    int number = 0;
    absl::string_view rest = name;
    if (absl::ConsumePrefix(&rest, "layer") && absl::ConsumeSuffix(&rest, ".q") &&
        absl::SimpleAtoi(rest, &number) && name == absl::StrCat("layer", number, ".q")) {
      numbers.push_back(number);
    }
  }
  if (numbers.empty()) return BadFile(path, "no tensors 'layer<number>.q'");
  std::sort(numbers.begin(), numbers.end());
  std::vector<Layer> layers;
  for (const int number : numbers) {
    KVANT_ASSIGN_OR_RETURN(Layer layer, ReadLayer(tensors, path, number));
    layers.push_back(std::move(layer));
    if (layers.back().q.desc.dims != layers.front().q.desc.dims ||
        layers.back().kv_dims != layers.front().kv_dims) {
      return BadFile(path, absl::StrCat("layer ", number, " has other shapes than layer ",
                                        layers.front().number));
    }
  }
  return layers;
}

absl::StatusOr<Attention> Attention::Create(const Engine& engine, const LogicalTensor& q,
                                            const StoredTensor& k, const StoredTensor& v,
                                            bool require_fused) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, AttentionGraph(q, k, v));
  KVANT_ASSIGN_OR_RETURN(const PartitionResult result, PartitionGraphExplained(graph));
  if (result.partitions.size() != 1) {
    std::string why = absl::StrCat("attention became ", result.partitions.size(), " partitions");
    for (const std::string& explanation : result.explanations) {
      absl::StrAppend(&why, "; ", explanation);
    }
    return MakeError(ErrorKind::kUnimplemented, why);
  }
  KVANT_ASSIGN_OR_RETURN(
      CompiledPartition compiled,
      engine.Compile(result.partitions.front(), {.require_fused = require_fused}));
  return Attention(std::move(compiled), Stream(engine));
}

absl::StatusOr<std::vector<float>> Attention::Run(const FilledTensor& q, const StoredTensor& k,
                                                  const StoredTensor& v, double* best_ms) const {
  const float divisor = std::sqrt(static_cast<float>(q.desc.dims->back()));
  const float masked = -std::numeric_limits<float>::infinity();
  const std::map<std::string, ConstTensor> by_name = {
      {"q", q.data},
      {"divisor", {&divisor, sizeof(divisor)}},
      {"masked", {&masked, sizeof(masked)}},
      {"k", k.data.data},
      {"k_scales", k.scales.data},
      {"k_zero_points", k.zero_points.data},
      {"v", v.data.data},
      {"v_scales", v.scales.data},
      {"v_zero_points", v.zero_points.data},
  };
  std::vector<ConstTensor> inputs;
  const Partition& partition = compiled_.partition();
  for (size_t port = 0; port < partition.inputs().size(); ++port) {
    inputs.push_back(by_name.at(partition.input(port).name));
  }
  std::vector<float> o(partition.output(0).elements());
  const Tensor output{.data = o.data(), .bytes = o.size() * sizeof(float)};

  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < (best_ms ? kTimedRuns : 1); ++run) {
    const auto start = std::chrono::steady_clock::now();
    KVANT_RETURN_IF_ERROR(compiled_.Execute(stream_, inputs, {output}));
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    best = std::min(best, ms.count());
  }
  if (best_ms) *best_ms = best;
  return o;
}

double RelativeRms(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace kvant
