// Engine: a device and the backends that can run partitions on it.
#ifndef KVANT_BACKENDS_ENGINE_H_
#define KVANT_BACKENDS_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/compiled_graph.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/device_memory.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partition.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {

enum class Device : uint8_t {
  kCpu,
  kCuda,      // a GPU; ports are device memory, executions are put onto the stream
  kCudaSimt,  // the same kernels on the host, for tests (cuda_simt.h)
};
// "cpu", "cuda", "cuda_simt".
std::string_view DeviceName(Device device);
// Where the backend of that name runs; nothing if there is none.
std::optional<Device> DeviceOfBackend(std::string_view name);

struct EngineOptions {
  Device device = Device::kCpu;
  int device_index = 0;  // which GPU, of those that the driver shows
  // Names of the device's backends to ask, in order. Empty: all of the device's but the oracle, so
  // "cpu" and "reference", or "cuda", or "cuda_simt".
  std::vector<std::string> backends;
  // Where parallel work runs; null: one on oneTBB with `threads` threads
  // (<= 0: one per hardware thread, which is also the most). Shared by all streams of the engine.
  std::shared_ptr<Executor> executor;
  int threads = 0;
};

struct CompileOptions {
  // Fail instead of running op by op: kUnimplemented with the reasons.
  bool require_fused = false;
  // Shapes (and strides) of ports, by id; others keep the partition's.
  std::vector<LogicalTensor> ports;
};

struct CompileGraphOptions {
  // Fail if any partition would run op by op: kUnimplemented with the reasons.
  bool require_fused = false;
  // Shapes (and strides) of the graph's tensors, by id; others keep the graph's.
  std::vector<LogicalTensor> tensors;
  PartitionOptions partitioning;
};

// Cheap to copy; copies are the same engine. Moving is copying, so an engine that was moved from
// has its executor still.
class Engine {
 public:
  // Has no backends, and compiles nothing.
  Engine();
  Engine(const Engine&) = default;
  Engine& operator=(const Engine&) = default;

  // kInvalidArguments: an unknown backend, or one of another device; an executor whose
  // max_concurrency is below 1 or above 65,536. kUnimplemented: a backend that is not in this
  // build; for kCuda also, in words, where there is no driver, none that is new enough, or no such
  // GPU.
  static absl::StatusOr<Engine> Create(const EngineOptions& options = {});

  // Partitions the graph, and compiles each partition as below. kInvalidGraph for a graph that is
  // not finalized, has no ops or a tensor that nothing computes, or whose Append writes into no
  // output of the graph; shape errors as InferShapes.
  absl::StatusOr<CompiledGraph> Compile(const Graph& graph,
                                        const CompileGraphOptions& options = {}) const;

  // Compiles with the first backend that accepts. kUnimplemented with every backend's sentence if
  // none does; kInvalidArguments for a partition without ops; shape errors as Partition::WithPorts.
  absl::StatusOr<CompiledPartition> Compile(const Partition& partition,
                                            const CompileOptions& options = {}) const;

  // For caches in the engine's memory. The errors are those of kernels that cannot be loaded.
  absl::StatusOr<std::unique_ptr<CacheKernels>> MakeCacheKernels() const;

  Device device() const { return device_; }
  // Where EngineOptions gave one, this is an executor that calls it and keeps Executor's promises.
  Executor& executor() const { return *executor_; }
  const std::shared_ptr<Executor>& shared_executor() const { return executor_; }
  // Where ports and scratch lie.
  DeviceMemory& memory() const { return *memory_; }
  const std::shared_ptr<DeviceMemory>& shared_memory() const { return memory_; }
  // Compiled partitions and streams of one engine share an identity that no other engine has.
  struct Identity {};
  const std::shared_ptr<const Identity>& identity() const { return identity_; }

 private:
  absl::StatusOr<CompiledPartition> CompileChecked(const Partition& partition,
                                                   const CompileOptions& options) const;

  Device device_ = Device::kCpu;
  std::shared_ptr<const Identity> identity_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<DeviceMemory> memory_;
  std::vector<std::shared_ptr<const Backend>> backends_;
};

// Where executions are put. On the CPU they have run when Execute returns; on a GPU they run later,
// in order. Moving is copying.
class Stream {
 public:
  Stream(const Stream&) = default;
  Stream& operator=(const Stream&) = default;
  // native: the CUstream (cudaStream_t) of a kCuda engine, of its device's primary context and not
  // owned; null is the default stream. Not used on the CPU.
  explicit Stream(const Engine& engine, void* native = nullptr)
      : engine_(engine.identity()), executor_(engine.shared_executor()), native_(native) {}
  void* native() const { return native_; }
  Executor& executor() const { return *executor_; }
  // Engine::identity of its engine.
  const std::shared_ptr<const Engine::Identity>& engine() const { return engine_; }

 private:
  std::shared_ptr<const Engine::Identity> engine_;
  std::shared_ptr<Executor> executor_;
  void* native_ = nullptr;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_ENGINE_H_
