// The type rules named in ops.inc, and what the attributes of ops that quantize, and the forms of
// their ports, allow of each other.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvant/graph/op.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// One op with its ports, counts already checked.
struct OpPorts {
  const Op& op;
  absl::Span<const LogicalTensor* const> inputs;
  absl::Span<const LogicalTensor* const> outputs;
};

struct PortView {
  const LogicalTensor& tensor;
  const OpSchema::Port& schema;

  DataType type() const { return tensor.type; }
  std::string ToString() const { return absl::StrCat(schema.name, " (", tensor.Label(), ")"); }
};

PortView Input(const OpPorts& ports, size_t port) {
  return {*ports.inputs[port], InputPort(ports.op, port)};
}
PortView Output(const OpPorts& ports, size_t port) {
  return {*ports.outputs[port], OutputPort(ports.op, port)};
}

template <typename... Parts>
absl::Status TypeError(const OpPorts& ports, const PortView& port, const Parts&... what) {
  return OpError(ErrorKind::kInvalidDataType, ports.op, port.ToString(), " is ",
                 DataTypeName(port.type()), what...);
}

absl::Status Differ(const OpPorts& ports, const PortView& a, const PortView& b) {
  return TypeError(ports, a, " but ", b.ToString(), " is ", DataTypeName(b.type()));
}

// That the port's type is one that `schema` takes.
absl::Status Require(const OpPorts& ports, const PortView& port, const OpSchema::Port& schema) {
  const bool takes = schema.types_text.empty() || std::ranges::count(schema.types, port.type()) > 0;
  return takes ? absl::OkStatus() : TypeError(ports, port, ", not ", schema.types_text);
}

// What the ports say in ops.inc.
absl::Status PortTypes(const OpPorts& ports) {
  std::optional<PortView> first;  // of those of the same type
  const auto check = [&](const PortView& port) {
    if (port.schema.same && first) {
      return port.type() == first->type() ? absl::OkStatus() : Differ(ports, port, *first);
    }
    if (port.schema.same) first.emplace(port);
    return Require(ports, port, port.schema);
  };
  for (size_t i = 0; i < ports.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(check(Input(ports, i)));
  }
  for (size_t i = 0; i < ports.outputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(check(Output(ports, i)));
  }
  return absl::OkStatus();
}

// PortTypes, and bf16 and f16 do not convert into each other within an op.
absl::Status HalvesApart(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(PortTypes(ports));
  const size_t inputs = ports.inputs.size();
  for (size_t i = 1; i <= inputs; ++i) {
    const PortView port = i < inputs ? Input(ports, i) : Output(ports, 0);
    for (size_t j = 0; j < i; ++j) {
      const PortView other = Input(ports, j);
      const bool mix = (port.type() == kBF16 && other.type() == kF16) ||
                       (port.type() == kF16 && other.type() == kBF16);
      if (mix) return Differ(ports, port, other);
    }
  }
  return absl::OkStatus();
}

// Of one type, or f32 beside one of the halves, as where the backward pass keeps the gradient of
// the scores in f32.
absl::Status MatMulTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(HalvesApart(ports));
  const PortView dst = Output(ports, 0);
  const DataType type = ports.inputs[0]->type;
  const bool alike = std::ranges::all_of(
      ports.inputs, [type](const LogicalTensor* in) { return in->type == type; });
  if (dst.type() == kF32 || (alike && dst.type() == type)) return absl::OkStatus();
  return TypeError(ports, dst, " but the result of its inputs is ",
                   DataTypeName(alike ? type : kF32));
}

// Scales come in and one tensor goes out, or the op computes what it puts out. `first` is the input
// for scales.
absl::Status CheckScales(const OpPorts& ports, size_t first) {
  const Op& op = ports.op;
  const size_t inputs = ports.inputs.size(), outputs = ports.outputs.size();
  if (inputs == first) {
    if (outputs == 1) return SchemaError(op, "has neither an input nor an output for its scales");
    const float floor = op.Get<Attr::kScaleFloor>();
    if (floor >= 0) return absl::OkStatus();
    return SchemaError(op, "attribute 'scale_floor' is ", floor, ", less than 0");
  }
  if (outputs > 1) {
    return SchemaError(op, "has scales as input (", ports.inputs[first]->Label(),
                       ") and as output (", ports.outputs[1]->Label(), ")");
  }
  for (const Attr attr : {Attr::kPowerOfTwoScales, Attr::kScaleFloor}) {
    if (op.attrs.Find(attr) == nullptr) continue;
    return SchemaError(op, "attribute '", AttrName(attr),
                       "' is for scales that it computes, but they are an input (",
                       ports.inputs[first]->Label(), ")");
  }
  return absl::OkStatus();
}

// Codes are positions in the codebook.
absl::Status CheckCodebook(const Op& op, const LogicalTensor& codes, bool has_zero_points) {
  const auto* codebook = op.Find<Attr::kCodebook>();
  if (codebook == nullptr) return absl::OkStatus();
  const bool is_unsigned = codes.type == kU2 || codes.type == kU4 || codes.type == kU8;
  if (!is_unsigned || codebook->size() != size_t{1} << BitsOf(codes.type)) {
    return SchemaError(op, "a codebook of ", codebook->size(), " for codes of type ",
                       DataTypeName(codes.type), "; it goes with u2 (4), u4 (16) or u8 (256)");
  }
  if (has_zero_points) return SchemaError(op, "has a codebook and zero points");
  if (std::ranges::all_of(*codebook, [](float value) { return value == 0; })) {
    return SchemaError(op, "its codebook has no value but 0");
  }
  return absl::OkStatus();
}

// The ggml formulas are those of its block formats, and take no options.
absl::Status CheckFormula(const Op& op, const LogicalTensor& codes, const LogicalTensor* zps,
                          bool computes) {
  const std::string* formula = op.Find<Attr::kFormula>();
  if (formula == nullptr) return absl::OkStatus();
  if (*formula != "ggml") {
    return SchemaError(op, "attribute 'formula' is '", *formula, "', not 'ggml'");
  }
  if (!computes) {
    return SchemaError(op, "formula ggml is for scales that it computes, but they are an input");
  }
  const auto* codebook = op.Find<Attr::kCodebook>();
  const bool has_codebook = codebook != nullptr;
  const bool q8_0 = codes.type == kS8 && zps == nullptr;
  const bool q4_0 = codes.type == kS4 && zps == nullptr;
  const bool q4_1 = codes.type == kU4 && zps != nullptr && IsFloat(zps->type);
  const bool iq4_nl = codes.type == kU4 && has_codebook;
  if (!q8_0 && !q4_0 && !q4_1 && !iq4_nl) {
    return SchemaError(op,
                       "formula ggml is for s8 and s4 without zero points, u4 with ones in "
                       "real units and u4 with a codebook, not for ",
                       DataTypeName(codes.type), zps == nullptr ? "" : " with zero points");
  }
  const auto falls = [](float a, float b) { return a >= b; };
  if (has_codebook &&
      (std::ranges::adjacent_find(*codebook, falls) != codebook->end() || codebook->front() == 0)) {
    return SchemaError(op, "formula ggml takes a codebook that ascends and does not begin with 0");
  }
  for (const Attr attr : {Attr::kPowerOfTwoScales, Attr::kScaleFloor}) {
    if (op.attrs.Find(attr) == nullptr) continue;
    return SchemaError(op, "attribute '", AttrName(attr), "' does not go with formula ggml");
  }
  return absl::OkStatus();
}

// Of an op that quantizes; `first` is the input for scales.
absl::Status CheckQuantizeForm(const OpPorts& ports, size_t first) {
  KVANT_RETURN_IF_ERROR(CheckScales(ports, first));
  const LogicalTensor* zps = ports.inputs.size() > first + 1 ? ports.inputs[first + 1]
                             : ports.outputs.size() > 2      ? ports.outputs[2]
                                                             : nullptr;
  KVANT_RETURN_IF_ERROR(CheckCodebook(ports.op, *ports.outputs[0], zps != nullptr));
  return CheckFormula(ports.op, *ports.outputs[0], zps, ports.inputs.size() <= first);
}

// Of an op that quantizes.
absl::Status QuantizedTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(PortTypes(ports));
  const PortView codes = Output(ports, 0);
  // Append says nothing of them, as it may also convert.
  KVANT_RETURN_IF_ERROR(Require(ports, codes, SchemaOf(OpKind::kDynamicQuantize).outputs[0]));
  if (ports.outputs.size() < 3 || !IsFloat(codes.type())) return absl::OkStatus();
  return OpError(ErrorKind::kInvalidDataType, ports.op, "computes no zero points (",
                 ports.outputs[2]->Label(), ") for ", codes.ToString(), " of ",
                 DataTypeName(codes.type()));
}

absl::Status DynamicQuantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(CheckQuantizeForm(ports, 1));
  return QuantizedTypes(ports);
}

// A plain conversion, which takes nothing that belongs to codes, or DynamicQuantize with positions,
// or slots, between src and scales.
absl::Status AppendTypes(const OpPorts& ports) {
  const PortView dst = Output(ports, 0);
  if (!IsComputeFloat(dst.type())) {
    KVANT_RETURN_IF_ERROR(CheckQuantizeForm(ports, 2));
    return QuantizedTypes(ports);
  }
  const Op& op = ports.op;
  if (op.inputs.size() != 2 || op.outputs.size() != 1 || op.Find<Attr::kGroupShape>() != nullptr ||
      op.Find<Attr::kCodebook>() != nullptr) {
    return SchemaError(op, dst.ToString(), " is ", DataTypeName(dst.type()),
                       ", which has no scales, groups or codebook");
  }
  return PortTypes(ports);
}

absl::Status DynamicDequantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(CheckCodebook(ports.op, *ports.inputs[0], ports.inputs.size() > 2));
  return PortTypes(ports);
}

}  // namespace

absl::Status CheckTypes(const Op& op, absl::Span<const LogicalTensor* const> inputs,
                        absl::Span<const LogicalTensor* const> outputs) {
  static constexpr absl::Status (*kRules[])(const OpPorts&) = {
#define KVANT_OP(kind, op_class, inputs, outputs, attrs, types, shape) types,
#include "kvant/graph/ops.inc"
  };
  return kRules[static_cast<size_t>(op.kind)]({op, inputs, outputs});
}

}  // namespace kvant
