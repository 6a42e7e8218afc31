// Ops as plain data: a kind, ids of tensors, attributes. What a kind means is
// one row in ops.inc; no class per op.
#ifndef KVANT_GRAPH_OP_H_
#define KVANT_GRAPH_OP_H_

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/status.h"

namespace kvant {

enum class OpKind : uint8_t {
#define KVANT_OP(kind, ...) k##kind,
#include "kvant/graph/ops.inc"
};

// In the order of the table.
inline constexpr OpKind kAllOpKinds[] = {
#define KVANT_OP(kind, ...) OpKind::k##kind,
#include "kvant/graph/ops.inc"
};

enum class OpClass : uint8_t {
  kElementwise,  // each element of the result from one of the input
  kBinary,       // ... from one of each of two inputs, which broadcast
  kMove,         // the elements, elsewhere or in another type
  kLoad,         // the tokens of a cache that exist
  kJoin,         // inputs, or what exists of them, one after another
  kStore,        // into a cache
  kDequantize,
  kNothing,  // nothing runs
  kOther,
};
OpClass ClassOf(OpKind kind);

// CamelCase, oneDNN's spelling, e.g. "DynamicDequantize".
std::string_view OpKindName(OpKind kind);
std::optional<OpKind> OpKindFromName(std::string_view name);

enum class Attr : uint8_t {
#define KVANT_ATTR(name, json, type) name,
#include "kvant/graph/attributes.inc"
};

std::string_view AttrName(Attr attr);
std::optional<Attr> AttrFromName(std::string_view name);

using AttrValue =
    std::variant<int64_t, float, bool, std::string, std::vector<int64_t>, std::vector<float>>;

// What JSON calls its alternatives.
inline constexpr std::array<std::string_view, std::variant_size_v<AttrValue>> kAttrTypeNames = {
    "s64", "f32", "bool", "string", "s64[]", "f32[]"};

// The C++ type of an attribute.
template <Attr attr>
struct AttrTypeOf;
#define KVANT_ATTR(name, json, type) \
  template <>                        \
  struct AttrTypeOf<Attr::name> {    \
    using Type = type;               \
  };
#include "kvant/graph/attributes.inc"
template <Attr attr>
using AttrType = typename AttrTypeOf<attr>::Type;

// A zero or empty value of the attribute's type.
const AttrValue& ZeroOf(Attr attr);
// What ops.inc says that it is where it is absent; else ZeroOf.
const AttrValue& DefaultOf(OpKind kind, Attr attr);

// A small ordered list of attributes, at most one value each.
class Attributes {
 public:
  Attributes() = default;
  Attributes(std::initializer_list<std::pair<Attr, AttrValue>> values) {
    for (const auto& [attr, value] : values) Set(attr, value);
  }

  void Set(Attr attr, AttrValue value);
  // Null if absent.
  const AttrValue* Find(Attr attr) const;
  // Null if absent or of another type.
  template <typename T>
  const T* Get(Attr attr) const {
    const AttrValue* value = Find(attr);
    return value ? std::get_if<T>(value) : nullptr;
  }

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  bool operator==(const Attributes& other) const { return values_ == other.values_; }

 private:
  // In the order of the enum, so that equality and output are deterministic.
  absl::InlinedVector<std::pair<Attr, AttrValue>, 3> values_;
};

struct Op {
  OpId id = 0;
  OpKind kind{};
  std::string name;
  absl::InlinedVector<TensorId, 4> inputs;
  absl::InlinedVector<TensorId, 2> outputs;
  Attributes attrs;

  // Null if absent.
  template <Attr attr>
  const AttrType<attr>* Find() const {
    return attrs.Get<AttrType<attr>>(attr);
  }
  // Where it is absent, DefaultOf.
  template <Attr attr>
  const AttrType<attr>& Get() const {
    const AttrType<attr>* value = Find<attr>();
    return value ? *value : std::get<AttrType<attr>>(DefaultOf(kind, attr));
  }

  // "SoftMax 'p' (id 5)": how every message names an op.
  std::string ToString() const;
};

// Errors that start with the op: "Add 'bias' (id 4): <what>".
template <typename... Parts>
absl::Status OpError(ErrorKind kind, const Op& op, const Parts&... what) {
  return MakeError(kind, op.ToString(), ": ", what...);
}
template <typename... Parts>
absl::Status SchemaError(const Op& op, const Parts&... what) {
  return OpError(ErrorKind::kInvalidGraphOp, op, what...);
}
template <typename... Parts>
absl::Status ArgumentsError(const Op& op, const Parts&... what) {
  return OpError(ErrorKind::kInvalidArguments, op, what...);
}

// What a kind takes and gives; parsed once from its row in ops.inc.
struct OpSchema {
  struct Port {
    std::string name;
    bool optional = false;
    bool named = false;           // it is there if the attribute optional_inputs names it
    std::vector<DataType> types;  // that it takes
    std::string types_text;       // these, "one of f32, bf16, f16"; empty: it takes any
    bool same = false;            // of the type of the first port that is
  };
  struct AttrRule {
    Attr attr{};
    bool required = false;
    std::optional<AttrValue> fallback;  // the default, filled in by AddOp
    std::vector<std::string> allowed;   // for strings; empty: anything
  };
  std::vector<Port> inputs;
  std::vector<Port> outputs;
  // So many of the last ports repeat, one after the other: 1 of Concat, 2 of MergeAttention.
  size_t repeating_inputs = 0;
  size_t repeating_outputs = 0;
  std::vector<AttrRule> attrs;

  const AttrRule* FindAttr(Attr attr) const;
  // "axis, mode"; "none".
  std::string AttrNames() const;
};

const OpSchema& SchemaOf(OpKind kind);
// What the kind says of an input port, or an output; of ports that repeat, each time.
const OpSchema::Port& InputPort(const Op& op, size_t port);
const OpSchema::Port& OutputPort(const Op& op, size_t port);
// Name of an input port, "scales".
inline std::string_view InputName(const Op& op, size_t port) { return InputPort(op, port).name; }
// The first input port of that name, if the op has it.
std::optional<size_t> FindInput(const Op& op, std::string_view name);

// The type rule of an op whose ports are as many as the kind takes. kInvalidDataType, naming op and
// tensor, when it does not take these types.
absl::Status CheckTypes(const Op& op, absl::Span<const LogicalTensor* const> inputs,
                        absl::Span<const LogicalTensor* const> outputs);

// Schema check of one op: fills in attribute defaults, then checks counts,
// attribute names, types and allowed values, and the type rule.
// kInvalidGraphOp or kInvalidDataType,
// naming op and tensor. No shape check.
absl::Status CheckSchema(Op& op, absl::Span<const LogicalTensor* const> inputs,
                         absl::Span<const LogicalTensor* const> outputs);

}  // namespace kvant

#endif  // KVANT_GRAPH_OP_H_
