#include <dlfcn.h>

#include <atomic>

#include "kvant/backends/executor.h"

namespace kvant {
namespace {

using Body = absl::FunctionRef<void(int64_t, int)>;

// What GCC calls for a parallel region: `run` by so many threads, fewer where there are fewer. It
// is part of libgomp's binary interface (libgomp.h there).
using GompParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

GompParallel FindGompParallel(void* user) {
  // Only one that is loaded: another copy would have threads of its own.
  void* const library = user != nullptr ? user : dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr
                            : reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
}

// A slot is the order in which the threads of a region have come. Inside a parallel region of the
// caller's there is one.
class OpenMpExecutor : public Executor {
 public:
  OpenMpExecutor(GompParallel parallel, int threads) : parallel_(parallel), threads_(threads) {}

  int max_concurrency() const override { return threads_; }

  void ParallelFor(int64_t n, Body body) override {
    if (n <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) body(i, 0);
      return;
    }
    Work work{n, body};
    parallel_(&Run, &work, static_cast<unsigned>(threads_), 0);
  }

 private:
  struct Work {
    int64_t n;
    Body body;
    std::atomic<int64_t> next{0};
    std::atomic<int> slot{0};
  };
  static void Run(void* data) {
    Work& work = *static_cast<Work*>(data);
    const int slot = work.slot++;
    for (int64_t i; (i = work.next++) < work.n;) work.body(i, slot);
  }

  const GompParallel parallel_;
  const int threads_;
};

}  // namespace

std::unique_ptr<Executor> MakeOpenMpExecutor(int threads, void* user) {
  const GompParallel parallel = FindGompParallel(user);
  if (parallel == nullptr || threads < 1) return nullptr;
  return std::make_unique<OpenMpExecutor>(parallel, threads);
}

}  // namespace kvant
