#include "kvant/cache/number_format.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

template <typename... Parts>
absl::Status Bad(std::string_view text, const Parts&... why) {
  return InvalidArguments("number format '", text, "': ", why...);
}

bool IsStorageType(DataType type) {
  switch (type) {
    case kF32:
    case kBF16:
    case kF16:
    case kF8E4M3:
    case kF8E5M2:
    case kS8:
    case kU8:
    case kS4:
    case kU4:
    case kS2:
    case kU2:
      return true;
    default:
      return false;
  }
}

std::optional<NumberFormat::Groups> GroupsFromName(std::string_view name) {
  if (name == "token") return NumberFormat::Groups::kToken;
  if (name == "all_heads") return NumberFormat::Groups::kAllHeads;
  if (name == "channel") return NumberFormat::Groups::kChannel;
  if (name == "block") return NumberFormat::Groups::kBlock;
  if (name == "head") return NumberFormat::Groups::kHead;
  if (name == "tensor") return NumberFormat::Groups::kTensor;
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> NumberAfter(std::string_view word, std::string_view part) {
  if (!part.starts_with(word)) return std::nullopt;
  const std::string digits(part.substr(word.size()));
  int64_t number = 0;
  if (!std::ranges::all_of(digits, absl::ascii_isdigit) || !absl::SimpleAtoi(digits, &number)) {
    return std::nullopt;
  }
  return number;
}

absl::Status NumberFormat::Check() const {
  if (!IsStorageType(type)) {
    return Bad("", "type ", static_cast<int>(type), " is none that K and V have");
  }
  if (!quantized()) return absl::OkStatus();
  const std::string text = ToString();
  const int64_t least = slices_heads() ? 1 : 0;
  if (group_size < least) return Bad(text, "groups of ", group_size);
  if (group_size > 0 && !slices_heads() && groups != Groups::kChannel) {
    return Bad(text, "g", group_size, " goes with no other group but channel and block");
  }
  if (scale_type != kUndef && !IsComputeFloat(scale_type)) {
    return Bad(text, "its scales are not of f32, bf16 or f16");
  }
  if (IsFloat(type) && (zero_points == ZeroPoints::kBytes || zero_points == ZeroPoints::kPacked)) {
    return Bad(text, "codes of ", DataTypeName(type), " have no integers as zero points");
  }
  if (codebook == nullptr) return absl::OkStatus();
  if (!IsInteger(type) || LowestOf(type) < 0 ||
      size_t{1} << BitsOf(type) != codebook->values.size()) {
    return Bad(text, codebook->name, " has ", codebook->values.size(), " entries");
  }
  if (zero_points == ZeroPoints::kNone) return absl::OkStatus();
  return Bad(text, "a codebook has no zero points");
}

bool NumberFormat::quantized() const { return !IsComputeFloat(type); }

DataType NumberFormat::ZeroPointType(DataType scales) const {
  switch (zero_points) {
    case ZeroPoints::kNone:
      return kUndef;
    case ZeroPoints::kBytes:
      return LowestOf(type) < 0 ? kS8 : kU8;
    case ZeroPoints::kPacked:
      return type;
    case ZeroPoints::kReal:
      return scales;
  }
  return kUndef;
}

std::vector<float> NumberFormat::codebook_values() const {
  if (codebook == nullptr) return {};
  return {codebook->values.begin(), codebook->values.end()};
}

std::optional<int64_t> NumberFormat::group_tokens() const {
  switch (groups) {
    case Groups::kHeadSlice:
    case Groups::kToken:
    case Groups::kAllHeads:
      return 1;
    case Groups::kChannel:
      if (group_size != 0) return group_size;
      break;
    case Groups::kBlock:
      return group_size;
    case Groups::kHead:
    case Groups::kTensor:
      break;
  }
  return std::nullopt;
}

absl::StatusOr<Dims> NumberFormat::GroupShape(absl::Span<const int64_t> dims) const {
  const size_t rank = dims.size();
  if (rank < 2) return Bad(ToString(), "needs a tensor of at least two dims");
  const int64_t tokens = dims[rank - 2];
  const int64_t head_size = dims[rank - 1];
  Dims group(rank, 1);
  if (groups == Groups::kTensor) group.assign(dims.begin(), dims.end());
  group[rank - 2] = group_tokens().value_or(tokens);
  if (groups != Groups::kChannel) {
    group[rank - 1] = slices_heads() ? group_size : head_size;
  }
  if (groups == Groups::kAllHeads) {
    if (rank < 3) return Bad(ToString(), "needs a tensor of at least three dims");
    // Also the axis of the query heads that share a head, between heads and tokens.
    for (size_t axis = rank > 3 ? 1 : 0; axis < rank - 2; ++axis) group[axis] = dims[axis];
  }
  if (group[rank - 1] <= 0 || head_size % group[rank - 1] != 0) {
    return Bad(ToString(), "groups of ", group[rank - 1], " do not divide the head size ",
               head_size);
  }
  if (group[rank - 2] <= 0 || tokens % group[rank - 2] != 0) {
    return Bad(ToString(), "groups of ", group[rank - 2], " do not divide the ", tokens, " tokens");
  }
  return group;
}

absl::StatusOr<double> NumberFormat::BitsPerElement(absl::Span<const int64_t> dims,
                                                    DataType query_type) const {
  const double bits = BitsOf(type);
  if (!quantized()) return bits;
  KVANT_ASSIGN_OR_RETURN(const Dims group, GroupShape(dims));
  const DataType scales = scale_type == kUndef ? query_type : scale_type;
  double elements = 1;
  for (int64_t n : group) elements *= static_cast<double>(n);
  return bits + (BitsOf(scales) + BitsOf(ZeroPointType(scales))) / elements;
}

std::string NumberFormat::ToString() const {
  std::string text(DataTypeName(type));
  if (!quantized()) return text;
  switch (groups) {
    case Groups::kHeadSlice:
      absl::StrAppend(&text, ":g", group_size);
      break;
    case Groups::kToken:
      absl::StrAppend(&text, ":token");
      break;
    case Groups::kAllHeads:
      absl::StrAppend(&text, ":all_heads");
      break;
    case Groups::kChannel:
      absl::StrAppend(&text, ":channel");
      if (group_size > 0) absl::StrAppend(&text, ":g", group_size);
      break;
    case Groups::kBlock:
      absl::StrAppend(&text, ":block:g", group_size);
      break;
    case Groups::kHead:
      absl::StrAppend(&text, ":head");
      break;
    case Groups::kTensor:
      absl::StrAppend(&text, ":tensor");
      break;
  }
  if (zero_points == ZeroPoints::kPacked) {
    absl::StrAppend(&text, ":pzp");
  } else if (zero_points == ZeroPoints::kReal && !IsFloat(type)) {
    absl::StrAppend(&text, ":rzp");
  } else if (zero_points != ZeroPoints::kNone) {
    absl::StrAppend(&text, ":zp");
  }
  if (codebook != nullptr) absl::StrAppend(&text, ":", std::string(codebook->name));
  if (ggml_formula) absl::StrAppend(&text, ":ggml");
  if (scale_type != kUndef) absl::StrAppend(&text, ":s", std::string(DataTypeName(scale_type)));
  return text;
}

absl::StatusOr<NumberFormat> ParseNumberFormat(std::string_view text) {
  const std::string owned(text);
  const std::vector<std::string> parts = absl::StrSplit(owned, ':');
  NumberFormat format;
  const std::optional<DataType> type = DataTypeFromName(parts[0]);
  if (!type || !IsStorageType(*type)) {
    return Bad(text, "'", parts[0], "' is none of f32 bf16 f16 f8_e4m3 f8_e5m2 s8 u8 s4 u4 s2 u2");
  }
  format.type = *type;
  if (!format.quantized() && parts.size() > 1) {
    return Bad(text, parts[0], " is not quantized, so '", parts[1], "' means nothing for it");
  }

  bool named = false;
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    if (const std::optional<NumberFormat::Groups> groups = GroupsFromName(part)) {
      if (named) return Bad(text, "'", part, "' is a second kind of group");
      named = true;
      format.groups = *groups;
    } else if (const int64_t size = NumberAfter("g", part).value_or(0); size > 0) {
      if (format.group_size > 0) return Bad(text, "two group sizes");
      format.group_size = size;
    } else if (part == "zp" || part == "rzp" || part == "pzp") {
      using ZeroPoints = NumberFormat::ZeroPoints;
      if (format.zero_points != ZeroPoints::kNone) return Bad(text, "zero points twice");
      if (part != "zp" && IsFloat(format.type)) {
        return Bad(text, "'", part, "' is for integers");
      }
      format.zero_points = part == "pzp"                           ? ZeroPoints::kPacked
                           : part == "rzp" || IsFloat(format.type) ? ZeroPoints::kReal
                                                                   : ZeroPoints::kBytes;
    } else if (const CodebookRow* codebook = FindCodebook(part)) {
      if (format.codebook != nullptr) return Bad(text, "two codebooks");
      format.codebook = codebook;
    } else if (part == "ggml") {
      format.ggml_formula = true;
    } else if (part == "sf16" || part == "sbf16" || part == "sf32") {
      if (format.scale_type != kUndef) return Bad(text, "two types for the scales");
      format.scale_type = *DataTypeFromName(std::string_view(part).substr(1));
    } else {
      return Bad(text, "'", part,
                 "' is none of gN, token, all_heads, channel, block, head, tensor, "
                 "zp, pzp, rzp, a codebook, ggml, sf16, sbf16, sf32");
    }
  }
  if (format.group_size > 0 && !named) format.groups = NumberFormat::Groups::kHeadSlice;
  KVANT_RETURN_IF_ERROR(format.Check());
  return format;
}

std::string_view NumberFormatHelp() {
  return "f32|bf16|f16|f8_e4m3|f8_e5m2|s8|u8|s4|u4|s2|u2, then "
         ":gN|:token|:all_heads|:head|:tensor|:channel[:gN]|:block:gN, :zp|:pzp|:rzp, "
         ":nf4 or another codebook, :ggml, :sf16|:sbf16|:sf32";
}

}  // namespace kvant
