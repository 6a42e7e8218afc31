#include "kvant/kernels/device/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "kvant/kernels/device/sanitizer.h"

#ifdef KVANT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef KVANT_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
// Saves what a function must preserve on the stack, and the stack pointer in *save; then the
// reverse from `load`. swapcontext would ask the kernel for the signal mask at every switch, and
// longjmp to another stack is what _FORTIFY_SOURCE takes for an error.
extern "C" void KvantSwitchStack(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden KvantSwitchStack
.globl KvantSwitchStack
.type KvantSwitchStack, @function
KvantSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size KvantSwitchStack, .-KvantSwitchStack

.p2align 4
.hidden KvantStartFiber
.globl KvantStartFiber
.type KvantStartFiber, @function
KvantStartFiber:
  movq %rbx, %rdi
  xorl %ebp, %ebp
  callq *%r12
  ud2
.size KvantStartFiber, .-KvantStartFiber
)");
extern "C" void KvantStartFiber();
#endif

namespace kvant::simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Fiber::Fiber() {
#ifdef KVANT_THREAD_SANITIZER
  shadow_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(void (*entry)(void*), void* argument) : entry_(entry), argument_(argument) {
  void* memory = mmap(nullptr, PageBytes() + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, PageBytes(), PROT_NONE);
  memory_ = static_cast<char*>(memory);
  char* bottom = memory_ + PageBytes();
  bottom_ = bottom;
  bytes_ = kStackBytes;
#ifdef KVANT_THREAD_SANITIZER
  shadow_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  // What KvantSwitchStack pops: r15, r14, r13, r12, rbx, rbp, and where to return to; that leaves
  // the stack pointer a multiple of 16.
  void** top = reinterpret_cast<void**>(bottom + bytes_) - 9;
  for (int i = 0; i < 9; ++i) top[i] = nullptr;
  top[3] = reinterpret_cast<void*>(&Fiber::Enter);
  top[4] = this;
  top[6] = reinterpret_cast<void*>(&KvantStartFiber);
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = bottom;
  context_.uc_stack.ss_size = bytes_;
  context_.uc_link = nullptr;
  // makecontext passes arguments as int, so the pointer goes in halves.
  const auto address = reinterpret_cast<uintptr_t>(this);
  void (*start)(unsigned, unsigned) = [](unsigned high, unsigned low) {
    Enter(reinterpret_cast<Fiber*>(static_cast<uintptr_t>(uint64_t{high} << 32 | low)));
  };
  makecontext(&context_, reinterpret_cast<void (*)()>(start), 2,
              static_cast<unsigned>(uint64_t{address} >> 32), static_cast<unsigned>(address));
#endif
}

Fiber::~Fiber() {
  if (memory_ == nullptr) return;
#ifdef KVANT_THREAD_SANITIZER
  __tsan_destroy_fiber(shadow_);
#endif
#ifdef KVANT_ADDRESS_SANITIZER
  // Frames that never ended have left their marks, which would outlive the memory.
  __asan_unpoison_memory_region(bottom_, bytes_);
#endif
  munmap(memory_, PageBytes() + kStackBytes);
}

void Fiber::Enter(Fiber* fiber) {
  fiber->Arrived();
  fiber->entry_(fiber->argument_);
  abort();
}

void Fiber::SwitchTo(Fiber& next) {
  next.from_ = this;
#ifdef KVANT_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.bytes_);
#endif
#ifdef KVANT_THREAD_SANITIZER
  __tsan_switch_to_fiber(next.shadow_, 0);
#endif
#if defined(__x86_64__)
  KvantSwitchStack(&stack_pointer_, next.stack_pointer_);
#else
  swapcontext(&context_, &next.context_);
#endif
  Arrived();
}

void Fiber::Arrived() {
#ifdef KVANT_ADDRESS_SANITIZER
  // The sanitizer knows the stack of the OS thread, and tells it to who comes from there.
  __sanitizer_finish_switch_fiber(fake_stack_, &from_->bottom_, &from_->bytes_);
#endif
}

}  // namespace kvant::simt
