// kvant's engine on the client's threads.
#ifndef KVANT_INTEGRATIONS_ONEDNN_THREADS_H_
#define KVANT_INTEGRATIONS_ONEDNN_THREADS_H_

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"

namespace kvant::dnnl_abi {

// With as many threads as oneDNN would take if it computed now, from where it takes them: the
// OpenMP runtime or the oneTBB that it is linked with. The same engine for the same number.
// kUnimplemented where its threads are a pool of the client's.
absl::StatusOr<Engine> ClientEngine();

}  // namespace kvant::dnnl_abi

#endif  // KVANT_INTEGRATIONS_ONEDNN_THREADS_H_
