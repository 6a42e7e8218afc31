// Traits of kernels, which are structs of 32-bit integers and nothing else, as words.
#ifndef KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_
#define KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_join.h"

namespace kvant::cuda {

template <typename Traits>
std::vector<int32_t> WordsOf(const Traits& traits) {
  static_assert(std::is_trivially_copyable_v<Traits> && sizeof(Traits) % sizeof(int32_t) == 0);
  using Words = std::array<int32_t, sizeof(Traits) / sizeof(int32_t)>;
  const Words words = std::bit_cast<Words>(traits);
  return {words.begin(), words.end()};
}

// The initializer that the source of a specialisation has: "1, 2, 3". Aggregates within aggregates
// need no braces of their own.
inline std::string InitializerOf(const std::vector<int32_t>& words) {
  return absl::StrJoin(words, ", ");
}

// Of the words of such traits.
template <typename Traits>
Traits TraitsOf(const std::vector<int32_t>& words) {
  Traits traits;
  std::memcpy(&traits, words.data(), sizeof(traits));
  return traits;
}

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_KERNEL_TRAITS_H_
