// Every combination of data types that oneDNN's Graph API takes or refuses (tests/data/README.md)
// beside what kvant does.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/op.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using Row = std::vector<DataType>;  // of the inputs, then of the outputs

// Ops of which kvant takes types that oneDNN refuses.
constexpr std::pair<OpKind, const char*> kSupersets[] = {
    {OpKind::kMatMul, "f32 beside a half, as gradients of scores that stay f32"},
    {OpKind::kSoftMaxBackward, "likewise"},
    {OpKind::kMultiply, "s32, as Add and Subtract"},
    {OpKind::kDivide, "likewise"},
    {OpKind::kMaximum, "mixtures and s32, as Add and Subtract"},
    {OpKind::kMinimum, "likewise"},
    {OpKind::kSelect, "moves elements of any type, as indices of masks"},
    {OpKind::kGenIndex, "looks at no element"},
    {OpKind::kStaticReshape, "moves elements of any type, as codes of a cache"},
    {OpKind::kStaticTranspose, "likewise"},
    {OpKind::kReorder, "likewise"},
    {OpKind::kConcat, "likewise"},
    {OpKind::kTypeCast, "to the same type: converts nothing"},
    {OpKind::kDropout, "seeds of s32; masks of s8 and boolean"},
    {OpKind::kDequantize, "zero points of f8"},
    {OpKind::kDynamicQuantize, "any codes, groups, scales of halves, and computed parameters"},
    {OpKind::kDynamicDequantize, "f8; scales of another type than the result; real zero points"},
    {OpKind::kEnd, "marks an output of any type"},
};

// An op with so many ports and these attributes, and the rows that oneDNN takes.
struct Form {
  std::string text;  // the line that says so
  Op op;
  size_t inputs = 0, outputs = 0;
  std::set<Row> taken;
};

DataType TypeOf(absl::string_view name) {
  const auto type = DataTypeFromName(std::string_view(name.data(), name.size()));
  EXPECT_TRUE(type) << name;
  return type.value_or(kUndef);
}

void SetNumber(absl::string_view text, int64_t* value) {
  EXPECT_TRUE(absl::SimpleAtoi(text, value)) << text;
}

// "axis=0", by the attribute's type; lists have one element.
void SetAttribute(absl::string_view word, Attributes* attrs) {
  const std::vector<std::string> parts = absl::StrSplit(word, '=');
  const std::optional<Attr> attr = AttrFromName(parts.at(0));
  ASSERT_TRUE(attr) << word;
  AttrValue value = ZeroOf(*attr);
  int64_t number = 0;
  if (!std::holds_alternative<std::string>(value)) SetNumber(parts.at(1), &number);
  if (auto* one = std::get_if<int64_t>(&value)) *one = number;
  if (auto* flag = std::get_if<bool>(&value)) *flag = number != 0;
  if (auto* text = std::get_if<std::string>(&value)) *text = parts.at(1);
  if (auto* list = std::get_if<std::vector<int64_t>>(&value)) *list = {number};
  if (auto* list = std::get_if<std::vector<float>>(&value)) *list = {static_cast<float>(number)};
  attrs->Set(*attr, std::move(value));
}

struct Table {
  std::vector<DataType> types;
  std::vector<Form> forms;
};

// "Dropout 4 -> 2", then rows as "  f32 s64 s64 f32 -> f32 u8".
Table ReadTable() {
  Table table;
  std::ifstream file(absl::StrCat(KVANT_TEST_DATA_DIR, "/onednn_types.txt"));
  for (std::string line; std::getline(file, line);) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.empty() || words[0] == "#") continue;
    if (words[0] == "types") {
      for (size_t i = 1; i < words.size(); ++i) table.types.push_back(TypeOf(words[i]));
    } else if (line[0] == ' ') {
      Row row;
      for (absl::string_view word : words) {
        if (word != "->") row.push_back(TypeOf(word));
      }
      table.forms.back().taken.insert(std::move(row));
    } else {
      Form& form = table.forms.emplace_back();
      form.text = line;
      const auto kind = OpKindFromName(std::string_view(words[0].data(), words[0].size()));
      EXPECT_TRUE(kind) << line;
      form.op.kind = kind.value_or(OpKind::kWildcard);
      form.op.name = "op";
      int64_t inputs = 0, outputs = 0;
      SetNumber(words[1], &inputs);
      SetNumber(words[3], &outputs);
      form.inputs = inputs;
      form.outputs = outputs;
      for (size_t i = 4; i < words.size(); ++i) SetAttribute(words[i], &form.op.attrs);
    }
  }
  return table;
}

bool Takes(const Form& form, const Row& row) {
  std::vector<LogicalTensor> tensors(row.size());
  std::vector<const LogicalTensor*> ports;
  Op op = form.op;
  for (size_t i = 0; i < row.size(); ++i) {
    tensors[i].id = i;
    tensors[i].type = row[i];
    ports.push_back(&tensors[i]);
    if (i < form.inputs) {
      op.inputs.push_back(i);
    } else {
      op.outputs.push_back(i);
    }
  }
  return CheckSchema(op, absl::MakeSpan(ports).first(form.inputs),
                     absl::MakeSpan(ports).subspan(form.inputs))
      .ok();
}

// Changes places from `first` on to each other type, up to `changes` of them.
void AddNeighbours(const Table& table, const Row& row, size_t first, int changes,
                   std::set<Row>* rows) {
  rows->insert(row);
  if (changes == 0) return;
  for (size_t place = first; place < row.size(); ++place) {
    for (const DataType type : table.types) {
      Row changed = row;
      changed[place] = type;
      AddNeighbours(table, changed, place + 1, changes - 1, rows);
    }
  }
}

// All rows, or of more than four ports those that differ from a row that oneDNN takes in two.
std::set<Row> RowsOf(const Table& table, const Form& form) {
  std::set<Row> rows;
  const size_t ports = form.inputs + form.outputs;
  if (ports <= 4) {
    AddNeighbours(table, Row(ports, kF32), 0, static_cast<int>(ports), &rows);
  } else {
    for (const Row& taken : form.taken) AddNeighbours(table, taken, 0, 2, &rows);
  }
  return rows;
}

std::string TextOf(const Row& row) {
  return absl::StrJoin(row, " ", [](std::string* out, DataType type) {
    absl::StrAppend(out, std::string(DataTypeName(type)));
  });
}

TEST(OneDnnTypes, AreTaken) {
  const Table table = ReadTable();
  size_t taken = 0;
  for (const Form& form : table.forms) {
    for (const Row& row : form.taken) {
      EXPECT_TRUE(Takes(form, row)) << form.text << ": " << TextOf(row);
    }
    taken += form.taken.size();
  }
  EXPECT_GT(taken, 600u) << "is tests/data/onednn_types.txt whole?";
}

TEST(OneDnnTypes, EveryOpIsCompared) {
  std::set<OpKind> own = {
      OpKind::kAppend,    OpKind::kAppendPages,    OpKind::kLoadTokens,
      OpKind::kLoadPages, OpKind::kLoadRanges,     OpKind::kHadamard,
      OpKind::kSlice,     OpKind::kMergeAttention, OpKind::kScaledDotProductAttention};
  for (const Form& form : ReadTable().forms) own.insert(form.op.kind);
  EXPECT_THAT(own, ::testing::ElementsAreArray(kAllOpKinds));
}

TEST(OneDnnTypes, WhatElseIsTakenHasAReason) {
  const Table table = ReadTable();
  std::set<OpKind> wider;
  for (const Form& form : table.forms) {
    for (const Row& row : RowsOf(table, form)) {
      if (form.taken.count(row) > 0 || !Takes(form, row)) continue;
      const bool named =
          std::any_of(std::begin(kSupersets), std::end(kSupersets),
                      [&](const auto& entry) { return entry.first == form.op.kind; });
      ASSERT_TRUE(named) << form.text << ": oneDNN refuses " << TextOf(row);
      wider.insert(form.op.kind);
    }
  }
  for (const auto& [kind, reason] : kSupersets) {
    EXPECT_EQ(wider.count(kind), 1u) << OpKindName(kind) << " (" << reason << ") takes no more";
  }
}

}  // namespace
}  // namespace kvant
