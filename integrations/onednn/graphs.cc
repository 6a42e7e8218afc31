// Graphs: oneDNN's, which check what is added to them, with records of their ops.
#include <algorithm>
#include <memory>
#include <vector>

#include "kvant/integrations/onednn/filter.h"
#include "kvant/integrations/onednn/guard.h"
#include "kvant/integrations/onednn/handles.h"

namespace kvant::dnnl_abi {
namespace {

// `status` of making oneDNN's.
Status Wrap(Status status, GraphHandle made, EngineKind kind, FpMathMode mode, GraphHandle* graph) {
  if (status != kSuccess) return status;
  NextGraph owner(made);
  return Guard([&] {
    auto ours = std::make_unique<OurGraph>();
    ours->next = std::move(owner);
    ours->engine_kind = kind;
    ours->fpmath = mode;
    *graph = ours.release()->handle();
    return kSuccess;
  });
}

}  // namespace

KVANT_DNNL_EXPORT Status dnnl_graph_graph_create(GraphHandle* graph, EngineKind kind) {
  if (graph == nullptr) return kInvalidArguments;
  FpMathMode mode = 0;
  next::get_default_fpmath_mode(&mode);
  GraphHandle made = nullptr;
  const Status status = next::graph_create(&made, kind);
  return Wrap(status, made, kind, mode, graph);
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_create_with_fpmath_mode(GraphHandle* graph,
                                                                  EngineKind kind,
                                                                  FpMathMode mode) {
  if (graph == nullptr) return kInvalidArguments;
  GraphHandle made = nullptr;
  const Status status = next::graph_create_with_fpmath_mode(&made, kind, mode);
  return Wrap(status, made, kind, mode, graph);
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_destroy(GraphHandle graph) {
  OurGraph* const ours = As<OurGraph>(graph);
  if (ours == nullptr) return next::graph_destroy(graph);
  delete ours;
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_set_fpmath_mode(GraphHandle graph, FpMathMode mode,
                                                          int apply_to_int) {
  const Status status = next::graph_set_fpmath_mode(NextOf<OurGraph>(graph), mode, apply_to_int);
  if (OurGraph* const ours = As<OurGraph>(graph); ours != nullptr && status == kSuccess) {
    ours->fpmath = mode;
    ours->apply_to_int = apply_to_int != 0;
  }
  return status;
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_get_fpmath_mode(GraphHandle graph, FpMathMode* mode,
                                                          int* apply_to_int) {
  return next::graph_get_fpmath_mode(NextOf<OurGraph>(graph), mode, apply_to_int);
}

KVANT_DNNL_EXPORT Status dnnl_graph_add_op(GraphHandle graph, OpHandle op) {
  const Status status = next::add_op(NextOf<OurGraph>(graph), NextOf<OurOp>(op));
  OurGraph* const ours = As<OurGraph>(graph);
  const OurOp* const added = As<OurOp>(op);
  if (ours == nullptr || added == nullptr || status != kSuccess) return status;
  return Guard([&] {
    // oneDNN silently leaves out a second op of the same id.
    if (ours->op_ids.insert(added->record.id).second) ours->ops.push_back(added->record);
    return kSuccess;
  });
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_finalize(GraphHandle graph) {
  return next::graph_finalize(NextOf<OurGraph>(graph));
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_is_finalized(GraphHandle graph, uint8_t* finalized) {
  return next::graph_is_finalized(NextOf<OurGraph>(graph), finalized);
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_filter(GraphHandle graph, Policy policy) {
  const Status status = next::graph_filter(NextOf<OurGraph>(graph), policy);
  OurGraph* const ours = As<OurGraph>(graph);
  if (ours == nullptr || status != kSuccess) return status;
  return Guard([&] { return Filter(*ours, policy, &ours->pieces); });
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_get_partition_num(const dnnl_graph_graph* graph,
                                                            size_t* num) {
  const OurGraph* const ours = As<OurGraph>(graph);
  if (ours == nullptr) return next::graph_get_partition_num(graph, num);
  if (num == nullptr) return kInvalidArguments;
  *num = ours->pieces.size();
  return kSuccess;
}

KVANT_DNNL_EXPORT Status dnnl_graph_graph_get_partitions(GraphHandle graph, size_t num,
                                                         PartitionHandle* partitions) {
  OurGraph* const ours = As<OurGraph>(graph);
  if (ours == nullptr) return next::graph_get_partitions(graph, num, partitions);
  if (partitions == nullptr || num == 0 || ours->pieces.empty()) return kInvalidGraph;
  return Guard([&] {
    const size_t there = std::min(num, ours->pieces.size());
    std::vector<std::unique_ptr<OurPartition>> made;
    for (size_t i = 0; i < there; ++i) {
      made.push_back(std::make_unique<OurPartition>());
      made.back()->piece = ours->pieces[i];
    }
    for (size_t i = 0; i < there; ++i) partitions[i] = made[i].release()->handle();
    return kSuccess;
  });
}

}  // namespace kvant::dnnl_abi
