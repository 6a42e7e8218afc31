// What a launch has stored in global memory, and who may look at it.
#ifndef KVANT_KERNELS_DEVICE_SIMT_GLOBAL_H_
#define KVANT_KERNELS_DEVICE_SIMT_GLOBAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kvant/kernels/device/simt_calls.h"
#include "kvant/kernels/device/simt_errors.h"
#include "kvant/kernels/device/simt_moment.h"

namespace kvant::simt {

// A store by one block may be seen by another if
//   - a fence comes after it, by the same thread or behind a barrier,
//   - an atomic by the block comes after that fence, likewise,
//   - and the other block looks after an atomic of its own, likewise.
// That the second atomic comes after the first one, the kernel learns from its value, and the test
// from the kernel's result under different orders of blocks.
class GlobalMemory {
 public:
  explicit GlobalMemory(Errors* errors) : errors_(errors) {}

  void BeginBlock();
  void EndBlock();

  void Store(uintptr_t to, size_t bytes, const Actor& actor, Moment now);
  // Not `coherent`: an access that asks for memory which nobody writes during the launch.
  void Load(uintptr_t from, size_t bytes, const Actor& actor, Moment now, bool coherent);
  void Fence(int thread, Moment now);
  void Atomic(int thread, Moment now);

 private:
  struct Step {
    int thread = 0;
    Moment when;
    uint64_t order = 0;  // among all steps
  };
  struct StoreEvent {
    int64_t block = 0;
    Site site;
    Step step;
    bool published = false;
  };
  // Per byte: 1 + the index in stores_ of the latest store to it, or 0.
  static constexpr size_t kPageBytes = 4096;
  using Page = std::array<uint32_t, kPageBytes>;

  Page* FindPage(uintptr_t address);
  // Why this thread may not touch what an earlier store wrote, or null.
  const char* WhyUnordered(const StoreEvent& store, const Actor& actor, Moment now) const;
  // Reports the stores to these bytes for which why(store) gives a reason.
  template <typename Why>
  void CheckBytes(uintptr_t address, size_t bytes, const Actor& actor, const char* does, Why why);

  Errors* errors_;
  uint64_t clock_ = 0;
  std::vector<StoreEvent> stores_;
  size_t first_store_of_block_ = 0;
  std::vector<Step> fences_;   // of the block
  std::vector<Step> atomics_;  // of the block
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_GLOBAL_H_
