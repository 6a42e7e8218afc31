// What kvant makes of a partition that it took.
#ifndef KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_
#define KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {

// Whether these tensors, matched with ports by id, are what compiling for that engine needs; others
// are ignored. kInvalidArguments says what is missing or not known of a port; where oneDNN is not
// asked first, since it may read what is not there.
absl::Status CheckGiven(const Piece& piece, absl::Span<const TensorDesc* const> inputs,
                        absl::Span<const TensorDesc* const> outputs, dnnl_engine* engine);

struct CompileResult {
  std::shared_ptr<const Compiled> compiled;
  bool cached = false;  // it was compiled before
};

// For tensors that were checked. The errors are those of Engine::Compile, and what oneDNN's rules
// forbid.
absl::StatusOr<CompileResult> Compile(const Piece& piece,
                                      absl::Span<const TensorDesc* const> inputs,
                                      absl::Span<const TensorDesc* const> outputs,
                                      dnnl_engine* engine);

// oneDNN's code for it.
Status StatusOf(const absl::Status& status);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_COMPILE_H_
