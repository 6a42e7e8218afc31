#include "kvant/graph/json_document.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

template <typename... Parts>
absl::Status JsonError(const Parts&... what) {
  return MakeError(ErrorKind::kInvalidJson, what...);
}

// f32 of a number in the text, in one rounding; infinite if it does not fit.
float FloatOf(double value, std::string_view text) {
  float result = 0.f;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  if (error == std::errc() && end == text.data() + text.size()) return result;
  return static_cast<float>(std::abs(value) > std::numeric_limits<float>::max() ? HUGE_VAL : value);
}

}  // namespace

// Receives the parser's events; returning false stops it.
class JsonDocumentBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonDocument document;
  absl::Status status;

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    return Add(FloatOf(value, text));
  }
  bool string(string_t& value) override {
    const size_t offset = document.strings_.size();
    document.strings_ += value;
    return Add(JsonDocument::String{offset, value.size()});
  }
  bool key(string_t& value) override { return string(value); }
  bool binary(binary_t&) override { return false; }  // not in text
  bool start_object(size_t) override { return Open(JsonDocument::Object()); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(JsonDocument::Array()); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // After "[json.exception.parse_error.101] " comes the part that people read.
    std::string_view what = error.what();
    if (const size_t tag = what.find("] "); tag != what.npos) what.remove_prefix(tag + 2);
    status = JsonError("malformed JSON at byte ", position, ": ", what.substr(0, 300));
    return false;
  }

 private:
  bool Add(JsonDocument::Content content) {
    if (document.nodes_.size() >= JsonDocument::kMaxValues) {
      status = JsonError("more than ", JsonDocument::kMaxValues, " values");
      return false;
    }
    document.nodes_.push_back({content, static_cast<uint32_t>(document.nodes_.size() + 1)});
    return true;
  }
  bool Open(JsonDocument::Content content) {
    if (open_.size() >= JsonDocument::kMaxDepth) {
      status = JsonError("nested deeper than ", JsonDocument::kMaxDepth, " levels");
      return false;
    }
    open_.push_back(static_cast<uint32_t>(document.nodes_.size()));
    return Add(content);
  }
  bool Close() {
    document.nodes_[open_.back()].end = static_cast<uint32_t>(document.nodes_.size());
    open_.pop_back();
    return true;
  }

  std::vector<uint32_t> open_;
};

absl::StatusOr<JsonDocument> JsonDocument::Parse(std::string_view text) {
  // The parser takes it for the end.
  if (const size_t at = text.find('\0'); at != text.npos) {
    return JsonError("malformed JSON: byte ", at, " is NUL");
  }
  JsonDocumentBuilder builder;
  const bool parsed = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  if (!builder.status.ok()) return builder.status;
  if (!parsed) return JsonError("malformed JSON");
  return std::move(builder.document);
}

JsonValue JsonDocument::root() const { return JsonValue(this, 0); }

std::string JsonDocument::PathOf(uint32_t target) const {
  std::string path;
  for (uint32_t at = 0; at != target;) {
    const bool is_object = std::holds_alternative<Object>(nodes_[at].content);
    const uint32_t key = is_object ? 1 : 0;  // nodes of one before each value
    at += 1 + key;
    size_t index = 0;
    // To the value whose nodes include the target.
    for (; nodes_[at].end <= target; ++index) at = nodes_[at].end + key;
    if (is_object) {
      absl::StrAppend(&path, path.empty() ? "" : ".", std::string(KeyAt(at - 1)));
    } else {
      absl::StrAppend(&path, "[", index, "]");
    }
  }
  return path.empty() ? "(top level)" : path;
}

absl::Status JsonValue::Mismatch(std::string_view expected) const {
  std::string found = "null";
  if (const bool* flag = As<bool>()) found = *flag ? "true" : "false";
  if (const int64_t* integer = As<int64_t>()) found = absl::StrCat(*integer);
  if (const uint64_t* natural = As<uint64_t>()) found = absl::StrCat(*natural);
  if (const float* real = As<float>()) found = absl::StrCat("the float ", *real);
  if (const auto* string = As<JsonDocument::String>()) {
    found = absl::StrCat("'", std::string(document_->TextOf(*string).substr(0, 64)), "'");
  }
  if (As<JsonDocument::Array>() != nullptr) found = "an array";
  if (As<JsonDocument::Object>() != nullptr) found = "an object";
  return Error("expected ", expected, ", found ", found);
}

absl::Status JsonValue::Read(bool& result) const {
  const bool* flag = As<bool>();
  const uint64_t* bit = As<uint64_t>();
  if (flag == nullptr && (bit == nullptr || *bit > 1)) return Mismatch("true, false, 1 or 0");
  result = flag != nullptr ? *flag : *bit == 1;
  return absl::OkStatus();
}

absl::Status JsonValue::Read(int64_t& result) const {
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  const int64_t* negative = As<int64_t>();
  const uint64_t* natural = As<uint64_t>();
  if (negative == nullptr && (natural == nullptr || *natural > kLargest)) {
    return Mismatch("a 64-bit integer");
  }
  result = negative != nullptr ? *negative : static_cast<int64_t>(*natural);
  return absl::OkStatus();
}

absl::Status JsonValue::Read(uint64_t& result) const {
  const uint64_t* natural = As<uint64_t>();
  if (natural == nullptr) return Mismatch("a non-negative 64-bit integer");
  result = *natural;
  return absl::OkStatus();
}

absl::Status JsonValue::Read(float& result) const {
  if (const float* real = As<float>(); real != nullptr && std::isfinite(*real)) {
    result = *real;
  } else if (const int64_t* integer = As<int64_t>()) {
    result = static_cast<float>(*integer);
  } else if (const uint64_t* natural = As<uint64_t>()) {
    result = static_cast<float>(*natural);
  } else {
    return Mismatch("a number within the range of f32");
  }
  return absl::OkStatus();
}

absl::Status JsonValue::Read(std::string& result) const {
  const auto* string = As<JsonDocument::String>();
  if (string == nullptr) return Mismatch("a string");
  result = document_->TextOf(*string);
  return absl::OkStatus();
}

absl::Status JsonValue::ForEach(absl::FunctionRef<absl::Status(JsonValue)> visit) const {
  if (As<JsonDocument::Array>() == nullptr) return Mismatch("an array");
  for (uint32_t i = node_ + 1; i < node().end; i = document_->nodes_[i].end) {
    KVANT_RETURN_IF_ERROR(visit(JsonValue(document_, i)));
  }
  return absl::OkStatus();
}

absl::Status JsonValue::ForEachMember(
    absl::FunctionRef<absl::Status(std::string_view, JsonValue)> visit) const {
  if (As<JsonDocument::Object>() == nullptr) return Mismatch("an object");
  for (uint32_t i = node_ + 1; i < node().end; i = document_->nodes_[i + 1].end) {
    KVANT_RETURN_IF_ERROR(visit(document_->KeyAt(i), JsonValue(document_, i + 1)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<JsonValue>> JsonValue::Find(std::string_view key) const {
  std::optional<JsonValue> found;
  KVANT_RETURN_IF_ERROR(ForEachMember([&](std::string_view name, JsonValue value) {
    if (name != key) return absl::OkStatus();
    if (found) return value.Error("this key occurs twice");
    found = value;
    return absl::OkStatus();
  }));
  return found;
}

absl::StatusOr<JsonValue> JsonValue::Member(std::string_view key) const {
  KVANT_ASSIGN_OR_RETURN(const std::optional<JsonValue> found, Find(key));
  if (found) return *found;
  return Error("'", key, "' is missing");
}

}  // namespace kvant
