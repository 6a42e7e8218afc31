// oneDNN's C functions, by the names of their table: those of a library, oneDNN's own or
// libkvant_dnnl_graph.so, which programs that compare the two call side by side.
#ifndef KVANT_TOOLS_DNNL_API_H_
#define KVANT_TOOLS_DNNL_API_H_

#include <string>

#include "absl/status/statusor.h"
#include "kvant/integrations/onednn/abi.h"

namespace kvant::dnnl_abi {

// Null for a function that the library lacks.
struct DnnlApi {
#define KVANT_DNNL_FORWARD(name, parameters, arguments) Status(*name) parameters = nullptr;
#define KVANT_DNNL_OWN KVANT_DNNL_FORWARD
#define KVANT_DNNL_COMMON KVANT_DNNL_FORWARD
#include "kvant/integrations/onednn/functions.inc"
  Status (*engine_create)(dnnl_engine**, EngineKind, size_t index) = nullptr;
  Status (*engine_destroy)(dnnl_engine*) = nullptr;
  Status (*stream_create)(dnnl_stream**, dnnl_engine*, unsigned flags) = nullptr;
  Status (*stream_destroy)(dnnl_stream*) = nullptr;
  const Version* (*version)() = nullptr;
};

// Graph functions from the library of the first path, the others from that of the second; an empty
// path is the program, as it is linked and preloaded. kInvalidArguments with the loader's words.
absl::StatusOr<DnnlApi> LoadDnnl(const std::string& graph_library, const std::string& library);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_TOOLS_DNNL_API_H_
