// Backend: turns a partition into something that runs. One per way of running;
// an engine asks its backends in order and takes the first that accepts.
#ifndef KVANT_BACKENDS_BACKEND_H_
#define KVANT_BACKENDS_BACKEND_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/backends/cache_kernels.h"
#include "kvant/backends/device_memory.h"
#include "kvant/backends/executor.h"
#include "kvant/patterns/partition.h"

namespace kvant {

// One execution of what a backend makes of a partition.
struct Execution {
  Executor& executor;
  // Checked: one non-null pointer per port of the partition (in its order; null allowed only for
  // empty tensors), large enough.
  absl::Span<const void* const> inputs;
  absl::Span<void* const> outputs;
  std::byte* scratch = nullptr;
  void* stream = nullptr;  // Stream::native()
};

// What a backend makes of a partition: immutable, may run in several threads at
// once, each with its own scratch.
class Executable {
 public:
  virtual ~Executable() = default;
  // The kernel and its plan in words: "portable online softmax, 128-token tiles".
  virtual std::string kernel() const = 0;
  // The error that rounding inside the kernel may add to that of f32 arithmetic, where a precision
  // below f32 was asked for or is the default; 0: none. L2 norm of the error over that of
  // sum(p * |v|), which is about the output's norm unless values cancel.
  virtual double rounding() const { return 0; }
  // Scratch that Run needs with an executor of that concurrency; 64-byte aligned.
  virtual size_t scratch_bytes(int /*max_concurrency*/) const { return 0; }
  // Whether it must be zeroed before its first use, and is then left by one Run to the next, of
  // this executable alone. Else it may hold anything.
  virtual bool keeps_scratch() const { return false; }
  // What every port's pointer must be a multiple of, beside the size of its elements.
  virtual size_t alignment() const { return 1; }
  // Errors only for values that are known no sooner (a KV length over capacity);
  // nothing may be written to outputs then.
  virtual absl::Status Run(const Execution& run) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // "cpu", "reference", "oracle", "cuda", "cuda_simt".
  virtual std::string_view name() const = 0;
  // Whether its result is a fused kernel rather than op by op.
  virtual bool fused() const = 0;
  // Where ports and scratch must lie.
  virtual std::shared_ptr<DeviceMemory> memory() const { return MakeHostMemory(); }
  // For caches in that memory.
  virtual absl::StatusOr<std::unique_ptr<CacheKernels>> MakeCacheKernels() const {
    return MakeHostCacheKernels();
  }
  // All port shapes of `partition` are known, every strided tensor is valid.
  // kUnimplemented with a sentence that says what it does not take.
  virtual absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const = 0;
};

// kUnimplemented, in a sentence, for what has no AttentionSpec, nor a spec of a store or merge.
absl::Status CheckAttention(const Partition& partition);
// kUnimplemented: "does not take " and what.
absl::Status NotTaken(absl::string_view what);

// f64, plain loops, every op; the judge for everything else.
std::unique_ptr<Backend> MakeOracleBackend();
// Op by op on the CPU, through oneDNN where it has the op. Null when kvant is
// built without oneDNN.
std::unique_ptr<Backend> MakeReferenceBackend();
// Fused attention, DynamicQuantize, Append, AppendPages, Hadamard and MergeAttention on the CPU.
std::unique_ptr<Backend> MakeCpuBackend();
// The same and DynamicDequantize on the GPU of that index. kUnimplemented, in
// words: no driver, none that is new enough, no such GPU, or one too old.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device_index);
// What engines make their backend "cuda_simt" with; null, as at first, where the library
// kvant::simt is not there (cuda_simt.h).
void SetCudaSimtBackend(std::unique_ptr<Backend> (*make)());

}  // namespace kvant

#endif  // KVANT_BACKENDS_BACKEND_H_
