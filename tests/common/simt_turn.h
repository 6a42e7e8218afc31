#ifndef KVANT_TESTS_COMMON_SIMT_TURN_H_
#define KVANT_TESTS_COMMON_SIMT_TURN_H_

#include <cstdint>

#include "kvant_test_config.h"

namespace kvant {

// Whether this case runs on the executor of CUDA kernels. Every case does; under a sanitizer, where
// it is slow, about every third, mixed so that no loop of three has always the same turn.
inline bool HasSimtTurn() {
#ifdef KVANT_SANITIZED
  static uint32_t cases = 0;
  return (cases++ * 2654435761u >> 16) % 3 == 0;
#else
  return true;
#endif
}

}  // namespace kvant

#endif  // KVANT_TESTS_COMMON_SIMT_TURN_H_
