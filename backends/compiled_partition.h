// CompiledPartition: a partition with the kernel that runs it.
#ifndef KVANT_BACKENDS_COMPILED_PARTITION_H_
#define KVANT_BACKENDS_COMPILED_PARTITION_H_

#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/tensor.h"
#include "kvant/patterns/partition.h"

namespace kvant {

class CompiledGraph;
class Engine;
class IndexChecks;
class Signature;
class Stream;

// Immutable and cheap to copy; may be executed from several threads at once. One that was made by
// default or moved from has nothing to run: no ports, no names, and Execute fails.
class CompiledPartition {
 public:
  // The partition with all shapes inferred; its ports are the positions below.
  const Partition& partition() const;
  std::string_view backend() const { return runs() ? backend_->name() : std::string_view(); }
  bool fused() const { return runs() && backend_->fused(); }
  std::string kernel() const { return runs() ? executable_->kernel() : std::string(); }
  // Executable::rounding: how far from f32 arithmetic the kernel may be, relative L2.
  double rounding() const { return runs() ? executable_->rounding() : 0; }
  // Why the backends before the chosen one declined, a sentence each.
  const std::vector<std::string>& passed_over() const { return passed_over_; }
  // Scratch for one execution on its engine.
  size_t scratch_bytes() const;
  // Whether scratch of one's own must be zeroed once, and is then left by one execution to the
  // next; else it may hold anything.
  bool keeps_scratch() const { return runs() && executable_->keeps_scratch(); }
  // What will run and why the better candidates were passed over.
  std::string ToString() const;

  // Positional: one tensor per port, in the order of partition().inputs() and
  // outputs(). `scratch`: at least scratch_bytes(), aligned to kScratchAlignment, in the engine's
  // memory; without one, it is taken from a pool that this object keeps. No allocation when scratch
  // is given (the reference and the oracle do allocate, and so does the first execution on an
  // executor of the caller's). kInvalidArguments, naming port and numbers: wrong counts, a null,
  // too small or misaligned tensor or scratch, a stream of another engine, nothing to run; but for
  // kCuda, which clamps them, lengths, ranges, page tables and offsets that do not fit what they
  // are of. Nothing is written then. kInternal if the engine's executor, which the caller may have
  // written, failed, and kResourceExhausted if there is no memory: outputs then hold anything, and
  // scratch of one's own that is kept must be zeroed before it is used again. What is written must
  // not overlap what is read, nor other outputs: results would be wrong, which is not checked.
  //
  // On a GPU this puts kernels onto the stream and returns: nothing is synchronised or copied, so
  // the stream may be captured into a graph, with host scalars as they are then. Scratch of one's
  // own must be zeroed once before its first use and serve one stream at a time; the pool has a
  // block per stream, allocated by the first Execute on it, which is not to be captured. Beyond 64
  // streams that which was not used for longest gives its block up, but what was captured keeps it.
  // Give scratch of its own to what is captured into a graph: the graph may run on another stream,
  // beside executions on this one.
  absl::Status Execute(const Stream& stream, absl::Span<const ConstTensor> inputs,
                       absl::Span<const Tensor> outputs, absl::Span<std::byte> scratch = {}) const;

  // By name or decimal id, in any order.
  using NamedInputs = absl::Span<const std::pair<std::string_view, ConstTensor>>;
  using NamedOutputs = absl::Span<const std::pair<std::string_view, Tensor>>;
  absl::Status Execute(const Stream& stream, NamedInputs inputs, NamedOutputs outputs) const;

 private:
  friend class CompiledGraph;
  friend class Engine;
  bool runs() const { return executable_ != nullptr; }
  // What Execute needs at hand, once partition_ and executable_ are set.
  void Prepare(const Engine& engine);
  // Of lengths, ranges and the like, where the host sees them; null inputs are not looked at.
  absl::Status CheckIndices(absl::Span<const void* const> inputs) const;
  // Checks nothing.
  absl::Status Run(const Stream& stream, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const;

  std::shared_ptr<const Partition> partition_;
  std::shared_ptr<const Backend> backend_;
  std::shared_ptr<const Executable> executable_;
  std::shared_ptr<const Signature> signature_;
  std::shared_ptr<const IndexChecks> index_checks_;  // null: none
  std::vector<std::string> passed_over_;
};

inline std::ostream& operator<<(std::ostream& out, const CompiledPartition& compiled) {
  return out << compiled.ToString();
}

}  // namespace kvant

#endif  // KVANT_BACKENDS_COMPILED_PARTITION_H_
