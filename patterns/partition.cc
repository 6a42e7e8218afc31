#include "kvant/patterns/partition.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/resolver.h"

namespace kvant {
namespace {

bool ShapesKnown(const Graph& graph) {
  for (const Op& op : graph.ops()) {
    for (const TensorId id : op.inputs) {
      if (!graph.tensor(id).has_shape()) return false;
    }
    for (const TensorId id : op.outputs) {
      if (!graph.tensor(id).has_shape()) return false;
    }
  }
  return true;
}

}  // namespace

std::optional<OpId> Partition::softmax_op() const {
  if (match_ == nullptr || match_->softmax == Graph::kNoOp) return std::nullopt;
  return ops_->ops()[match_->softmax].id;
}

// A copy of all but what ResolveSpec makes.
Partition Partition::WithoutSpec() const {
  Partition result;
  result.id_ = id_;
  result.kind_ = kind_;
  result.pattern_ = pattern_;
  result.ops_ = ops_;
  result.inputs_ = inputs_;
  result.outputs_ = outputs_;
  result.match_ = match_;
  result.kv_lengths_ = kv_lengths_;
  result.notes_.assign(notes_.begin(), notes_.end() - (noted_ ? 1 : 0));
  return result;
}

void Partition::ResolveSpec() {
  if (match_ == nullptr || !ShapesKnown(*ops_) || (kv_lengths_ && !kv_lengths_->has_shape())) {
    return;
  }
  Resolver resolver(*ops_, *match_, inputs_, outputs_, kv_lengths_ ? &*kv_lengths_ : nullptr);
  if (resolver.Resolve(&spec_.emplace())) return;
  spec_.reset();
  notes_.push_back(resolver.why());
  noted_ = true;
}

absl::StatusOr<Partition> Partition::WithPorts(absl::Span<const LogicalTensor> ports) const {
  Partition result = WithoutSpec();
  auto graph = std::make_shared<Graph>(*ops_);
  absl::InlinedVector<LogicalTensor, 8> known;
  for (const LogicalTensor& port : ports) {
    if (kv_lengths_ && port.id == kv_lengths_->id) {
      KVANT_RETURN_IF_ERROR(CheckKvLengths(port));
      result.kv_lengths_ = port;
    } else {
      known.push_back(port);
    }
  }
  KVANT_RETURN_IF_ERROR(InferShapes(*graph, known));
  for (const auto* list : {&inputs_, &outputs_}) {
    for (const TensorId id : *list) {
      const Graph::TensorInfo* info = graph->FindTensor(id);
      const LogicalTensor& tensor = info != nullptr ? info->desc : *result.kv_lengths_;
      if (!tensor.has_shape()) {
        return MakeError(ErrorKind::kInvalidShape,
                         absl::StrCat("the shape of port ", tensor.ToString(), " (tensor ", id,
                                      ") is not known"));
      }
    }
  }
  result.ops_ = std::move(graph);
  result.ResolveSpec();
  return result;
}

absl::Status Partition::CheckKvLengths(const LogicalTensor& lengths) const {
  KVANT_RETURN_IF_ERROR(ValidateTensor(lengths));
  if (lengths.type != kS32 || lengths.rank() > 1) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("KV lengths are s32 of shape [N], not ", lengths.ToString()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Partition> Partition::WithKvLengths(const LogicalTensor& lengths) const {
  if (match_ == nullptr) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("partition ", id_, " (", pattern_,
                                  ") is not attention and takes no KV lengths"));
  }
  const bool has_input = match_->first_class != Graph::kNoOp &&
                         HasOptionalInput(ops_->ops()[match_->first_class], "kv_lengths");
  if (kv_lengths_ || has_input) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("partition ", id_, " (", pattern_, ") has KV lengths already"));
  }
  KVANT_RETURN_IF_ERROR(CheckKvLengths(lengths));
  if (ops_->FindTensor(lengths.id) != nullptr) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("KV lengths have the id of another tensor, ", lengths.id));
  }
  Partition result = WithoutSpec();
  result.kv_lengths_ = lengths;
  result.inputs_.push_back(lengths.id);
  result.ResolveSpec();
  return result;
}

}  // namespace kvant
