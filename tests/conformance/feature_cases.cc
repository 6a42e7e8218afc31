// Masks, forms of the graph, and the first-class op.
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;
using Groups = Storage::Groups;
using Kind = Mask::Kind;

constexpr float kInfinity = -std::numeric_limits<float>::infinity();

std::string KindName(Kind kind) {
  constexpr const char* kNames[] = {"additive", "select", "inverted", "causal", "bottom_right"};
  return kNames[static_cast<int>(kind)];
}

// Storage that is not plain and not what the shape cases have, without masks.
Case Base(int i) {
  Case c = Rotated(i);
  c.masks.clear();
  c.q_len = 5 + i % 3;
  return c;
}

void Push(std::vector<Case>& cases, Case c, std::string name) {
  c.name = std::move(name);
  cases.push_back(std::move(c));
}

}  // namespace

void AddMaskCases(std::vector<Case>& cases) {
  int i = 0;
  for (const char* over : {"s", "q", "qs", "ns", "hs", "rs", "nqs", "hqs", "rqs", "hrqs", "nhrs",
                           "nhrqs", "nhr", "n"}) {
    for (const Kind kind : {Kind::kAdditive, Kind::kSelect, Kind::kSelectInverted}) {
      Case c = Base(i);
      const float fill = i % 4 == 3 ? -2.f : kInfinity;
      c.masks = {{.kind = kind, .over = over, .fill = fill, .low_rank = i % 3 == 0}};
      Push(cases, c, absl::StrCat("Mask_", KindName(kind), "_over_", over));
      ++i;
    }
  }
  const std::pair<int64_t, int64_t> lengths[] = {{1, 40}, {5, 5}, {7, 33}, {33, 7}, {66, 65}};
  for (const Kind kind : {Kind::kCausal, Kind::kBottomRight}) {
    for (const auto& [q_len, kv_len] : lengths) {
      for (const float fill : {kInfinity, -2.f}) {
        Case c = Base(i++);
        c.q_len = q_len;
        c.kv_len = kv_len;
        c.masks = {{.kind = kind, .fill = fill}};
        Push(cases, c,
             absl::StrCat("Mask_", KindName(kind), "_", q_len, "_by_", kv_len,
                          fill == kInfinity ? "" : "_finite"));
      }
    }
  }
  // Two and three masks in each order; a finite fill tells the orders apart.
  const Kind kinds[] = {Kind::kAdditive, Kind::kSelect, Kind::kSelectInverted, Kind::kCausal,
                        Kind::kBottomRight};
  for (const Kind first : kinds) {
    for (const Kind second : kinds) {
      Case c = Base(i++);
      c.soft_cap = i % 4 == 0;
      c.masks = {{.kind = first, .fill = -2.f},
                 {.kind = second, .over = "nhrqs", .fill = i % 2 == 0 ? -1.f : kInfinity}};
      Push(cases, c, absl::StrCat("Masks_", KindName(first), "_", KindName(second)));
      c.scale_after_masks = true;
      c.scale = Case::Scale::kDivide;
      Push(cases, c, absl::StrCat("MasksThenScale_", KindName(first), "_", KindName(second)));
    }
  }
  for (const Kind kind : {Kind::kAdditive, Kind::kSelect, Kind::kSelectInverted}) {
    for (const bool zero : {true, false}) {
      Case c = Base(i++);
      c.masks = {{.kind = kind}};
      c.masked_row = true;
      c.inf_as_zero = zero;
      c.stats = true;
      Push(cases, c, absl::StrCat("MaskedRow_", KindName(kind), zero ? "_zero" : "_nan"));
    }
  }
  for (int variant = 0; variant < 6; ++variant) {
    Case c = Base(i++);
    c.soft_cap = true;
    if (variant % 2 == 1) c.masks = {{.kind = variant == 1 ? Kind::kCausal : Kind::kAdditive}};
    Push(cases, c, absl::StrCat("SoftCap_", variant));
  }
}

// Each scalar of the steps, and of dropout, as a constant and on the host; fills that hide columns
// and fills that do not, under which kernels must not skip any.
void AddScalarCases(std::vector<Case>& cases) {
  int i = 0;
  for (const Case::Scalars scalars : {Case::Scalars::kOnHost, Case::Scalars::kConstants}) {
    const bool on_host = scalars == Case::Scalars::kOnHost;
    const std::string prefix = on_host ? "HostScalars_" : "Constants_";
    const auto base = [&] {
      Case c = Base(i++);
      c.scalars = scalars;
      if (on_host) c.scores = c.scale_type = kF32;
      c.scale = i % 2 == 0 ? Case::Scale::kDivide : Case::Scale::kMultiply;
      return c;
    };
    for (const Kind kind :
         {Kind::kSelect, Kind::kSelectInverted, Kind::kCausal, Kind::kBottomRight}) {
      for (const float fill : {kInfinity, -2.f}) {
        for (const int64_t q_len : {int64_t{1}, int64_t{34}}) {
          Case c = base();
          c.q_len = q_len;
          c.kv_len = 65 + 2 * i;
          c.masks = {{.kind = kind, .fill = fill}};
          c.soft_cap = i % 3 == 0;
          Push(
              cases, c,
              absl::StrCat(prefix, KindName(kind), "_", q_len, fill == kInfinity ? "" : "_finite"));
        }
      }
    }
    for (const bool after : {false, true}) {
      Case c = base();
      c.masks = {{.kind = Kind::kCausal, .fill = kInfinity}, {.kind = Kind::kAdditive}};
      c.q_len = c.kv_len = 50;
      c.scale_after_masks = after;
      Push(cases, c, absl::StrCat(prefix, after ? "masks_then_scale" : "scale_then_masks"));
      c = base();
      c.dropout = true;
      c.masks = {{.kind = Kind::kBottomRight, .fill = kInfinity}};
      Push(cases, c, absl::StrCat(prefix, "dropout_", after ? 1 : 0));
    }
  }
}

void AddFormCases(std::vector<Case>& cases) {
  int i = 0;
  constexpr const char* kForms[] = {"5D", "4D", "3D", "2D", "Reshape"};
  constexpr const char* kLayouts[] = {"rows", "token_major", "tokens_last"};
  constexpr const char* kBuffers[] = {"dense", "interleaved", "padded"};
  for (int form = 0; form < 5; ++form) {
    for (int layout = 0; layout < 3; ++layout) {
      for (int buffers = 0; buffers < 3; ++buffers) {
        Case c = Rotated(i++);
        c.form = static_cast<Form>(form);
        if (form == 2 || form == 3) c.batch = c.ratio = 1;
        if (form == 3) c.kv_heads = 1;
        if (form == 1) c.ratio = 1;
        c.k_layout = static_cast<Case::KLayout>(layout);
        c.buffers = static_cast<Case::Buffers>(buffers);
        c.stats = i % 4 == 0;
        Push(cases, c,
             absl::StrCat("Form", kForms[form], "_K_", kLayouts[layout], "_", kBuffers[buffers]));
      }
    }
  }
  for (int variant = 0; variant < 6; ++variant) {
    Case c = Rotated(i++);
    c.stats = true;
    Push(cases, c, absl::StrCat("Stats_", variant));
    c = Rotated(i++);
    c.dropout = true;
    c.stats = variant % 2 == 0;
    Push(cases, c, absl::StrCat("Dropout_", variant));
    c = Rotated(i++);
    c.token_major_output = true;
    Push(cases, c, absl::StrCat("TokenMajorOutput_", variant));
    c = Rotated(i++);
    c.transpose_reorder = true;
    Push(cases, c, absl::StrCat("TransposeReorder_", variant));
    c = Rotated(i++);
    c.probs_second = true;
    Push(cases, c, absl::StrCat("ProbsSecond_", variant));
    c = Rotated(i++);
    c.type = variant % 2 == 0 ? kF16 : kBF16;
    c.scores = kF32;
    c.cast_probs = true;
    Push(cases, c, absl::StrCat("CastProbs_", variant));
  }
  for (int variant = 0; variant < 8; ++variant) {
    Case c = Rotated(i++);
    c.static_codes = true;
    c.form = variant % 2 == 0 ? Form::k5D : Form::k4D;
    c.ratio = c.form == Form::k4D ? 1 : 2 + variant % 4 / 2;
    c.type = variant < 4 ? kF32 : kBF16;
    c.scores = c.type;
    c.k_layout = Case::KLayout::kTokenRows;
    c.q_len = 4;
    Push(cases, c, absl::StrCat("StaticCodes_", variant));
  }
  // Q, K and V are bf16: they are multiplied as such without permission.
  for (int variant = 0; variant < 6; ++variant) {
    Case c = Rotated(i++);
    c.type = c.scores = kBF16;
    c.k = c.v = {.type = kBF16};
    c.q_len = 20 + 13 * variant;
    c.kv_len = 70 + 41 * variant;
    Push(cases, c, absl::StrCat("BF16_", variant));
  }
  for (int segments = 2; segments <= 4; ++segments) {
    for (const bool plain : {false, true}) {
      for (int variant = 0; variant < 2; ++variant) {
        Case c = Rotated(i++);
        c.kv_len = variant == 0 ? 72 : 300;
        c.segments = segments;
        c.plain_tail = plain;
        Push(cases, c, absl::StrCat("Segments", segments, plain ? "_plain_tail_" : "_", variant));
      }
    }
  }
  for (int variant = 0; variant < 9; ++variant) {
    Case c = Rotated(i++);
    c.real_lengths = true;
    c.batch = variant % 3 == 0 ? 4 : 2;
    c.kv_len = variant < 6 ? 48 : 300;
    c.stats = variant % 4 == 0;
    // A diagonal from the bottom right needs its length given by the graph.
    std::erase_if(c.masks, [](const Mask& m) { return m.kind == Kind::kBottomRight; });
    Push(cases, c, absl::StrCat("RealLengths_", variant));
  }
}

// Scales and masks of other types than the scores, which stay of theirs.
void AddMixedTypeCases(std::vector<Case>& cases) {
  int i = 0;
  for (const DataType type : {kF32, kF16, kBF16}) {
    for (const bool narrow : {false, true}) {
      if (narrow && type == kF32) continue;
      const DataType scores = narrow ? type : kF32;
      for (const DataType operand : {kF32, kF16, kBF16, kS32}) {
        if (operand == type) continue;
        Case c = Base(i++);
        c.type = type;
        c.scores = scores;
        c.cast_probs = false;
        if (i % 2 == 0) c.q_len = 1;
        c.scale = i % 3 == 0 ? Case::Scale::kDivide : Case::Scale::kMultiply;
        c.scale_after_masks = i % 4 == 1;
        c.scale_type = operand == kS32 ? kF32 : operand;
        c.mask_type = operand;
        c.masks = {{.kind = Kind::kAdditive, .over = i % 3 == 1 ? "hrqs" : "qs"}};
        if (i % 5 == 0) c.masks.push_back({.kind = Kind::kCausal});
        const auto name = [](DataType t) { return std::string(DataTypeName(t)); };
        Push(cases, c,
             absl::StrCat("Mixed_", name(type), "_scores_", name(scores), "_with_", name(operand)));
      }
    }
  }
}

void AddRotationCases(std::vector<Case>& cases) {
  const std::pair<int64_t, int64_t> sizes[] = {{64, 64},  {64, 16}, {96, 32}, {128, 128},
                                               {128, 32}, {80, 16}, {24, 8},  {256, 256}};
  constexpr DataType kTypes[] = {kF32, kF16, kBF16};
  int i = 0;
  for (const auto& [size, block] : sizes) {
    for (const int64_t q_len : {1, 7, 70}) {
      Case c = Rotated(i);
      c.k_layout = Case::KLayout::kTokenRows;
      c.head_size = size;
      c.v_head_size = 0;
      c.q_len = q_len;
      c.type = kTypes[i % 3];
      c.scores = kF32;
      c.ratio = c.form == Form::k4D ? 1 : 1 + i % 4;
      c.batch = 1;
      // Codes of what was rotated when it was written: Q alone, and the output.
      c.q_hadamard = block;
      c.output_hadamard = block;
      if (i % 2 == 0) c.kv_len = 300;
      if (i % 4 == 1) {
        c.segments = 2 + i % 3;
        c.plain_tail = i % 3 == 0;
        c.kv_len = 90;
      }
      if (i % 5 == 2) {
        c.real_lengths = true;
        std::erase_if(c.masks, [](const Mask& m) { return m.kind == Kind::kBottomRight; });
      }
      const std::string name = absl::StrCat("Rotated_", size, "_by_", block, "_q", q_len);
      Push(cases, c, absl::StrCat(name, "_Q_O"));
      c.q_hadamard = 0;
      c.k_hadamard = block;
      c.output_hadamard = 0;
      c.v_hadamard = block;
      Push(cases, c, absl::StrCat(name, "_K_V"));
      ++i;
    }
  }
  for (int variant = 0; variant < 4; ++variant) {
    Case c = Base(i++);
    c.form = Form::k5D;
    c.k_layout = Case::KLayout::kTokenRows;
    c.head_size = 64;
    c.v_head_size = 96;
    // Of the first nothing is left.
    c.q_hadamard = c.k_hadamard = 64;
    c.v_hadamard = variant == 3 ? 0 : 32;
    c.output_hadamard = variant % 3 == 0 ? 32 : 0;
    c.token_major_output = variant == 1;
    c.probs_second = variant == 2;
    c.transpose_reorder = variant == 3;
    Push(cases, c, absl::StrCat("Rotated_twice_", variant));
  }
}

void AddFirstClassCases(std::vector<Case>& cases) {
  const auto base = [](int i) {
    Case c = Rotated(i);
    c.form = Form::kFirstClass;
    c.k_layout = Case::KLayout::kTokenRows;
    c.ratio = 1 + i % 4;
    c.q_len = 3 + i % 5;
    c.masks.clear();
    return c;
  };
  for (int i = 0; i < 10; ++i) Push(cases, base(i), absl::StrCat("Op_plain_", i));
  int i = 0;
  const std::pair<int64_t, int64_t> windows[] = {{-1, 0}, {0, 0}, {3, 0}, {2, 2}, {-1, 4}, {5, -1}};
  for (const auto& [left, right] : windows) {
    for (const bool bottom_right : {false, true}) {
      Case c = base(i++);
      c.left_window = left;
      c.right_window = right;
      c.bottom_right = bottom_right;
      // Windows that leave whole tiles of tokens out on either side, for some rows only.
      Case wide = c;
      wide.kv_len = 300;
      wide.q_len = 140;
      wide.batch = 1;
      wide.left_window = left > 0 ? left * 20 : left;
      wide.right_window = right > 0 ? right * 20 : right;
      const auto bound = [](int64_t b) { return b < 0 ? std::string("all") : absl::StrCat(b); };
      Push(cases, c,
           absl::StrCat("Op_window_", bound(left), "_", bound(right),
                        bottom_right ? "_bottom_right" : "_top_left"));
    }
  }
  for (int bits = 1; bits < 64; bits += 3) {
    Case c = base(i++);
    c.sinks = bits & 1;
    c.alibi = bits & 2;
    c.real_lengths = bits & 4;
    c.soft_cap = bits & 8;
    c.stats = bits & 16;
    if (bits & 32) c.masks.push_back({.kind = Kind::kAdditive, .over = "nhrqs"});
    const float fill = bits % 2 == 0 ? kInfinity : -2.f;
    if (bits % 5 < 2) c.masks.push_back({.kind = Kind::kSelect, .over = "nqs", .fill = fill});
    if (bits % 3 == 1) {
      c.right_window = 0;
      c.bottom_right = bits % 2 == 0;
    }
    if (bits % 4 == 1) c.kv_len = 520;
    Push(cases, c, absl::StrCat("Op_features_", bits));
  }
}

}  // namespace kvant::conformance
