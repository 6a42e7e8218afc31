// Attention over keys and values in codes.
#include <functional>

#include "client.h"

namespace client {

#if CLIENT_NEW
namespace {

constexpr int64_t kQ = 3, kK = 37, kD = 64, kGroup = 32;

struct Codes {
  Type type = Type::s8;
  std::string qtype = "per_group";
  bool zero_points = false;
};

// K or V [1, 2, 1, kK, kD], dequantized; codes where `codes` is given.
Desc Cache(Builder& b, const Codes* codes, Type type) {
  const Dims dims = {1, 2, 1, kK, kD};
  if (codes == nullptr) return b.Input(type, dims);
  Dims of_scales = {1, 2, 1, kK, kD / kGroup};
  if (codes->qtype == "per_tensor") of_scales = {1};
  if (codes->qtype == "per_channel") of_scales = {2};
  std::vector<Desc> inputs = {b.Input(codes->type, dims),
                              b.Input(type, of_scales, Property::undef, 0.5f)};
  if (codes->zero_points) {
    const bool of_signed = codes->type == Type::s8 || codes->type == Type::s4;
    inputs.push_back(b.Input(of_signed ? Type::s8 : Type::u8, of_scales));
  }
  const Desc real = b.Result(type, dims);
  dg::op op = b.Make(Kind::DynamicDequantize, inputs, {real});
  op.set_attr<std::string>(Attr::qtype, codes->qtype);
  if (codes->qtype == "per_group") {
    op.set_attr<std::vector<int64_t>>(Attr::group_shape, {1, 1, 1, 1, kGroup});
  }
  if (codes->qtype == "per_channel") op.set_attr<int64_t>(Attr::axis, 1);
  b.Keep(op);
  return real;
}

void Case(const std::string& name, const Codes* k, const Codes* v, bool apply_to_int,
          dnnl::fpmath_mode mode = dnnl::fpmath_mode::strict, Type type = Type::f32,
          bool dequantized_elsewhere = false) {
  Begin("compressed " + name);
  Builder b(mode, apply_to_int);
  const Desc keys = Cache(b, k, type);
  const Desc scores = b.Result(Type::f32, {1, 2, 4, kQ, kK});
  dg::op qk = b.Make(Kind::MatMul, {b.Input(type, {1, 2, 4, kQ, kD}), keys}, {scores});
  qk.set_attr<bool>(Attr::transpose_b, true);
  b.Keep(qk);
  const Desc divisor = b.Input(Type::f32, {1});
  b.Set(divisor, {8});
  const Desc scaled = b.Op(Kind::Divide, {scores, divisor}, b.Result(Type::f32, {1, 2, 4, kQ, kK}));
  const Desc mask = b.Input(Type::f32, {1, 1, 1, kQ, kK});
  const Desc masked = b.Op(Kind::Add, {scaled, mask}, b.Result(Type::f32, {1, 2, 4, kQ, kK}));
  const Desc probs = b.Result(type, {1, 2, 4, kQ, kK});
  dg::op softmax = b.Make(Kind::SoftMax, {masked}, {probs});
  softmax.set_attr<int64_t>(Attr::axis, -1);
  b.Keep(softmax);
  b.Op(Kind::MatMul, {probs, Cache(b, v, type)}, b.Result(type, {1, 2, 4, kQ, kD}));
  if (dequantized_elsewhere) b.Op(Kind::Exp, {keys}, b.Result(type, {1, 2, 1, kK, kD}));
  b.Run(false);
}

}  // namespace

void RunCompressed() {
  for (const auto& [name, type] : std::vector<std::pair<std::string, Type>>{
           {"s8", Type::s8}, {"u8", Type::u8}, {"s4", Type::s4}, {"u4", Type::u4}}) {
    for (const bool zero_points : {false, true}) {
      const Codes codes{type, "per_group", zero_points};
      Case(name + (zero_points ? " with zero points" : ""), &codes, &codes, true);
    }
    const Codes codes{type};
    Case(name + " keys alone", &codes, nullptr, true);
    Case(name + " values alone", nullptr, &codes, true);
  }
  const Codes s8, u4{Type::u4}, tensor{Type::s8, "per_tensor"}, channel{Type::u8, "per_channel"};
  Case("u4 keys, s8 values", &u4, &s8, true);
  Case("per tensor", &tensor, &tensor, true);
  Case("per channel", &channel, &channel, true);
  Case("not permitted", &s8, &s8, false);
  Case("any", &s8, &s8, true, dnnl::fpmath_mode::any);
  Case("keys wanted elsewhere", &s8, &s8, true, dnnl::fpmath_mode::strict, Type::f32, true);
  Case("half f16", &u4, &u4, true, dnnl::fpmath_mode::f16, Type::f16);
}
#else
void RunCompressed() {}
#endif

}  // namespace client
