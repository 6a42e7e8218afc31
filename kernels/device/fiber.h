// Stacks to switch between within one OS thread.
#ifndef KVANT_KERNELS_DEVICE_FIBER_H_
#define KVANT_KERNELS_DEVICE_FIBER_H_

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace kvant::simt {

// A flow of control: what the OS thread had before (default-constructed), or one with a stack of
// its own, below which lies a page that may not be touched. One that is destroyed need not have
// ended.
class Fiber {
 public:
  Fiber();
  // Will call entry(argument) when first switched to. `entry` must not return.
  Fiber(void (*entry)(void*), void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From this fiber, which must be the one that runs, to `next`. Returns when switched to again.
  void SwitchTo(Fiber& next);

 private:
  static void Enter(Fiber* fiber);
  void Arrived();

#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  Fiber* from_ = nullptr;  // who switched here last
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  char* memory_ = nullptr;  // the forbidden page and the stack
  // The stack, which the sanitizers must know.
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* shadow_ = nullptr;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_FIBER_H_
