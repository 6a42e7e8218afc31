#include "kvant/graph/json.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "kvant/graph/json_document.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// One of the names as its index, or the enumerator of that number.
template <size_t n, typename Enum>
absl::Status ReadName(const JsonValue& value, const std::array<std::string_view, n>& names,
                      Enum& result) {
  std::string name;
  KVANT_RETURN_IF_ERROR(value.Read(name));
  const auto* const found = std::ranges::find(names, name);
  if (found == names.end()) return value.Error("unknown value '", name, "'");
  result = static_cast<Enum>(found - names.begin());
  return absl::OkStatus();
}

// Reads a member that may be missing.
template <typename Read>
absl::Status IfPresent(const JsonValue& object, std::string_view key, Read read) {
  KVANT_ASSIGN_OR_RETURN(const std::optional<JsonValue> value, object.Find(key));
  return value ? read(*value) : absl::OkStatus();
}

// Dims or strides. Nothing for one unknown element, which is how an unknown rank is
// written.
absl::Status ReadDims(const JsonValue& value, std::optional<Dims>& result) {
  std::vector<int64_t> numbers;
  KVANT_RETURN_IF_ERROR(value.Read(numbers));
  if (numbers.size() > kMaxRank) {
    return value.Error("rank ", numbers.size(), " is above the limit of ", kMaxRank);
  }
  if (numbers != std::vector<int64_t>{kUnknownDim}) result.emplace(numbers.begin(), numbers.end());
  return absl::OkStatus();
}

// kvant's own lists, by tensor: where its constant, or its name, is written.
using ByTensor = absl::flat_hash_map<TensorId, JsonValue>;
struct OwnKeys {
  ByTensor constants, names;
};

// [{"id": 3, "<member>": ...}, ...]
absl::StatusOr<ByTensor> ReadByTensor(const JsonValue& root, std::string_view key,
                                      std::string_view member) {
  ByTensor values;
  KVANT_RETURN_IF_ERROR(IfPresent(root, key, [&](const JsonValue& list) {
    return list.ForEach([&](JsonValue entry) {
      TensorId id = 0;
      KVANT_RETURN_IF_ERROR(entry.ReadMember("id", id));
      KVANT_ASSIGN_OR_RETURN(const JsonValue value, entry.Member(member));
      if (values.try_emplace(id, value).second) return absl::OkStatus();
      return entry.Error("tensor ", id, " has two ", member, "s");
    });
  }));
  return values;
}

// A number, true or false, or "inf", "-inf" or "nan".
absl::StatusOr<Constant> ReadConstant(const JsonValue& value, DataType type) {
  if (type == kBoolean) {
    bool boolean = false;
    KVANT_RETURN_IF_ERROR(value.Read(boolean));
    return Constant(boolean);
  }
  double number = 0;
  if (IsInteger(type)) {
    int64_t integer = 0;
    KVANT_RETURN_IF_ERROR(value.Read(integer));
    if (type == kS64) return Constant(integer);
    number = static_cast<double>(integer);
  } else if (!IsFloat(type)) {
    return value.Error("a value of type ", DataTypeName(type));
  } else if (value.IsString()) {
    static constexpr std::array<std::string_view, 3> kNames = {"inf", "-inf", "nan"};
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr double kValues[] = {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
    size_t index = 0;
    KVANT_RETURN_IF_ERROR(ReadName(value, kNames, index));
    number = kValues[index];
  } else {
    float real = 0;
    KVANT_RETURN_IF_ERROR(value.Read(real));
    number = real;
  }
  const std::string why = Constant::WhyNot(type, number);
  if (!why.empty()) return value.Error(why);
  return Constant(type, number);
}

template <typename T>
absl::Status ReadNamed(const JsonValue& value, std::optional<T> (*from_name)(std::string_view),
                       std::string_view what, T& out) {
  std::string name;
  KVANT_RETURN_IF_ERROR(value.Read(name));
  const std::optional<T> found = from_name(name);
  if (!found) return value.Error("unknown ", what, " '", name, "'");
  out = *found;
  return absl::OkStatus();
}

absl::Status ReadTensor(const JsonValue& value, const OwnKeys& own, LogicalTensor& tensor) {
  KVANT_RETURN_IF_ERROR(value.ReadMember("id", tensor.id));
  KVANT_ASSIGN_OR_RETURN(const JsonValue dtype, value.Member("dtype"));
  KVANT_RETURN_IF_ERROR(ReadNamed(dtype, DataTypeFromName, "data type", tensor.type));
  KVANT_ASSIGN_OR_RETURN(const JsonValue shape, value.Member("shape"));
  KVANT_RETURN_IF_ERROR(ReadDims(shape, tensor.dims));
  KVANT_RETURN_IF_ERROR(IfPresent(
      value, "stride", [&](const JsonValue& stride) { return ReadDims(stride, tensor.strides); }));
  // A stride that is not known leaves the layout in memory open.
  if (tensor.strides && std::ranges::count(*tensor.strides, kUnknownDim) > 0) {
    tensor.strides.reset();
  }
  if (tensor.strides && !tensor.dims) tensor.dims = Dims{kUnknownDim};
  KVANT_RETURN_IF_ERROR(IfPresent(value, "layout_type", [&](const JsonValue& name) {
    return ReadName(name, kLayoutNames, tensor.layout);
  }));
  KVANT_RETURN_IF_ERROR(IfPresent(value, "property_type", [&](const JsonValue& name) {
    return ReadName(name, kPropertyNames, tensor.property);
  }));
  if (const auto constant = own.constants.find(tensor.id); constant != own.constants.end()) {
    KVANT_ASSIGN_OR_RETURN(tensor.value, ReadConstant(constant->second, tensor.type));
  }
  if (const auto name = own.names.find(tensor.id); name != own.names.end()) {
    KVANT_RETURN_IF_ERROR(name->second.Read(tensor.name));
  }
  if (const absl::Status valid = ValidateTensor(tensor); !valid.ok()) {
    return value.Error(valid.message());
  }
  return absl::OkStatus();
}

absl::Status ReadTensors(const JsonValue& op, std::string_view key, const OwnKeys& own,
                         std::vector<LogicalTensor>& tensors) {
  tensors.clear();
  KVANT_ASSIGN_OR_RETURN(const JsonValue list, op.Member(key));
  return list.ForEach(
      [&](JsonValue value) { return ReadTensor(value, own, tensors.emplace_back()); });
}

// {"type": ..., "value": ...}. Whether the op takes this type is the schema's matter.
absl::StatusOr<AttrValue> ReadAttribute(const JsonValue& attribute) {
  KVANT_ASSIGN_OR_RETURN(const JsonValue type_value, attribute.Member("type"));
  KVANT_ASSIGN_OR_RETURN(const JsonValue value, attribute.Member("value"));
  size_t type = 0;
  KVANT_RETURN_IF_ERROR(ReadName(type_value, kAttrTypeNames, type));
  const std::array<AttrValue, kAttrTypeNames.size()> zeros = {
      int64_t{}, float{}, bool{}, std::string(), std::vector<int64_t>(), std::vector<float>()};
  AttrValue result = zeros[type];
  KVANT_RETURN_IF_ERROR(std::visit([&value](auto& read) { return value.Read(read); }, result));
  return result;
}

absl::Status ReadAttributes(const JsonValue& attrs, Op& op) {
  return attrs.ForEachMember([&op](std::string_view name, JsonValue value) {
    const std::optional<Attr> attr = AttrFromName(name);
    if (!attr) {
      return SchemaError(op, "unknown attribute '", name, "'");
    }
    if (op.attrs.Find(*attr) != nullptr) return value.Error("this attribute occurs twice");
    KVANT_ASSIGN_OR_RETURN(AttrValue read, ReadAttribute(value));
    op.attrs.Set(*attr, std::move(read));
    return absl::OkStatus();
  });
}

absl::Status ReadOp(const JsonValue& value, Op& op) {
  KVANT_RETURN_IF_ERROR(value.ReadMember("id", op.id));
  KVANT_RETURN_IF_ERROR(
      IfPresent(value, "name", [&op](const JsonValue& name) { return name.Read(op.name); }));
  std::string kind_name;
  KVANT_RETURN_IF_ERROR(value.ReadMember("kind", kind_name));
  const std::optional<OpKind> kind = OpKindFromName(kind_name);
  if (!kind) {
    return MakeError(ErrorKind::kInvalidGraphOp, "op '", op.name, "' (id ", op.id,
                     "): unknown kind '", kind_name, "'");
  }
  op.kind = *kind;
  return IfPresent(value, "attrs",
                   [&op](const JsonValue& attrs) { return ReadAttributes(attrs, op); });
}

absl::Status ReadOptions(const JsonValue& root, GraphOptions& options) {
  KVANT_RETURN_IF_ERROR(IfPresent(root, "engine_kind", [&](const JsonValue& value) {
    return value.Read(options.engine_kind);
  }));
  KVANT_RETURN_IF_ERROR(IfPresent(root, "fpmath_mode", [&](const JsonValue& value) {
    return ReadNamed(value, FpMathFromName, "mode", options.fpmath);
  }));
  return IfPresent(root, "fpmath_mode_apply_to_int", [&](const JsonValue& value) {
    if (!value.IsString()) return value.Read(options.apply_to_int);
    static constexpr std::array<std::string_view, 2> kNames = {"false", "true"};
    return ReadName(value, kNames, options.apply_to_int);
  });
}

absl::StatusOr<Graph> ReadGraph(std::string_view text) {
  KVANT_ASSIGN_OR_RETURN(const JsonDocument document, JsonDocument::Parse(text));
  const JsonValue root = document.root();
  GraphOptions options;
  KVANT_RETURN_IF_ERROR(ReadOptions(root, options));
  Graph graph(std::move(options));
  OwnKeys own;
  KVANT_ASSIGN_OR_RETURN(own.constants, ReadByTensor(root, "kvant_constants", "value"));
  KVANT_ASSIGN_OR_RETURN(own.names, ReadByTensor(root, "kvant_names", "name"));
  KVANT_ASSIGN_OR_RETURN(const JsonValue ops, root.Member("graph"));
  std::vector<LogicalTensor> inputs, outputs;
  KVANT_RETURN_IF_ERROR(ops.ForEach([&](JsonValue value) {
    Op op;
    KVANT_RETURN_IF_ERROR(ReadOp(value, op));
    KVANT_RETURN_IF_ERROR(ReadTensors(value, "inputs", own, inputs));
    KVANT_RETURN_IF_ERROR(ReadTensors(value, "outputs", own, outputs));
    return graph.AddOp(std::move(op), inputs, outputs);
  }));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  for (const ByTensor* values : {&own.constants, &own.names}) {
    for (const auto& [id, value] : *values) {
      if (graph.FindTensor(id) != nullptr) continue;
      return value.Error("tensor ", id, " is not in the graph");
    }
  }
  return graph;
}

absl::StatusOr<Graph> ReadGraphFile(const std::string& path) {
  const auto cannot_read = [&path] { return InvalidArguments("cannot read '", path, "'"); };
  std::ifstream file(path, std::ios::binary);
  if (!file) return cannot_read();
  // In pieces, so that a file without an end is noticed.
  std::string text;
  std::array<char, 1 << 16> piece;
  while (file.read(piece.data(), piece.size()), file.gcount() > 0) {
    text.append(piece.data(), static_cast<size_t>(file.gcount()));
    if (text.size() > kMaxGraphBytes) {
      return MakeError(ErrorKind::kInvalidJson, "'", path, "' is above the limit of ",
                       kMaxGraphBytes, " bytes");
    }
  }
  if (file.bad() || !file.eof()) return cannot_read();
  absl::StatusOr<Graph> graph = ReadGraph(text);
  if (graph.ok()) return graph;
  return MakeError(ErrorKindOf(graph.status()), path, ": ", graph.status().message());
}

}  // namespace

absl::StatusOr<Graph> GraphFromJson(std::string_view text, size_t max_bytes) {
  return WithoutExceptions([&]() -> absl::StatusOr<Graph> {
    if (text.size() <= max_bytes) return ReadGraph(text);
    return MakeError(ErrorKind::kInvalidJson, text.size(), " bytes are above the limit of ",
                     max_bytes);
  });
}

absl::StatusOr<Graph> GraphFromJsonFile(const std::string& path) {
  return WithoutExceptions([&] { return ReadGraphFile(path); });
}

}  // namespace kvant
