// What kvant makes of a partition that it took.
#ifndef KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_
#define KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {

// For these tensors, which are matched with ports by id; others are ignored. Errors in words: what is
// missing or not known of a port, what oneDNN's rules forbid, and those of Engine::Compile.
absl::StatusOr<std::shared_ptr<const Compiled>> Compile(const Piece& piece,
                                                        absl::Span<const TensorDesc* const> inputs,
                                                        absl::Span<const TensorDesc* const> outputs,
                                                        dnnl_engine* engine);

// oneDNN's code for it.
Status StatusOf(const absl::Status& status);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_
