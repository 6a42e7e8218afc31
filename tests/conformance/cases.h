// The conformance cases: attention problems that every engine must get right.
//
// A Case says what is computed and how it is laid out and spelled; BuildCase
// (case_graph.h) makes the graph. Cases sweep one axis at a time and draw the others
// from rotating lists, so that pairs of features meet without a full product.
#ifndef KVANT_TESTS_CONFORMANCE_CASES_H_
#define KVANT_TESTS_CONFORMANCE_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "kvant/graph/data_type.h"

namespace kvant::conformance {

// How K or V is stored.
struct Storage {
  DataType type = kF32;
  // Which elements of a head share a scale.
  enum class Groups : uint8_t { kAlongHead, kToken, kChannel, kHead, kTensor };
  Groups groups = Groups::kAlongHead;
  // kAlongHead: channels per group; kChannel: tokens per group. Cut to what divides;
  // 0: all.
  int64_t group_size = 16;
  DataType zero_points = kUndef;  // a floating-point type: in real units
  DataType scales = kF32;
  std::vector<float> codebook = {};  // given: what codes of an unsigned type stand for

  bool quantized() const { return BitsOf(type) < 16; }
};

// One stage between the scores and the softmax.
struct Mask {
  enum class Kind : uint8_t {
    kAdditive,
    kSelect,          // scores where true
    kSelectInverted,  // scores where false
    kCausal,          // top-left
    kBottomRight,
  };
  Kind kind = Kind::kAdditive;
  // Dims that the mask varies over: n batch, h key heads, r query heads of one, q, s.
  std::string over = "qs";
  float fill = -std::numeric_limits<float>::infinity();  // of what is hidden
  int64_t padding = 0;                                   // so many columns are hidden from all rows
  // Leading dims of 1 are left out of its shape.
  bool low_rank = false;

  // As far down as f16 goes, if that is the type.
  float FillIn(DataType type) const {
    return type == kF16 && !std::isinf(fill) ? std::max(fill, -65504.f) : fill;
  }
};

struct Case {
  std::string name;  // letters, digits and underscores

  int64_t batch = 2;
  int64_t kv_heads = 2;
  int64_t ratio = 2;  // query heads per key head
  int64_t q_len = 3;
  int64_t kv_len = 40;
  int64_t head_size = 16;
  int64_t v_head_size = 0;  // 0: head_size

  DataType type = kF32;    // of queries, floating-point K and V, and the output
  DataType scores = kF32;  // of what lies between: f32 or type
  Storage k, v;

  // How heads are expressed.
  enum class Form : uint8_t {
    k5D,          // Q [N,Hkv,R,Sq,D], K and V [N,Hkv,1,S,D]
    k4D,          // Q [N,H,Sq,D]; K and V [N,H,S,D], or [N,1,S,D] when kv_heads is 1
    k3D,          // Q [H,Sq,D]; batch and ratio must be 1
    k2D,          // Q [Sq,D]
    kReshape,     // 4-D ports, StaticReshape to 5-D and back
    kFirstClass,  // ScaledDotProductAttention
  };
  Form form = Form::k5D;

  // How K reaches the first MatMul.
  enum class KLayout : uint8_t {
    kTokenRows,   // [.., S, D] and transpose_b
    kTokenMajor,  // [.., D, S], stored token by token
    kTokensLast,  // [.., D, S], stored like that
  };
  KLayout k_layout = KLayout::kTokenRows;

  enum class Buffers : uint8_t {
    kDense,
    kInterleaved,  // stored [N, S, H, D]
    kPadded,       // gaps after every row and every head
  };
  Buffers buffers = Buffers::kDense;

  enum class Scale : uint8_t { kNone, kMultiply, kDivide };
  Scale scale = Scale::kMultiply;
  // Of the scale and of additive masks; kUndef: type. What they make of the scores is of the
  // scores' type in any case.
  DataType scale_type = kUndef, mask_type = kUndef;
  bool scale_after_masks = false;  // GPT's order
  bool scalar_of_rank_0 = true;    // else [1]
  // Scalars are given at execution, those of f32 scores' steps on the host too, or are constants of
  // the graph, as are seeds and shifts.
  enum class Scalars : uint8_t { kInputs, kOnHost, kConstants };
  Scalars scalars = Scalars::kInputs;
  bool soft_cap = false;
  std::vector<Mask> masks;
  bool masked_row = false;  // the masks hide all of some rows
  bool inf_as_zero = true;

  bool stats = false;
  bool dropout = false;
  bool cast_probs = false;          // f32 scores, probabilities in `type`
  bool probs_second = false;        // JAX: O^T = V^T P^T
  bool token_major_output = false;  // StaticTranspose, then StaticReshape to [N, Sq, H * D]
  bool transpose_reorder = false;   // StaticTranspose, then Reorder
  int segments = 1;                 // K and V are Concats of so many runs of tokens
  bool plain_tail = false;          // the last of them is not quantized

  // Q, K and V are codes under static Dequantize ops, probabilities and output pass
  // static Quantize ops; floating-point ops compute in `type`.
  bool static_codes = false;

  // The K and V ports hold kv_len tokens, of which fewer exist; lengths are given at
  // execution.
  bool real_lengths = false;
  // The segments hold what ranges say that are given at execution, and NaN or other codes
  // elsewhere. K and V are cut into different segments, of whole groups of 32 tokens where they
  // can.
  bool real_ranges = false;
  int64_t plain_head = 0;  // one more segment in front, of so many tokens that are not quantized
  // With real_lengths. K and V are pools of pages of so many tokens, in no order, with NaN or other
  // codes where no page of a batch is. 0: not.
  int64_t page_size = 0;
  bool latent = false;        // V is the first channels of K, v_head_size of them
  bool first_tokens = false;  // tokens before a first one, which the batch gives, do not exist

  // Blocks of Hadamard ops on Q, K, V and the output, 0: none. K is kTokenRows.
  int64_t q_hadamard = 0, k_hadamard = 0, v_hadamard = 0, output_hadamard = 0;

  // What rounding relative to the largest of a row, tile or group would lose.
  enum class Magnitudes : uint8_t {
    kOrdinary,
    kZeroTokens,      // of K and V, with a scale of 1 among those of 1e-5
    kOutlierChannel,  // of Q, 1e4, where K is 0
    kSmall,           // V of 1e-6, K of 1e-3 and Q of 1e3
    kWide,            // tokens of V between 1e-6 and 1e4
  };
  Magnitudes magnitudes = Magnitudes::kOrdinary;

  // kFirstClass only.
  bool sinks = false;
  bool alibi = false;
  int64_t left_window = -1, right_window = -1;
  bool bottom_right = false;
  bool ragged = false;  // batch entries have q_len, 1, 0, ... queries, and there is room for more

  bool rotated() const { return q_hadamard + k_hadamard + v_hadamard + output_hadamard > 0; }
  DataType TypeOfScale() const { return scale_type == kUndef ? type : scale_type; }
  DataType TypeOfMasks() const { return mask_type == kUndef ? type : mask_type; }
  bool has_codebook() const { return !k.codebook.empty() || !v.codebook.empty(); }
  int64_t value_size() const { return v_head_size > 0 ? v_head_size : head_size; }
};

std::vector<Case> AllCases();

// The lists that AllCases is made of.
void AddShapeCases(std::vector<Case>& cases);
void AddStorageCases(std::vector<Case>& cases);
void AddCodebookCases(std::vector<Case>& cases);
void AddMaskCases(std::vector<Case>& cases);
void AddScalarCases(std::vector<Case>& cases);
void AddFormCases(std::vector<Case>& cases);
void AddMixedTypeCases(std::vector<Case>& cases);
void AddRangeCases(std::vector<Case>& cases);
void AddLoadCases(std::vector<Case>& cases);
void AddFirstClassCases(std::vector<Case>& cases);
void AddRotationCases(std::vector<Case>& cases);
void AddHostileCases(std::vector<Case>& cases);

// The i-th of a rotation through small shapes, storages, masks and layouts: what a
// sweep starts from.
Case Rotated(int i);

// What differs from case to case, for failure messages.
std::ostream& operator<<(std::ostream& out, const Case& c);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_CASES_H_
