// Each op alone: oneDNN computes it, with kvant as without.
#include <functional>

#include "client.h"

namespace client {
namespace {

void One(const std::string& name, Kind kind, const std::vector<std::pair<Type, Dims>>& inputs,
         Type type, const Dims& dims, const std::function<void(dg::op&)>& set = {}) {
  Begin(name);
  Builder b;
  std::vector<Desc> descs;
  for (const auto& [input_type, input_dims] : inputs)
    descs.push_back(b.Input(input_type, input_dims));
  dg::op op = b.Make(kind, descs, {b.Result(type, dims)});
  if (set) set(op);
  b.Keep(op);
  b.Run(true);
}

}  // namespace

void RunOps() {
  const Dims x = {2, 3, 4, 8};
  const Type f32 = Type::f32;
  for (const auto& [name, kind] :
       std::vector<std::pair<std::string, Kind>>{{"Exp", Kind::Exp},
                                                 {"Tanh", Kind::Tanh},
                                                 {"ReLU", Kind::ReLU},
                                                 {"Sigmoid", Kind::Sigmoid},
                                                 {"Sqrt", Kind::Sqrt},
                                                 {"Square", Kind::Square},
                                                 {"Abs", Kind::Abs},
                                                 {"Reciprocal", Kind::Reciprocal},
                                                 {"Log", Kind::Log},
                                                 {"GELU", Kind::GELU},
                                                 {"Reorder", Kind::Reorder}}) {
    One(name, kind, {{f32, x}}, f32, x);
  }
  for (const auto& [name, kind] :
       std::vector<std::pair<std::string, Kind>>{{"Add", Kind::Add},
                                                 {"Subtract", Kind::Subtract},
                                                 {"Multiply", Kind::Multiply},
                                                 {"Divide", Kind::Divide},
                                                 {"Maximum", Kind::Maximum},
                                                 {"Minimum", Kind::Minimum}}) {
    One(name, kind, {{f32, x}, {f32, x}}, f32, x);
    One(name + " broadcast", kind, {{f32, x}, {f32, {1, 3, 1, 8}}}, f32, x);
  }
  for (const bool a : {false, true}) {
    for (const bool b : {false, true}) {
      One("MatMul " + std::to_string(a) + std::to_string(b), Kind::MatMul,
          {{f32, a ? Dims{2, 3, 8, 4} : x}, {f32, b ? Dims{2, 3, 5, 8} : Dims{2, 3, 8, 5}}}, f32,
          {2, 3, 4, 5}, [&](dg::op& op) {
            op.set_attr<bool>(Attr::transpose_a, a);
            op.set_attr<bool>(Attr::transpose_b, b);
          });
    }
  }
  One("MatMul bias", Kind::MatMul, {{f32, {4, 8}}, {f32, {8, 5}}, {f32, {5}}}, f32, {4, 5});
  for (const int64_t axis : {1, -1}) {
    One("SoftMax " + std::to_string(axis), Kind::SoftMax, {{f32, x}}, f32, x,
        [&](dg::op& op) { op.set_attr<int64_t>(Attr::axis, axis); });
    One("SoftMaxBackward " + std::to_string(axis), Kind::SoftMaxBackward, {{f32, x}, {f32, x}}, f32,
        x, [&](dg::op& op) { op.set_attr<int64_t>(Attr::axis, axis); });
    for (const auto& [name, kind] :
         std::vector<std::pair<std::string, Kind>>{{"ReduceSum", Kind::ReduceSum},
                                                   {"ReduceMax", Kind::ReduceMax},
                                                   {"ReduceMean", Kind::ReduceMean}}) {
      One(name + " " + std::to_string(axis), kind, {{f32, x}}, f32,
          axis == 1 ? Dims{2, 1, 4, 8} : Dims{2, 3, 4, 1}, [&](dg::op& op) {
            op.set_attr<std::vector<int64_t>>(Attr::axes, {axis});
            op.set_attr<bool>(Attr::keep_dims, true);
          });
    }
  }
  One("Select", Kind::Select, {{Type::boolean, x}, {f32, x}, {f32, {1}}}, f32, x);
  One("StaticReshape", Kind::StaticReshape, {{f32, x}}, f32, {6, 32}, [](dg::op& op) {
    op.set_attr<std::vector<int64_t>>(Attr::shape, {6, -1});
    op.set_attr<bool>(Attr::special_zero, false);
  });
  One("StaticTranspose", Kind::StaticTranspose, {{f32, x}}, f32, {2, 4, 3, 8}, [](dg::op& op) {
    op.set_attr<std::vector<int64_t>>(Attr::order, {0, 2, 1, 3});
  });
  One("TypeCast", Kind::TypeCast, {{Type::bf16, x}}, f32, x);
  One("TypeCast to f16", Kind::TypeCast, {{f32, x}}, Type::f16, x);
  One("Concat", Kind::Concat, {{f32, x}, {f32, {2, 1, 4, 8}}, {f32, x}}, f32, {2, 7, 4, 8},
      [](dg::op& op) { op.set_attr<int64_t>(Attr::axis, 1); });
  for (const Type codes : {Type::u8, Type::s8}) {
    const auto quantization = [](dg::op& op) {
      op.set_attr<std::string>(Attr::qtype, "per_tensor");
      op.set_attr<std::vector<float>>(Attr::scales, {0.125f});
      op.set_attr<std::vector<int64_t>>(Attr::zps, {3});
    };
    const std::string name = codes == Type::u8 ? " u8" : " s8";
    One("Quantize" + name, Kind::Quantize, {{f32, x}}, codes, x, quantization);
    One("Dequantize" + name, Kind::Dequantize, {{codes, x}}, f32, x, quantization);
    One("DynamicQuantize" + name, Kind::DynamicQuantize, {{f32, x}, {f32, {1}}}, codes, x);
    One("DynamicDequantize" + name, Kind::DynamicDequantize, {{codes, x}, {f32, {1}}}, f32, x);
    One("DynamicDequantize per channel" + name, Kind::DynamicDequantize, {{codes, x}, {f32, {3}}},
        f32, x, [](dg::op& op) { op.set_attr<std::string>(Attr::qtype, "per_channel"); });
  }
#if CLIENT_NEW
  for (const Type codes : {Type::u8, Type::s8, Type::u4, Type::s4}) {
    One("DynamicDequantize per group " + std::to_string(static_cast<int>(codes)),
        Kind::DynamicDequantize, {{codes, {2, 32, 64}}, {f32, {2, 32, 2}}}, f32, {2, 32, 64},
        [](dg::op& op) {
          op.set_attr<std::string>(Attr::qtype, "per_group");
          op.set_attr<std::vector<int64_t>>(Attr::group_shape, {1, 1, 32});
        });
  }
  One("GenIndex", Kind::GenIndex, {{f32, x}}, Type::s32, x,
      [](dg::op& op) { op.set_attr<int64_t>(Attr::axis, 2); });
  One("GreaterEqual", Kind::GreaterEqual, {{f32, x}, {f32, x}}, Type::boolean, x);
  Begin("Dropout");
  Builder b;
  const Desc input = b.Input(f32, x);
  const Desc seed = b.Input(Type::s64, Dims{}, Property::host_scalar);
  const Desc offset = b.Input(Type::s64, Dims{}, Property::host_scalar);
  const Desc probability = b.Input(f32, Dims{}, Property::host_scalar);
  b.Set(seed, {7});
  b.Set(offset, {2});
  b.Set(probability, {0.25f});
  b.Op(Kind::Dropout, {input, seed, offset, probability}, b.Result(f32, x));
  b.Run(true);
#endif
  // Ops that kvant's graph lacks.
  One("LayerNorm", Kind::LayerNorm, {{f32, x}, {f32, {8}}, {f32, {8}}}, f32, x,
      [](dg::op& op) { op.set_attr<bool>(Attr::keep_stats, false); });
  One("HardSwish", Kind::HardSwish, {{f32, x}}, f32, x);
  One("AvgPool", Kind::AvgPool, {{f32, {1, 2, 6, 6}}}, f32, {1, 2, 3, 3}, [](dg::op& op) {
    op.set_attr<std::vector<int64_t>>(Attr::kernel, {2, 2});
    op.set_attr<std::vector<int64_t>>(Attr::strides, {2, 2});
    op.set_attr<std::vector<int64_t>>(Attr::pads_begin, {0, 0});
    op.set_attr<std::vector<int64_t>>(Attr::pads_end, {0, 0});
    op.set_attr<bool>(Attr::exclude_pad, false);
    op.set_attr<std::string>(Attr::data_format, "NCX");
  });
  One("Convolution", Kind::Convolution, {{f32, {1, 3, 6, 6}}, {f32, {4, 3, 3, 3}}}, f32,
      {1, 4, 4, 4}, [](dg::op& op) {
        op.set_attr<std::vector<int64_t>>(Attr::strides, {1, 1});
        op.set_attr<std::vector<int64_t>>(Attr::pads_begin, {0, 0});
        op.set_attr<std::vector<int64_t>>(Attr::pads_end, {0, 0});
        op.set_attr<std::vector<int64_t>>(Attr::dilations, {1, 1});
        op.set_attr<int64_t>(Attr::groups, 1);
        op.set_attr<std::string>(Attr::data_format, "NCX");
        op.set_attr<std::string>(Attr::weights_format, "OIX");
      });

  Begin("End");
  Builder end;
  const Desc y = end.Op(Kind::Exp, {end.Input(f32, x)}, end.Result(f32, x));
  end.Keep(end.Make(Kind::End, {y}, {}));
  end.Run(true);
  Begin("Wildcard");
  Builder wildcard;
  wildcard.Op(Kind::Wildcard, {wildcard.Input(f32, x)}, wildcard.Result(f32, x));
  WritePartitions(wildcard.Build().get_partitions());
}

}  // namespace client
