// What was compiled, for when it is compiled again: models compile each step of each layer.
#ifndef KVANT_INTEGRATIONS_ONEDNN_COMPILE_CACHE_H_
#define KVANT_INTEGRATIONS_ONEDNN_COMPILE_CACHE_H_

#include <memory>
#include <string>

#include "absl/types/span.h"
#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {

// Ops and attributes, threads, engine, and all that compiling sees of the tensors.
std::string CompileKey(const Piece& piece, const Engine& threads,
                       absl::Span<const TensorDesc* const> inputs,
                       absl::Span<const TensorDesc* const> outputs, dnnl_engine* engine);

// Null if it is not there, or the cache is turned off by a capacity of 0.
std::shared_ptr<const Compiled> FindCompiled(const std::string& key);
// As many as the client lets oneDNN keep (dnnl_graph_set_compiled_partition_cache_capacity); then
// what was not used for longest goes.
void KeepCompiled(const std::string& key, const std::shared_ptr<const Compiled>& compiled);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_COMPILE_CACHE_H_
