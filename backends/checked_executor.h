// The caller's executor as kvant calls it.
#ifndef KVANT_BACKENDS_CHECKED_EXECUTOR_H_
#define KVANT_BACKENDS_CHECKED_EXECUTOR_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kvant/backends/executor.h"

namespace kvant {

// An executor that keeps Executor's contract whatever the caller's does. A body runs at most once
// for an index, never in a slot that is taken or does not exist, and never after ParallelFor has
// returned; what a body throws does not reach the caller's code. Where the caller's executor threw,
// or left an index out, ParallelFor throws a std::exception that says so: WithoutExceptions makes a
// status of it.
//
// kInvalidArguments for a max_concurrency below 1 or above 65,536. The caller's is asked for its
// own only here: scratch is made for that.
absl::StatusOr<std::shared_ptr<Executor>> MakeCheckedExecutor(std::shared_ptr<Executor> executor);

}  // namespace kvant

#endif  // KVANT_BACKENDS_CHECKED_EXECUTOR_H_
