// From a graph to its partitions.
#ifndef KVANT_INTEGRATIONS_ONEDNN_FILTER_H_
#define KVANT_INTEGRATIONS_ONEDNN_FILTER_H_

#include <memory>
#include <vector>

#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {

// oneDNN's partition, of which kvant has taken nothing.
Status ReadPiece(NextPartition partition, Piece* piece);

// The pieces of a graph that oneDNN has filtered, in its order, with what kvant takes. An attention
// that oneDNN fuses is taken over: id, ops, ports and place stay. One that oneDNN would cut where
// kvant need not, because it is older or this CPU lacks a type, is put among those of a graph of
// the other ops.
Status Filter(const OurGraph& graph, Policy policy,
              std::vector<std::shared_ptr<const Piece>>* pieces);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_FILTER_H_
