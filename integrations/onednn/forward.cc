// The functions that are oneDNN's own.
#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/next.h"

namespace kvant::dnnl_abi {

#define KVANT_DNNL_FORWARD(name, parameters, arguments) \
  KVANT_DNNL_EXPORT Status dnnl_graph_##name parameters { return next::name arguments; }
#define KVANT_DNNL_OWN(name, parameters, arguments)
#define KVANT_DNNL_COMMON(name, parameters, arguments)
#include "kvant/integrations/onednn/functions.inc"

}  // namespace kvant::dnnl_abi
