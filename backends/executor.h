// Executor: where a CPU backend's parallel work runs. The caller may supply one;
// nothing inside kvant spawns threads of its own.
#ifndef KVANT_BACKENDS_EXECUTOR_H_
#define KVANT_BACKENDS_EXECUTOR_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace kvant {

class Executor {
 public:
  virtual ~Executor() = default;

  // How many calls of a ParallelFor body may run at the same time, at least 1.
  virtual int max_concurrency() const = 0;

  // Calls body(i, slot) once for every i in [0, n), in any order, and returns
  // when all have returned. Calls that run at the same time within one
  // ParallelFor have different slots in [0, max_concurrency()).
  // May be called from several threads at once.
  virtual void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t i, int slot)> body) = 0;
};

// On oneTBB, in an arena of its own; threads <= 0 takes one per hardware thread.
std::unique_ptr<Executor> MakeTbbExecutor(int threads = 0);
// Runs everything in the calling thread.
std::unique_ptr<Executor> MakeSerialExecutor();

}  // namespace kvant

#endif  // KVANT_BACKENDS_EXECUTOR_H_
