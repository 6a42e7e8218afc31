// What graphs, ops and partitions answer when they are used in another way than they are meant.
#include <functional>

#include "client.h"
#include "oneapi/dnnl/dnnl_graph.h"

namespace client {
namespace {

const Dims kDims = {1, 2, 5, 8};

Desc Of(size_t id, const Dims& dims = kDims, Type type = Type::f32) {
  return {id, type, dims, Layout::strided};
}

void Ops() {
  Begin("schema");
  const auto add = [](const std::string& what, Kind kind, const std::vector<Desc>& inputs,
                      const std::vector<Desc>& outputs,
                      const std::function<void(dg::op&)>& set = {}) {
    dg::graph graph(dnnl::engine::kind::cpu);
    dg::op op(1, kind, inputs, outputs);
    if (set) set(op);
    Line(what + " without exception", static_cast<int>(graph.add_op(op, false)));
    Status(what, [&] { graph.add_op(op); });
  };
  add("MatMul of one input", Kind::MatMul, {Of(0)}, {Of(2)});
  add("MatMul of mixed types", Kind::MatMul, {Of(0), Of(1, kDims, Type::f16)}, {Of(2)});
  add("MatMul of other sizes", Kind::MatMul, {Of(0), Of(1, {7, 7})}, {Of(2)});
  add("MatMul without outputs", Kind::MatMul, {Of(0), Of(1)}, {});
  add("an attribute of another op", Kind::Exp, {Of(0)}, {Of(1)},
      [](dg::op& op) { op.set_attr<int64_t>(Attr::axis, 1); });
  add("mode of no SoftMax", Kind::SoftMax, {Of(0)}, {Of(1)},
      [](dg::op& op) { op.set_attr<std::string>(Attr::mode, "bogus"); });
  add("axis as a string", Kind::SoftMax, {Of(0)}, {Of(1)},
      [](dg::op& op) { op.set_attr<std::string>(Attr::axis, "1"); });
  add("StaticReshape without special_zero", Kind::StaticReshape, {Of(0)}, {Of(1)},
      [](dg::op& op) { op.set_attr<std::vector<int64_t>>(Attr::shape, {80}); });
  add("TypeCast to the same type", Kind::TypeCast, {Of(0)}, {Of(1)});
  add("DynamicDequantize, scales of another type", Kind::DynamicDequantize,
      {Of(0, kDims, Type::s8), Of(1, {1}, Type::f16)}, {Of(2)});
  add("Select of a u8 condition", Kind::Select, {Of(0, kDims, Type::u8), Of(1), Of(2)}, {Of(3)});
  add("a bogus qtype", Kind::DynamicDequantize, {Of(0, kDims, Type::s8), Of(1, {1})}, {Of(2)},
      [](dg::op& op) { op.set_attr<std::string>(Attr::qtype, "bogus"); });
  add("an empty vector", Kind::ReduceSum, {Of(0)}, {Of(1)}, [](dg::op& op) {
    Status("set_attr of an empty vector",
           [&] { op.set_attr<std::vector<int64_t>>(Attr::axes, {}); });
    Status("set_attr of an empty string", [&] { op.set_attr<std::string>(Attr::mode, ""); });
  });
}

void Lives() {
  Begin("life of a graph");
  dg::graph graph(dnnl::engine::kind::cpu);
  Line("finalized", graph.is_finalized());
  Status("get_partitions before finalize", [&] { graph.get_partitions(); });
  dg::op exp(1, Kind::Exp, {Of(0)}, {Of(1)}), other(1, Kind::Tanh, {Of(1)}, {Of(2)});
  Status("add_op", [&] { graph.add_op(exp); });
  Status("add_op of the same id", [&] { graph.add_op(other); });
  Status("finalize", [&] { graph.finalize(); });
  Status("finalize again", [&] { graph.finalize(); });
  Line("finalized", graph.is_finalized());
  Line("add_op after finalize", static_cast<int>(graph.add_op(exp, false)));
  WritePartitions(graph.get_partitions());
  dnnl_graph_partition_t more[9] = {};
  Line("more partitions than there are", dnnl_graph_graph_get_partitions(graph.get(), 9, more));
  for (dnnl_graph_partition_t partition : more) {
    if (partition != nullptr) dnnl_graph_partition_destroy(partition);
  }
  WritePartitions(graph.get_partitions(dg::partition::policy::debug));
#if CLIENT_NEW
  Status("set_fpmath_mode after finalize",
         [&] { graph.set_fpmath_mode(dnnl::fpmath_mode::bf16, true); });
  dg::graph modes(dnnl::engine::kind::cpu, dnnl::fpmath_mode::bf16);
  dnnl::fpmath_mode mode;
  bool apply_to_int = true;
  modes.get_fpmath_mode(mode, apply_to_int);
  Line("mode", static_cast<int>(mode));
  Line("apply_to_int", apply_to_int);
  modes.set_fpmath_mode(dnnl::fpmath_mode::f16, true);
  modes.get_fpmath_mode(mode, apply_to_int);
  Line("mode", static_cast<int>(mode));
  Line("apply_to_int", apply_to_int);
#endif
  dg::graph empty(dnnl::engine::kind::cpu);
  Status("finalize of nothing", [&] { empty.finalize(); });
  Line("partitions of nothing", static_cast<int64_t>(empty.get_partitions().size()));

  dg::graph circle(dnnl::engine::kind::cpu);
  circle.add_op(dg::op(1, Kind::Exp, {Of(0)}, {Of(1)}));
  circle.add_op(dg::op(2, Kind::Exp, {Of(1)}, {Of(0)}));
  Status("finalize of a circle", [&] { circle.finalize(); });
  dg::graph unequal(dnnl::engine::kind::cpu);
  unequal.add_op(dg::op(1, Kind::Exp, {Of(0)}, {Of(1)}));
  unequal.add_op(dg::op(2, Kind::Exp, {Of(1, {3})}, {Of(2, {3})}));
  Status("finalize of unequal tensors", [&] { unequal.finalize(); });
  dg::graph twice(dnnl::engine::kind::cpu);
  twice.add_op(dg::op(1, Kind::Exp, {Of(0)}, {Of(2)}));
  twice.add_op(dg::op(2, Kind::Tanh, {Of(1)}, {Of(2)}));
  Status("finalize of two producers", [&] { twice.finalize(); });
}

void Partitions() {
  Begin("single ops");
  const dg::partition one(dg::op(7, Kind::Exp, {Of(0)}, {Of(1)}), dnnl::engine::kind::cpu);
  WritePartitions({one});
  Status("of a bad op",
         [] { dg::partition(dg::op(7, Kind::MatMul, {Of(0)}, {Of(1)}), dnnl::engine::kind::cpu); });
  Place place;
  Status("compile for no engine", [&] { one.compile({Of(0)}, {Of(1)}, dnnl::engine()); });
  Status("compile of no inputs", [&] { one.compile({}, {Of(1)}, place.engine); });
  Status("compile for another type", [&] {
    one.compile({Of(0, kDims, Type::bf16)}, {Of(1, kDims, Type::bf16)}, place.engine);
  });
  dg::graph graph(dnnl::engine::kind::cpu);
  graph.add_op(dg::op(1, Kind::Wildcard, {Of(0)}, {Of(1)}));
  graph.finalize();
  for (const dg::partition& partition : graph.get_partitions()) {
    Line("supported", partition.is_supported());
    Status("compile of it", [&] { partition.compile({Of(0)}, {Of(1)}, place.engine); });
  }
}

void Nulls() {
  Begin("null");
  dnnl_graph_op_t op = nullptr;
  dnnl_graph_graph_t graph = nullptr;
  size_t number = 0;
  uint8_t flag = 0;
  dnnl_graph_op_kind_t kind;
  dnnl_graph_logical_tensor_t desc;
  dnnl_graph_op_t* no_op = nullptr;
  Line("op_create", dnnl_graph_op_create(no_op, 1, dnnl_graph_op_exp, "op"));
  Line("op_create without name", dnnl_graph_op_create(&op, 1, dnnl_graph_op_exp, nullptr));
  if (op == nullptr) dnnl_graph_op_create(&op, 1, dnnl_graph_op_exp, "op");
  Line("op_get_id of null", dnnl_graph_op_get_id(nullptr, &number));
  Line("op_get_id to null", dnnl_graph_op_get_id(op, nullptr));
  Line("op_get_kind of null", dnnl_graph_op_get_kind(nullptr, &kind));
  Line("op_add_input of null", dnnl_graph_op_add_input(op, nullptr));
  Line("op_add_output to null", dnnl_graph_op_add_output(nullptr, &desc));
  Line("set_attr_f32 null", dnnl_graph_op_set_attr_f32(op, dnnl_graph_op_attr_alpha, nullptr, 1));
  Line("set_attr_s64 null", dnnl_graph_op_set_attr_s64(op, dnnl_graph_op_attr_axis, nullptr, 1));
  Line("set_attr_bool null",
       dnnl_graph_op_set_attr_bool(op, dnnl_graph_op_attr_transpose_a, nullptr, 1));
  const uint8_t yes = 1;
  Line("set_attr_bool of two",
       dnnl_graph_op_set_attr_bool(op, dnnl_graph_op_attr_transpose_a, &yes, 2));
  Line("set_attr_str null", dnnl_graph_op_set_attr_str(op, dnnl_graph_op_attr_mode, nullptr, 1));
  Line("set_attr_str of none", dnnl_graph_op_set_attr_str(op, dnnl_graph_op_attr_mode, "x", 0));
  Line("add_op to null", dnnl_graph_add_op(nullptr, op));
  Line("graph_create", dnnl_graph_graph_create(&graph, dnnl_cpu));
  Line("add_op of null", dnnl_graph_add_op(graph, nullptr));
  Line("finalize of null", dnnl_graph_graph_finalize(nullptr));
  Line("is_finalized of null", dnnl_graph_graph_is_finalized(nullptr, &flag));
  Line("is_finalized to null", dnnl_graph_graph_is_finalized(graph, nullptr));
  Line("filter of null", dnnl_graph_graph_filter(nullptr, dnnl_graph_partition_policy_fusion));
  Line("filter before finalize",
       dnnl_graph_graph_filter(graph, dnnl_graph_partition_policy_fusion));
  Line("get_partition_num of null", dnnl_graph_graph_get_partition_num(nullptr, &number));
  Line("get_partitions to null", dnnl_graph_graph_get_partitions(graph, 1, nullptr));
  dnnl_graph_partition_t partition = nullptr;
  Line("get_partitions of none", dnnl_graph_graph_get_partitions(graph, 0, &partition));
  Line("partition_get_op_num of null", dnnl_graph_partition_get_op_num(nullptr, &number));
  Line("partition_get_id of null", dnnl_graph_partition_get_id(nullptr, &number));
  Line("partition_get_ops of null", dnnl_graph_partition_get_ops(nullptr, 1, &number));
  Line("partition_is_supported of null", dnnl_graph_partition_is_supported(nullptr, &flag));
  Line("partition_destroy of null", dnnl_graph_partition_destroy(nullptr));
  Line("compiled_partition_create of null", dnnl_graph_compiled_partition_create(nullptr, nullptr));
  Line("compiled_partition_destroy of null", dnnl_graph_compiled_partition_destroy(nullptr));
  Line("query of null", dnnl_graph_compiled_partition_query_logical_tensor(nullptr, 0, &desc));
  Line("compile of null",
       dnnl_graph_partition_compile(nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr));
  Line("execute of null",
       dnnl_graph_compiled_partition_execute(nullptr, nullptr, 0, nullptr, 0, nullptr));
  Line("tensor_create of null", dnnl_graph_tensor_create(nullptr, &desc, nullptr, nullptr));
  Line("tensor_destroy of null", dnnl_graph_tensor_destroy(nullptr));
  void* handle = nullptr;
  Line("get_data_handle of null", dnnl_graph_tensor_get_data_handle(nullptr, &handle));
  Line("set_data_handle of null", dnnl_graph_tensor_set_data_handle(nullptr, nullptr));
  dnnl_engine_t engine = nullptr;
  Line("get_engine of null", dnnl_graph_tensor_get_engine(nullptr, &engine));
  Line("allocator_destroy of null", dnnl_graph_allocator_destroy(nullptr));
  Line("op_destroy of null", dnnl_graph_op_destroy(nullptr));
  Line("graph_destroy of null", dnnl_graph_graph_destroy(nullptr));
  Line("op_destroy", dnnl_graph_op_destroy(op));
  Line("graph_destroy", dnnl_graph_graph_destroy(graph));
}

}  // namespace

void RunStatuses() {
  Ops();
  Lives();
  Partitions();
  Nulls();
}

}  // namespace client
