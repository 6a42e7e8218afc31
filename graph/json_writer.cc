#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/json.h"

namespace kvant {
namespace {

// The version of the format's origin whose readers know every key written here.
constexpr char kFormatVersion[] = "3.13.0";

std::string Quoted(std::string_view text) {
  // Bytes that are not UTF-8 are replaced: JSON cannot hold them.
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string Json(int64_t value) { return absl::StrCat(value); }
std::string Json(uint64_t value) { return absl::StrCat(value); }
std::string Json(bool value) { return value ? "1" : "0"; }
std::string Json(const std::string& value) { return Quoted(value); }
// The shortest text that reads back as the same f32; finite, as every attribute of a graph is.
std::string Json(float value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}
template <typename Numbers>
std::string Json(const Numbers& numbers) {
  const auto append = [](std::string* out, auto number) { out->append(Json(number)); };
  return absl::StrCat("[", absl::StrJoin(numbers, ", ", append), "]");
}

// "[]" or "{}" with each item on lines of its own.
std::string Lines(absl::string_view brackets, const char* indent,
                  const std::vector<std::string>& items) {
  if (items.empty()) return std::string(brackets);
  return absl::StrCat(brackets.substr(0, 1), "\n", absl::StrJoin(items, ",\n"), "\n", indent,
                      brackets.substr(1));
}

std::string AttributesOf(const Op& op) {
  std::vector<std::string> items;
  for (const auto& [attr, value] : op.attrs) {
    items.push_back(absl::StrCat(
        "        ", Quoted(AttrName(attr)), ": {\"type\": ", Quoted(kAttrTypeNames[value.index()]),
        ", \"value\": ", std::visit([](const auto& v) { return Json(v); }, value), "}"));
  }
  return Lines("{}", "      ", items);
}

std::string TensorsOf(const Graph& graph, absl::Span<const TensorId> ids) {
  std::vector<std::string> items;
  for (const TensorId id : ids) {
    const LogicalTensor& tensor = graph.tensor(id);
    // Unknown strides: one per dim for a strided tensor, else the single one that also stands for
    // an unknown rank.
    const bool per_dim = tensor.dims && tensor.layout == Layout::kStrided;
    const Dims unknown(per_dim ? tensor.dims->size() : 1, kUnknownDim);
    items.push_back(absl::StrCat(
        "        {\"id\": ", id, ", \"dtype\": ", Quoted(DataTypeName(tensor.type)),
        ", \"shape\": ", Json(tensor.dims.value_or(Dims{kUnknownDim})),
        ", \"stride\": ", Json(tensor.strides.value_or(unknown)),
        ", \"layout_type\": ", Quoted(kLayoutNames[static_cast<size_t>(tensor.layout)]),
        ", \"property_type\": ", Quoted(kPropertyNames[static_cast<size_t>(tensor.property)]),
        "}"));
  }
  return Lines("[]", "      ", items);
}

// One of kvant's own lists of what tensors have beside oneDNN's keys, each once; `value_of` gives
// nothing for those that have none. They are last: oneDNN's reader stops at the first key that it
// does not know, and then has all it needs.
std::string OwnList(const char* key, const char* member, const std::vector<TensorId>& ids,
                    absl::FunctionRef<std::string(TensorId)> value_of) {
  std::vector<std::string> items;
  absl::flat_hash_set<TensorId> seen;
  for (const TensorId id : ids) {
    if (!seen.insert(id).second) continue;
    const std::string value = value_of(id);
    if (value.empty()) continue;
    items.push_back(absl::StrCat("    {\"id\": ", id, ", \"", member, "\": ", value, "}"));
  }
  return items.empty() ? "" : absl::StrCat(",\n  \"", key, "\": ", Lines("[]", "  ", items));
}

std::string ConstantsOf(const Graph& graph) {
  std::vector<TensorId> ids;
  for (const Op& op : graph.ops()) ids.insert(ids.end(), op.inputs.begin(), op.inputs.end());
  return OwnList("kvant_constants", "value", ids, [&graph](TensorId id) -> std::string {
    const std::optional<Constant>& value = graph.tensor(id).value;
    if (!value) return "";
    return std::isfinite(value->value()) ? value->ToString() : Quoted(value->ToString());
  });
}

std::string NamesOf(const Graph& graph) {
  std::vector<TensorId> ids = graph.inputs();
  ids.insert(ids.end(), graph.outputs().begin(), graph.outputs().end());
  return OwnList("kvant_names", "name", ids, [&graph](TensorId id) {
    const std::string& name = graph.tensor(id).name;
    return name.empty() ? "" : Quoted(name);
  });
}

}  // namespace

std::string GraphToJson(const Graph& graph) {
  std::vector<std::string> ops;
  for (const Op& op : graph.ops()) {
    ops.push_back(absl::StrCat("    {\n      \"id\": ", op.id, ",\n      \"name\": ",
                               Quoted(op.name), ",\n      \"kind\": ", Quoted(OpKindName(op.kind)),
                               ",\n      \"attrs\": ", AttributesOf(op),
                               ",\n      \"inputs\": ", TensorsOf(graph, op.inputs),
                               ",\n      \"outputs\": ", TensorsOf(graph, op.outputs), "\n    }"));
  }
  const GraphOptions& options = graph.options();
  return absl::StrCat(
      "{\n  \"version\": ", Quoted(kFormatVersion),
      ",\n  \"engine_kind\": ", Quoted(options.engine_kind),
      ",\n  \"fpmath_mode\": ", Quoted(FpMathName(options.fpmath)),
      ",\n  \"fpmath_mode_apply_to_int\": ", Quoted(options.apply_to_int ? "true" : "false"),
      ",\n  \"input_ports\": ", Json(graph.inputs()),
      ",\n  \"output_ports\": ", Json(graph.outputs()), ",\n  \"graph\": ", Lines("[]", "  ", ops),
      ConstantsOf(graph), NamesOf(graph), "\n}\n");
}

}  // namespace kvant
