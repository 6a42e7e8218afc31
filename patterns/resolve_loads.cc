// Which tokens there are: from LoadTokens, LoadPages and LoadRanges on K, V and their scales, and
// the lengths of the softmax, to ranges, page tables and lengths of the spec.
//
// A load leaves zeros where there is no token, and what normalises the scores hides them. So both
// have to take the same lengths.
#include <algorithm>

#include "kvant/patterns/resolver.h"

namespace kvant {

// Axis 0 of the pool becomes that of rows, as far as moves are concerned; PlaceLoad puts it right.
bool Resolver::FoldPages(const Op& load, int axis, Folded* folded) {
  const LogicalTensor& pool = tensor(load.inputs[0]);
  const LogicalTensor& table = tensor(load.inputs[1]);
  const int64_t count = (*table.dims)[0], most = (*table.dims)[1];
  if (folded->static_axis && folded->static_axis->Moves(0)) {
    return Fail(load, "loads pages that have a scale each");
  }
  Load& to = folded->load;
  to.pages = (*pool.dims)[0];
  to.page_size = (*pool.dims)[axis];
  to.data_stride = folded->data.stride(0);
  if (folded->scales) to.scales_stride = folded->scales->stride(0);
  if (folded->zero_points) to.zero_points_stride = folded->zero_points->stride(0);
  const auto spread = [&](FoldedView& view) { return view.SpreadPages(axis, count, most); };
  return folded->MoveAll(spread) || Fail(load, "its pages are not evenly strided");
}

bool Resolver::FoldLoad(const ChainOp& step, Folded* folded) {
  const Op& load = op(step.op);
  if (folded->load.op != Graph::kNoOp) {
    return Fail(load, "loads what ", op(folded->load.op).ToString(), " has loaded");
  }
  const int axis = Axis<Attr::kTokenAxis>(load, folded->data.rank());
  const bool concatenated = folded->concat_axis >= 0;
  if (concatenated && (folded->concat_axis != axis || load.kind != OpKind::kLoadTokens)) {
    return Fail(load, "loads what is concatenated");
  }
  folded->load.op = step.op;
  if (load.kind == OpKind::kLoadPages && !FoldPages(load, axis, folded)) return false;
  if (load.kind == OpKind::kLoadRanges) {
    folded->load.segment = step.port - 1;
    for (int i = 1; i < step.port; ++i) {
      folded->begin += (*tensor(load.inputs[i]).dims)[axis];
    }
  }
  const Dims& result = *tensor(load.outputs[0]).dims;
  if (!concatenated) folded->whole = result[axis];
  folded->concat_axis = axis;
  // A ring may be for all rows.
  Dims dims = DimsOf(folded->data);
  dims[0] = result[0];
  if (!folded->MoveAll([&](FoldedView& view) { return view.BroadcastTo(dims); })) {
    return Fail(load, "cannot be folded into strides");
  }
  // Lengths, ranges and page tables are s32, and what is loaded is not.
  const auto is_by_row = [this](TensorId id) {
    const LogicalTensor& from = tensor(id);
    return from.type == kS32 && from.rank() > 0 && (*from.dims)[0] != 1;
  };
  if (std::ranges::any_of(load.inputs, is_by_row)) {
    folded->load_rows = FoldedView::Counting(dims, 0);
  }
  return true;
}

// Whether the rows of both loads, if they have tokens of their own, lie along the same axis.
bool Resolver::RowsAlike(const Folded& a, const Folded& b) {
  if (a.load_rows.has_value() != b.load_rows.has_value()) return false;
  if (!a.load_rows) return true;
  bool alike = a.load_rows->rank() == b.load_rows->rank();
  for (int i = 0; alike && i < a.load_rows->rank(); ++i) {
    const bool moves = a.load_rows->Moves(i);
    alike =
        moves == b.load_rows->Moves(i) && (!moves || a.load_rows->axis(i) == b.load_rows->axis(i));
  }
  return alike;
}

// Scales are loaded as what they belong to is, or come before the load.
bool Resolver::CheckScalesLoad(const Op& dequantize, const Folded& data, const Folded& scales) {
  if (scales.load.op == Graph::kNoOp && data.load.op == Graph::kNoOp) return true;
  if (scales.load.op != Graph::kNoOp && data.load.op != Graph::kNoOp) {
    const Op &a = op(data.load.op), &b = op(scales.load.op);
    const auto& group_shape = dequantize.Get<Attr::kGroupShape>();
    const int64_t group = group_shape.empty() ? 1 : group_shape[data.concat_axis];
    const bool same =
        a.kind == b.kind && a.kind != OpKind::kLoadRanges &&
        data.concat_axis == scales.concat_axis &&
        std::equal(a.inputs.begin() + 1, a.inputs.end(), b.inputs.begin() + 1, b.inputs.end()) &&
        b.Get<Attr::kTokenGroup>() == group && RowsAlike(data, scales);
    const bool pages_fit =
        a.kind != OpKind::kLoadPages || (data.load.page_size == scales.load.page_size * group &&
                                         data.load.pages == scales.load.pages);
    if (same && pages_fit) return true;
  }
  const auto by = [this](const Folded& loaded) {
    return loaded.load.op == Graph::kNoOp ? "no op" : op(loaded.load.op).ToString();
  };
  return Fail(dequantize, "its codes and its scales or zero points are not loaded alike, but by ",
              by(data), " and by ", by(scales));
}

// With its view, scales and zero points placed.
bool Resolver::PlaceLoad(const Folded& folded, KvSegment* segment) {
  if (folded.load.op == Graph::kNoOp) return true;
  const Op& load = op(folded.load.op);
  if (load.kind == OpKind::kLoadRanges) {
    if (!PlacePerRow(load.inputs[0], "ranges", 0, &segment->range)) return false;
    const Dims strides = tensor(load.inputs[0]).StridesOrDense();
    segment->range.offset = folded.load.segment * strides[1];
    segment->range.dims[4] = 2;
    segment->range.strides[4] = strides[2];
    return true;
  }
  if (load.kind != OpKind::kLoadPages) return true;
  // Pages take the place of b0, so without rows of its own nothing else may be there.
  if (!folded.load_rows && segment->data.strides[0] != 0) {
    return Fail(load, "is reshaped so that its one row of pages is for a batch of ",
                segment->data.dims[0]);
  }
  const LogicalTensor& table = tensor(load.inputs[1]);
  if (!PlacePerRow(table.id, "rows of the page table", 0, &segment->page_table)) return false;
  segment->page_table.dims[4] = (*table.dims)[1];
  segment->page_table.strides[4] = table.StridesOrDense()[1];
  const auto by_page = [&](View& view, int64_t stride, int64_t group) {
    if (!view.present()) return;
    view.dims[0] = stride == 0 ? 1 : folded.load.pages;
    view.strides[0] = stride;
    if (view.dims[3] > 1) view.dims[3] = std::max<int64_t>(1, folded.load.page_size / group);
  };
  by_page(segment->data, folded.load.data_stride, 1);
  segment->data.dims[0] = folded.load.pages;
  segment->data.dims[3] = folded.load.page_size;
  if (!segment->quantization) return true;
  if (segment->quantization->static_axis == 0) {
    return Fail(load, "what it loads is dequantized with a scale for each row");
  }
  Quantization& quantization = *segment->quantization;
  by_page(quantization.scales, folded.load.scales_stride, quantization.group[3]);
  by_page(quantization.zero_points, folded.load.zero_points_stride, quantization.group[3]);
  quantization.group[0] = 1;
  return true;
}

// One element or slice along axis 0 for each row of b0, and `more`; or without these, one for all.
bool Resolver::PlacePerRow(TensorId id, std::string_view what, int64_t more, View* view) {
  const LogicalTensor& from = tensor(id);
  *view = Input(id);
  view->dims.fill(1);
  const int64_t count = from.rank() == 0 ? 1 : (*from.dims)[0];
  if (count == 1 && more == 0) return true;
  if (count != spec_->batch[0] + more || rank_ < 3 || batch_.end[0] != 1) {
    return Fail(tensor(id).Label(), ": ", count, " ", what, " for a batch of ", spec_->batch[0],
                batch_.end[0] > 1 ? ", which is of several axes" : "");
  }
  view->dims[0] = count;
  view->strides[0] = from.StridesOrDense()[0];
  return true;
}

// Whether the softmax hides what the loads of K, or of V, leave out.
bool Resolver::CheckLoads(absl::Span<const Chain> chains, std::string_view what,
                          std::optional<TensorId> lengths, std::optional<TensorId> first) {
  for (const Chain& chain : chains) {
    for (const ChainOp& step : chain.ops) {
      const Op& load = op(step.op);
      const bool ranges = load.kind == OpKind::kLoadRanges;
      if (load.kind != OpKind::kLoadTokens && load.kind != OpKind::kLoadPages && !ranges) continue;
      const auto wrong = [&](std::string_view role) {
        return Fail(op(match_.normaliser()).ToString(), " takes other ", role, ", or none, than ",
                    load.ToString(), ", which loads ", what);
      };
      // The columns of V by ranges are counted when they are known.
      const bool counted = ranges && what == "V" && !spec_->kv_lengths.present();
      const TensorId own = ranges ? (load.outputs.size() > 1 ? load.outputs[1] : load.outputs[0])
                                  : load.inputs[FindInput(load, "lengths").value()];
      if (!counted && lengths != own) return wrong("lengths");
      const std::optional<size_t> own_first = ranges ? std::nullopt : FindInput(load, "first");
      if (own_first && first != load.inputs[*own_first]) return wrong("first tokens");
    }
  }
  return true;
}

bool Resolver::IsCountOfRanges(TensorId id) const {
  const auto counts = [&](const Chain& chain) {
    return std::ranges::any_of(chain.ops, [&](const ChainOp& step) {
      const Op& load = op(step.op);
      return load.kind == OpKind::kLoadRanges && load.outputs.size() > 1 && load.outputs[1] == id;
    });
  };
  return std::ranges::any_of(match_.k, counts) || std::ranges::any_of(match_.v, counts);
}

// A SoftMax's lengths are those of axis 0 of its input, which has to be b0.
bool Resolver::CheckCountedAxis(TensorId id, std::string_view what) {
  const Op& softmax = op(match_.softmax);
  const LogicalTensor& exponents = tensor(softmax.inputs[0]);
  if (tensor(id).elements() == 1) return true;
  FoldedView counted = FoldedView::Counting(*exponents.dims, 0);
  bool ok = !match_.score_shape_ops.empty() || counted.BroadcastTo(frame_);
  for (size_t i = match_.score_shape_ops.size(); ok && i-- > 0;) {
    ok = MoveBack(op(match_.score_shape_ops[i]), counted);
  }
  View view;
  ok = ok && counted.rank() == rank_ && Place(counted, true, row_, col_, false, &view) &&
       std::all_of(view.strides.begin() + 1, view.strides.end(),
                   [](int64_t stride) { return stride == 0; });
  return ok || Fail(softmax, "its ", what, " are not those of the batch's rows");
}

bool Resolver::ResolveLengths() {
  const Op& normaliser = op(match_.normaliser());
  const auto input = [&](std::string_view name) -> std::optional<TensorId> {
    const std::optional<size_t> port = FindInput(normaliser, name);
    return port ? std::optional(normaliser.inputs[*port]) : std::nullopt;
  };
  const bool direct = match_.first_class != Graph::kNoOp;
  const auto place = [&](std::optional<TensorId> id, std::string_view what, int64_t more,
                         View* view) {
    if (!id) return true;
    if (!direct && !CheckCountedAxis(*id, what)) return false;
    return IsCountOfRanges(*id) || PlacePerRow(*id, what, more, view);
  };
  const std::optional<TensorId> lengths = input(direct ? "kv_lengths" : "lengths");
  const std::optional<TensorId> first = input(direct ? "kv_first" : "first");
  if (!place(lengths, "KV lengths", 0, &spec_->kv_lengths) ||
      !place(first, "first tokens", 0, &spec_->kv_first) ||
      !place(input("query_offsets"), "offsets of queries", 1, &spec_->query_offsets) ||
      !CheckLoads(match_.k, "K", lengths, first) || !CheckLoads(match_.v, "V", lengths, first)) {
    return false;
  }
  const auto in_rings = [](const KvSegment& segment) { return segment.range.present(); };
  const auto rings =
      std::ranges::count_if(spec_->k, in_rings) + std::ranges::count_if(spec_->v, in_rings);
  if (rings != 0 && rings != static_cast<int64_t>(spec_->k.size() + spec_->v.size())) {
    return Fail(normaliser, "of K and V one is loaded by ranges");
  }
  const bool some = normaliser.inputs.size() > 1 && !direct;
  if ((some || rings != 0) && (spec_->over_queries || swapped_)) {
    return Fail(normaliser,
                "lengths go neither with a SoftMax over queries nor with scores "
                "that are transposed on the way to it");
  }
  return true;
}

}  // namespace kvant
