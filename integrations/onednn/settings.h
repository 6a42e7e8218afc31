// What the environment asks of this library; read when it is first of interest.
#ifndef KVANT_INTEGRATIONS_ONEDNN_SETTINGS_H_
#define KVANT_INTEGRATIONS_ONEDNN_SETTINGS_H_

#include <string>

#include "absl/functional/function_ref.h"

namespace kvant::dnnl_abi {

// KVANT_DNNL_GRAPH=0: everything is left to oneDNN.
bool TurnedOff();

// KVANT_DNNL_GRAPH_VERBOSE, with KVANT_VERBOSE's values: a line for each partition, and for what is
// compiled of it. `describe` is only called where one is written.
//
//   kvant,dnnl_graph,partition,100000,taken,6 ops 0 1 2 3 4 5,attention: compressed K and V, scale
//   kvant,dnnl_graph,compile,100000,taken,fused attention: ...
void Tell(absl::FunctionRef<std::string()> describe);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_SETTINGS_H_
