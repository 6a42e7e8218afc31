// Every format with magnitudes that are hard on products.
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {

void AddHostileCases(std::vector<Case>& cases) {
  using Groups = Storage::Groups;
  using Magnitudes = Case::Magnitudes;
  const Storage storages[] = {
      {.type = kS8, .groups = Groups::kToken},
      {.type = kS8, .group_size = 16, .scales = kF16},
      {.type = kU8, .groups = Groups::kToken, .zero_points = kU8},
      {.type = kS4, .group_size = 16},
      {.type = kU4, .group_size = 16, .zero_points = kU8, .scales = kF16},
      {.type = kS2, .group_size = 16, .scales = kBF16},
      {.type = kU2, .group_size = 16, .zero_points = kU8},
      {.type = kS8, .groups = Groups::kChannel, .group_size = 24},
      {.type = kU4, .groups = Groups::kChannel, .group_size = 24, .zero_points = kU8},
      {.type = kS4, .group_size = 8},
      {.type = kF8E4M3, .groups = Groups::kToken, .scales = kF16},
      {.type = kF8E5M2, .group_size = 16},
      {.type = kF16},
      {.type = kBF16},
      {.type = kF32},
  };
  const std::pair<Magnitudes, const char*> kinds[] = {
      {Magnitudes::kZeroTokens, "zero_tokens"},
      {Magnitudes::kOutlierChannel, "outlier_channel"},
      {Magnitudes::kSmall, "small"},
      {Magnitudes::kWide, "wide"},
  };
  for (const Storage& storage : storages) {
    for (const auto& [kind, name] : kinds) {
      // Multiplied by stored rows, by those of several pages, and by tiles.
      for (const char* const way : {"", "_pages", "_tiles"}) {
        const bool tiles = way == std::string_view("_tiles");
        Case c;
        c.batch = 1;
        c.kv_heads = 2;
        c.ratio = tiles ? 1 : 3;
        c.q_len = tiles ? 20 : 1;
        c.kv_len = 72;
        if (way == std::string_view("_pages")) {
          c.kv_len = 144;
          c.page_size = 48;
          c.real_lengths = true;
        }
        c.head_size = 32;
        c.type = storage.quantized() ? kF32 : storage.type;
        c.k = c.v = storage;
        c.magnitudes = kind;
        const int index = static_cast<int>(&storage - storages);
        c.name =
            absl::StrCat("Hostile_", name, "_", DataTypeName(storage.type).data(), "_", index, way);
        cases.push_back(std::move(c));
      }
    }
  }
}

}  // namespace kvant::conformance
