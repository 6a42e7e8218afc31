#include "kvant/patterns/partition.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/matcher.h"
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

const Graph& Partition::ops() const {
  static const Graph* const none = [] {
    auto* graph = new Graph();
    graph->Finalize().IgnoreError();
    return graph;
  }();
  return ops_ ? *ops_ : *none;
}

const LogicalTensor& Partition::input(int port) const {
  if (port < 0 || port >= static_cast<int>(inputs_.size())) return NoTensor();
  const bool is_extra = extra_ && port + 1 == static_cast<int>(inputs_.size());
  return is_extra ? *extra_ : ops().tensor(inputs_[port]);
}

const LogicalTensor& Partition::output(int port) const {
  if (port < 0 || port >= static_cast<int>(outputs_.size())) return NoTensor();
  return ops().tensor(outputs_[port]);
}

std::optional<OpId> Partition::softmax_op() const {
  if (match_ == nullptr || match_->softmax == Graph::kNoOp) return std::nullopt;
  return ops_->ops()[match_->softmax].id;
}

std::optional<Partition::Operand> Partition::keys() const {
  if (match_ == nullptr) return std::nullopt;
  if (match_->first_class != Graph::kNoOp) return Operand{ops_->ops()[match_->first_class].id, 1};
  const Op& qk = ops_->ops()[match_->qk];
  const int input = 1 - match_->q_input;
  return Operand{qk.id, input, (input == 1) == Transposes(qk, input) ? 2 : 1};
}

std::optional<Partition::Operand> Partition::values() const {
  if (match_ == nullptr) return std::nullopt;
  if (match_->first_class != Graph::kNoOp) return Operand{ops_->ops()[match_->first_class].id, 2};
  const Op& pv = ops_->ops()[match_->pv];
  const int input = 1 - match_->probs_input;
  return Operand{pv.id, input, (input == 1) == Transposes(pv, input) ? 1 : 2};
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
  result.extra_kind_ = extra_kind_;
  result.extra_ = extra_;
  result.misses_ = misses_;
  result.notes_.assign(notes_.begin(), notes_.end() - (noted_ ? 1 : 0));
  return result;
}

void Partition::ResolveSpec() {
  if (match_ == nullptr || !ShapesKnown(*ops_) || (extra_ && !extra_->has_shape())) return;
  const auto extra = [&](Extra kind) { return extra_kind_ == kind ? &*extra_ : nullptr; };
  Resolver resolver(*ops_, *match_, inputs_, outputs_, extra(Extra::kKvLengths),
                    extra(Extra::kSegmentRanges));
  if (resolver.Resolve(&spec_.emplace())) return;
  spec_.reset();
  notes_.push_back(resolver.why());
  noted_ = true;
}

absl::StatusOr<Partition> Partition::WithPorts(absl::Span<const LogicalTensor> ports) const {
  if (ops_ == nullptr) {
    return MakeError(ErrorKind::kInvalidArguments,
                     "the partition has no ops: it was made by default or moved from");
  }
  Partition result = WithoutSpec();
  auto graph = std::make_shared<Graph>(*ops_);
  absl::InlinedVector<LogicalTensor, 8> known;
  for (const LogicalTensor& port : ports) {
    if (extra_ && port.id == extra_->id) {
      KVANT_RETURN_IF_ERROR(CheckExtra(extra_kind_, port));
      result.extra_ = port;
    } else {
      known.push_back(port);
    }
  }
  KVANT_RETURN_IF_ERROR(InferShapes(*graph, known));
  for (const auto* list : {&inputs_, &outputs_}) {
    for (const TensorId id : *list) {
      const Graph::TensorInfo* info = graph->FindTensor(id);
      const LogicalTensor& tensor = info != nullptr ? info->desc : *result.extra_;
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

absl::Status Partition::CheckExtra(Extra kind, const LogicalTensor& tensor) const {
  KVANT_RETURN_IF_ERROR(ValidateTensor(tensor));
  if (kind == Extra::kKvLengths) {
    if (tensor.type == kS32 && tensor.rank() <= 1) return absl::OkStatus();
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("KV lengths are s32 of shape [N], not ", tensor.ToString()));
  }
  const size_t k = std::max<size_t>(match_->k.size(), 1), v = std::max<size_t>(match_->v.size(), 1);
  const int64_t segments = static_cast<int64_t>(k + v);
  const auto may_be = [&](int axis, int64_t dim) {
    return !tensor.dims || (*tensor.dims)[axis] == kUnknownDim || (*tensor.dims)[axis] == dim;
  };
  if (tensor.type == kS32 && tensor.rank() == 3 && may_be(1, segments) && may_be(2, 2)) {
    return absl::OkStatus();
  }
  return MakeError(
      ErrorKind::kInvalidArguments,
      absl::StrCat("ranges of ", k, " segments of K and ", v, " of V are s32 of shape [N, ",
                   segments, ", 2], not ", tensor.ToString()));
}

absl::StatusOr<Partition> Partition::WithExtra(Extra kind, const LogicalTensor& tensor) const {
  const char* const what = kind == Extra::kKvLengths ? "KV lengths" : "ranges of segments";
  const auto error = [&](std::string_view why) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat("partition ", id_, " (", pattern_, ") ", std::string(why)));
  };
  if (match_ == nullptr) return error(absl::StrCat("is not attention and takes no ", what));
  const bool has_input = match_->first_class != Graph::kNoOp &&
                         HasOptionalInput(ops_->ops()[match_->first_class], "kv_lengths");
  if (extra_kind_ == Extra::kSegmentRanges) {
    return error("has ranges of segments already");
  } else if (extra_kind_ == Extra::kKvLengths || has_input) {
    return error("has KV lengths already");
  }
  KVANT_RETURN_IF_ERROR(CheckExtra(kind, tensor));
  if (ops_->FindTensor(tensor.id) != nullptr) {
    return MakeError(ErrorKind::kInvalidArguments,
                     absl::StrCat(what, " have the id of another tensor, ", tensor.id));
  }
  Partition result = WithoutSpec();
  result.extra_kind_ = kind;
  result.extra_ = tensor;
  result.inputs_.push_back(tensor.id);
  result.ResolveSpec();
  return result;
}

absl::StatusOr<Partition> Partition::WithKvLengths(const LogicalTensor& lengths) const {
  return WithExtra(Extra::kKvLengths, lengths);
}

absl::StatusOr<Partition> Partition::WithSegmentRanges(const LogicalTensor& ranges) const {
  return WithExtra(Extra::kSegmentRanges, ranges);
}

}  // namespace kvant
