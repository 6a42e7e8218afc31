// What the memory of this machine can do, to measure kernels against.
#ifndef KVANT_TOOLS_MEMORY_SPEED_H_
#define KVANT_TOOLS_MEMORY_SPEED_H_

#include <cstdint>

#include "kvant/backends/executor.h"

namespace kvant {

// The largest cache that the system names; 64 MiB if it names none.
int64_t LastLevelCacheBytes();

// Best of several plain read sweeps over memory larger than that cache, as one stream and as eight,
// in 1e9 bytes per second.
double MeasureReadGbPerSecond(Executor& executor);

}  // namespace kvant

#endif  // KVANT_TOOLS_MEMORY_SPEED_H_
