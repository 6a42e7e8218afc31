// KIVI's packing and rows of int4, against their definitions and kvant's DynamicDequantize.
#include <algorithm>
#include <array>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/engine.h"
#include "kvant/cache/import_export.h"
#include "kvant/graph/builder.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/cache/import_export_testing.h"

namespace kvant {
namespace {

using ::testing::AllOf;
using testing::ExpectSame;
using testing::Guarded;
using testing::HalfAt;
using ::testing::HasSubstr;
using testing::NibbleOf;
using testing::RandomBytes;
using testing::RawBytes;
using testing::SetHalf;
using testing::ValuesOf;

enum class Part { kKeys, kValues };

int64_t ElementsOf(const KiviShape& s) { return s.batch * s.heads * s.tokens * s.head_size; }

// Memory of either side: code, scale, mn.
struct Triple {
  explicit Triple(const KiviShape& s)
      : codes(ElementsOf(s) * s.bits / 8),
        scales(ElementsOf(s) / s.group * 2),
        minima(ElementsOf(s) / s.group * 2) {}
  void Fill(uint32_t seed) {
    for (Guarded* part : {&codes, &scales, &minima}) {
      const RawBytes bytes = RandomBytes(static_cast<int64_t>(part->bytes().size()), seed++);
      std::copy(bytes.begin(), bytes.end(), part->data());
    }
  }
  std::array<RawBytes, 3> bytes() const { return {codes.bytes(), scales.bytes(), minima.bytes()}; }
  KiviTensors kivi() { return {codes, scales, minima}; }
  ConstKiviTensors const_kivi() { return {codes, scales, minima}; }
  QuantizedTensors kvant() { return {codes, scales, minima}; }
  ConstQuantizedTensors const_kvant() { return {codes, scales, minima}; }

  Guarded codes, scales, minima;
};

absl::Status Import(Part part, const KiviShape& s, const ConstKiviTensors& from,
                    const QuantizedTensors& to) {
  return part == Part::kKeys ? ImportKiviKeys(s, from, to) : ImportKiviValues(s, from, to);
}

absl::Status Export(Part part, const KiviShape& s, const ConstQuantizedTensors& from,
                    const KiviTensors& to) {
  return part == Part::kKeys ? ExportKiviKeys(s, from, to) : ExportKiviValues(s, from, to);
}

// The values [B, H, T, D] of what KIVI holds.
std::vector<double> KiviValues(Part part, const KiviShape& s, const Triple& kivi) {
  const int64_t per_word = 32 / s.bits;
  const auto [code_bytes, scales, minima] = kivi.bytes();
  std::vector<double> values;
  for (int64_t head = 0; head < s.batch * s.heads; ++head) {
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t d = 0; d < s.head_size; ++d) {
        const bool keys = part == Part::kKeys;
        // The row of the matrix that is packed along its rows, the place in it and their extents.
        const int64_t row = head * (keys ? s.head_size : s.tokens) + (keys ? d : t);
        const int64_t place = keys ? t : d, length = keys ? s.tokens : s.head_size;
        const int64_t word = row * (length / per_word) + place / per_word;
        uint32_t packed = 0;
        for (int byte = 3; byte >= 0; --byte) packed = packed << 8 | code_bytes[4 * word + byte];
        const uint32_t code = packed >> (place % per_word * s.bits) & ((1u << s.bits) - 1);
        const int64_t group = row * (length / s.group) + place / s.group;
        values.push_back(code * double{F16ToF32(HalfAt(scales, group))} +
                         F16ToF32(HalfAt(minima, group)));
      }
    }
  }
  return values;
}

Dims GroupOf(Part part, const KiviShape& s) {
  return part == Part::kKeys ? Dims{1, 1, s.group, 1} : Dims{1, 1, 1, s.group};
}

std::vector<double> KvantValues(Part part, const KiviShape& s, const Triple& kvant) {
  const auto [codes, scales, minima] = kvant.bytes();
  return ValuesOf(s.bits == 2 ? kU2 : kU4, codes, scales, minima, {}, ElementsOf(s),
                  [&](int64_t i) {
                    const int64_t d = i % s.head_size, row = i / s.head_size;
                    return part == Part::kKeys ? row / s.group * s.head_size + d : i / s.group;
                  });
}

struct KiviCase {
  Part part;
  KiviShape shape;

  std::string name() const {
    const KiviShape& s = shape;
    return absl::StrCat(part == Part::kKeys ? "keys" : "values", "_", s.batch, "x", s.heads, "x",
                        s.tokens, "x", s.head_size, "_g", s.group, "_b", s.bits);
  }
  // So that GoogleTest does not print bytes.
  friend std::ostream& operator<<(std::ostream& out, const KiviCase& test) {
    return out << test.name();
  }
};

const std::vector<KiviCase>& KiviCases() {
  static const auto* const cases = new std::vector<KiviCase>{
      {Part::kKeys, {1, 1, 16, 1, 16, 2}},    {Part::kKeys, {2, 3, 48, 5, 16, 2}},
      {Part::kKeys, {1, 2, 64, 64, 32, 2}},   {Part::kKeys, {2, 1, 32, 7, 8, 2}},
      {Part::kKeys, {1, 3, 160, 33, 160, 2}}, {Part::kKeys, {2, 3, 24, 5, 8, 4}},
      {Part::kKeys, {1, 2, 96, 80, 32, 4}},   {Part::kKeys, {3, 1, 8, 9, 1, 4}},
      {Part::kKeys, {2, 2, 0, 16, 32, 4}},    {Part::kValues, {1, 1, 1, 16, 16, 2}},
      {Part::kValues, {2, 3, 5, 48, 16, 2}},  {Part::kValues, {1, 2, 31, 64, 32, 2}},
      {Part::kValues, {2, 1, 7, 32, 8, 2}},   {Part::kValues, {2, 3, 5, 24, 8, 4}},
      {Part::kValues, {1, 2, 17, 80, 40, 4}}, {Part::kValues, {1, 0, 17, 80, 40, 4}},
  };
  return *cases;
}

class KiviTest : public ::testing::TestWithParam<KiviCase> {};

// f16 patterns as they come, NaN and infinity among them.
TEST_P(KiviTest, ValuesAndBytesSurviveBothWays) {
  const auto& [part, shape] = GetParam();
  for (uint32_t seed = 0; seed < 5; ++seed) {
    Triple kivi(shape), kvant(shape), again(shape);
    kivi.Fill(3 * seed);
    ASSERT_TRUE(Import(part, shape, kivi.const_kivi(), kvant.kvant()).ok());
    ExpectSame(KvantValues(part, shape, kvant), KiviValues(part, shape, kivi));
    ASSERT_TRUE(Export(part, shape, kvant.const_kvant(), again.kivi()).ok());
    EXPECT_EQ(again.bytes(), kivi.bytes());

    kvant.Fill(100 + seed);
    ASSERT_TRUE(Export(part, shape, kvant.const_kvant(), kivi.kivi()).ok());
    ExpectSame(KiviValues(part, shape, kivi), KvantValues(part, shape, kvant));
    ASSERT_TRUE(Import(part, shape, kivi.const_kivi(), again.kvant()).ok());
    EXPECT_EQ(again.bytes(), kvant.bytes());
  }
}

// Values need no second copy of their codes.
TEST_P(KiviTest, CodesOfValuesKeepTheirBytes) {
  const auto& [part, shape] = GetParam();
  if (part == Part::kKeys) return;
  Triple kivi(shape), kvant(shape);
  kivi.Fill(5);
  ASSERT_TRUE(Import(part, shape, kivi.const_kivi(), kvant.kvant()).ok());
  EXPECT_EQ(kvant.codes.bytes(), kivi.codes.bytes());
}

// Codes, scales and zero points as the op defines their values.
std::vector<double> Dequantized(DataType type, const Dims& dims, const Dims& group,
                                const std::array<RawBytes, 3>& tensors) {
  GraphBuilder g;
  Dims groups = dims;
  for (size_t i = 0; i < groups.size(); ++i) groups[i] /= group[i];
  const Value codes = g.Input("codes", type, dims);
  const Value scales = g.Input("scales", kF16, groups);
  const Value zero_points = g.Input("zero_points", kF16, groups);
  g.Output("values",
           g.DynamicDequantize(codes, scales, zero_points, {.group_shape = group, .type = kF32}));
  const absl::StatusOr<Graph> graph = std::move(g).Build();
  EXPECT_TRUE(graph.ok()) << graph.status();
  const auto partitions = PartitionGraph(*graph);
  const absl::StatusOr<Engine> engine = Engine::Create({.backends = {"oracle"}});
  const auto compiled = engine->Compile(partitions->at(0));
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  std::vector<float> values(*CheckedProduct(dims));
  std::array<ConstTensor, 3> inputs;
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = {tensors[i].data(), tensors[i].size()};
  const Tensor outputs[] = {{values.data(), values.size() * sizeof(float)}};
  const absl::Status status = compiled->Execute(Stream(*engine), inputs, outputs);
  EXPECT_TRUE(status.ok()) << status;
  return {values.begin(), values.end()};
}

// Clears an exponent's highest bit: neither infinite nor NaN.
void MakeFinite(Guarded& halves) {
  const auto size = static_cast<int64_t>(halves.bytes().size());
  for (int64_t i = 1; i < size; i += 2) halves.data()[i] &= 0xBF;
}

std::vector<double> Rounded(std::vector<double> values) {
  for (double& value : values) value = static_cast<float>(value);
  return values;
}

// DynamicDequantize makes of what was imported what KIVI would.
TEST_P(KiviTest, TheOpReadsTheSameValues) {
  const auto& [part, shape] = GetParam();
  if (ElementsOf(shape) == 0) return;
  Triple kivi(shape), kvant(shape);
  kivi.Fill(8);
  MakeFinite(kivi.scales);
  MakeFinite(kivi.minima);
  ASSERT_TRUE(Import(part, shape, kivi.const_kivi(), kvant.kvant()).ok());
  const Dims dims = {shape.batch, shape.heads, shape.tokens, shape.head_size};
  ExpectSame(Dequantized(shape.bits == 2 ? kU2 : kU4, dims, GroupOf(part, shape), kvant.bytes()),
             Rounded(KiviValues(part, shape, kivi)));
}

INSTANTIATE_TEST_SUITE_P(Shapes, KiviTest, ::testing::ValuesIn(KiviCases()),
                         [](const auto& info) { return info.param.name(); });

// A head of a cache with room for more tokens is imported by itself, and the others stay.
TEST(Kivi, OneHeadOfACacheWithRoom) {
  const KiviShape one = {1, 1, 16, 5, 8, 4};
  Triple kivi(one), head(one);
  kivi.Fill(4);
  ASSERT_TRUE(ImportKiviKeys(one, kivi.const_kivi(), head.kvant()).ok());
  const KiviShape room = {1, 3, 24, 5, 8, 4};
  Triple cache(room);
  cache.Fill(9);
  const auto before = cache.bytes();
  const auto at = [](Guarded& part) {
    const auto bytes = static_cast<int64_t>(part.bytes().size());
    return Tensor{part.data() + bytes / 3, static_cast<size_t>(bytes / 3)};
  };
  ASSERT_TRUE(
      ImportKiviKeys(one, kivi.const_kivi(), {at(cache.codes), at(cache.scales), at(cache.minima)})
          .ok());
  const auto after = cache.bytes(), imported = head.bytes();
  for (size_t part = 0; part < after.size(); ++part) {
    RawBytes want = before[part];
    std::copy(imported[part].begin(), imported[part].end(),
              want.begin() + static_cast<int64_t>(want.size()) / 3);
    EXPECT_EQ(after[part], want);
  }
}

TEST(Kivi, RefusesWithNumbers) {
  const KiviShape good = {2, 3, 32, 64, 32, 2};
  Triple kivi(good), kvant(good);
  kivi.Fill(1);
  const auto before = kvant.bytes();
  const auto expect = [&](Part part, const KiviShape& shape, const ConstKiviTensors& from,
                          const QuantizedTensors& to, const std::string& message) {
    const absl::Status status = Import(part, shape, from, to);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(part == Part::kKeys ? "import from KIVI's keys: "
                                                    : "import from KIVI's values: "),
                      HasSubstr(message)));
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_EQ(kvant.bytes(), before);
  };
  const auto bad_shape = [&](Part part, const KiviShape& shape, const std::string& message) {
    expect(part, shape, kivi.const_kivi(), kvant.kvant(), message);
  };
  bad_shape(Part::kKeys, {2, 3, 32, 64, 32, 8}, "codes of 8 bits; it takes 2 and 4");
  bad_shape(Part::kKeys, {2, 3, 40, 64, 32, 2}, "tokens 40 is not a multiple of the group, 32");
  bad_shape(Part::kKeys, {2, 3, 40, 64, 8, 2},
            "tokens 40 is not a multiple of the codes of a word, 16");
  bad_shape(Part::kValues, {2, 3, 32, 72, 32, 4},
            "head size 72 is not a multiple of the group, 32");
  bad_shape(Part::kValues, {2, 3, 32, 36, 4, 4},
            "head size 36 is not a multiple of the codes of a word, 8");
  bad_shape(Part::kValues, {2, 3, 32, 64, 0, 2}, "head size 64 is not a multiple of the group, 0");
  bad_shape(Part::kKeys, {2, 3, 32, 64, -32, 2}, "tokens 32 is not a multiple of the group, -32");
  bad_shape(Part::kKeys, {2, -3, 32, 64, 32, 2}, "heads is -3");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 64 / 32;
  bad_shape(Part::kKeys, {kHuge, 3, 32, 64, 32, 2}, "overflow 64 bits");
  bad_shape(Part::kKeys, {3, 3, 32, 64, 32, 2}, "code has 3072 bytes, needs 4608");

  ConstKiviTensors from = kivi.const_kivi();
  from.mn.bytes -= 1;
  expect(Part::kKeys, good, from, kvant.kvant(), "mn has 767 bytes, needs 768");
  QuantizedTensors to = kvant.kvant();
  to.zero_points = {};
  expect(Part::kValues, good, kivi.const_kivi(), to, "zero points has 0 bytes, needs 768");
  to = kvant.kvant();
  to.scales.bytes = 5;
  expect(Part::kValues, good, kivi.const_kivi(), to, "scales has 5 bytes, needs 768");

  const auto kivi_before = kivi.bytes();
  KiviTensors small = kivi.kivi();
  small.scale.bytes = 700;
  EXPECT_THAT(std::string(ExportKiviKeys(good, kvant.const_kvant(), small).message()),
              HasSubstr("export to KIVI's keys: scale has 700 bytes, needs 768"));
  EXPECT_EQ(kivi.bytes(), kivi_before);
}

// --- Rows of int4 -----------------------------------------------------------

struct RowShape {
  int64_t rows, length, groups;
};

struct RowTensors {
  explicit RowTensors(const RowShape& s)
      : codes(s.rows * s.length / 2), scales(s.rows * s.groups * 2), zero_points(scales.bytes()) {}
  QuantizedTensors tensors() { return {codes, scales, zero_points}; }
  ConstQuantizedTensors const_tensors() { return {codes, scales, zero_points}; }
  std::array<RawBytes, 3> bytes() const {
    return {codes.bytes(), scales.bytes(), zero_points.bytes()};
  }

  Guarded codes, scales, zero_points;
};

int64_t RowBytes(const RowShape& s) { return s.rows * (4 * s.groups + s.length / 2); }

std::vector<double> RowValues(const RowShape& s, const RawBytes& data) {
  std::vector<double> values;
  for (int64_t row = 0; row < s.rows; ++row) {
    const RawBytes bytes(data.begin() + row * (RowBytes(s) / s.rows),
                         data.begin() + (row + 1) * (RowBytes(s) / s.rows));
    for (int64_t d = 0; d < s.length; ++d) {
      const int64_t group = d / (s.length / s.groups);
      const int code = NibbleOf(bytes[4 * s.groups + d / 2], d % 2 == 1);
      values.push_back(code * double{F16ToF32(HalfAt(bytes, 2 * group))} +
                       F16ToF32(HalfAt(bytes, 2 * group + 1)));
    }
  }
  return values;
}

TEST(RowInt4, ValuesAndBytesSurviveBothWays) {
  for (const RowShape s : {RowShape{16384, 128, 4},
                           {65536, 16, 1},
                           {1, 128, 1},
                           {7, 128, 4},
                           {5, 80, 4},
                           {3, 6, 2},
                           {2, 8, 8},
                           {0, 128, 4},
                           {3, 0, 1}}) {
    SCOPED_TRACE(::testing::Message() << s.rows << " " << s.length << " " << s.groups);
    RawBytes data = RandomBytes(RowBytes(s), 6);
    for (int64_t row = 0; row < s.rows; ++row) {
      for (int64_t group = 0; group < s.groups; ++group) {
        const int64_t at = row * (RowBytes(s) / s.rows) + 4 * group;
        const auto number = static_cast<uint32_t>(row * s.groups + group);
        SetHalf(data, at, number);
        SetHalf(data, at + 2, number * 40503);
      }
    }
    RowTensors kvant(s);
    Guarded foreign(data), again(RowBytes(s));
    ASSERT_TRUE(ImportRowInt4(s.rows, s.length, s.groups, foreign, kvant.tensors()).ok());
    ExpectSame(
        ValuesOf(kU4, kvant.codes.bytes(), kvant.scales.bytes(), kvant.zero_points.bytes(), {},
                 s.rows * s.length, [&](int64_t i) { return i / (s.length / s.groups); }),
        RowValues(s, data));
    ASSERT_TRUE(ExportRowInt4(s.rows, s.length, s.groups, kvant.const_tensors(), again).ok());
    EXPECT_EQ(again.bytes(), data);
  }
}

TEST(RowInt4, TheOpReadsTheSameValues) {
  const RowShape s = {6, 24, 4};
  RawBytes data = RandomBytes(RowBytes(s), 2);
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t i = 1; i < 4 * s.groups; i += 2) data[row * (RowBytes(s) / s.rows) + i] &= 0xBF;
  }
  RowTensors kvant(s);
  ASSERT_TRUE(
      ImportRowInt4(s.rows, s.length, s.groups, {data.data(), data.size()}, kvant.tensors()).ok());
  ExpectSame(Dequantized(kU4, {s.rows, s.length}, {1, s.length / s.groups}, kvant.bytes()),
             Rounded(RowValues(s, data)));
}

TEST(RowInt4, RefusesWithNumbers) {
  const RowShape s = {3, 128, 4};
  Guarded data(RandomBytes(RowBytes(s), 1));
  RowTensors kvant(s);
  const auto expect = [&](int64_t rows, int64_t length, int64_t groups, ConstTensor from,
                          const QuantizedTensors& to, const std::string& message) {
    const RawBytes codes = kvant.codes.bytes(), scales = kvant.scales.bytes();
    const absl::Status status = ImportRowInt4(rows, length, groups, from, to);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("import from row-wise int4: "), HasSubstr(message)));
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_EQ(kvant.codes.bytes(), codes);
    EXPECT_EQ(kvant.scales.bytes(), scales);
  };
  const QuantizedTensors to = kvant.tensors();
  expect(3, 127, 1, data, to, "row length 127 is not a multiple of the codes of a byte, 2");
  expect(3, 128, 3, data, to, "row length 128 is not a multiple of the number of groups, 3");
  expect(3, 128, 0, data, to, "row length 128 is not a multiple of the number of groups, 0");
  expect(-3, 128, 4, data, to, "rows is -3");
  expect(std::numeric_limits<int64_t>::max() / 64, 128, 4, data, to, "overflow 64 bits");
  expect(std::numeric_limits<int64_t>::max() / 64, 0, 4, data, to, "overflow 64 bits");
  expect(4, 128, 4, data, to, "data has 240 bytes, needs 320");
  QuantizedTensors small = to;
  small.zero_points.bytes = 23;
  expect(3, 128, 4, data, small, "zero points has 23 bytes, needs 24");
  const RawBytes before = data.bytes();
  const absl::Status status =
      ExportRowInt4(3, 128, 4, {{kvant.codes.data(), 191}, kvant.scales, kvant.zero_points}, data);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("export to row-wise int4: codes has 191 bytes, needs 192"));
  EXPECT_EQ(data.bytes(), before);
}

}  // namespace
}  // namespace kvant
