#include "kvant/cache/import_export.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/graph/status.h"
#include "kvant/tests/cache/import_export_testing.h"
#include "kvant/tools/safetensors.h"
#include "kvant_test_config.h"

namespace kvant {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using testing::ExpectSame;
using testing::Guarded;
using testing::NibbleOf;
using testing::RandomBytes;
using testing::RawBytes;
using testing::SetHalf;
using testing::ValuesOf;

constexpr GgmlBlock kGgmlBlocks[] = {
#define KVANT_GGML_BLOCK(name, ...) GgmlBlock::name,
#include "kvant/cache/ggml_blocks.inc"
};

struct BlockTensors {
  BlockTensors(GgmlBlock kind, int64_t blocks)
      : codes(blocks * 32 * BitsOf(InfoOf(kind).codes) / 8),
        scales(blocks * 2),
        zero_points(InfoOf(kind).zero_points ? blocks * 2 : 0),
        has_zero_points(InfoOf(kind).zero_points) {}

  QuantizedTensors tensors() {
    return {codes, scales, has_zero_points ? Tensor(zero_points) : Tensor{}};
  }
  ConstQuantizedTensors const_tensors() {
    return {codes, scales, has_zero_points ? ConstTensor(zero_points) : ConstTensor{}};
  }

  Guarded codes, scales, zero_points;
  bool has_zero_points;
};

// What ggml's headers say that a block stands for.
std::vector<double> BlockValues(GgmlBlock kind, const RawBytes& blocks) {
  constexpr int kLevels[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
  const int64_t size = InfoOf(kind).bytes;
  std::vector<double> values;
  for (int64_t start = 0; start < static_cast<int64_t>(blocks.size()); start += size) {
    const uint8_t* block = blocks.data() + start;
    const double d = F16ToF32(static_cast<uint16_t>(block[0] | block[1] << 8));
    const double m = F16ToF32(static_cast<uint16_t>(block[2] | block[3] << 8));
    for (int j = 0; j < 32; ++j) {
      switch (kind) {
        case GgmlBlock::kQ8_0:
          values.push_back(d * static_cast<int8_t>(block[2 + j]));
          break;
        case GgmlBlock::kQ4_0:
          values.push_back(d * (NibbleOf(block[2 + j % 16], j >= 16) - 8));
          break;
        case GgmlBlock::kQ4_1:
          values.push_back(d * NibbleOf(block[4 + j % 16], j >= 16) + m);
          break;
        case GgmlBlock::kIq4Nl:
          values.push_back(d * kLevels[NibbleOf(block[2 + j % 16], j >= 16)]);
          break;
      }
    }
  }
  return values;
}

std::vector<double> ImportedValues(GgmlBlock kind, int64_t rows, int64_t row_length,
                                   const RawBytes& blocks) {
  const GgmlBlockInfo& info = InfoOf(kind);
  BlockTensors kvant(kind, rows * row_length / 32);
  const absl::Status status =
      ImportGgmlBlocks(kind, rows, row_length, {blocks.data(), blocks.size()}, kvant.tensors());
  EXPECT_TRUE(status.ok()) << status;
  return ValuesOf(info.codes, kvant.codes.bytes(), kvant.scales.bytes(), kvant.zero_points.bytes(),
                  info.codebook, rows * row_length, [](int64_t i) { return i / 32; });
}

class GgmlBlockTest : public ::testing::TestWithParam<GgmlBlock> {};

// Every f16 as scale and as minimum, every code at every place of a block.
TEST_P(GgmlBlockTest, EveryBlockKeepsItsValuesAndBytes) {
  const GgmlBlockInfo& info = InfoOf(GetParam());
  constexpr int64_t kRows = 512, kLength = 4096, kBlocks = kRows * kLength / 32;
  static_assert(kBlocks == 65536);
  RawBytes blocks = RandomBytes(kBlocks * info.bytes, 1);
  for (uint32_t i = 0; i < kBlocks; ++i) {
    SetHalf(blocks, i * info.bytes, i);
    if (info.zero_points) SetHalf(blocks, i * info.bytes + 2, i * 40503);
  }
  ExpectSame(ImportedValues(GetParam(), kRows, kLength, blocks), BlockValues(GetParam(), blocks));

  BlockTensors kvant(GetParam(), kBlocks);
  Guarded again(static_cast<int64_t>(blocks.size()));
  ASSERT_TRUE(
      ImportGgmlBlocks(GetParam(), kRows, kLength, {blocks.data(), blocks.size()}, kvant.tensors())
          .ok());
  ASSERT_TRUE(ExportGgmlBlocks(GetParam(), kRows, kLength, kvant.const_tensors(), again).ok());
  EXPECT_EQ(again.bytes(), blocks);
}

TEST_P(GgmlBlockTest, EveryTensorComesBackAsItWas) {
  const GgmlBlockInfo& info = InfoOf(GetParam());
  for (const auto& [rows, length] :
       {std::pair{1, 32}, {3, 32}, {1, 96}, {5, 160}, {7, 64}, {4, 0}}) {
    const int64_t blocks = rows * length / 32;
    BlockTensors kvant(GetParam(), blocks), again(GetParam(), blocks);
    for (Guarded* part : {&kvant.codes, &kvant.scales, &kvant.zero_points}) {
      const RawBytes bytes = RandomBytes(static_cast<int64_t>(part->bytes().size()), 7 + length);
      std::copy(bytes.begin(), bytes.end(), part->data());
    }
    Guarded foreign(blocks * info.bytes);
    ASSERT_TRUE(ExportGgmlBlocks(GetParam(), rows, length, kvant.const_tensors(), foreign).ok());
    ASSERT_TRUE(ImportGgmlBlocks(GetParam(), rows, length, foreign, again.tensors()).ok());
    EXPECT_EQ(again.codes.bytes(), kvant.codes.bytes());
    EXPECT_EQ(again.scales.bytes(), kvant.scales.bytes());
    EXPECT_EQ(again.zero_points.bytes(), kvant.zero_points.bytes());
    ExpectSame(ImportedValues(GetParam(), rows, length, foreign.bytes()),
               BlockValues(GetParam(), foreign.bytes()));
  }
}

// gguf's reader is the second opinion (tests/data/README.md).
TEST_P(GgmlBlockTest, ReadsAsGgufDoes) {
  const auto file = ReadSafeTensors(std::string(KVANT_TEST_DATA_DIR) + "/ggml_blocks.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string name(InfoOf(GetParam()).name);
  const SafeTensor& blocks = file->at(name + ".blocks");
  const SafeTensor& want = file->at(name + ".values");
  RawBytes bytes(blocks.data.size());
  std::memcpy(bytes.data(), blocks.data.data(), bytes.size());
  const auto values = ImportedValues(GetParam(), want.dims[0], want.dims[1], bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(static_cast<float>(values[i]),
              static_cast<float>(LoadElement(kF32, want.data.data(), static_cast<int64_t>(i))))
        << i;
  }
}

// Whatever is wrong, nothing is written.
TEST_P(GgmlBlockTest, RefusesWithNumbers) {
  const GgmlBlockInfo& info = InfoOf(GetParam());
  const std::string name(info.name);
  Guarded blocks(RandomBytes(6 * info.bytes, 3));
  BlockTensors kvant(GetParam(), 6);
  const auto expect = [&](int64_t rows, int64_t length, ConstTensor from,
                          const QuantizedTensors& to, const auto& message) {
    const RawBytes codes = kvant.codes.bytes(), scales = kvant.scales.bytes();
    const absl::Status status = ImportGgmlBlocks(GetParam(), rows, length, from, to);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("import from " + name), HasSubstr(message)));
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_EQ(kvant.codes.bytes(), codes);
    EXPECT_EQ(kvant.scales.bytes(), scales);
  };
  const QuantizedTensors to = kvant.tensors();
  expect(2, 48, blocks, to, "row length 48 is not a multiple of a block's elements, 32");
  expect(-1, 96, blocks, to, "rows is -1");
  expect(2, -32, blocks, to, "row length is -32");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 1024;
  expect(kHuge, 32, blocks, to, "overflow 64 bits");
  const std::string needed = std::to_string(6 * info.bytes);
  expect(2, 96, {blocks.data(), static_cast<size_t>(6 * info.bytes - 1)}, to,
         "blocks has " + std::to_string(6 * info.bytes - 1) + " bytes, needs " + needed);
  expect(2, 96, {nullptr, 1000}, to, "blocks has 0 bytes, needs " + needed);
  QuantizedTensors small = to;
  small.codes.bytes -= 1;
  expect(2, 96, blocks, small, "codes has " + std::to_string(small.codes.bytes) + " bytes, needs");
  small = to;
  small.scales.bytes = 11;
  expect(2, 96, blocks, small, "scales has 11 bytes, needs 12");
  QuantizedTensors other = to;
  if (info.zero_points) {
    other.zero_points = {};
    expect(2, 96, blocks, other, "zero points has 0 bytes, needs 12");
  } else {
    other.zero_points = kvant.scales;
    expect(2, 96, blocks, other, "has no minimum, but 12 bytes are given for zero points");
  }

  const RawBytes before = blocks.bytes();
  const absl::Status status =
      ExportGgmlBlocks(GetParam(), 2, 96, {{kvant.codes.data(), 1}, kvant.scales}, blocks);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("export to " + name), HasSubstr("codes has 1 bytes, needs")));
  EXPECT_EQ(blocks.bytes(), before);
}

INSTANTIATE_TEST_SUITE_P(Formats, GgmlBlockTest, ::testing::ValuesIn(kGgmlBlocks),
                         [](const auto& param) { return std::string(InfoOf(param.param).name); });

TEST(GgmlBlocks, RowsOfTheTableHoldTogether) {
  for (const GgmlBlock kind : kGgmlBlocks) {
    const GgmlBlockInfo& info = InfoOf(kind);
    EXPECT_EQ(info.elements, 32) << info.name;
    EXPECT_EQ(info.bytes, BytesFor(info.codes, 32) + (info.zero_points ? 4 : 2)) << info.name;
  }
  BlockTensors kvant(GgmlBlock::kQ8_0, 1);
  Guarded blocks(34);
  const auto none = static_cast<GgmlBlock>(std::size(kGgmlBlocks));
  EXPECT_THAT(std::string(ImportGgmlBlocks(none, 1, 32, blocks, kvant.tensors()).message()),
              HasSubstr("ggml block 4 is none of 4"));
}

}  // namespace
}  // namespace kvant
