// What is loaded of a cache: by lengths, first tokens and pages; and ragged queries.
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {
namespace {

using Form = Case::Form;
using Groups = Storage::Groups;

// Groups along tokens divide pages.
const Storage kStorages[] = {
    {.type = kF32},
    {.type = kS8, .group_size = 32, .scales = kF16},
    {.type = kU4, .group_size = 32, .zero_points = kU4, .scales = kF16},
    {.type = kU4, .groups = Groups::kChannel, .group_size = 16, .zero_points = kF16},
    {.type = kU2, .groups = Groups::kChannel, .group_size = 32, .zero_points = kF32},
    {.type = kS4, .groups = Groups::kToken},
    {.type = kF8E4M3, .groups = Groups::kToken},
    {.type = kU2, .group_size = 16, .zero_points = kF16},
    {.type = kS8, .groups = Groups::kTensor},
    {.type = kS8, .groups = Groups::kHead},
};

Case Base(int i) {
  Case c;
  c.batch = 4;
  c.ratio = 1 + i % 4;
  c.q_len = i % 3 == 0 ? 1 : 2 + i % 4;
  c.head_size = 32 << (i % 3);
  c.kv_len = 192 + 64 * (i % 3);
  c.type = i % 2 == 0 ? kF32 : kF16;
  c.k = kStorages[i % std::size(kStorages)];
  c.v = kStorages[(i * 3 + 1) % std::size(kStorages)];
  c.real_lengths = true;
  c.stats = i % 4 == 1;
  return c;
}

void Push(std::vector<Case>& cases, Case c, std::string name) {
  c.name = std::move(name);
  cases.push_back(std::move(c));
}

// Attention stated directly, with all that it may have.
Case Direct(int i) {
  Case c = Base(i);
  c.form = Form::kFirstClass;
  c.sinks = i % 3 == 1;
  c.alibi = i % 4 == 2;
  c.bottom_right = true;
  c.right_window = i % 2 == 0 ? 0 : -1;
  c.left_window = i % 5 == 4 ? 7 : -1;
  if (i % 4 == 3) c.masks.push_back({.kind = Mask::Kind::kAdditive, .over = "hrqs"});
  if (i % 6 == 5) c.masks.push_back({.kind = Mask::Kind::kSelect, .over = "qs"});
  return c;
}

}  // namespace

void AddLoadCases(std::vector<Case>& cases) {
  const int64_t pages[] = {16, 32, 64, 8, 24};
  constexpr int kSizes = std::size(pages);
  for (int i = 0; i < 20; ++i) {
    Case c = Base(i);
    c.page_size = pages[i % kSizes];
    c.kv_len -= c.kv_len % c.page_size;
    if (i % 4 == 2) c.form = Form::k4D;
    if (i % 4 == 2) c.kv_heads = c.ratio = 1;
    if (i % 4 == 3) c.form = Form::kReshape;
    c.k_layout = static_cast<Case::KLayout>(i % 3);
    if (i % 5 == 1) c.masks.push_back({.kind = Mask::Kind::kCausal});
    if (i % 5 == 3) c.buffers = Case::Buffers::kInterleaved;
    if (i % 5 == 4) c.buffers = Case::Buffers::kPadded;
    if (i % 7 == 6) c.q_hadamard = c.k_hadamard = 16;
    if (i % 7 == 6) c.k_layout = Case::KLayout::kTokenRows;
    Push(cases, c, absl::StrCat("Pages_", i));
  }
  for (int i = 0; i < 20; ++i) {
    Case c = Direct(i);
    c.page_size = pages[(i / 2) % kSizes];
    c.kv_len -= c.kv_len % c.page_size;
    Push(cases, c, absl::StrCat("Pages_op_", i));
  }
  for (int i = 0; i < 12; ++i) {
    Case c = i % 2 == 0 ? Base(i) : Direct(i);
    c.latent = true;
    c.head_size = i % 3 == 0 ? 96 : 80;
    c.v_head_size = i % 3 == 0 ? 64 : 48;
    c.k = c.v = kStorages[i % std::size(kStorages)];
    if (i % 4 == 1) c.page_size = 64;
    if (i % 4 == 2) c.segments = 2;
    if (i % 4 == 3) c.real_lengths = false;
    if (i == 4 || i == 6) {  // as models have them
      c.head_size = 576;
      c.v_head_size = 512;
    }
    Push(cases, c, absl::StrCat("Latent_", i));
  }
  for (int i = 0; i < 12; ++i) {
    Case c = i % 2 == 0 ? Base(i) : Direct(i);
    c.first_tokens = true;
    if (i % 4 == 2) c.masks.push_back({.kind = Mask::Kind::kCausal});
    if (i % 3 == 2) c.segments = c.form == Form::kFirstClass ? 1 : 2;
    Push(cases, c, absl::StrCat("FirstTokens_", i));
  }
  for (int i = 0; i < 24; ++i) {
    Case c = Direct(i);
    c.ragged = true;
    c.real_lengths = i % 3 != 0;
    c.stats = i % 2 == 0;
    c.q_len = i % 6 == 5 ? 70 : 1 + i % 5;
    // So that rows are up to 64, which codes take as they are stored, and more.
    if (i % 6 == 2) c.q_len = 60 / c.ratio;
    if (i % 4 == 1) {
      c.real_lengths = true;
      c.page_size = pages[(i / 4) % kSizes];
      c.kv_len -= c.kv_len % c.page_size;
    } else if (i % 4 == 2) {
      c.real_lengths = false;
      c.real_ranges = true;
    } else {
      c.first_tokens = c.real_lengths;
    }
    Push(cases, c, absl::StrCat("Ragged_", i));
  }
}

}  // namespace kvant::conformance
