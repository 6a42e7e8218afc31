// Scales and zero points of codes in every place that they may have: by token, of a page or of all
// tokens, of one group or many, in bytes or less, in pages and without, on every set of kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/kernels/cpu/code_layout.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::cpu {
namespace {

// Tokens that share a parameter.
enum class Whose { kToken, kPage, kAll };

struct Stored {
  DataType type = kU4;
  int64_t size = 48, group = 16;  // of a head, and along it
  DataType scales = kF16, zero_points = kUndef;
  Whose whose = Whose::kToken;
};

std::string NameOf(const Stored& of) {
  const char* const names[] = {"token", "page", "all"};
  return std::string(DataTypeName(of.type)) + " " + std::to_string(of.size) + " in groups of " +
         std::to_string(of.group) + ", " + std::string(DataTypeName(of.scales)) + " " +
         std::string(DataTypeName(of.zero_points)) + ", by " + names[static_cast<int>(of.whose)];
}

// Any number of an integer type of so many bits, with the sign of `type` or without.
double Whole(DataType type, int bits, std::mt19937& random) {
  const int64_t span = int64_t{1} << bits;
  return static_cast<double>(static_cast<int64_t>(random()) % span -
                             (LowestOf(type) < 0 ? span / 2 : 0));
}

std::vector<Stored> ManyStored() {
  std::vector<Stored> all;
  // Groups of a token: those that are turned in registers, one more, the most that have addresses,
  // and one more.
  for (const int64_t groups : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17}) {
    for (const DataType zero_points : {kUndef, kU4, kU8, kF16}) {
      all.push_back({.size = groups * 16, .zero_points = zero_points});
    }
    all.push_back({.type = kS4, .size = groups * 16, .scales = kF32, .zero_points = kS4});
    all.push_back({.type = kS8, .size = groups * 16, .scales = kBF16, .zero_points = kS8});
    all.push_back({.type = kF8E4M3, .size = groups * 16});
  }
  for (const Whose whose : {Whose::kPage, Whose::kAll}) {
    for (const int64_t group : {16, 48}) {
      all.push_back({.group = group, .zero_points = kU4, .whose = whose});
      all.push_back({.group = group, .zero_points = kU8, .whose = whose});
      all.push_back({.type = kS8, .group = group, .scales = kF32, .whose = whose});
      all.push_back({.type = kF8E4M3, .group = group, .scales = kF32, .whose = whose});
    }
  }
  return all;
}

// Attention of one query per sequence over two pools of pages, whose rows end where memory does.
class Paged {
 public:
  Paged(const Stored& of, int64_t heads, int64_t page_tokens, bool by_tokens)
      : of_(of), heads_(heads), page_tokens_(page_tokens), by_tokens_(by_tokens) {
    Build();
    Fill();
  }

  void Check() {
    const std::vector<float> oracle = RunOracle();
    const Partition partition = PartitionGraph(*graph_)->at(0);
    for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
      const auto executable = CompileAttention(*partition.attention(), *kernels);
      ASSERT_TRUE(executable.ok()) << executable.status();
      constexpr int kThreads = 2;
      ThreadExecutor executor(kThreads);
      std::vector<const void*> in;
      for (const TensorId id : partition.inputs()) in.push_back(memory_[PortOf(id)].data());
      std::vector<float> out(oracle.size(), -1.f);
      void* const outputs[] = {out.data()};
      const GuardedBuffer scratch((*executable)->scratch_bytes(kThreads));
      std::memset(scratch.data(), 0xFF, scratch.bytes());
      auto* const room = static_cast<std::byte*>(scratch.data());
      ASSERT_TRUE((*executable)->Run({executor, in, outputs, room}).ok());
      for (size_t at = 0; at < out.size(); ++at) {
        ASSERT_NEAR(out[at], oracle[at], 2e-3) << (*executable)->kernel() << " at " << at;
      }
    }
  }

 private:
  static constexpr int64_t kRows = 3;
  const std::vector<int32_t> lengths_ = {270, 0, 70};

  Value Pool(GraphBuilder& g, const std::string& name, DataType type, int64_t tokens, int64_t row) {
    const int64_t page = heads_ * tokens * row;
    return g.Input(
        name, type, {pages_, heads_, tokens, row},
        by_tokens_ ? Dims{page, row, heads_ * row, 1} : Dims{page, tokens * row, row, 1});
  }
  Value Load(GraphBuilder& g, const std::string& name, Value table, Value lengths) {
    const int64_t groups = of_.size / of_.group;
    const int64_t shared = of_.whose == Whose::kToken ? 1 : page_tokens_;
    const Value codes = Pool(g, name, of_.type, page_tokens_, of_.size);
    const auto parameter = [&](const std::string& of, DataType type) {
      if (of_.whose != Whose::kAll) return Pool(g, of, type, page_tokens_ / shared, groups);
      return g.Input(of, type, {1, heads_, 1, groups});
    };
    const GraphBuilder::DequantizeOptions how{
        .group_shape = {of_.whose == Whose::kAll ? pages_ : 1, 1, shared, of_.group}, .type = kF32};
    const Value scales = parameter(name + "_scales", of_.scales);
    return g.LoadPages(
        of_.zero_points == kUndef
            ? g.DynamicDequantize(codes, scales, how)
            : g.DynamicDequantize(codes, scales, parameter(name + "_points", of_.zero_points), how),
        table, lengths);
  }
  void Build() {
    const int64_t of_row = CeilDiv(lengths_[0], page_tokens_);
    pages_ = 0;
    for (const int32_t length : lengths_) pages_ += CeilDiv(length, page_tokens_);
    GraphBuilder g;
    const Value lengths = g.Input("lengths", kS32, {kRows});
    const Value table = g.Input("table", kS32, {kRows, of_row});
    const Value q = g.Input("q", kF32, {kRows, 2 * heads_, 1, of_.size});
    const Value k = Load(g, "k", table, lengths), v = Load(g, "v", table, lengths);
    g.Output("o", g.ScaledDotProductAttention(q, k, v, {.kv_lengths = lengths}).first);
    graph_ = *std::move(g).Build();
  }
  size_t PortOf(TensorId id) const {
    const auto inputs = graph_->inputs();
    return static_cast<size_t>(std::find(inputs.begin(), inputs.end(), id) - inputs.begin());
  }
  void Fill() {
    std::mt19937 random(1);
    std::uniform_real_distribution<double> numbers(0.5, 1.5);
    for (const TensorId id : graph_->inputs()) {
      const LogicalTensor& tensor = graph_->tensor(id);
      GuardedBuffer& buffer = memory_.emplace_back(static_cast<size_t>(tensor.memory_bytes()));
      if (tensor.name == "lengths") {
        std::memcpy(buffer.data(), lengths_.data(), buffer.bytes());
        continue;
      }
      if (tensor.name == "table") {
        const std::vector<int32_t> table = PagesInNoOrder(
            lengths_, page_tokens_, CeilDiv(lengths_[0], page_tokens_), pages_, random);
        std::memcpy(buffer.data(), table.data(), buffer.bytes());
        continue;
      }
      const double unit = BitsOf(of_.type) == 4 ? 0.1 : 0.01;
      for (int64_t i = 0; i < tensor.elements(); ++i) {
        const bool points = tensor.name.ends_with("_points");
        double value = numbers(random) * (tensor.name == "q" ? 0.3 : unit);
        if (tensor.name == "k" || tensor.name == "v") {
          value = IsInteger(tensor.type) ? Whole(tensor.type, BitsOf(tensor.type), random)
                                         : numbers(random) * (random() % 2 == 0 ? 60 : -60);
        } else if (points) {
          value = IsInteger(tensor.type)
                      ? Whole(tensor.type, std::min(BitsOf(tensor.type), BitsOf(of_.type)), random)
                      : numbers(random) * 0.3;
        }
        StoreElement(tensor.type, buffer.data(), i, value);
      }
    }
  }
  std::vector<float> RunOracle() const {
    const Engine engine = *Engine::Create({.backends = {"oracle"}});
    const CompiledGraph compiled = *engine.Compile(*graph_);
    std::vector<ConstTensor> inputs;
    for (const GuardedBuffer& buffer : memory_) inputs.emplace_back(buffer.data(), buffer.bytes());
    std::vector<float> out(static_cast<size_t>(kRows * 2 * heads_ * of_.size));
    const Tensor outputs[] = {{out.data(), out.size() * sizeof(float)}};
    EXPECT_TRUE(compiled.Execute(Stream(engine), inputs, outputs).ok());
    return out;
  }

  const Stored of_;
  const int64_t heads_, page_tokens_;
  const bool by_tokens_;
  int64_t pages_ = 0;
  std::optional<Graph> graph_;
  std::deque<GuardedBuffer> memory_;  // by input of the graph
};

// Of pages each format has every size and order, with numbers of heads in turn.
TEST(CpuPageParameters, EveryPlace) {
  constexpr int64_t kHeads[] = {1, 3, 8};
  size_t turn = 0;
  for (const Stored& of : ManyStored()) {
    for (const int64_t page_tokens : {16, 48}) {
      for (const bool by_tokens : {false, true}) {
        const int64_t heads = kHeads[turn++ % std::size(kHeads)];
        SCOPED_TRACE(testing::Message() << NameOf(of) << ", " << heads << " heads, pages of "
                                        << page_tokens << (by_tokens ? ", by tokens" : ""));
        Paged(of, heads, page_tokens, by_tokens).Check();
        if (HasFailure()) return;
      }
    }
  }
}

// That these are read by addresses, and so what the tests above are of.
TEST(CpuPageParameters, AreAddressed) {
  const auto is_addressed = [](int64_t heads, int64_t groups, DataType zero_points) {
    Segment segment;
    segment.data = {.buffer = 0, .type = kU4, .strides = {0, 0, 0, heads * groups * 16, 1}};
    segment.dequantization.group[kCol] = 16;
    const auto parameters = [&](DataType type) {
      return Array{.buffer = 1,
                   .type = type,
                   .strides = {16 * heads * groups, groups, 0, heads * groups, 1}};
    };
    segment.dequantization.scales = parameters(kF16);
    segment.dequantization.zero_points = parameters(zero_points);
    segment.page_table.buffer = 2;
    segment.tokens = 16;
    EXPECT_EQ(DescribeCodes(groups * 16, /*keys=*/true, segment), "");
    EXPECT_EQ(segment.joins_pages, segment.codes.addressed);
    return segment.codes.addressed;
  };
  for (const int64_t groups : {2, 3, 5, 8, 16}) EXPECT_TRUE(is_addressed(4, groups, kU4)) << groups;
  EXPECT_TRUE(is_addressed(3, 3, kU8));
  // Every other token begins amid a byte, wherever its head does.
  EXPECT_FALSE(is_addressed(3, 3, kU4));
  EXPECT_FALSE(is_addressed(4, 17, kU4));
}

// Where tiles of keys and of values begin at different tokens, even and odd.
TEST(CpuPageParameters, Contiguous) {
  for (const int64_t groups : {1, 2, 3, 4, 5, 8, 16, 17}) {
    for (const DataType zero_points : {kU4, kU8, kF16}) {
      for (const bool by_token : {false, true}) {
        for (const int64_t heads : {1, 3}) {
          SCOPED_TRACE(testing::Message() << groups << " groups, " << DataTypeName(zero_points)
                                          << (by_token ? ", by token, " : ", ") << heads);
          const Format codes{.type = kU4,
                             .group = {1, 1, 1, 1, 16},
                             .scales = kF16,
                             .zero_points = zero_points,
                             .order = by_token ? Format::Order::kByToken : Format::Order{},
                             .parameters_by_token = by_token};
          const int64_t size = groups * 16;
          Case c(
              {.b0 = 2, .b1 = heads, .ratio = 2, .q_len = 1, .kv_len = 201, .d = size, .dv = size});
          c.SetQ(kF32);
          c.SetK(codes);
          // Keys' tiles begin at tokens where values' do not.
          c.SetV(codes, {33, 168});
          c.AddScale();
          c.Check(1e-3);
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cpu
