// Traits, which are structs of 32-bit integers and nothing else, as the initializer that the source
// of a specialisation has.
#ifndef KVANT_BACKENDS_CUDA_TRAITS_TEXT_H_
#define KVANT_BACKENDS_CUDA_TRAITS_TEXT_H_

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/strings/str_join.h"

namespace kvant::cuda {

// "1, 2, 3": aggregates within aggregates need no braces of their own.
template <typename Traits>
std::string TraitsText(const Traits& traits) {
  static_assert(std::is_trivially_copyable_v<Traits> && sizeof(Traits) % sizeof(int32_t) == 0);
  using Numbers = std::array<int32_t, sizeof(Traits) / sizeof(int32_t)>;
  return absl::StrJoin(std::bit_cast<Numbers>(traits), ", ");
}

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_TRAITS_TEXT_H_
