// Attention over an int8 cache in device memory, on a GPU. Where there is none it says why, and
// lets the CPU run the same kernels.
#include <cmath>
#include <iostream>
#include <memory>
#include <vector>

#include "kvant/backends/cuda_simt.h"
#include "kvant/kvant.h"

namespace {

constexpr int kHeads = 2, kRatio = 4, kTokens = 300, kHeadSize = 64;

// Host data that has moved to where an engine reads it.
class OnDevice {
 public:
  template <typename T>
  OnDevice(const kvant::Engine& engine, const std::vector<T>& data)
      : engine_(engine), bytes_(data.size() * sizeof(T)) {
    status_ = [&]() -> absl::Status {
      KVANT_ASSIGN_OR_RETURN(data_, engine_.memory().Allocate(bytes_));
      return engine_.memory().CopyFromHost(data_, data.data(), bytes_);
    }();
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { engine_.memory().Free(data_); }

  const absl::Status& status() const { return status_; }
  operator kvant::ConstTensor() const { return {data_, bytes_}; }  // NOLINT
  operator kvant::Tensor() const { return {data_, bytes_}; }       // NOLINT

 private:
  const kvant::Engine& engine_;
  const size_t bytes_;
  void* data_ = nullptr;
  absl::Status status_;
};

// O = softmax(Q K^T / 8) V, a scale per token and head.
absl::StatusOr<kvant::Graph> Attention() {
  kvant::GraphBuilder g;
  const auto cache = [&](const std::string& name) {
    const auto codes = g.Input(name, kvant::kS8, {1, kHeads, 1, kTokens, kHeadSize});
    const auto scales = g.Input(name + "_scales", kvant::kF32, {1, kHeads, 1, kTokens, 1});
    return g.DynamicDequantize(codes, scales, {.group_shape = {1, 1, 1, 1, kHeadSize}});
  };
  const auto q = g.Input("q", kvant::kF32, {1, kHeads, kRatio, 1, kHeadSize});
  const auto products = g.MatMul(q, cache("k"), {.transpose_b = true});
  const auto scores = g.Multiply(products, g.Scalar(0.125));
  g.Output("o", g.MatMul(g.SoftMax(scores), cache("v")));
  return std::move(g).Build();
}

absl::StatusOr<kvant::Engine> GpuOrItsStandIn() {
  absl::StatusOr<kvant::Engine> gpu = kvant::Engine::Create({.device = kvant::Device::kCuda});
  if (gpu.ok()) return gpu;
  std::cout << "no GPU here: " << gpu.status().message() << "\n";
  kvant::EnableCudaSimt();
  return kvant::Engine::Create({.device = kvant::Device::kCudaSimt});
}

absl::Status Run() {
  KVANT_ASSIGN_OR_RETURN(const auto graph, Attention());
  KVANT_ASSIGN_OR_RETURN(const auto engine, GpuOrItsStandIn());
  KVANT_ASSIGN_OR_RETURN(const auto attention, engine.Compile(graph));
  std::cout << attention << "\n";

  std::vector<float> q(kHeads * kRatio * kHeadSize);
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.7f * static_cast<float>(i));
  std::vector<int8_t> k(kHeads * kTokens * kHeadSize);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<int8_t>(i * 37);
  // Every value is 6 * 0.25, and so is their weighted mean.
  const OnDevice queries(engine, q), keys(engine, k),
      values(engine, std::vector<int8_t>(k.size(), 6)),
      scales(engine, std::vector<float>(kHeads * kTokens, 0.25f)),
      output(engine, std::vector<float>(q.size()));
  for (const OnDevice* one : {&queries, &keys, &values, &scales, &output}) {
    KVANT_RETURN_IF_ERROR(one->status());
  }
  // A stream of one's own (a cudaStream_t) would be the second argument of Stream.
  const kvant::Stream stream(engine);
  KVANT_RETURN_IF_ERROR(attention.Execute(
      stream,
      {{"q", queries}, {"k", keys}, {"k_scales", scales}, {"v", values}, {"v_scales", scales}},
      {{"o", output}}));
  KVANT_RETURN_IF_ERROR(engine.memory().Synchronize(stream.native()));
  std::vector<float> o(q.size());
  const kvant::Tensor result = output;
  KVANT_RETURN_IF_ERROR(engine.memory().CopyToHost(o.data(), result.data, result.bytes));
  for (const float x : o) {
    if (std::abs(x - 1.5f) > 1e-4f) return absl::InternalError("not the mean of equal values");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
