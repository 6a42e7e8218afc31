#include "kvant/cache/cache_scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "kvant/graph/status.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST(KvStorage, ContradictionsAreRefusedInWords) {
  const std::pair<const char*, const char*> cases[] = {
      {"u4:g32:rzp+rot48", "blocks of 48 does not fit a head of 64"},
      {"u4:channel:g32:rzp+rot+bulk32", "mixes the channels"},
      {"u4:channel:g32:rzp+window128", "groups of 32 tokens are quantized at once"},
      {"f8_e4m3:g32:zp", "codes of f8_e4m3 have no zero points"},
      {"u4:channel:g32:rzp+bulk100", "100 tokens is no multiple of the group's 32"},
      {"u4:channel:g32:rzp", "take bulk32 or a multiple"},
      {"f16+window3", "which is not quantized"},
      {"bf16+sinks4", "which is not quantized"},
      {"u4:g48:rzp", "groups of 48 do not divide the head size 64"},
      {"u4:g32", "hold nothing below 0"},
      {"u4:g32:rzp+window9223372036854775807", "a window of 9223372036854775807"},
  };
  for (const auto& [text, words] : cases) {
    const absl::StatusOr<KvStorage> storage = ParseKvStorage(text);
    ASSERT_TRUE(storage.ok()) << text << storage.status();
    ExpectRefused(storage->Check(64), words);
  }
  ExpectRefused(ParseKvStorage("u4:g32:rzp+rot")->Check(80), "blocks of 80 does not fit");
  ExpectRefused(ParseKvStorage("u4:g16:rzp+rot32")->Check(48), "blocks of 32 does not fit");
  ExpectRefused(ParseKvStorage("u4:token:rzp")->Check(33), "whole byte");
  KvStorage in_bulk = ParseKvStorage("s8:token").value();
  in_bulk.bulk = true;
  ExpectRefused(in_bulk.Check(64), "a window of 0 tokens in bulk");
  for (const auto& [text, words] :
       {std::pair("u4:g32:rzp+window", "'window'"),
        std::pair("u4:g32:rzp+bulk0", "a window of 0 tokens"),
        std::pair("s8:token+window0", "a window of 0 tokens"),
        std::pair("s8:token+window-5", "'window-5'"), std::pair("s8:token+window 5", "'window 5'"),
        std::pair("s8:token+sinks5x", "'sinks5x'"), std::pair("s8:token+rot5+f32+f16", "two types"),
        std::pair("u4:g32:rzp+window8+bulk8", "two windows"),
        std::pair("u4:g32:rzp+rot+rot16", "two rotations"),
        std::pair("u4:g32:rzp+sinks1+sinks2", "sinks twice"), std::pair("int5", "'int5'"),
        std::pair("u4:g32:rzp+f8_e4m3", "'f8_e4m3'")}) {
    ExpectRefused(ParseKvStorage(text).status(), words);
  }
}

TEST(KvStorage, TypesOfWindowsAreRead) {
  for (const DataType type : {kF32, kBF16, kF16}) {
    const std::string text = "s8:token+window16+" + std::string(DataTypeName(type));
    EXPECT_EQ(ParseKvStorage(text)->window_type, type) << text;
  }
}

TEST(KvStorage, GroupsWithoutASizeAreRefused) {
  KvStorage storage;
  storage.format = {.type = kS4, .groups = NumberFormat::Groups::kHeadSlice};
  ExpectRefused(storage.Check(64), "groups of 0");
  storage.format.group_size = -3;
  ExpectRefused(storage.Check(64), "groups of -3");
  storage.format.groups = NumberFormat::Groups::kChannel;
  ExpectRefused(storage.Check(64), "groups of -3");
}

TEST(CacheScheme, HasOneNameWhateverItIsCalled) {
  std::set<std::string_view> names;
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    EXPECT_TRUE(names.insert(named.name).second) << named.name;
    EXPECT_EQ(ParseCacheScheme(named.name)->ToString(), named.name);
    EXPECT_EQ(ParseCacheScheme(std::string(named.k) + "/" + std::string(named.v))->ToString(),
              named.name);
    if (named.alias.empty()) continue;
    EXPECT_TRUE(names.insert(named.alias).second) << named.alias;
    EXPECT_EQ(ParseCacheScheme(named.alias)->ToString(), named.name);
  }
  EXPECT_EQ(ParseCacheScheme("hqq4")->ToString(), "quanto4");
  for (const char* nameless : {"u4:g16:rzp", "s8:token/u4:g32:zp", "u4:g32:rzp+window128"}) {
    EXPECT_EQ(ParseCacheScheme(nameless)->ToString(), nameless);
  }
}

TEST(CacheScheme, NamesThatAreNoneAreToldThoseThatAre) {
  for (const char* text : {"int5", ""}) {
    ExpectRefused(ParseCacheScheme(text).status(), std::string("scheme '") + text + "': neither");
    ExpectRefused(ParseCacheScheme(text).status(), "kivi4, quanto4 (or hqq4), quanto2");
  }
  ExpectRefused(ParseCacheScheme("u4:g").status(), "format 'u4:g'");
  ExpectRefused(ParseCacheScheme("s32").status(), "format 's32'");
  // Names are whole schemes.
  for (const char* text :
       {"int4_g32+window128", "int4_g32:zp", "int4_g32/q8_0", "s8:token/int4_g32+rot"}) {
    ExpectRefused(ParseCacheScheme(text).status(),
                  std::string("scheme '") + text +
                      "': int4_g32 is a whole scheme, to which nothing is added; it "
                      "stands for u4:g32:rzp/u4:g32:rzp");
  }
}

TEST(CacheScheme, TextSurvivesParsing) {
  for (const NamedCacheScheme& named : NamedCacheSchemes()) {
    const absl::StatusOr<CacheScheme> scheme = ParseCacheScheme(named.name);
    ASSERT_TRUE(scheme.ok()) << named.name << scheme.status();
    EXPECT_EQ(scheme->k.ToString(), named.k);
    EXPECT_EQ(scheme->v.ToString(), named.v);
    EXPECT_TRUE(scheme->k.Check(128).ok()) << scheme->k.Check(128);
  }
  EXPECT_EQ(ParseCacheScheme("s8:token/u4:g32:zp")->v.ToString(), "u4:g32:zp");
}

TEST(CacheScheme, BitsPerElement) {
  const std::pair<const char*, double> cases[] = {
      {"f16", 16},           {"int8_th", 8.25}, {"q8_0", 8.5},    {"int4_g32", 5},
      {"int4_g64", 4.5},     {"q4_0", 4.5},     {"q4_1", 5},      {"kivi2", 3},
      {"int4zp_g32", 4.625}, {"iq4_nl", 4.5},   {"nf4_g32", 4.5}, {"int8_token", 8.125}};
  for (const auto& [name, bits] : cases) {
    EXPECT_DOUBLE_EQ(ParseCacheScheme(name)->k.BitsPerElement(2, 64).value(), bits) << name;
  }
  const KvStorage storage = ParseCacheScheme("int4_g32")->k;
  ExpectRefused(storage.BitsPerElement(2, 48).status(),
                "groups of 32 do not divide the head size 48");
  ExpectRefused(storage.BitsPerElement(2, 31).status(), "a head of 31 codes");
  ExpectRefused(storage.BitsPerElement(2, 0).status(), "for heads of 0 channels");
  ExpectRefused(storage.BitsPerElement(-1, 64).status(), "for -1 heads");
}

}  // namespace
}  // namespace kvant
