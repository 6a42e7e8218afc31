// A client's graph as kvant's, and its ops as oneDNN's again.
#ifndef KVANT_INTEGRATIONS_ONEDNN_MIRROR_H_
#define KVANT_INTEGRATIONS_ONEDNN_MIRROR_H_

#include <functional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvant/graph/graph.h"
#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {

struct MirroredGraph {
  Graph graph;
  // Ops that kvant's table lacks, or takes otherwise, are Wildcards there: why, by id.
  absl::flat_hash_map<OpId, std::string> unknown;
};

// With the same ids of ops and tensors, finalized. The errors are of graphs that kvant cannot hold,
// two producers of a tensor say.
absl::StatusOr<MirroredGraph> Mirror(const OurGraph& graph);

// oneDNN's graph of those ops for which `in` holds, finalized and filtered by policy fusion. What
// other ops take of them is taken by an End too, whose id is no op's of the client's, so that it
// stays an output. A status where oneDNN gives one.
Status MakeNextGraph(const OurGraph& graph, const std::function<bool(const OpRecord&)>& in,
                     NextGraph* made);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_MIRROR_H_
