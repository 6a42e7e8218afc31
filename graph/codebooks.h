// Codebooks that others use, by name: what the codes of attribute `codebook` stand for.
#ifndef KVANT_GRAPH_CODEBOOKS_H_
#define KVANT_GRAPH_CODEBOOKS_H_

#include <string_view>

#include "absl/types/span.h"

namespace kvant {

// Quantiles of the normal distribution with 0 among them: bitsandbytes' NF4
// (bitsandbytes/functional.py, get_4bit_type), after QLoRA, https://arxiv.org/abs/2305.14314.
inline constexpr float kNf4Codebook[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// ggml's kvalues_iq4nl (ggml/src/ggml-common.h).
inline constexpr float kIq4NlCodebook[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                             1,    13,   25,  38,  53,  69,  89,  113};

// The 4-bit float of OCP's microscaling formats (MXFP4, NVFP4), its sign in the highest bit.
inline constexpr float kE2M1Codebook[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                            -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

struct CodebookRow {
  std::string_view name;
  absl::Span<const float> values;
};

inline constexpr CodebookRow kCodebooks[] = {
    {"nf4", kNf4Codebook},
    {"iq4_nl", kIq4NlCodebook},
    {"e2m1", kE2M1Codebook},
};

// Empty if there is none of this name.
inline absl::Span<const float> CodebookOfName(std::string_view name) {
  for (const CodebookRow& codebook : kCodebooks) {
    if (codebook.name == name) return codebook.values;
  }
  return {};
}

}  // namespace kvant

#endif  // KVANT_GRAPH_CODEBOOKS_H_
