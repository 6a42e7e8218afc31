#include "kvant/graph/graph.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <numeric>
#include <queue>
#include <utility>

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

// That ports of one op that are the same tensor agree with each other.
absl::Status CheckRepeatedPorts(const Op& op, const Tensors& inputs, const Tensors& outputs) {
  const auto at = [&](size_t port) -> const LogicalTensor& {
    return port < inputs.size() ? *inputs[port] : *outputs[port - inputs.size()];
  };
  absl::InlinedVector<size_t, 8> ports(inputs.size() + outputs.size());
  std::iota(ports.begin(), ports.end(), size_t{0});
  // The ports of a tensor side by side: an op may have a great many.
  std::sort(ports.begin(), ports.end(),
            [&](size_t a, size_t b) { return at(a).id != at(b).id ? at(a).id < at(b).id : a < b; });
  std::optional<LogicalTensor> merged;  // of the ports so far of one tensor
  for (size_t i = 1; i < ports.size(); ++i) {
    const LogicalTensor& tensor = at(ports[i]);
    const LogicalTensor& before = at(ports[i - 1]);
    if (tensor.id != before.id) {
      merged.reset();
      continue;
    }
    if (ports[i] >= inputs.size()) {
      const bool is_input = ports[i - 1] < inputs.size();
      return OpError(ErrorKind::kInvalidGraph, op, "tensor ", tensor.id, " is ",
                     is_input ? "both input and output" : "produced twice");
    }
    if (!merged) merged = before;
    if (!Compatible(*merged, tensor)) {
      return OpError(ErrorKind::kInvalidGraph, op, "tensor ", tensor.id, " is ", merged->ToString(),
                     " and ", tensor.ToString());
    }
    Merge(tensor, *merged);
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view FpMathName(FpMath mode) { return kFpMathNames[static_cast<size_t>(mode)]; }

std::optional<FpMath> FpMathFromName(std::string_view name) {
  for (size_t i = 0; i < std::size(kFpMathNames); ++i) {
    if (kFpMathNames[i] == name) return static_cast<FpMath>(i);
  }
  return std::nullopt;
}

absl::Status Graph::CheckPort(const Op& op, const LogicalTensor& tensor, bool is_output) const {
  if (absl::Status valid = ValidateTensor(tensor); !valid.ok()) {
    return OpError(ErrorKindOf(valid), op, valid.message());
  }
  const TensorInfo* known = FindTensor(tensor.id);
  const bool has_value = tensor.value || (known && known->desc.value);
  if (has_value && (is_output || (known && known->producer.op != kNoOp))) {
    return OpError(ErrorKind::kInvalidGraph, op, "tensor ", tensor.id,
                   " has a value and is the result of an op");
  }
  if (!known) return absl::OkStatus();
  if (!Compatible(known->desc, tensor)) {
    return OpError(ErrorKind::kInvalidGraph, op, "tensor ", tensor.id, " is ", tensor.ToString(),
                   " here but ", known->desc.ToString(), " (or other strides) elsewhere");
  }
  if (is_output && known->producer.op != kNoOp) {
    return OpError(ErrorKind::kInvalidGraph, op, "tensor ", tensor.id, " is already produced by ",
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

absl::Status Graph::SortOps() {
  const auto count = static_cast<OpIndex>(ops_.size());
  std::vector<int32_t> waiting(count, 0);
  for (const TensorInfo& info : tensors_) {
    if (info.producer.op == kNoOp) continue;
    for (const Use& use : info.consumers) ++waiting[use.op];
  }
  // The lowest ready index first keeps an order that is topological already.
  std::priority_queue<OpIndex, std::vector<OpIndex>, std::greater<>> ready;
  for (OpIndex i = 0; i < count; ++i) {
    if (waiting[i] == 0) ready.push(i);
  }
  std::vector<OpIndex> position(count, kNoOp);
  OpIndex placed = 0;
  while (!ready.empty()) {
    const OpIndex op = ready.top();
    ready.pop();
    position[op] = placed++;
    for (TensorId id : ops_[op].outputs) {
      for (const Use& use : FindTensor(id)->consumers) {
        if (--waiting[use.op] == 0) ready.push(use.op);
      }
    }
  }
  if (placed < count) {
    const auto stuck = std::find(position.begin(), position.end(), kNoOp) - position.begin();
    return MakeError(ErrorKind::kInvalidGraph, ops_[stuck].ToString(), " is on or behind a cycle");
  }
  if (std::is_sorted(position.begin(), position.end())) return absl::OkStatus();
  std::vector<Op> sorted(count);
  for (OpIndex i = 0; i < count; ++i) sorted[position[i]] = std::move(ops_[i]);
  ops_ = std::move(sorted);
  for (auto& [id, index] : op_ids_) index = position[index];
  for (TensorInfo& info : tensors_) {
    if (info.producer.op != kNoOp) info.producer.op = position[info.producer.op];
    for (Use& use : info.consumers) use.op = position[use.op];
    std::sort(info.consumers.begin(), info.consumers.end(), [](const Use& a, const Use& b) {
      return a.op != b.op ? a.op < b.op : a.port < b.port;
    });
  }
  return absl::OkStatus();
}

bool Graph::IsOutput(TensorId id, absl::FunctionRef<bool(OpIndex)> has) const {
  const auto& consumers = FindTensor(id)->consumers;
  return consumers.empty() || std::any_of(consumers.begin(), consumers.end(), [&](const Use& use) {
           return ops_[use.op].kind == OpKind::kEnd || !has(use.op);
         });
}

absl::Status Graph::Finalize() {
  if (finalized_) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(SortOps());
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
      if (IsOutput(id, [](OpIndex) { return true; })) outputs_.push_back(id);
    }
  }
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

bool Graph::has_constants() const {
  return std::any_of(tensors_.begin(), tensors_.end(),
                     [](const TensorInfo& info) { return info.desc.value.has_value(); });
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

Graph Graph::Subgraph(absl::Span<const OpIndex> ops) const {
  Graph sub(options_);
  std::vector<OpIndex> order(ops.begin(), ops.end());
  std::sort(order.begin(), order.end());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  sub.ops_.reserve(order.size());
  for (OpIndex op : order) {
    if (op < 0 || op >= static_cast<OpIndex>(ops_.size())) continue;
    const auto index = static_cast<OpIndex>(sub.ops_.size());
    sub.ops_.push_back(ops_[op]);
    sub.op_ids_[ops_[op].id] = index;
    for (size_t i = 0; i < ops_[op].inputs.size(); ++i) {
      sub.Touch(tensor(ops_[op].inputs[i])).consumers.push_back({index, static_cast<int32_t>(i)});
    }
    for (size_t i = 0; i < ops_[op].outputs.size(); ++i) {
      sub.Touch(tensor(ops_[op].outputs[i])).producer = {index, static_cast<int32_t>(i)};
    }
  }
  // Already sorted and acyclic: this only finds the ports.
  sub.Finalize().IgnoreError();
  // It does not see what is consumed outside as well.
  sub.outputs_.clear();
  for (const Op& op : sub.ops_) {
    for (const TensorId id : op.outputs) {
      const auto has = [&](OpIndex op) {
        return std::binary_search(order.begin(), order.end(), op);
      };
      if (IsOutput(id, has)) sub.outputs_.push_back(id);
    }
  }
  return sub;
}

}  // namespace kvant
