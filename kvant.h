// The whole public API.
#ifndef KVANT_KVANT_H_
#define KVANT_KVANT_H_

#include "kvant/backends/compiled_graph.h"      // IWYU pragma: export
#include "kvant/backends/compiled_partition.h"  // IWYU pragma: export
#include "kvant/backends/engine.h"              // IWYU pragma: export
#include "kvant/backends/executor.h"            // IWYU pragma: export
#include "kvant/backends/tensor.h"              // IWYU pragma: export
#include "kvant/cache/import_export.h"          // IWYU pragma: export
#include "kvant/cache/kv_attention.h"           // IWYU pragma: export
#include "kvant/cache/kv_cache.h"               // IWYU pragma: export
#include "kvant/graph/builder.h"                // IWYU pragma: export
#include "kvant/graph/graph.h"                  // IWYU pragma: export
#include "kvant/graph/json.h"                   // IWYU pragma: export
#include "kvant/graph/shape_inference.h"        // IWYU pragma: export
#include "kvant/graph/status.h"                 // IWYU pragma: export
#include "kvant/patterns/partition.h"           // IWYU pragma: export
#include "kvant/patterns/partitioner.h"         // IWYU pragma: export

#endif  // KVANT_KVANT_H_
