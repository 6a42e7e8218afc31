#include "kvant/backends/checked_executor.h"

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using Body = absl::FunctionRef<void(int64_t, int)>;
using Flags = std::unique_ptr<std::atomic<bool>[]>;

constexpr int kMaxConcurrency = 1 << 16;

}  // namespace

// One ParallelFor. The caller's executor makes its calls in the body's place, perhaps later than it
// may.
struct CheckedExecutor::Job {
  enum class Fault : uint8_t { kNone, kNoIndex, kIndexTwice, kNoSlot, kSlotTwice };

  explicit Job(int slots) : slots(slots), busy(new std::atomic<bool>[slots]()) {}

  void Open(int64_t count, const Body& to_run) {
    if (count > room) {
      ran.reset();
      ran.reset(new std::atomic<bool>[count]);
      room = count;
    }
    for (int64_t i = 0; i < count; ++i) ran[i].store(false, std::memory_order_relaxed);
    n = count;
    done = 0;
    body = &to_run;
    thrown = nullptr;
    failed = false;
    fault = Fault::kNone;
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
    if (i < 0 || i >= n) return Note(Fault::kNoIndex, i);
    if (slot < 0 || slot >= slots) return Note(Fault::kNoSlot, slot);
    if (busy[slot].exchange(true)) return Note(Fault::kSlotTwice, slot);
    if (ran[i].exchange(true)) {
      Note(Fault::kIndexTwice, i);
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

  void Note(Fault what, int64_t which) noexcept {
    const std::lock_guard<std::mutex> lock(mutex);
    if (fault != Fault::kNone) return;
    fault = what;
    number = which;
  }

  // Of a job that is closed: what the caller's executor did wrong; empty if nothing.
  std::string Complaint() const {
    switch (fault) {
      case Fault::kNoIndex:
        return absl::StrCat("called the body for index ", number, " of ", n);
      case Fault::kIndexTwice:
        return absl::StrCat("called the body twice for index ", number, " of ", n);
      case Fault::kNoSlot:
        return absl::StrCat("called the body in slot ", number, " of ", slots);
      case Fault::kSlotTwice:
        return absl::StrCat("called the body in slot ", number, " while another call was in it");
      case Fault::kNone:
        break;
    }
    if (done == n) return "";
    return absl::StrCat("returned when the body had run for ", done.load(), " of ", n, " indices");
  }

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
  Fault fault = Fault::kNone;
  int64_t number = 0;
};

// A job for one ParallelFor; closed and idle again at the end, however that is reached.
class CheckedExecutor::Lease {
 public:
  explicit Lease(CheckedExecutor& owner) : owner_(owner) {
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    if (owner_.idle_.empty()) {
      owner_.idle_.reserve(owner_.jobs_.size() + 1);  // so that it takes this one back
      owner_.jobs_.push_back(std::make_unique<Job>(owner_.max_concurrency_));
      owner_.idle_.push_back(owner_.jobs_.back().get());
    }
    job_ = owner_.idle_.back();
    owner_.idle_.pop_back();
  }
  ~Lease() {
    job_->Close();
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    owner_.idle_.push_back(job_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Job* operator->() const { return job_; }

 private:
  CheckedExecutor& owner_;
  Job* job_;
};

absl::StatusOr<std::shared_ptr<Executor>> CheckedExecutor::Create(
    std::shared_ptr<Executor> executor) {
  const int slots = executor->max_concurrency();
  if (slots < 1 || slots > kMaxConcurrency) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("the executor has a max_concurrency of ", slots,
                                  "; it has to be from 1 to ", kMaxConcurrency));
  }
  return std::shared_ptr<Executor>(new CheckedExecutor(std::move(executor), slots));
}

CheckedExecutor::CheckedExecutor(std::shared_ptr<Executor> executor, int max_concurrency)
    : executor_(std::move(executor)), max_concurrency_(max_concurrency) {}

CheckedExecutor::~CheckedExecutor() = default;

void CheckedExecutor::ParallelFor(int64_t n, Body body) {
  if (n <= 0) return;
  const Lease job(*this);
  job->Open(n, body);
  std::string complaint;
  try {
    executor_->ParallelFor(n, job->call);
    job->Close();
    complaint = job->Complaint();
  } catch (...) {
    job->Close();
    complaint = absl::StrCat("threw: ", StatusOfException().message());
  }
  if (job->thrown) std::rethrow_exception(std::exchange(job->thrown, nullptr));
  if (complaint.empty()) return;
  throw std::runtime_error(absl::StrCat("ParallelFor of the caller's executor ", complaint));
}

}  // namespace kvant
