#include "kvant/tools/overrides.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using TensorMap = absl::flat_hash_map<TensorId, LogicalTensor>;

absl::Status Bad(std::string_view option, std::string_view part, std::string_view why) {
  return InvalidArguments(option, ": '", part, "' ", why);
}

std::optional<uint64_t> ParseId(const std::string& text) {
  uint64_t id = 0;
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(text, &id)) {
    return std::nullopt;
  }
  return id;
}

// "1x32x64"; nothing if a part is no whole number.
std::optional<std::vector<int64_t>> ParseList(const std::string& text) {
  std::vector<int64_t> values;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, 'x'))) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(part, &value)) return std::nullopt;
    values.push_back(value);
  }
  return values;
}

// Dense strides with the dims in this order, outermost first.
Dims StridesInOrder(const Dims& dims, const std::vector<int>& order) {
  Dims strides(dims.size(), 1);
  uint64_t next = 1;  // wraps on overflow; ValidateTensor refuses such dims
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = static_cast<int64_t>(next);
    next *= static_cast<uint64_t>(std::max<int64_t>(dims[*d], 1));
  }
  return strides;
}

// The dims from outermost to innermost in memory.
std::vector<int> OrderOf(const Dims& strides) {
  std::vector<int> order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return strides[a] > strides[b]; });
  return order;
}

bool IsTag(const std::string& text) {
  return !text.empty() && text != "scalar" &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= 'a' && c <= 'l'; });
}

absl::Status SetLayout(const std::string& layout, LogicalTensor& tensor) {
  if (!tensor.has_shape()) return Bad("--in-shapes", layout, "is a layout for an unknown shape");
  const size_t rank = tensor.dims->size();
  if (IsTag(layout)) {
    std::vector<int> order;
    for (char c : layout) order.push_back(c - 'a');
    std::vector<int> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    bool permutation = sorted.size() == rank;
    for (size_t i = 0; permutation && i < rank; ++i) permutation = sorted[i] == static_cast<int>(i);
    if (!permutation) {
      return Bad(
          "--in-shapes", layout,
          absl::StrCat("does not name each of the ", rank, " dims of ", tensor.Label(), " once"));
    }
    tensor.strides = StridesInOrder(*tensor.dims, order);
    return absl::OkStatus();
  }
  const std::optional<std::vector<int64_t>> strides = ParseList(layout);
  if (!strides || strides->size() != rank) {
    return Bad("--in-shapes", layout,
               absl::StrCat("is neither a tag nor ", rank, " strides for ", tensor.Label()));
  }
  tensor.strides = Dims(strides->begin(), strides->end());
  return absl::OkStatus();
}

absl::Status SetShape(const std::string& text, LogicalTensor& tensor) {
  std::string shape = text;
  std::string layout;
  if (const size_t star = text.find('*'); star != std::string::npos) {
    shape = text.substr(0, star);
    layout = text.substr(star + 1);
    if (layout.empty()) return Bad("--in-shapes", text, "has no layout after '*'");
  } else if (IsTag(text)) {
    return SetLayout(text, tensor);
  }
  if (shape == "scalar" || shape == "-") {
    tensor.dims = Dims();
    tensor.strides = Dims();
  } else if (!shape.empty()) {
    const std::optional<std::vector<int64_t>> dims = ParseList(shape);
    if (!dims) return Bad("--in-shapes", text, "is not a shape such as 2x8x1x64");
    if (std::any_of(dims->begin(), dims->end(), [](int64_t dim) { return dim < 0; })) {
      return Bad("--in-shapes", text, "has a negative dim");
    }
    tensor.dims = Dims(dims->begin(), dims->end());
    tensor.strides = DenseStrides(*tensor.dims);
  } else if (layout.empty()) {
    return Bad("--in-shapes", text, "is empty");
  }
  tensor.layout = Layout::kStrided;
  if (!layout.empty()) KVANT_RETURN_IF_ERROR(SetLayout(layout, tensor));
  return ValidateTensor(tensor);
}

// Calls apply(id, rest) for each "id:rest" of a list joined by '+', which has no id twice.
template <typename Apply>
absl::Status ForEachEntry(std::string_view option, const std::string& text, Apply apply) {
  if (text.find(',') != std::string::npos) {
    return Bad(option, text, "lists alternatives with a comma; give one at a time");
  }
  std::set<uint64_t> seen;
  for (const std::string& entry : std::vector<std::string>(absl::StrSplit(text, '+'))) {
    const size_t colon = entry.find(':');
    const std::optional<uint64_t> id = ParseId(entry.substr(0, colon));
    if (colon == std::string::npos || !id) return Bad(option, entry, "does not start with 'ID:'");
    if (!seen.insert(*id).second) return Bad(option, text, absl::StrCat("names ", *id, " twice"));
    KVANT_RETURN_IF_ERROR(apply(*id, entry.substr(colon + 1)));
  }
  return absl::OkStatus();
}

absl::StatusOr<LogicalTensor*> Find(std::string_view option, TensorId id, TensorMap& tensors) {
  const auto it = tensors.find(id);
  if (it == tensors.end()) return Bad(option, absl::StrCat(id), "is no tensor of this graph");
  return &it->second;
}

absl::Status RewriteTypes(const std::string& dt, TensorMap& tensors) {
  if (dt.empty()) return absl::OkStatus();
  if (dt.find(':') == std::string::npos) {
    const std::optional<DataType> type = DataTypeFromName(dt);
    if (!type || !IsComputeFloat(*type)) return Bad("--dt", dt, "is none of f32, bf16, f16");
    for (auto& [id, tensor] : tensors) {
      // A host scalar exists in f32 only.
      if (IsComputeFloat(tensor.type) && tensor.property != Property::kHostScalar) {
        tensor.type = *type;
      }
    }
    return absl::OkStatus();
  }
  return ForEachEntry("--dt", dt, [&](TensorId id, const std::string& name) -> absl::Status {
    KVANT_ASSIGN_OR_RETURN(LogicalTensor* const tensor, Find("--dt", id, tensors));
    const std::optional<DataType> type = DataTypeFromName(name);
    if (!type || *type == kUndef) return Bad("--dt", name, "is no data type");
    tensor->type = *type;
    return absl::OkStatus();
  });
}

// The text of an attribute's value, read as the type that the attribute has.
std::optional<AttrValue> ParseAttr(Attr attr, const std::string& text) {
  const auto as_float = [](const std::string& part) -> std::optional<float> {
    float value = 0;
    return absl::SimpleAtof(part, &value) ? std::optional<float>(value) : std::nullopt;
  };
  // One empty value per attribute says which type it has.
  static const AttrValue* const kSamples = new AttrValue[]{
#define KVANT_ATTR(name, json, ...) __VA_ARGS__(),
#include "kvant/graph/attributes.inc"
  };
  const AttrValue& sample = kSamples[static_cast<size_t>(attr)];
  if (std::holds_alternative<std::string>(sample)) return text;
  if (std::holds_alternative<bool>(sample)) {
    if (text == "true" || text == "1") return true;
    if (text == "false" || text == "0") return false;
    return std::nullopt;
  }
  if (std::holds_alternative<float>(sample)) {
    const std::optional<float> value = as_float(text);
    return value ? std::optional<AttrValue>(*value) : std::nullopt;
  }
  if (std::holds_alternative<std::vector<float>>(sample)) {
    std::vector<float> values;
    for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, 'x'))) {
      const std::optional<float> value = as_float(part);
      if (!value) return std::nullopt;
      values.push_back(*value);
    }
    return values;
  }
  const std::optional<std::vector<int64_t>> values = ParseList(text);
  if (!values) return std::nullopt;
  if (std::holds_alternative<std::vector<int64_t>>(sample)) return *values;
  if (values->size() != 1) return std::nullopt;
  return values->front();
}

absl::Status RewriteAttr(const std::string& text, Op& op) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::optional<Attr> attr = AttrFromName(name);
  if (!attr) return Bad("--op-attrs", text, absl::StrCat("names no attribute of ", op.ToString()));
  if (colon == std::string::npos) return Bad("--op-attrs", text, "has no ':VALUE'");
  const std::string value_text = text.substr(colon + 1);
  if (value_text == "undef") {
    Attributes kept;
    for (const auto& [other, value] : op.attrs) {
      if (other != *attr) kept.Set(other, value);
    }
    op.attrs = kept;
    return absl::OkStatus();
  }
  const std::optional<AttrValue> value = ParseAttr(*attr, value_text);
  if (!value) {
    return Bad(
        "--op-attrs", text,
        absl::StrCat("has a value of the wrong type, or beyond its range, for ", op.ToString()));
  }
  op.attrs.Set(*attr, *value);
  return absl::OkStatus();
}

absl::Status RewriteAttrs(const std::string& text, std::vector<Op>& ops) {
  if (text.empty()) return absl::OkStatus();
  return ForEachEntry("--op-attrs", text, [&](OpId id, const std::string& rest) -> absl::Status {
    const auto op = std::find_if(ops.begin(), ops.end(), [&](const Op& o) { return o.id == id; });
    if (op == ops.end()) return Bad("--op-attrs", absl::StrCat(id), "is no op of this graph");
    for (const std::string& attr : std::vector<std::string>(absl::StrSplit(rest, '*'))) {
      KVANT_RETURN_IF_ERROR(RewriteAttr(attr, *op));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<Graph> Rebuild(const Graph& graph, const std::vector<Op>& ops,
                              const TensorMap& tensors) {
  Graph rebuilt(graph.options());
  for (const Op& op : ops) {
    std::vector<LogicalTensor> inputs;
    std::vector<LogicalTensor> outputs;
    for (TensorId id : op.inputs) inputs.push_back(tensors.at(id));
    for (TensorId id : op.outputs) outputs.push_back(tensors.at(id));
    KVANT_RETURN_IF_ERROR(rebuilt.AddOp(op, inputs, outputs));
  }
  KVANT_RETURN_IF_ERROR(rebuilt.Finalize());
  return rebuilt;
}

// Gives a tensor whose shape was inferred anew strides in the order that it had.
absl::Status Restride(const LogicalTensor& before, Graph& graph) {
  LogicalTensor tensor = graph.tensor(before.id);
  if (!tensor.has_shape() || !before.has_shape()) return absl::OkStatus();
  const bool was_strided = before.strides && before.strides->size() == before.dims->size();
  if (*tensor.dims == *before.dims) {
    tensor.strides = before.strides;
  } else if (was_strided && before.dims->size() == tensor.dims->size()) {
    tensor.strides = StridesInOrder(*tensor.dims, OrderOf(*before.strides));
  }
  return graph.SetTensor(tensor);
}

}  // namespace

absl::StatusOr<Graph> ApplyOverrides(const Graph& graph, const Overrides& overrides) {
  if (overrides.empty()) {
    Graph inferred = graph;
    KVANT_RETURN_IF_ERROR(InferShapes(inferred));
    return inferred;
  }
  TensorMap tensors;
  for (const Op& op : graph.ops()) {
    for (TensorId id : op.inputs) tensors.emplace(id, graph.tensor(id));
    for (TensorId id : op.outputs) tensors.emplace(id, graph.tensor(id));
  }
  std::vector<Op> ops = graph.ops();
  TensorMap before = tensors;  // what produced tensors go back to, where given
  KVANT_RETURN_IF_ERROR(RewriteTypes(overrides.dt, tensors));
  KVANT_RETURN_IF_ERROR(RewriteAttrs(overrides.op_attrs, ops));

  std::vector<TensorId> given;
  if (!overrides.in_shapes.empty()) {
    KVANT_RETURN_IF_ERROR(ForEachEntry("--in-shapes", overrides.in_shapes,
                                       [&](TensorId id, const std::string& shape) -> absl::Status {
                                         KVANT_ASSIGN_OR_RETURN(LogicalTensor* const tensor,
                                                                Find("--in-shapes", id, tensors));
                                         given.push_back(id);
                                         return SetShape(shape, *tensor);
                                       }));
  }
  std::vector<TensorId> inferred;
  for (auto& [id, tensor] : tensors) {
    if (graph.FindTensor(id)->producer.op == Graph::kNoOp) continue;
    if (std::find(given.begin(), given.end(), id) != given.end()) continue;
    tensor.dims = std::nullopt;
    tensor.strides = std::nullopt;
    inferred.push_back(id);
  }
  KVANT_ASSIGN_OR_RETURN(Graph rebuilt, Rebuild(graph, ops, tensors));
  KVANT_RETURN_IF_ERROR(InferShapes(rebuilt));
  for (TensorId id : inferred) KVANT_RETURN_IF_ERROR(Restride(before.at(id), rebuilt));
  return rebuilt;
}

}  // namespace kvant
