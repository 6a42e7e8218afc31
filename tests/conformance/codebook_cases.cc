// K and V whose codes are positions in a codebook.
#include <cmath>
#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kvant/graph/codebooks.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {
namespace {

using Groups = Storage::Groups;

std::vector<float> Named(std::string_view name) {
  const absl::Span<const float> values = CodebookOfName(name);
  return {values.begin(), values.end()};
}

// Of no order, so that no code is what it would be as a number.
std::vector<float> Mixed(int count) {
  std::vector<float> values;
  for (int i = 0; i < count; ++i) {
    values.push_back(std::sin(static_cast<float>(7 * i + 1)) * (1 + static_cast<float>(i % 3)));
  }
  return values;
}

}  // namespace

void AddCodebookCases(std::vector<Case>& cases) {
  const Storage storages[] = {
      {.type = kU4, .group_size = 32, .scales = kF16, .codebook = Named("nf4")},
      {.type = kU4, .group_size = 32, .scales = kF16, .codebook = Named("iq4_nl")},
      {.type = kU4, .group_size = 16, .scales = kF16, .codebook = Named("e2m1")},
      {.type = kU8, .groups = Groups::kToken, .scales = kBF16, .codebook = Mixed(256)},
      {.type = kU2, .group_size = 8, .scales = kF32, .codebook = Mixed(4)},
      {.type = kU4, .groups = Groups::kChannel, .group_size = 8, .codebook = Mixed(16)},
      {.type = kU2, .groups = Groups::kChannel, .group_size = 0, .codebook = Mixed(4)},
      {.type = kU8, .groups = Groups::kChannel, .group_size = 12, .codebook = Mixed(256)},
      {.type = kU4, .groups = Groups::kHead, .scales = kF16, .codebook = Named("nf4")},
      {.type = kU4, .groups = Groups::kTensor, .codebook = Named("nf4")},
      {.type = kS8, .group_size = 16, .scales = kF16},
      {.type = kF16},
  };
  int i = 0;
  const int count = static_cast<int>(std::size(storages));
  for (int k = 0; k < count; ++k) {
    for (const int step : {0, 1, 3, 7, 11}) {
      Case c = Rotated(i++);
      // Attention stated directly has no codebooks.
      if (c.form == Case::Form::kFirstClass) c.form = Case::Form::k5D;
      c.k = storages[k];
      c.v = storages[(k + step) % count];
      if (!c.has_codebook()) continue;
      for (const Storage* storage : {&c.k, &c.v}) {
        if (!storage->quantized()) c.type = storage->type;
      }
      if (c.scores != kF32) c.scores = c.type;
      c.kv_len = 24 * (1 + i % 7);
      if (i % 3 == 0) c.head_size = 64;
      cases.push_back(c);
      cases.back().name = absl::StrCat("Codebook_", k, "_", (k + step) % count);
    }
  }
  // Rows of codes that begin within a byte.
  for (const DataType type : {kU4, kU2}) {
    Case c;
    c.head_size = 7;
    c.v_head_size = 9;
    c.kv_len = 33;
    c.k = {.type = type, .group_size = 1, .codebook = Mixed(1 << BitsOf(type))};
    c.v = {.type = type,
           .groups = Groups::kChannel,
           .group_size = 11,
           .codebook = Mixed(1 << BitsOf(type))};
    for (const Case::KLayout layout : {Case::KLayout::kTokenRows, Case::KLayout::kTokensLast}) {
      c.k_layout = layout;
      cases.push_back(c);
      cases.back().name =
          absl::StrCat("Codebook_odd_rows_", BitsOf(type), "_", static_cast<int>(layout));
    }
  }
}

}  // namespace kvant::conformance
