#ifndef KVANT_CACHE_KV_LOCK_H_
#define KVANT_CACHE_KV_LOCK_H_

#include <mutex>
#include <shared_mutex>

namespace kvant {

// A shared mutex whose readers do not overtake a writer that waits. Those of std::shared_mutex do
// in glibc: threads that attend without pause would keep Append out. It is built of std's locks
// because the thread sanitizer does not see Abseil's. Lock it by std::unique_lock and
// std::shared_lock.
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

// Held by who reads: with other readers, or alone, as where reading writes down what a device has
// found.
class KvReadLock {
 public:
  KvReadLock(KvLock& lock, bool with_readers)
      : with_readers_(lock, std::defer_lock), alone_(lock, std::defer_lock) {
    if (with_readers) {
      with_readers_.lock();
    } else {
      alone_.lock();
    }
  }

 private:
  std::shared_lock<KvLock> with_readers_;
  std::unique_lock<KvLock> alone_;
};

}  // namespace kvant

#endif  // KVANT_CACHE_KV_LOCK_H_
