#include "kvant/tools/dnnl_api.h"

#include <dlfcn.h>

#include "kvant/graph/status.h"

namespace kvant::dnnl_abi {
namespace {

absl::StatusOr<void*> Open(const std::string& path) {
  void* const library = dlopen(path.empty() ? nullptr : path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  return InvalidArguments(dlerror());
}

template <typename F>
void Find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
}

}  // namespace

absl::StatusOr<DnnlApi> LoadDnnl(const std::string& graph_library, const std::string& library) {
  KVANT_ASSIGN_OR_RETURN(void* const common, Open(library));
  KVANT_ASSIGN_OR_RETURN(void* const graph, Open(graph_library));
  DnnlApi api;
#define KVANT_DNNL_FORWARD(name, parameters, arguments) Find(graph, "dnnl_graph_" #name, api.name);
#define KVANT_DNNL_OWN KVANT_DNNL_FORWARD
#define KVANT_DNNL_COMMON(name, parameters, arguments) Find(common, "dnnl_" #name, api.name);
#include "kvant/integrations/onednn/functions.inc"
  Find(common, "dnnl_engine_create", api.engine_create);
  Find(common, "dnnl_engine_destroy", api.engine_destroy);
  Find(common, "dnnl_stream_create", api.stream_create);
  Find(common, "dnnl_stream_destroy", api.stream_destroy);
  Find(common, "dnnl_version", api.version);
  if (api.graph_create != nullptr && api.engine_create != nullptr) return api;
  return InvalidArguments(api.graph_create == nullptr ? graph_library : library,
                          ": no oneDNN functions are in it");
}

}  // namespace kvant::dnnl_abi
