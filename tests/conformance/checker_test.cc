// The suite itself: bugs planted into the input of the oracle are found by Judge on
// this data. A bug that passes here could pass in an engine.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/harness.h"

namespace kvant::conformance {
namespace {

// The value at `at` of the data that a bug makes the engine see.
using Bug = std::function<double(const Fill& fill, Dims at, const Dims& dims)>;

struct Planted {
  std::string name;
  Case base;
  std::string input;  // which input, by name
  Bug bug;
};

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

Bug NextAlong(int axis) {
  return [axis](const Fill& fill, Dims at, const Dims& dims) {
    const size_t d = axis < 0 ? dims.size() + axis : axis;
    at[d] = (at[d] + 1) % dims[d];
    return fill(at);
  };
}

// Only the element of the last index along an axis is wrong: it is `value`.
Bug LastIs(int axis, double value) {
  return [axis, value](const Fill& fill, Dims at, const Dims& dims) {
    const size_t d = axis < 0 ? dims.size() + axis : axis;
    return at[d] == dims[d] - 1 ? value : fill(at);
  };
}

// Two's complement nibbles and pairs trade places.
double SwapPairs(const Fill& fill, Dims at, const Dims& dims) {
  if ((at.back() ^ 1) < dims.back()) at.back() ^= 1;
  return fill(at);
}

Case Base(DataType code) {
  Case c;
  c.kv_len = 257;
  c.q_len = 5;
  c.head_size = 64;
  c.k = {.type = code, .group_size = 16, .zero_points = code == kF32 ? kUndef : code};
  c.v = c.k;
  return c;
}

Case WithMask(Mask::Kind kind) {
  Case c = Base(kF32);
  c.masks = {{.kind = kind, .over = "nhrqs"}};
  return c;
}

std::vector<Planted> AllPlanted() {
  std::vector<Planted> all;
  for (const DataType code : {kF32, kS8, kU4, kS2}) {
    const Case base = Base(code);
    const std::string suffix = "_" + std::string(DataTypeName(code));
    all.push_back({"KeysOfTheWrongHead" + suffix, base, "k0", NextAlong(1)});
    all.push_back({"KeysOfTheWrongBatch" + suffix, base, "k0", NextAlong(0)});
    all.push_back({"ValuesOfTheWrongHead" + suffix, base, "v0", NextAlong(1)});
    all.push_back({"KeysOfTheNextToken" + suffix, base, "k0", NextAlong(-2)});
    all.push_back({"ValuesOfTheNextToken" + suffix, base, "v0", NextAlong(-2)});
    all.push_back({"KeysOfTheNextChannel" + suffix, base, "k0", NextAlong(-1)});
    all.push_back({"ValuesOfTheNextChannel" + suffix, base, "v0", NextAlong(-1)});
    all.push_back({"LastTokenOfValuesLost" + suffix, base, "v0", LastIs(-2, 0)});
    all.push_back({"LastChannelOfKeysLost" + suffix, base, "k0", LastIs(-1, 0)});
    if (code == kF32) continue;
    all.push_back({"PairsSwapped" + suffix, base, "k0", SwapPairs});
    all.push_back({"KeyZeroPointOfTheNextGroup" + suffix, base, "k0_zps", NextAlong(-1)});
    all.push_back({"ValueZeroPointOfTheNextGroup" + suffix, base, "v0_zps", NextAlong(-1)});
    all.push_back({"KeyScaleOfTheNextToken" + suffix, base, "k0_scales", NextAlong(-2)});
    all.push_back({"ValueScaleOfTheNextGroup" + suffix, base, "v0_scales", NextAlong(-1)});
  }
  all.push_back({"QueriesOfTheWrongHead", Base(kF32), "q", NextAlong(2)});
  all.push_back({"QueriesOfTheNextRow", Base(kF32), "q", NextAlong(-2)});
  all.push_back({"ScaleOffByATenThousandth", Base(kF32), "scale",
                 [](const Fill& fill, const Dims& at, const Dims&) { return fill(at) * 1.0001; }});
  all.push_back({"MaskOfTheNextColumn", WithMask(Mask::Kind::kAdditive), "mask0", NextAlong(-1)});
  all.push_back({"MaskOfTheNextHead", WithMask(Mask::Kind::kAdditive), "mask0", NextAlong(2)});
  all.push_back({"SelectOfTheNextRow", WithMask(Mask::Kind::kSelect), "mask0", NextAlong(-2)});
  all.push_back({"LastColumnUnmasked", WithMask(Mask::Kind::kAdditive), "mask0", LastIs(-1, 1)});
  return all;
}

Buffers WithBug(const Prepared& prepared, const std::string& name, const Bug& bug) {
  Buffers inputs;
  for (const CaseInput& input : prepared.graph.inputs) {
    if (input.name != name) {
      inputs.emplace(input.id, prepared.inputs.at(input.id));
      continue;
    }
    const LogicalTensor& tensor = prepared.graph.graph.tensor(input.id);
    inputs.emplace(input.id, FilledBuffer(tensor, [&](absl::Span<const int64_t> at) {
                     return bug(input.fill, Dims(at.begin(), at.end()), *tensor.dims);
                   }));
  }
  return inputs;
}

bool HasInput(const Prepared& prepared, const std::string& name) {
  for (const CaseInput& input : prepared.graph.inputs) {
    if (input.name == name) return true;
  }
  return false;
}

class CheckerTest : public testing::TestWithParam<Planted> {};

TEST_P(CheckerTest, BugIsFound) {
  const Planted& planted = GetParam();
  const absl::StatusOr<Prepared> prepared = Prepare(planted.base);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE(HasInput(*prepared, planted.input)) << planted.input;
  const auto right = RunOn("oracle", *prepared, prepared->inputs);
  const auto wrong = RunOn("oracle", *prepared, WithBug(*prepared, planted.input, planted.bug));
  ASSERT_TRUE(right.ok() && wrong.ok()) << right.status() << wrong.status();
  const Partition& partition = right->compiled.partition();
  EXPECT_EQ(Judge(partition, right->outputs, right->outputs), "");
  EXPECT_NE(Judge(partition, right->outputs, wrong->outputs), "");
}

INSTANTIATE_TEST_SUITE_P(Planted, CheckerTest, testing::ValuesIn(AllPlanted()),
                         [](const auto& info) { return info.param.name; });

// The outputs in the order that another partition has them in, by name.
std::vector<TestBuffer> InOrderOf(const Partition& order, const Outcome& outcome) {
  const Partition& own = outcome.compiled.partition();
  std::vector<TestBuffer> outputs;
  for (size_t i = 0; i < order.outputs().size(); ++i) {
    for (size_t j = 0; j < own.outputs().size(); ++j) {
      const bool same =
          own.output(static_cast<int>(j)).name == order.output(static_cast<int>(i)).name;
      if (same) outputs.push_back(outcome.outputs[j]);
    }
  }
  return outputs;
}

// How the oracle's result for the second case differs from that for the first.
void Compare(const Case& a, const Case& b, std::string& difference) {
  const absl::StatusOr<Prepared> left = Prepare(a), right = Prepare(b);
  ASSERT_TRUE(left.ok() && right.ok()) << left.status() << right.status();
  const auto x = RunOn("oracle", *left, left->inputs);
  const auto y = RunOn("oracle", *right, right->inputs);
  ASSERT_TRUE(x.ok() && y.ok()) << x.status() << y.status();
  difference = Judge(x->compiled.partition(), x->outputs, InOrderOf(x->compiled.partition(), *y));
}

// For two cases that differ in one property.
void ExpectDifferent(const Case& a, const Case& b) {
  std::string difference;
  Compare(a, b, difference);
  EXPECT_NE(difference, "");
}

void ExpectSame(const Case& a, const Case& b) {
  std::string difference = "not run";
  Compare(a, b, difference);
  EXPECT_EQ(difference, "") << a << "\n" << b;
}

// The first-class op has an oracle of its own; ops spelled out must agree with it.
TEST(CheckerTest, TheOpEqualsTheSpelledOutGraph) {
  for (const DataType code : {kF32, kU8, kS4}) {
    Case a = Base(code);
    a.form = Case::Form::k4D;
    a.ratio = 1;
    a.scale = Case::Scale::kDivide;  // the op's default
    for (const Mask::Kind kind : {Mask::Kind::kAdditive, Mask::Kind::kSelect, Mask::Kind::kCausal,
                                  Mask::Kind::kBottomRight}) {
      const bool band = kind == Mask::Kind::kCausal || kind == Mask::Kind::kBottomRight;
      a.masks = {{.kind = kind, .over = "nqs"}};
      a.stats = band;
      Case b = a;
      b.form = Case::Form::kFirstClass;
      if (band) b.masks.clear();
      b.right_window = band ? 0 : -1;
      b.bottom_right = kind == Mask::Kind::kBottomRight;
      ExpectSame(a, b);
    }
  }
  Case mqa = Base(kS8);
  mqa.form = Case::Form::k4D;
  mqa.kv_heads = 1;
  mqa.ratio = 6;
  mqa.scale = Case::Scale::kDivide;
  mqa.soft_cap = true;
  Case op = mqa;
  op.form = Case::Form::kFirstClass;
  ExpectSame(mqa, op);
  mqa.soft_cap = op.soft_cap = false;
  mqa.real_lengths = op.real_lengths = true;
  ExpectSame(mqa, op);
}

TEST(CheckerTest, CausalAlignmentMatters) {
  Case a = WithMask(Mask::Kind::kCausal), b = WithMask(Mask::Kind::kBottomRight);
  a.kv_len = b.kv_len = a.q_len + 1;  // one column apart
  ExpectDifferent(a, b);
}

TEST(CheckerTest, OrderOfMasksMatters) {
  Case a = Base(kF32), b = Base(kF32);
  const Mask bias{.kind = Mask::Kind::kAdditive, .over = "s"};
  const Mask causal{.kind = Mask::Kind::kCausal, .fill = -2};
  a.masks = {bias, causal};
  b.masks = {causal, bias};
  ExpectDifferent(a, b);
}

TEST(CheckerTest, RealLengthsMatter) {
  Case a = Base(kF32), b = Base(kF32);
  a.form = b.form = Case::Form::kFirstClass;
  a.real_lengths = true;
  ExpectDifferent(a, b);
}

TEST(CheckerTest, WritesOutsideElementsAreSeen) {
  const LogicalTensor tensor{.id = 1, .type = kF32, .dims = Dims{2, 3}, .strides = Dims{8, 1}};
  TestBuffer buffer = FilledBuffer(tensor, [](auto) { return 1.0; });
  EXPECT_TRUE(GapsIntact(tensor, buffer) && buffer.GuardIntact());
  buffer.data()[3 * sizeof(float)] = std::byte{0};
  EXPECT_FALSE(GapsIntact(tensor, buffer));
  buffer.data()[buffer.bytes()] = std::byte{0};
  EXPECT_FALSE(buffer.GuardIntact());
}

}  // namespace
}  // namespace kvant::conformance
