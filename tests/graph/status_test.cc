#include "kvant/graph/status.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kvant/graph/json.h"
#include "kvant/patterns/partitioner.h"

namespace kvant {
namespace {

TEST(PrintableTest, KeepsWhatPeopleRead) {
  for (const std::string text :
       {"", "attn/q 'x' \"\\ ~",
        "\u00e9 \u00a0 \u0416 \u6ce8\u610f \uffff \U0001f600 \U0010ffff"}) {
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(PrintableTest, EscapesWhatWouldCutOrMoveALine) {
  const std::pair<std::string, std::string> cases[] = {
      {std::string("a\0b", 3), "a\\x00b"},
      {"a\nb\r\tc", "a\\nb\\x0d\\x09c"},
      {"\x1b[2J\x7f", "\\x1b[2J\\x7f"},
      {"\xc2\x9b"
       "31m",
       "\\xc2\\x9b31m"},  // the same as ESC [, in two bytes
      {"\x9b"
       "31m",
       "\\x9b31m"},  // and in one
      {"\xff\xfe", "\\xff\\xfe"},
      {"\xc3", "\\xc3"},  // cut short
      {"\xe6\xb3", "\\xe6\\xb3"},
      {"\xc0\x8a", "\\xc0\\x8a"},  // a newline written too long
      {"\xe0\x80\x8a", "\\xe0\\x80\\x8a"},
      {"\xf0\x80\x80\x8a", "\\xf0\\x80\\x80\\x8a"},
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // half of a pair
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond the last character
      {"\xc3\xa9\n", "\xc3\xa9\\n"},
  };
  for (const auto& [text, printable] : cases) {
    EXPECT_EQ(Printable(text), printable);
    EXPECT_EQ(Printable(printable), printable);
  }
}

// A name from a file does not get into a terminal as it is, nor cut the line.
TEST(PrintableTest, NamesInMessages) {
  const char* const text =
      R"({"graph": [{"id": 3, "name": "a\u0000b\n\u001b[31m", "kind": "SoftMax",
      "attrs": {"axis": {"type": "s64", "value": -1}},
      "inputs": [{"id": 0, "dtype": "f32", "shape": [4]}],
      "outputs": [{"id": 1, "dtype": "f32", "shape": [4]}]}]})";
  const absl::StatusOr<Graph> graph = GraphFromJson(text);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->ops()[0].name, std::string("a\0b\n\x1b[31m", 9));
  EXPECT_EQ(graph->ops()[0].ToString(), "SoftMax 'a\\x00b\\n\\x1b[31m' (id 3)");
  EXPECT_EQ(GraphFromJson(GraphToJson(*graph))->ops()[0].name, graph->ops()[0].name);

  const absl::Status status =
      GraphFromJson(R"({"graph": [{"id": 1, "name": "n", "kind": "\u001bSo\u0000ft"}]})").status();
  EXPECT_EQ(std::string(status.message()), "op 'n' (id 1): unknown kind '\\x1bSo\\x00ft'");
}

}  // namespace
}  // namespace kvant
