// Attention by oneDNN Graph, as functions for peer_onednn.py. scripts/bench compiles
// this against the oneDNN that it installs; it is no part of kvant's build.
//
// Tensors of a graph, dense: q [1, H, R, Sq, D], k and v [1, H, 1, S, D] (4-D with R
// left out where it is 1), scales and zero points [..., S, D / 32], mask [Sq, S].
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.h"
#include "oneapi/dnnl/dnnl_graph.hpp"

namespace {

namespace dg = dnnl::graph;
using Desc = dg::logical_tensor;
using Dims = Desc::dims;
using Type = Desc::data_type;

constexpr int64_t kGroup = 32;

// Which pointer of kvant_onednn_bind belongs to a graph input.
enum Slot { kQ, kK, kV, kKScales, kVScales, kKZeroPoints, kVZeroPoints, kDivisor, kMask, kOut };

class Builder {
 public:
  Builder(int64_t kv_heads, int64_t ratio, int64_t q_len, int64_t kv_len, int64_t size, Type type,
          Type codes)
      : h_(kv_heads), r_(ratio), sq_(q_len), s_(kv_len), d_(size), type_(type), codes_(codes) {}

  dg::graph Build(bool causal) {
    const Desc keys = Cache(kK, kKScales, kKZeroPoints);
    const Desc scores = Inner(Type::f32, Shape(r_, sq_, s_));
    dg::op qk(id_++, dg::op::kind::MatMul, {Input(kQ, type_, Shape(r_, sq_, d_)), keys}, {scores},
              "qk");
    qk.set_attr<bool>(dg::op::attr::transpose_b, true);
    ops_.push_back(std::move(qk));
    Desc x = Elementwise(dg::op::kind::Divide, scores, Input(kDivisor, Type::f32, {1}));
    if (causal) x = Elementwise(dg::op::kind::Add, x, Input(kMask, Type::f32, Mask()));
    const Desc probs = Inner(type_, Shape(r_, sq_, s_));
    dg::op softmax(id_++, dg::op::kind::SoftMax, {x}, {probs}, "softmax");
    softmax.set_attr<int64_t>(dg::op::attr::axis, -1);
    softmax.set_attr<std::string>(dg::op::attr::mode, "inf_as_zero");
    ops_.push_back(std::move(softmax));
    const Desc values = Cache(kV, kVScales, kVZeroPoints);
    const Desc out(id_++, type_, Shape(r_, sq_, d_), Desc::layout_type::strided);
    slots_[out.get_id()] = kOut;
    ops_.emplace_back(id_++, dg::op::kind::MatMul, std::vector<Desc>{probs, values},
                      std::vector<Desc>{out}, "pv");

    const auto mode = type_ == Type::bf16 ? dnnl::fpmath_mode::bf16 : dnnl::fpmath_mode::strict;
    dg::graph graph(dnnl::engine::kind::cpu);
    graph.set_fpmath_mode(mode, Compressed());
    for (const dg::op& op : ops_) graph.add_op(op);
    graph.finalize();
    return graph;
  }

  Slot SlotOf(const Desc& desc) const { return slots_.at(desc.get_id()); }

 private:
  bool Compressed() const { return codes_ != type_; }

  Dims Shape(int64_t ratio, int64_t rows, int64_t cols) const {
    return r_ == 1 ? Dims{1, h_, rows, cols} : Dims{1, h_, ratio, rows, cols};
  }
  Dims Mask() const { return r_ == 1 ? Dims{1, 1, sq_, s_} : Dims{1, 1, 1, sq_, s_}; }

  Desc Input(Slot slot, Type type, const Dims& dims) {
    const Desc desc(id_++, type, dims, Desc::layout_type::strided);
    slots_[desc.get_id()] = slot;
    return desc;
  }
  Desc Inner(Type type, const Dims& dims) {
    return {static_cast<size_t>(id_++), type, dims, Desc::layout_type::strided};
  }

  Desc Elementwise(dg::op::kind kind, const Desc& a, const Desc& b) {
    const Desc result = Inner(Type::f32, Shape(r_, sq_, s_));
    ops_.emplace_back(id_++, kind, std::vector<Desc>{a, b}, std::vector<Desc>{result}, "scores");
    return result;
  }

  // K or V in the queries' type.
  Desc Cache(Slot data, Slot scales, Slot zero_points) {
    const Desc stored = Input(data, codes_, Shape(1, s_, d_));
    if (!Compressed()) return stored;
    const Dims groups = Shape(1, s_, d_ / kGroup);
    std::vector<Desc> inputs = {stored, Input(scales, type_, groups)};
    if (codes_ == Type::u4) inputs.push_back(Input(zero_points, Type::u8, groups));
    const Desc real = Inner(type_, Shape(1, s_, d_));
    dg::op dequantize(id_++, dg::op::kind::DynamicDequantize, inputs, {real}, "dequantize");
    Dims group_shape(groups.size(), 1);
    group_shape.back() = kGroup;
    dequantize.set_attr<std::string>(dg::op::attr::qtype, "per_group");
    dequantize.set_attr<std::vector<int64_t>>(dg::op::attr::group_shape, group_shape);
    dequantize.set_attr<int64_t>(dg::op::attr::axis, static_cast<int64_t>(groups.size()) - 1);
    ops_.push_back(std::move(dequantize));
    return real;
  }

  int64_t h_, r_, sq_, s_, d_;
  Type type_, codes_;
  size_t id_ = 0;
  std::vector<dg::op> ops_;
  std::map<size_t, Slot> slots_;
};

struct Attention {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::vector<std::pair<Desc, Slot>> inputs;
  Desc output;
  dg::compiled_partition compiled;
  struct Binding {
    std::vector<dg::tensor> inputs;
    std::vector<dg::tensor> outputs;
  };
  std::vector<Binding> bindings;
};

Type TypeFromName(const std::string& name) {
  static const std::map<std::string, Type> kTypes = {
      {"f32", Type::f32}, {"bf16", Type::bf16}, {"s8", Type::s8}, {"u4", Type::u4}};
  return kTypes.at(name);
}

// The value of `body`, or `failed` with the exception's text in `message`.
template <typename T, typename Body>
T Try(char* message, int capacity, T failed, Body body) {
  try {
    return body();
  } catch (const std::exception& e) {
    std::snprintf(message, static_cast<size_t>(capacity), "%s", e.what());
    return failed;
  }
}

}  // namespace

extern "C" {

// `type` of queries and output, f32 or bf16; `codes` of K and V, the same or s8 or u4.
// Null with a message if oneDNN does not take the whole graph as one partition.
void* kvant_onednn_create(int64_t kv_heads, int64_t ratio, int64_t q_len, int64_t kv_len,
                          int64_t size, const char* type, const char* codes, int causal,
                          char* message, int capacity) {
  return Try<void*>(message, capacity, nullptr, [&]() -> void* {
    Builder builder(kv_heads, ratio, q_len, kv_len, size, TypeFromName(type), TypeFromName(codes));
    const std::vector<dg::partition> partitions = builder.Build(causal != 0).get_partitions();
    if (partitions.size() != 1 || !partitions[0].is_supported()) {
      throw std::runtime_error("oneDNN makes " + std::to_string(partitions.size()) +
                               " partitions of it, not one");
    }
    auto attention = std::make_unique<Attention>();
    const std::vector<Desc> inputs = partitions[0].get_input_ports();
    const std::vector<Desc> outputs = partitions[0].get_output_ports();
    attention->compiled = partitions[0].compile(inputs, outputs, attention->engine);
    for (const Desc& input : inputs) attention->inputs.emplace_back(input, builder.SlotOf(input));
    attention->output = outputs.at(0);
    return attention.release();
  });
}

// Adds one set of buffers, by Slot; those without use may be null.
void kvant_onednn_bind(void* handle, void* const* pointers) {
  auto& attention = *static_cast<Attention*>(handle);
  Attention::Binding& binding = attention.bindings.emplace_back();
  for (const auto& [desc, slot] : attention.inputs) {
    binding.inputs.emplace_back(desc, attention.engine, pointers[slot]);
  }
  binding.outputs.emplace_back(attention.output, attention.engine, pointers[kOut]);
}

// Nonzero with a message on failure.
int kvant_onednn_run(void* handle, int binding, char* message, int capacity) {
  return Try<int>(message, capacity, 1, [&] {
    auto& attention = *static_cast<Attention*>(handle);
    const Attention::Binding& b = attention.bindings.at(static_cast<size_t>(binding));
    attention.compiled.execute(attention.stream, b.inputs, b.outputs);
    attention.stream.wait();
    return 0;
  });
}

void kvant_onednn_destroy(void* handle) { delete static_cast<Attention*>(handle); }

// "3.13.0 (commit)".
void kvant_onednn_version(char* text, int capacity) {
  const dnnl_version_t* const v = dnnl_version();
  std::snprintf(text, static_cast<size_t>(capacity), "%d.%d.%d (%.10s)", v->major, v->minor,
                v->patch, v->hash);
}

}  // extern "C"
