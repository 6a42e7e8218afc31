#include "kvant/graph/graph.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <queue>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr std::string_view kFpMathNames[] = {"strict", "bf16", "f16", "any", "tf32"};

using Tensors = absl::InlinedVector<const LogicalTensor*, 4>;

// Completes what one declaration of a tensor leaves open from another.
void Merge(const LogicalTensor& from, LogicalTensor& into) {
  if (from.dims && !into.dims) into.dims = from.dims;
  if (from.dims) Complete(*into.dims, *from.dims);
  if (from.strides && !into.strides) into.strides = from.strides;
  if (into.property == Property::kUndef) into.property = from.property;
  if (!into.value) into.value = from.value;
  if (into.name.empty()) into.name = from.name;
}

// Of two that disagree types and dims may be the same.
std::string WithStrides(const LogicalTensor& tensor) {
  if (!tensor.strides) return tensor.ToString();
  return absl::StrCat(tensor.ToString(), " with strides [", DimsToString(*tensor.strides), "]");
}

// That ports of one op that are the same tensor agree with each other.
absl::Status CheckRepeatedPorts(const Op& op, const Tensors& inputs, const Tensors& outputs) {
  absl::InlinedVector<TensorId, 8> ids(op.inputs.begin(), op.inputs.end());
  ids.insert(ids.end(), op.outputs.begin(), op.outputs.end());
  std::ranges::sort(ids);
  if (std::ranges::adjacent_find(ids) == ids.end()) return absl::OkStatus();
  absl::flat_hash_map<TensorId, LogicalTensor> merged;  // of the ports so far
  for (const LogicalTensor* tensor : inputs) {
    LogicalTensor& before = merged.try_emplace(tensor->id, *tensor).first->second;
    if (!Compatible(before, *tensor)) {
      return OpError(ErrorKind::kInvalidGraph, op, tensor->Label(), " is ", WithStrides(before),
                     " and ", WithStrides(*tensor));
    }
    Merge(*tensor, before);
  }
  for (const LogicalTensor* tensor : outputs) {
    if (merged.try_emplace(tensor->id, *tensor).second) continue;
    const bool is_input = std::ranges::count(op.inputs, tensor->id) > 0;
    return OpError(ErrorKind::kInvalidGraph, op, tensor->Label(), " is ",
                   is_input ? "both input and output" : "produced twice");
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const Graph& graph, absl::Span<const TensorId> ids, std::string_view what) {
  absl::flat_hash_map<std::string_view, TensorId> names;
  for (const TensorId id : ids) {
    const std::string_view name = graph.tensor(id).name;
    if (name.empty()) continue;
    const auto [first, is_new] = names.emplace(name, id);
    if (is_new) continue;
    return MakeError(ErrorKind::kInvalidGraph, "two ", what, " are named '", name, "': tensors ",
                     first->second, " and ", id);
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view FpMathName(FpMath mode) {
  const size_t i = static_cast<size_t>(mode);
  return i < std::size(kFpMathNames) ? kFpMathNames[i] : std::string_view();
}

std::optional<FpMath> FpMathFromName(std::string_view name) {
  return FindByName<FpMath>(kFpMathNames, name);
}

absl::Status Graph::CheckPort(const Op& op, const LogicalTensor& tensor, bool is_output) const {
  if (absl::Status valid = ValidateTensor(tensor); !valid.ok()) {
    return OpError(ErrorKindOf(valid), op, valid.message());
  }
  const TensorInfo* known = FindTensor(tensor.id);
  const bool has_value = tensor.value || (known && known->desc.value);
  if (has_value && (is_output || (known && known->producer.op != kNoOp))) {
    return OpError(ErrorKind::kInvalidGraph, op, tensor.Label(),
                   " has a value and is the result of an op");
  }
  if (!known) return absl::OkStatus();
  if (!Compatible(known->desc, tensor)) {
    return OpError(ErrorKind::kInvalidGraph, op, tensor.Label(), " is ", WithStrides(tensor),
                   " here but ", WithStrides(known->desc), " elsewhere");
  }
  if (is_output && known->producer.op != kNoOp) {
    return OpError(ErrorKind::kInvalidGraph, op, tensor.Label(), " is already produced by ",
                   ops_[known->producer.op].ToString());
  }
  return absl::OkStatus();
}

Graph::TensorInfo& Graph::Touch(const LogicalTensor& tensor) {
  const auto [entry, is_new] = index_.try_emplace(tensor.id, static_cast<int32_t>(tensors_.size()));
  if (is_new) {
    tensors_.push_back({tensor, {}, {}});
  } else {
    Merge(tensor, tensors_[entry->second].desc);
  }
  return tensors_[entry->second];
}

absl::Status Graph::AddOp(Op op, absl::Span<const LogicalTensor> inputs,
                          absl::Span<const LogicalTensor> outputs) {
  if (finalized_) {
    return MakeError(ErrorKind::kInvalidGraph, op.ToString(), " is added to a finalized graph");
  }
  Tensors in, out;
  op.inputs.clear();
  op.outputs.clear();
  for (const LogicalTensor& tensor : inputs) {
    in.push_back(&tensor);
    op.inputs.push_back(tensor.id);
  }
  for (const LogicalTensor& tensor : outputs) {
    out.push_back(&tensor);
    op.outputs.push_back(tensor.id);
  }
  KVANT_RETURN_IF_ERROR(CheckSchema(op, in, out));
  for (const LogicalTensor* tensor : in) KVANT_RETURN_IF_ERROR(CheckPort(op, *tensor, false));
  for (const LogicalTensor* tensor : out) KVANT_RETURN_IF_ERROR(CheckPort(op, *tensor, true));
  KVANT_RETURN_IF_ERROR(CheckRepeatedPorts(op, in, out));
  const auto index = static_cast<OpIndex>(ops_.size());
  if (!op_ids_.try_emplace(op.id, index).second) {
    return OpError(ErrorKind::kInvalidGraph, op, "its id is already that of ",
                   ops_[op_ids_[op.id]].ToString());
  }
  for (size_t i = 0; i < in.size(); ++i) {
    Touch(*in[i]).consumers.push_back({index, static_cast<int32_t>(i)});
  }
  for (size_t i = 0; i < out.size(); ++i) {
    Touch(*out[i]).producer = {index, static_cast<int32_t>(i)};
  }
  ops_.push_back(std::move(op));
  return absl::OkStatus();
}

std::vector<int32_t> TopologicalOrder(
    int32_t count,
    absl::FunctionRef<void(int32_t node, absl::FunctionRef<void(int32_t next)> visit)> each_next) {
  std::vector<int32_t> order, waiting(count, 0);
  for (int32_t node = 0; node < count; ++node) {
    each_next(node, [&](int32_t next) { ++waiting[next]; });
  }
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> ready;
  for (int32_t node = 0; node < count; ++node) {
    if (waiting[node] == 0) ready.push(node);
  }
  while (!ready.empty()) {
    order.push_back(ready.top());
    ready.pop();
    each_next(order.back(), [&](int32_t next) {
      if (--waiting[next] == 0) ready.push(next);
    });
  }
  return order;
}

absl::Status Graph::SortOps() {
  const auto count = static_cast<OpIndex>(ops_.size());
  std::vector<OpIndex> order = TopologicalOrder(count, [this](OpIndex op, auto visit) {
    for (const TensorId id : ops_[op].outputs) {
      for (const Use& use : FindTensor(id)->consumers) visit(use.op);
    }
  });
  if (order.size() < ops_.size()) {
    std::ranges::sort(order);
    size_t stuck = 0;  // the first that is missing
    while (stuck < order.size() && order[stuck] == static_cast<OpIndex>(stuck)) ++stuck;
    return MakeError(ErrorKind::kInvalidGraph, ops_[stuck].ToString(), " is on or behind a cycle");
  }
  if (!std::ranges::is_sorted(order)) *this = WithOps(order);
  return absl::OkStatus();
}

void Graph::FindPorts(const Graph& whole) {
  inputs_.clear();
  outputs_.clear();
  for (OpIndex index = 0; index < static_cast<OpIndex>(ops_.size()); ++index) {
    const Op& op = ops_[index];
    for (size_t port = 0; port < op.inputs.size(); ++port) {
      const TensorInfo& info = *FindTensor(op.inputs[port]);
      // Consumers are in order: an input is listed where it is first used.
      const Use& first = info.consumers.front();
      if (info.producer.op == kNoOp && !info.desc.value && first.op == index &&
          first.port == static_cast<int32_t>(port)) {
        inputs_.push_back(info.desc.id);
      }
    }
    for (TensorId id : op.outputs) {
      const auto& consumers = FindTensor(id)->consumers;
      const bool ends = std::ranges::any_of(
          consumers, [this](const Use& use) { return ops_[use.op].kind == OpKind::kEnd; });
      const bool leaves = whole.FindTensor(id)->consumers.size() != consumers.size();
      if (consumers.empty() || ends || leaves) outputs_.push_back(id);
    }
  }
}

absl::Status Graph::Finalize() {
  if (finalized_) return absl::OkStatus();
  if (FpMathName(options_.fpmath).empty()) {
    return InvalidArguments("the graph's fpmath is ", static_cast<int>(options_.fpmath),
                            ", which is no mode");
  }
  KVANT_RETURN_IF_ERROR(SortOps());
  FindPorts(*this);
  KVANT_RETURN_IF_ERROR(CheckNames(*this, inputs_, "inputs"));
  KVANT_RETURN_IF_ERROR(CheckNames(*this, outputs_, "outputs"));
  finalized_ = true;
  return absl::OkStatus();
}

const Graph::TensorInfo* Graph::FindTensor(TensorId id) const {
  const auto found = index_.find(id);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const Graph::TensorInfo* Graph::FindTensor(std::string_view name_or_id) const {
  const TensorInfo* found = nullptr;
  for (const TensorInfo& info : tensors_) {
    if (info.desc.name.empty() || info.desc.name != name_or_id) continue;
    if (found) return nullptr;
    found = &info;
  }
  if (found) return found;
  TensorId id = 0;
  const char* end = name_or_id.data() + name_or_id.size();
  const auto [parsed, error] = std::from_chars(name_or_id.data(), end, id);
  return error == std::errc() && parsed == end ? FindTensor(id) : nullptr;
}

absl::Status Graph::SetTensor(const LogicalTensor& desc) {
  const auto found = index_.find(desc.id);
  if (found == index_.end()) {
    return InvalidArguments("tensor ", desc.id, " is not in the graph");
  }
  tensors_[found->second].desc = desc;
  return absl::OkStatus();
}

void Graph::Swap(Graph& other) noexcept {
  std::swap(options_, other.options_);
  std::swap(ops_, other.ops_);
  std::swap(tensors_, other.tensors_);
  std::swap(index_, other.index_);
  std::swap(op_ids_, other.op_ids_);
  std::swap(inputs_, other.inputs_);
  std::swap(outputs_, other.outputs_);
  std::swap(finalized_, other.finalized_);
}

Graph Graph::WithOps(absl::Span<const OpIndex> order) const {
  Graph graph(options_);
  graph.ops_.reserve(order.size());
  for (const OpIndex op : order) {
    const auto index = static_cast<OpIndex>(graph.ops_.size());
    graph.ops_.push_back(ops_[op]);
    graph.op_ids_[ops_[op].id] = index;
    for (size_t i = 0; i < ops_[op].inputs.size(); ++i) {
      graph.Touch(tensor(ops_[op].inputs[i])).consumers.push_back({index, static_cast<int32_t>(i)});
    }
    for (size_t i = 0; i < ops_[op].outputs.size(); ++i) {
      graph.Touch(tensor(ops_[op].outputs[i])).producer = {index, static_cast<int32_t>(i)};
    }
  }
  return graph;
}

Graph Graph::Subgraph(absl::Span<const OpIndex> ops) const {
  absl::btree_set<OpIndex> order;
  for (const OpIndex op : ops) {
    if (op >= 0 && op < static_cast<OpIndex>(ops_.size())) order.insert(op);
  }
  Graph sub = WithOps(std::vector<OpIndex>(order.begin(), order.end()));
  sub.FindPorts(*this);
  sub.finalized_ = true;
  return sub;
}

}  // namespace kvant
