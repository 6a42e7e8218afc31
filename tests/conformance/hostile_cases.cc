// Every format with magnitudes that are hard on products, and masks that are hard on softmax.
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/tests/conformance/cases.h"

namespace kvant::conformance {

// Padding on the left, as frameworks mask it: tiles of nothing but scores that are hidden by finite
// numbers come before those that are not.
void AddPaddingCases(std::vector<Case>& cases) {
  const Storage storages[] = {
      {.type = kU4, .group_size = 16, .zero_points = kU8, .scales = kF16},
      {.type = kS8, .groups = Storage::Groups::kToken},
      {.type = kF16},
  };
  const std::pair<Mask::Kind, const char*> kinds[] = {{Mask::Kind::kAdditive, "additive"},
                                                      {Mask::Kind::kSelect, "select"}};
  const struct {
    float fill;
    const char* name;
    int64_t padding;
  } fills[] = {{-1e4f, "1e4", 300},
               {-1e9f, "1e9", 300},
               {-1e12f, "1e12", 300},
               {-1e30f, "1e30_all", 700},  // of which even f64 holds nothing else
               {std::numeric_limits<float>::lowest(), "lowest", 300}};
  for (const Storage& storage : storages) {
    for (const auto& [kind, kind_name] : kinds) {
      for (const auto& [fill, fill_name, padding] : fills) {
        for (const bool tiles : {false, true}) {
          Case c;
          c.batch = 1;
          c.ratio = tiles ? 1 : 3;
          c.q_len = tiles ? 20 : 1;
          c.kv_len = 700;
          // Beside f16's lowest f32 holds some of a score.
          if (padding == c.kv_len && !storage.quantized()) continue;
          c.head_size = 32;
          c.type = storage.quantized() ? kF32 : storage.type;
          c.k = c.v = storage;
          c.masks = {{.kind = kind, .over = "s", .fill = fill, .padding = padding}};
          c.stats = !tiles;
          c.name = absl::StrCat("Padding_", DataTypeName(storage.type).data(), "_", kind_name, "_",
                                fill_name, tiles ? "_tiles" : "");
          cases.push_back(std::move(c));
        }
      }
    }
  }
}

void AddHostileCases(std::vector<Case>& cases) {
  AddPaddingCases(cases);
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
