// Kernels over traits, which are structs of 32-bit integers and nothing else, as words.
#ifndef KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_
#define KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/types/span.h"
#include "kvant/backends/cuda/runtime/launcher.h"

namespace kvant::cuda {

template <typename Traits>
std::vector<int32_t> WordsOf(const Traits& traits) {
  static_assert(std::is_trivially_copyable_v<Traits> && sizeof(Traits) % sizeof(int32_t) == 0);
  using Words = std::array<int32_t, sizeof(Traits) / sizeof(int32_t)>;
  const Words words = std::bit_cast<Words>(traits);
  return {words.begin(), words.end()};
}

// Of the words of such traits.
template <typename Traits>
Traits TraitsOf(const std::vector<int32_t>& words) {
  Traits traits;
  std::memcpy(&traits, words.data(), sizeof(traits));
  return traits;
}

// A row of kernels.inc: its entry, its header in kernels/cuda, its class, and the structs of its
// traits and of its parameters.
struct KernelRow {
  const char *entry, *header, *name, *traits, *params;
};

// Words of such traits, and how the source calls their struct.
struct NamedTraits {
  const char* name;
  std::vector<int32_t> words;
};

// The kernel over these, in this order.
KernelSpec MakeKernel(const KernelRow& row, absl::Span<const NamedTraits> all, int threads,
                      int blocks_per_multiprocessor = 1);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_
