// A good graph with one thing changed: either it is fused as before, or a sentence names the op
// that is in the way. And graphs that have nothing to do with attention, of which nothing is said.
#include <algorithm>
#include <functional>

#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/tests/common/backward_graph.h"
#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::BackwardCase;
using testing::BackwardGraph;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::KindsOf;
using testing::Partitions;

constexpr OpId kNewOp = 900;
constexpr TensorId kNewTensor = 900;

// A graph as a list that can be changed and made a graph again.
struct Piece {
  Op op;
  std::vector<LogicalTensor> inputs, outputs;
};

std::vector<Piece> PiecesOf(const Graph& graph) {
  std::vector<Piece> pieces;
  for (const Op& op : graph.ops()) {
    Piece& piece = pieces.emplace_back(Piece{op, {}, {}});
    for (const TensorId id : op.inputs) piece.inputs.push_back(graph.tensor(id));
    for (const TensorId id : op.outputs) piece.outputs.push_back(graph.tensor(id));
  }
  return pieces;
}

// The partitions of a changed graph, all shapes inferred; or the error of whoever takes it.
absl::StatusOr<std::vector<Partition>> PartitionsOf(std::vector<Piece> pieces) {
  Graph graph;
  for (Piece& piece : pieces) {
    for (LogicalTensor& tensor : piece.outputs) tensor.dims.reset(), tensor.strides.reset();
    for (LogicalTensor& tensor : piece.inputs) {
      const bool made = std::any_of(pieces.begin(), pieces.end(), [&](const Piece& other) {
        return std::any_of(other.outputs.begin(), other.outputs.end(),
                           [&](const LogicalTensor& output) { return output.id == tensor.id; });
      });
      if (made) tensor.dims.reset(), tensor.strides.reset();
    }
    KVANT_RETURN_IF_ERROR(graph.AddOp(piece.op, piece.inputs, piece.outputs));
  }
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph, {}));
  return PartitionGraph(graph);
}

Piece NewPiece(OpKind kind, const LogicalTensor& input) {
  Piece piece;
  piece.op.id = kNewOp;
  piece.op.name = "culprit";
  piece.op.kind = kind;
  if (kind == OpKind::kHadamard) piece.op.attrs.Set(Attr::kBlock, int64_t{1});
  piece.inputs = {input};
  piece.outputs = {input};
  piece.outputs[0].id = kNewTensor;
  piece.outputs[0].name.clear();
  return piece;
}

// What may be missing from a match without a word: ops that only move, join or sum what goes in or
// out.
bool MayBeApart(const Op& op) {
  const OpClass of_class = ClassOf(op.kind);
  return of_class == OpClass::kMove || of_class == OpClass::kNothing ||
         of_class == OpClass::kJoin || op.kind == OpKind::kReduceSum;
}

// Whether one partition of that kind has all ops that had better be in it.
bool IsWhole(const std::vector<Partition>& partitions, Partition::Kind kind,
             const std::vector<Piece>& original) {
  return std::any_of(partitions.begin(), partitions.end(), [&](const Partition& partition) {
    const std::vector<Op>& ops = partition.ops().ops();
    return partition.kind() == kind && partition.notes().empty() &&
           std::all_of(original.begin(), original.end(), [&](const Piece& piece) {
             const auto same = [&](const Op& op) { return op.id == piece.op.id; };
             return MayBeApart(piece.op) || std::any_of(ops.begin(), ops.end(), same);
           });
  });
}

std::string AllThatIsSaid(const std::vector<Partition>& partitions) {
  std::string text = absl::StrJoin(MissesOf(partitions), "\n");
  for (const Partition& one : partitions) {
    absl::StrAppend(&text, "\n", absl::StrJoin(one.notes(), "\n"));
  }
  return text;
}

struct Good {
  friend void PrintTo(const Good& good, std::ostream* out) { *out << good.name; }

  std::string name;
  Partition::Kind kind = Partition::Kind::kAttention;
  std::function<GraphBuilder()> build;
};

GraphBuilder Compressed() {
  GraphBuilder g;
  const Value q = g.Transpose(g.Input("q", kF32, {2, 3, 4, 8}), {0, 2, 1, 3});
  const auto cache = [&](const std::string& name, DataType type) {
    const Value codes = g.Input(name, type, {2, 6, 4, 8});
    const Value scales = g.Input(name + "s", kF16, {2, 6, 4, 2});
    const Value zeros = g.Input(name + "z", type, {2, 6, 4, 2});
    const Value x = g.DynamicDequantize(codes, scales, zeros, {.group_shape = {1, 1, 1, 4}});
    return g.TypeCast(g.Transpose(x, {0, 2, 1, 3}), kF32);
  };
  const Value k = cache("k", kU4), v = cache("v", kS8);
  const Value scores = g.Divide(g.MatMul(q, k, {.transpose_b = true}), g.Input("scale", kF32, {1}));
  const Value probs = g.SoftMax(g.Add(scores, g.Input("mask", kF32, {2, 1, 3, 6})));
  g.Output("o", g.Transpose(g.MatMul(probs, v), {0, 2, 1, 3}));
  return g;
}

GraphBuilder CappedAndDropped() {
  GraphBuilder g;
  const Value q = g.Input("q", kF32, {2, 4, 3, 8}), v = g.Input("v", kF32, {2, 4, 6, 8});
  const Value k =
      g.Concat({g.Input("k0", kF32, {2, 4, 5, 8}), g.Input("k1", kF32, {2, 4, 1, 8})}, 2);
  const Value cap = g.Input("cap", kF32, {1}), fill = g.Input("fill", kF32, {1});
  const Value scores = g.Divide(g.MatMul(q, k, {.transpose_b = true}), cap);
  const Value capped = g.Multiply(g.Tanh(scores), cap);
  const Value masked = g.Select(g.Input("seen", kBoolean, {2, 1, 3, 6}), capped, fill);
  const Value probs = g.TypeCast(g.SoftMax(g.Subtract(fill, masked)), kF16);
  const std::vector<Value> dropout = {probs, g.HostScalar("seed", kS64),
                                      g.HostScalar("offset", kS64), g.HostScalar("p", kF32)};
  const Value kept = g.AddOp(OpKind::kDropout, "dropout", dropout, {kF16})[0];
  g.Output("o", g.MatMul(g.TypeCast(kept, kF32), v));
  return g;
}

GraphBuilder Loaded() {
  GraphBuilder g;
  const Value lengths = g.Input("lengths", kS32, {2});
  const auto cache = [&](const std::string& name) {
    const Value codes = g.LoadTokens(g.Input(name, kS8, {2, 4, 6, 8}), lengths);
    const Value scales = g.LoadTokens(g.Input(name + "s", kF32, {2, 4, 6, 1}), lengths);
    return g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, 8}});
  };
  const Value k = cache("k"), v = cache("v");
  const Value scores = g.MatMul(g.Input("q", kF32, {2, 4, 3, 8}), k, {.transpose_b = true});
  g.Output("o", g.MatMul(g.SoftMax(scores, {.lengths = lengths}), v));
  return g;
}

GraphBuilder Direct() {
  GraphBuilder g;
  const auto cache = [&](const std::string& name) {
    return g.DynamicDequantize(g.Input(name, kS8, {2, 4, 6, 8}),
                               g.Input(name + "s", kF32, {2, 4, 6, 1}),
                               {.group_shape = {1, 1, 1, 8}});
  };
  const Value k = cache("k"), v = cache("v");
  g.Output("o", g.ScaledDotProductAttention(g.Input("q", kF32, {2, 4, 3, 8}), k, v, {}).first);
  return g;
}

std::vector<Good> GoodGraphs() {
  std::vector<Good> graphs = {
      {.name = "compressed", .build = Compressed},
      {.name = "capped", .build = CappedAndDropped},
      {.name = "loaded", .build = Loaded},
      {.name = "direct", .build = Direct},
  };
  const BackwardCase backward[] = {{.name = "parts"},
                                   {.name = "op", .divide = true, .softmax_op = true},
                                   {.name = "dropout", .dropout = true},
                                   {.name = "dropout_op", .softmax_op = true, .dropout = true},
                                   {.name = "grouped", .ratio = 3},
                                   {.name = "cast", .type = kBF16, .ratio = 3, .softmax_op = true}};
  for (const BackwardCase& c : backward) {
    graphs.push_back({"backward_" + c.name, Partition::Kind::kAttentionBackward,
                      [c] { return BackwardGraph(c); }});
  }
  return graphs;
}

class Mutations : public ::testing::TestWithParam<Good> {
 protected:
  // That it is whole, or that something says `culprit`.
  void ExpectWholeOrSaid(const std::vector<Piece>& changed, const std::string& culprit) {
    const absl::StatusOr<std::vector<Partition>> partitions = PartitionsOf(changed);
    if (!partitions.ok()) {
      EXPECT_THAT(std::string(partitions.status().message()), HasSubstr("(id "));
      return;
    }
    if (IsWhole(*partitions, GetParam().kind, original_)) return;
    ++not_whole_;
    EXPECT_THAT(AllThatIsSaid(*partitions), HasSubstr(culprit)) << KindsOf(*partitions);
  }

  const std::vector<Piece> original_ = PiecesOf(GetParam().build().Build().value());
  int not_whole_ = 0;
};

TEST_P(Mutations, OriginalIsWhole) {
  const std::vector<Partition> partitions = PartitionsOf(original_).value();
  EXPECT_TRUE(IsWhole(partitions, GetParam().kind, original_)) << KindsOf(partitions);
  EXPECT_EQ(AllThatIsSaid(partitions).find_first_not_of('\n'), std::string::npos)
      << AllThatIsSaid(partitions);
}

TEST_P(Mutations, AnOpOnEachEdge) {
  for (const OpKind kind : {OpKind::kGELU, OpKind::kExp, OpKind::kHadamard}) {
    for (size_t i = 0; i < original_.size(); ++i) {
      for (size_t port = 0; port < original_[i].inputs.size(); ++port) {
        if (!IsFloat(original_[i].inputs[port].type)) continue;
        SCOPED_TRACE(absl::StrCat(std::string(OpKindName(kind)), " before input ", port, " of ",
                                  original_[i].op.ToString()));
        std::vector<Piece> changed = original_;
        changed.push_back(NewPiece(kind, original_[i].inputs[port]));
        changed[i].inputs[port] = changed.back().outputs[0];
        ExpectWholeOrSaid(changed, "'culprit' (id 900)");
      }
    }
  }
  EXPECT_GT(not_whole_, 0);
}

TEST_P(Mutations, ASecondConsumerOfEachResult) {
  for (size_t i = 0; i < original_.size(); ++i) {
    for (const LogicalTensor& result : original_[i].outputs) {
      SCOPED_TRACE(original_[i].op.ToString());
      std::vector<Piece> changed = original_;
      changed.push_back(NewPiece(OpKind::kReorder, result));
      ExpectWholeOrSaid(changed, "'culprit' (id 900)");
    }
  }
}

TEST_P(Mutations, SwappedOperands) {
  for (size_t i = 0; i < original_.size(); ++i) {
    if (original_[i].inputs.size() < 2) continue;
    for (size_t port = 0; port + 1 < original_[i].inputs.size(); ++port) {
      SCOPED_TRACE(absl::StrCat(original_[i].op.ToString(), " ", port));
      std::vector<Piece> changed = original_;
      std::swap(changed[i].inputs[port], changed[i].inputs[port + 1]);
      ExpectWholeOrSaid(changed, original_[i].op.ToString());
    }
  }
}

TEST_P(Mutations, ChangedAttributes) {
  const auto change = [&](size_t i, Attr attr, auto value) {
    SCOPED_TRACE(absl::StrCat(original_[i].op.ToString(), " ", std::string(AttrName(attr))));
    std::vector<Piece> changed = original_;
    changed[i].op.attrs.Set(attr, value);
    ExpectWholeOrSaid(changed, original_[i].op.ToString());
  };
  for (size_t i = 0; i < original_.size(); ++i) {
    const Op& op = original_[i].op;
    if (op.kind == OpKind::kMatMul) {
      change(i, Attr::kTransposeA, !op.Get<Attr::kTransposeA>());
      change(i, Attr::kTransposeB, !op.Get<Attr::kTransposeB>());
    }
    for (const int64_t axis : {0, 1, 2, -2}) {
      if (op.kind == OpKind::kSoftMax || op.kind == OpKind::kConcat) change(i, Attr::kAxis, axis);
    }
    if (op.kind == OpKind::kDynamicDequantize) {
      change(i, Attr::kGroupShape, std::vector<int64_t>{1, 1, 1, 3});
      change(i, Attr::kGroupShape, std::vector<int64_t>{1, 4});
    }
    if (op.kind == OpKind::kStaticTranspose) {
      change(i, Attr::kOrder, std::vector<int64_t>{0, 1, 3, 2});
      change(i, Attr::kOrder, std::vector<int64_t>{2, 0, 1, 3});
    }
    if (op.kind == OpKind::kLoadTokens) change(i, Attr::kTokenAxis, int64_t{1});
  }
}

INSTANTIATE_TEST_SUITE_P(Graphs, Mutations, ::testing::ValuesIn(GoodGraphs()),
                         [](const auto& info) { return info.param.name; });

// Of ordinary parts of models.
void ExpectNothingSaid(const std::function<void(GraphBuilder&, Value)>& build) {
  GraphBuilder g;
  const Value x = g.Input("x", kF32, {2, 3, 8});
  build(g, g.MatMul(x, g.Input("w", kF32, {8, 8})));
  const std::vector<Partition> partitions = Partitions(std::move(g));
  EXPECT_FALSE(partitions.empty());
  EXPECT_THAT(MissesOf(partitions), IsEmpty()) << KindsOf(partitions);
}

Value Unary(GraphBuilder& g, OpKind kind, Value x) { return g.AddOp(kind, "", {x}, {kF32})[0]; }

Value Sum(GraphBuilder& g, Value x, int64_t axis, bool keep_dims = false) {
  return g.AddOp(OpKind::kReduceSum, "", {x}, {kF32},
                 {{Attr::kAxes, std::vector<int64_t>{axis}}, {Attr::kKeepDims, keep_dims}})[0];
}

TEST(NoMiss, ClassifiersAndLosses) {
  ExpectNothingSaid([](GraphBuilder& g, Value x) { g.Output("p", g.SoftMax(x)); });
  ExpectNothingSaid(
      [](GraphBuilder& g, Value x) { g.Output("p", g.TypeCast(g.SoftMax(x), kF16)); });
  ExpectNothingSaid([](GraphBuilder& g, Value x) {
    const Value log = Unary(g, OpKind::kLog, g.SoftMax(x));
    g.Output("loss", Sum(g, g.Multiply(log, g.Input("labels", kF32, {2, 3, 8})), -1));
  });
  ExpectNothingSaid([](GraphBuilder& g, Value x) {
    g.Output("p", g.AddOp(OpKind::kQuantize, "", {g.SoftMax(x)}, {kU8},
                          {{Attr::kScales, std::vector<float>{0.01f}},
                           {Attr::kZps, std::vector<int64_t>{0}}})[0]);
  });
  ExpectNothingSaid([](GraphBuilder& g, Value x) {  // the logarithm of a sum of exponentials
    const Value e = Unary(g, OpKind::kExp, g.Subtract(x, g.Input("max", kF32, {2, 3, 1})));
    g.Output("lse", Unary(g, OpKind::kLog, Sum(g, e, -1)));
  });
}

TEST(NoMiss, LayersOfOtherKinds) {
  const auto weights = [](GraphBuilder& g) { return g.Input("w2", kF32, {8, 8}); };
  ExpectNothingSaid([&](GraphBuilder& g, Value x) {
    g.Output("y", g.MatMul(Unary(g, OpKind::kGELU, x), weights(g)));
  });
  ExpectNothingSaid([&](GraphBuilder& g, Value x) {  // SiLU by an Exp
    const Value e = Unary(g, OpKind::kExp, g.Multiply(x, g.Scalar(-1.f)));
    g.Output("y", g.MatMul(g.Divide(x, g.Add(e, g.Scalar(1.f))), weights(g)));
  });
  ExpectNothingSaid([&](GraphBuilder& g, Value x) {  // a SoftMax of what no MatMul makes
    const Value gate = g.SoftMax(g.Input("gates", kF32, {2, 3, 8}));
    g.Output("y", g.MatMul(g.Multiply(gate, x), weights(g)));
  });
  ExpectNothingSaid([&](GraphBuilder& g, Value x) {  // a router, and the sum over experts
    const Value experts = g.Input("experts", kF32, {2, 3, 8, 8});
    const Value mixed = Sum(g, g.Multiply(g.Reshape(g.SoftMax(x), {2, 3, 8, 1}), experts), 2);
    g.Output("y", g.MatMul(mixed, weights(g)));
  });
}

// Attention in its surroundings: rotary embeddings of K, and weights and activations in integers.
TEST(NoMiss, AttentionOverProjections) {
  GraphBuilder g;
  const auto project = [&](const std::string& name) {
    const Value codes = g.Input(name, kS8, {8, 8});
    const Value w = g.DynamicDequantize(codes, g.Input(name + "s", kF32, {1}), {});
    return g.MatMul(g.Input(name + "x", kF32, {2, 6, 8}), w);
  };
  const auto round = [&](Value x) {
    const Attributes attrs = {{Attr::kScales, std::vector<float>{0.1f}},
                              {Attr::kZps, std::vector<int64_t>{0}}};
    const Value codes = g.AddOp(OpKind::kQuantize, "", {x}, {kS8}, attrs)[0];
    return g.AddOp(OpKind::kDequantize, "", {codes}, {kF32}, attrs)[0];
  };
  const Value raw = round(project("k"));
  const Value k =
      g.Add(g.Multiply(raw, g.Input("cos", kF32, {6, 8})), g.Input("sin", kF32, {6, 8}));
  const Value scores = g.MatMul(project("q"), k, {.transpose_b = true});
  g.Output("o", g.MatMul(g.SoftMax(scores), project("v")));
  const std::vector<Partition> partitions = Partitions(std::move(g));
  EXPECT_THAT(MissesOf(partitions), IsEmpty());
  EXPECT_THAT(KindsOf(partitions), HasSubstr("MatMul SoftMax MatMul"));
}

TEST(NoMiss, GradientOfASoftMaxAndExponentialsOfInputs) {
  testing::Plain p;
  const Value probs = p.g.SoftMax(p.Scores());
  p.g.Output("ds",
             p.g.AddOp(OpKind::kSoftMaxBackward, "ds", {p.g.Input("dp", kF32, {2, 4, 3, 5}), probs},
                       {kF32}, {{Attr::kAxis, int64_t{-1}}})[0]);
  EXPECT_THAT(MissesOf(Partitions(std::move(p.g))), IsEmpty());
  testing::Plain r;
  const Value x = r.g.Input("x", kF32, {2, 4, 3, 5}), most = r.g.Input("most", kF32, {2, 4, 3, 1});
  r.g.Output("o",
             r.g.MatMul(r.g.AddOp(OpKind::kExp, "e", {r.g.Subtract(x, most)}, {kF32})[0], r.v));
  EXPECT_THAT(MissesOf(Partitions(std::move(r.g))), IsEmpty());
}

}  // namespace
}  // namespace kvant
