// Graphs with attention among other ops, some of which kvant's graph lacks.
#include "client.h"

namespace client {
namespace {

constexpr int64_t kTokens = 6, kHeads = 2, kSize = 8, kWidth = kHeads * kSize;

class Layer {
 public:
  // x [kTokens, kWidth] -> the same, as a transformer's layer has it.
  Desc Add(const Desc& x) {
    Desc normal = Norm(x);
    const Desc q = Heads(Project(normal)), k = Heads(Project(normal)), v = Heads(Project(normal));
    const Desc scores = b_.Result(Type::f32, {kHeads, kTokens, kTokens});
    dg::op qk = b_.Make(Kind::MatMul, {q, k}, {scores});
    qk.set_attr<bool>(Attr::transpose_b, true);
    b_.Keep(qk);
    const Desc scaled = b_.Op(Kind::Multiply, {scores, b_.Input(Type::f32, {1})},
                              b_.Result(Type::f32, {kHeads, kTokens, kTokens}));
    const Desc probs = b_.Result(Type::f32, {kHeads, kTokens, kTokens});
    dg::op softmax = b_.Make(Kind::SoftMax, {scaled}, {probs});
    softmax.set_attr<int64_t>(Attr::axis, -1);
    b_.Keep(softmax);
    const Desc heads =
        b_.Op(Kind::MatMul, {probs, v}, b_.Result(Type::f32, {kHeads, kTokens, kSize}));
    const Desc joined = Reshape(Transpose(heads, {kTokens, kHeads, kSize}), {kTokens, kWidth});
    const Desc attended = b_.Op(Kind::Add, {Project(joined), x}, Wide());
    normal = Norm(attended);
    const Desc hidden = b_.Op(Kind::GELU, {Project(normal)}, Wide());
    return b_.Op(Kind::Add, {Project(hidden), attended}, Wide());
  }
  Builder& b() { return b_; }

 private:
  Desc Wide() { return b_.Result(Type::f32, {kTokens, kWidth}); }
  Desc Project(const Desc& x) {
    return b_.Op(Kind::MatMul, {x, b_.Input(Type::f32, {kWidth, kWidth}, Property::constant)},
                 Wide());
  }
  Desc Norm(const Desc& x) {
    const Desc result = Wide();
    dg::op op =
        b_.Make(Kind::LayerNorm, {x, b_.Input(Type::f32, {kWidth}), b_.Input(Type::f32, {kWidth})},
                {result});
    op.set_attr<bool>(Attr::keep_stats, false);
    b_.Keep(op);
    return result;
  }
  Desc Reshape(const Desc& x, const Dims& dims) {
    const Desc result = b_.Result(Type::f32, dims);
    dg::op op = b_.Make(Kind::StaticReshape, {x}, {result});
    op.set_attr<std::vector<int64_t>>(Attr::shape, dims);
    op.set_attr<bool>(Attr::special_zero, false);
    b_.Keep(op);
    return result;
  }
  Desc Transpose(const Desc& x, const Dims& dims) {
    const Desc result = b_.Result(Type::f32, dims);
    dg::op op = b_.Make(Kind::StaticTranspose, {x}, {result});
    op.set_attr<std::vector<int64_t>>(Attr::order, {1, 0, 2});
    b_.Keep(op);
    return result;
  }
  Desc Heads(const Desc& x) {
    return Transpose(Reshape(x, {kTokens, kHeads, kSize}), {kHeads, kTokens, kSize});
  }

  Builder b_;
};

// Q comes of a MatMul that a sum with the attention's output needs too. Where the attention is cut
// out, oneDNN must not fuse MatMul and sum, which would be before the attention and behind it.
void Around() {
  Begin("around");
  Builder b;
  const Dims dims = {1, 2, 5, 8};
  const Desc q = b.Op(Kind::MatMul, {b.Input(Type::f32, dims), b.Input(Type::f32, {1, 2, 8, 8})},
                      b.Result(Type::f32, dims));
  const Desc scores = b.Result(Type::f32, {1, 2, 5, 5});
  dg::op qk = b.Make(Kind::MatMul, {q, b.Input(Type::f32, dims)}, {scores});
  qk.set_attr<bool>(Attr::transpose_b, true);
  b.Keep(qk);
  const Desc probs = b.Result(Type::f32, {1, 2, 5, 5});
  dg::op softmax = b.Make(Kind::SoftMax, {scores}, {probs});
  softmax.set_attr<int64_t>(Attr::axis, -1);
  b.Keep(softmax);
  const Desc out = b.Op(Kind::MatMul, {probs, b.Input(Type::f32, dims)}, b.Result(Type::f32, dims));
  b.Op(Kind::Add, {q, out}, b.Result(Type::f32, dims));
  b.Run(false);
}

}  // namespace

void RunMixed() {
  Begin("a layer");
  Layer one;
  one.Add(one.b().Input(Type::f32, {kTokens, kWidth}));
  one.b().Run(false);
  Begin("two layers");
  Layer two;
  two.Add(two.Add(two.b().Input(Type::f32, {kTokens, kWidth})));
  two.b().Run(false);
  Around();
}

}  // namespace client
