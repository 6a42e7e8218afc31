#include "kvant/cache/kv_scheme.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

constexpr NamedKvScheme kNamed[] = {
#define KVANT_KV_SCHEME(name, alias, k, v, what) {name, alias, k, v, what},
#include "kvant/cache/kv_schemes.inc"
#undef KVANT_KV_SCHEME
};

absl::Status Bad(std::string_view text, std::string_view why) {
  return MakeError(ErrorKind::kInvalidArguments,
                   absl::StrCat("scheme '", std::string(text), "': ", std::string(why)));
}

// N of "<word>N"; nothing if it is something else.
std::optional<int64_t> NumberAfter(const std::string& part, const std::string& word) {
  int64_t number = 0;
  if (part.size() <= word.size() || part.compare(0, word.size(), word) != 0 ||
      !std::all_of(part.begin() + static_cast<int64_t>(word.size()), part.end(),
                   [](char c) { return c >= '0' && c <= '9'; }) ||
      !absl::SimpleAtoi(part.substr(word.size()), &number)) {
    return std::nullopt;
  }
  return number;
}

// Words for the window, by when tokens leave it.
constexpr std::pair<KvScheme::Flush, const char*> kFlushWords[] = {
    {KvScheme::Flush::kSliding, "window"},
    {KvScheme::Flush::kBulk, "bulk"},
};

// "f32, bf16, .., quanto4 (or hqq4), .."
std::string KnownNames() {
  return absl::StrJoin(kNamed, ", ", [](std::string* out, const NamedKvScheme& named) {
    out->append(named.name);
    if (!named.alias.empty()) out->append(" (or ").append(named.alias).append(")");
  });
}

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

absl::Status KvScheme::Check(int64_t head_size) const {
  if (head_size < 1) return Bad("", absl::StrCat("for heads of ", head_size, " channels"));
  KVANT_RETURN_IF_ERROR(format.Check());
  const std::string text = ToString();
  if (rotation != 0) {
    const int64_t block = rotation == kWholeHead ? head_size : rotation;
    if (!IsPowerOfTwo(block) || head_size % block != 0) {
      return Bad(text,
                 absl::StrCat("a rotation in blocks of ", block, " does not fit a head of ",
                              head_size, ": blocks are a power of two that divides the head size"));
    }
    if (format.quantized() && format.groups == KvFormat::Groups::kChannel) {
      return Bad(text,
                 "a rotation mixes the channels of a head, which scales by channel keep apart");
    }
  }
  if (!format.quantized()) {
    if (sinks == 0 && residual == 0) return absl::OkStatus();
    return Bad(text,
               absl::StrCat("sinks of ", sinks, " and a window of ", residual, " tokens beside ",
                            std::string(DataTypeName(format.type)), ", which is not quantized"));
  }
  const bool slices = format.groups == KvFormat::Groups::kHeadSlice;
  const bool is_unsigned = IsInteger(format.type) && LowestOf(format.type) == 0;
  if (is_unsigned && !format.zero_points && format.codebook == nullptr) {
    return Bad(text, absl::StrCat("codes of ", std::string(DataTypeName(format.type)),
                                  " without zero points hold nothing below 0"));
  }
  if (!IsComputeFloat(window_type)) {
    return Bad(text,
               absl::StrCat("sinks and window of type ", std::string(DataTypeName(window_type)),
                            ", not f32, bf16 or f16"));
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  if (sinks < 0 || residual < 0 || sinks > kMost || residual > kMost) {
    return Bad(text, absl::StrCat("sinks of ", sinks, " and a window of ", residual, " tokens"));
  }
  if (head_size % 8 * BitsOf(format.type) % 8 != 0) {
    return Bad(text, absl::StrCat("a head of ", head_size, " codes of ", BitsOf(format.type),
                                  " bits does not end at a whole byte"));
  }
  if (slices && head_size % format.group_size != 0) {
    return Bad(text, absl::StrCat("groups of ", format.group_size, " do not divide the head size ",
                                  head_size));
  }
  const int64_t tokens = format.group_tokens().value_or(0);
  if (flush != Flush::kSliding && residual == 0) {
    return Bad(text, "a window of 0 tokens in bulk");
  }
  if (tokens > 1) {
    if (flush == Flush::kSliding) {
      return Bad(text,
                 absl::StrCat("groups of ", tokens,
                              " tokens cannot leave a sliding window one by one: take bulkN"));
    }
    if (residual % tokens != 0) {
      return Bad(text, absl::StrCat("a window of ", residual,
                                    " tokens is no multiple of the group's ", tokens));
    }
  }
  return absl::OkStatus();
}

double KvScheme::BitsPerElement(int64_t heads, int64_t head_size) const {
  if (!format.quantized() || static_scales()) return BitsOf(format.type);
  const Dims dims{1, heads, *format.group_tokens(), head_size};
  return format.BitsPerElement(dims, scale_type());
}

std::string KvScheme::ToString() const {
  std::string text = format.ToString();
  if (rotation == kWholeHead) absl::StrAppend(&text, "+rot");
  if (rotation > 0) absl::StrAppend(&text, "+rot", rotation);
  if (sinks != 0) absl::StrAppend(&text, "+sinks", sinks);
  if (residual != 0) {
    for (const auto& [flush_of, word] : kFlushWords) {
      if (flush_of == flush) absl::StrAppend(&text, "+", word, residual);
    }
  }
  if (window_type != kF16) absl::StrAppend(&text, "+", std::string(DataTypeName(window_type)));
  return text;
}

absl::StatusOr<KvScheme> ParseKvScheme(std::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(std::string(text), '+');
  KvScheme scheme;
  KVANT_ASSIGN_OR_RETURN(scheme.format, ParseKvFormat(parts[0]));
  bool has_rotation = false, has_sinks = false, has_window = false, has_type = false;
  const auto twice = [](bool& seen) { return std::exchange(seen, true); };
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    const auto* const window =
        std::find_if(std::begin(kFlushWords), std::end(kFlushWords),
                     [&](const auto& row) { return NumberAfter(part, row.second).has_value(); });
    const auto block = NumberAfter(part, "rot");
    if (part == "rot" || block) {
      if (twice(has_rotation)) return Bad(text, "two rotations");
      scheme.rotation = block.value_or(KvScheme::kWholeHead);
    } else if (const auto sinks = NumberAfter(part, "sinks")) {
      if (twice(has_sinks)) return Bad(text, "sinks twice");
      scheme.sinks = *sinks;
    } else if (window != std::end(kFlushWords)) {
      if (twice(has_window)) return Bad(text, "two windows");
      scheme.residual = *NumberAfter(part, window->second);
      scheme.flush = window->first;
    } else if (part == "f32" || part == "bf16" || part == "f16") {
      if (twice(has_type)) return Bad(text, "two types of sinks and window");
      scheme.window_type = *DataTypeFromName(part);
    } else {
      return Bad(text, absl::StrCat("'", part,
                                    "' is none of rot, rotN, sinksN, windowN, bulkN, f32, bf16"));
    }
  }
  return scheme;
}

absl::Span<const NamedKvScheme> NamedKvSchemes() { return kNamed; }

std::string KvCacheScheme::ToString() const {
  std::string of_k = k.ToString(), of_v = v.ToString();
  for (const NamedKvScheme& named : kNamed) {
    if (named.k == of_k && named.v == of_v) return std::string(named.name);
  }
  return of_k == of_v ? of_k : absl::StrCat(of_k, "/", of_v);
}

absl::StatusOr<KvCacheScheme> ParseKvCacheScheme(std::string_view text) {
  std::string_view k = text, v = text;
  if (const size_t slash = text.find('/'); slash != std::string_view::npos) {
    k = text.substr(0, slash);
    v = text.substr(slash + 1);
  }
  for (const NamedKvScheme& named : kNamed) {
    if (text.empty() || (named.name != text && named.alias != text)) continue;
    k = named.k;
    v = named.v;
  }
  // A lone word that begins no format either was meant as a name.
  if (k == text && text.find_first_of(":+/") == text.npos && !DataTypeFromName(text)) {
    return Bad(text, absl::StrCat("neither a format nor one of ", KnownNames()));
  }
  KvCacheScheme scheme;
  KVANT_ASSIGN_OR_RETURN(scheme.k, ParseKvScheme(k));
  KVANT_ASSIGN_OR_RETURN(scheme.v, ParseKvScheme(v));
  return scheme;
}

}  // namespace kvant
