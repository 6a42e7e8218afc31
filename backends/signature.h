// Signature: what a compiled partition or graph takes, and the checks of what it is given. Internal
// to backends.
#ifndef KVANT_BACKENDS_SIGNATURE_H_
#define KVANT_BACKENDS_SIGNATURE_H_

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/backends/engine.h"
#include "kvant/backends/scratch_pool.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/graph.h"

namespace kvant {

// The error of what has none; `what` as below.
absl::Status NothingToRun(std::string_view what);

class Signature {
 public:
  struct Port {
    std::string_view role;  // "input" or "output", of which it is number `index`
    size_t index = 0;
    const LogicalTensor* tensor = nullptr;
    size_t bytes = 0;
    size_t alignment = 1;
    bool on_host = false;  // a host scalar, on any engine
  };

  // `what` is "partition" or "graph". The ports are tensors of `graph`, which outlives the
  // signature. `alignment`: of their pointers, beside the size of their elements; host scalars need
  // none.
  Signature(std::string_view what, const Engine& engine, const Graph& graph,
            absl::Span<const TensorId> inputs, absl::Span<const TensorId> outputs, size_t alignment,
            size_t scratch_bytes);

  size_t scratch_bytes() const { return scratch_bytes_; }
  Executor& executor() const { return *executor_; }

  // Right counts, no null, too small, misaligned or unreachable tensor, a stream of the engine, and
  // scratch, where it is given, that is large enough.
  absl::Status Check(const Stream& stream, absl::Span<const ConstTensor> inputs,
                     absl::Span<const Tensor> outputs, absl::Span<std::byte> scratch) const;

  // Runs `body` with tensors that are given by name or decimal id, in any order, in port order.
  absl::Status InPortOrder(
      CompiledPartition::NamedInputs inputs, CompiledPartition::NamedOutputs outputs,
      absl::FunctionRef<absl::Status(absl::Span<const ConstTensor>, absl::Span<const Tensor>)> body)
      const;

  // Runs `body` with the scratch given, or if there is none, with some from a pool.
  absl::Status WithScratch(const Stream& stream, absl::Span<std::byte> scratch,
                           absl::FunctionRef<absl::Status(std::byte*)> body) const;

 private:
  const std::string_view what_;
  const std::shared_ptr<const Engine::Identity> engine_;
  const std::shared_ptr<Executor> executor_;
  const std::shared_ptr<DeviceMemory> memory_;
  const size_t scratch_bytes_;
  mutable ScratchPool pool_;
  const size_t inputs_;  // of the ports, the first
  std::vector<Port> ports_;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_SIGNATURE_H_
