// The C ABI, by its header alone.
#include "kvant/tests/integrations/c_abi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace kvant::c_abi {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// o = softmax(q k^T * 0.25) v over int8 K and V with a scale per token and head, built by calls.
struct Int8Attention {
  static constexpr int64_t kHeads = 3, kTokens = 37, kSize = 16;
  Builder builder;
  kvant_value scores = 0;

  kvant_value Input(const char* name, kvant_type type, int64_t tokens, int64_t channels) {
    const int64_t dims[] = {1, kHeads, tokens, channels};
    kvant_tensor tensor = {};
    tensor.size = sizeof tensor;
    tensor.name = name;
    tensor.type = type;
    tensor.rank = 4;
    tensor.dims = dims;
    kvant_value value = 0;
    EXPECT_OK(kvant_builder_input(builder.get(), &tensor, &value));
    return value;
  }
  kvant_value Op(const char* kind, std::vector<kvant_value> inputs,
                 std::vector<kvant_attr> attrs = {}) {
    kvant_tensor result = {};
    result.size = sizeof result;
    result.type = KVANT_F32;
    kvant_value value = 0;
    EXPECT_OK(kvant_builder_op(builder.get(), kind, nullptr, inputs.data(), inputs.size(),
                               attrs.data(), attrs.size(), &result, 1, &value));
    return value;
  }

  Graph Build() {
    kvant_builder_options options = {};
    options.size = sizeof options;
    options.fpmath = "f16";
    options.apply_to_int = true;
    kvant_builder* made = nullptr;
    EXPECT_OK(kvant_builder_create(&options, &made));
    builder.reset(made);
    static constexpr int64_t kGroup[] = {1, 1, 1, kSize};
    kvant_attr type = {}, group = {}, transpose = {}, axis = {};
    type.name = "qtype";
    type.type = KVANT_ATTR_STRING;
    type.value.string = "per_group";
    group.name = "group_shape";
    group.type = KVANT_ATTR_S64S;
    group.value.s64s = kGroup;
    group.count = 4;
    transpose.name = "transpose_b";
    transpose.type = KVANT_ATTR_BOOL;
    transpose.value.boolean = true;
    axis.name = "axis";
    axis.value.s64 = -1;
    const kvant_value q = Input("q", KVANT_F32, 1, kSize);
    const kvant_value k =
        Op("DynamicDequantize",
           {Input("k", KVANT_S8, kTokens, kSize), Input("k_scales", KVANT_F32, kTokens, 1)},
           {type, group});
    const kvant_value v =
        Op("DynamicDequantize",
           {Input("v", KVANT_S8, kTokens, kSize), Input("v_scales", KVANT_F32, kTokens, 1)},
           {type, group});
    kvant_value quarter = 0;
    EXPECT_OK(kvant_builder_constant(builder.get(), KVANT_F32, 0.25, &quarter));
    scores = Op("Multiply", {Op("MatMul", {q, k}, {transpose}), quarter});
    const kvant_value o = Op("MatMul", {Op("SoftMax", {scores}, {axis}), v});
    EXPECT_OK(kvant_builder_output(builder.get(), "o", o, nullptr));
    kvant_graph* graph = nullptr;
    EXPECT_OK(kvant_builder_build(builder.get(), &graph));
    return Graph(graph);
  }
};

struct Int8Data {
  static constexpr int64_t kHeads = Int8Attention::kHeads, kTokens = Int8Attention::kTokens,
                           kSize = Int8Attention::kSize;
  Array<float> q{{1, kHeads, 1, kSize}, kDLFloat}, o{{1, kHeads, 1, kSize}, kDLFloat};
  Array<int8_t> k{{1, kHeads, kTokens, kSize}, kDLInt}, v{{1, kHeads, kTokens, kSize}, kDLInt};
  Array<float> k_scales{{1, kHeads, kTokens, 1}, kDLFloat},
      v_scales{{1, kHeads, kTokens, 1}, kDLFloat};

  Int8Data() {
    q.Fill([](double i) { return std::sin(i * 0.7); });
    k.Fill([](double i) { return std::floor(std::fmod(i * 31.7, 255) - 127); });
    v.Fill([](double i) { return std::floor(std::fmod(i * 17.3, 255) - 127); });
    k_scales.Fill([](double i) { return 0.01 + 0.002 * std::fmod(i, 7); });
    v_scales.Fill([](double i) { return 0.02 + 0.003 * std::fmod(i, 5); });
  }
  // In the order of the graph's inputs.
  std::vector<const DLTensor*> Inputs(const kvant_graph* graph) const {
    std::vector<const DLTensor*> inputs;
    for (size_t i = 0; i < kvant_graph_inputs(graph); ++i) {
      kvant_tensor port = {};
      port.size = sizeof port;
      EXPECT_OK(kvant_graph_input(graph, i, &port));
      const std::string name = port.name;
      inputs.push_back(name == "q"          ? &q.dl
                       : name == "k"        ? &k.dl
                       : name == "v"        ? &v.dl
                       : name == "k_scales" ? &k_scales.dl
                                            : &v_scales.dl);
    }
    return inputs;
  }
  double Expected(int64_t head, int64_t channel) const {
    double sum = 0, out = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t row = head * kTokens + t;
      double score = 0;
      for (int64_t d = 0; d < kSize; ++d) {
        score += double{q.data[head * kSize + d]} * k.data[row * kSize + d] * k_scales.data[row];
      }
      const double weight = std::exp(score * 0.25);
      sum += weight;
      out += weight * v.data[row * kSize + channel] * v_scales.data[row];
    }
    return out / sum;
  }
};

TEST(CAbiTest, GraphBuiltByCallsRuns) {
  Int8Attention attention;
  const Graph graph = attention.Build();
  const Engine engine = MakeEngine();
  kvant_compile_options options = {};
  options.size = sizeof options;
  options.require_fused = true;
  kvant_compiled* made = nullptr;
  ASSERT_OK(kvant_compile(engine.get(), graph.get(), &options, &made));
  const Compiled compiled(made);
  Int8Data data;
  const DLTensor* const outputs[] = {&data.o.dl};
  const auto inputs = data.Inputs(graph.get());
  ASSERT_OK(kvant_execute(compiled.get(), nullptr, inputs.data(), inputs.size(), outputs, 1));
  for (int64_t head = 0; head < Int8Data::kHeads; ++head) {
    for (int64_t d = 0; d < Int8Data::kSize; ++d) {
      EXPECT_NEAR(data.o.data[head * Int8Data::kSize + d], data.Expected(head, d), 5e-3);
    }
  }
  kvant_compiled_info info = {};
  info.size = sizeof info;
  ASSERT_OK(kvant_compiled_describe(compiled.get(), &info));
  EXPECT_TRUE(info.fused);
  const char* text = nullptr;
  ASSERT_OK(kvant_compiled_explain(compiled.get(), &text));
  EXPECT_THAT(text, HasSubstr("fused attention"));
}

TEST(CAbiTest, JsonGivesTheSameGraphBack) {
  Int8Attention attention;
  const Graph graph = attention.Build();
  const char* text = nullptr;
  ASSERT_OK(kvant_graph_to_json(graph.get(), &text));
  const std::string json = text;
  kvant_graph* read = nullptr;
  ASSERT_OK(kvant_graph_from_json(json.data(), json.size(), &read));
  const Graph again(read);
  ASSERT_OK(kvant_graph_to_json(again.get(), &text));
  EXPECT_EQ(json, text);
  EXPECT_EQ(kvant_graph_from_json("{", 1, &read), KVANT_INVALID_JSON);
  EXPECT_EQ(read, again.get()) << "what failed made something";
  ASSERT_OK(kvant_graph_to_dot(graph.get(), &text));
  EXPECT_THAT(text, AllOf(HasSubstr("digraph"), HasSubstr("attention: compressed K and V")));
}

TEST(CAbiTest, PartitionsSayWhatTheyAre) {
  Int8Attention attention;
  const Graph graph = attention.Build();
  kvant_partitions* made = nullptr;
  ASSERT_OK(kvant_graph_partitions(graph.get(), &made));
  const Partitions partitions(made);
  ASSERT_EQ(kvant_partitions_count(partitions.get()), 1);
  kvant_partition partition = {};
  partition.size = sizeof partition;
  ASSERT_OK(kvant_partitions_at(partitions.get(), 0, &partition));
  EXPECT_EQ(partition.kind, KVANT_ATTENTION);
  EXPECT_EQ(partition.ops_count, 6);
  EXPECT_STREQ(partition.notes, "");
  kvant_graph* ops = nullptr;
  ASSERT_OK(kvant_partitions_graph(partitions.get(), 0, &ops));
  EXPECT_EQ(kvant_graph_inputs(Graph(ops).get()), 5);
  EXPECT_EQ(kvant_partitions_at(partitions.get(), 1, &partition), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "there is no partition 1: the graph has 1");
}

TEST(CAbiTest, TensorsThatDoNotFitAreNamed) {
  Int8Attention attention;
  const Graph graph = attention.Build();
  const Engine engine = MakeEngine();
  kvant_compiled* made = nullptr;
  ASSERT_OK(kvant_compile(engine.get(), graph.get(), nullptr, &made));
  const Compiled compiled(made);
  Int8Data data;
  data.o.Fill([](double) { return 77; });
  const auto error = [&](DLTensor wrong) {
    auto inputs = data.Inputs(graph.get());
    for (auto& input : inputs) {
      if (input == &data.q.dl) input = &wrong;
    }
    const DLTensor* const outputs[] = {&data.o.dl};
    EXPECT_EQ(kvant_execute(compiled.get(), nullptr, inputs.data(), inputs.size(), outputs, 1),
              KVANT_INVALID_ARGUMENTS);
    return std::string(kvant_error());
  };
  DLTensor wrong = data.q.dl;
  wrong.dtype = {kDLFloat, 64, 1};
  EXPECT_EQ(error(wrong), "input 'q' is f64[1,3,1,16], but must be f32[1,3,1,16]");
  wrong.dtype = {kDLFloat, 16, 1};
  EXPECT_EQ(error(wrong), "input 'q' is f16[1,3,1,16], but must be f32[1,3,1,16]");
  wrong = data.q.dl;
  int64_t other[] = {1, 3, 16, 1};
  wrong.shape = other;
  EXPECT_EQ(error(wrong), "input 'q' is f32[1,3,16,1], but must be f32[1,3,1,16]");
  wrong = data.q.dl;
  wrong.ndim = 3;
  EXPECT_THAT(error(wrong), HasSubstr("is f32[1,3,1], but must be"));
  wrong = data.q.dl;
  int64_t strides[] = {96, 32, 32, 2};
  wrong.strides = strides;
  EXPECT_THAT(error(wrong), HasSubstr("must have strides [48,16,16,1], not [96,32,32,2]"));
  wrong = data.q.dl;
  wrong.device = {kDLCUDA, 1};
  EXPECT_THAT(error(wrong), HasSubstr("is in the memory of cuda:1, but must be in that of cpu"));
  wrong = data.q.dl;
  wrong.data = nullptr;
  EXPECT_EQ(error(wrong), "input 'q' has no memory");
  wrong = data.q.dl;
  wrong.shape = nullptr;
  EXPECT_EQ(error(wrong), "input 'q' has 4 dims and no shape");
  wrong = data.q.dl;
  wrong.ndim = 1 << 30;
  EXPECT_EQ(error(wrong), "input 'q' has 1073741824 dims, and a tensor 12 at most");
  // Strides of dims of one element say nothing.
  int64_t any[] = {7, 16, 12345, 1};
  wrong = data.q.dl;
  wrong.strides = any;
  auto inputs = data.Inputs(graph.get());
  for (auto& input : inputs) {
    if (input == &data.q.dl) input = &wrong;
  }
  const DLTensor* const outputs[] = {&data.o.dl};
  EXPECT_EQ(data.o.data[0], 77) << "a refused call has written";
  EXPECT_OK(kvant_execute(compiled.get(), nullptr, inputs.data(), inputs.size(), outputs, 1));
  EXPECT_EQ(kvant_execute(compiled.get(), nullptr, inputs.data(), 4, outputs, 1),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "the graph has 5 inputs, not 4");
}

// x + x of packed u4 cannot be; a TypeCast of codes shows how they lie.
TEST(CAbiTest, SubByteTensorsArePackedBytes) {
  kvant_builder* made_builder = nullptr;
  ASSERT_OK(kvant_builder_create(nullptr, &made_builder));
  const Builder builder(made_builder);
  const int64_t dims[] = {2, 6}, scale_dims[] = {2, 1}, group[] = {1, 6};
  kvant_tensor codes = {}, scales = {}, result = {};
  codes.size = scales.size = result.size = sizeof codes;
  codes.name = "codes";
  codes.type = KVANT_U4;
  codes.rank = scales.rank = 2;
  codes.dims = dims;
  scales.name = "scales";
  scales.type = result.type = KVANT_F32;
  scales.dims = scale_dims;
  kvant_value inputs[2], value = 0;
  ASSERT_OK(kvant_builder_input(builder.get(), &codes, &inputs[0]));
  ASSERT_OK(kvant_builder_input(builder.get(), &scales, &inputs[1]));
  kvant_attr attrs[2] = {};
  attrs[0].name = "qtype";
  attrs[0].type = KVANT_ATTR_STRING;
  attrs[0].value.string = "per_group";
  attrs[1].name = "group_shape";
  attrs[1].type = KVANT_ATTR_S64S;
  attrs[1].value.s64s = group;
  attrs[1].count = 2;
  ASSERT_OK(kvant_builder_op(builder.get(), "DynamicDequantize", "x", inputs, 2, attrs, 2, &result,
                             1, &value));
  ASSERT_OK(kvant_builder_output(builder.get(), "y", value, nullptr));
  kvant_graph* graph = nullptr;
  ASSERT_OK(kvant_builder_build(builder.get(), &graph));
  const Graph owned(graph);
  kvant_compiled* made = nullptr;
  // Outlives its engine. The oracle is in every build.
  ASSERT_OK(kvant_compile(MakeEngine("oracle").get(), graph, nullptr, &made));
  const Compiled compiled(made);
  Array<uint8_t> packed({2, 3}, kDLUInt);
  packed.data = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba};
  packed.dl.data = packed.data.data();
  Array<float> by({2, 1}, kDLFloat), y({2, 6}, kDLFloat);
  by.data[0] = 1;
  by.data[1] = 10;
  const DLTensor* sources[] = {&packed.dl, &by.dl};
  const DLTensor* const results[] = {&y.dl};
  ASSERT_OK(kvant_execute(compiled.get(), nullptr, sources, 2, results, 1));
  EXPECT_THAT(y.data, testing::ElementsAre(0, 1, 2, 3, 4, 5, 60, 70, 80, 90, 100, 110));
  Array<uint8_t> unpacked({2, 6}, kDLUInt);
  sources[0] = &unpacked.dl;
  EXPECT_EQ(kvant_execute(compiled.get(), nullptr, sources, 2, results, 1),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(),
               "input 'codes' is u8[2,6], but must be u4[2,6], or u8[2,3] that hold it packed");
  // DLPack's own sub-byte type.
  Array<uint8_t> own({2, 6}, kDLUInt, 4);
  own.dl.data = packed.data.data();
  sources[0] = &own.dl;
  EXPECT_OK(kvant_execute(compiled.get(), nullptr, sources, 2, results, 1));
}

TEST(CAbiTest, ShorterAndLongerStructsAreRead) {
  struct {
    kvant_engine_options options;
    uint64_t later;
  } longer = {};
  longer.options.size = sizeof longer;
  longer.later = ~uint64_t{0};
  kvant_engine* engine = nullptr;
  ASSERT_OK(kvant_engine_create(&longer.options, &engine));
  const Engine owned(engine);
  // As a program would have it that knows `device` alone.
  kvant_engine_options older = {};
  older.size = offsetof(kvant_engine_options, device_index);
  older.device = "cpu";
  older.device_index = 12345;
  older.backends = "there is none of this name";
  ASSERT_OK(kvant_engine_create(&older, &engine));
  kvant_engine_destroy(engine);
  kvant_engine_options unset = {};
  EXPECT_EQ(kvant_engine_create(&unset, &engine), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "kvant_engine_options's size is not set");

  Int8Attention attention;
  const Graph graph = attention.Build();
  kvant_tensor port = {};
  port.size = offsetof(kvant_tensor, type);
  port.type = KVANT_S2;
  ASSERT_OK(kvant_graph_input(graph.get(), 0, &port));
  EXPECT_STREQ(port.name, "k");
  EXPECT_EQ(port.type, KVANT_S2) << "written beyond the caller's struct";
}

TEST(CAbiTest, NullPointersAreRefused) {
  kvant_graph* graph = nullptr;
  EXPECT_EQ(kvant_graph_from_json(nullptr, 0, &graph), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "text is null");
  EXPECT_EQ(kvant_compile(nullptr, nullptr, nullptr, nullptr), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "engine is null");
  EXPECT_EQ(kvant_execute(nullptr, nullptr, nullptr, 0, nullptr, 0), KVANT_INVALID_ARGUMENTS);
  EXPECT_EQ(kvant_cache_append(nullptr, nullptr, 0, nullptr, nullptr, nullptr, nullptr),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_EQ(kvant_attention_execute(nullptr, nullptr, 0, nullptr, nullptr, nullptr),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_EQ(kvant_cache_length(nullptr, 0, 0), 0);
  EXPECT_EQ(kvant_graph_inputs(nullptr), 0);
  kvant_graph_destroy(nullptr);
  kvant_cache_destroy(nullptr);
  const Engine engine = MakeEngine();
  Int8Attention attention;
  const Graph built = attention.Build();
  kvant_compiled* made = nullptr;
  ASSERT_OK(kvant_compile(engine.get(), built.get(), nullptr, &made));
  const Compiled compiled(made);
  EXPECT_EQ(kvant_execute(compiled.get(), nullptr, nullptr, 5, nullptr, 1),
            KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "inputs is null");
  const DLTensor* none[5] = {};
  EXPECT_EQ(kvant_execute(compiled.get(), nullptr, none, 5, none, 1), KVANT_INVALID_ARGUMENTS);
  EXPECT_STREQ(kvant_error(), "input 'k' is null");
}

TEST(CAbiTest, ErrorsAreEachThreadsOwn) {
  kvant_graph* graph = nullptr;
  EXPECT_EQ(kvant_graph_from_json(nullptr, 0, &graph), KVANT_INVALID_ARGUMENTS);
  std::thread([] {
    EXPECT_STREQ(kvant_error(), "");
    kvant_engine_options options = {};
    options.size = sizeof options;
    options.device = "abacus";
    kvant_engine* engine = nullptr;
    EXPECT_EQ(kvant_engine_create(&options, &engine), KVANT_INVALID_ARGUMENTS);
    EXPECT_THAT(kvant_error(), HasSubstr("'abacus'"));
  }).join();
  EXPECT_STREQ(kvant_error(), "text is null");
}

TEST(CAbiTest, TypesHaveNames) {
  for (int i = 0; i <= KVANT_U2; ++i) {
    const auto type = static_cast<kvant_type>(i);
    EXPECT_EQ(kvant_type_from_name(kvant_type_name(type)), type);
  }
  EXPECT_STREQ(kvant_type_name(KVANT_F8_E4M3), "f8_e4m3");
  EXPECT_EQ(kvant_type_bits(KVANT_U2), 2);
  EXPECT_EQ(kvant_type_name(static_cast<kvant_type>(99)), nullptr);
  EXPECT_EQ(kvant_type_from_name("float"), KVANT_UNDEF);
  EXPECT_EQ(kvant_abi_version(), KVANT_ABI_VERSION);
}

}  // namespace
}  // namespace kvant::c_abi
