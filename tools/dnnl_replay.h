// A graph as a client of oneDNN Graph's C functions states, compiles and executes it.
#ifndef KVANT_TOOLS_DNNL_REPLAY_H_
#define KVANT_TOOLS_DNNL_REPLAY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/tools/buffer.h"
#include "kvant/tools/dnnl_api.h"

namespace kvant::dnnl_abi {

// A status of oneDNN's other than success as an error that names the call.
absl::Status Checked(Status status, std::string_view call);

// An engine of kind cpu with a stream.
class DnnlEngine {
 public:
  static absl::StatusOr<std::unique_ptr<DnnlEngine>> Create(const DnnlApi& api);
  ~DnnlEngine();
  DnnlEngine(const DnnlEngine&) = delete;
  DnnlEngine& operator=(const DnnlEngine&) = delete;

  const DnnlApi& api() const { return api_; }
  dnnl_engine* engine() const { return engine_; }
  dnnl_stream* stream() const { return stream_; }

 private:
  explicit DnnlEngine(const DnnlApi& api) : api_(api) {}
  const DnnlApi api_;
  dnnl_engine* engine_ = nullptr;
  dnnl_stream* stream_ = nullptr;
};

class DnnlReplay {
 public:
  // Its shapes are known; what its compiled partitions hand on to each other is given as the graph
  // has it. Partitions are compiled in their order. `engine` outlives this.
  static absl::StatusOr<std::unique_ptr<DnnlReplay>> Create(const DnnlEngine& engine,
                                                            const Graph& graph);
  ~DnnlReplay();
  DnnlReplay(const DnnlReplay&) = delete;
  DnnlReplay& operator=(const DnnlReplay&) = delete;

  struct Part {
    PartitionHandle partition = nullptr;
    CompiledHandle compiled = nullptr;
    size_t id = 0;
    bool supported = false;
    std::vector<size_t> ops;
    std::vector<TensorDesc> inputs, outputs;  // with shapes
    TensorHandle scratch = nullptr;           // where this oneDNN takes it
  };
  const std::vector<Part>& parts() const { return parts_; }

  // All partitions, as a client does for another shape.
  absl::Status CompileAgain();

  // Tensors over buffers, which stay where they are. Needs one for every graph input; adds those
  // that are missing. One execution at a time: the scratchpads are this object's.
  class Binding {
   public:
    explicit Binding(const DnnlApi& api) : api_(api) {}
    Binding(Binding&& other) = default;
    Binding& operator=(Binding&&) = delete;
    ~Binding();

   private:
    friend class DnnlReplay;
    const DnnlApi& api_;
    std::vector<TensorHandle> tensors_;
    struct Ports {
      std::vector<const dnnl_graph_tensor*> inputs, outputs;
      const dnnl_graph_tensor* scratchpad = nullptr;
    };
    std::vector<Ports> parts_;
  };
  absl::StatusOr<Binding> Bind(BufferMap& buffers) const;
  // And waits for the stream.
  absl::Status Run(const Binding& binding) const;

 private:
  DnnlReplay(const DnnlEngine& engine, const Graph& graph) : engine_(engine), graph_(graph) {}
  absl::Status AddOps();
  absl::Status ReadParts();
  absl::Status Compile(Part& part) const;

  const DnnlEngine& engine_;
  const Graph graph_;
  GraphHandle handle_ = nullptr;
  std::vector<Part> parts_;
};

}  // namespace kvant::dnnl_abi

#endif  // KVANT_TOOLS_DNNL_REPLAY_H_
