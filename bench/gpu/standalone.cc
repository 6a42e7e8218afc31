// What a program defines itself so that the linker takes neither oneTBB nor oneDNN from the
// library, nor the objects of it that need them: the programs of cmake/KvantGpuFolder.cmake.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kvant/backends/backend.h"
#include "kvant/backends/executor.h"

namespace kvant {
namespace {

// A few threads per call. Its bodies may call it again.
class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  int max_concurrency() const override { return threads_; }
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) override {
    std::atomic<int64_t> next = 0;
    const auto work = [&](int slot) {
      for (int64_t i = next++; i < n; i = next++) body(i, slot);
    };
    std::vector<std::jthread> others;
    for (int slot = 1; slot < std::min<int64_t>(threads_, n); ++slot)
      others.emplace_back(work, slot);
    work(0);
  }

 private:
  const int threads_;
};

}  // namespace

std::unique_ptr<Executor> MakeTbbExecutor(int threads) {
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  return std::make_unique<ThreadExecutor>(std::max(threads, 1));
}

std::unique_ptr<Executor> MakeSerialExecutor() { return std::make_unique<ThreadExecutor>(1); }

std::unique_ptr<Backend> MakeReferenceBackend() { return nullptr; }

}  // namespace kvant
