// Engine: a device and the backends that can run partitions on it.
#ifndef KVANT_BACKENDS_ENGINE_H_
#define KVANT_BACKENDS_ENGINE_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/executor.h"
#include "kvant/patterns/partition.h"

namespace kvant {

enum class Device : uint8_t { kCpu };

struct EngineOptions {
  Device device = Device::kCpu;
  // Names of the backends to ask, in order. Empty: all of the device but the
  // oracle: "cpu", "reference".
  std::vector<std::string> backends;
  // Where parallel work runs; null: one on oneTBB with `threads` threads
  // (<= 0: one per hardware thread). Shared by all streams of the engine.
  std::shared_ptr<Executor> executor;
  int threads = 0;
};

struct CompileOptions {
  // Fail instead of running op by op: kUnimplemented with the reasons.
  bool require_fused = false;
  // Shapes (and strides) of ports, by id; others keep the partition's.
  std::vector<LogicalTensor> ports;
  // An extra input with the real KV lengths, s32 [N]; see Partition::WithKvLengths.
  std::optional<LogicalTensor> kv_lengths;
};

class Engine {
 public:
  // kInvalidArguments: an unknown backend. kUnimplemented: one not in this build.
  static absl::StatusOr<Engine> Create(const EngineOptions& options = {});

  // The first backend that accepts. kUnimplemented with every backend's
  // sentence if none does; shape errors as Partition::WithPorts.
  absl::StatusOr<CompiledPartition> Compile(const Partition& partition,
                                            const CompileOptions& options = {}) const;

  Device device() const { return device_; }
  Executor& executor() const { return *executor_; }
  // Identity: compiled partitions and streams of one engine share it.
  const std::shared_ptr<Executor>& shared_executor() const { return executor_; }

 private:
  Device device_ = Device::kCpu;
  std::shared_ptr<Executor> executor_;
  std::vector<std::shared_ptr<const Backend>> backends_;
};

// Where executions are put. On the CPU they have run when Execute returns.
class Stream {
 public:
  explicit Stream(const Engine& engine) : executor_(engine.shared_executor()) {}
  Executor& executor() const { return *executor_; }
  const std::shared_ptr<Executor>& shared_executor() const { return executor_; }

 private:
  std::shared_ptr<Executor> executor_;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_ENGINE_H_
