#include "kvant/graph/op_types.h"

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

using Predicate = bool (*)(DataType);

bool IsFloatOrS32(DataType type) { return IsComputeFloat(type) || type == kS32; }
bool IsBoolean(DataType type) { return type == kBoolean; }
bool IsS32(DataType type) { return type == kS32; }
bool IsStaticCode(DataType type) {
  return type == kU8 || type == kS8 || type == kF8E4M3 || type == kF8E5M2;
}
bool IsDynamicCode(DataType type) {
  return IsStaticCode(type) || type == kU4 || type == kS4 || type == kU2 || type == kS2;
}
bool IsZeroPoint(DataType type) {
  return IsComputeFloat(type) || type == kS32 || type == kU8 || type == kS8 || type == kU4 ||
         type == kS4 || type == kU2 || type == kS2;
}
bool IsIndex(DataType type) { return type == kS32 || type == kS64; }
bool IsMaskByte(DataType type) { return type == kU8 || type == kS8 || type == kBoolean; }

std::string Named(DataType type) { return std::string(DataTypeName(type)); }

std::string PortText(const OpPorts& ports, bool is_output, size_t port) {
  const LogicalTensor& tensor = is_output ? *ports.outputs[port] : *ports.inputs[port];
  const OpSchema& schema = SchemaOf(ports.op.kind);
  const std::string name = is_output
                               ? schema.outputs[std::min(port, schema.outputs.size() - 1)].name
                               : std::string(InputName(ports.op, port));
  return absl::StrCat(name, " (tensor ", tensor.id, ")");
}

absl::Status Require(const OpPorts& ports, bool is_output, size_t port, Predicate accepts,
                     const char* expected) {
  const DataType type = is_output ? ports.outputs[port]->type : ports.inputs[port]->type;
  if (accepts(type)) return absl::OkStatus();
  return OpError(ErrorKind::kInvalidDataType, ports.op, PortText(ports, is_output, port), " is ",
                 Named(type), ", not ", expected);
}
absl::Status Input(const OpPorts& p, size_t port, Predicate accepts, const char* expected) {
  return Require(p, false, port, accepts, expected);
}
absl::Status Output(const OpPorts& p, size_t port, Predicate accepts, const char* expected) {
  return Require(p, true, port, accepts, expected);
}

constexpr char kFloats[] = "one of f32, bf16, f16";
constexpr char kFloatsOrS32[] = "one of f32, bf16, f16, s32";

absl::Status Differ(const OpPorts& ports, const std::string& a, DataType a_type,
                    const std::string& b, DataType b_type) {
  return OpError(ErrorKind::kInvalidDataType, ports.op, a, " is ", Named(a_type), " but ", b,
                 " is ", Named(b_type));
}

// Output `port` is `type`.
absl::Status OutputIs(const OpPorts& ports, size_t port, DataType type, const std::string& why) {
  if (ports.outputs[port]->type == type) return absl::OkStatus();
  return Differ(ports, PortText(ports, true, port), ports.outputs[port]->type, why, type);
}

// bf16 and f16 do not convert into each other within an op.
bool HalvesMix(DataType a, DataType b) {
  return (a == kBF16 && b == kF16) || (a == kF16 && b == kBF16);
}

// Those from `first` on.
absl::Status InputsAreS32(const OpPorts& ports, size_t first) {
  for (size_t port = first; port < ports.inputs.size(); ++port) {
    KVANT_RETURN_IF_ERROR(Input(ports, port, IsS32, "s32"));
  }
  return absl::OkStatus();
}

absl::Status AnyTypes(const OpPorts&) { return absl::OkStatus(); }

// Of inputs from `first` on, and of the output.
absl::Status SameTypes(const OpPorts& ports, size_t first) {
  const DataType type = ports.inputs[first]->type;
  for (size_t i = first + 1; i < ports.inputs.size(); ++i) {
    if (ports.inputs[i]->type != type) {
      return Differ(ports, PortText(ports, false, i), ports.inputs[i]->type,
                    PortText(ports, false, first), type);
    }
  }
  return OutputIs(ports, 0, type, PortText(ports, false, first));
}

absl::Status SameTypes(const OpPorts& ports) { return SameTypes(ports, 0); }

absl::Status SameFloatTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  return SameTypes(ports);
}

// Of one type, or f32 beside one of the halves, as where the backward pass keeps the gradient of
// the scores in f32.
absl::Status MatMulTypes(const OpPorts& ports) {
  DataType common = kF32;
  for (size_t i = 0; i < ports.inputs.size(); ++i) {
    KVANT_RETURN_IF_ERROR(Input(ports, i, IsComputeFloat, kFloats));
    const DataType type = ports.inputs[i]->type;
    for (size_t j = 0; j < i; ++j) {
      if (HalvesMix(type, ports.inputs[j]->type)) {
        return Differ(ports, PortText(ports, false, i), type, PortText(ports, false, j),
                      ports.inputs[j]->type);
      }
    }
    common = i == 0 || type == common ? type : kF32;
  }
  if (ports.outputs[0]->type == kF32) return absl::OkStatus();
  return OutputIs(ports, 0, common, "the result of its inputs");
}

absl::Status SoftMaxTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsComputeFloat, kFloats));
  if (HalvesMix(ports.inputs[0]->type, ports.outputs[0]->type)) {
    return Differ(ports, PortText(ports, true, 0), ports.outputs[0]->type,
                  PortText(ports, false, 0), ports.inputs[0]->type);
  }
  KVANT_RETURN_IF_ERROR(InputsAreS32(ports, 1));
  if (ports.outputs.size() < 2) return absl::OkStatus();
  return Output(
      ports, 1, [](DataType t) { return t == kF32; }, "f32");
}

// dst holds what src does, of any type.
absl::Status LoadTokensTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(InputsAreS32(ports, 1));
  return OutputIs(ports, 0, ports.inputs[0]->type, PortText(ports, false, 0));
}

absl::Status LoadPagesTypes(const OpPorts& ports) { return LoadTokensTypes(ports); }

absl::Status LoadRangesTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsS32, "s32"));
  if (ports.outputs.size() > 1) KVANT_RETURN_IF_ERROR(Output(ports, 1, IsS32, "s32"));
  return SameTypes(ports, 1);
}

absl::Status SoftMaxBackwardTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Input(ports, 1, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsComputeFloat, kFloats));
  const DataType diff_dst = ports.inputs[0]->type;
  const DataType dst = ports.inputs[1]->type;
  const DataType diff_src = ports.outputs[0]->type;
  if (HalvesMix(diff_dst, dst)) {
    return Differ(ports, PortText(ports, false, 0), diff_dst, PortText(ports, false, 1), dst);
  }
  if (HalvesMix(diff_src, diff_dst)) {
    return Differ(ports, PortText(ports, true, 0), diff_src, PortText(ports, false, 0), diff_dst);
  }
  if (HalvesMix(diff_src, dst)) {
    return Differ(ports, PortText(ports, true, 0), diff_src, PortText(ports, false, 1), dst);
  }
  return absl::OkStatus();
}

// Each of its own.
absl::Status ArithmeticTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsFloatOrS32, kFloatsOrS32));
  KVANT_RETURN_IF_ERROR(Input(ports, 1, IsFloatOrS32, kFloatsOrS32));
  return Output(ports, 0, IsFloatOrS32, kFloatsOrS32);
}

absl::Status SelectTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsBoolean, "boolean"));
  const DataType x = ports.inputs[1]->type;
  const DataType y = ports.inputs[2]->type;
  if (x != y) return Differ(ports, PortText(ports, false, 1), x, PortText(ports, false, 2), y);
  return OutputIs(ports, 0, x, PortText(ports, false, 1));
}

absl::Status GenIndexTypes(const OpPorts& ports) { return OutputIs(ports, 0, kS32, "an index"); }

absl::Status CompareTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsFloatOrS32, kFloatsOrS32));
  if (ports.inputs[0]->type != ports.inputs[1]->type) {
    return Differ(ports, PortText(ports, false, 0), ports.inputs[0]->type,
                  PortText(ports, false, 1), ports.inputs[1]->type);
  }
  return Output(ports, 0, IsBoolean, "boolean");
}

absl::Status TypeCastTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsComputeFloat, kFloats));
  if (!HalvesMix(ports.inputs[0]->type, ports.outputs[0]->type)) return absl::OkStatus();
  return Differ(ports, PortText(ports, true, 0), ports.outputs[0]->type, PortText(ports, false, 0),
                ports.inputs[0]->type);
}

absl::Status DropoutTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Input(ports, 1, IsIndex, "s32 or s64"));
  KVANT_RETURN_IF_ERROR(Input(ports, 2, IsIndex, "s32 or s64"));
  KVANT_RETURN_IF_ERROR(Input(
      ports, 3, [](DataType t) { return t == kF32; }, "f32"));
  if (ports.outputs.size() > 1) {
    KVANT_RETURN_IF_ERROR(Output(ports, 1, IsMaskByte, "u8, s8 or boolean"));
  }
  return OutputIs(ports, 0, ports.inputs[0]->type, PortText(ports, false, 0));
}

absl::Status QuantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(
      ports, 0, [](DataType t) { return t == kF32; }, "f32"));
  return Output(ports, 0, IsStaticCode, "one of u8, s8, f8_e4m3, f8_e5m2");
}

absl::Status DequantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsStaticCode, "one of u8, s8, f8_e4m3, f8_e5m2"));
  return Output(
      ports, 0, [](DataType t) { return t == kF32; }, "f32");
}

constexpr char kCodes[] = "one of u8, s8, u4, s4, u2, s2, f8_e4m3, f8_e5m2";
constexpr char kZeroPoints[] = "one of s32, u8, s8, u4, s4, u2, s2, f32, bf16, f16";

// Scales and zero points that are outputs.
absl::Status ComputedParameterTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(Output(ports, 1, IsComputeFloat, kFloats));
  if (ports.outputs.size() < 3) return absl::OkStatus();
  if (IsFloat(ports.outputs[0]->type)) {
    return MakeError(ErrorKind::kInvalidDataType, ports.op.ToString(),
                     ": computes no zero points (tensor ", ports.outputs[2]->id, ") for ",
                     PortText(ports, true, 0), " of ", Named(ports.outputs[0]->type));
  }
  return Output(ports, 2, IsZeroPoint, kZeroPoints);
}

absl::Status DynamicQuantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(CheckQuantizeForm(ports, 1));
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsDynamicCode, kCodes));
  if (ports.inputs.size() > 1) {
    KVANT_RETURN_IF_ERROR(Input(ports, 1, IsComputeFloat, kFloats));
    if (ports.inputs.size() < 3) return absl::OkStatus();
    return Input(ports, 2, IsZeroPoint, kZeroPoints);
  }
  return ComputedParameterTypes(ports);
}

// A plain conversion, or DynamicQuantize with positions, or slots, between src and scales.
absl::Status AppendTypes(const OpPorts& ports) {
  const bool converts = IsComputeFloat(ports.outputs[0]->type);
  KVANT_RETURN_IF_ERROR(converts ? CheckConversionForm(ports) : CheckQuantizeForm(ports, 2));
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  const bool slots = ports.op.kind == OpKind::kAppendPages;
  KVANT_RETURN_IF_ERROR(slots ? Input(ports, 1, IsIndex, "s32 or s64")
                              : Input(ports, 1, IsS32, "s32"));
  if (converts) return absl::OkStatus();
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsDynamicCode, kCodes));
  if (ports.inputs.size() > 2) {
    KVANT_RETURN_IF_ERROR(Input(ports, 2, IsComputeFloat, kFloats));
    if (ports.inputs.size() < 4) return absl::OkStatus();
    return Input(ports, 3, IsZeroPoint, kZeroPoints);
  }
  return ComputedParameterTypes(ports);
}

absl::Status DynamicDequantizeTypes(const OpPorts& ports) {
  KVANT_RETURN_IF_ERROR(CheckDequantizeForm(ports));
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsDynamicCode, kCodes));
  KVANT_RETURN_IF_ERROR(Input(ports, 1, IsComputeFloat, kFloats));
  if (ports.inputs.size() > 2) {
    KVANT_RETURN_IF_ERROR(Input(ports, 2, IsZeroPoint, kZeroPoints));
  }
  return Output(ports, 0, IsComputeFloat, kFloats);
}

absl::Status AttentionTypes(const OpPorts& ports) {
  for (size_t i = 0; i < ports.inputs.size(); ++i) {
    const std::string_view name = InputName(ports.op, i);
    if (name == "select") {
      KVANT_RETURN_IF_ERROR(Input(ports, i, IsBoolean, "boolean"));
    } else if (name == "kv_lengths" || name == "kv_first" || name == "query_offsets") {
      KVANT_RETURN_IF_ERROR(Input(ports, i, IsS32, "s32"));
    } else {
      KVANT_RETURN_IF_ERROR(Input(ports, i, IsComputeFloat, kFloats));
    }
  }
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsComputeFloat, kFloats));
  if (ports.outputs.size() < 2) return absl::OkStatus();
  return Output(
      ports, 1, [](DataType t) { return t == kF32; }, "f32");
}

// Outputs of parts are of one type; the result's is its own.
absl::Status MergeAttentionTypes(const OpPorts& ports) {
  const auto is_f32 = [](DataType type) { return type == kF32; };
  KVANT_RETURN_IF_ERROR(Input(ports, 0, IsComputeFloat, kFloats));
  for (size_t port = 0; port < ports.inputs.size(); ++port) {
    const DataType type = ports.inputs[port]->type;
    if (port % 2 == 1) {
      KVANT_RETURN_IF_ERROR(Input(ports, port, is_f32, "f32"));
    } else if (type != ports.inputs[0]->type) {
      return Differ(ports, PortText(ports, false, port), type, PortText(ports, false, 0),
                    ports.inputs[0]->type);
    }
  }
  KVANT_RETURN_IF_ERROR(Output(ports, 0, IsComputeFloat, kFloats));
  return ports.outputs.size() < 2 ? absl::OkStatus() : Output(ports, 1, is_f32, "f32");
}

}  // namespace

absl::Status CheckTypes(const OpPorts& ports) {
  switch (ports.op.kind) {
#define KVANT_OP(kind, op_class, inputs, outputs, attrs, types, shape) \
  case OpKind::k##kind:                                                \
    return types(ports);
#include "kvant/graph/ops.inc"
#undef KVANT_OP
  }
  return absl::OkStatus();
}

}  // namespace kvant
