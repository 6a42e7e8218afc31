#include "kvant/cache/kv_storage.h"

#include <bit>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

template <typename... Parts>
absl::Status Bad(std::string_view text, const Parts&... why) {
  return InvalidArguments("storage '", text, "': ", why...);
}

}  // namespace

absl::Status KvStorage::Check(int64_t head_size) const {
  KVANT_RETURN_IF_ERROR(format.Check());
  const std::string text = ToString();
  if (head_size < 1) return Bad(text, "for heads of ", head_size, " channels");
  if (rotation != 0) {
    const int64_t block = rotation == kWholeHead ? head_size : rotation;
    if (!std::has_single_bit(static_cast<uint64_t>(block)) || head_size % block != 0) {
      return Bad(text, "a rotation in blocks of ", block, " does not fit a head of ", head_size,
                 ": blocks are a power of two that divides the head size");
    }
    if (format.quantized() && format.groups == NumberFormat::Groups::kChannel) {
      return Bad(text,
                 "a rotation mixes the channels of a head, which scales by channel keep apart");
    }
  }
  if (!format.quantized()) {
    if (sinks == 0 && residual == 0) return absl::OkStatus();
    return Bad(text, "sinks of ", sinks, " and a window of ", residual, " tokens beside ",
               DataTypeName(format.type), ", which is not quantized");
  }
  const bool is_unsigned = IsInteger(format.type) && LowestOf(format.type) == 0;
  if (is_unsigned && format.zero_points == NumberFormat::ZeroPoints::kNone &&
      format.codebook == nullptr) {
    return Bad(text, "codes of ", DataTypeName(format.type),
               " without zero points hold nothing below 0");
  }
  if (IsFloat(format.type) && format.zero_points != NumberFormat::ZeroPoints::kNone) {
    return Bad(text, "codes of ", DataTypeName(format.type), " have no zero points");
  }
  if (!IsComputeFloat(window_type)) {
    return Bad(text, "sinks and window of type ", DataTypeName(window_type),
               ", not f32, bf16 or f16");
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  if (sinks < 0 || residual < 0 || sinks > kMost || residual > kMost) {
    return Bad(text, "sinks of ", sinks, " and a window of ", residual, " tokens");
  }
  if (head_size % 8 * BitsOf(format.type) % 8 != 0) {
    return Bad(text, "a head of ", head_size, " codes of ", BitsOf(format.type),
               " bits does not end at a whole byte");
  }
  if (format.slices_heads() && head_size % format.group_size != 0) {
    return Bad(text, "groups of ", format.group_size, " do not divide the head size ", head_size);
  }
  const int64_t tokens = format.group_tokens().value_or(0);
  if (bulk && residual == 0) {
    return Bad(text, "a window of 0 tokens in bulk");
  }
  if (tokens > 1) {
    if (!bulk) {
      return Bad(text, "groups of ", tokens,
                 " tokens are quantized at once, as they leave a window: take bulk", tokens,
                 " or a multiple");
    }
    if (residual % tokens != 0) {
      return Bad(text, "a window of ", residual, " tokens is no multiple of the group's ", tokens);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> KvStorage::BitsPerElement(int64_t heads, int64_t head_size) const {
  KVANT_RETURN_IF_ERROR(Check(head_size));
  if (heads < 1) return Bad(ToString(), "for ", heads, " heads");
  if (!format.quantized() || static_scales()) return BitsOf(format.type);
  const Dims dims{1, heads, *format.group_tokens(), head_size};
  return format.BitsPerElement(dims, scale_type());
}

std::string KvStorage::ToString() const {
  std::string text = format.ToString();
  if (rotation == kWholeHead) absl::StrAppend(&text, "+rot");
  if (rotation > 0) absl::StrAppend(&text, "+rot", rotation);
  if (sinks != 0) absl::StrAppend(&text, "+sinks", sinks);
  if (residual != 0) absl::StrAppend(&text, bulk ? "+bulk" : "+window", residual);
  if (window_type != kF16) absl::StrAppend(&text, "+", std::string(DataTypeName(window_type)));
  return text;
}

absl::StatusOr<KvStorage> ParseKvStorage(std::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(std::string(text), '+');
  KvStorage storage;
  KVANT_ASSIGN_OR_RETURN(storage.format, ParseNumberFormat(parts[0]));
  bool has_rotation = false, has_sinks = false, has_window = false, has_type = false;
  const auto twice = [](bool& seen) { return std::exchange(seen, true); };
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    const auto block = NumberAfter("rot", part), sinks = NumberAfter("sinks", part);
    const auto sliding = NumberAfter("window", part), bulk = NumberAfter("bulk", part);
    if (part == "rot" || block) {
      if (twice(has_rotation)) return Bad(text, "two rotations");
      storage.rotation = block.value_or(KvStorage::kWholeHead);
    } else if (sinks) {
      if (twice(has_sinks)) return Bad(text, "sinks twice");
      storage.sinks = *sinks;
    } else if (sliding || bulk) {
      if (twice(has_window)) return Bad(text, "two windows");
      storage.residual = sliding ? *sliding : *bulk;
      storage.bulk = bulk.has_value();
      if (storage.residual == 0) return Bad(text, "a window of 0 tokens");
    } else if (part == "f32" || part == "bf16" || part == "f16") {
      if (twice(has_type)) return Bad(text, "two types of sinks and window");
      storage.window_type = *DataTypeFromName(part);
    } else {
      return Bad(text, "'", part, "' is none of rot, rotN, sinksN, windowN, bulkN, f32, bf16");
    }
  }
  return storage;
}

}  // namespace kvant
