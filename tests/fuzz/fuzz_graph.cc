// Any text: as JSON to a graph, through the partitioner, onto the oracle, and onto
// the fused cpu backend where that takes it; both must agree. Nothing may crash,
// leak or hang.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/backends/engine.h"
#include "kvant/graph/json.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

// Work is bounded by what one input may ask for.
constexpr size_t kMaxBytes = 1 << 16;
constexpr size_t kMaxOps = 64;
constexpr int64_t kMaxElements = 4096;
constexpr int64_t kMaxProducts = 1 << 18;

// Small values of both signs; small enough that no sum overflows.
std::vector<uint64_t> MakeInput(const LogicalTensor& tensor) {
  std::vector<uint64_t> words(static_cast<size_t>(tensor.memory_bytes()) / 8 + 1);
  const int64_t span = tensor.span_elements();
  for (int64_t i = 0; i < span; ++i) {
    const double value = IsFloat(tensor.type) ? static_cast<double>(i * 7 % 11 - 4) / 4
                                              : static_cast<double>(i * 5 % 7 - 2);
    StoreElement(tensor.type, words.data(), i, value);
  }
  return words;
}

bool Small(const LogicalTensor& tensor) {
  return tensor.has_shape() && ValidateTensor(tensor).ok() && tensor.type != kUndef &&
         tensor.span_elements() <= kMaxElements && tensor.elements() <= kMaxElements;
}

// Every tensor is small, and so is the work on any pair of them.
bool Affordable(const Partition& partition) {
  for (const Op& op : partition.ops().ops()) {
    int64_t products = 1;
    for (const TensorId id : op.inputs) {
      const LogicalTensor& tensor = partition.ops().tensor(id);
      if (!Small(tensor)) return false;
      products = std::max(products, tensor.elements());
    }
    for (const TensorId id : op.outputs) {
      const LogicalTensor& tensor = partition.ops().tensor(id);
      if (!Small(tensor)) return false;
      if (products * tensor.elements() > kMaxProducts) return false;
    }
  }
  return true;
}

// Empty when the backend does not take the partition or refuses to run it.
std::vector<std::vector<uint64_t>> Run(const Engine& engine, const Partition& partition) {
  const absl::StatusOr<CompiledPartition> compiled = engine.Compile(partition);
  if (!compiled.ok()) return {};
  const Partition& known = compiled->partition();
  std::vector<std::vector<uint64_t>> inputs, outputs;
  std::vector<ConstTensor> in;
  std::vector<Tensor> out;
  for (size_t i = 0; i < known.inputs().size(); ++i) {
    inputs.push_back(MakeInput(known.input(static_cast<int>(i))));
  }
  for (size_t i = 0; i < known.outputs().size(); ++i) {
    const auto bytes = static_cast<size_t>(known.output(static_cast<int>(i)).memory_bytes());
    outputs.emplace_back(bytes / 8 + 1);
  }
  for (std::vector<uint64_t>& m : inputs) in.emplace_back(m.data(), m.size() * 8);
  for (std::vector<uint64_t>& m : outputs) out.push_back({m.data(), m.size() * 8});
  if (!compiled->Execute(Stream(engine), in, out).ok()) return {};
  return outputs;
}

// Both finite and close, or both not. Codes are off by what rounding may do.
bool Agree(DataType type, double a, double b) {
  if (!std::isfinite(a) || !std::isfinite(b)) return std::isnan(a) == std::isnan(b);
  const double tolerance = IsInteger(type) ? 1 : BitsOf(type) <= 8 ? 0.26 : 0.02;
  return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(a));
}

// Values beyond this lose f32 to cancellation, which no comparison survives.
bool WellConditioned(const LogicalTensor& tensor, const std::vector<uint64_t>& words) {
  for (int64_t i = 0; i < tensor.span_elements(); ++i) {
    const double value = LoadElement(tensor.type, words.data(), i);
    if (!std::isfinite(value) || std::abs(value) > 1e3) return false;
  }
  return true;
}

void CompareOutputs(const Partition& partition, const std::vector<std::vector<uint64_t>>& expected,
                    const std::vector<std::vector<uint64_t>>& got) {
  for (size_t o = 0; o < expected.size(); ++o) {
    const LogicalTensor& tensor = partition.output(static_cast<int>(o));
    if (!WellConditioned(tensor, expected[o])) continue;
    for (int64_t i = 0; i < tensor.span_elements(); ++i) {
      const double a = LoadElement(tensor.type, expected[o].data(), i);
      const double b = LoadElement(tensor.type, got[o].data(), i);
      if (Agree(tensor.type, a, b)) continue;
      std::fprintf(stderr, "%s: output %zu, element %lld: oracle %g, cpu %g\n",
                   partition.pattern().c_str(), o, static_cast<long long>(i), a, b);
      std::abort();
    }
  }
}

const Engine& EngineOf(const char* backend) {
  static const Engine* const oracle =
      new Engine(*Engine::Create({.backends = {"oracle"}, .executor = MakeSerialExecutor()}));
  static const Engine* const cpu =
      new Engine(*Engine::Create({.backends = {"cpu"}, .executor = MakeSerialExecutor()}));
  return std::string_view(backend) == "cpu" ? *cpu : *oracle;
}

void FuzzGraph(std::string_view text) {
  absl::StatusOr<Graph> graph = GraphFromJson(text, kMaxBytes);
  if (!graph.ok() || graph->ops().size() > kMaxOps) return;
  // Written and read again it is still a graph.
  if (!GraphFromJson(GraphToJson(*graph)).ok()) std::abort();
  if (!InferShapes(*graph).ok()) return;
  PartitionGraph(*graph, {.grammar = PartitionOptions::Grammar::kOneDnn}).IgnoreError();
  const absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(*graph);
  if (!partitions.ok()) return;
  for (const Partition& partition : *partitions) {
    if (const AttentionSpec* spec = partition.attention()) (void)spec->ToString();
    if (!Affordable(partition)) continue;
    const auto expected = Run(EngineOf("oracle"), partition);
    const auto got = Run(EngineOf("cpu"), partition);
    if (!expected.empty() && !got.empty()) CompareOutputs(partition, expected, got);
  }
}

// Another number in the place of one: what graphs differ by most, and what random bytes seldom hit.
std::string WithOtherNumber(std::string_view text, unsigned seed) {
  constexpr int kNumbers[] = {-1, 0,  1,  2,  3,   4,   5,   6,   7,   8,   9,
                              12, 15, 16, 17, 20,  24,  31,  32,  33,  48,  63,
                              64, 65, 80, 96, 127, 128, 129, 256, 512, 1024};
  std::minstd_rand random(seed);
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  std::vector<size_t> begins;
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_digit(text[i]) && (i == 0 || !is_digit(text[i - 1]))) begins.push_back(i);
  }
  if (begins.empty()) return std::string(text);
  const size_t begin = begins[random() % begins.size()];
  size_t end = begin;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string out(text.substr(0, begin));
  out += std::to_string(kNumbers[random() % std::size(kNumbers)]);
  out += text.substr(end);
  return out;
}

}  // namespace
}  // namespace kvant

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string text =
      kvant::WithOtherNumber({reinterpret_cast<const char*>(data), size}, seed / 2);
  if (text.size() > max_size) return size;
  std::memcpy(data, text.data(), text.size());
  return text.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvant::FuzzGraph(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
