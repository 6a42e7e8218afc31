// What a cache runs: graphs that are one partition.
#ifndef KVANT_CACHE_COMPILE_ONE_H_
#define KVANT_CACHE_COMPILE_ONE_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "kvant/backends/compiled_partition.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/builder.h"

namespace kvant {

// `what` is for the error where it is more than one.
absl::StatusOr<CompiledPartition> CompileOne(const Engine& engine, GraphBuilder builder,
                                             std::string_view what,
                                             const CompileOptions& options = {});

}  // namespace kvant

#endif  // KVANT_CACHE_COMPILE_ONE_H_
