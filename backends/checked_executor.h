// CheckedExecutor: the caller's executor as kvant calls it.
#ifndef KVANT_BACKENDS_CHECKED_EXECUTOR_H_
#define KVANT_BACKENDS_CHECKED_EXECUTOR_H_

#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/backends/executor.h"

namespace kvant {

// Makes Executor's contract hold whatever the caller's does. A body runs at most once for an index,
// never in a slot that is taken or does not exist, and never after ParallelFor has returned; what a
// body throws does not reach the caller's code. Where the caller's executor threw, or left an index
// out, ParallelFor throws a std::exception that says so: WithoutExceptions makes a status of it.
class CheckedExecutor : public Executor {
 public:
  // kInvalidArguments for a max_concurrency below 1 or above 65,536. It is asked for only here:
  // scratch is made for it.
  static absl::StatusOr<std::shared_ptr<Executor>> Create(std::shared_ptr<Executor> executor);
  ~CheckedExecutor() override;

  int max_concurrency() const override { return max_concurrency_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t i, int slot)> body) override;

 private:
  struct Job;
  Job& Take();
  CheckedExecutor(std::shared_ptr<Executor> executor, int max_concurrency);

  const std::shared_ptr<Executor> executor_;
  const int max_concurrency_;
  std::mutex mutex_;  // of `jobs_`; the thread sanitizer understands it
  // As many as calls ever ran at once. They stay while this does: the caller's executor may call a
  // body after it has returned.
  std::vector<std::unique_ptr<Job>> jobs_;
};

}  // namespace kvant

#endif  // KVANT_BACKENDS_CHECKED_EXECUTOR_H_
