#include "kvant/tools/tensor_role.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_split.h"

namespace kvant {
namespace {

using Kind = TensorRole::Kind;

// Ops that hand their data on; the role is that of their result.
bool PassesThrough(OpKind kind) {
  switch (kind) {
    case OpKind::kStaticReshape:
    case OpKind::kStaticTranspose:
    case OpKind::kReorder:
    case OpKind::kTypeCast:
    case OpKind::kConcat:
      return true;
    default:
      return false;
  }
}

bool IsScoreOp(OpKind kind) {
  switch (kind) {
    case OpKind::kAdd:
    case OpKind::kSubtract:
    case OpKind::kMultiply:
    case OpKind::kDivide:
    case OpKind::kMaximum:
    case OpKind::kMinimum:
    case OpKind::kSelect:
    case OpKind::kTanh:
      return true;
    default:
      return PassesThrough(kind);
  }
}

bool ConsumedBy(const Graph& graph, TensorId id, OpKind kind) {
  const auto& uses = graph.FindTensor(id)->consumers;
  return std::any_of(uses.begin(), uses.end(),
                     [&](const Graph::Use& use) { return graph.ops()[use.op].kind == kind; });
}

bool ProducedBy(const Graph& graph, TensorId id, OpKind kind) {
  const Graph::Use producer = graph.FindTensor(id)->producer;
  return producer.op != Graph::kNoOp && graph.ops()[producer.op].kind == kind;
}

Kind MultiplierRole(const Graph& graph, const Op& op, int port, const LogicalTensor& tensor) {
  // A factor broadcast along the rows; two full tensors are just multiplied.
  const bool broadcast = tensor.rank() <= 0 || tensor.dims->back() == 1;
  if (!broadcast) return Kind::kGeneral;
  if (ConsumedBy(graph, op.outputs[0], OpKind::kTanh)) return Kind::kCapInverse;
  if (op.inputs.size() == 2 && ProducedBy(graph, op.inputs[1 - port], OpKind::kTanh)) {
    return Kind::kCap;
  }
  return Kind::kMultiplier;
}

Kind AttentionPortRole(const Op& op, int port) {
  if (port == 0) return Kind::kQuery;
  const auto quantized = [&](std::string_view scales) {
    const std::string names = op.attrs.GetOr<std::string>(Attr::kOptionalInputs, "");
    return names.find(scales) != std::string::npos;
  };
  if (port == 1) return quantized("k_scales") ? Kind::kCodes : Kind::kKeyValue;
  if (port == 2) return quantized("v_scales") ? Kind::kCodes : Kind::kKeyValue;
  const std::string list = op.attrs.GetOr<std::string>(Attr::kOptionalInputs, "");
  const std::vector<std::string> names = absl::StrSplit(list, ',', absl::SkipWhitespace());
  const size_t index = static_cast<size_t>(port) - 3;
  const std::string name = index < names.size() ? names[index] : "";
  if (name == "k_scales" || name == "v_scales") return Kind::kScales;
  if (name == "k_zps" || name == "v_zps") return Kind::kZeroPoints;
  if (name == "bias") return Kind::kMask;
  if (name == "select") return Kind::kCondition;
  if (name == "kv_lengths") return Kind::kKvLengths;
  if (name == "sinks") return Kind::kSinks;
  if (name == "alibi_slopes") return Kind::kSlopes;
  return Kind::kGeneral;
}

Kind PortRole(const Graph& graph, const Op& op, int port, const LogicalTensor& tensor) {
  switch (op.kind) {
    case OpKind::kMatMul:
      return port == 0 ? Kind::kQuery : Kind::kKeyValue;
    case OpKind::kDequantize:
      return Kind::kCodes;
    case OpKind::kDynamicDequantize:
    case OpKind::kDynamicQuantize:
      if (port == 0) return op.kind == OpKind::kDynamicQuantize ? Kind::kGeneral : Kind::kCodes;
      return port == 1 ? Kind::kScales : Kind::kZeroPoints;
    case OpKind::kAppend:
      if (port == 0) return Kind::kGeneral;
      if (port == 1) return Kind::kPositions;
      return port == 2 ? Kind::kScales : Kind::kZeroPoints;
    case OpKind::kDivide:
      return port == 1 ? Kind::kDivisor : Kind::kGeneral;
    case OpKind::kMultiply:
      return MultiplierRole(graph, op, port, tensor);
    case OpKind::kAdd:
      if (tensor.type == kS32) return Kind::kKvLength;
      return FeedsSoftMax(graph, op.outputs[0]) ? Kind::kMask : Kind::kGeneral;
    case OpKind::kSubtract:
      if (tensor.type == kS32) return port == 1 ? Kind::kQueryLength : Kind::kGeneral;
      return port == 1 && ConsumedBy(graph, op.outputs[0], OpKind::kExp) ? Kind::kStats
                                                                         : Kind::kGeneral;
    case OpKind::kSelect:
      return port == 0 ? Kind::kCondition : Kind::kFill;
    case OpKind::kLog:
    case OpKind::kSqrt:
    case OpKind::kReciprocal:
      return Kind::kPositive;
    case OpKind::kDropout:
      if (port == 0) return Kind::kGeneral;
      return port == 3 ? Kind::kProbability : Kind::kSeed;
    case OpKind::kScaledDotProductAttention:
      return AttentionPortRole(op, port);
    default:
      return Kind::kGeneral;
  }
}

}  // namespace

bool FeedsSoftMax(const Graph& graph, TensorId id, const Op** softmax) {
  std::vector<TensorId> todo = {id};
  absl::flat_hash_set<TensorId> seen = {id};
  while (!todo.empty()) {
    const TensorId tensor = todo.back();
    todo.pop_back();
    for (const Graph::Use& use : graph.FindTensor(tensor)->consumers) {
      const Op& op = graph.ops()[use.op];
      if (op.kind == OpKind::kSoftMax || op.kind == OpKind::kExp) {
        if (softmax != nullptr) *softmax = &op;
        return true;
      }
      if (IsScoreOp(op.kind) && seen.insert(op.outputs[0]).second) todo.push_back(op.outputs[0]);
    }
  }
  return false;
}

TensorRole RoleOf(const Graph& graph, TensorId id) {
  TensorRole general;
  std::vector<TensorId> todo = {id};
  absl::flat_hash_set<TensorId> seen = {id};
  while (!todo.empty()) {
    const TensorId tensor = todo.back();
    todo.pop_back();
    for (const Graph::Use& use : graph.FindTensor(tensor)->consumers) {
      const Op& op = graph.ops()[use.op];
      if (PassesThrough(op.kind)) {
        if (seen.insert(op.outputs[0]).second) todo.push_back(op.outputs[0]);
        continue;
      }
      const Kind kind = PortRole(graph, op, use.port, graph.tensor(tensor));
      if (kind != Kind::kGeneral) return {kind, &op};
      if (general.op == nullptr) general.op = &op;
    }
  }
  return general;
}

}  // namespace kvant
