// What is expected of every engine.
#ifndef KVANT_TESTS_CONFORMANCE_EXPECT_H_
#define KVANT_TESTS_CONFORMANCE_EXPECT_H_

#include "kvant/tests/conformance/harness.h"

namespace kvant::conformance {

// Every engine under test runs it, and its outputs are the oracle's by Judge; by_point: as there.
void ExpectTheOracle(const Prepared& prepared, bool by_point = true);

// Engines that fuse it give the same bits on 1, 2 and 5 threads. oneDNN promises no such thing.
void ExpectTheSameOnAnyThreads(const Prepared& prepared);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_EXPECT_H_
