#include "kvant/tests/common/backward_graph.h"

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
    if (c_.mask_gradient) g_.Output("dmask", MaskGradient(dscores));
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
  // With dims of 1 where the gradient is summed.
  Dims MaskDims() const {
    Dims dims = With(Heads(c_.ratio), c_.q_len, c_.kv_len);
    if (c_.mask_gradient) {
      for (const int64_t axis : c_.mask_gradient->axes) {
        dims[axis < 0 ? axis + static_cast<int64_t>(dims.size()) : axis] = 1;
      }
    }
    return dims;
  }
  DataType product_type() const { return c_.f32_products ? kF32 : c_.type; }

  Value Scaled(Value x) { return c_.divide ? g_.Divide(x, scale_) : g_.Multiply(x, scale_); }
  Value Cast(Value x) { return c_.type == kF32 ? x : g_.TypeCast(x, product_type()); }
  Value Sum(Value x, std::vector<int64_t> axes, bool keep_dims = true) {
    return g_.AddOp(OpKind::kReduceSum, "", {x}, {g_.Describe(x).type},
                    {{Attr::kAxes, std::move(axes)}, {Attr::kKeepDims, keep_dims}})[0];
  }
  Value MaskGradient(Value dscores) {
    const auto& [axes, keep_dims, type] = *c_.mask_gradient;
    Value x = dscores;
    if (!axes.empty()) x = Sum(x, axes, keep_dims);
    return type == kF32 ? x : g_.TypeCast(x, type);
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
  Value mask_ = g_.Input("mask", c_.type, MaskDims());
  Value stats_ = g_.Input("stats", kF32, With(Heads(c_.ratio), c_.q_len, 1));
  Value seed_, offset_, p_;
};

}  // namespace

std::vector<BackwardCase> BackwardCases() {
  using MaskGradient = BackwardCase::MaskGradient;
  std::vector<BackwardCase> cases = {
      {.name = "plain"},
      {.name = "divide", .divide = true, .softmax_op = true},
      {.name = "dropout", .dropout = true},
      {.name = "dropout_op", .softmax_op = true, .dropout = true},
      {.name = "f32_products", .dropout = true, .f32_products = true},
  };
  const std::pair<const char*, MaskGradient> mask_gradients[] = {
      {"dmask", {}},
      {"dmask_cast", {.type = kBF16}},
      {"dmask_heads", {.axes = {1}}},
      {"dmask_batch_heads", {.axes = {0, 1}, .keep_dims = false}},
      {"dmask_rows", {.axes = {-2}, .type = kBF16}},
      {"dmask_all_but_columns", {.axes = {0, 1, -2}}},
      {"dmask_rows_of_one_column", {.axes = {-1}}},
  };
  for (const auto& [name, gradient] : mask_gradients) {
    for (const bool softmax_op : {false, true}) {
      for (const bool dropout : {false, true}) {
        cases.push_back({.name = std::string(name) + (softmax_op ? "_op" : "_parts") +
                                 (dropout ? "_dropout" : ""),
                         .divide = cases.size() % 3 == 0,
                         .softmax_op = softmax_op,
                         .dropout = dropout,
                         .mask_gradient = gradient});
      }
    }
  }
  std::vector<BackwardCase> all;
  size_t turn = 0;
  for (DataType type : {kF32, kBF16, kF16}) {
    ++turn;
    for (int64_t ratio : {1, 3}) {
      for (size_t i = 0; i < cases.size(); ++i) {
        BackwardCase c = cases[i];
        if (c.mask_gradient && i % 3 != turn % 3) continue;  // one type each
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
