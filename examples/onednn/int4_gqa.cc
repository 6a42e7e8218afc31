// A client of oneDNN Graph, which knows nothing of kvant: one token's attention, 32 query heads on
// 8 heads of K and V, over 4,096 tokens in int4. Linked with kvant before oneDNN, or preloaded, it
// is kvant's client (docs/onednn.md). It times itself with kvant and, in a second process, without.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "oneapi/dnnl/dnnl_graph.hpp"

namespace {

using dnnl::graph::op;
using Desc = dnnl::graph::logical_tensor;
using Type = Desc::data_type;
using Layout = Desc::layout_type;

constexpr int64_t kHeads = 8, kRatio = 4, kTokens = 4096, kSize = 128, kGroup = 32;

// Tensors by their id.
enum Id : size_t {
  kQ,
  kK,
  kKScales,
  kV,
  kVScales,
  kDivisor,
  kOut,
  kKeys,
  kScores,
  kScaled,
  kProbs,
  kValues
};

const Desc q(kQ, Type::f32, Desc::dims{1, kHeads, kRatio, 1, kSize}, Layout::strided);
const Desc k(kK, Type::u4, Desc::dims{1, kHeads, 1, kTokens, kSize}, Layout::strided);
const Desc v(kV, Type::u4, Desc::dims{1, kHeads, 1, kTokens, kSize}, Layout::strided);
const Desc k_scales(kKScales, Type::f32, Desc::dims{1, kHeads, 1, kTokens, kSize / kGroup},
                    Layout::strided);
const Desc v_scales(kVScales, Type::f32, Desc::dims{1, kHeads, 1, kTokens, kSize / kGroup},
                    Layout::strided);
const Desc divisor(kDivisor, Type::f32, Desc::dims{1}, Layout::strided);
const Desc out(kOut, Type::f32, Desc::dims{1, kHeads, kRatio, 1, kSize}, Layout::strided);

op Dequantize(size_t id, const Desc& codes, const Desc& scales, const Desc& real) {
  op dequantize(id, op::kind::DynamicDequantize, {codes, scales}, {real}, "dequantize");
  dequantize.set_attr<std::string>(op::attr::qtype, "per_group");
  dequantize.set_attr<std::vector<int64_t>>(op::attr::group_shape, {1, 1, 1, 1, kGroup});
  return dequantize;
}

// softmax(Q K^T / sqrt(128)) V. Nothing need be known of tensors in between.
dnnl::graph::partition Attention() {
  const Desc keys(kKeys, Type::f32), scores(kScores, Type::f32), scaled(kScaled, Type::f32),
      probs(kProbs, Type::f32), values(kValues, Type::f32);
  op qk(1, op::kind::MatMul, {q, keys}, {scores}, "qk");
  qk.set_attr<bool>(op::attr::transpose_b, true);
  const op scale(2, op::kind::Divide, {scores, divisor}, {scaled}, "scale");
  op softmax(3, op::kind::SoftMax, {scaled}, {probs}, "softmax");
  softmax.set_attr<int64_t>(op::attr::axis, -1);
  const op pv(5, op::kind::MatMul, {probs, values}, {out}, "pv");

  dnnl::graph::graph graph(dnnl::engine::kind::cpu);
  graph.set_fpmath_mode(dnnl::fpmath_mode::f16, /*apply_to_int=*/true);
  for (const op& one : {Dequantize(0, k, k_scales, keys), qk, scale, softmax,
                        Dequantize(4, v, v_scales, values), pv}) {
    graph.add_op(one);
  }
  graph.finalize();
  const std::vector<dnnl::graph::partition> partitions = graph.get_partitions();
  if (partitions.size() != 1 || !partitions[0].is_supported()) {
    std::printf("oneDNN makes %zu partitions of it\n", partitions.size());
    std::exit(1);
  }
  return partitions[0];
}

void Run(const char* who) {
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const std::vector<Desc> inputs = {q, k, k_scales, v, v_scales, divisor};
  const auto attention = Attention().compile(inputs, {out}, engine);

  // All values are 9 / 4.
  std::vector<float> queries(kHeads * kRatio * kSize, 1),
      scales(kHeads * kTokens * kSize / kGroup, 0.25f);
  std::vector<float> root = {11.3137f}, result(queries.size());
  std::vector<uint8_t> codes(kHeads * kTokens * kSize / 2, 0x99);
  void* const data[] = {queries.data(), codes.data(),  scales.data(),
                        codes.data(),   scales.data(), root.data()};
  std::vector<dnnl::graph::tensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) tensors.emplace_back(inputs[i], engine, data[i]);
  const std::vector<dnnl::graph::tensor> results = {{out, engine, result.data()}};

  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    attention.execute(stream, tensors, results);
    stream.wait();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  std::printf("%s: %.2f ms, and the result is %g\n", who, best, result[0]);
  std::fflush(stdout);
  if (result[0] < 2.24f || result[0] > 2.26f) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    Run("without kvant");
    return 0;
  }
  Run("with kvant");
  const pid_t other = fork();
  if (other == 0) {
    setenv("KVANT_DNNL_GRAPH", "0", 1);
    execl("/proc/self/exe", argv[0], "again", nullptr);
    std::_Exit(127);
  }
  int status = 1;
  waitpid(other, &status, 0);
  return status == 0 ? 0 : 1;
}
