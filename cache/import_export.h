// Import and export of KV caches as other programs store them: ggml, FBGEMM, KIVI.
//
// A conversion computes nothing: it moves codes, scales and minima as bits. So whatever the bytes
// are, exporting what was imported gives them back, and the other way round.
//
// kvant's side is a dense, row-major tensor of codes with its groups (docs/ops.md):
//   codes        packed little-end first
//   scales       16 bits, one per group
//   zero points  16 bits, in real units, one per group: the group's minimum with its sign bit
//                flipped, NaN and 0 included. A code stands for code * scale - zero point
// Strided memory is refused. Where [B, H, T, D] lies with a capacity of more than T tokens, each
// head is dense by itself. Bytes of a tensor beyond those that are needed are left alone. Source
// and destination must not overlap. An error (kInvalidArguments) names the format and the numbers,
// and then nothing has been written.
#ifndef KVANT_CACHE_IMPORT_EXPORT_H_
#define KVANT_CACHE_IMPORT_EXPORT_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvant/backends/tensor.h"
#include "kvant/graph/data_type.h"

namespace kvant {

struct QuantizedTensors {
  Tensor codes, scales;
  Tensor zero_points = {};  // none where the format has no minimum
};
struct ConstQuantizedTensors {
  ConstTensor codes, scales;
  ConstTensor zero_points = {};
};

// A row of ggml's is blocks of 32 elements. A block begins with its f16 scale. Four-bit codes i and
// i + 16 of a block share byte i.
enum class GgmlBlock : uint8_t {
#define KVANT_GGML_BLOCK(name, ...) name,
#include "kvant/cache/ggml_blocks.inc"
};

struct GgmlBlockInfo {
  std::string_view name;             // ggml's
  int64_t elements = 0;              // of a block: kvant's group along the row
  int64_t bytes = 0;                 // of a block
  DataType codes = kUndef;           // kvant's; s4 is ggml's code less 8
  bool zero_points = false;          // real units, f16
  absl::Span<const float> codebook;  // what codes stand for, times the scale; empty: themselves
};
// Nameless, of 0 elements, for what is none of the enumeration.
const GgmlBlockInfo& InfoOf(GgmlBlock kind);

// `blocks` [rows, row_length / 32] and codes [rows, row_length] with groups [1, 32]. row_length
// must be a multiple of 32.
absl::Status ImportGgmlBlocks(GgmlBlock kind, int64_t rows, int64_t row_length, ConstTensor blocks,
                              const QuantizedTensors& to);
absl::Status ExportGgmlBlocks(GgmlBlock kind, int64_t rows, int64_t row_length,
                              const ConstQuantizedTensors& from, Tensor blocks);

// Rows of "INT4 Decoding GQA CUDA Optimizations for LLM Inference" and FBGEMM's gqa_attn_splitk:
// (f16 scale, f16 shift) for each group, then two codes per byte, low half first. A value is
// code * scale + shift. `data` [rows, 4 * groups + row_length / 2] bytes and u4 codes
// [rows, row_length] with groups [1, row_length / groups]. row_length must be even and a multiple
// of groups; FBGEMM has 1 and 4.
absl::Status ImportRowInt4(int64_t rows, int64_t row_length, int64_t groups, ConstTensor data,
                           const QuantizedTensors& to);
absl::Status ExportRowInt4(int64_t rows, int64_t row_length, int64_t groups,
                           const ConstQuantizedTensors& from, Tensor data);

// KIVI's cache, as its quant/new_pack.py packs it: int32 words of 32 / bits codes, the first in the
// lowest bits. A value is code * scale + mn.
//                 keys                              values
//   code          [B, H, D, T / codes per word]     [B, H, T, D / codes per word]
//   scale, mn     [B, H, D, T / group]              [B, H, T, D / group]
// kvant's codes, u2 or u4, are [B, H, T, D], with groups [1, 1, group, 1] of keys and
// [1, 1, 1, group] of values. Keys are transposed, as KIVI has them by channel; values keep their
// bytes. The axis that is packed (T of keys, D of values) must be a multiple of group and of the
// codes per word. Scales and minima are f16 or bf16, on both sides.
struct KiviShape {
  int64_t batch = 0, heads = 0, tokens = 0, head_size = 0;
  int64_t group = 0;
  int bits = 0;  // 2 or 4
};
struct KiviTensors {
  Tensor code, scale, mn;
};
struct ConstKiviTensors {
  ConstTensor code, scale, mn;
};
absl::Status ImportKiviKeys(const KiviShape& shape, const ConstKiviTensors& from,
                            const QuantizedTensors& to);
absl::Status ExportKiviKeys(const KiviShape& shape, const ConstQuantizedTensors& from,
                            const KiviTensors& to);
absl::Status ImportKiviValues(const KiviShape& shape, const ConstKiviTensors& from,
                              const QuantizedTensors& to);
absl::Status ExportKiviValues(const KiviShape& shape, const ConstQuantizedTensors& from,
                              const KiviTensors& to);

}  // namespace kvant

#endif  // KVANT_CACHE_IMPORT_EXPORT_H_
