// Scratch of units, given out in parts.
#ifndef KVANT_KERNELS_CPU_ARENA_H_
#define KVANT_KERNELS_CPU_ARENA_H_

#include <cstdint>

namespace kvant::cpu {

// Parts of a buffer, a cache line apart; with a null one, adds up what is asked for.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* Take(int64_t floats) {
    float* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    return part;
  }
  // `count` elements of any size.
  template <typename T>
  T* TakeAs(int64_t count) {
    return reinterpret_cast<T*>(Take((count * int64_t{sizeof(T)} + 3) / 4));
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_ARENA_H_
