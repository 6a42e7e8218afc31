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
//   kvant,dnnl_graph,partition,100000,kvant,0:MatMul 1:Divide 2:SoftMax 3:MatMul,attention: scale
//   kvant,dnnl_graph,partition,100001,oneDNN,4:Exp,no attention
//   kvant,dnnl_graph,compile,100000,kvant,cache_miss,fused attention: scale; cpu, cpu/avx2 ...
void Tell(absl::FunctionRef<std::string()> describe);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_SETTINGS_H_
