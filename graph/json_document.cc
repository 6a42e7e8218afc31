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
  using Kind = JsonDocument::Kind;
  JsonDocument document;
  absl::Status status;

  bool null() override { return Add(Kind::kNull) != nullptr; }
  bool boolean(bool value) override {
    JsonDocument::Node* node = Add(Kind::kBool);
    if (node) node->boolean = value;
    return node != nullptr;
  }
  bool number_integer(number_integer_t value) override {
    JsonDocument::Node* node = Add(Kind::kSigned);
    if (node) node->integer = value;
    return node != nullptr;
  }
  bool number_unsigned(number_unsigned_t value) override {
    JsonDocument::Node* node = Add(Kind::kUnsigned);
    if (node) node->natural = value;
    return node != nullptr;
  }
  bool number_float(number_float_t value, const string_t& text) override {
    JsonDocument::Node* node = Add(Kind::kFloat);
    if (node) node->real = FloatOf(value, text);
    return node != nullptr;
  }
  bool string(string_t& value) override {
    JsonDocument::Node* node = Add(Kind::kString);
    if (!node) return false;
    node->offset = document.strings_.size();
    node->length = value.size();
    document.strings_ += value;
    return true;
  }
  bool key(string_t& value) override { return string(value); }
  bool binary(binary_t&) override { return false; }  // not in text
  bool start_object(size_t) override { return Open(Kind::kObject); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(Kind::kArray); }
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
  JsonDocument::Node* Add(Kind kind) {
    if (document.nodes_.size() >= JsonDocument::kMaxValues) {
      status = JsonError("more than ", JsonDocument::kMaxValues, " values");
      return nullptr;
    }
    JsonDocument::Node& node = document.nodes_.emplace_back();
    node.kind = kind;
    node.end = static_cast<uint32_t>(document.nodes_.size());
    return &node;
  }
  bool Open(Kind kind) {
    if (open_.size() >= JsonDocument::kMaxDepth) {
      status = JsonError("nested deeper than ", JsonDocument::kMaxDepth, " levels");
      return false;
    }
    open_.push_back(static_cast<uint32_t>(document.nodes_.size()));
    return Add(kind) != nullptr;
  }
  bool Close() {
    document.nodes_[open_.back()].end = static_cast<uint32_t>(document.nodes_.size());
    open_.pop_back();
    return true;
  }

  std::vector<uint32_t> open_;
};

absl::StatusOr<JsonDocument> JsonDocument::Parse(std::string_view text) {
  JsonDocumentBuilder builder;
  const bool parsed = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  if (!builder.status.ok()) return builder.status;
  if (!parsed) return JsonError("malformed JSON");
  return std::move(builder.document);
}

JsonValue JsonDocument::root() const { return JsonValue(this, 0); }

std::string JsonDocument::PathOf(uint32_t target) const {
  std::string path;
  uint32_t at = 0;
  while (at != target) {
    const bool is_object = nodes_[at].kind == Kind::kObject;
    uint32_t child = at + 1;
    size_t index = 0;
    // The child whose nodes include the target.
    for (;; ++index) {
      const uint32_t value = is_object ? child + 1 : child;
      if (target < nodes_[value].end) break;
      child = nodes_[value].end;
    }
    if (is_object) {
      absl::StrAppend(&path, path.empty() ? "" : ".", std::string(StringAt(child)));
      ++child;
    } else {
      absl::StrAppend(&path, "[", index, "]");
    }
    at = child;
  }
  return path.empty() ? "(top level)" : path;
}

absl::Status JsonValue::Mismatch(std::string_view expected) const {
  std::string found;
  switch (node().kind) {
    case Kind::kNull:
      found = "null";
      break;
    case Kind::kBool:
      found = node().boolean ? "true" : "false";
      break;
    case Kind::kSigned:
      found = absl::StrCat(node().integer);
      break;
    case Kind::kUnsigned:
      found = absl::StrCat(node().natural);
      break;
    case Kind::kFloat:
      found = absl::StrCat("the fraction ", node().real);
      break;
    case Kind::kString:
      found = absl::StrCat("'", std::string(document_->StringAt(node_).substr(0, 64)), "'");
      break;
    case Kind::kArray:
      found = "an array";
      break;
    case Kind::kObject:
      found = "an object";
      break;
  }
  return Error("expected ", expected, ", found ", found);
}

absl::Status JsonValue::Read(bool& result) const {
  if (node().kind == Kind::kBool) {
    result = node().boolean;
  } else if (node().kind == Kind::kUnsigned && node().natural <= 1) {
    result = node().natural == 1;
  } else {
    return Mismatch("true, false, 1 or 0");
  }
  return absl::OkStatus();
}

absl::Status JsonValue::Read(int64_t& result) const {
  if (node().kind == Kind::kSigned) {
    result = node().integer;
  } else if (node().kind == Kind::kUnsigned &&
             node().natural <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    result = static_cast<int64_t>(node().natural);
  } else {
    return Mismatch("a 64-bit integer");
  }
  return absl::OkStatus();
}

absl::Status JsonValue::Read(uint64_t& result) const {
  if (node().kind != Kind::kUnsigned) return Mismatch("a non-negative 64-bit integer");
  result = node().natural;
  return absl::OkStatus();
}

absl::Status JsonValue::Read(float& result) const {
  if (node().kind == Kind::kFloat && std::isfinite(node().real)) {
    result = node().real;
  } else if (node().kind == Kind::kSigned) {
    result = static_cast<float>(node().integer);
  } else if (node().kind == Kind::kUnsigned) {
    result = static_cast<float>(node().natural);
  } else {
    return Mismatch("a number within the range of f32");
  }
  return absl::OkStatus();
}

absl::Status JsonValue::Read(std::string_view& result) const {
  if (!IsString()) return Mismatch("a string");
  result = document_->StringAt(node_);
  return absl::OkStatus();
}

absl::Status JsonValue::Read(std::vector<int64_t>& result) const {
  return ForEach([&result](JsonValue value) { return value.Read(result.emplace_back()); });
}

absl::Status JsonValue::Read(std::vector<float>& result) const {
  return ForEach([&result](JsonValue value) { return value.Read(result.emplace_back()); });
}

bool JsonValue::IsString() const { return node().kind == Kind::kString; }

absl::Status JsonValue::ForEach(absl::FunctionRef<absl::Status(JsonValue)> visit) const {
  if (node().kind != Kind::kArray) return Mismatch("an array");
  for (uint32_t i = node_ + 1; i < node().end; i = document_->nodes_[i].end) {
    KVANT_RETURN_IF_ERROR(visit(JsonValue(document_, i)));
  }
  return absl::OkStatus();
}

absl::Status JsonValue::ForEachMember(
    absl::FunctionRef<absl::Status(std::string_view, JsonValue)> visit) const {
  if (node().kind != Kind::kObject) return Mismatch("an object");
  for (uint32_t i = node_ + 1; i < node().end; i = document_->nodes_[i + 1].end) {
    KVANT_RETURN_IF_ERROR(visit(document_->StringAt(i), JsonValue(document_, i + 1)));
  }
  return absl::OkStatus();
}

absl::StatusOr<JsonValue> JsonValue::Member(std::string_view key) const {
  std::optional<JsonValue> found;
  KVANT_RETURN_IF_ERROR(ForEachMember([&](std::string_view name, JsonValue value) {
    if (name != key) return absl::OkStatus();
    if (found) return value.Error("this key occurs twice");
    found = value;
    return absl::OkStatus();
  }));
  if (found) return *found;
  return Error("'", key, "' is missing");
}

absl::StatusOr<bool> JsonValue::Has(std::string_view key) const {
  bool found = false;
  KVANT_RETURN_IF_ERROR(ForEachMember([&](std::string_view name, JsonValue) {
    found |= name == key;
    return absl::OkStatus();
  }));
  return found;
}

}  // namespace kvant
