// GraphRunner: a compiled graph, run on buffers on the host wherever its engine is.
#ifndef KVANT_TOOLS_GRAPH_RUNNER_H_
#define KVANT_TOOLS_GRAPH_RUNNER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/buffer.h"

namespace kvant {

// "auto": the backends that an engine asks by itself, in its order.
EngineOptions EngineOptionsFor(const std::string& backend, int threads);

class GraphRunner {
 public:
  // As Engine::Compile.
  static absl::StatusOr<GraphRunner> Create(const Graph& graph, Engine engine,
                                            const PartitionOptions& options = {});

  const CompiledGraph& compiled() const { return compiled_; }
  const std::vector<CompiledPartition>& partitions() const { return compiled_.partitions(); }
  const Engine& engine() const { return engine_; }
  // Names without repetition: "cpu", or "cpu, reference".
  std::string backends() const;
  std::string kernels() const;
  double rounding() const { return compiled_.rounding(); }

  // Pointers for one execution, looked up once: of the buffers, which must stay where they are, or
  // of copies in the engine's memory.
  class Binding {
   public:
    explicit Binding(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}
    Binding(Binding&&) = default;
    Binding& operator=(Binding&&) = delete;
    ~Binding();
    // Brings what was written back to the buffers.
    absl::Status Fetch() const;

    // In the graph's order.
    std::vector<ConstTensor> inputs;
    std::vector<Tensor> outputs;

   private:
    friend class GraphRunner;
    struct Copy {
      void* device = nullptr;
      bool written = false;
    };
    absl::StatusOr<void*> Place(Buffer& buffer, bool written);

    std::shared_ptr<DeviceMemory> memory_;
    std::map<Buffer*, Copy> copies_;
  };
  // Needs a buffer for every graph input; adds one for each output that has none.
  // kInvalidArguments naming a missing tensor.
  absl::StatusOr<Binding> Bind(BufferMap& buffers) const;
  absl::Status Run(const Binding& binding) const { return Run(binding, stream_); }
  absl::Status Run(const Binding& binding, const Stream& stream) const;
  // Waits until what ran has run.
  absl::Status Synchronize() const { return engine_.memory().Synchronize(stream_.native()); }
  // All of it, results fetched.
  absl::Status Run(BufferMap& buffers) const;

 private:
  explicit GraphRunner(Engine engine) : engine_(std::move(engine)), stream_(engine_) {}
  Engine engine_;
  Stream stream_;
  CompiledGraph compiled_;
};

}  // namespace kvant

#endif  // KVANT_TOOLS_GRAPH_RUNNER_H_
