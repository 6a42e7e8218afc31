// A launch under way: the block that runs, its warps and threads, and who waits for what.
#ifndef KVANT_KERNELS_DEVICE_SIMT_EXECUTION_H_
#define KVANT_KERNELS_DEVICE_SIMT_EXECUTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvant/kernels/device/fiber.h"
#include "kvant/kernels/device/simt.h"
#include "kvant/kernels/device/simt_calls.h"
#include "kvant/kernels/device/simt_errors.h"
#include "kvant/kernels/device/simt_global.h"
#include "kvant/kernels/device/simt_matrix.h"
#include "kvant/kernels/device/simt_shared.h"
#include "kvant/kernels/device/simt_traffic.h"

namespace kvant::simt {

class Execution;
struct Thread;

// Who runs on this OS thread.
extern constinit thread_local Thread* current_thread;

struct Copy {
  size_t bytes;
  uint32_t to;
  const void* from;
  size_t valid;
  Site site;
};

struct Warp {
  // The collective that some lanes have come to.
  uint32_t arrived = 0;
  const char* collective = nullptr;
  Site site;
  void* arguments[kLanes] = {};
  uint32_t barriers = 0;
  WarpTraffic traffic;
};

struct Thread {
  int index = 0;
  int lane = 0;
  Warp* warp = nullptr;
  Execution* execution = nullptr;
  Fiber* fiber = nullptr;
  bool exited = false;
  // What it waits in, and where; null when it does not.
  const char* waits_in = nullptr;
  Site waits_at;
  // Copies in the order of their issue, and of each group under way, the end of its copies.
  std::vector<Copy> copies;
  std::vector<size_t> group_ends;
  size_t bytes_in_flight = 0;
  size_t most_bytes_in_flight = 0;
};

// A fiber that runs one thread after another. Each OS thread keeps its workers from launch to
// launch, because to make a stack takes longer than most kernels.
struct Worker {
  Worker();
  Thread* thread = nullptr;
  Fiber fiber;
};

class Execution {
 public:
  Execution(const LaunchShape& shape, const Options& options, const std::function<void()>& body);

  // All blocks, or up to an error after which going on is meaningless.
  Report Run();

  // ---- By the fiber of thread `t`
  Position PositionOf(const Thread& t) const {
    return {t.index, shape_.threads, block_, shape_.blocks};
  }
  Actor ActorOf(const Thread& t, Site site) const { return {block_, t.index, site}; }
  Moment MomentOf(const Thread& t) const { return {block_barriers_, t.warp->barriers}; }
  void BlockBarrier(Thread* t, Site site);
  // Waits for all lanes of the warp; the last one calls `op` with what each has brought.
  template <typename Argument, typename Op>
  void Collect(Thread* t, const char* collective, Site site, Argument* argument, Op op) {
    if (!Arrive(t, collective, site, argument)) return;
    op(reinterpret_cast<Argument* const*>(t->warp->arguments));
    Release(t->warp);
  }
  // Checks an access to global memory against Options::buffers. Whether the thread may do it.
  bool BeginGlobal(Thread* t, const void* at, size_t bytes, const char* does, Site site);
  void CheckAlignment(Thread* t, const void* at, size_t bytes, const char* does, Site site);
  void CountReads(const void* from, size_t bytes);
  void StartCopy(Thread* t, const Copy& copy);
  void WaitForCopies(Thread* t, size_t pending);

  const Options& options() const { return options_; }
  Counters& counters() { return report_.counters; }
  SharedMemory& shared() { return shared_; }
  GlobalMemory& global() { return global_; }

 private:
  friend struct Worker;

  static void RunThreads(void* worker);
  void RunBlock(int64_t block);
  // To the next thread that can run; returns when somebody has made `t` ready again.
  void Suspend(Thread* t);
  // Ends the launch. Does not return.
  [[noreturn]] void Stop(Thread* t);
  bool Arrive(Thread* t, const char* collective, Site site, void* argument);
  void Release(Warp* warp);
  void MakeReady(Thread* t);
  Thread* TakeReady();
  void ReportDivergence(const Thread& t, const char* what, Site site, const char* other_what,
                        Site other_site);
  void ReportDeadlock();
  std::string NearestBuffer(uintptr_t address) const;

  const LaunchShape shape_;
  const Options& options_;
  const std::function<void()>& body_;
  Report report_;
  Errors errors_;
  SharedMemory shared_;
  GlobalMemory global_;
  Fiber main_;
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  // Threads that can run: a ring, of which any is taken if there is a seed.
  std::vector<Thread*> ready_;
  size_t ready_begin_ = 0;
  size_t ready_count_ = 0;
  std::mt19937_64 random_;
  int64_t block_ = 0;
  int exited_ = 0;
  uint32_t block_barriers_ = 0;
  int at_barrier_ = 0;
  Site barrier_site_;
  bool stopped_ = false;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_EXECUTION_H_
