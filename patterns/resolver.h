// From a match and shapes to an AttentionSpec. Internal to patterns.
#ifndef KVANT_PATTERNS_RESOLVER_H_
#define KVANT_PATTERNS_RESOLVER_H_

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/attention_spec.h"
#include "kvant/patterns/match.h"
#include "kvant/patterns/views.h"

namespace kvant {

class Resolver {
 public:
  // `graph` holds the match's ops, all shapes known and inferred: what shape inference checks
  // holds. Ports number the views. All must outlive the resolver.
  Resolver(const Graph& graph, const AttentionMatch& match, absl::Span<const TensorId> inputs,
           absl::Span<const TensorId> outputs)
      : graph_(graph), match_(match), inputs_(inputs), outputs_(outputs) {}

  // Once. False, with a sentence in why(), when the shapes cannot be expressed as views.
  bool Resolve(AttentionSpec* spec);
  const std::string& why() const { return why_; }

 private:
  // A Hadamard op that an operand or the output passes: for each element, its place along the axis
  // that is rotated.
  struct Rotation {
    OpIndex op = Graph::kNoOp;
    FoldedView places;
  };
  using Rotations = absl::InlinedVector<Rotation, 1>;

  // Which tokens of an operand are loaded, by an op of that index.
  struct Load {
    OpIndex op = Graph::kNoOp;
    int segment = 0;  // of a LoadRanges
    // Of LoadPages: pages, tokens of one, and what is from page to page.
    int64_t pages = 0, page_size = 0;
    int64_t data_stride = 0, scales_stride = 0, zero_points_stride = 0;
  };

  // An operand on its way from the port to the MatMul.
  struct Folded {
    FoldedView data;
    View view;  // port and type
    bool quantized = false;
    Quantization quantization;
    std::optional<FoldedView> scales, zero_points;
    std::optional<FoldedView> static_axis;  // stride 1 where Dequantize's axis went
    // Of a load of which rows have tokens of their own: stride 1 where the axis of rows went.
    std::optional<FoldedView> load_rows;
    Rotations rotations;
    // After Concat, or what loads: where the segment lies along which axis of the whole.
    int concat_axis = -1;
    int64_t begin = 0, whole = 0;
    Load load;

    // Applies the same move, bool(FoldedView&), to everything that lies along the data's axes.
    template <typename Move>
    bool MoveAll(const Move& move) {
      for (auto* view : {&scales, &zero_points, &static_axis, &load_rows}) {
        if (*view && !move(**view)) return false;
      }
      return std::ranges::all_of(rotations, move, &Rotation::places) && move(data);
    }
  };

  // resolver.cc
  bool ResolveFrame();
  bool CheckMoves();
  bool SwapOperands();
  bool Place(FoldedView folded, bool of_scores, int row, int col, bool broadcast_matrix, View* view,
             std::array<int64_t, kViewRank>* group = nullptr) const;
  bool MoveBack(const Op& mover, FoldedView& view) const;
  bool ResolveProbs();
  bool ResolveOutput();
  bool ResolveStats();
  bool CheckPorts();
  bool CheckConstants();

  // resolve_operand.cc
  bool ResolveInputs();
  bool ResolveOperand(const Chain& chain, int row, int col, int tokens, int64_t expected_begin,
                      KvSegment* segment, int64_t* rotated);
  bool ResolveSegments(absl::Span<const Chain> chains, int row, int col, const Op& matmul,
                       absl::InlinedVector<KvSegment, 1>* segments, int64_t* rotated);
  bool FoldChain(const Chain& chain, Folded* folded);
  bool FoldStep(const ChainOp& step, Folded* folded);
  bool FoldTranspose(const Op& op, Folded* folded);
  bool FoldReshape(const Op& op, Folded* folded);
  bool FoldSlice(const Op& slice, Folded* folded);
  bool FoldConcat(const Op& op, int port, Folded* folded);
  bool FoldDequantize(const Op& op, Folded* folded);
  bool FoldDynamicDequantize(OpIndex index, Folded* folded);
  bool FoldConstantScales(const Op& dequantize, Folded* folded);
  bool FoldScales(OpIndex index, int port, Folded* folded);
  bool PlaceQuantization(Folded& folded, absl::Span<const int64_t> dims, bool queries, int row,
                         int col, Quantization* quantization);

  // resolve_loads.cc
  bool FoldLoad(const ChainOp& step, Folded* folded);
  bool FoldPages(const Op& load, int axis, Folded* folded);
  static bool RowsAlike(const Folded& a, const Folded& b);
  bool CheckScalesLoad(const Op& dequantize, const Folded& data, const Folded& scales);
  bool PlaceLoad(const Folded& folded, KvSegment* segment);
  bool ResolveLengths();
  bool CheckCountedAxis(TensorId id, std::string_view what);
  bool IsCountOfRanges(TensorId id) const;
  bool CheckLoads(absl::Span<const Chain> chains, std::string_view what,
                  std::optional<TensorId> lengths, std::optional<TensorId> first);
  bool PlacePerRow(TensorId id, std::string_view what, int64_t more, View* view);

  // resolve_rotations.cc
  bool AddRotations(Rotations& rotations, absl::Span<const int64_t> dims, int col,
                    int64_t* rotated);
  bool CheckSegmentRotation(const Chain& chain, bool first, int64_t rotated, int64_t* of_first);
  bool ResolveRotation(const Op& matmul, const char* what, int64_t rotated, int64_t* block);

  // resolve_steps.cc
  bool ResolveStep(const StepMatch& step);
  bool ResolveBand(const StepMatch& match, ScoreStep* step);
  bool PlaceOperand(const Chain& chain, const StepMatch& step, Operand* operand);
  bool Counts(const Op& index, const StepMatch& step, int axis);
  bool TakeBack(const StepMatch& step, FoldedView& view) const;
  Operand ScalarOperand(TensorId id);

  // first_class.cc
  bool ResolveFirstClass();
  bool ResolveHeads();
  bool ResolveMasks();
  bool PlaceHeads(FoldedView folded, int64_t n, int64_t rows, int64_t cols, bool matrix,
                  View* view) const;
  bool PlaceQueries(TensorId id, int64_t cols, bool mask, View* view);
  bool PlacePerHead(std::string_view name, View* view);

  // False, with this sentence in why(); of an op, "<op>: <what>".
  template <typename... Parts>
  bool Fail(const Parts&... what) {
    why_ = absl::StrCat(MessagePart(what)...);
    return false;
  }
  template <typename... Parts>
  bool Fail(const Op& at, const Parts&... what) {
    return Fail(at.ToString(), ": ", what...);
  }

  // An axis attribute of a tensor of that rank, from the front.
  template <Attr attr>
  static int Axis(const Op& of, int rank) {
    return static_cast<int>(FromFront(of.Get<attr>(), rank));
  }
  const Op& op(OpIndex index) const { return graph_.ops()[index]; }
  const LogicalTensor& tensor(TensorId id) const { return graph_.tensor(id); }
  // A view of that port without dims; port kNoPort if it is none, which CheckPorts looks at.
  View Input(TensorId id) {
    View view = Port(inputs_, id);
    if (!view.present()) no_ports_.push_back(id);
    return view;
  }
  View Output(TensorId id) const { return Port(outputs_, id); }
  View Port(absl::Span<const TensorId> ports, TensorId id) const;

  const Graph& graph_;
  AttentionMatch match_;  // of its own: shapes may tell that Q and K are the other way round
  absl::Span<const TensorId> inputs_;
  absl::Span<const TensorId> outputs_;
  bool swapped_ = false;  // match_'s Q and K
  AttentionSpec* spec_ = nullptr;
  std::string why_;
  int64_t output_rotated_ = 0;                 // by V's rotations; see resolve_rotations.cc
  absl::InlinedVector<TensorId, 4> folded_;    // constants that the spec has
  absl::InlinedVector<TensorId, 4> no_ports_;  // what was to be a port, and is none

  // The frame: axes of the scores as they leave the first MatMul.
  int rank_ = 0;
  int row_ = 0, col_ = 0;  // axes
  BatchAxes batch_;
  Dims frame_;  // dims, with all broadcasts
};

}  // namespace kvant

#endif  // KVANT_PATTERNS_RESOLVER_H_
