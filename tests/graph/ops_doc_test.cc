// docs/ops.md holds the op table as it is in ops.inc. After a change of the
// table, run this test with KVANT_UPDATE_DOCS=1 to write it anew.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kvant/graph/op.h"
#include "kvant/tests/common/doc_table.h"

namespace kvant {
namespace {

std::string Ports(const std::vector<OpSchema::Port>& ports, size_t repeating) {
  std::vector<std::string> words;
  for (const OpSchema::Port& port : ports) {
    const bool repeats = words.size() + repeating >= ports.size();
    words.push_back(absl::StrCat(port.name, port.optional ? "?" : "", repeats ? "..." : ""));
  }
  return absl::StrJoin(words, ", ");
}

std::string Default(const AttrValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<int64_t>(&value)) return absl::StrCat(*number);
  return "";
}

std::string AttrText(const OpSchema::AttrRule& rule) {
  std::string text = absl::StrCat("`", std::string(AttrName(rule.attr)), "`");
  if (rule.required) return text + " required";
  if (!rule.fallback) return text + " optional";
  if (rule.allowed.empty()) return absl::StrCat(text, " = ", Default(*rule.fallback));
  return absl::StrCat(text, " = ", absl::StrJoin(rule.allowed, " \\| "));
}

std::string Table() {
  std::string table = "| op | inputs | outputs | attributes |\n|---|---|---|---|\n";
  for (OpKind kind : kAllOpKinds) {
    const OpSchema& schema = SchemaOf(kind);
    const std::string attrs = absl::StrJoin(
        schema.attrs, "; ",
        [](std::string* out, const OpSchema::AttrRule& rule) { out->append(AttrText(rule)); });
    absl::StrAppend(&table, "| ", std::string(OpKindName(kind)), " | ",
                    Ports(schema.inputs, schema.repeating_inputs), " | ",
                    Ports(schema.outputs, schema.repeating_outputs), " | ", attrs, " |\n");
  }
  return table;
}

TEST(OpsDoc, HoldsTheTable) { ExpectDocTable("ops.md", Table()); }

}  // namespace
}  // namespace kvant
