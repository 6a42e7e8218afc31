#include "kvant/tools/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace kvant {
namespace {

using ::testing::HasSubstr;

std::string File(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  return out + header + data;
}

TEST(SafeTensorsTest, ReadsWhatItWrites) {
  SafeTensors tensors;
  int value = 0;
  for (DataType type : {kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kS8, kU8, kS32, kS64, kBoolean}) {
    SafeTensor& tensor = tensors[std::string(DataTypeName(type))];
    tensor.type = type;
    tensor.dims = {2, 3};
    tensor.data.resize(6 * BitsOf(type) / 8);
    for (std::byte& byte : tensor.data) byte = static_cast<std::byte>(value++);
  }
  tensors["scalar"] = {.type = kU8, .dims = {}, .data = {std::byte{7}}};
  tensors["empty"] = {.type = kF32, .dims = {4, 0}, .data = {}};
  const std::string bytes = SerializeSafeTensors(tensors);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ(header % 8, 0u);
  const absl::StatusOr<SafeTensors> read = ParseSafeTensors(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read->at(name).type, tensor.type) << name;
    EXPECT_EQ(read->at(name).dims, tensor.dims) << name;
    EXPECT_EQ(read->at(name).data, tensor.data) << name;
  }
}

TEST(SafeTensorsTest, IgnoresMetadata) {
  const auto read = ParseSafeTensors(File(
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->size(), 1u);
}

TEST(SafeTensorsTest, RefusesMalformedFiles) {
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return File("{\"x\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
                    ",\"data_offsets\":" + offsets + "}}",
                std::string(16, 'x'));
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "8 bytes"},
      {"1234567", "8 bytes"},
      {std::string(8, '\xff'), "header"},
      {std::string("\x10\0\0\0\0\0\0\0{}", 10), "header"},
      {File("", ""), "JSON"},
      {File("[]", ""), "JSON"},
      {File("{", ""), "JSON"},
      {File(std::string(100000, '['), ""), "JSON"},
      {File(R"({"x":[[[[[[1]]]]]]})", ""), "JSON"},
      {File(R"({"x":3})", ""), "'x'"},
      {File(R"({"x":{"dtype":"U8","shape":[1]}})", "a"), "data_offsets"},
      {tensor("7", "[4]", "[0,16]"), "'x'"},
      {tensor("\"F99\"", "[4]", "[0,16]"), "F99"},
      {tensor("\"F32\"", "[4]", "[0,17]"), "16 bytes"},
      {tensor("\"F32\"", "[4]", "[8,4]"), "16 bytes"},
      {tensor("\"F32\"", "[4]", "[-4,12]"), "16 bytes"},
      {tensor("\"F32\"", "[4]", "[0.5,16]"), "16 bytes"},
      {tensor("\"F32\"", "[4]", "[0]"), "[begin, end]"},
      {tensor("\"F32\"", "[3]", "[0,16]"), "fill"},
      {tensor("\"F32\"", "[5]", "[0,16]"), "fill"},
      {tensor("\"F32\"", "[3]", "[0,15]"), "fill"},
      {tensor("\"F32\"", "[-4]", "[0,16]"), "shape"},
      {tensor("\"F32\"", "\"4\"", "[0,16]"), "shape"},
      {tensor("\"F32\"", "[1,1,1,1,1,1,1,1,1,1,1,1,1,4]", "[0,16]"), "shape"},
      {tensor("\"F32\"", "[4611686018427387904,4]", "[0,16]"), "fill"},
      {tensor("\"F32\"", "[18446744073709551615]", "[0,16]"), "shape"},
      {File(R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
            R"("y":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
            "abcdef"),
       "overlaps"},
      {File(R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[3,6]}})", "abcdef"),
       "take 3 of the 6"},
      {File(R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
            R"("x":{"dtype":"U8","shape":[3],"data_offsets":[3,6]}})",
            "abcdef"),
       "a name may stand there twice"},
      {File(R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", "abcd"), "1 bytes follow"},
  };
  for (const auto& [bytes, message] : cases) {
    const absl::StatusOr<SafeTensors> read = ParseSafeTensors(bytes);
    ASSERT_FALSE(read.ok()) << bytes.substr(0, 200);
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(message)) << bytes.substr(0, 200);
  }
}

TEST(SafeTensorsTest, RefusesEveryTruncation) {
  SafeTensors tensors;
  tensors["x"] = {.type = kU8, .dims = {5}, .data = std::vector<std::byte>(5)};
  const std::string bytes = SerializeSafeTensors(tensors);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(ParseSafeTensors(std::string_view(bytes).substr(0, n)).ok()) << n;
  }
}

TEST(SafeTensorsTest, NamesAMissingFile) {
  const absl::StatusOr<SafeTensors> read = ReadSafeTensors("/nowhere/at/all");
  ASSERT_FALSE(read.ok());
  EXPECT_THAT(std::string(read.status().message()), HasSubstr("/nowhere/at/all"));
}

}  // namespace
}  // namespace kvant
