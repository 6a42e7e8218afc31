#include "kvant/kernels/cpu/code_layout.h"

#include <algorithm>
#include <cmath>

#include "kvant/kernels/cpu/codes.h"

namespace kvant::cpu {
namespace {

// A part of 8-bit codes times s16 queries stays below 2^31 to here.
constexpr int64_t kMaxPartColumns = 64;

int BitsOfCodes(DataType type) {
  switch (type) {
    case kF8E4M3:
    case kF8E5M2:
    case kS8:
    case kU8:
      return 8;
    case kS4:
    case kU4:
      return 4;
    case kS2:
    case kU2:
      return 2;
    default:
      return 0;
  }
}

bool IsSignedCode(DataType type) { return type == kS8 || type == kS4 || type == kS2; }

// Why a segment of codes that stand for floats is not multiplied as such; empty: it is.
std::string WhyNotAsFloats(const Segment& segment, int64_t channels) {
  const CodeLayout& codes = segment.codes;
  const float* const book = segment.data.codebook;
  if (book != nullptr && codes.bits != 4) {
    return "codes are positions in a codebook of " + std::to_string(1 << codes.bits);
  }
  if (codes.channel_major) return "its tokens, not channels, are side by side";
  if (codes.by_channel) return "scales by channel of codes that stand for floats";
  if (segment.dequantization.zero_points.present()) {
    return "zero points of codes that stand for floats";
  }
  const int64_t unit = kFloatPartUnit * 32 / codes.bits;
  if (codes.group < channels && codes.group % unit != 0) {
    return "groups of " + std::to_string(codes.group) + " channels";
  }
  // What pads a row is multiplied by zero.
  const bool finite =
      book == nullptr || std::all_of(book, book + 16, [](float x) { return std::isfinite(x); });
  return finite ? "" : "the codebook holds numbers that are not finite";
}

// See CodeLayout::addressed.
bool AddressesParameters(const Segment& segment) {
  const Dequantization& how = segment.dequantization;
  const auto addresses = [&](const Array& array) {
    const bool same =
        array.strides[kRow] == 0 && (array.strides[0] == 0 || !segment.page_table.present());
    return !array.present() || same || HasTokens(segment, array);
  };
  return addresses(how.scales) && addresses(how.zero_points);
}

}  // namespace

bool HasTokens(const Segment& segment, const Array& array) {
  if (!array.present() || !TransposesType(array.type)) return false;
  const int64_t groups = segment.codes.groups, bits = BitsOf(array.type);
  if (groups > kMostAddressedGroups || (groups > 1 && array.strides[kCol] != 1)) return false;
  const int64_t tokens = array.strides[kRow], pages = array.strides[0];
  const auto in_bytes = [bits](int64_t elements) { return elements * bits % 8 == 0; };
  // Where tokens are dense every other one begins at a byte, if heads do; else heads need not.
  const bool heads_in_bytes =
      in_bytes(array.strides[1]) && in_bytes(array.strides[2]) && in_bytes(array.offset);
  if (!in_bytes(pages) || !(tokens == groups ? heads_in_bytes : in_bytes(tokens))) return false;
  const bool by_token = segment.dequantization.group[kRow] == 1 && tokens >= groups;
  return by_token || (tokens == 0 && pages != 0 && segment.page_table.present());
}

std::string DescribeCodes(int64_t channels, bool keys, Segment& segment) {
  CodeLayout& codes = segment.codes;
  const Array& data = segment.data;
  const Dequantization& how = segment.dequantization;
  codes = {};
  codes.bits = BitsOfCodes(data.type);
  if (codes.bits == 0) return std::string(DataTypeName(data.type)) + " is no integer type";
  codes.floats = data.codebook != nullptr || !IsInteger(data.type);
  if (!how.scales.present() && !codes.floats) return "codes without scales";
  codes.is_signed = IsSignedCode(data.type);
  if (data.strides[kCol] != 1 && channels != 1) {
    codes.channel_major = keys && data.strides[kRow] == 1;
    if (!codes.channel_major) return "the channels of a token are not side by side";
  }
  const int dense = codes.channel_major ? kRow : kCol;
  for (int axis = 0; axis < kAxes; ++axis) {
    if (axis == dense || data.strides[axis] * codes.bits % 8 == 0) continue;
    return codes.channel_major ? "channels do not begin at whole bytes"
                               : "tokens do not begin at whole bytes";
  }
  if (data.offset * codes.bits % 8 != 0) return "tokens do not begin at whole bytes";
  const bool varies = how.scales.strides[kCol] != 0 ||
                      (how.zero_points.present() && how.zero_points.strides[kCol] != 0);
  codes.group = varies ? std::min(how.group[kCol], channels) : channels;
  codes.run = how.group[kRow];
  codes.by_channel = varies && codes.group == 1;
  if (codes.by_channel) {
    const bool one_run = how.scales.strides[kRow] == 0 &&
                         (!how.zero_points.present() || how.zero_points.strides[kRow] == 0);
    if (one_run) codes.run = std::max<int64_t>(segment.tokens, kMinRun);
    if (codes.run < kMinRun) {
      return "groups of 1 channel and " + std::to_string(codes.run) + " tokens";
    }
    codes.group = channels;
  } else if (codes.group < channels && codes.group % 16 != 0) {
    return "groups of " + std::to_string(codes.group) + " channels";
  }
  if (codes.floats) {
    if (std::string why = WhyNotAsFloats(segment, channels); !why.empty()) return why;
  }
  codes.groups = std::max<int64_t>(1, CeilDiv(channels, std::max<int64_t>(1, codes.group)));
  codes.usable = channels > 0;
  codes.addressed = AddressesParameters(segment);
  if (codes.channel_major || !codes.usable) return codes.usable ? "" : "no channels";
  segment.joins_pages = !codes.by_channel && segment.tokens % kPageUnit == 0 && codes.addressed;
  // Parts: to the end of a group, of the channels, or of what a sum may hold.
  const int64_t per_column = 32 / codes.bits;
  const int64_t unit = codes.floats ? kFloatPartUnit : PartUnit(codes.bits);
  const int64_t used = CeilDiv(channels, per_column * unit) * unit;
  const int64_t most = codes.floats ? kMaxFloatPart / per_column : kMaxPartColumns;
  codes.columns = CeilDiv(used, kColumnChunk) * kColumnChunk;
  for (int64_t c = 0, begin = 0; c < used; ++c) {
    const int64_t next = (c + 1) * per_column;
    const bool ends_group = codes.groups > 1 && next % codes.group == 0;
    if (!ends_group && c + 1 != used && c + 1 - begin < most) continue;
    codes.part_ends.push_back(static_cast<int32_t>(c + 1));
    codes.part_groups.push_back(static_cast<int32_t>(begin * per_column / codes.group));
    begin = c + 1;
  }
  return "";
}

}  // namespace kvant::cpu
