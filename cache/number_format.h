// NumberFormat: how the numbers of a tensor are stored. Its text is one word: "u4:g32:zp",
// "s8:channel:g64:sf16".
//
//   TYPE[:GROUPS][:zp|:pzp|:rzp][:CODEBOOK][:ggml][:SCALES]
//   TYPE    f32 bf16 f16 (not quantized) f8_e4m3 f8_e5m2 s8 u8 s4 u4 s2 u2
//   GROUPS  which elements share a scale:
//           gN           N along the head
//           token        one token of one head (the default)
//           all_heads    one token of all heads
//           channel      one channel of one head, over all tokens
//           channel:gN   one channel, N tokens
//           block:gN     N channels of N tokens
//           head         one head
//           tensor       everything
//   zp      zero points: a byte of the code type's sign for integers, in real units
//           (and of the scales' type) for f8
//   pzp     integer zero points of the codes' own type: of u4 two in a byte
//   rzp     zero points in real units for integers too: code * scale - zero point
//   CODEBOOK  a name of graph/codebooks.h: codes are positions in it
//   ggml    scales and codes as ggml's block formats compute them
//   SCALES  sf16, sbf16 or sf32: the scales' type; as the queries otherwise
#ifndef KVANT_CACHE_NUMBER_FORMAT_H_
#define KVANT_CACHE_NUMBER_FORMAT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvant/graph/codebooks.h"
#include "kvant/graph/data_type.h"
#include "kvant/graph/logical_tensor.h"

namespace kvant {

struct NumberFormat {
  enum class Groups : uint8_t { kHeadSlice, kToken, kAllHeads, kChannel, kBlock, kHead, kTensor };
  enum class ZeroPoints : uint8_t {
    kNone,
    kBytes,   // integers of 8 bits, of the codes' sign
    kPacked,  // integers of the codes' type
    kReal,    // in real units, of the scales' type; those of f8 always are
  };

  DataType type = kF32;
  Groups groups = Groups::kToken;
  // Channels of a group of kHeadSlice, tokens of one of kChannel (0: all), both of one of kBlock.
  int64_t group_size = 0;
  ZeroPoints zero_points = ZeroPoints::kNone;
  const CodebookRow* codebook = nullptr;  // a row of the table, or none
  bool ggml_formula = false;
  // kUndef: that of the queries.
  DataType scale_type = kUndef;

  // kInvalidArguments with a sentence, for fields that no text gives.
  absl::Status Check() const;
  // Whether there are scales: of every type but f32, bf16 and f16.
  bool quantized() const;
  // Whether a group has group_size channels of a head.
  bool slices_heads() const { return groups == Groups::kHeadSlice || groups == Groups::kBlock; }
  // What codes stand for, times the scale; empty without a codebook.
  std::vector<float> codebook_values() const;
  // Tokens of a group; nothing where it has all that there are.
  std::optional<int64_t> group_tokens() const;
  // The type of the zero points for scales of this type; kUndef without any.
  DataType ZeroPointType(DataType scales) const;
  // Elements per group and axis of a [..., tokens, head size] tensor.
  // kInvalidArguments, naming the numbers, if the groups do not divide it.
  absl::StatusOr<Dims> GroupShape(absl::Span<const int64_t> dims) const;
  // Bits that one element takes, its share of scale and zero point included. Errors as of
  // GroupShape.
  absl::StatusOr<double> BitsPerElement(absl::Span<const int64_t> dims, DataType query_type) const;
  // The text that parses to this.
  std::string ToString() const;
};

// kInvalidArguments with a sentence about the part that is wrong.
absl::StatusOr<NumberFormat> ParseNumberFormat(std::string_view text);

// N of "<word>N", a part of a format's or a storage's text; nothing if it is something else.
std::optional<int64_t> NumberAfter(std::string_view word, std::string_view part);

// One line, for --help.
std::string_view NumberFormatHelp();

}  // namespace kvant

#endif  // KVANT_CACHE_NUMBER_FORMAT_H_
