#include "kvant/cache/import_export.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/codebooks.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Foreign words and halves are little-endian in memory, kvant's are the machine's.
static_assert(std::endian::native == std::endian::little);

constexpr int64_t kHalfBytes = 2;

template <typename... Parts>
absl::Status Error(std::string_view what, const Parts&... message) {
  return InvalidArguments(what, ": ", message...);
}

struct Extent {
  std::string_view name;
  int64_t value;
};

// None is negative, and sizes computed from them fit 64 bits.
absl::Status CheckExtents(std::string_view what, std::initializer_list<Extent> extents) {
  Dims dims = {64};  // more bits than any format spends on an element
  std::string text;
  for (const auto& [name, value] : extents) {
    if (value < 0) return Error(what, name, " is ", value);
    dims.push_back(value);
    absl::StrAppend(&text, text.empty() ? "" : " * ", std::string(name), " ", value);
  }
  if (CheckedProduct(dims)) return absl::OkStatus();
  return Error(what, text, " elements overflow 64 bits");
}

absl::Status CheckMultiple(std::string_view what, Extent extent, int64_t of,
                           std::string_view of_what) {
  if (of > 0 && extent.value % of == 0) return absl::OkStatus();
  return Error(what, extent.name, " ", extent.value, " is not a multiple of ", of_what, ", ", of);
}

struct Memory {
  std::string_view name;
  ConstTensor tensor;
  int64_t needed;  // bytes
};

absl::Status CheckMemory(std::string_view what, std::initializer_list<Memory> memories) {
  for (const auto& [name, tensor, needed] : memories) {
    const size_t has = tensor.data == nullptr ? 0 : tensor.bytes;
    if (has < static_cast<size_t>(needed)) {
      return Error(what, name, " has ", has, " bytes, needs ", needed);
    }
  }
  return absl::OkStatus();
}

const uint8_t* BytesOf(ConstTensor tensor) { return static_cast<const uint8_t*>(tensor.data); }
uint8_t* BytesOf(Tensor tensor) { return static_cast<uint8_t*>(tensor.data); }

ConstQuantizedTensors Const(const QuantizedTensors& tensors) {
  return {tensors.codes, tensors.scales, tensors.zero_points};
}

void CopyHalf(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, kHalfBytes); }

// A minimum to a zero point or back. The sign is the highest bit of f16 and of bf16.
void CopyNegated(const uint8_t* from, uint8_t* to) {
  to[0] = from[0];
  to[1] = from[1] ^ 0x80;
}

constexpr GgmlBlockInfo kGgmlBlocks[] = {
#define KVANT_GGML_BLOCK(name, text, elements, bytes, codes, zero_points, codebook) \
  {text, elements, bytes, codes, zero_points, codebook},
#include "kvant/cache/ggml_blocks.inc"
};

// --- Blocks ---------------------------------------------------------------

constexpr int64_t kHalfBlock = 16;  // codes i and i + 16 share a byte

int64_t CodeBytes(const GgmlBlockInfo& info) { return BytesFor(info.codes, info.elements); }

// ggml stores a signed four-bit code plus 8, which is its highest bit.
uint8_t FlipOf(const GgmlBlockInfo& info) { return info.codes == kS4 ? 0x88 : 0; }

void UnpackHalves(const uint8_t* from, uint8_t* to, uint8_t flip) {
  for (int64_t i = 0; i < kHalfBlock / 2; ++i) {
    const int even = from[2 * i] ^ flip, odd = from[2 * i + 1] ^ flip;
    to[i] = static_cast<uint8_t>((even & 0x0f) | (odd & 0x0f) << 4);
    to[kHalfBlock / 2 + i] = static_cast<uint8_t>(even >> 4 | (odd & 0xf0));
  }
}

void PackHalves(const uint8_t* from, uint8_t* to, uint8_t flip) {
  for (int64_t i = 0; i < kHalfBlock / 2; ++i) {
    const int low = from[i] ^ flip, high = from[kHalfBlock / 2 + i] ^ flip;
    to[2 * i] = static_cast<uint8_t>((low & 0x0f) | (high & 0x0f) << 4);
    to[2 * i + 1] = static_cast<uint8_t>(low >> 4 | (high & 0xf0));
  }
}

// The number of blocks, or what is wrong.
absl::StatusOr<int64_t> CheckBlocks(std::string_view verb, GgmlBlock kind, int64_t rows,
                                    int64_t row_length, ConstTensor blocks,
                                    const ConstQuantizedTensors& kvant) {
  if (static_cast<size_t>(kind) >= std::size(kGgmlBlocks)) {
    return Error(verb, "ggml block ", static_cast<int>(kind), " is none of ",
                 std::size(kGgmlBlocks));
  }
  const GgmlBlockInfo& info = InfoOf(kind);
  const std::string what = absl::StrCat(std::string(verb), " ", std::string(info.name));
  KVANT_RETURN_IF_ERROR(CheckExtents(what, {{"rows", rows}, {"row length", row_length}}));
  KVANT_RETURN_IF_ERROR(
      CheckMultiple(what, {"row length", row_length}, info.elements, "a block's elements"));
  if (!info.zero_points && kvant.zero_points.data != nullptr) {
    return Error(what, "has no minimum, but ", kvant.zero_points.bytes,
                 " bytes are given for zero points");
  }
  const int64_t count = rows * (row_length / info.elements);
  KVANT_RETURN_IF_ERROR(CheckMemory(
      what, {{"blocks", blocks, count * info.bytes},
             {"codes", kvant.codes, count * CodeBytes(info)},
             {"scales", kvant.scales, count * kHalfBytes},
             {"zero points", kvant.zero_points, info.zero_points ? count * kHalfBytes : 0}}));
  return count;
}

// --- Rows of int4 -----------------------------------------------------------

absl::Status CheckRows(std::string_view what, int64_t rows, int64_t row_length, int64_t groups,
                       ConstTensor data, const ConstQuantizedTensors& kvant) {
  KVANT_RETURN_IF_ERROR(CheckExtents(what, {{"rows", rows}, {"row length", row_length}}));
  KVANT_RETURN_IF_ERROR(CheckMultiple(what, {"row length", row_length}, 2, "the codes of a byte"));
  KVANT_RETURN_IF_ERROR(
      CheckMultiple(what, {"row length", row_length}, groups, "the number of groups"));
  // A row without elements still has its groups.
  KVANT_RETURN_IF_ERROR(CheckExtents(what, {{"rows", rows}, {"groups", groups}}));
  const int64_t parameters = rows * groups * kHalfBytes;
  const int64_t codes = rows * (row_length / 2);
  return CheckMemory(what, {{"data", data, 2 * parameters + codes},
                            {"codes", kvant.codes, codes},
                            {"scales", kvant.scales, parameters},
                            {"zero points", kvant.zero_points, parameters}});
}

// --- KIVI -------------------------------------------------------------------

// Of a matrix of codes [rows, columns] the transposed one. It takes whole bytes.
template <int kBits>
void TransposeCodes(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to) {
  constexpr int64_t kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  int64_t row = 0, column = 0;
  for (int64_t byte = 0; byte < rows * columns / kPerByte; ++byte) {
    int codes = 0;
    for (int64_t i = 0; i < kPerByte; ++i) {
      const int64_t index = row * columns + column;
      const int code = from[index / kPerByte] >> (index % kPerByte * kBits) & kMask;
      codes |= code << (i * kBits);
      if (++row == rows) {
        row = 0;
        ++column;
      }
    }
    to[byte] = static_cast<uint8_t>(codes);
  }
}

void TransposeHalves(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to) {
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row, to += kHalfBytes) {
      std::memcpy(to, from + (row * columns + column) * kHalfBytes, kHalfBytes);
    }
  }
}

enum class KiviPart : uint8_t { kKeys, kValues };

// The three tensors of either side, in the order code, scale, minimum.
using Sources = std::array<ConstTensor, 3>;
using Destinations = std::array<Tensor, 3>;
using Names = std::array<std::string_view, 3>;
constexpr Names kKiviNames = {"code", "scale", "mn"};
constexpr Names kKvantNames = {"codes", "scales", "zero points"};

absl::Status CheckKivi(std::string_view what, const KiviShape& shape, KiviPart part) {
  KVANT_RETURN_IF_ERROR(CheckExtents(what, {{"batch", shape.batch},
                                            {"heads", shape.heads},
                                            {"tokens", shape.tokens},
                                            {"head size", shape.head_size}}));
  if (shape.bits != 2 && shape.bits != 4) {
    return Error(what, "codes of ", shape.bits, " bits; it takes 2 and 4");
  }
  const Extent packed = part == KiviPart::kKeys ? Extent{"tokens", shape.tokens}
                                                : Extent{"head size", shape.head_size};
  KVANT_RETURN_IF_ERROR(CheckMultiple(what, packed, shape.group, "the group"));
  return CheckMultiple(what, packed, 32 / shape.bits, "the codes of a word");
}

// Import and export are the same: keys are transposed, minima change sign, all else is copied.
absl::Status ConvertKivi(std::string_view what, const KiviShape& shape, KiviPart part, bool import,
                         const Sources& from, const Destinations& to) {
  KVANT_RETURN_IF_ERROR(CheckKivi(what, shape, part));
  const bool keys = part == KiviPart::kKeys;
  const int64_t heads = shape.batch * shape.heads;
  const int64_t elements = shape.tokens * shape.head_size;  // of a head
  const int64_t groups = elements / shape.group;
  const int64_t code_bytes = elements * shape.bits / 8;
  const std::array<int64_t, 3> head_bytes = {code_bytes, groups * kHalfBytes, groups * kHalfBytes};
  const Names& from_names = import ? kKiviNames : kKvantNames;
  const Names& to_names = import ? kKvantNames : kKiviNames;
  for (size_t i = 0; i < head_bytes.size(); ++i) {
    KVANT_RETURN_IF_ERROR(CheckMemory(what, {{from_names[i], from[i], heads * head_bytes[i]},
                                             {to_names[i], to[i], heads * head_bytes[i]}}));
  }
  if (heads * elements == 0) return absl::OkStatus();

  // A head of keys is [channels, tokens] in KIVI, [tokens, channels] in kvant.
  struct Matrix {
    int64_t rows, columns;
  };
  const auto source_of_keys = [&](int64_t tokens) {
    return import ? Matrix{shape.head_size, tokens} : Matrix{tokens, shape.head_size};
  };
  const Matrix codes = source_of_keys(shape.tokens);
  const Matrix parameters = source_of_keys(shape.tokens / shape.group);
  for (int64_t head = 0; head < heads; ++head) {
    for (size_t i = 0; i < head_bytes.size(); ++i) {
      const uint8_t* source = BytesOf(from[i]) + head * head_bytes[i];
      uint8_t* destination = BytesOf(to[i]) + head * head_bytes[i];
      if (!keys) {
        std::memcpy(destination, source, static_cast<size_t>(head_bytes[i]));
      } else if (i > 0) {
        TransposeHalves(source, parameters.rows, parameters.columns, destination);
      } else if (shape.bits == 2) {
        TransposeCodes<2>(source, codes.rows, codes.columns, destination);
      } else {
        TransposeCodes<4>(source, codes.rows, codes.columns, destination);
      }
    }
  }
  uint8_t* minima = BytesOf(to[2]);
  for (int64_t i = 0; i < heads * groups; ++i) {
    CopyNegated(minima + i * kHalfBytes, minima + i * kHalfBytes);
  }
  return absl::OkStatus();
}

}  // namespace

const GgmlBlockInfo& InfoOf(GgmlBlock kind) {
  static constexpr GgmlBlockInfo kNone;
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kGgmlBlocks) ? kGgmlBlocks[index] : kNone;
}

absl::Status ImportGgmlBlocks(GgmlBlock kind, int64_t rows, int64_t row_length, ConstTensor blocks,
                              const QuantizedTensors& to) {
  KVANT_ASSIGN_OR_RETURN(const int64_t count,
                         CheckBlocks("import from", kind, rows, row_length, blocks, Const(to)));
  const GgmlBlockInfo& info = InfoOf(kind);
  const int64_t code_bytes = CodeBytes(info);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* block = BytesOf(blocks) + i * info.bytes;
    const uint8_t* stored = block + info.bytes - code_bytes;
    uint8_t* codes = BytesOf(to.codes) + i * code_bytes;
    CopyHalf(block, BytesOf(to.scales) + i * kHalfBytes);
    if (info.zero_points) {
      CopyNegated(block + kHalfBytes, BytesOf(to.zero_points) + i * kHalfBytes);
    }
    if (BitsOf(info.codes) == 4) {
      UnpackHalves(stored, codes, FlipOf(info));
    } else {
      std::memcpy(codes, stored, static_cast<size_t>(code_bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status ExportGgmlBlocks(GgmlBlock kind, int64_t rows, int64_t row_length,
                              const ConstQuantizedTensors& from, Tensor blocks) {
  KVANT_ASSIGN_OR_RETURN(const int64_t count,
                         CheckBlocks("export to", kind, rows, row_length, blocks, from));
  const GgmlBlockInfo& info = InfoOf(kind);
  const int64_t code_bytes = CodeBytes(info);
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* block = BytesOf(blocks) + i * info.bytes;
    uint8_t* stored = block + info.bytes - code_bytes;
    const uint8_t* codes = BytesOf(from.codes) + i * code_bytes;
    CopyHalf(BytesOf(from.scales) + i * kHalfBytes, block);
    if (info.zero_points) {
      CopyNegated(BytesOf(from.zero_points) + i * kHalfBytes, block + kHalfBytes);
    }
    if (BitsOf(info.codes) == 4) {
      PackHalves(codes, stored, FlipOf(info));
    } else {
      std::memcpy(stored, codes, static_cast<size_t>(code_bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status ImportRowInt4(int64_t rows, int64_t row_length, int64_t groups, ConstTensor data,
                           const QuantizedTensors& to) {
  KVANT_RETURN_IF_ERROR(
      CheckRows("import from row-wise int4", rows, row_length, groups, data, Const(to)));
  const uint8_t* from = BytesOf(data);
  uint8_t* codes = BytesOf(to.codes);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = row * groups; group < (row + 1) * groups; ++group) {
      CopyHalf(from, BytesOf(to.scales) + group * kHalfBytes);
      CopyNegated(from + kHalfBytes, BytesOf(to.zero_points) + group * kHalfBytes);
      from += 2 * kHalfBytes;
    }
    codes = std::copy_n(from, row_length / 2, codes);
    from += row_length / 2;
  }
  return absl::OkStatus();
}

absl::Status ExportRowInt4(int64_t rows, int64_t row_length, int64_t groups,
                           const ConstQuantizedTensors& from, Tensor data) {
  KVANT_RETURN_IF_ERROR(CheckRows("export to row-wise int4", rows, row_length, groups, data, from));
  const uint8_t* codes = BytesOf(from.codes);
  uint8_t* to = BytesOf(data);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = row * groups; group < (row + 1) * groups; ++group) {
      CopyHalf(BytesOf(from.scales) + group * kHalfBytes, to);
      CopyNegated(BytesOf(from.zero_points) + group * kHalfBytes, to + kHalfBytes);
      to += 2 * kHalfBytes;
    }
    to = std::copy_n(codes, row_length / 2, to);
    codes += row_length / 2;
  }
  return absl::OkStatus();
}

absl::Status ImportKiviKeys(const KiviShape& shape, const ConstKiviTensors& from,
                            const QuantizedTensors& to) {
  return ConvertKivi("import from KIVI's keys", shape, KiviPart::kKeys, true,
                     {from.code, from.scale, from.mn}, {to.codes, to.scales, to.zero_points});
}

absl::Status ExportKiviKeys(const KiviShape& shape, const ConstQuantizedTensors& from,
                            const KiviTensors& to) {
  return ConvertKivi("export to KIVI's keys", shape, KiviPart::kKeys, false,
                     {from.codes, from.scales, from.zero_points}, {to.code, to.scale, to.mn});
}

absl::Status ImportKiviValues(const KiviShape& shape, const ConstKiviTensors& from,
                              const QuantizedTensors& to) {
  return ConvertKivi("import from KIVI's values", shape, KiviPart::kValues, true,
                     {from.code, from.scale, from.mn}, {to.codes, to.scales, to.zero_points});
}

absl::Status ExportKiviValues(const KiviShape& shape, const ConstQuantizedTensors& from,
                              const KiviTensors& to) {
  return ConvertKivi("export to KIVI's values", shape, KiviPart::kValues, false,
                     {from.codes, from.scales, from.zero_points}, {to.code, to.scale, to.mn});
}

}  // namespace kvant
