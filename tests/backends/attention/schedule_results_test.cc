// Results of an execution are the same bits however its units are ordered and handed out.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/kernels/cpu/attention_args.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

TEST(CpuSchedule, ResultsAreTheSameForAnyNumberOfThreads) {
  const Format codes{.type = kU4, .group = {1, 1, 1, 1, 8}, .scales = kF32, .zero_points = kU4};
  for (int64_t q_len : {1, 20}) {
    Case c =
        Plain({.b0 = 1, .b1 = 3, .ratio = 2, .q_len = q_len, .kv_len = 40000, .d = 16, .dv = 16},
              codes, codes);
    std::vector<char> first;
    for (int threads : {1, 2, 3, 16, 64, 256}) {
      ASSERT_TRUE(c.Run(HighestKernels(), threads).ok());
      const char* data = static_cast<const char*>(c.outputs[0].data());
      if (first.empty()) first.assign(data, data + c.outputs[0].bytes());
      EXPECT_EQ(std::memcmp(data, first.data(), first.size()), 0) << threads << " threads";
    }
    c.CompareWithOracle(1e-3);
  }
}

// Nor do results depend on what scratch held before.
TEST(CpuSchedule, ResultsAreTheSameWhateverScratchHolds) {
  const Format formats[] = {
      {},
      {.type = kBF16},
      {.type = kU8, .group = {1, 1, 1, 1, 16}, .scales = kF32, .zero_points = kU8},
      {.type = kU8, .group = {1, 1, 1, 1, 16}, .scales = kF32, .zero_points = kS32},
      {.type = kU4, .group = {1, 1, 1, 10, 16}, .scales = kF32, .zero_points = kF32},
      {.type = kU4, .group = {1, 1, 1, 1, 0}, .scales = kF16, .zero_points = kU4},
      {.type = kU8, .group = {1, 1, 1, 0, 1}, .scales = kF32, .zero_points = kF32},
      {.type = kF8E4M3, .group = {1, 1, 1, 1, 16}, .scales = kF32},
      {.type = kF8E4M3, .group = {1, 1, 1, 0, 1}, .scales = kF32},
      {.type = kU8}};  // with constant scales, below
  for (const Format& stored : formats) {
    for (const bool channel_major : {false, true}) {
      for (const bool by_channel : {false, true}) {
        for (const int64_t kv_len : {30, 100, 330}) {
          for (const int64_t q_len : {1, 40}) {
            Format format = stored;
            format.parameters_by_channel = by_channel;
            if (channel_major) format.order = Format::Order::kChannelMajor;
            // More groups than are turned in registers where they are of 16.
            const int64_t d = q_len == 1 ? 144 : 48;
            Case c = Plain(
                {.b0 = 1, .b1 = 2, .ratio = 2, .q_len = q_len, .kv_len = kv_len, .d = d, .dv = 48},
                format, stored);
            c.spec.fpmath = FpMath::kBF16;
            if (stored.type == kU8 && stored.scales == kUndef) {
              Quantization whole;
              whole.static_scales = {0.01f};
              whole.static_zps = {120};
              c.spec.q = c.AddDense(kU8, {1, 2, 2, q_len, d},
                                    [&](const Dims5&) { return std::floor(c.Random(90, 150)); });
              c.spec.q_quantization = c.spec.k[0].quantization = c.spec.v[0].quantization = whole;
              c.spec.probs_quantization = FakeQuantize{kU8, 1.f / 255, 0};
            }
            std::vector<char> first;
            for (const int held : {0, 0x3f, 0x7f, 0xff}) {
              const auto executable = *CompileAttention(c.spec, HighestKernels());
              ThreadExecutor executor(1);
              std::vector<const void*> in;
              for (const GuardedBuffer& buffer : c.inputs) in.push_back(buffer.data());
              void* const out = c.outputs[0].data();
              const GuardedBuffer scratch(executable->scratch_bytes(1));
              std::memset(scratch.data(), held, scratch.bytes());
              auto* const room = static_cast<std::byte*>(scratch.data());
              ASSERT_TRUE(executable->Run({executor, in, {&out, 1}, room}).ok());
              const char* data = static_cast<const char*>(out);
              if (first.empty()) first.assign(data, data + c.outputs[0].bytes());
              EXPECT_EQ(std::memcmp(data, first.data(), first.size()), 0)
                  << DataTypeName(format.type) << channel_major << by_channel << " " << kv_len
                  << " " << q_len << " " << held;
            }
          }
        }
      }
    }
  }
}

// One thread that stands for several, in an order of its own.
class ShuffledExecutor : public Executor {
 public:
  explicit ShuffledExecutor(uint32_t seed, int slots = 2) : slots_(slots), random_(seed) {}
  int max_concurrency() const override { return slots_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (int64_t i : order) body(i, static_cast<int>(random_() % static_cast<uint32_t>(slots_)));
  }

 private:
  const int slots_;
  std::mt19937 random_;
};

// Chunks are joined by whoever comes second, of tiles of 2 to 32 chunks and 2 to 40 rows. Of many
// heads only those of one query take turns.
void CheckAnyOrder(const Format& format, int64_t heads) {
  for (int64_t kv_len : {257, 700, 1100, 1500, 2817, 5000, 10000}) {
    for (int64_t q_len : {1, 20}) {
      if (heads > 3 && q_len > 1) continue;
      SCOPED_TRACE(testing::Message() << kv_len << " tokens, " << q_len << " queries");
      Case c = Plain(
          {.b0 = 1, .b1 = heads, .ratio = 2, .q_len = q_len, .kv_len = kv_len, .d = 16, .dv = 24},
          format, format);
      c.AddStats();
      std::vector<std::vector<char>> first;
      for (uint32_t seed = 0; seed < 8; ++seed) {
        ShuffledExecutor executor(seed);
        ASSERT_TRUE(c.Run(HighestKernels(), executor).ok());
        for (size_t o = 0; o < c.outputs.size(); ++o) {
          const char* data = static_cast<const char*>(c.outputs[o].data());
          if (seed == 0) first.emplace_back(data, data + c.outputs[o].bytes());
          EXPECT_EQ(std::memcmp(data, first[o].data(), first[o].size()), 0) << "seed " << seed;
        }
      }
      c.CompareWithOracle(IsInteger(format.type) ? 1e-3 : 2e-5);
    }
  }
}

TEST(CpuSchedule, ResultsAreTheSameInAnyOrderOfUnits) {
  CheckAnyOrder({}, 2);
  for (int64_t heads : {3, 16}) {
    CheckAnyOrder({.type = kF16, .order = Format::Order::kByToken}, heads);
    CheckAnyOrder(
        {.type = kU8, .group = {1, 1, 1, 1, 0}, .scales = kF32, .order = Format::Order::kByToken},
        heads);
  }
}

// Of pages as well, whose table has nothing behind the last that a row needs. Units ask for the
// first tile of the unit after them, which is another head's; heads of a token side by side ask for
// one another's rows.
enum class KeyFormat { kU4, kF8, kU8ByChannel, kF8ByChannel, kF16 };  // the last two: values, too
void CheckPagesInAnyOrder(int64_t heads, bool token_major, int64_t page_tokens,
                          KeyFormat format = KeyFormat::kU4, int32_t prompt = 0) {
  SCOPED_TRACE(testing::Message() << heads << " heads, pages of " << page_tokens
                                  << (token_major ? ", token-major" : "") << ", format "
                                  << static_cast<int>(format));
  constexpr int64_t kRows = 4, kSize = 32, kMost = 3000;
  const std::vector<int32_t> lengths = {3000, 1, 0, 1999};
  const int64_t pages_of_row = CeilDiv(kMost, page_tokens), all_pages = 6400 / page_tokens;
  GraphBuilder g;
  const Value length = g.Input("lengths", kS32, {kRows});
  const Value table = g.Input("table", kS32, {kRows, pages_of_row});
  const auto pool = [&](const std::string& array, DataType type, int64_t row) {
    return g.Input(array, type, {all_pages, heads, page_tokens, row},
                   token_major ? Dims{heads * page_tokens * row, row, heads * row, 1}
                               : Dims{heads * page_tokens * row, page_tokens * row, row, 1});
  };
  const auto load = [&](const std::string& name, DataType type) {
    if (type == kF16) return g.LoadPages(g.TypeCast(pool(name, type, kSize), kF32), table, length);
    const Value codes = pool(name, type, kSize), scales = pool(name + "_scales", kF32, 2);
    return g.LoadPages(
        g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, 16}, .type = kF32}), table,
        length);
  };
  const auto load_by_channel = [&](const std::string& name, DataType type) {
    const Dims of_page = {all_pages, heads, 1, kSize};
    const Value codes = pool(name, type, kSize);
    const Value scales = g.Input(name + "_scales", kF32, of_page);
    const GraphBuilder::DequantizeOptions how{.group_shape = {1, 1, page_tokens, 1}, .type = kF32};
    return g.LoadPages(
        type == kU8 ? g.DynamicDequantize(codes, scales, g.Input("zero_points", kU8, of_page), how)
                    : g.DynamicDequantize(codes, scales, how),
        table, length);
  };
  // With a prompt, of the last row, queries are packed.
  const std::vector<int32_t> offsets = {0, 1, 2, 3, 3 + prompt};
  const int64_t queries = prompt > 0 ? offsets[kRows] : kRows;
  const Value q =
      g.Input("q", kF32, prompt > 0 ? Dims{queries, heads, kSize} : Dims{kRows, heads, 1, kSize});
  const auto load_format = [&](const std::string& name) {
    switch (format) {
      case KeyFormat::kU8ByChannel:
        return load_by_channel(name, kU8);
      case KeyFormat::kF8ByChannel:
        return load_by_channel(name, kF8E4M3);
      case KeyFormat::kF8:
        return load(name, kF8E4M3);
      case KeyFormat::kF16:
        return load(name, kF16);
      case KeyFormat::kU4:
        break;
    }
    return load(name, kU4);
  };
  const bool both = format == KeyFormat::kF8ByChannel || format == KeyFormat::kF16;
  const Value k = load_format("k"), v = both ? load_format("v") : load("v", kU4);
  GraphBuilder::AttentionOptions options{.kv_lengths = length};
  if (prompt > 0) options.query_offsets = g.Input("offsets", kS32, {kRows + 1});
  g.Output("o", g.ScaledDotProductAttention(q, k, v, options).first);
  const Graph graph = *std::move(g).Build();

  std::mt19937 random(1);
  std::vector<std::vector<char>> memory;
  for (const TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    std::vector<char>& bytes = memory.emplace_back(static_cast<size_t>(tensor.memory_bytes()));
    if (tensor.type == kS32) continue;
    std::uniform_real_distribution<float> numbers(0.1f, 1.f);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      double value = static_cast<double>(random() % 16);
      if (tensor.type == kF32 || tensor.type == kF16) value = numbers(random);
      // The products take what rounding queries lost as well from a page's second tile on.
      const int64_t token = i / kSize / (token_major ? heads : 1) % page_tokens;
      if (tensor.name == "zero_points" || (tensor.type == kU8 && token < 64)) {
        value = static_cast<double>(100 + random() % 50);
      } else if (tensor.type == kU8) {
        value = static_cast<double>(random() % 256);
      }
      StoreElement(tensor.type, bytes.data(), i, value);
    }
  }
  const auto of = [&](const std::string& name) -> std::vector<char>& {
    for (size_t i = 0; i < memory.size(); ++i) {
      if (graph.tensor(graph.inputs()[i]).name == name) return memory[i];
    }
    ADD_FAILURE() << name;
    return memory[0];
  };
  std::memcpy(of("lengths").data(), lengths.data(), lengths.size() * 4);
  if (prompt > 0) std::memcpy(of("offsets").data(), offsets.data(), offsets.size() * 4);
  const std::vector<int32_t> pages =
      PagesInNoOrder(lengths, page_tokens, pages_of_row, all_pages, random);
  std::memcpy(of("table").data(), pages.data(), pages.size() * 4);

  const auto run = [&](const std::string& backend, std::shared_ptr<Executor> executor) {
    const Engine engine = *Engine::Create({.backends = {backend}, .executor = std::move(executor)});
    const CompiledGraph compiled = *engine.Compile(graph);
    std::vector<ConstTensor> inputs;
    for (const std::vector<char>& bytes : memory) inputs.emplace_back(bytes.data(), bytes.size());
    std::vector<float> out(static_cast<size_t>(queries * heads * kSize), -1.f);
    const Tensor outputs[] = {{out.data(), out.size() * sizeof(float)}};
    EXPECT_TRUE(compiled.Execute(Stream(engine), inputs, outputs).ok());
    return out;
  };
  const std::vector<float> oracle = run("oracle", nullptr);
  std::vector<float> first;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const int slots = std::array{2, 3, 9, 100}[seed % 4];
    const std::vector<float> out = run("cpu", std::make_shared<ShuffledExecutor>(seed, slots));
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << "seed " << seed;
  }
  for (size_t i = 0; i < oracle.size(); ++i) ASSERT_NEAR(first[i], oracle[i], 2e-3) << i;
}

TEST(CpuSchedule, ResultsInPagesAreTheSameInAnyOrderOfUnits) {
  for (int64_t heads : {1, 3, 8, 16, 20}) {
    for (int64_t page_tokens : {16, 48, 64}) {
      for (bool token_major : {false, true}) CheckPagesInAnyOrder(heads, token_major, page_tokens);
    }
  }
  for (bool token_major : {false, true}) {
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kF8);
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kU4, /*prompt=*/200);
    CheckPagesInAnyOrder(8, token_major, 128, KeyFormat::kU8ByChannel);
    CheckPagesInAnyOrder(8, token_major, 16, KeyFormat::kF16, /*prompt=*/200);
    CheckPagesInAnyOrder(8, token_major, 48, KeyFormat::kF8ByChannel, /*prompt=*/200);
    CheckPagesInAnyOrder(16, token_major, 48, KeyFormat::kF16);
  }
}

}  // namespace
}  // namespace kvant::cpu
