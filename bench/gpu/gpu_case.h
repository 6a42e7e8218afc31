// GpuCase: one attention problem on a GPU, ready to be timed.
#ifndef KVANT_BENCH_GPU_GPU_CASE_H_
#define KVANT_BENCH_GPU_GPU_CASE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/bench/gpu/device_data.h"
#include "kvant/tools/attention_graph.h"
#include "kvant/tools/cuda_stream.h"
#include "kvant/tools/graph_runner.h"

namespace kvant {

struct GpuCaseOptions {
  AttentionGraphOptions graph;
  // Per sequence, with graph.kv_lengths.
  std::vector<int32_t> lengths;
  // Calls in a captured graph, at least.
  int calls = 20;
};

class GpuCase {
 public:
  // Inputs lie on the device in as many copies as exceed four times its second-level cache, or as
  // fit; each call takes the next. `stream` outlives the case.
  static absl::StatusOr<std::unique_ptr<GpuCase>> Create(const Engine& engine,
                                                         const DeviceData& data,
                                                         const CudaStream& stream,
                                                         const GpuCaseOptions& options);
  ~GpuCase();
  GpuCase(const GpuCase&) = delete;
  GpuCase& operator=(const GpuCase&) = delete;

  const CompiledPartition& compiled() const { return runner_.partitions()[0]; }
  int calls() const { return calls_; }
  size_t copies() const { return copies_.size(); }
  // Of K, V, scales and zero points: what one call has to read.
  int64_t kv_bytes() const { return kv_bytes_; }

  // Of one call, from a replay of the captured graph.
  absl::StatusOr<double> Microseconds() const;
  // What a call of Execute costs the host, the median of some.
  absl::StatusOr<double> HostMicroseconds() const;
  // Relative L2 of one sequence's one group of heads, of the last call, against the oracle on the
  // very same data. Nothing where that would take too long.
  absl::StatusOr<std::optional<double>> Error() const;

 private:
  struct Copy {
    std::vector<ConstTensor> inputs;
    std::vector<Tensor> outputs;
  };
  GpuCase(GpuCaseOptions options, GraphRunner runner, const CudaStream& stream)
      : options_(std::move(options)),
        kv_len_(static_cast<int32_t>(options_.graph.kv_len)),
        q_len_(static_cast<int32_t>(options_.graph.q_len)),
        runner_(std::move(runner)),
        stream_(stream) {}
  absl::StatusOr<Copy> MakeCopy(const DeviceData& data, uint32_t seed);
  absl::Status Execute(size_t copy) const;
  absl::StatusOr<Buffer> FetchSlice(const void* from, size_t bytes, size_t slice_bytes,
                                    int64_t sequence) const;

  const GpuCaseOptions options_;
  const int32_t kv_len_, q_len_;  // host scalars
  const GraphRunner runner_;
  const CudaStream& stream_;
  std::vector<void*> memory_;
  std::vector<Copy> copies_;
  int calls_ = 0;
  int64_t kv_bytes_ = 0;
  std::optional<CudaGraph> captured_;
};

}  // namespace kvant

#endif  // KVANT_BENCH_GPU_GPU_CASE_H_
