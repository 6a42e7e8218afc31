#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "kvant/backends/executor.h"

namespace kvant {
namespace {

using Body = absl::FunctionRef<void(int64_t, int)>;

// What GCC calls for a parallel region: `run` by so many threads, fewer where there are fewer. It
// is part of libgomp's binary interface (libgomp.h there).
using GompParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

struct OpenMp {
  GompParallel parallel = nullptr;
  int (*thread_number)() = nullptr;  // in the region, from 0 on
};

OpenMp FindOpenMp(void* user) {
  // Only one that is loaded: another copy would have threads of its own.
  void* const library = user != nullptr ? user : dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return {};
  return {reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel")),
          reinterpret_cast<int (*)()>(dlsym(library, "omp_get_thread_num"))};
}

// The indices of a loop as runs, one for each thread, which takes them from its front: what follows
// one another in memory is read by one thread, and by the same from loop to loop. A thread without
// any left takes the back half of another's, its neighbours' first, since threads that OpenMP binds
// close to each other share a memory.
class Runs {
 public:
  Runs(int64_t n, int threads) : threads_(threads), runs_(new std::atomic<uint64_t>[threads]) {
    for (int t = 0; t < threads; ++t) {
      runs_[t].store(Pack(n * t / threads, n * (t + 1) / threads), std::memory_order_relaxed);
    }
  }
  static constexpr int64_t kMost = int64_t{1} << 31;  // indices

  // The next index of `thread`, -1 if there is none left.
  int64_t Next(int thread) {
    std::atomic<uint64_t>& own = runs_[thread];
    uint64_t run = own;
    while (Begin(run) < End(run)) {
      if (own.compare_exchange_weak(run, Pack(Begin(run) + 1, End(run)))) return Begin(run);
    }
    for (int distance = 1; distance < threads_; ++distance) {
      std::atomic<uint64_t>& other = runs_[(thread + distance) % threads_];
      run = other;
      while (Begin(run) < End(run)) {
        const int64_t middle = (Begin(run) + End(run)) / 2;
        if (!other.compare_exchange_weak(run, Pack(Begin(run), middle))) continue;
        own = Pack(middle + 1, End(run));  // empty, which nobody else writes to
        return middle;
      }
    }
    return -1;
  }

 private:
  static uint64_t Pack(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }
  static int64_t Begin(uint64_t run) { return static_cast<int64_t>(run >> 32); }
  static int64_t End(uint64_t run) { return static_cast<int64_t>(run & 0xffffffff); }

  const int threads_;
  const std::unique_ptr<std::atomic<uint64_t>[]> runs_;
};

// A slot is a thread's number in the region. Inside a parallel region of the caller's there is one.
class OpenMpExecutor : public Executor {
 public:
  OpenMpExecutor(OpenMp openmp, int threads) : openmp_(openmp), threads_(threads) {}

  int max_concurrency() const override { return threads_; }

  void ParallelFor(int64_t n, Body body) override {
    if (n <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) body(i, 0);
      return;
    }
    for (int64_t first = 0; first < n; first += Runs::kMost) {
      Runs runs(std::min(n - first, Runs::kMost), threads_);
      auto work = [&] {
        const int slot = openmp_.thread_number();
        for (int64_t i; (i = runs.Next(slot)) >= 0;) body(first + i, slot);
      };
      openmp_.parallel([](void* data) { (*static_cast<decltype(work)*>(data))(); }, &work,
                       static_cast<unsigned>(threads_), 0);
    }
  }

 private:
  const OpenMp openmp_;
  const int threads_;
};

}  // namespace

std::unique_ptr<Executor> MakeOpenMpExecutor(int threads, void* user) {
  const OpenMp openmp = FindOpenMp(user);
  if (openmp.parallel == nullptr || openmp.thread_number == nullptr || threads < 1) return nullptr;
  return std::make_unique<OpenMpExecutor>(openmp, threads);
}

}  // namespace kvant
