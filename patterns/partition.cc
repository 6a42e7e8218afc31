#include "kvant/patterns/partition.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/resolver.h"

namespace kvant {

const Graph& Partition::ops() const {
  static const Graph* const none = [] {
    auto* graph = new Graph();
    graph->Finalize().IgnoreError();
    return graph;
  }();
  return ops_ ? *ops_ : *none;
}

const LogicalTensor& Partition::At(const std::vector<TensorId>& ports, int port) const {
  if (port < 0 || port >= static_cast<int>(ports.size())) return NoTensor();
  return ops().tensor(ports[port]);
}

void Partition::ResolveSpec() {
  spec_ = std::monostate();
  if (noted_) notes_.pop_back();
  noted_ = false;
  const auto known = [this](const Op& op) { return CheckShapesKnown(*ops_, op).ok(); };
  if (kind_ == Kind::kOps || !std::ranges::all_of(ops_->ops(), known)) return;
  if (kind_ == Kind::kStore) spec_ = ResolveStore(*ops_, inputs_, outputs_);
  if (kind_ == Kind::kMerge) spec_ = ResolveMerge(*ops_, inputs_, outputs_);
  if (match_ == nullptr) return;
  Resolver resolver(*ops_, *match_, inputs_, outputs_);
  if (resolver.Resolve(&spec_.emplace<AttentionSpec>())) return;
  spec_ = std::monostate();
  notes_.push_back(resolver.why());
  noted_ = true;
}

absl::StatusOr<Partition> Partition::WithPorts(absl::Span<const LogicalTensor> ports) const {
  if (ops_ == nullptr) {
    return InvalidArguments("the partition has no ops: it was made by default or moved from");
  }
  Partition result = *this;
  auto graph = std::make_shared<Graph>(*ops_);
  KVANT_RETURN_IF_ERROR(InferShapes(*graph, ports));
  for (const auto* list : {&inputs_, &outputs_}) {
    for (const TensorId id : *list) {
      const LogicalTensor& tensor = graph->tensor(id);
      if (!tensor.has_shape()) {
        return MakeError(ErrorKind::kInvalidShape, "the shape of ", tensor.Label(), " ",
                         tensor.ToString(), " is not known");
      }
    }
  }
  result.ops_ = std::move(graph);
  result.ResolveSpec();
  return result;
}

std::vector<std::string> MissesOf(absl::Span<const Partition> partitions) {
  std::vector<std::string> all;
  absl::flat_hash_set<std::string_view> seen;
  for (const Partition& partition : partitions) {
    for (const std::string& miss : partition.misses()) {
      if (seen.insert(miss).second) all.push_back(miss);
    }
  }
  return all;
}

}  // namespace kvant
