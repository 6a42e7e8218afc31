// Logical tensors, tensors, and what holds for the process.
#include "client.h"

namespace client {
namespace {

void LogicalTensors() {
  Begin("logical tensors");
  const auto size = [](const std::string& what, const Desc& desc) {
    size_t bytes = 0;
    Status("get_mem_size, " + what, [&] { bytes = desc.get_mem_size(); });
    Line("bytes, " + what, std::to_string(bytes));
    Line("text, " + what, Text(desc));
  };
  size("scalar", {1, Type::f32, Dims{}, Layout::strided});
  size("empty", {1, Type::f32, Dims{2, 0, 3}, Layout::strided});
  size("strided", {1, Type::f32, Dims{2, 3}, Dims{8, 1}});
  size("a row", {1, Type::f32, Dims{1, 3}, Dims{100, 1}});
  size("boolean", {1, Type::boolean, Dims{3}, Layout::strided});
  size("any", {1, Type::f32, Dims{3}, Layout::any});
  size("rank alone", {1, Type::f32, 3, Layout::strided});
  size("nothing known", {1, Type::f32, Layout::strided});
  size("a dim not known", {1, Type::f32, Dims{2, DNNL_GRAPH_UNKNOWN_DIM}, Layout::strided});
  size("braces make a rank", {1, Type::f32, {3}, Layout::strided});
#if CLIENT_NEW
  Status("thirteen dims", [] { Desc(1, Type::f32, Dims(13, 1), Layout::strided); });
  size("s4", {1, Type::s4, Dims{3, 5}, Layout::strided});
  size("s4, transposed", {1, Type::s4, Dims{1, 32, 128, 32}, Dims{131072, 4096, 1, 128}});
#endif
  const Desc a(1, Type::f32, Dims{2, 3}, Layout::strided), b(1, Type::f32, Dims{2, 3}, Dims{3, 1});
  Line("equal", a.is_equal(b));
  Line("equal to other dims", a.is_equal({1, Type::f32, Dims{3, 2}, Layout::strided}));
  Line("equal to another id", a.is_equal({2, Type::f32, Dims{2, 3}, Layout::strided}));
  Line("equal to any", a.is_equal({1, Type::f32, Dims{2, 3}, Layout::any}));
}

void Tensors() {
  Begin("tensors");
  Place place;
  const Desc desc(1, Type::f32, Dims{4}, Layout::strided);
  float data[4] = {1, 2, 3, 4}, other[4] = {};
  dg::tensor tensor(desc, place.engine, data);
  Line("handle is data", tensor.get_data_handle() == data);
  tensor.set_data_handle(other);
  Line("handle is the other", tensor.get_data_handle() == other);
  tensor.set_data_handle(nullptr);
  Line("handle is null", tensor.get_data_handle() == nullptr);
  Line("engine is the engine", tensor.get_engine().get() == place.engine.get());
  dg::tensor allocated(desc, place.engine, DNNL_MEMORY_ALLOCATE);
  Line("allocated", allocated.get_data_handle() != nullptr);
  Line("aligned",
       static_cast<int64_t>(reinterpret_cast<uintptr_t>(allocated.get_data_handle()) % 64));
  dg::tensor none(desc, place.engine, nullptr);
  Line("none is null", none.get_data_handle() == nullptr);
  Status("tensor of no engine", [&] { dg::tensor(desc, dnnl::engine(), data); });
#if CLIENT_NEW
  Line("logical tensor", Text(tensor.get_logical_tensor()));
  const Desc scalar(2, Type::f32, Dims{}, Layout::strided, Property::host_scalar);
  float value = 3;
  dg::tensor of_scalar = dg::tensor::make_scalar_tensor(scalar, &value);
  Line("scalar's handle is null", of_scalar.get_data_handle() == nullptr);
  Status("set_data_handle of a scalar", [&] { of_scalar.set_data_handle(&value); });
  Line("scalar's engine is null", of_scalar.get_engine().get(true) == nullptr);
  Status("scalar of no value", [&] { dg::tensor::make_scalar_tensor(scalar, nullptr); });
  Status("scalar of no host scalar", [&] { dg::tensor::make_scalar_tensor(desc, &value); });
  Status("tensor of a host scalar", [&] { dg::tensor(scalar, place.engine, &value); });
  Status("host scalar with dims",
         [&] { Desc(2, Type::f32, Dims{1}, Layout::strided, Property::host_scalar); });
#endif
}

void Process() {
  Begin("process");
  int capacity = 0, flag = 0;
  Line("get cache capacity", dnnl_graph_get_compiled_partition_cache_capacity(&capacity));
  Line("capacity", capacity);
  Line("set cache capacity", dnnl_graph_set_compiled_partition_cache_capacity(7));
  Line("get cache capacity", dnnl_graph_get_compiled_partition_cache_capacity(&capacity));
  Line("capacity", capacity);
  Line("set it below 0", dnnl_graph_set_compiled_partition_cache_capacity(-1));
  Line("get it to null", dnnl_graph_get_compiled_partition_cache_capacity(nullptr));
  Line("set it to 0", dnnl_graph_set_compiled_partition_cache_capacity(0));
  Line("set constant cache", dnnl_graph_set_constant_tensor_cache(1));
  Line("get constant cache", dnnl_graph_get_constant_tensor_cache(&flag));
  Line("flag", flag);
  Line("set it below 0", dnnl_graph_set_constant_tensor_cache(-1));
  Line("set constant cache", dnnl_graph_set_constant_tensor_cache(0));
#if CLIENT_NEW
  size_t megabytes = 0;
  Line("set constant cache capacity", dnnl_graph_set_constant_tensor_cache_capacity(dnnl_cpu, 16));
  Line("get it", dnnl_graph_get_constant_tensor_cache_capacity(dnnl_cpu, &megabytes));
  Line("megabytes", std::to_string(megabytes));
  Line("set constant cache capacity", dnnl_graph_set_constant_tensor_cache_capacity(dnnl_cpu, 0));
  Line("set dump mode", dnnl_graph_set_dump_mode(dnnl_graph_dump_mode_none));
  Line("set dump mode of no bit",
       dnnl_graph_set_dump_mode(static_cast<dnnl_graph_dump_mode_t>(64)));
#endif
  Line("restore cache capacity", dnnl_graph_set_compiled_partition_cache_capacity(1024));
}

}  // namespace

void RunHandles() {
  LogicalTensors();
  Tensors();
  Process();
}

}  // namespace client
