#ifndef KVANT_TESTS_SIMT_TURN_H_
#define KVANT_TESTS_SIMT_TURN_H_

#include "kvant_test_config.h"

namespace kvant {

// Whether this case runs on the executor of CUDA kernels: every case, but under a sanitizer, where
// it is slow, every third.
inline bool HasSimtTurn() {
#ifdef KVANT_SANITIZED
  static int cases = 0;
  return cases++ % 3 == 0;
#else
  return true;
#endif
}

}  // namespace kvant

#endif  // KVANT_TESTS_SIMT_TURN_H_
