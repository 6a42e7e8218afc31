#include "kvant/graph/constant.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace kvant {

Constant::Constant(float value) : Constant(kF32, &value) {}
Constant::Constant(int32_t value) : Constant(kS32, &value) {}
Constant::Constant(int64_t value) : Constant(kS64, &value) {}
Constant::Constant(bool value) : Constant(kBoolean, value ? 1.0 : 0.0) {}

Constant::Constant(DataType type, double value) : type_(type) {
  StoreElement(type, bytes_.data(), 0, value);
}

Constant::Constant(DataType type, const void* data) : type_(type) {
  if (BitsOf(type) < 8) {
    StoreElement(type, bytes_.data(), 0, LoadElement(type, data, 0));
  } else {
    std::memcpy(bytes_.data(), data, static_cast<size_t>(BitsOf(type) / 8));
  }
}

int64_t Constant::integer() const {
  if (type_ == kS64) {
    int64_t exact = 0;
    std::memcpy(&exact, data(), sizeof(exact));
    return exact;
  }
  const double real = value();
  if (std::isnan(real)) return 0;
  if (real >= 0x1p63) return std::numeric_limits<int64_t>::max();
  if (real < -0x1p63) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(real);
}

std::string Constant::WhyNot(DataType type, double value) {
  const auto not_one = [&](std::string_view why) {
    return absl::StrCat(value, " is no ", std::string(DataTypeName(type)), std::string(why));
  };
  if (type == kBoolean) return value == 0 || value == 1 ? "" : not_one(": neither 0 nor 1");
  if (IsInteger(type)) {
    const bool fits = value >= static_cast<double>(LowestOf(type)) &&
                      value <= static_cast<double>(HighestOf(type));
    return fits ? "" : not_one(absl::StrCat(": ", LowestOf(type), " to ", HighestOf(type)));
  }
  if (!IsFloat(type)) return not_one("");
  if (std::isfinite(value)) {
    const double largest = LargestOf(type);
    return std::abs(value) <= largest ? "" : not_one(absl::StrCat(": at most ", largest));
  }
  const double stored = Constant(type, value).value();
  return stored == value || (std::isnan(value) && std::isnan(stored)) ? "" : not_one("");
}

std::string Constant::ToString() const {
  if (type_ == kBoolean) return value() != 0 ? "true" : "false";
  if (std::isnan(value())) return "nan";  // whatever its sign
  char text[32];
  char* const end = text + sizeof(text);
  const char* const last = IsInteger(type_)
                               ? std::to_chars(text, end, integer()).ptr
                               : std::to_chars(text, end, static_cast<float>(value())).ptr;
  const std::string_view number(text, static_cast<size_t>(last - text));
  // "-0" reads as an integer, which has no sign then.
  return number == "-0" ? "-0.0" : std::string(number);
}

}  // namespace kvant
