// What the ABI's handles hold.
#ifndef KVANT_INTEGRATIONS_C_HANDLES_H_
#define KVANT_INTEGRATIONS_C_HANDLES_H_

#include <memory>
#include <string>
#include <vector>

#include "kvant/backends/compiled_graph.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/kv_attention.h"
#include "kvant/cache/kv_cache.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/graph.h"
#include "kvant/integrations/c/kvant_c.h"
#include "kvant/integrations/c/tensors.h"
#include "kvant/patterns/partition.h"

struct kvant_graph {
  kvant::Graph graph;
};

struct kvant_builder {
  kvant::GraphBuilder builder;
  std::vector<kvant::Value> values;  // by kvant_value
  absl::Status failed;               // the first call's error, which later ones return
};

struct kvant_partitions {
  struct Texts {
    std::string notes;
    std::vector<uint64_t> ops;
  };
  std::vector<kvant::Partition> partitions;
  std::vector<Texts> texts;
};

struct kvant_engine {
  kvant::Engine engine;
  DLDevice device;
};

struct kvant_compiled {
  kvant::CompiledGraph graph;
  kvant::Engine engine;
  std::vector<kvant::c::Port> inputs, outputs;
};

struct kvant_cache {
  std::shared_ptr<kvant::KvCache> cache;
  DLDevice device;
};

struct kvant_attention {
  std::shared_ptr<const kvant::KvCache> cache;
  std::shared_ptr<const kvant::KvAttention> attention;
  kvant::c::Port q, out, sinks, bias, k, v, stats;
};

#endif  // KVANT_INTEGRATIONS_C_HANDLES_H_
