// Segments that hold what ranges say at execution.
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;
using Groups = Storage::Groups;

void Push(std::vector<Case>& cases, Case c, std::string name) {
  c.real_ranges = true;
  // A diagonal from the bottom right needs its length given by the graph.
  std::erase_if(c.masks, [](const Mask& m) { return m.kind == Mask::Kind::kBottomRight; });
  c.name = std::move(name);
  cases.push_back(std::move(c));
}

}  // namespace

void AddRangeCases(std::vector<Case>& cases) {
  int i = 0;
  // [sinks | quantized | residual], as caches are kept: all batches differ, one has no tokens.
  const std::pair<Storage, Storage> caches[] = {
      {{.type = kU4, .group_size = 32, .zero_points = kF16, .scales = kF16},
       {.type = kU4, .group_size = 32, .zero_points = kF16, .scales = kF16}},
      {{.type = kU2, .groups = Groups::kChannel, .group_size = 32, .zero_points = kF32},
       {.type = kU2, .group_size = 32, .zero_points = kF32}},
      {{.type = kS8, .groups = Groups::kToken, .scales = kF16},
       {.type = kS8, .groups = Groups::kToken, .scales = kF16}},
      {{.type = kF8E4M3, .groups = Groups::kToken}, {.type = kU4, .group_size = 16}},
  };
  for (size_t j = 0; j < std::size(caches); ++j) {
    for (const int64_t q_len : {1, 4}) {
      for (const DataType type : {kF16, kF32}) {
        Case c;
        c.batch = 4;
        c.ratio = 1 + i % 4;
        c.q_len = q_len;
        c.head_size = c.v_head_size = 64;
        c.kv_len = 4 + 192 + 96 + 29 * (i++ % 2);
        c.plain_head = 4;
        c.segments = 2;
        c.plain_tail = true;
        c.type = type;
        c.k = caches[j].first;
        c.v = caches[j].second;
        c.stats = j % 2 == 0;
        Push(cases, c,
             absl::StrCat("Ranges_cache_", j, "_", q_len, type == kF16 ? "_f16" : "_f32"));
      }
    }
  }
  for (int variant = 0; variant < 24; ++variant) {
    Case c = Rotated(i++);
    c.segments = 1 + variant % 3;
    c.plain_tail = variant % 4 == 1;
    c.plain_head = variant % 5 == 3 ? 3 : 0;
    c.batch = variant % 2 == 0 ? 4 : 2;
    c.kv_len += variant % 4 == 0 ? 200 : 0;
    Push(cases, c, absl::StrCat("Ranges_", variant));
  }
  // Codes long enough that blocks of their own have them, and others the rest.
  const Storage codes[] = {
      {.type = kU4, .group_size = 32, .zero_points = kF16, .scales = kF16},
      {.type = kS8, .groups = Groups::kToken, .scales = kF16},
      {.type = kU4, .group_size = 64, .zero_points = kU4, .scales = kF16},
      {.type = kS4, .group_size = 32, .scales = kF32},
  };
  const Case::Magnitudes magnitudes[] = {Case::Magnitudes::kOrdinary, Case::Magnitudes::kZeroTokens,
                                         Case::Magnitudes::kOutlierChannel};
  for (int variant = 0; variant < 12; ++variant) {
    Case c;
    c.batch = 1 + variant % 3;
    c.ratio = 1 + variant % 5;
    c.q_len = variant % 4 == 3 ? 2 : 1;
    c.head_size = c.v_head_size = variant % 3 == 2 ? 128 : 64;
    c.kv_len = 3 + 1800 + 29 * (variant % 2);
    c.plain_head = variant % 4 == 1 ? 0 : 3;
    c.segments = 2;
    c.plain_tail = true;
    c.type = variant % 3 == 0 ? kF16 : variant % 3 == 1 ? kF32 : kBF16;
    c.k = codes[variant % 4];
    c.v = codes[(variant / 2 + variant) % 4];
    c.soft_cap = variant % 5 == 2;
    c.stats = variant % 2 == 0;
    c.inf_as_zero = variant % 4 != 2;
    c.q_hadamard = c.k_hadamard = c.v_hadamard = c.output_hadamard = variant % 6 == 5 ? 32 : 0;
    c.magnitudes = magnitudes[variant % 7 % 3];
    Push(cases, c, absl::StrCat("Ranges_parts_", variant));
  }
  // Attention stated directly is of one segment: a ring.
  for (int variant = 0; variant < 8; ++variant) {
    Case c = Rotated(i++);
    c.form = Form::kFirstClass;
    c.batch = variant % 2 == 0 ? 4 : 2;
    c.ratio = 2;
    c.masks.clear();
    c.k_layout = Case::KLayout::kTokenRows;
    c.scores = kF32;
    c.cast_probs = false;
    c.right_window = variant % 3 == 0 ? 0 : -1;
    c.left_window = variant % 4 == 3 ? 7 : -1;
    c.bottom_right = true;
    c.sinks = variant % 3 == 1;
    if (variant % 2 == 1) c.masks.push_back({.kind = Mask::Kind::kAdditive, .over = "nhrqs"});
    Push(cases, c, absl::StrCat("Ranges_op_", variant));
  }
}

}  // namespace kvant::conformance
