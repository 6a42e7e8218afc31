#include "kvant/backends/cuda/attention/codes_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "kvant/kernels/cuda/attention_codes.h"

namespace kvant::cuda {
namespace {

constexpr int kDriverBytes = 1024;  // of a block's shared memory
constexpr int kMostChannels = 576, kMostOfWarp = 256;
constexpr int kSmallestTile = 16;  // tokens; pages, and groups along tokens, have whole ones

// Of a token's channels.
int64_t GroupsOf(const SegmentTraits& traits, int64_t channels) {
  if (CodeFormat::IsByChannel(traits)) return 1;
  return std::max<int64_t>(1, channels / traits.group[kCol]);
}

// What divides the address of every row, in bytes: 0 where all are 0, 1 also where they are not
// whole bytes.
int64_t AlignmentOf(const Array& array, int bits) {
  auto all = static_cast<uint64_t>(array.offset * bits);
  for (int a = 0; a < kCol; ++a) all |= static_cast<uint64_t>(array.strides[a] * bits);
  const uint64_t lowest = all & -all;
  return lowest == 0 ? 0 : static_cast<int64_t>(std::max<uint64_t>(lowest / 8, 1));
}

// Alignment of scales or zero points; rows follow each other without gaps.
int64_t SideAlignmentOf(const SegmentTraits& traits, const ArrayTraits& side, Array array) {
  const bool by_channel = CodeFormat::IsByChannel(traits);
  if (side.type == kNone || (!by_channel && !CodeFormat::Varies(side))) return 16;
  if (!by_channel) array.strides[kRow] = 0;
  const int64_t alignment = AlignmentOf(array, BitsOf(side.type));
  return alignment == 0 ? 16 : std::min<int64_t>(16, alignment);
}

int64_t SideAlignmentOf(const AttentionTraits& t, const AttentionParams& p) {
  return std::min({SideAlignmentOf(t.k[0], t.k[0].scales, p.k[0].scales),
                   SideAlignmentOf(t.v[0], t.v[0].scales, p.v[0].scales),
                   SideAlignmentOf(t.k[0], t.k[0].zero_points, p.k[0].zero_points),
                   SideAlignmentOf(t.v[0], t.v[0].zero_points, p.v[0].zero_points)});
}

bool IsFloatType(i32 type) { return type == kFloat16 || type == kBFloat16 || type == kFloat32; }

std::string WhyNotSide(const std::string& name, const SegmentTraits& traits,
                       const ArrayTraits& side, const Array& array, int64_t channels) {
  const bool by_channel = CodeFormat::IsByChannel(traits);
  const int64_t groups = by_channel ? channels : GroupsOf(traits, channels);
  if (!CodeFormat::Varies(side) && !by_channel) {
    return groups == 1 ? "" : name + " in groups of channels do not differ from token to token";
  }
  const bool rows_dense = array.strides[kRow] == groups || !CodeFormat::Varies(side);
  if (!rows_dense || (groups > 1 && array.strides[kCol] != 1)) {
    return name + " are not dense over tokens and groups: " + std::to_string(groups) +
           " groups, strides " + std::to_string(array.strides[kRow]) + " and " +
           std::to_string(array.strides[kCol]);
  }
  if (SideAlignmentOf(traits, side, array) < 4) return name + " are not aligned to 4 bytes";
  return "";
}

std::string WhyNotZeroPoints(const std::string& name, const SegmentTraits& traits,
                             const SegmentParams& segment, int64_t channels) {
  const i32 type = traits.zero_points.type;
  if (type == kNone) return "";
  if (traits.real_zero_points) {
    const bool by_channel = CodeFormat::IsByChannel(traits);
    if (!CodeFormat::Varies(traits.zero_points) && !by_channel) {
      return name + "'s real zero point is one for all";
    }
    if (!IsFloatType(type)) return name + "'s zero points are not f16, bf16 or f32";
  } else if (type != kInt8 && type != kUint8 && type != kInt4 && type != kUint4) {
    return name + "'s zero points are not of 8 or 4 bits";
  }
  return WhyNotSide(name + "'s zero points", traits, traits.zero_points, segment.zero_points,
                    channels);
}

// Bytes from page to page of codes or parameters; axis b0 is pages.
int64_t PagePitch(const ArrayTraits& traits, const Array& array) {
  return array.strides[0] * BitsOf(traits.type) / 8;
}

// That the tokens of one head in a page are spread over.
int64_t PageBytes(int64_t tokens, const ArrayTraits& traits, const Array& array) {
  return tokens * array.strides[kRow] * BitsOf(traits.type) / 8;
}

std::string WhyNotPages(const std::string& name, const SegmentTraits& traits,
                        const SegmentParams& segment) {
  if (traits.load != kByPages) return name + " is not in pages, as the other is";
  if (segment.tokens == 0 || segment.tokens % kSmallestTile != 0) {
    return name + "'s pages of " + std::to_string(segment.tokens) +
           " tokens are not multiples of " + std::to_string(kSmallestTile);
  }
  if (segment.load.step != 1) {
    return name + "'s page table has a stride of " + std::to_string(segment.load.step);
  }
  for (const ArrayTraits* side : {&traits.scales, &traits.zero_points}) {
    if (side->type == kNone || (side->varies & 1) == 0) continue;
    if (!CodeFormat::Varies(*side)) return name + "'s scales or zero points are of a page";
    if (traits.group[0] != 1) {
      return name + " has groups of " + std::to_string(traits.group[0]) + " pages";
    }
  }
  const int64_t pitch =
      std::max({PagePitch(traits.data, segment.data), PagePitch(traits.scales, segment.scales),
                PagePitch(traits.zero_points, segment.zero_points)});
  if (pitch > std::numeric_limits<i32>::max()) {
    return name + "'s pages are " + std::to_string(pitch) + " bytes apart, more than 2^31 - 1";
  }
  const int64_t bytes =
      std::max({PageBytes(segment.tokens, traits.data, segment.data),
                PageBytes(segment.tokens, traits.scales, segment.scales),
                PageBytes(segment.tokens, traits.zero_points, segment.zero_points)});
  if (bytes > std::numeric_limits<i32>::max()) {
    return name + "'s pages take " + std::to_string(bytes) + " bytes, more than 2^31 - 1";
  }
  return "";
}

// Warps of a block that share its tiles.
i32 ChannelWarps(const AttentionTraits& t) {
  return std::max(t.head_size, t.v_head_size) > kMostOfWarp ? kChannelWarps : 1;
}

// What of `channels` lies side by side for a warp: whole pieces of them are copied.
int64_t PieceOf(const AttentionTraits& t, int64_t channels) {
  if (t.channel_warps == 1) return channels;
  return t.v_in_k ? std::gcd(KeySlice(t), ValueSlice(t)) : channels / t.channel_warps;
}

// The most bytes, 16 or 8, that can be copied at once from each token's row. 0: neither.
i32 CopyBytes(const SegmentTraits& traits, const SegmentParams& segment, int64_t channels) {
  const int bits = BitsOf(traits.data.type);
  const int64_t rows = AlignmentOf(segment.data, bits);
  for (const i32 bytes : {16, 8}) {
    if (channels * bits / 8 % bytes == 0 && rows % bytes == 0) return bytes;
  }
  return 0;
}

std::string WhyNotGroups(const std::string& name, const SegmentTraits& traits, int64_t channels) {
  const int64_t tokens = traits.group[kRow];
  if (CodeFormat::IsByChannel(traits)) {
    if (name != "K") {
      if (CodeFormat::Varies(traits.scales)) {
        return name + " has groups of a channel of " + std::to_string(tokens) + " tokens";
      }
      return traits.zero_points.type == kNone ? "" : name + " has zero points of channels";
    }
    if (CodeFormat::Varies(traits.scales) && (tokens < kSmallestTile || (tokens & (tokens - 1)))) {
      return name + " has groups of a channel of " + std::to_string(tokens) +
             " tokens, not a power of two of 16 or more";
    }
    return "";
  }
  if (tokens != 1 && CodeFormat::Varies(traits.scales)) {
    return name + " has groups of " + std::to_string(tokens) + " tokens";
  }
  const int64_t groups = GroupsOf(traits, channels), group = channels / groups;
  const int64_t chunk = 128 / BitsOf(traits.data.type);
  const bool halves = group * 2 == chunk && chunk >= 32;
  const bool whole = groups == 1 || group % chunk == 0 || halves;
  if (groups > kMaxGroups || group * groups != channels || !whole) {
    return name + " has groups of " + std::to_string(traits.group[kCol]) + " channels";
  }
  return "";
}

std::string WhyNotSegment(const std::string& name, const AttentionTraits& t,
                          const SegmentTraits& traits, const SegmentParams& segment,
                          int64_t channels) {
  const i32 type = traits.data.type;
  const bool is_float = type == kFloat16 || type == kFloat8E4M3 || type == kFloat8E5M2;
  if (!is_float && type != kInt8 && type != kUint8 && type != kInt4 && type != kUint4 &&
      type != kInt2 && type != kUint2) {
    return name + " is neither codes of 2, 4 or 8 bits nor f16, e4m3 or e5m2";
  }
  if (is_float && traits.zero_points.type != kNone) return name + " is floats with zero points";
  if (channels > kMostChannels) {
    return name + " has " + std::to_string(channels) + " channels, more than " +
           std::to_string(kMostChannels);
  }
  if (channels % (16 * t.channel_warps) != 0) {
    return name + " has " + std::to_string(channels) + " channels, not a multiple of " +
           std::to_string(16 * t.channel_warps);
  }
  if (traits.codebook != 0 && traits.codebook != CodebookTable::kEntries) {
    return name + "'s codebook has " + std::to_string(traits.codebook) + " entries, not 16";
  }
  if (t.channel_warps > 1) {
    if (CodeFormat::IsByChannel(traits)) {
      return name + " is by channel, of " + std::to_string(channels) + " channels";
    }
    if (GroupsOf(traits, channels) != 1) {
      return name + " has several groups of " + std::to_string(channels) + " channels";
    }
    if (traits.codebook != 0) {
      return name + "'s codebook is of a head of " + std::to_string(channels) + " channels";
    }
  }
  if (traits.codebook != 0 && t.arithmetic == kByF32) {
    return name + "'s codebook would be rounded to f16 for f32 queries";
  }
  const int bits = BitsOf(type);
  const std::string rows = t.channel_warps == 1 ? "'s rows" : "'s rows, a slice for a warp,";
  if (channels / t.channel_warps * bits < 256) return name + rows + " are less than 32 bytes";
  if (traits.contiguous != kCol || CopyBytes(traits, segment, PieceOf(t, channels)) == 0) {
    return name + rows + " are not 8-byte aligned codes side by side";
  }
  // An element of 16 bytes more than this is beyond what an instruction's offset can say.
  if (segment.data.strides[kRow] * bits / 8 > 1 << 16) {
    return name + "'s tokens are " + std::to_string(segment.data.strides[kRow] * bits / 8) +
           " bytes apart, more than 65536";
  }
  if (std::string why = WhyNotGroups(name, traits, channels); !why.empty()) return why;
  if (traits.scales.type == kNone) {
    if (traits.zero_points.type != kNone) return name + " has zero points without scales";
    return "";
  }
  if (!IsFloatType(traits.scales.type)) return name + "'s scales are not f16, bf16 or f32";
  if (std::string why =
          WhyNotSide(name + "'s scales", traits, traits.scales, segment.scales, channels);
      !why.empty()) {
    return why;
  }
  return WhyNotZeroPoints(name, traits, segment, channels);
}

// Tokens of a warp's tile, its stages, and blocks of a multiprocessor. Of 65536 registers a thread
// may have 128 with 4 blocks, 168 with 3, 255 with 2.
struct Shape {
  int warp_tile, stages, blocks;
};
constexpr Shape kSmallHeads[] = {{64, 2, 4}, {64, 2, 3}, {32, 2, 4}, {32, 2, 3}, {16, 2, 2}};
constexpr Shape kByRow[] = {{64, 2, 3}, {32, 2, 4}, {32, 2, 3}, {32, 2, 2}, {16, 2, 2}};
constexpr Shape kByRowSignedWithZeros[] = {{64, 2, 3}, {32, 2, 3}, {32, 2, 2}, {16, 2, 2}};
constexpr Shape kInGroups[] = {{32, 2, 3}, {32, 2, 2}, {16, 2, 2}};
constexpr Shape kWide[] = {{32, 2, 2}, {16, 2, 2}, {16, 2, 1}};
constexpr Shape kWidest[] = {{16, 2, 2}, {16, 2, 1}};
constexpr Shape kInSlices[] = {{64, 2, 2}, {32, 3, 2}, {32, 2, 2}, {32, 2, 1}, {16, 2, 1}};
constexpr Shape kInSlicesBitByBit[] = {{32, 3, 2}, {32, 2, 2}, {32, 2, 1}, {16, 2, 1}};
constexpr Shape kInHalves[] = {{64, 2, 2}, {32, 3, 2}, {16, 2, 2}};
constexpr Shape kInManyHalves[] = {{32, 3, 2}, {16, 4, 2}, {16, 2, 2}};
constexpr Shape kInManySignedHalves[] = {{16, 4, 2}, {16, 2, 2}};

template <size_t kCount>
Shape FirstThatFits(const Shape (&shapes)[kCount], int shared_bytes, AttentionTraits t) {
  for (const Shape& shape : shapes) {
    t.warp_tile = shape.warp_tile;
    t.stages = shape.stages;
    const auto whole = [&shape](i32 page) {
      return page == 0 || page % shape.warp_tile == 0 || shape.warp_tile % page == 0;
    };
    const CodesLayout layout = CodesLayout::Of(t);
    // By channel, a tile is of whole groups of 32 tokens at least, or within one.
    const i32 group = layout.k.format.group_tokens;
    const bool fits = !layout.k.format.ByChannel() || group >= MinOf(32, shape.warp_tile);
    const int bytes = CodesShared::Of(t, kMaxSplits).bytes + kDriverBytes;
    if (bytes * shape.blocks <= shared_bytes && fits && whole(t.k_page) && whole(t.v_page)) {
      return shape;
    }
  }
  return shapes[kCount - 1];
}

// Whether groups are half a chunk: queries of K, and sums of V, are held for both halves.
bool HasHalves(const AttentionTraits& t) {
  const CodesLayout layout = CodesLayout::Of(t);
  return layout.k.format.Halves() == 2 || layout.v.format.Halves() == 2;
}

bool IsSigned(i32 type) { return type == kInt2 || type == kInt4 || type == kInt8; }

bool SignedWithZeros(const SegmentTraits& s) {
  return s.zero_points.type != kNone && IsSigned(s.data.type);
}

// Scales that are not f16 take registers on their way there: in groups, with codes that need some
// of their own.
bool ConvertsMany(const SegmentTraits& s) {
  return s.scales.type != kNone && s.scales.type != kFloat16 &&
         (BitsOf(s.data.type) >= 8 || IsSigned(s.data.type));
}

Shape ShapeOf(const AttentionTraits& t, int shared_bytes) {
  if (t.channel_warps > 1) {
    const bool bit_by_bit = t.converts_e4m3 == 0 &&
                            (t.k[0].data.type == kFloat8E4M3 || t.v[0].data.type == kFloat8E4M3);
    return bit_by_bit && t.row_blocks > 1 ? FirstThatFits(kInSlicesBitByBit, shared_bytes, t)
                                          : FirstThatFits(kInSlices, shared_bytes, t);
  }
  const int largest = std::max(t.head_size, t.v_head_size);
  const int bits = std::max(BitsOf(t.k[0].data.type), BitsOf(t.v[0].data.type));
  const bool groups = CodeFormat::IsByChannel(t.k[0]) || GroupsOf(t.k[0], t.head_size) > 1 ||
                      GroupsOf(t.v[0], t.v_head_size) > 1;
  const bool more_rows = t.row_blocks > 1, two_parts = t.arithmetic == kByF32;
  const bool converts_many = groups && (ConvertsMany(t.k[0]) || ConvertsMany(t.v[0]));
  if (largest <= 64) {
    return more_rows || two_parts || converts_many ? FirstThatFits(kInGroups, shared_bytes, t)
                                                   : FirstThatFits(kSmallHeads, shared_bytes, t);
  }
  if (HasHalves(t) || (CodeFormat::IsByChannel(t.k[0]) && bits == 2)) {
    const bool many = bits > 2 && largest > 80;
    const bool is_signed = IsSigned(t.k[0].data.type) || IsSigned(t.v[0].data.type);
    if (many && is_signed) return FirstThatFits(kInManySignedHalves, shared_bytes, t);
    return many || two_parts ? FirstThatFits(kInManyHalves, shared_bytes, t)
                             : FirstThatFits(kInHalves, shared_bytes, t);
  }
  const bool signed_with_zeros = SignedWithZeros(t.k[0]) || SignedWithZeros(t.v[0]);
  if ((groups && more_rows && bits >= 8) || (converts_many && (more_rows || largest > 128))) {
    return FirstThatFits(kWidest, shared_bytes, t);
  }
  const bool zeros = t.k[0].zero_points.type != kNone || t.v[0].zero_points.type != kNone;
  const bool bytes_with_zeros = bits >= 8 && zeros;
  if (more_rows || two_parts || largest > 128 || bits == 16 || converts_many ||
      (groups && (signed_with_zeros || bytes_with_zeros))) {
    return FirstThatFits(kWide, shared_bytes, t);
  }
  if (groups) return FirstThatFits(kInGroups, shared_bytes, t);
  return signed_with_zeros ? FirstThatFits(kByRowSignedWithZeros, shared_bytes, t)
                           : FirstThatFits(kByRow, shared_bytes, t);
}

// Bytes by which scales and zero points are copied: whole pieces of each array's part of a tile.
i32 SideCopy(AttentionTraits t, const AttentionParams& params) {
  t.warp_tile = kSmallestTile;
  int64_t all = SideAlignmentOf(t, params);
  for (const SideTraits& side : CodesLayout::Of(t).sides) all |= side.TileBytes(kSmallestTile);
  return static_cast<i32>(all & -all);
}

int64_t SequencesOf(const AttentionTraits& t, const AttentionParams& p) {
  return int64_t{p.batch[0]} * p.batch[1] * (t.kv_varies_over_b2 ? p.batch[2] : 1) *
         RowTiles(t, p.rows);
}

}  // namespace

std::string WhyNotCodes(const AttentionTraits& described, const AttentionParams& params) {
  AttentionTraits traits = described;
  traits.channel_warps = ChannelWarps(traits);
  if (traits.k_segments != 1 || traits.v_segments != 1) {
    return "K or V is of several segments: " + std::to_string(traits.k_segments) + " and " +
           std::to_string(traits.v_segments);
  }
  if (HasPages(traits)) {
    std::string why = WhyNotPages("K", traits.k[0], params.k[0]);
    if (why.empty()) why = WhyNotPages("V", traits.v[0], params.v[0]);
    if (!why.empty()) return why;
  }
  if (traits.has_first) return "columns do not begin with the first";
  if (traits.ragged) return "queries are ragged";
  if (traits.dropout) return "there is dropout";
  if (traits.probs_type != kNone) return "probabilities are rounded";
  if (!IsFloatType(traits.q.data.type) || traits.q.scales.type != kNone) {
    return "queries are not f16, bf16 or f32";
  }
  const int largest = std::max(traits.head_size, traits.v_head_size);
  if (traits.arithmetic == kByF32 && largest > 128 && traits.channel_warps == 1 &&
      (GroupsOf(traits.k[0], traits.head_size) > 1 ||
       GroupsOf(traits.v[0], traits.v_head_size) > 1)) {
    return "f32 queries of " + std::to_string(largest) + " channels in groups need more registers";
  }
  if (std::string why = WhyNotSegment("K", traits, traits.k[0], params.k[0], traits.head_size);
      !why.empty()) {
    return why;
  }
  return WhyNotSegment("V", traits, traits.v[0], params.v[0], traits.v_head_size);
}

void SizeCodes(AttentionPlan& plan) {
  const AttentionTraits& t = plan.traits;
  const AttentionParams& params = plan.params;
  const int64_t sequences = SequencesOf(t, params), splits = params.split.splits;
  const int64_t most = LengthsVary(t) ? 1 + int64_t{params.batch[0]} * (splits - 1) : splits;
  plan.blocks = sequences * splits;
  plan.threads = t.token_warps * t.channel_warps * 32;
  plan.shared_bytes = static_cast<size_t>(
      CodesShared::Of(t, static_cast<i32>(std::min<int64_t>(most, kMaxSplits))).bytes);
  const int64_t left = splits > 1 ? plan.blocks * t.row_blocks * 8 * (t.v_head_size + 2) : 0;
  plan.partial_bytes = static_cast<size_t>(left) * sizeof(float);
  plan.scratch_bytes =
      plan.partial_bytes + static_cast<size_t>(splits > 1 ? sequences : 0) * sizeof(u32);
}

void PlanCodes(const DeviceProperties& device, int most_blocks, AttentionPlan& plan) {
  AttentionTraits& t = plan.traits;
  AttentionParams& params = plan.params;
  t.kernel = kCodesKernel;
  t.row_warps = 1;
  t.channel_warps = ChannelWarps(t);
  t.token_warps = 4 / t.channel_warps;
  t.v_block = t.v_head_size;
  if (t.channel_warps == 1) t.v_in_k = 0;  // a stage has both
  // By f32, signed codes are made what they are: sums of biased ones would lose what the bias
  // takes.
  t.converts_e4m3 = device.major >= 9;
  t.subnormal_codes = t.arithmetic != kByF32;
  // Rows of one block share what it reads; with wide heads there are no registers for more.
  const int of_warp = std::max(KeySlice(t), ValueSlice(t));
  const bool narrow = of_warp <= (t.channel_warps == 1 ? 128 : 160) && t.arithmetic != kByF32;
  t.row_blocks = params.rows > 8 && narrow && !HasHalves(t) ? 2 : 1;
  t.k_pitch = static_cast<i32>(params.k[0].data.strides[kRow] * BitsOf(t.k[0].data.type) / 8);
  t.v_pitch = static_cast<i32>(params.v[0].data.strides[kRow] * BitsOf(t.v[0].data.type) / 8);
  t.k_page = t.k[0].load == kByPages ? params.k[0].tokens : 0;
  t.v_page = t.v[0].load == kByPages ? params.v[0].tokens : 0;
  t.k_copy = CopyBytes(t.k[0], params.k[0], PieceOf(t, t.head_size));
  t.v_copy = CopyBytes(t.v[0], params.v[0], PieceOf(t, t.v_head_size));
  t.side_copy = SideCopy(t, params);
  const Shape shape = ShapeOf(t, static_cast<int>(device.shared_bytes_per_multiprocessor));
  t.warp_tile = shape.warp_tile;
  t.stages = shape.stages;
  const int64_t sequences = SequencesOf(t, params);
  const int blocks = plan.blocks_per_multiprocessor = std::min(shape.blocks, most_blocks);
  const auto slots = static_cast<int64_t>(plan.slot_share * device.multiprocessors * blocks);
  // A split is worth its merging where every warp has two tiles at least.
  const int64_t most =
      std::clamp<int64_t>(params.kv_len / (t.warp_tile * t.token_warps * 2), 1, kMaxSplits);
  int64_t splits = slots / std::max<int64_t>(sequences, 1);
  // Where lengths differ, there is something to hand out by length.
  if (LengthsVary(t) && params.batch[0] > 1) splits = std::max<int64_t>(splits, 2);
  params.split.splits = static_cast<i32>(std::clamp<int64_t>(splits, 1, most));
  SizeCodes(plan);
}

}  // namespace kvant::cuda
