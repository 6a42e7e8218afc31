#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "kvant/backends/executor.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using Body = absl::FunctionRef<void(int64_t, int)>;
using Flags = std::unique_ptr<std::atomic<bool>[]>;

constexpr int kMaxConcurrency = 1 << 16;
// Indices that there is room for at once: more than a step of decoding of one sequence has,
// however long it is.
constexpr int64_t kLeastRoom = 512;

// One ParallelFor. The caller's executor makes its calls in the body's place, perhaps later than it
// may.
struct Job {
  explicit Job(int slots) : slots(slots), busy(new std::atomic<bool>[slots]()) {}

  void Open(int64_t count, const Body& to_run) {
    if (count > room) {
      const int64_t wanted = std::max(count, kLeastRoom);
      room = 0;  // should there be no memory
      ran.reset();
      ran.reset(new std::atomic<bool>[wanted]);
      room = wanted;
    }
    for (int64_t i = 0; i < count; ++i) ran[i].store(false, std::memory_order_relaxed);
    n = count;
    done = 0;
    body = &to_run;
    thrown = nullptr;
    failed = false;
    fault = nullptr;
    open = true;
  }

  // Waits for calls that are under way; later ones do nothing.
  void Close() {
    open = false;
    while (inside != 0) std::this_thread::yield();
    body = nullptr;
  }

  struct Call {
    Job* job;
    void operator()(int64_t i, int slot) const noexcept {
      ++job->inside;
      if (job->open) job->Run(i, slot);
      --job->inside;
    }
  };

  void Run(int64_t i, int slot) noexcept {
    if (i < 0 || i >= n) return Note("for index $0 of $1", i, n);
    if (slot < 0 || slot >= slots) return Note("in slot $0 of $1", slot, slots);
    if (busy[slot].exchange(true)) {
      return Note("in slot $0 while another call was in it", slot, slots);
    }
    if (ran[i].exchange(true)) {
      Note("twice for index $0 of $1", i, n);
    } else {
      // After an exception the rest is not worth its time.
      try {
        if (!failed) (*body)(i, slot);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!thrown) thrown = std::current_exception();
        failed = true;
      }
      ++done;
    }
    busy[slot] = false;
  }

  // How a call was wrong: the first is kept, and put into words when nothing runs any more.
  void Note(const char* how, int64_t number, int64_t of) noexcept {
    const std::lock_guard<std::mutex> lock(mutex);
    if (fault != nullptr) return;
    fault = how;
    fault_number = number;
    fault_of = of;
  }

  // Of a job that is closed: what the caller's executor did wrong; empty if nothing.
  std::string Complaint() const {
    if (fault != nullptr) {
      return absl::StrCat("called the body ", absl::Substitute(fault, fault_number, fault_of));
    }
    if (done == n) return "";
    return absl::StrCat("returned when the body had run for ", done.load(), " of ", n, " indices");
  }

  std::atomic<bool> taken = true;  // by a ParallelFor
  const Call call{this};
  const int slots;
  const Flags busy;  // by slot
  Flags ran;         // by index
  int64_t room = 0;  // of `ran`
  int64_t n = 0;
  const Body* body = nullptr;
  // Sequentially consistent, so that a call either sees that the job is closed or is waited for.
  std::atomic<bool> open = false;
  std::atomic<int64_t> inside = 0;
  std::atomic<int64_t> done = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::exception_ptr thrown;  // by a body, the first
  const char* fault = nullptr;
  int64_t fault_number = 0, fault_of = 0;
};

class CheckedExecutor : public Executor {
 public:
  CheckedExecutor(std::shared_ptr<Executor> executor, int max_concurrency)
      : executor_(std::move(executor)), max_concurrency_(max_concurrency) {}

  int max_concurrency() const override { return max_concurrency_; }

  void ParallelFor(int64_t n, Body body) override {
    if (n <= 0) return;
    Job& job = Take();
    const absl::Cleanup give_back = [&job] {
      job.Close();
      job.taken = false;
    };
    job.Open(n, body);
    std::string complaint;
    try {
      executor_->ParallelFor(n, job.call);
      job.Close();
      complaint = job.Complaint();
    } catch (...) {
      job.Close();
      complaint = absl::StrCat("threw: ", StatusOfException().message());
    }
    if (job.thrown) std::rethrow_exception(std::exchange(job.thrown, nullptr));
    if (complaint.empty()) return;
    throw std::runtime_error(absl::StrCat("ParallelFor of the caller's executor ", complaint));
  }

 private:
  Job& Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::unique_ptr<Job>& job : jobs_) {
      if (!job->taken.exchange(true)) return *job;
    }
    return *jobs_.emplace_back(std::make_unique<Job>(max_concurrency_));
  }

  const std::shared_ptr<Executor> executor_;
  const int max_concurrency_;
  std::mutex mutex_;  // of `jobs_`; the thread sanitizer understands it
  // As many as calls ever ran at once. They stay while this does: the caller's executor may call a
  // body after it has returned.
  std::vector<std::unique_ptr<Job>> jobs_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Executor>> MakeCheckedExecutor(std::shared_ptr<Executor> executor) {
  const int slots = executor->max_concurrency();
  if (slots < 1 || slots > kMaxConcurrency) {
    return InvalidArguments("the executor has a max_concurrency of ", slots,
                            "; it has to be from 1 to ", kMaxConcurrency);
  }
  return std::make_shared<CheckedExecutor>(std::move(executor), slots);
}

}  // namespace kvant
