#include "kvant/cache/compile_one.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {

absl::StatusOr<CompiledPartition> CompileOne(const Engine& engine, GraphBuilder builder,
                                             std::string_view what, const CompileOptions& options) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, std::move(builder).Build());
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
  if (partitions.size() != 1) {
    return absl::InternalError(
        absl::StrCat(std::string(what), " is ", partitions.size(), " partitions"));
  }
  return engine.Compile(partitions[0], options);
}

}  // namespace kvant
