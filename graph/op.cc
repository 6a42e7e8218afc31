#include "kvant/graph/op.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr std::string_view kKindNames[] = {
#define KVANT_OP(kind, ...) #kind,
#include "kvant/graph/ops.inc"
};

struct AttrRow {
  std::string_view name;
  AttrValue zero;  // its alternative is the attribute's type
};

const std::vector<AttrRow>& AttrRows() {
  static const auto* const rows = new std::vector<AttrRow>{
#define KVANT_ATTR(name, json, type) {json, AttrValue(type{})},
#include "kvant/graph/attributes.inc"
  };
  return *rows;
}

const AttrRow& RowOf(Attr attr) { return AttrRows()[static_cast<size_t>(attr)]; }

// Sets of types that ports take: their names in ops.inc, and what messages say.
constexpr std::pair<absl::string_view, absl::string_view> kTypeSets[] = {
    {"float", "one of f32, bf16, f16"},
    {"number", "one of f32, bf16, f16, s32"},
    {"index", "s32 or s64"},
    {"mask", "u8, s8 or boolean"},
    {"static_code", "one of u8, s8, f8_e4m3, f8_e5m2"},
    {"code", "one of u8, s8, u4, s4, u2, s2, f8_e4m3, f8_e5m2"},
    {"zero_point", "one of s32, u8, s8, u4, s4, u2, s2, f32, bf16, f16"},
};

// "=float": what follows the colon of a port.
void ParseTypes(absl::string_view text, OpSchema::Port* port) {
  port->same = absl::ConsumePrefix(&text, "=");
  for (const auto& [name, types] : kTypeSets) {
    if (name == text) text = types;
  }
  port->types_text = std::string(text);
  for (absl::string_view word : absl::StrSplit(text, absl::ByAnyChar(" ,"))) {
    const auto type = DataTypeFromName(std::string_view(word.data(), word.size()));
    if (type) port->types.push_back(*type);
  }
}

std::vector<OpSchema::Port> ParsePorts(absl::string_view text, size_t* repeating) {
  std::vector<OpSchema::Port> ports;
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    OpSchema::Port port;
    const bool any_number = absl::ConsumeSuffix(&word, "**");
    if (any_number || absl::ConsumeSuffix(&word, "*")) ++*repeating;
    port.named = absl::ConsumeSuffix(&word, "@");
    port.optional = any_number || port.named || absl::ConsumeSuffix(&word, "?");
    const std::pair<absl::string_view, absl::string_view> name_and_types =
        absl::StrSplit(word, absl::MaxSplits(':', 1));
    port.name = std::string(name_and_types.first);
    ParseTypes(name_and_types.second, &port);
    ports.push_back(std::move(port));
  }
  return ports;
}

OpSchema::AttrRule ParseAttrRule(absl::string_view text) {
  OpSchema::AttrRule rule;
  const size_t end = text.find_first_of("=!?");
  const absl::string_view name = text.substr(0, end);
  rule.attr = *AttrFromName(std::string_view(name.data(), name.size()));
  rule.required = text[end] == '!';
  if (text[end] != '=') return rule;
  const absl::string_view values = text.substr(end + 1);
  rule.fallback = RowOf(rule.attr).zero;
  if (auto* word = std::get_if<std::string>(&*rule.fallback)) {
    rule.allowed = absl::StrSplit(values, '|');
    *word = rule.allowed.front();
  } else if (auto* flag = std::get_if<bool>(&*rule.fallback)) {
    *flag = values == "true";
  } else if (auto* number = std::get_if<int64_t>(&*rule.fallback)) {
    std::from_chars(values.data(), values.data() + values.size(), *number);
  }
  return rule;
}

OpSchema ParseSchema(absl::string_view inputs, absl::string_view outputs, absl::string_view attrs) {
  OpSchema schema;
  schema.inputs = ParsePorts(inputs, &schema.repeating_inputs);
  schema.outputs = ParsePorts(outputs, &schema.repeating_outputs);
  for (absl::string_view word : absl::StrSplit(attrs, ' ', absl::SkipEmpty())) {
    schema.attrs.push_back(ParseAttrRule(word));
  }
  return schema;
}

absl::Status CheckCount(const Op& op, const std::vector<OpSchema::Port>& ports, size_t repeating,
                        size_t count, const char* what) {
  const auto least =
      static_cast<size_t>(std::ranges::count(ports, false, &OpSchema::Port::optional));
  const bool fits =
      count <= ports.size() || (repeating > 0 && (count - ports.size()) % repeating == 0);
  if (count >= least && fits) return absl::OkStatus();
  std::string most = absl::StrCat(" to ", ports.size());
  if (repeating == 1) most = " or more";
  if (repeating > 1) most = absl::StrCat(" and multiples of ", repeating, " more");
  return SchemaError(op, "has ", count, " ", what, ", takes ", least,
                     least == ports.size() && repeating == 0 ? "" : most);
}

// JSON holds no other floats, and no attribute means anything with them.
bool IsFinite(const AttrValue& value) {
  if (const float* one = std::get_if<float>(&value)) return std::isfinite(*one);
  const auto* list = std::get_if<std::vector<float>>(&value);
  return list == nullptr || std::ranges::all_of(*list, [](float x) { return std::isfinite(x); });
}

absl::Status CheckAttrs(Op& op, const OpSchema& schema) {
  for (const auto& [attr, value] : op.attrs) {
    const OpSchema::AttrRule* rule = schema.FindAttr(attr);
    const std::string name(AttrName(attr));
    if (!rule) {
      return SchemaError(op, "has no attribute '", name, "'; it has ", schema.AttrNames());
    }
    if (const size_t type = RowOf(attr).zero.index(); value.index() != type) {
      return SchemaError(op, "attribute '", name, "' is not of type ", kAttrTypeNames[type]);
    }
    if (!IsFinite(value)) {
      return SchemaError(op, "attribute '", name, "' is infinite or not a number");
    }
    const auto* text = std::get_if<std::string>(&value);
    if (text && !rule->allowed.empty() && std::ranges::count(rule->allowed, *text) == 0) {
      return SchemaError(op, "attribute '", name, "' is '", *text, "', not one of ",
                         absl::StrJoin(rule->allowed, ", "));
    }
  }
  for (const OpSchema::AttrRule& rule : schema.attrs) {
    if (op.attrs.Find(rule.attr)) continue;
    if (rule.required) {
      return SchemaError(op, "attribute '", AttrName(rule.attr), "' is required");
    }
    if (rule.fallback) op.attrs.Set(rule.attr, *rule.fallback);
  }
  return absl::OkStatus();
}

// Inputs that come before those which optional_inputs names.
size_t UnnamedInputs(const OpSchema& schema) {
  return static_cast<size_t>(std::ranges::count(schema.inputs, false, &OpSchema::Port::named));
}

// optional_inputs names each input after the others, once, of those that there may be.
absl::Status CheckNamedInputs(const Op& op, const OpSchema& schema) {
  const size_t unnamed = UnnamedInputs(schema);
  if (unnamed == schema.inputs.size()) return absl::OkStatus();
  const std::string& list = op.Get<Attr::kOptionalInputs>();
  std::vector<std::string> names;
  if (!list.empty()) names = absl::StrSplit(list, ',');
  for (const std::string& name : names) {
    const bool known = std::ranges::any_of(
        schema.inputs, [&](const auto& port) { return port.named && port.name == name; });
    if (!known) {
      return SchemaError(op, "optional_inputs names '", name, "', which is not an input");
    }
    if (std::ranges::count(names, name) > 1) {
      return SchemaError(op, "optional_inputs names '", name, "' twice");
    }
  }
  if (names.size() + unnamed == op.inputs.size()) return absl::OkStatus();
  return SchemaError(op, "optional_inputs names ", names.size(), " inputs, but ",
                     op.inputs.size() - unnamed, " follow ", schema.inputs[unnamed - 1].name);
}

}  // namespace

OpClass ClassOf(OpKind kind) {
  constexpr OpClass kClasses[] = {
#define KVANT_OP(kind, op_class, ...) OpClass::k##op_class,
#include "kvant/graph/ops.inc"
  };
  return kClasses[static_cast<size_t>(kind)];
}

std::string_view OpKindName(OpKind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kKindNames) ? kKindNames[index] : "";
}

std::optional<OpKind> OpKindFromName(std::string_view name) {
  return FindByName<OpKind>(kKindNames, name);
}

std::string_view AttrName(Attr attr) { return RowOf(attr).name; }

std::optional<Attr> AttrFromName(std::string_view name) {
  return FindByName<Attr>(AttrRows(), name, &AttrRow::name);
}

const AttrValue& ZeroOf(Attr attr) { return RowOf(attr).zero; }

const AttrValue& DefaultOf(OpKind kind, Attr attr) {
  const OpSchema::AttrRule* rule = SchemaOf(kind).FindAttr(attr);
  return rule != nullptr && rule->fallback ? *rule->fallback : ZeroOf(attr);
}

void Attributes::Set(Attr attr, AttrValue value) {
  auto* at = values_.begin();
  while (at != values_.end() && at->first < attr) ++at;
  if (at == values_.end() || at->first != attr) at = values_.emplace(at, attr, AttrValue());
  at->second = std::move(value);
}

const AttrValue* Attributes::Find(Attr attr) const {
  const auto* const found = std::ranges::find(values_, attr, &std::pair<Attr, AttrValue>::first);
  return found == values_.end() ? nullptr : &found->second;
}

std::string Op::ToString() const {
  return absl::StrCat(std::string(OpKindName(kind)), " '", Printable(name), "' (id ", id, ")");
}

const OpSchema::AttrRule* OpSchema::FindAttr(Attr attr) const {
  const auto rule = std::ranges::find(attrs, attr, &AttrRule::attr);
  return rule == attrs.end() ? nullptr : &*rule;
}

std::string OpSchema::AttrNames() const {
  if (attrs.empty()) return "none";
  return absl::StrJoin(attrs, ", ", [](std::string* out, const AttrRule& rule) {
    out->append(AttrName(rule.attr));
  });
}

const OpSchema& SchemaOf(OpKind kind) {
  static const auto* const schemas = new std::vector<OpSchema>{
#define KVANT_OP(kind, op_class, inputs, outputs, attrs, types, shape) \
  ParseSchema(inputs, outputs, attrs),
#include "kvant/graph/ops.inc"
  };
  return (*schemas)[static_cast<size_t>(kind)];
}

const OpSchema::Port& InputPort(const Op& op, size_t port) {
  const OpSchema& schema = SchemaOf(op.kind);
  const size_t unnamed = UnnamedInputs(schema);
  if (port < unnamed || unnamed == schema.inputs.size()) {
    if (port < schema.inputs.size()) return schema.inputs[port];
    const size_t repeating = std::max<size_t>(schema.repeating_inputs, 1);
    const size_t first = schema.inputs.size() - repeating;
    return schema.inputs[first + (port - first) % repeating];
  }
  const std::string* names = op.Find<Attr::kOptionalInputs>();
  std::string_view rest = names ? std::string_view(*names) : std::string_view();
  for (size_t i = unnamed; i < port; ++i) {
    rest.remove_prefix(std::min(rest.size(), rest.substr(0, rest.find(',')).size() + 1));
  }
  const std::string_view name = rest.substr(0, rest.find(','));
  for (const OpSchema::Port& named : schema.inputs) {
    if (named.name == name) return named;
  }
  static const auto* const none = new OpSchema::Port;
  return *none;
}

const OpSchema::Port& OutputPort(const Op& op, size_t port) {
  const std::vector<OpSchema::Port>& outputs = SchemaOf(op.kind).outputs;
  return outputs[std::min(port, outputs.size() - 1)];
}

std::optional<size_t> FindInput(const Op& op, std::string_view name) {
  for (size_t port = 0; port < op.inputs.size(); ++port) {
    if (InputName(op, port) == name) return port;
  }
  return std::nullopt;
}

absl::Status CheckSchema(Op& op, absl::Span<const LogicalTensor* const> inputs,
                         absl::Span<const LogicalTensor* const> outputs) {
  if (static_cast<size_t>(op.kind) >= std::size(kAllOpKinds)) {
    return MakeError(ErrorKind::kInvalidGraphOp, "op '", op.name, "' (id ", op.id, ") is of kind ",
                     static_cast<int>(op.kind), ", which there is not");
  }
  const OpSchema& schema = SchemaOf(op.kind);
  KVANT_RETURN_IF_ERROR(
      CheckCount(op, schema.inputs, schema.repeating_inputs, inputs.size(), "inputs"));
  KVANT_RETURN_IF_ERROR(
      CheckCount(op, schema.outputs, schema.repeating_outputs, outputs.size(), "outputs"));
  KVANT_RETURN_IF_ERROR(CheckAttrs(op, schema));
  KVANT_RETURN_IF_ERROR(CheckNamedInputs(op, schema));
  return CheckTypes(op, inputs, outputs);
}

}  // namespace kvant
