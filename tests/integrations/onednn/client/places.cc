// Engines with allocators, several of them, scratchpads, and several threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>

#include "client.h"
#include "oneapi/dnnl/dnnl_graph_sycl.h"

namespace client {
namespace {

std::atomic<int> allocated, freed;
bool throws = false;

void* Allocate(size_t size, size_t alignment) {
  if (throws) throw std::runtime_error("no more");
  ++allocated;
  alignment = alignment < 64 ? 64 : alignment;
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void Free(void* data) {
  if (data != nullptr) ++freed;
  std::free(data);
}

// Of SYCL's runtime, whose CPU device takes memory of the host.
void* SyclAllocate(size_t size, size_t alignment, const void*, const void*) {
  return Allocate(size, alignment);
}
void SyclFree(void* data, const void*, const void*, void*) { Free(data); }

constexpr unsigned kSycl = 512;  // of dnnl_version_t

dnnl::engine EngineWithAllocator() {
  dnnl_graph_allocator_t allocator = nullptr;
  Line("allocator_create",
       dnnl_version()->cpu_runtime == kSycl
           ? dnnl_graph_sycl_interop_allocator_create(&allocator, SyclAllocate, SyclFree)
           : dnnl_graph_allocator_create(&allocator, Allocate, Free));
  dnnl_engine_t engine = nullptr;
  Line("make_engine_with_allocator",
       dnnl_graph_make_engine_with_allocator(&engine, dnnl_cpu, 0, allocator));
  // The engine has a copy.
  Line("allocator_destroy", dnnl_graph_allocator_destroy(allocator));
  return engine == nullptr ? dnnl::engine(dnnl::engine::kind::cpu, 0) : dnnl::engine(engine);
}

constexpr int64_t kQ = 40, kK = 70, kD = 32;
const Dims kQueries = {1, 4, kQ, kD}, kKeys = {1, 4, kK, kD};

Desc Of(size_t id, const Dims& dims) { return {id, Type::f32, dims, Layout::strided}; }

std::vector<dg::partition> Partitions() {
  dg::graph graph(dnnl::engine::kind::cpu);
  const Desc scores = Of(2, {1, 4, kQ, kK}), probs = Of(3, {1, 4, kQ, kK});
  dg::op qk(0, Kind::MatMul, {Of(0, kQueries), Of(1, kKeys)}, {scores}, "qk");
  qk.set_attr<bool>(Attr::transpose_b, true);
  dg::op softmax(1, Kind::SoftMax, {scores}, {probs}, "softmax");
  softmax.set_attr<int64_t>(Attr::axis, -1);
  graph.add_op(qk);
  graph.add_op(softmax);
  graph.add_op(dg::op(2, Kind::MatMul, {probs, Of(4, kKeys)}, {Of(5, kQueries)}, "pv"));
  graph.finalize();
  return graph.get_partitions();
}

dg::partition Attention() { return Partitions().at(0); }

dg::compiled_partition Compile(const dg::partition& partition, const dnnl::engine& engine) {
  return partition.compile({Of(0, kQueries), Of(1, kKeys), Of(4, kKeys)}, {Of(5, kQueries)},
                           engine);
}

// What an execution is given, and its result.
struct Data {
  explicit Data(const dnnl::engine& engine)
      : q(Fill(Of(0, kQueries), 1, 4)),
        k(Fill(Of(1, kKeys), 2)),
        v(Fill(Of(4, kKeys), 3)),
        out(q.size()) {
    inputs = {{Of(0, kQueries), engine, q.data()},
              {Of(1, kKeys), engine, k.data()},
              {Of(4, kKeys), engine, v.data()}};
    outputs = {{Of(5, kQueries), engine, out.data()}};
  }
  std::string Result() const { return Numbers(Of(5, kQueries), out.data()); }
  std::vector<uint8_t> q, k, v, out;
  std::vector<dg::tensor> inputs, outputs;
};

void Allocators() {
  Begin("allocators");
  dnnl::engine engine = EngineWithAllocator();
  dnnl::stream stream(engine);
  const int before = allocated;
  {
    const dg::tensor tensor(Of(0, kQueries), engine, DNNL_MEMORY_ALLOCATE);
    Line("a tensor is of the allocator", allocated - before);
  }
  Line("and goes back to it", allocated == freed);
  dg::compiled_partition compiled = Compile(Attention(), engine);
  Data data(engine);
  compiled.execute(stream, data.inputs, data.outputs);
  stream.wait();
  Line("~output", data.Result());
  Line("all went back", allocated == freed);
#if CLIENT_NEW
  const Desc scratchpad = compiled.get_scratchpad_logical_tensor();
  Line("scratchpad's rank", static_cast<int64_t>(scratchpad.get_dims().size()));
  Line("scratchpad's type", static_cast<int>(scratchpad.get_data_type()));
  Line("scratchpad's layout", static_cast<int>(scratchpad.get_layout_type()));
  Line("scratchpad's id", std::to_string(scratchpad.get_id()));
  Line("scratchpad's bytes are its size",
       scratchpad.get_dims()[0] == static_cast<int64_t>(scratchpad.get_mem_size()));
  // Garbage in it does no harm, and nothing is written beyond.
  const size_t bytes = scratchpad.get_mem_size();
  uint8_t* const memory = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 128) / 64 * 64));
  for (int round = 0; round < 2; ++round) {
    std::fill(memory, memory + bytes + 64, 0xff);
    std::fill(data.out.begin(), data.out.end(), 0);
    dg::tensor scratch(scratchpad, engine, memory);
    const int had = allocated;
    compiled.execute(stream, data.inputs, data.outputs, scratch);
    stream.wait();
    Line("~output", data.Result());
    Line("with a scratchpad nothing is allocated", allocated - had);
    bool guarded = true;
    for (size_t i = bytes; i < bytes + 64; ++i) guarded = guarded && memory[i] == 0xff;
    Line("nothing beyond the scratchpad", guarded);
  }
  // Wherever it lies: memory of a std::vector, say, is not aligned to cache lines.
  for (const size_t offset : {1, 16}) {
    std::fill(data.out.begin(), data.out.end(), 0);
    dg::tensor scratch(scratchpad, engine, memory + offset);
    Status("execute with a scratchpad that is not aligned",
           [&] { compiled.execute(stream, data.inputs, data.outputs, scratch); });
    stream.wait();
    Line("~output", data.Result());
  }
  std::free(memory);
  // What a client's allocator throws passes through.
  const auto what = [](const auto& call) -> std::string {
    throws = true;
    std::string text = "nothing";
    try {
      call();
    } catch (const std::runtime_error& error) {
      text = error.what();
    }
    throws = false;
    return text;
  };
  Line("thrown through a tensor",
       what([&] { dg::tensor(Of(0, kQueries), engine, DNNL_MEMORY_ALLOCATE); }));
  const std::string thrown = what([&] {
    compiled.execute(stream, data.inputs, data.outputs);
    stream.wait();
  });
  Line("thrown through execute, or nothing to allocate", bytes == 0 || thrown == "no more");
  Line("all went back", allocated == freed);
#endif
}

// A handle that is compiled again, for what does not compile, keeps what it has.
void Recompiles() {
  Begin("compiled again");
  const dg::partition partition = Attention();
  Place place;
  Data data(place.engine);
  dnnl_graph_compiled_partition_t compiled = nullptr;
  Line("create", dnnl_graph_compiled_partition_create(&compiled, partition.get()));
  const auto described = [](size_t id, const Dims& dims,
                            dnnl_graph_tensor_property_t property =
                                dnnl_graph_tensor_property_undef) {
    dnnl_graph_logical_tensor_t tensor;
    dnnl_graph_logical_tensor_init_with_dims(&tensor, id, dnnl_f32,
                                             static_cast<int32_t>(dims.size()), dims.data(),
                                             dnnl_graph_layout_type_strided, property);
    return tensor;
  };
  const auto compile = [&](const Dims& keys) {
    const dnnl_graph_logical_tensor_t q = described(0, kQueries),
                                      k = described(1, keys, dnnl_graph_tensor_property_constant),
                                      v = described(4, kKeys), o = described(5, kQueries);
    const dnnl_graph_logical_tensor_t *inputs[] = {&q, &k, &v}, *outputs[] = {&o};
    return dnnl_graph_partition_compile(partition.get(), compiled, 3, inputs, 1, outputs,
                                        place.engine.get());
  };
  const auto execute = [&] {
    std::vector<const_dnnl_graph_tensor_t> inputs, outputs;
    for (const dg::tensor& tensor : data.inputs) inputs.push_back(tensor.get());
    for (const dg::tensor& tensor : data.outputs) outputs.push_back(tensor.get());
    std::fill(data.out.begin(), data.out.end(), 0);
    Line("execute",
         dnnl_graph_compiled_partition_execute(compiled, place.stream.get(), inputs.size(),
                                               inputs.data(), outputs.size(), outputs.data()));
    place.stream.wait();
    Line("~output", data.Result());
  };
  Line("compile", compile(kKeys));
  execute();
  Line("compile for other heads", compile({1, 3, kK, kD}));
  dnnl_graph_logical_tensor_t output;
  Line("query", dnnl_graph_compiled_partition_query_logical_tensor(compiled, 5, &output));
  Line("rank of the output", output.ndims);
  dnnl_graph_logical_tensor_t k;
  Line("query", dnnl_graph_compiled_partition_query_logical_tensor(compiled, 1, &k));
  Line("property of K", k.property);
  execute();
  Line("destroy", dnnl_graph_compiled_partition_destroy(compiled));
}

void Engines() {
  Begin("engines");
  const dg::partition partition = Attention();
  Place one, two;
  dg::compiled_partition compiled = Compile(partition, one.engine);
  Data data(one.engine);
  compiled.execute(one.stream, data.inputs, data.outputs);
  one.stream.wait();
  Line("~output", data.Result());
  dnnl::stream another(one.engine);
  Status("execute on another stream",
         [&] { compiled.execute(another, data.inputs, data.outputs); });
  another.wait();
  Data elsewhere(two.engine);
  dg::compiled_partition second = Compile(partition, two.engine);
  second.execute(two.stream, elsewhere.inputs, elsewhere.outputs);
  two.stream.wait();
  Line("~output", elsewhere.Result());
  Line("same result", data.out == elsewhere.out);
  Status("execute on a stream of another engine",
         [&] { compiled.execute(two.stream, data.inputs, data.outputs); });
  two.stream.wait();
  Status("execute without tensors", [&] { compiled.execute(one.stream, {dg::tensor()}, {}); });
}

#if CLIENT_NEW
// SYCL's own call. Its types need a compiler that is not here: a list of no events is like any
// empty vector, and an event is a shared pointer.
void SyclEvents() {
  if (dnnl_version()->cpu_runtime != kSycl) return;
  Begin("events of SYCL");
  Place place;
  const dg::compiled_partition compiled = Compile(Attention(), place.engine);
  Data data(place.engine);
  std::vector<const_dnnl_graph_tensor_t> inputs, outputs;
  for (const dg::tensor& tensor : data.inputs) inputs.push_back(tensor.get());
  for (const dg::tensor& tensor : data.outputs) outputs.push_back(tensor.get());
  const std::vector<std::shared_ptr<void>> deps;
  for (const bool asks : {false, true}) {
    std::shared_ptr<void> event;
    std::fill(data.out.begin(), data.out.end(), 0);
    Line("execute", dnnl_graph_sycl_interop_compiled_partition_execute(
                        compiled.get(), place.stream.get(), inputs.size(), inputs.data(),
                        outputs.size(), outputs.data(), &deps, asks ? &event : nullptr));
    Line("an event", event != nullptr);
    place.stream.wait();
    Line("~output", data.Result());
  }
  Line("execute_v2", dnnl_graph_sycl_interop_compiled_partition_execute_v2(
                         compiled.get(), place.stream.get(), inputs.size(), inputs.data(),
                         outputs.size(), outputs.data(), nullptr, nullptr, nullptr));
  place.stream.wait();
}
#endif

void Threads() {
  Begin("threads");
  const dg::partition partition = Attention();
  Place place;
  const dg::compiled_partition compiled = Compile(partition, place.engine);
  Data expected(place.engine);
  compiled.execute(place.stream, expected.inputs, expected.outputs);
  place.stream.wait();
  std::atomic<int> different = 0, failed = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 10; ++round) {
        try {
          dnnl::stream stream(place.engine);
          Data data(place.engine);
          if (t % 2 == 0) {
            compiled.execute(stream, data.inputs, data.outputs);
          } else {
            Compile(Attention(), place.engine).execute(stream, data.inputs, data.outputs);
          }
          stream.wait();
          if (data.out != expected.out) ++different;
        } catch (const dnnl::error&) {
          ++failed;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Line("different results", different);
  Line("failures", failed);
}

// Destroyed after main: what it stands on must not be gone.
dg::partition kept_partition;
dg::compiled_partition kept;
std::unique_ptr<Place> kept_place;
struct AtExit {
  ~AtExit() {
    if (kept_place == nullptr) return;
    Data data(kept_place->engine);
    kept.execute(kept_place->stream, data.inputs, data.outputs);
    Compile(kept_partition, kept_place->engine)
        .execute(kept_place->stream, data.inputs, data.outputs);
    kept_place->stream.wait();
    Begin("after main");
    Line("~output", data.Result());
  }
} at_exit;

}  // namespace

void RunPlaces() {
  Begin("places");
  Line("partitions", static_cast<int64_t>(Partitions().size()));
  if (Partitions().size() != 1) return;
  Allocators();
  Recompiles();
  Engines();
#if CLIENT_NEW
  SyclEvents();
#endif
  Threads();
  // SYCL's own state is gone by then.
  if (dnnl_version()->cpu_runtime == kSycl) return;
  kept_place = std::make_unique<Place>();
  kept_partition = Attention();
  kept = Compile(kept_partition, kept_place->engine);
}

}  // namespace client
