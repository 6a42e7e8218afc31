// Views of Q, K and V: the chains from the ports folded into strides.
#include <algorithm>

#include "kvant/graph/op_shapes.h"
#include "kvant/patterns/matcher.h"
#include "kvant/patterns/resolver.h"

namespace kvant {

bool Resolver::ResolveInputs() {
  const Op& qk = op(match_.qk);
  const Op& pv = op(match_.pv);
  // The axis that becomes one of the product's, or with its transpose flag the
  // one that is summed over.
  const auto outer = [this](const Op& matmul, int input) {
    const int axis = input == 0 ? rank_ - 2 : rank_ - 1;
    return Transposes(matmul, input) ? OtherAxis(axis, rank_) : axis;
  };
  const int q_row = outer(qk, match_.q_input);
  KvSegment q;
  int64_t scores_rotated = 0;
  if (!ResolveOperand(match_.q[0], q_row, OtherAxis(q_row, rank_), -1, 0, &q, &scores_rotated)) {
    return false;
  }
  spec_->q = q.data;
  spec_->q_quantization = std::move(q.quantization);
  spec_->head_size = spec_->q.dims[4];

  const int k_row = outer(qk, 1 - match_.q_input);
  const int v_col = outer(pv, 1 - match_.probs_input);
  return ResolveSegments(match_.k, k_row, OtherAxis(k_row, rank_), qk, &spec_->k,
                         &scores_rotated) &&
         ResolveRotation(qk, "Q and K", scores_rotated, &spec_->q_hadamard) &&
         ResolveSegments(match_.v, OtherAxis(v_col, rank_), v_col, pv, &spec_->v, &output_rotated_);
}

// The segments of K or V, which is an input of `matmul`.
bool Resolver::ResolveSegments(absl::Span<const Chain> chains, int row, int col, const Op& matmul,
                               absl::InlinedVector<KvSegment, 1>* segments, int64_t* rotated) {
  int64_t tokens = 0, of_first = 0;
  for (const Chain& chain : chains) {
    KvSegment segment;
    int64_t of_this = 0;
    if (!ResolveOperand(chain, row, col, row, tokens, &segment, &of_this) ||
        !CheckSegmentRotation(chain, segments->empty(), of_this, &of_first)) {
      return false;
    }
    tokens += segment.tokens();
    segments->push_back(std::move(segment));
  }
  *rotated ^= of_first;
  if (tokens == spec_->kv_len) return true;
  return Fail(matmul, "segments of ", segments == &spec_->k ? "K" : "V", " do not add up to ",
              spec_->kv_len);
}

// One operand, or one segment of it that begins at expected_begin along axis
// `tokens` of the problem's rank (-1: these are the queries).
bool Resolver::ResolveOperand(const Chain& chain, int row, int col, int tokens,
                              int64_t expected_begin, KvSegment* segment, int64_t* rotated) {
  Folded folded;
  if (!FoldChain(chain, &folded)) return false;
  if (folded.load.op != Graph::kNoOp) {
    const Op& load = op(folded.load.op);
    const int64_t* group = load.Find<Attr::kTokenGroup>();
    if (group != nullptr && *group != 1) {
      return Fail(load, "loads keys or values of which a row stands for ", *group, " tokens");
    }
  }
  const int missing = rank_ - folded.data.rank();
  if (missing < 0) {
    return Fail(tensor(chain.source).Label(), ": more axes than the output");
  }
  // Of one token, a reshape may have put the axis where another one of extent 1 is.
  const bool one_token =
      folded.whole == 1 && tokens >= missing && folded.data.dim(tokens - missing) == 1;
  const bool along_tokens = one_token || folded.concat_axis + missing == tokens;
  if (folded.concat_axis >= 0 && (!along_tokens || folded.begin != expected_begin)) {
    return Fail(tensor(chain.source).Label(), ": loaded or concatenated along axis ",
                folded.concat_axis, ", which is not that of the tokens");
  }
  Dims dims(frame_.begin(), frame_.end());
  for (int i = 0; i < 2; ++i) {
    dims[rank_ - 1 - i] = folded.data.dim(folded.data.rank() - 1 - i);
  }
  const bool queries = tokens < 0;
  segment->data = folded.view;
  if (!folded.data.BroadcastTo(dims) ||
      !Place(folded.data, queries, row, col, false, &segment->data)) {
    return Fail(tensor(chain.source).Label(), " ", tensor(chain.source).ToString(),
                ": its axes are not evenly strided, as where a reshape merges some that do not lie "
                "side by side");
  }
  if (!AddRotations(folded.rotations, dims, col, rotated)) return false;
  if (folded.quantized) {
    segment->quantization = std::move(folded.quantization);
    if (!PlaceQuantization(folded, dims, queries, row, col, &*segment->quantization)) return false;
  }
  if (folded.load_rows) {
    View rows;
    const bool placed = folded.load_rows->BroadcastTo(dims) &&
                        Place(*folded.load_rows, queries, row, col, true, &rows);
    if (!placed || std::any_of(rows.strides.begin() + 1, rows.strides.end(),
                               [](int64_t stride) { return stride != 0; })) {
      return Fail(op(folded.load.op), "its rows are not those of the batch");
    }
  }
  return PlaceLoad(folded, segment);
}

// Scales and zero points as views over groups.
bool Resolver::PlaceQuantization(Folded& folded, absl::Span<const int64_t> dims, bool queries,
                                 int row, int col, Quantization* quantization) {
  const auto fail = [&] {
    return Fail(tensor(inputs_[folded.view.port]).Label(),
                ": its groups cannot be expressed along its axes");
  };
  const auto place = [&](std::optional<FoldedView>& from, View* view,
                         std::array<int64_t, kViewRank>* group) {
    return !from || (from->BroadcastTo(dims) && Place(*from, queries, row, col, true, view, group));
  };
  View axis;
  View &scales = quantization->scales, &zero_points = quantization->zero_points;
  std::array<int64_t, kViewRank> groups, zero_point_groups;
  if (!place(folded.static_axis, &axis, nullptr) || !place(folded.scales, &scales, &groups) ||
      !place(folded.zero_points, &zero_points, &zero_point_groups)) {
    return fail();
  }
  for (int i = 0; folded.static_axis && i < kViewRank; ++i) {
    if (axis.dims[i] == 1) continue;
    if (quantization->static_axis >= 0) return fail();
    quantization->static_axis = i;
  }
  if (!folded.scales) return true;
  if (!folded.zero_points) zero_point_groups = groups;
  for (int i = 0; i < kViewRank; ++i) {
    const bool same = groups[i] == zero_point_groups[i];
    if (!same && scales.dims[i] != 1 && zero_points.dims[i] != 1) return fail();
    const bool shared = i < 3 && scales.strides[i] == 0 && zero_points.strides[i] == 0;
    quantization->group[i] = shared ? 1 : std::min(groups[i], zero_point_groups[i]);
  }
  return true;
}

bool Resolver::FoldChain(const Chain& chain, Folded* folded) {
  folded->data = FoldedView::Of(tensor(chain.source));
  folded->view = Input(chain.source);
  return std::ranges::all_of(chain.ops,
                             [&](const ChainOp& step) { return FoldStep(step, folded); });
}

bool Resolver::FoldStep(const ChainOp& step, Folded* folded) {
  const Op& mover = op(step.op);
  const OpKind kind = mover.kind;
  if (kind == OpKind::kStaticTranspose) return FoldTranspose(mover, folded);
  if (kind == OpKind::kStaticReshape) return FoldReshape(mover, folded);
  if (kind == OpKind::kSlice) return FoldSlice(mover, folded);
  if (kind == OpKind::kConcat) return FoldConcat(mover, step.port, folded);
  if (kind == OpKind::kDequantize) return FoldDequantize(mover, folded);
  if (kind == OpKind::kDynamicDequantize) return FoldDynamicDequantize(step.op, folded);
  if (ClassOf(kind) == OpClass::kLoad || kind == OpKind::kLoadRanges) return FoldLoad(step, folded);
  if (kind == OpKind::kHadamard) {
    folded->rotations.push_back(
        {step.op, FoldedView::Counting(DimsOf(folded->data), folded->data.rank() - 1)});
  }
  return true;
}

bool Resolver::FoldTranspose(const Op& transpose, Folded* folded) {
  const auto& order = transpose.Get<Attr::kOrder>();
  if (!folded->MoveAll([&](FoldedView& view) { return view.Transpose(order); })) {
    return Fail(transpose, "cannot be folded into strides");
  }
  const int rank = folded->data.rank();
  for (int i = 0; folded->concat_axis >= 0 && i < rank; ++i) {
    if (FromFront(order[i], rank) != folded->concat_axis) continue;
    folded->concat_axis = i;
    break;
  }
  return true;
}

bool Resolver::FoldReshape(const Op& reshape, Folded* folded) {
  Dims dims = *tensor(reshape.outputs[0]).dims;
  if (folded->concat_axis >= 0) {
    // The concatenated axis has to come out whole, with as many elements before it.
    Dims in = DimsOf(folded->data);
    int64_t before = 1;
    for (int i = 0; i < folded->concat_axis; ++i) before *= in[i];
    const int64_t segment = in[folded->concat_axis];
    int axis = 0;
    int64_t seen = 1;
    while (axis < static_cast<int>(dims.size()) &&
           !(seen == before && dims[axis] == folded->whole)) {
      seen *= dims[axis++];
    }
    if (axis == static_cast<int>(dims.size())) {
      return Fail(reshape, "reshapes the concatenated axis");
    }
    dims[axis] = segment;
    folded->concat_axis = axis;
  }
  const auto move = [&](FoldedView& view) { return view.Reshape(dims); };
  return folded->MoveAll(move) || Fail(reshape, "cannot be folded into strides");
}

bool Resolver::FoldSlice(const Op& slice, Folded* folded) {
  const int axis = Axis<Attr::kAxis>(slice, folded->data.rank());
  const bool rows = folded->load_rows && folded->load_rows->Moves(axis);
  if (axis == folded->concat_axis || rows) {
    return Fail(slice, "takes a part of what is loaded or concatenated");
  }
  if (!folded->rotations.empty()) {
    return Fail(slice, "takes a part of what is rotated");
  }
  const int64_t begin = slice.Get<Attr::kBegin>(), size = slice.Get<Attr::kSize>();
  const auto part = [&](FoldedView& view) {
    return view.rank() == folded->data.rank() && view.Slice(axis, begin, size);
  };
  // The scales of a Dequantize are by the number of an element.
  if (!folded->MoveAll(part) || (folded->static_axis && folded->static_axis->offset() != 0)) {
    return Fail(slice, "cuts a group, or cannot be folded into strides");
  }
  return true;
}

bool Resolver::FoldConcat(const Op& concat, int port, Folded* folded) {
  const int axis = Axis<Attr::kAxis>(concat, folded->data.rank());
  if (folded->concat_axis >= 0 && folded->concat_axis != axis) {
    return Fail(concat, "a second concatenation along another axis");
  }
  if (folded->load.op != Graph::kNoOp) {
    return Fail(concat, "concatenates what ", op(folded->load.op).ToString(),
                " loads, in whose place zeros may be");
  }
  for (int i = 0; i < port; ++i) folded->begin += (*tensor(concat.inputs[i]).dims)[axis];
  folded->concat_axis = axis;
  folded->whole = (*tensor(concat.outputs[0]).dims)[axis];
  return true;
}

bool Resolver::FoldDequantize(const Op& dequantize, Folded* folded) {
  folded->quantized = true;
  Quantization& quantization = folded->quantization;
  quantization.static_scales = dequantize.Get<Attr::kScales>();
  quantization.static_zps = dequantize.Get<Attr::kZps>();
  if (dequantize.Get<Attr::kQType>() != "per_channel") return true;
  const int axis = Axis<Attr::kAxis>(dequantize, folded->data.rank());
  if (axis == folded->concat_axis) {
    return Fail(dequantize, "its axis is that of tokens that are loaded or concatenated");
  }
  folded->static_axis = FoldedView::Counting(DimsOf(folded->data), axis);
  return true;
}

bool Resolver::FoldDynamicDequantize(OpIndex index, Folded* folded) {
  const Op& dequantize = op(index);
  folded->quantized = true;
  folded->quantization.codebook = dequantize.Get<Attr::kCodebook>();
  return FoldConstantScales(dequantize, folded) ||
         (FoldScales(index, 1, folded) &&
          (dequantize.inputs.size() < 3 || FoldScales(index, 2, folded)));
}

// Of a whole tensor, a scale and, if there is one, an integer zero point that are constants.
bool Resolver::FoldConstantScales(const Op& dequantize, Folded* folded) {
  if (dequantize.Get<Attr::kQType>() != "per_tensor") return false;
  for (size_t port = 1; port < dequantize.inputs.size(); ++port) {
    const std::optional<Constant>& value = tensor(dequantize.inputs[port]).value;
    if (!value || (port == 2 && !IsInteger(value->type()))) return false;
  }
  Quantization& quantization = folded->quantization;
  const Constant& scale = *tensor(dequantize.inputs[1]).value;
  quantization.static_scales = {static_cast<float>(scale.value())};
  if (dequantize.inputs.size() > 2) {
    quantization.static_zps = {tensor(dequantize.inputs[2]).value->integer()};
  }
  folded_.insert(folded_.end(), dequantize.inputs.begin() + 1, dequantize.inputs.end());
  return true;
}

// The scales (port 1) or zero points (port 2) spread over the data's axes.
bool Resolver::FoldScales(OpIndex index, int port, Folded* folded) {
  const Op& dequantize = op(index);
  Quantization& quantization = folded->quantization;
  std::optional<FoldedView>& scales = port == 1 ? folded->scales : folded->zero_points;
  Chain chain;
  chain.source = dequantize.inputs[port];
  if (const Chain* moved = match_.FindAuxiliary(index, port)) chain = *moved;
  Folded source;
  if (!FoldChain(chain, &source) || !CheckScalesLoad(dequantize, *folded, source)) return false;
  (port == 1 ? folded->load.scales_stride : folded->load.zero_points_stride) =
      source.load.data_stride;
  (port == 1 ? quantization.scales : quantization.zero_points) = source.view;
  const int concat = folded->concat_axis;
  Dims dims = DimsOf(folded->data);  // of the whole, when this is a segment
  if (concat >= 0) dims[concat] = folded->whole;
  // One may be for all, whatever the groups of others are.
  const Dims group =
      ElementsOf(DimsOf(source.data)) == 1 ? dims : QuantizationGroup(dequantize, dims);
  Dims groups = dims;
  for (size_t d = 0; d < dims.size(); ++d) groups[d] = group[d] == 0 ? 1 : dims[d] / group[d];
  if (source.data.rank() != folded->data.rank() && !source.data.Reshape(groups)) {
    return Fail(dequantize, "scales do not fit its axis");
  }
  scales = source.data.Repeat(group);
  if (concat >= 0 && !scales->Slice(concat, folded->begin, folded->data.dim(concat))) {
    return Fail(dequantize, "a segment ends inside a group");
  }
  return true;
}

}  // namespace kvant
