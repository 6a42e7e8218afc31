// What compiling infers, and compiling again for other shapes and layouts.
#include <cmath>
#include <optional>

#include "client.h"

namespace client {
namespace {

constexpr int64_t kUnknown = DNNL_GRAPH_UNKNOWN_DIM;

// softmax(Q K^T / s) V over tensors 0 (Q), 1 (K), 3 (s) and 6 (V); 7 is the output.
// Empty where it is cut, as by an old oneDNN.
std::optional<dg::partition> Plain(const Desc& q, const Desc& k, const Desc& v, const Desc& out) {
  const Desc scores(2, Type::f32);
  dg::graph graph(dnnl::engine::kind::cpu);
  dg::op qk(0, Kind::MatMul, {q, k}, {scores}, "qk");
  qk.set_attr<bool>(Attr::transpose_b, true);
  const Desc scaled(4, Type::f32), probs(5, Type::f32),
      divisor(3, Type::f32, Dims{1}, Layout::strided);
  dg::op divide(1, Kind::Divide, {scores, divisor}, {scaled}, "divide");
  dg::op softmax(2, Kind::SoftMax, {scaled}, {probs}, "softmax");
  softmax.set_attr<int64_t>(Attr::axis, -1);
  dg::op pv(3, Kind::MatMul, {probs, v}, {out}, "pv");
  for (dg::op* op : {&qk, &divide, &softmax, &pv}) graph.add_op(*op);
  graph.finalize();
  const std::vector<dg::partition> partitions = graph.get_partitions();
  WritePartitions(partitions);
  if (partitions.size() != 1) return std::nullopt;
  return partitions[0];
}

Desc Known(size_t id, const Dims& dims, Layout layout = Layout::strided) {
  return {id, Type::f32, dims, layout};
}

// An input of any layout may stay so.
Desc Dense(const Desc& desc) {
  if (desc.get_layout_type() != Layout::any || desc.get_id() == SIZE_MAX) return desc;
  return {desc.get_id(), desc.get_data_type(), desc.get_dims(), Layout::strided};
}

void Execute(const std::optional<dg::partition>& partition, const std::vector<Desc>& inputs,
             const Desc& output) {
  if (!partition) return;
  Place place;
  dg::compiled_partition compiled;
  const int status =
      StatusOf([&] { compiled = partition->compile(inputs, {output}, place.engine); });
  Line("status of compile", status);
  if (status != 0) return;
  for (const size_t id : {0, 1, 3, 6, 7, 2, 99}) {
    Line("query " + std::to_string(id), Text(compiled.query_logical_tensor(id)));
  }
  std::vector<std::vector<uint8_t>> memory;
  std::vector<dg::tensor> in;
  for (const Desc& input : inputs) {
    Desc known = Dense(compiled.query_logical_tensor(input.get_id()));
    if (known.get_id() != input.get_id()) known = input;  // one without a port
    memory.push_back(Fill(known, static_cast<uint32_t>(input.get_id())));
    if (input.get_id() == 3) memory.back() = {0, 0, 0x80, 0x40};  // 4
    in.emplace_back(known, place.engine, memory.back().data());
  }
  const Desc known = Dense(compiled.query_logical_tensor(7));
  std::vector<uint8_t> result(known.get_mem_size());
  Status("execute", [&] {
    compiled.execute(place.stream, in, {dg::tensor(known, place.engine, result.data())});
    place.stream.wait();
  });
  Line("~output", Numbers(known, result.data()));
}

void Unknown() {
  Begin("unknown shapes");
  const std::optional<dg::partition> of_rank =
      Plain({0, Type::f32, 4, Layout::strided}, {1, Type::f32, 4, Layout::strided},
            {6, Type::f32, 4, Layout::strided}, {7, Type::f32, 4, Layout::any});
  // Lengths as they grow.
  for (const int64_t tokens : {1, 7, 64, 65}) {
    const std::vector<Desc> inputs = {Known(0, {1, 2, 3, 8}), Known(1, {1, 2, tokens, 8}),
                                      Known(3, {1}), Known(6, {1, 2, tokens, 8})};
    Execute(of_rank, inputs, {7, Type::f32, Layout::any});
    Execute(of_rank, inputs, {7, Type::f32, 4, Layout::strided});
    Execute(of_rank, inputs, {7, Type::f32, Dims{1, 2, kUnknown, 8}, Layout::strided});
  }
  Begin("unknown ranks");
  Execute(Plain({0, Type::f32, Layout::strided}, {1, Type::f32, Layout::strided},
                {6, Type::f32, Layout::strided}, {7, Type::f32, Layout::strided}),
          {Known(6, {2, 5, 8}), Known(3, {1}), Known(1, {2, 5, 8}), Known(0, {2, 3, 8})},
          {7, Type::f32, Layout::strided});
}

// From the cache of what was compiled, and without it.
void Again() {
  Begin("again");
  const Dims dims = {1, 2, 4, 8};
  const std::optional<dg::partition> partition =
      Plain(Known(0, dims), Known(1, dims), Known(6, dims), Known(7, dims));
  if (!partition) return;
  Place place;
  const auto compile = [&] {
    Status("compile", [&] {
      partition->compile({Known(0, dims), Known(1, dims), Known(3, {1}), Known(6, dims)},
                         {Known(7, dims)}, place.engine);
    });
  };
  compile();
  compile();
  const int capacity = dg::get_compiled_partition_cache_capacity();
  dg::set_compiled_partition_cache_capacity(0);
  compile();
  dg::set_compiled_partition_cache_capacity(capacity);
}

void Layouts() {
  const Dims dims = {1, 2, 3, 8};
  Begin("layouts");
  const std::optional<dg::partition> partition =
      Plain(Known(0, dims), Known(1, dims), Known(6, dims), Known(7, dims));
  std::vector<Desc> inputs = {Known(0, dims), Known(1, dims), Known(3, {1}), Known(6, dims)};
  Execute(partition, inputs, Known(7, dims));
  Execute(partition, inputs, Known(7, dims, Layout::any));
  // Tokens before heads, padded rows.
  inputs[1] = {1, Type::f32, dims, Dims{48, 8, 16, 1}};
  inputs[3] = {6, Type::f32, dims, Dims{96, 48, 16, 1}};
  Execute(partition, inputs, {7, Type::f32, dims, Dims{48, 8, 16, 1}});
  inputs[0] = Known(0, dims, Layout::any);
  Execute(partition, inputs, Known(7, dims));
  Begin("more tensors than ports");
  inputs[0] = Known(0, dims);
  inputs.insert(inputs.begin(), Known(50, {3}));
  Execute(partition, inputs, Known(7, dims));
}

void Contradictions() {
  Begin("contradictions");
  const std::optional<dg::partition> partition =
      Plain({0, Type::f32, 4, Layout::strided}, {1, Type::f32, 4, Layout::strided},
            {6, Type::f32, 4, Layout::strided}, {7, Type::f32, 4, Layout::strided});
  if (!partition) return;
  const Desc q = Known(0, {1, 2, 3, 8}), s = Known(3, {1});
  const auto compile = [&](const char* what, const std::vector<Desc>& inputs, const Desc& output) {
    Begin(what);
    Place place;
    Status("compile", [&] { partition->compile(inputs, {output}, place.engine); });
  };
  const Desc out(7, Type::f32, Layout::strided);
  compile("sizes of heads differ", {q, Known(1, {1, 2, 5, 9}), s, Known(6, {1, 2, 5, 8})}, out);
  compile("tokens differ", {q, Known(1, {1, 2, 5, 8}), s, Known(6, {1, 2, 6, 8})}, out);
  compile("heads differ",
          {Known(0, {1, 4, 3, 8}), Known(1, {1, 2, 5, 8}), s, Known(6, {1, 2, 5, 8})}, out);
  compile("output differs", {q, Known(1, {1, 2, 5, 8}), s, Known(6, {1, 2, 5, 8})},
          Known(7, {1, 2, 3, 9}));
  compile("batches differ", {q, Known(1, {2, 2, 5, 8}), s, Known(6, {3, 2, 5, 8})}, out);
  compile("a dim is not known", {q, Known(1, {1, 2, kUnknown, 8}), s, Known(6, {1, 2, 5, 8})}, out);
  compile("no data type",
          {q, {1, Type::undef, Dims{1, 2, 5, 8}, Layout::strided}, s, Known(6, {1, 2, 5, 8})}, out);
  compile("no layout",
          {q, {1, Type::f32, Dims{1, 2, 5, 8}, Layout::undef}, s, Known(6, {1, 2, 5, 8})}, out);
  compile("no layout of the output", {q, Known(1, {1, 2, 5, 8}), s, Known(6, {1, 2, 5, 8})},
          {7, Type::f32, Layout::undef});
  compile("an input is missing", {q, Known(1, {1, 2, 5, 8}), Known(6, {1, 2, 5, 8})}, out);
  compile("the output is missing", {q, Known(1, {1, 2, 5, 8}), s, Known(6, {1, 2, 5, 8})},
          {8, Type::f32, Layout::strided});
}

// The graph states them.
void OtherShapes() {
  const Dims dims = {1, 2, 3, 8}, more = {1, 2, 5, 8};
  const std::optional<dg::partition> partition =
      Plain(Known(0, dims), Known(1, dims), Known(6, dims), Known(7, dims));
  const std::optional<dg::partition> in_part =
      Plain({0, Type::f32, Dims{1, 2, kUnknown, 8}, Layout::strided}, Known(1, dims),
            Known(6, dims), {7, Type::f32, Dims{1, 2, kUnknown, 8}, Layout::strided});
  if (!partition || !in_part) return;
  Begin("other tokens than the graph's");
  Execute(partition, {Known(0, dims), Known(1, more), Known(3, {1}), Known(6, more)},
          Known(7, dims));
  Begin("other queries than the graph's");
  Execute(partition, {Known(0, more), Known(1, dims), Known(3, {1}), Known(6, dims)},
          Known(7, more));
  Execute(in_part, {Known(0, more), Known(1, dims), Known(3, {1}), Known(6, dims)}, Known(7, more));
  Begin("other ranks than the graph's");
  Execute(partition, {Known(0, {2, 3, 8}), Known(1, {2, 3, 8}), Known(3, {1}), Known(6, {2, 3, 8})},
          Known(7, {2, 3, 8}));
}

}  // namespace

void RunMisuse() {
  Begin("misuse");
  const Dims dims = {1, 2, 3, 8};
  dg::graph graph(dnnl::engine::kind::cpu);
  const Desc scores(2, Type::f32), probs(5, Type::f32);
  dg::op qk(0, Kind::MatMul, {Known(0, dims), Known(1, dims)}, {scores}, "qk");
  qk.set_attr<bool>(Attr::transpose_b, true);
  dg::op softmax(2, Kind::SoftMax, {scores}, {probs}, "softmax");
  softmax.set_attr<int64_t>(Attr::axis, -1);
  dg::op pv(3, Kind::MatMul, {probs, Known(6, dims)}, {Known(7, dims)}, "pv");
  for (dg::op* op : {&qk, &softmax, &pv}) graph.add_op(*op);
  graph.finalize();
  const dg::partition partition = graph.get_partitions().at(0);
  Place place;
  const std::vector<Desc> inputs = {Known(0, dims), Known(1, dims), Known(6, dims)};
  Status("compile of an unknown rank", [&] {
    partition.compile({{0, Type::f32, Layout::strided}, inputs[1], inputs[2]}, {Known(7, dims)},
                      place.engine);
  });
  const dg::compiled_partition compiled = partition.compile(inputs, {Known(7, dims)}, place.engine);
  std::vector<std::vector<uint8_t>> data;
  std::vector<dg::tensor> in;
  for (const Desc& input : inputs) {
    data.push_back(Fill(input, 1));
    in.emplace_back(input, place.engine, data.back().data());
  }
  std::vector<uint8_t> result(data[0].size());
  const dg::tensor out(Known(7, dims), place.engine, result.data());
  Status("execute of too few inputs", [&] {
    compiled.execute(place.stream, {in[0], in[1]}, {out});
  });
  Status("execute without outputs", [&] { compiled.execute(place.stream, in, {}); });
  in[1].set_data_handle(nullptr);
  Status("execute of a null input", [&] { compiled.execute(place.stream, in, {out}); });
  std::vector<const_dnnl_graph_tensor_t> nulls(3, nullptr);
  const_dnnl_graph_tensor_t one_out = out.get();
  Line("status of execute of null tensors",
       dnnl_graph_compiled_partition_execute(compiled.get(), place.stream.get(), 3, nulls.data(), 1,
                                             &one_out));
  const dnnl_graph_logical_tensor_t* no_desc = nullptr;
  Line("status of compile of null descriptions",
       dnnl_graph_partition_compile(partition.get(), compiled.get(), 1, &no_desc, 0, nullptr,
                                    place.engine.get()));
}

void RunShapes() {
  Unknown();
  Again();
  Layouts();
  Contradictions();
  OtherShapes();
}

}  // namespace client
