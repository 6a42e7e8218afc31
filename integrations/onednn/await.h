// Executions of kvant among those of oneDNN.
#ifndef KVANT_INTEGRATIONS_ONEDNN_AWAIT_H_
#define KVANT_INTEGRATIONS_ONEDNN_AWAIT_H_

#include "kvant/integrations/onednn/abi.h"

namespace kvant::dnnl_abi {

// Returns when what was put onto the stream is done, so that kvant may compute in this thread. Only
// SYCL's streams run later than they are told. deps, event: as given to
// dnnl_graph_sycl_interop_compiled_partition_execute, or null; the event is then one that is over,
// as the execution is when that returns.
Status Await(dnnl_stream* stream, const void* deps, void* event);

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_AWAIT_H_
