#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/json.h"
#include "kvant/graph/json_names.h"

namespace kvant {
namespace {

// The version of the format's origin whose readers know every key written here.
constexpr std::string_view kFormatVersion = "3.13.0";

void Append(std::string& out, std::string_view text) { out.append(text.data(), text.size()); }

void AppendString(std::string& out, std::string_view text) {
  // Bytes that are not UTF-8 are replaced: JSON cannot hold them.
  out += nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void AppendNumber(std::string& out, int64_t value) { absl::StrAppend(&out, value); }
void AppendNumber(std::string& out, uint64_t value) { absl::StrAppend(&out, value); }
// The shortest text that reads back as the same f32; finite, as every attribute of a graph is.
void AppendNumber(std::string& out, float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  Append(out, std::string_view(text, end - text));
}

template <typename Numbers>
void AppendList(std::string& out, const Numbers& numbers) {
  out += '[';
  bool first = true;
  for (const auto number : numbers) {
    if (!first) Append(out, ", ");
    first = false;
    AppendNumber(out, number);
  }
  out += ']';
}

struct AttrAppender {
  std::string& out;
  void operator()(int64_t value) const { AppendNumber(out, value); }
  void operator()(float value) const { AppendNumber(out, value); }
  void operator()(bool value) const { out += value ? '1' : '0'; }
  void operator()(const std::string& value) const { AppendString(out, value); }
  template <typename T>
  void operator()(const std::vector<T>& values) const {
    AppendList(out, values);
  }
};

void AppendAttributes(std::string& out, const Op& op) {
  Append(out, "      \"attrs\": {");
  bool first = true;
  for (const auto& [attr, value] : op.attrs) {
    Append(out, first ? "\n" : ",\n");
    first = false;
    Append(out, "        ");
    AppendString(out, AttrName(attr));
    Append(out, ": {\"type\": ");
    AppendString(out, kAttrTypeNames[value.index()]);
    Append(out, ", \"value\": ");
    std::visit(AttrAppender{out}, value);
    out += '}';
  }
  Append(out, first ? "},\n" : "\n      },\n");
}

void AppendShape(std::string& out, const LogicalTensor& tensor) {
  if (tensor.dims) return AppendList(out, *tensor.dims);
  AppendList(out, absl::Span<const int64_t>(&kUnknownDim, 1));
}

// Unknown strides: one per dim for a strided tensor, else the single one that also
// stands for an unknown rank.
void AppendStrides(std::string& out, const LogicalTensor& tensor) {
  if (tensor.strides) return AppendList(out, *tensor.strides);
  const bool per_dim = tensor.dims && tensor.layout == Layout::kStrided;
  AppendList(out, std::vector<int64_t>(per_dim ? tensor.dims->size() : 1, kUnknownDim));
}

void AppendTensor(std::string& out, const LogicalTensor& tensor) {
  Append(out, "        {\"id\": ");
  AppendNumber(out, tensor.id);
  Append(out, ", \"dtype\": ");
  AppendString(out, DataTypeName(tensor.type));
  Append(out, ", \"shape\": ");
  AppendShape(out, tensor);
  Append(out, ", \"stride\": ");
  AppendStrides(out, tensor);
  Append(out, ", \"layout_type\": ");
  AppendString(out, kLayoutNames[static_cast<size_t>(tensor.layout)]);
  Append(out, ", \"property_type\": ");
  AppendString(out, kPropertyNames[static_cast<size_t>(tensor.property)]);
  out += '}';
}

void AppendTensors(std::string& out, std::string_view key, const Graph& graph,
                   absl::Span<const TensorId> ids) {
  absl::StrAppend(&out, "      \"", std::string(key), "\": [");
  for (size_t i = 0; i < ids.size(); ++i) {
    Append(out, i == 0 ? "\n" : ",\n");
    AppendTensor(out, graph.tensor(ids[i]));
  }
  Append(out, ids.empty() ? "]" : "\n      ]");
}

void AppendOp(std::string& out, const Graph& graph, const Op& op) {
  Append(out, "    {\n      \"id\": ");
  AppendNumber(out, op.id);
  Append(out, ",\n      \"name\": ");
  AppendString(out, op.name);
  Append(out, ",\n      \"kind\": ");
  AppendString(out, OpKindName(op.kind));
  Append(out, ",\n");
  AppendAttributes(out, op);
  AppendTensors(out, "inputs", graph, op.inputs);
  Append(out, ",\n");
  AppendTensors(out, "outputs", graph, op.outputs);
  Append(out, "\n    }");
}

// kvant's own lists of what tensors have beside oneDNN's keys. They are last: oneDNN's reader stops
// at the first key that it does not know, and then has all it needs.
class OwnList {
 public:
  OwnList(std::string& out, std::string_view key, std::string_view member)
      : out_(out), key_(key), member_(member) {}
  ~OwnList() {
    if (!written_.empty()) Append(out_, "\n  ]");
  }
  // Whether the tensor has no entry yet: then its value follows, and End.
  bool Begin(TensorId id) {
    if (!written_.insert(id).second) return false;
    if (written_.size() == 1) absl::StrAppend(&out_, ",\n  \"", std::string(key_), "\": [");
    absl::StrAppend(&out_, written_.size() == 1 ? "" : ",", "\n    {\"id\": ", id, ", \"",
                    std::string(member_), "\": ");
    return true;
  }
  void End() { out_ += '}'; }

 private:
  std::string& out_;
  const std::string_view key_, member_;
  absl::flat_hash_set<TensorId> written_;
};

void AppendConstants(std::string& out, const Graph& graph) {
  OwnList list(out, "kvant_constants", "value");
  for (const Op& op : graph.ops()) {
    for (const TensorId id : op.inputs) {
      const std::optional<Constant>& value = graph.tensor(id).value;
      if (!value || !list.Begin(id)) continue;
      if (std::isfinite(value->value())) {
        Append(out, value->ToString());
      } else {
        AppendString(out, value->ToString());
      }
      list.End();
    }
  }
}

void AppendNames(std::string& out, const Graph& graph) {
  OwnList list(out, "kvant_names", "name");
  for (const auto& ids : {graph.inputs(), graph.outputs()}) {
    for (const TensorId id : ids) {
      const std::string& name = graph.tensor(id).name;
      if (name.empty() || !list.Begin(id)) continue;
      AppendString(out, name);
      list.End();
    }
  }
}

}  // namespace

std::string GraphToJson(const Graph& graph) {
  std::string out = "{\n  \"version\": ";
  AppendString(out, kFormatVersion);
  Append(out, ",\n  \"engine_kind\": ");
  AppendString(out, graph.options().engine_kind);
  Append(out, ",\n  \"fpmath_mode\": ");
  AppendString(out, FpMathName(graph.options().fpmath));
  Append(out, ",\n  \"fpmath_mode_apply_to_int\": ");
  AppendString(out, graph.options().apply_to_int ? "true" : "false");
  Append(out, ",\n  \"input_ports\": ");
  AppendList(out, graph.inputs());
  Append(out, ",\n  \"output_ports\": ");
  AppendList(out, graph.outputs());
  Append(out, ",\n  \"graph\": [");
  bool first = true;
  for (const Op& op : graph.ops()) {
    Append(out, first ? "\n" : ",\n");
    first = false;
    AppendOp(out, graph, op);
  }
  Append(out, first ? "]" : "\n  ]");
  AppendConstants(out, graph);
  AppendNames(out, graph);
  Append(out, "\n}\n");
  return out;
}

}  // namespace kvant
