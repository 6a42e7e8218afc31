// Executor: where a CPU backend's parallel work runs. The caller may supply one;
// nothing inside kvant spawns threads of its own.
//
// An executor of the caller's that does otherwise than is said here does no harm but to the
// execution that it fails (kInternal, in words; the outputs then hold anything). Where ParallelFor
// throws, leaves an index out or returns early, calls that have begun are waited for, and later
// ones do nothing, while the engine, a stream or a compiled partition of it is left. A second call
// for an index, one for an index or in a slot that there is not, and one in a slot where another
// runs do nothing.
#ifndef KVANT_BACKENDS_EXECUTOR_H_
#define KVANT_BACKENDS_EXECUTOR_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace kvant {

class Executor {
 public:
  virtual ~Executor() = default;

  // How many calls of a ParallelFor body may run at the same time: from 1 to 65,536. Engine::Create
  // asks once.
  virtual int max_concurrency() const = 0;

  // Calls body(i, slot) once for every i in [0, n), in any order, and returns
  // when all have returned. Calls that run at the same time within one
  // ParallelFor have different slots in [0, max_concurrency()).
  // May be called from several threads at once. Bodies whose indices follow one another read memory
  // that does: a thread does best with a run of them, the same in every call (docs/benchmarks.md,
  // "Memory domains and huge pages").
  virtual void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t i, int slot)> body) = 0;
};

// The same on `executor`, or in the calling thread where there is nothing to share out.
inline void ForEach(Executor& executor, int64_t n,
                    absl::FunctionRef<void(int64_t i, int slot)> body) {
  if (n > 1 && executor.max_concurrency() > 1) return executor.ParallelFor(n, body);
  for (int64_t i = 0; i < n; ++i) body(i, 0);
}

// On oneTBB, in an arena of its own. threads <= 0, or more than oneTBB runs in this process (one
// per hardware thread unless a tbb::global_control says otherwise), takes as many as it runs.
std::unique_ptr<Executor> MakeTbbExecutor(int threads = 0);
// On the OpenMP threads of a program that has loaded GCC's libgomp.so.1, PyTorch for one; null
// where there is none. Threads that wait for OpenMP's next region spin, and would take the
// processors from threads of anyone else's. user: dlopen's handle of a library whose OpenMP runtime
// it is instead, GCC's, LLVM's or Intel's.
std::unique_ptr<Executor> MakeOpenMpExecutor(int threads, void* user = nullptr);
// Runs everything in the calling thread.
std::unique_ptr<Executor> MakeSerialExecutor();

// The caller's executor as kvant calls it: one that keeps this contract whatever the caller's does.
// A body runs at most once for an index, never in a slot that is taken or does not exist, and never
// after ParallelFor has returned; what a body throws does not reach the caller's code. Where the
// caller's executor threw, or left an index out, ParallelFor throws a std::exception that says so:
// WithoutExceptions makes a status of it.
//
// kInvalidArguments for a max_concurrency below 1 or above 65,536. The caller's is asked for its
// own only here: scratch is made for that.
absl::StatusOr<std::shared_ptr<Executor>> MakeCheckedExecutor(std::shared_ptr<Executor> executor);

}  // namespace kvant

#endif  // KVANT_BACKENDS_EXECUTOR_H_
