// A paged cache as a server uses it: AppendPages writes what attention over LoadPages reads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/status.h"

namespace kvant::testing {
namespace {

using ::testing::HasSubstr;

// Tensors by name.
using Memory = std::map<std::string, std::vector<std::byte>>;

Memory MemoryOf(const Graph& graph) {
  Memory memory;
  for (const auto& ports : {graph.inputs(), graph.outputs()}) {
    for (const TensorId id : ports) {
      const LogicalTensor& tensor = graph.tensor(id);
      // Scales that nobody has written are NaN.
      memory[tensor.name].assign(tensor.memory_bytes(), std::byte{0xff});
    }
  }
  return memory;
}

absl::Status RunGraphOn(const Engine& engine, const Graph& graph, Memory& memory) {
  std::vector<ConstTensor> inputs;
  std::vector<Tensor> outputs;
  for (const TensorId id : graph.inputs()) {
    const auto& bytes = memory.at(graph.tensor(id).name);
    inputs.emplace_back(bytes.data(), bytes.size());
  }
  for (const TensorId id : graph.outputs()) {
    auto& bytes = memory.at(graph.tensor(id).name);
    outputs.push_back({bytes.data(), bytes.size()});
  }
  KVANT_ASSIGN_OR_RETURN(const CompiledGraph compiled, engine.Compile(graph));
  return compiled.Execute(Stream(engine), inputs, outputs);
}

void Put(Memory& memory, const std::string& name, DataType type,
         const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(type, memory.at(name).data(), static_cast<int64_t>(i), values[i]);
  }
}

// What a server does: the tokens of all sequences come packed, their slots are those that its page
// tables say, and attention reads through these. K has groups of 16 in 4 bits and is rotated, V has
// 8 bits by token in pages of [tokens, heads].
class ServingTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kRows = 3, kHeads = 2, kQueryHeads = 4, kSize = 32, kPageTokens = 16,
                           kPagesOfRow = 3, kPages = 11, kCapacity = kPageTokens * kPagesOfRow,
                           kPacked = 56;
  static constexpr int64_t kLengths[kRows] = {17, 0, 35};
  static constexpr int64_t kTable[kRows][kPagesOfRow] = {{7, 2, -1}, {-1, -1, -1}, {10, 0, 5}};

  ServingTest()
      : engine_(
            *Engine::Create({.device = *DeviceOfBackend(GetParam()), .backends = {GetParam()}})) {}

  static double Number(int64_t v, int64_t row, int64_t token, int64_t head, int64_t d) {
    const int64_t at = (((v * kRows + row) * kCapacity + token) * kHeads + head) * kSize + d;
    return std::sin(static_cast<double>(at * at % 9973)) * (d % 7 == 3 ? 20 : 1);
  }

  static GraphBuilder::QuantizeOptions KeyOptions() {
    return {.group_shape = {1, 1, 1, 16}, .type = kU4, .scale_type = kF16, .zero_point_type = kU4};
  }
  static GraphBuilder::QuantizeOptions ValueOptions() {
    return {.group_shape = {1, 1, 1, kSize}, .type = kS8, .scale_type = kF32};
  }

  static Graph Writing() {
    GraphBuilder g;
    const Value slots = g.Input("slots", kS64, {kPacked});
    const auto x = [&](const char* name) { return g.Input(name, kF32, {kPacked, kHeads, kSize}); };
    const GraphBuilder::PagedPool pool{kPages, kPageTokens};
    const auto k = g.AppendPages(g.Hadamard(x("k"), kSize), slots, pool, KeyOptions());
    const auto v = g.AppendPages(x("v"), slots, pool, ValueOptions(), /*token_axis=*/1);
    g.Output("k_codes", k.codes);
    g.Output("k_scales", k.scales);
    g.Output("k_zps", *k.zero_points);
    g.Output("v_codes", v.codes);
    g.Output("v_scales", v.scales);
    return std::move(g).Build().value();
  }

  static void Attend(GraphBuilder& g, Value k, Value v, Value lengths) {
    const Value q = g.Hadamard(g.Input("q", kF32, {kRows, kQueryHeads, 1, kSize}), kSize);
    g.Output("o", g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths}).first);
  }

  static Graph Paged() {
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {kRows});
    const Value table = g.Input("table", kS32, {kRows, kPagesOfRow});
    const Value k =
        g.DynamicDequantize(g.Input("k_codes", kU4, {kPages, kHeads, kPageTokens, kSize}),
                            g.Input("k_scales", kF16, {kPages, kHeads, kPageTokens, 2}),
                            g.Input("k_zps", kU4, {kPages, kHeads, kPageTokens, 2}),
                            {.group_shape = {1, 1, 1, 16}, .type = kF32});
    const Value v =
        g.DynamicDequantize(g.Input("v_codes", kS8, {kPages, kPageTokens, kHeads, kSize}),
                            g.Input("v_scales", kF32, {kPages, kPageTokens, kHeads, 1}),
                            {.group_shape = {1, 1, 1, kSize}, .type = kF32});
    Attend(g, g.LoadPages(k, table, lengths),
           g.Transpose(g.LoadPages(v, table, lengths, {.token_axis = 1}), {0, 2, 1, 3}), lengths);
    return std::move(g).Build().value();
  }

  // The same numbers by one DynamicQuantize, side by side.
  static Graph Storing() {
    GraphBuilder g;
    const auto x = [&](const char* name) {
      return g.Input(name, kF32, {kRows, kHeads, kCapacity, kSize});
    };
    const auto k = g.DynamicQuantize(g.Hadamard(x("k"), kSize), KeyOptions());
    const auto v = g.DynamicQuantize(x("v"), ValueOptions());
    g.Output("k_codes", k.codes);
    g.Output("k_scales", k.scales);
    g.Output("k_zps", *k.zero_points);
    g.Output("v_codes", v.codes);
    g.Output("v_scales", v.scales);
    return std::move(g).Build().value();
  }

  static Graph Contiguous() {
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {kRows});
    const Dims dims{kRows, kHeads, kCapacity, kSize};
    const Value k = g.DynamicDequantize(g.Input("k_codes", kU4, dims),
                                        g.Input("k_scales", kF16, {kRows, kHeads, kCapacity, 2}),
                                        g.Input("k_zps", kU4, {kRows, kHeads, kCapacity, 2}),
                                        {.group_shape = {1, 1, 1, 16}, .type = kF32});
    const Value v = g.DynamicDequantize(g.Input("v_codes", kS8, dims),
                                        g.Input("v_scales", kF32, {kRows, kHeads, kCapacity, 1}),
                                        {.group_shape = {1, 1, 1, kSize}, .type = kF32});
    Attend(g, g.LoadTokens(k, lengths), g.LoadTokens(v, lengths), lengths);
    return std::move(g).Build().value();
  }

  // Tokens [begin(row), end(row)) of all rows, and where they go.
  struct Batch {
    std::vector<double> k, v, slots;
  };
  template <typename Bound>
  static Batch Pack(Bound begin, Bound end) {
    Batch batch;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t t = begin(row); t < end(row); ++t) {
        batch.slots.push_back(
            static_cast<double>(kTable[row][t / kPageTokens] * kPageTokens + t % kPageTokens));
        for (int64_t i = 0; i < kHeads * kSize; ++i) {
          batch.k.push_back(Number(0, row, t, i / kSize, i % kSize));
          batch.v.push_back(Number(1, row, t, i / kSize, i % kSize));
        }
      }
    }
    batch.slots.resize(kPacked, -1);
    return batch;
  }

  const Engine engine_;
};

TEST_P(ServingTest, AttentionReadsWhatWasWritten) {
  const Graph writing = Writing(), paged = Paged(), storing = Storing(), contiguous = Contiguous();
  Memory pool = MemoryOf(writing), whole = MemoryOf(storing);
  pool.merge(MemoryOf(paged));
  whole.merge(MemoryOf(contiguous));
  // A prompt, then a token of each sequence that there is.
  using Bound = std::function<int64_t(int64_t)>;
  const Bound none = [](int64_t) { return 0; };
  const Bound last = [](int64_t row) { return std::max<int64_t>(0, kLengths[row] - 1); };
  const Bound all = [](int64_t row) { return kLengths[row]; };
  for (const Batch& batch : {Pack(last, all), Pack(none, last)}) {
    ASSERT_LE(batch.k.size(), kPacked * kHeads * kSize);
    Put(pool, "k", kF32, batch.k);
    Put(pool, "v", kF32, batch.v);
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      reinterpret_cast<int64_t*>(pool.at("slots").data())[i] = static_cast<int64_t>(batch.slots[i]);
    }
    const absl::Status written = RunGraphOn(engine_, writing, pool);
    ASSERT_TRUE(written.ok()) << written;
  }
  std::vector<double> numbers[2];
  for (int64_t i = 0; i < kRows * kHeads * kCapacity * kSize; ++i) {
    const int64_t token = i / kSize % kCapacity, head = i / kSize / kCapacity % kHeads;
    const int64_t row = i / kSize / kCapacity / kHeads;
    for (const int v : {0, 1}) numbers[v].push_back(Number(v, row, token, head, i % kSize));
  }
  Put(whole, "k", kF32, numbers[0]);
  Put(whole, "v", kF32, numbers[1]);
  ASSERT_TRUE(RunGraphOn(engine_, storing, whole).ok());

  for (Memory* memory : {&pool, &whole}) {
    std::vector<double> q;
    for (int64_t i = 0; i < kRows * kQueryHeads * kSize; ++i) q.push_back(std::cos(i * 3.7));
    Put(*memory, "q", kF32, q);
    Put(*memory, "lengths", kS32, {std::begin(kLengths), std::end(kLengths)});
    if (memory == &pool) {
      Put(*memory, "table", kS32, {&kTable[0][0], &kTable[0][0] + kRows * kPagesOfRow});
    }
    const absl::Status attended =
        RunGraphOn(engine_, memory == &pool ? paged : contiguous, *memory);
    ASSERT_TRUE(attended.ok()) << attended;
  }
  // The cpu's products are of codes of the probabilities of a tile, and tiles are not the same: off
  // by 1e-4 of the largest value, 20.
  const double tolerance = std::string(GetParam()) == "cpu" ? 2e-3 : 1e-5;
  double most = 0;
  for (int64_t i = 0; i < kRows * kQueryHeads * kSize; ++i) {
    const double got = LoadElement(kF32, pool.at("o").data(), i);
    const double want = LoadElement(kF32, whole.at("o").data(), i);
    ASSERT_NEAR(got, want, tolerance) << "element " << i;
    most = std::max(most, std::abs(want));
  }
  EXPECT_GT(most, 0.5);
}

// The lower half of such a slot would be one of the pool.
TEST_P(ServingTest, SlotsOf64BitsAreRead) {
  const Graph writing = Writing();
  Memory pool = MemoryOf(writing);
  Put(pool, "k", kF32, std::vector<double>(kPacked * kHeads * kSize, 1));
  Put(pool, "v", kF32, std::vector<double>(kPacked * kHeads * kSize, 1));
  reinterpret_cast<int64_t*>(pool.at("slots").data())[7] = (int64_t{1} << 32) + 3;
  const Memory before = pool;
  const absl::Status status = RunGraphOn(engine_, writing, pool);
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("slot 4294967299 of token 7 is beyond the 176 of the pool, in pages of 16"));
  EXPECT_TRUE(pool == before);
}

INSTANTIATE_TEST_SUITE_P(Backends, ServingTest, ::testing::Values("oracle", "cpu", "cuda_simt"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kvant::testing
