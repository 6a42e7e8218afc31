// V as a part of K's channels, as caches of latent attention have it, and parts that are not fused.
#include <optional>
#include <string>

#include "kvant/tests/patterns/patterns_testing.h"

namespace kvant {
namespace {

using testing::KindsOf;
using testing::OnlySpec;
using testing::Partitions;
using testing::Text;

// Attention over `keys` and a part of them, with the queries of 4 heads for each of 2.
std::vector<Partition> Latent(GraphBuilder g, Value keys, int64_t axis, int64_t begin,
                              int64_t size) {
  const Value q = g.Input("q", kF16, {1, 2, 4, 12});
  const Value v = g.Slice(keys, axis, begin, size);
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, keys, {.transpose_b = true})), v));
  return Partitions(std::move(g));
}

// K of 12 channels by groups of so many.
Value Grouped(GraphBuilder& g, int64_t group) {
  return g.DynamicDequantize(g.Input("k", kU4, {1, 2, 6, 12}),
                             g.Input("ks", kF16, {1, 2, 6, 12 / group}),
                             {.group_shape = {1, 1, 1, group}});
}

TEST(Slice, ValuesAreTheFirstChannelsOfKeys) {
  GraphBuilder g;
  const Value keys =
      g.DynamicDequantize(g.Input("kv", kS8, {1, 2, 6, 12}), g.Input("s", kF16, {1, 2, 6, 1}),
                          {.group_shape = {1, 1, 1, 12}});
  const AttentionSpec spec = OnlySpec(Latent(std::move(g), keys, -1, 0, 8));
  EXPECT_EQ(spec.head_size, 12);
  EXPECT_EQ(spec.v_head_size, 8);
  EXPECT_EQ(Text(spec.k[0]),
            "0:s8[1,2,1,6,12]s[0,72,0,12,1] /[1,1,1,1,12] * 1:f16[1,2,1,6,1]s[0,6,0,1,0]");
  EXPECT_EQ(Text(spec.v[0]),
            "0:s8[1,2,1,6,8]s[0,72,0,12,1] /[1,1,1,1,8] * 1:f16[1,2,1,6,1]s[0,6,0,1,0]");
}

TEST(Slice, AnyGroupsOfAnyPart) {
  GraphBuilder g;
  const Value keys = Grouped(g, 4);
  const AttentionSpec spec = OnlySpec(Latent(std::move(g), keys, 3, 4, 8));
  EXPECT_EQ(Text(spec.v[0]),
            "0:u4[1,2,1,6,8]s[0,72,0,12,1]+4 /[1,1,1,1,4] * 1:f16[1,2,1,6,2]s[0,18,0,3,1]+1");
}

TEST(Slice, HeadsBesideOneAnother) {
  // A projection's output, of which the last two heads are keys.
  GraphBuilder g;
  const Value heads = g.Input("qk", kF16, {1, 6, 5, 8});
  const Value q = g.Slice(heads, 1, 0, 4), k = g.Slice(heads, 1, 4, 2);
  const Value scores =
      g.MatMul(g.Reshape(q, {1, 2, 2, 5, 8}), g.Reshape(k, {1, 2, 1, 5, 8}), {.transpose_b = true});
  g.Output("o", g.MatMul(g.SoftMax(scores), g.Input("v", kF16, {1, 2, 1, 5, 8})));
  const AttentionSpec spec = OnlySpec(Partitions(std::move(g)));
  EXPECT_EQ(Text(spec.q), "0:f16[1,2,2,5,8]s[0,80,40,8,1]");
  EXPECT_EQ(Text(spec.k[0]), "0:f16[1,2,1,5,8]s[0,40,0,8,1]+160");
}

// Of a graph whose part is not folded: the reason, and no spec.
std::string WhyNotFolded(const std::vector<Partition>& parts) {
  if (parts.size() != 1 || parts[0].attention() != nullptr) return KindsOf(parts);
  return absl::StrJoin(parts[0].notes(), "; ");
}

TEST(Slice, WhatCutsGroupsIsNotFolded) {
  GraphBuilder g;
  const Value keys = Grouped(g, 4);
  EXPECT_EQ(WhyNotFolded(Latent(std::move(g), keys, -1, 2, 8)),
            "Slice 'Slice_4' (id 1): cuts a group, or cannot be folded into strides");
}

TEST(Slice, PartsOfWhatIsRotatedAreNotFolded) {
  GraphBuilder g;
  const Value keys = g.Hadamard(g.Input("k", kF16, {1, 2, 6, 12}), 4);
  EXPECT_EQ(WhyNotFolded(Latent(std::move(g), keys, -1, 0, 8)),
            "Slice 'Slice_3' (id 1): takes a part of what is rotated");
}

TEST(Slice, PartsOfSegmentsAreNotFolded) {
  GraphBuilder g;
  const Value old = g.Input("old", kF16, {1, 2, 6, 12});
  const Value q = g.Input("q", kF16, {1, 2, 4, 12});
  const Value keys = g.Slice(g.Concat({old, g.Input("new", kF16, {1, 2, 3, 12})}, 2), 2, 1, 6);
  g.Output("o", g.MatMul(g.SoftMax(g.MatMul(q, keys, {.transpose_b = true})), old));
  EXPECT_EQ(WhyNotFolded(Partitions(std::move(g))),
            "Slice 'Slice_4' (id 1): takes a part of what is loaded or concatenated");
}

}  // namespace
}  // namespace kvant
