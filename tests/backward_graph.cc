#include "kvant/tests/backward_graph.h"

#include <utility>

namespace kvant::testing {
namespace {

// What one graph is made of, in order of the computation.
class Backward {
 public:
  explicit Backward(const BackwardCase& c) : c_(c) {
    if (!c_.dropout) return;
    seed_ = g_.HostScalar("seed", kS64);
    offset_ = g_.HostScalar("offset", kS64);
    p_ = g_.HostScalar("p", kF32);
  }

  GraphBuilder Build() {
    const Value probs = Probabilities();
    const Value kept = c_.dropout ? Drop(probs) : probs;
    Value dprobs = g_.MatMul(do_, v_, {.transpose_b = true, .type = kF32});
    if (c_.dropout) dprobs = Drop(dprobs);
    const Value dscores = ScoreGradient(probs, dprobs);
    if (c_.mask_axes) {
      g_.Output("dmask", Sum(dscores, *c_.mask_axes));
    }
    const Value scaled = Scaled(dscores);
    g_.Output("dv", Gradient(Cast(kept), do_, true));
    g_.Output("dq", Gradient(Cast(scaled), k_, false));
    g_.Output("dk", Gradient(Cast(scaled), q_, true));
    return std::move(g_);
  }

 private:
  Dims Heads(int64_t ratio) const { return c_.ratio > 1 ? Dims{2, 2, ratio} : Dims{2, 3}; }
  Dims With(Dims dims, int64_t rows, int64_t cols) const {
    dims.push_back(rows);
    dims.push_back(cols);
    return dims;
  }
  DataType product_type() const { return c_.f32_products ? kF32 : c_.type; }

  Value Scaled(Value x) { return c_.divide ? g_.Divide(x, scale_) : g_.Multiply(x, scale_); }
  Value Cast(Value x) { return c_.type == kF32 ? x : g_.TypeCast(x, product_type()); }
  Value Sum(Value x, std::vector<int64_t> axes) {
    return g_.AddOp(OpKind::kReduceSum, "", {x}, {g_.Describe(x).type},
                    {{Attr::kAxes, std::move(axes)}, {Attr::kKeepDims, true}})[0];
  }
  Value Drop(Value x) {
    return g_.AddOp(OpKind::kDropout, "", {x, seed_, offset_, p_}, {g_.Describe(x).type})[0];
  }

  Value Probabilities() {
    const Value scores = g_.MatMul(q_, k_, {.transpose_b = true, .type = kF32});
    const Value masked = g_.Add(Scaled(scores), mask_);
    return g_.AddOp(OpKind::kExp, "p", {g_.Subtract(masked, stats_)}, {kF32})[0];
  }

  Value ScoreGradient(Value probs, Value dprobs) {
    if (c_.softmax_op) {
      return g_.AddOp(OpKind::kSoftMaxBackward, "", {dprobs, probs}, {kF32},
                      {{Attr::kAxis, int64_t{-1}}})[0];
    }
    const Value products = g_.AddOp(OpKind::kMultiply, "", {o_, do_}, {kF32})[0];
    const Value centred = g_.Subtract(dprobs, Sum(products, {c_.ratio > 1 ? 4 : 3}));
    return g_.Multiply(probs, centred);
  }

  // Of Q (a x b), or of K or V (a transposed), whose heads may be shared.
  Value Gradient(Value a, Value b, bool of_kv) {
    Value d = g_.MatMul(a, b, {.transpose_a = of_kv, .type = product_type()});
    if (of_kv && c_.ratio > 1) d = Sum(d, {2});
    return c_.f32_products ? g_.TypeCast(d, c_.type) : d;
  }

  const BackwardCase& c_;
  GraphBuilder g_;
  const int64_t size_ = 6;
  Value q_ = g_.Input("q", c_.type, With(Heads(c_.ratio), c_.q_len, size_));
  Value k_ = g_.Input("k", c_.type, With(Heads(1), c_.kv_len, size_));
  Value v_ = g_.Input("v", c_.type, With(Heads(1), c_.kv_len, size_));
  Value o_ = g_.Input("o", c_.type, With(Heads(c_.ratio), c_.q_len, size_));
  Value do_ = g_.Input("do", c_.type, With(Heads(c_.ratio), c_.q_len, size_));
  Value scale_ = g_.Input("scale", c_.type, {1});
  Value mask_ = g_.Input("mask", c_.type, With(Heads(c_.ratio), c_.q_len, c_.kv_len));
  Value stats_ = g_.Input("stats", kF32, With(Heads(c_.ratio), c_.q_len, 1));
  Value seed_, offset_, p_;
};

}  // namespace

std::vector<BackwardCase> BackwardCases() {
  using Axes = std::vector<int64_t>;
  std::vector<BackwardCase> cases = {
      {.name = "plain"},
      {.name = "divide", .divide = true, .softmax_op = true},
      {.name = "dropout", .dropout = true},
      {.name = "dropout_op", .softmax_op = true, .dropout = true},
      {.name = "dmask", .softmax_op = true, .mask_axes = Axes{0, 1}},
      {.name = "dmask_parts", .mask_axes = Axes{1}},
      {.name = "dmask_whole", .divide = true, .softmax_op = true, .mask_axes = Axes{}},
      {.name = "f32_products", .dropout = true, .f32_products = true},
  };
  std::vector<BackwardCase> all;
  for (DataType type : {kF32, kBF16, kF16}) {
    for (int64_t ratio : {1, 3}) {
      for (BackwardCase c : cases) {
        c.name += "_" + std::string(DataTypeName(type)) + (ratio > 1 ? "_grouped" : "");
        c.type = type;
        c.ratio = ratio;
        all.push_back(std::move(c));
      }
    }
  }
  return all;
}

GraphBuilder BackwardGraph(const BackwardCase& c) { return Backward(c).Build(); }

}  // namespace kvant::testing
