// Attention in the orders and forms of oneDNN's patterns, and near them: what kvant takes, and how
// the rest is cut.
#include <cmath>
#include <functional>

#include "client.h"

namespace client {
namespace {

// Queries, keys and heads of the cases here.
constexpr int64_t kQ = 5, kK = 19, kD = 16, kHeads = 4;

struct Shapes {
  Dims q = {2, kHeads, kQ, kD};
  Dims k = {2, kHeads, kK, kD};
  Dims v = {2, kHeads, kK, kD};
  Dims scores = {2, kHeads, kQ, kK};
  Dims out = {2, kHeads, kQ, kD};
};

// 5-D, three queries' heads to each of keys.
Shapes Grouped() {
  return {{2, 2, 3, kQ, kD},
          {2, 2, 1, kK, kD},
          {2, 2, 1, kK, kD},
          {2, 2, 3, kQ, kK},
          {2, 2, 3, kQ, kD}};
}

class Attention {
 public:
  explicit Attention(Shapes shapes = {}, Type type = Type::f32, Type scores = Type::f32)
      : shapes_(std::move(shapes)), type_(type), scores_type_(scores) {}

  Builder& b() { return b_; }
  Type scores_type() const { return scores_type_; }
  Desc Scores() { return b_.Result(scores_type_, shapes_.scores); }

  Desc Qk(bool transposed = true) {
    Dims k = shapes_.k;
    if (!transposed) std::swap(k[k.size() - 1], k[k.size() - 2]);
    const Desc q = b_.Input(type_, shapes_.q, Property::undef, 4);
    return QkOf(q, b_.Input(type_, k), transposed);
  }
  Desc QkOf(const Desc& q, const Desc& k, bool transposed) {
    const Desc scores = Scores();
    dg::op op = b_.Make(Kind::MatMul, {q, k}, {scores});
    op.set_attr<bool>(Attr::transpose_b, transposed);
    b_.Keep(op);
    return scores;
  }
  Desc Scale(Kind kind, const Desc& scores, Dims dims = {1}) {
    const Desc scale = b_.Input(scores_type_, dims);
    b_.Set(scale, {kind == Kind::Divide ? 4.f : 0.25f});
    return b_.Op(kind, {scores, scale}, Scores());
  }
  // 0 and -inf, and a row with all of it -inf.
  Desc Mask(const Desc& scores, Dims dims = {1, 1, kQ, kK}) {
    if (shapes_.scores.size() == 5 && dims.size() == 4) dims.insert(dims.begin(), 1);
    const Desc mask = b_.Input(scores_type_, dims);
    std::vector<float> values;
    const int64_t keys = dims.back(), rows = dims[dims.size() - 2];
    for (int64_t i = 0; i < rows * keys; ++i) {
      const bool hidden = i / keys == 2 || (i % keys) % 5 == 3;
      values.push_back(hidden ? -INFINITY : 0.f);
    }
    b_.Set(mask, values);
    return b_.Op(Kind::Add, {scores, mask}, Scores());
  }
  Desc Select(const Desc& scores, bool inverted) {
    const Desc condition = b_.Input(Type::boolean, {1, 1, kQ, kK});
    const Desc fill = b_.Input(scores_type_, {1});
    b_.Set(fill, {-16.f});
    return b_.Op(Kind::Select,
                 inverted ? std::vector<Desc>{condition, fill, scores}
                          : std::vector<Desc>{condition, scores, fill},
                 Scores());
  }
  Desc SoftMax(const Desc& scores, bool stats = false, int64_t axis = -1) {
    const Desc probs = b_.Result(type_, shapes_.scores);
    Dims of_rows = shapes_.scores;
    of_rows.back() = 1;
    std::vector<Desc> outputs = {probs};
    if (stats) outputs.push_back(b_.Result(Type::f32, of_rows));
    dg::op op = b_.Make(Kind::SoftMax, {scores}, outputs);
    op.set_attr<int64_t>(Attr::axis, axis);
#if CLIENT_NEW
    op.set_attr<std::string>(Attr::mode, "inf_as_zero");
#endif
    b_.Keep(op);
    return probs;
  }
  Desc Pv(const Desc& probs) { return PvOf(probs, b_.Input(type_, shapes_.v)); }
  Desc PvOf(const Desc& probs, const Desc& v) {
    return b_.Op(Kind::MatMul, {probs, v}, b_.Result(type_, shapes_.out));
  }

 private:
  Builder b_;
  const Shapes shapes_;
  const Type type_, scores_type_;
};

void Case(const std::string& name, Attention attention,
          const std::function<void(Attention&)>& state) {
  Begin(name);
  state(attention);
  attention.b().Run(false);
}

void Forms() {
  Case("plain", Attention(), [](Attention& a) { a.Pv(a.SoftMax(a.Qk())); });
  Case("keys transposed", Attention(), [](Attention& a) { a.Pv(a.SoftMax(a.Qk(false))); });
  Case("divide", Attention(), [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk()))); });
  Case("multiply", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Multiply, a.Qk()))); });
  Case("multiply, scale first", Attention(), [](Attention& a) {
    const Desc scale = a.b().Input(Type::f32, {1});
    a.Pv(a.SoftMax(a.b().Op(Kind::Multiply, {scale, a.Qk()}, a.Scores())));
  });
  Case("mask", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk())))); });
  Case("mask of one row", Attention(), [](Attention& a) {
    a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk()), {1, 1, 1, kK})));
  });
  Case("select", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Select(a.Scale(Kind::Divide, a.Qk()), false))); });
  Case("select, fill first", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Select(a.Scale(Kind::Divide, a.Qk()), true))); });
  Case("grouped heads", Attention(Grouped()),
       [](Attention& a) { a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk())))); });
  Case("one head of keys",
       Attention({{2, 4, kQ, kD}, {2, 1, kK, kD}, {2, 1, kK, kD}, {2, 4, kQ, kK}, {2, 4, kQ, kD}}),
       [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk()))); });
  Case("rank 3", Attention({{6, kQ, kD}, {6, kK, kD}, {6, kK, kD}, {6, kQ, kK}, {6, kQ, kD}}),
       [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk()))); });
  Case("values of another size",
       Attention({{1, 2, kQ, kD}, {1, 2, kK, kD}, {1, 2, kK, 24}, {1, 2, kQ, kK}, {1, 2, kQ, 24}}),
       [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk()))); });
  Case("keys are values",
       Attention({{1, 2, kQ, kD}, {1, 2, kK, kD}, {1, 2, kK, kD}, {1, 2, kQ, kK}, {1, 2, kQ, kD}}),
       [](Attention& a) {
         const Desc k = a.b().Input(Type::f32, {1, 2, kK, kD});
         const Desc scores = a.QkOf(a.b().Input(Type::f32, {1, 2, kQ, kD}), k, true);
         a.PvOf(a.SoftMax(scores), k);
       });
  Case("no tokens",
       Attention({{1, 2, 0, kD}, {1, 2, kK, kD}, {1, 2, kK, kD}, {1, 2, 0, kK}, {1, 2, 0, kD}}),
       [](Attention& a) { a.Pv(a.SoftMax(a.Qk())); });
  Case("transposed output", Attention(), [](Attention& a) {
    const Desc out = a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk())));
    const Desc transposed = a.b().Result(Type::f32, {2, kQ, kHeads, kD});
    dg::op transpose = a.b().Make(Kind::StaticTranspose, {out}, {transposed});
    transpose.set_attr<std::vector<int64_t>>(Attr::order, {0, 2, 1, 3});
    a.b().Keep(transpose);
    dg::op reshape = a.b().Make(Kind::StaticReshape, {transposed},
                                {a.b().Result(Type::f32, {2, kQ, kHeads * kD})});
    reshape.set_attr<std::vector<int64_t>>(Attr::shape, {2, kQ, kHeads * kD});
    reshape.set_attr<bool>(Attr::special_zero, false);
    a.b().Keep(reshape);
  });
  Case("residual", Attention(), [](Attention& a) {
    const Desc out = a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Qk())));
    a.b().Op(Kind::Add, {out, a.b().Input(Type::f32, {2, kHeads, kQ, kD})},
             a.b().Result(Type::f32, {2, kHeads, kQ, kD}));
  });
}

// What oneDNN cuts, and so does this.
void Cuts() {
  Case("mask before scale", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Scale(Kind::Divide, a.Mask(a.Qk())))); });
  Case("scores as divisor", Attention(), [](Attention& a) {
    const Desc one = a.b().Input(Type::f32, {1});
    a.Pv(a.SoftMax(a.b().Op(Kind::Divide, {one, a.Qk()}, a.Scores())));
  });
  Case("scores wanted elsewhere", Attention(), [](Attention& a) {
    const Desc scores = a.Scale(Kind::Divide, a.Qk());
    a.Pv(a.SoftMax(scores));
    a.b().Op(Kind::Exp, {scores}, a.Scores());
  });
  Case("softmax over queries", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Qk(), false, 2)); });
  Case("GELU on scores", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.b().Op(Kind::GELU, {a.Qk()}, a.Scores()))); });
  Case("no second MatMul", Attention(),
       [](Attention& a) { a.SoftMax(a.Scale(Kind::Divide, a.Qk())); });
}

#if CLIENT_NEW
void NewForms() {
  Case("statistics", Attention(),
       [](Attention& a) { a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk())), true)); });
  Case("host scalar", Attention(), [](Attention& a) {
    const Desc scale = a.b().Input(Type::f32, Dims{}, Property::host_scalar);
    a.b().Set(scale, {0.25f});
    a.Pv(a.SoftMax(a.b().Op(Kind::Multiply, {a.Qk(), scale}, a.Scores())));
  });
  Case("soft cap", Attention(), [](Attention& a) {
    const Desc scaled = a.Scale(Kind::Multiply, a.Qk());
    const Desc tanh = a.b().Op(Kind::Tanh, {scaled}, a.Scores());
    const Desc capped = a.Scale(Kind::Multiply, tanh);
    a.Pv(a.SoftMax(capped));
  });
  for (const bool bottom_right : {false, true}) {
    Case(
        bottom_right ? "causal, bottom right" : "causal, top left", Attention(), [&](Attention& a) {
          Builder& b = a.b();
          const Desc scores = a.Scale(Kind::Multiply, a.Qk());
          const auto index = [&](int64_t axis) {
            const Desc result = b.Result(Type::s32, {2, kHeads, kQ, kK});
            dg::op op = b.Make(Kind::GenIndex, {scores}, {result});
            op.set_attr<int64_t>(Attr::axis, axis);
            b.Keep(op);
            return result;
          };
          Desc row = index(-2);
          const Desc column = index(-1);
          if (bottom_right) {
            const auto shift = [&](Kind kind, float by) {
              const Desc amount = b.Input(Type::s32, Dims{}, Property::host_scalar);
              b.Set(amount, {by});
              return b.Op(kind, {row, amount}, b.Result(Type::s32, {2, kHeads, kQ, kK}));
            };
            row = shift(Kind::Add, kK);
            row = shift(Kind::Subtract, kQ);
          }
          const Desc seen =
              b.Op(Kind::GreaterEqual, {row, column}, b.Result(Type::boolean, {2, kHeads, kQ, kK}));
          const Desc fill = b.Input(Type::f32, Dims{}, Property::host_scalar);
          b.Set(fill, {-INFINITY});
          a.Pv(a.SoftMax(b.Op(Kind::Select, {seen, scores, fill}, a.Scores())));
        });
  }
  // oneDNN computes with f16 and bf16 only where the CPU does: with kvant these are one partition
  // everywhere, and named so that the comparison knows.
  for (const auto& [name, type] :
       std::vector<std::pair<std::string, Type>>{{"f16", Type::f16}, {"bf16", Type::bf16}}) {
    Case("half " + name, Attention(Shapes(), type),
         [](Attention& a) { a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk())))); });
    Case("half " + name + ", scores too", Attention(Shapes(), type, type),
         [](Attention& a) { a.Pv(a.SoftMax(a.Mask(a.Scale(Kind::Divide, a.Qk())))); });
  }
}
#endif

}  // namespace

void RunAttention() {
  Forms();
  Cuts();
#if CLIENT_NEW
  NewForms();
#endif
}

}  // namespace client
