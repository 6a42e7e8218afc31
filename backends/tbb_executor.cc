#include <algorithm>

#include "kvant/backends/executor.h"
#include "oneapi/tbb/global_control.h"
#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/task_arena.h"

#ifdef KVANT_ANNOTATE_THREADS
#include <sanitizer/tsan_interface.h>
#endif

namespace kvant {
namespace {

// The thread sanitizer does not see how oneTBB orders threads: it is told here, by an address. This
// unit itself, with oneTBB's templates in it, is not sanitized.
#ifdef KVANT_ANNOTATE_THREADS
void Release(char* order) { __tsan_release(order); }
void Acquire(char* order) { __tsan_acquire(order); }
#else
void Release(char*) {}
void Acquire(char*) {}
#endif

using Body = absl::FunctionRef<void(int64_t, int)>;

// A slot is the thread's index in the arena: distinct among the threads that are in it, and below
// its concurrency. A caller from outside takes a slot of the arena for the time of the call, or,
// when all are taken, hands the work to a thread that has one.
class TbbExecutor : public Executor {
 public:
  explicit TbbExecutor(int threads) : arena_(threads), threads_(threads) {}

  int max_concurrency() const override { return threads_; }

  void ParallelFor(int64_t n, Body body) override {
    // Slots need to differ only within one call, so a caller that runs alone may use slot 0.
    if (n <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) body(i, 0);
      return;
    }
    char start = 0, end = 0;  // only addresses
    Release(&start);
    arena_.execute([&] {
      // Isolated: while a body waits for a ParallelFor inside it, its thread must not start
      // another body of the outer one, which would share its slot.
      tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(int64_t{0}, n, [&](int64_t i) {
          Acquire(&start);
          body(i, tbb::this_task_arena::current_thread_index());
          Release(&end);
        });
      });
    });
    Acquire(&end);
  }

 private:
  tbb::task_arena arena_;
  const int threads_;
};

}  // namespace

std::unique_ptr<Executor> MakeTbbExecutor(int threads) {
  // oneTBB would ignore what goes beyond, with a warning on standard error.
  const auto most = static_cast<int>(
      tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism));
  return std::make_unique<TbbExecutor>(std::max(threads <= 0 ? most : std::min(threads, most), 1));
}

std::unique_ptr<Executor> MakeSerialExecutor() { return std::make_unique<TbbExecutor>(1); }

}  // namespace kvant
