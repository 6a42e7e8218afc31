// JsonDocument: parsed JSON as one flat array, for reading files that nobody
// vouches for. Nothing recurses, nesting and the number of values are bounded,
// and every value knows its path, which is worked out only for an error message.
#ifndef KVANT_GRAPH_JSON_DOCUMENT_H_
#define KVANT_GRAPH_JSON_DOCUMENT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvant/graph/status.h"

namespace kvant {

class JsonValue;

class JsonDocument {
 public:
  static constexpr size_t kMaxDepth = 64;
  static constexpr size_t kMaxValues = size_t{1} << 24;

  // kInvalidJson, with the position, for malformed text.
  static absl::StatusOr<JsonDocument> Parse(std::string_view text);

  // Valid while the document lives and stays where it is.
  JsonValue root() const;

 private:
  friend class JsonValue;
  friend class JsonDocumentBuilder;

  // Of strings_.
  struct String {
    size_t offset = 0, length = 0;
  };
  struct Array {};
  struct Object {};
  using Content =
      std::variant<std::nullptr_t, bool, int64_t, uint64_t, float, String, Array, Object>;
  // Values in the order of the text; members of an object as key, value, key, ...
  struct Node {
    Content content;
    uint32_t end = 0;  // index after the last node that belongs to this one
  };

  std::string_view TextOf(const String& string) const {
    return std::string_view(strings_).substr(string.offset, string.length);
  }
  std::string_view KeyAt(uint32_t node) const {
    return TextOf(std::get<String>(nodes_[node].content));
  }
  // "graph[3].inputs[0].shape"; "(top level)" for the root.
  std::string PathOf(uint32_t node) const;

  std::vector<Node> nodes_;
  std::string strings_;
};

// One value of a document. Reading one as another type than it is gives
// kInvalidJson with its path.
class JsonValue {
 public:
  JsonValue(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}

  absl::Status Read(bool& result) const;     // true, false, 1 or 0
  absl::Status Read(int64_t& result) const;  // no fraction, no exponent
  absl::Status Read(uint64_t& result) const;
  absl::Status Read(float& result) const;  // finite once rounded to f32
  absl::Status Read(std::string& result) const;
  template <typename T>
  absl::Status Read(std::vector<T>& result) const {
    return ForEach([&result](JsonValue value) { return value.Read(result.emplace_back()); });
  }

  bool IsString() const { return As<JsonDocument::String>() != nullptr; }
  // Calls `visit` for every element in order, until one fails.
  absl::Status ForEach(absl::FunctionRef<absl::Status(JsonValue)> visit) const;
  absl::Status ForEachMember(
      absl::FunctionRef<absl::Status(std::string_view key, JsonValue value)> visit) const;
  // The member `key`: nothing if it is missing; kInvalidJson if it occurs twice.
  absl::StatusOr<std::optional<JsonValue>> Find(std::string_view key) const;
  // Likewise; kInvalidJson if it is missing.
  absl::StatusOr<JsonValue> Member(std::string_view key) const;
  template <typename T>
  absl::Status ReadMember(std::string_view key, T& result) const {
    absl::StatusOr<JsonValue> member = Member(key);
    return member.ok() ? member->Read(result) : member.status();
  }

  // kInvalidJson: "<path>: <what>".
  template <typename... Parts>
  absl::Status Error(const Parts&... what) const {
    return MakeError(ErrorKind::kInvalidJson, document_->PathOf(node_), ": ", what...);
  }

 private:
  const JsonDocument::Node& node() const { return document_->nodes_[node_]; }
  // Null if it is another.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&node().content);
  }
  // "<path>: expected <expected>, found <what is there>".
  absl::Status Mismatch(std::string_view expected) const;

  const JsonDocument* document_;
  uint32_t node_;
};

}  // namespace kvant

#endif  // KVANT_GRAPH_JSON_DOCUMENT_H_
