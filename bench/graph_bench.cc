// What it costs to describe, partition and compile attention, and what an execution
// adds to its kernel.
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

LogicalTensor MakeTensor(TensorId id, DataType type, Dims dims) {
  LogicalTensor tensor{.id = id, .type = type, .dims = std::move(dims)};
  tensor.strides = DenseStrides(*tensor.dims);
  return tensor;
}

Op MakeOp(OpId id, OpKind kind, Attributes attrs = {}) {
  Op op;
  op.id = id;
  op.kind = kind;
  op.attrs = std::move(attrs);
  return op;
}

// Five ops the way a framework adds them: MatMul, Divide, Add, SoftMax, MatMul.
absl::StatusOr<Graph> BuildFive(int64_t kv_len) {
  constexpr int64_t kHeads = 32, kSize = 128;
  const LogicalTensor q = MakeTensor(0, kF32, {1, kHeads, 1, kSize});
  const LogicalTensor k = MakeTensor(1, kF32, {1, kHeads, kv_len, kSize});
  const LogicalTensor v = MakeTensor(2, kF32, {1, kHeads, kv_len, kSize});
  const LogicalTensor scale = MakeTensor(3, kF32, {1});
  const LogicalTensor mask = MakeTensor(4, kF32, {1, 1, 1, kv_len});
  const auto internal = [&](TensorId id) { return MakeTensor(id, kF32, {1, kHeads, 1, kv_len}); };
  const LogicalTensor s = internal(5), scaled = internal(6), masked = internal(7), p = internal(8);
  const LogicalTensor o = MakeTensor(9, kF32, {1, kHeads, 1, kSize});
  Graph graph;
  const auto add = [&](Op op, std::initializer_list<LogicalTensor> in, const LogicalTensor& out) {
    return graph.AddOp(std::move(op), in, {out});
  };
  absl::Status status = add(MakeOp(0, OpKind::kMatMul, {{Attr::kTransposeB, true}}), {q, k}, s);
  status.Update(add(MakeOp(1, OpKind::kDivide), {s, scale}, scaled));
  status.Update(add(MakeOp(2, OpKind::kAdd), {scaled, mask}, masked));
  status.Update(add(MakeOp(3, OpKind::kSoftMax, {{Attr::kAxis, int64_t{-1}}}), {masked}, p));
  status.Update(add(MakeOp(4, OpKind::kMatMul), {p, v}, o));
  status.Update(graph.Finalize());
  if (!status.ok()) return status;
  return graph;
}

Partition TheOnlyPartition(const Graph& graph) { return PartitionGraph(graph)->at(0); }

void BM_BuildAndFinalize(benchmark::State& state) {
  for (auto _ : state) {
    absl::StatusOr<Graph> graph = BuildFive(4096);
    if (!graph.ok()) state.SkipWithError(std::string(graph.status().message()).c_str());
    benchmark::DoNotOptimize(graph);
  }
}
BENCHMARK(BM_BuildAndFinalize)->Unit(benchmark::kMicrosecond);

void BM_BuildWithBuilder(benchmark::State& state) {
  for (auto _ : state) {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {1, 32, 1, 128});
    const Value k = g.Input("k", kF32, {1, 32, 4096, 128});
    const Value v = g.Input("v", kF32, {1, 32, 4096, 128});
    const Value scores =
        g.Divide(g.MatMul(q, k, {.transpose_b = true}), g.Input("scale", kF32, {}));
    const Value masked = g.Add(scores, g.Input("mask", kF32, {1, 1, 1, 4096}));
    g.Output("o", g.MatMul(g.SoftMax(masked), v));
    absl::StatusOr<Graph> graph = std::move(g).Build();
    benchmark::DoNotOptimize(graph);
  }
}
BENCHMARK(BM_BuildWithBuilder)->Unit(benchmark::kMicrosecond);

void BM_Partition(benchmark::State& state) {
  const Graph graph = *BuildFive(4096);
  for (auto _ : state) {
    absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(graph);
    benchmark::DoNotOptimize(partitions);
  }
}
BENCHMARK(BM_Partition)->Unit(benchmark::kMicrosecond);

// Another KV length of a partition whose kernel is known, as in every decode step
// without a capacity.
void BM_CompileForNewLength(benchmark::State& state) {
  const Partition partition = TheOnlyPartition(*BuildFive(4096));
  const Engine engine = *Engine::Create({.backends = {"cpu"}, .threads = 1});
  int64_t kv_len = 4096;
  for (auto _ : state) {
    kv_len = kv_len % 8192 + 1;
    absl::StatusOr<CompiledPartition> compiled =
        engine.Compile(partition, {.ports = {MakeTensor(1, kF32, {1, 32, kv_len, 128}),
                                             MakeTensor(2, kF32, {1, 32, kv_len, 128}),
                                             MakeTensor(4, kF32, {1, 1, 1, kv_len})}});
    if (!compiled.ok()) state.SkipWithError(std::string(compiled.status().message()).c_str());
    benchmark::DoNotOptimize(compiled);
  }
}
BENCHMARK(BM_CompileForNewLength)->Unit(benchmark::kMicrosecond);

// Attention of one query over one token: the kernel has next to nothing to do, so that
// what remains is its own start and, with BM_ExecuteTiny, what Execute adds.
struct Tiny {
  Tiny() {
    GraphBuilder g;
    const Value q = g.Input("q", kF32, {1, 1, 1, 16});
    const Value k = g.Input("k", kF32, {1, 1, 1, 16});
    const Value scores = g.MatMul(q, k, {.transpose_b = true});
    g.Output("o", g.MatMul(g.SoftMax(scores), k));
    const Graph graph = *std::move(g).Build();
    partition = TheOnlyPartition(graph);
  }
  Partition partition;
  alignas(64) float data[3][16] = {};
};

void BM_KernelAloneTiny(benchmark::State& state) {
  Tiny tiny;
  const std::unique_ptr<Executor> executor = MakeSerialExecutor();
  const auto executable = MakeCpuBackend()->Compile(tiny.partition);
  if (!executable.ok()) return state.SkipWithError("the cpu backend declines");
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> scratch((*executable)->scratch_bytes(1) / 64 + 1);
  const void* inputs[] = {tiny.data[0], tiny.data[1]};
  void* outputs[] = {tiny.data[2]};
  for (auto _ : state) {
    const absl::Status status =
        (*executable)->Run({*executor, inputs, outputs, scratch.data()->bytes});
    benchmark::DoNotOptimize(status.ok());
  }
}
BENCHMARK(BM_KernelAloneTiny)->Unit(benchmark::kNanosecond);

void BM_ExecuteTiny(benchmark::State& state) {
  Tiny tiny;
  const Engine engine = *Engine::Create({.backends = {"cpu"}, .executor = MakeSerialExecutor()});
  const CompiledPartition compiled = *engine.Compile(tiny.partition);
  const Stream stream(engine);
  const std::vector<ConstTensor> inputs = {{tiny.data[0], 64}, {tiny.data[1], 64}};
  const std::vector<Tensor> outputs = {{tiny.data[2], 64}};
  for (auto _ : state) {
    const absl::Status status = compiled.Execute(stream, inputs, outputs);
    benchmark::DoNotOptimize(status.ok());
  }
}
BENCHMARK(BM_ExecuteTiny)->Unit(benchmark::kNanosecond);

}  // namespace
}  // namespace kvant
