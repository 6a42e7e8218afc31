#include "kvant/tools/tensor_role.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"

namespace kvant {
namespace {

using Kind = TensorRole::Kind;

// Whether an op hands the data of that input on; its role is that of the result.
bool PassesThrough(OpKind kind, int port) {
  switch (ClassOf(kind)) {
    case OpClass::kLoad:
      return port == 0;
    case OpClass::kJoin:
      return kind == OpKind::kConcat || port > 0;
    default:
      return ClassOf(kind) == OpClass::kMove || kind == OpKind::kSlice;
  }
}

bool IsScoreOp(OpKind kind) {
  return ClassOf(kind) == OpClass::kBinary || kind == OpKind::kSelect || kind == OpKind::kTanh ||
         PassesThrough(kind, 0);
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

// By the name of an input.
Kind NamedRole(const Op& op, int port) {
  constexpr std::pair<std::string_view, Kind> kRoles[] = {
      {"q", Kind::kQuery},           {"k", Kind::kKeyValue},
      {"v", Kind::kKeyValue},        {"bias", Kind::kMask},
      {"select", Kind::kCondition},  {"kv_lengths", Kind::kKvLengths},
      {"lengths", Kind::kKvLengths}, {"kv_first", Kind::kFirstTokens},
      {"first", Kind::kFirstTokens}, {"query_offsets", Kind::kQueryOffsets},
      {"sinks", Kind::kSinks},       {"alibi_slopes", Kind::kSlopes},
      {"ranges", Kind::kRanges},     {"page_table", Kind::kPageTable},
  };
  const std::string_view name = InputName(op, static_cast<size_t>(port));
  for (const auto& [input, kind] : kRoles) {
    if (input == name) return kind;
  }
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
    case OpKind::kAppendPages:
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
    case OpKind::kSoftMax:
    case OpKind::kLoadTokens:
    case OpKind::kLoadPages:
    case OpKind::kLoadRanges:
      return NamedRole(op, port);
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
      if (PassesThrough(op.kind, use.port)) {
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
