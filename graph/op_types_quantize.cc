// What the attributes of ops that quantize, and the forms of their ports, allow of each other.
#include <algorithm>
#include <functional>

#include "kvant/graph/op_types.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

template <typename... Parts>
absl::Status FormError(const Op& op, const Parts&... what) {
  return OpError(ErrorKind::kInvalidGraphOp, op, what...);
}

// Scales come in and one tensor goes out, or the op computes what it puts out. `first` is the input
// for scales.
absl::Status CheckScales(const Op& op, size_t first) {
  const size_t inputs = op.inputs.size(), outputs = op.outputs.size();
  if (inputs == first) {
    if (outputs == 1) return FormError(op, "has neither an input nor an output for its scales");
    const float floor = op.Get<Attr::kScaleFloor>();
    if (floor >= 0) return absl::OkStatus();
    return FormError(op, "attribute 'scale_floor' is ", floor, ", less than 0");
  }
  if (outputs > 1) {
    return FormError(op, "has scales as input (tensor ", op.inputs[first],
                     ") and as output (tensor ", op.outputs[1], ")");
  }
  for (const Attr attr : {Attr::kPowerOfTwoScales, Attr::kScaleFloor}) {
    if (op.attrs.Find(attr) == nullptr) continue;
    return FormError(op, "attribute '", AttrName(attr),
                     "' is for scales that it computes, but they are an input (tensor ",
                     op.inputs[first], ")");
  }
  return absl::OkStatus();
}

// Codes are positions in the codebook.
absl::Status CheckCodebook(const Op& op, const LogicalTensor& codes, bool has_zero_points) {
  const auto* codebook = op.Find<Attr::kCodebook>();
  if (codebook == nullptr) return absl::OkStatus();
  const bool is_unsigned = codes.type == kU2 || codes.type == kU4 || codes.type == kU8;
  if (!is_unsigned || codebook->size() != size_t{1} << BitsOf(codes.type)) {
    return FormError(op, "a codebook of ", codebook->size(), " for codes of type ",
                     DataTypeName(codes.type), "; it goes with u2 (4), u4 (16) or u8 (256)");
  }
  if (has_zero_points) return FormError(op, "has a codebook and zero points");
  if (std::all_of(codebook->begin(), codebook->end(), [](float value) { return value == 0; })) {
    return FormError(op, "its codebook has no value but 0");
  }
  return absl::OkStatus();
}

// The ggml formulas are those of its block formats, and take no options.
absl::Status CheckFormula(const Op& op, const LogicalTensor& codes, const LogicalTensor* zps,
                          bool computes) {
  const std::string* formula = op.Find<Attr::kFormula>();
  if (formula == nullptr) return absl::OkStatus();
  if (*formula != "ggml") {
    return FormError(op, "attribute 'formula' is '", *formula, "', not 'ggml'");
  }
  if (!computes) {
    return FormError(op, "formula ggml is for scales that it computes, but they are an input");
  }
  const auto* codebook = op.Find<Attr::kCodebook>();
  const bool has_codebook = codebook != nullptr;
  const bool q8_0 = codes.type == kS8 && zps == nullptr;
  const bool q4_0 = codes.type == kS4 && zps == nullptr;
  const bool q4_1 = codes.type == kU4 && zps != nullptr && IsFloat(zps->type);
  const bool iq4_nl = codes.type == kU4 && has_codebook;
  if (!q8_0 && !q4_0 && !q4_1 && !iq4_nl) {
    return FormError(op,
                     "formula ggml is for s8 and s4 without zero points, u4 with ones in "
                     "real units and u4 with a codebook, not for ",
                     DataTypeName(codes.type), zps == nullptr ? "" : " with zero points");
  }
  if (has_codebook && (std::adjacent_find(codebook->begin(), codebook->end(),
                                          std::greater_equal<>()) != codebook->end() ||
                       codebook->front() == 0)) {
    return FormError(op, "formula ggml takes a codebook that ascends and does not begin with 0");
  }
  for (const Attr attr : {Attr::kPowerOfTwoScales, Attr::kScaleFloor}) {
    if (op.attrs.Find(attr) == nullptr) continue;
    return FormError(op, "attribute '", AttrName(attr), "' does not go with formula ggml");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckQuantizeForm(const OpPorts& ports, size_t first) {
  KVANT_RETURN_IF_ERROR(CheckScales(ports.op, first));
  const LogicalTensor* zps = ports.inputs.size() > first + 1 ? ports.inputs[first + 1]
                             : ports.outputs.size() > 2      ? ports.outputs[2]
                                                             : nullptr;
  KVANT_RETURN_IF_ERROR(CheckCodebook(ports.op, *ports.outputs[0], zps != nullptr));
  return CheckFormula(ports.op, *ports.outputs[0], zps, ports.inputs.size() <= first);
}

absl::Status CheckDequantizeForm(const OpPorts& ports) {
  return CheckCodebook(ports.op, *ports.inputs[0], ports.inputs.size() > 2);
}

absl::Status CheckConversionForm(const OpPorts& ports) {
  const Op& op = ports.op;
  if (op.inputs.size() == 2 && op.outputs.size() == 1 && op.Find<Attr::kGroupShape>() == nullptr &&
      op.Find<Attr::kCodebook>() == nullptr) {
    return absl::OkStatus();
  }
  const LogicalTensor& dst = *ports.outputs[0];
  return FormError(op, "dst (tensor ", dst.id, ") is ", DataTypeName(dst.type),
                   ", which has no scales, groups or codebook");
}

}  // namespace kvant
