#ifndef KVANT_CACHE_KV_LOCK_H_
#define KVANT_CACHE_KV_LOCK_H_

#include <mutex>
#include <shared_mutex>

namespace kvant {

// A std::shared_mutex in which readers that come do not overtake a writer that waits: glibc lets
// them, and who attends all the time would keep Append out for ever. Of std's locks and not
// Abseil's, which the thread sanitizer does not see. For std::unique_lock and std::shared_lock.
class KvLock {
 public:
  void lock() {
    const std::lock_guard<std::mutex> turn(turn_);
    held_.lock();
  }
  void unlock() { held_.unlock(); }
  void lock_shared() {
    const std::lock_guard<std::mutex> turn(turn_);
    held_.lock_shared();
  }
  void unlock_shared() { held_.unlock_shared(); }

 private:
  std::mutex turn_;  // of who comes next
  std::shared_mutex held_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_LOCK_H_
