#include "kvant/patterns/views.h"

#include <utility>

namespace kvant {
FoldedView::FoldedView(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides)
    : axes_(dims.size()) {
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1) axes_[i].push_back({dims[i], dims[i] == 0 ? 0 : strides[i]});
  }
}

FoldedView FoldedView::Of(const LogicalTensor& tensor) {
  return FoldedView(*tensor.dims, tensor.StridesOrDense());
}

FoldedView FoldedView::Counting(absl::Span<const int64_t> dims, int axis) {
  Dims strides(dims.size(), 0);
  strides[axis] = 1;
  return FoldedView(dims, strides);
}

void FoldedView::Push(Atom atom, Axis& axis) {
  if (atom.extent == 1) return;
  if (!axis.empty() && axis.back().stride == atom.extent * atom.stride) {
    axis.back() = {axis.back().extent * atom.extent, atom.stride};
  } else {
    axis.push_back(atom);
  }
}

FoldedView::Axis FoldedView::Flatten(int first, int last) const {
  Axis flat;
  for (int i = first; i < last; ++i) {
    for (const Atom& atom : axes_[i]) Push(atom, flat);
  }
  return flat;
}

int64_t FoldedView::dim(int axis) const {
  int64_t product = 1;
  for (const Atom& atom : axes_[axis]) product *= atom.extent;
  return product;
}

bool FoldedView::Transpose(absl::Span<const int64_t> order) {
  if (order.size() != axes_.size()) return false;
  const auto before = axes_;
  for (int i = 0; i < rank(); ++i) axes_[i] = before[FromFront(order[i], rank())];
  return true;
}

bool FoldedView::InverseTranspose(absl::Span<const int64_t> order) {
  if (order.size() != axes_.size()) return false;
  const auto before = axes_;
  for (int i = 0; i < rank(); ++i) axes_[FromFront(order[i], rank())] = before[i];
  return true;
}

bool FoldedView::Reshape(absl::Span<const int64_t> dims) {
  Axis flat = Flatten(0, rank());
  int64_t total = 1;
  for (const Atom& atom : flat) total *= atom.extent;
  if (ElementsOf(dims) != total) return false;
  if (total == 0) {
    const Dims zeros(dims.size(), 0);
    *this = FoldedView(dims, zeros);
    return true;
  }
  absl::InlinedVector<Axis, 6> result;
  size_t next = 0;
  for (int64_t dim : dims) {
    Axis& axis = result.emplace_back();
    while (dim > 1) {
      Atom& atom = flat[next];
      if (dim % atom.extent == 0) {
        Push(atom, axis);
        dim /= atom.extent;
        ++next;
      } else if (atom.extent % dim == 0) {
        atom.extent /= dim;  // the inner part stays for the next axis
        Push({dim, atom.stride * atom.extent}, axis);
        dim = 1;
      } else {
        return false;
      }
    }
  }
  axes_ = std::move(result);
  return true;
}

bool FoldedView::BroadcastTo(absl::Span<const int64_t> dims) {
  if (dims.size() < axes_.size()) return false;
  axes_.insert(axes_.begin(), dims.size() - axes_.size(), Axis());
  for (int i = 0; i < rank(); ++i) {
    if (axes_[i].empty() && dims[i] != 1) axes_[i].push_back({dims[i], 0});
    if (dim(i) != dims[i]) return false;
  }
  return true;
}

FoldedView FoldedView::Repeat(absl::Span<const int64_t> counts) const {
  FoldedView result = *this;
  for (int i = 0; i < rank(); ++i) Push({counts[i], 0}, result.axes_[i]);
  return result;
}

void FoldedView::Replace(int axis, absl::Span<const Atom> atoms) {
  axes_[axis].clear();
  for (const Atom& atom : atoms) {
    if (atom.extent != 1) axes_[axis].push_back(atom);
  }
}

bool FoldedView::Slice(int axis, int64_t begin, int64_t length) {
  Atom run;
  int64_t group = 1;
  if (!Merge(axis, axis + 1, &run, &group)) return false;
  if (run.stride == 0) {
    Replace(axis, {{length, 0}});
    return true;
  }
  if (begin % group != 0 || length % group != 0) return false;
  offset_ += begin / group * run.stride;
  Replace(axis, {{length / group, run.stride}, {group, 0}});
  return true;
}

bool FoldedView::SpreadPages(int axis, int64_t count, int64_t most) {
  if (axes_[0].size() > 1) return false;
  const int64_t page_stride = stride(0);
  Axis rows = axes_[axis];
  if (stride(axis) != 0) {
    rows[0].extent *= most;
  } else {
    // One row serves a page; a stride of 0 would make it serve all pages.
    rows.insert(rows.begin(), {most, page_stride});
  }
  Replace(axis, rows);
  Replace(0, {{count, page_stride}});
  return true;
}

bool FoldedView::Merge(int first, int last, Atom* run, int64_t* group) const {
  Axis atoms = Flatten(first, last);
  *run = {1, 0};
  *group = 1;
  // Alone, one of extent 0 is a run of nothing.
  if (!atoms.empty() && atoms.back().stride == 0 && (atoms.size() > 1 || atoms[0].extent != 0)) {
    *group = atoms.back().extent;
    atoms.pop_back();
  }
  if (!atoms.empty()) *run = atoms[0];
  return atoms.size() <= 1;
}

bool ToView(const FoldedView& folded, const BatchAxes& batch, int row, int col,
            bool broadcast_matrix, View* view, std::array<int64_t, kViewRank>* group) {
  view->offset = folded.offset();
  for (int i = 0; i < kViewRank; ++i) {
    const int begin = i < 3 ? batch.begin[i] : (i == 3 ? row : col);
    const int end = i < 3 ? batch.end[i] : begin + 1;
    FoldedView::Atom run;
    int64_t run_group = 1;
    if (begin >= 0 && !folded.Merge(begin, end, &run, &run_group)) return false;
    if (group != nullptr) {
      (*group)[i] = run_group;
    } else if (run_group != 1) {
      if (run.stride != 0 && run.extent != 1) return false;
      if (i >= 3 && !broadcast_matrix) run.extent = run_group;
    }
    view->dims[i] = run.extent;
    view->strides[i] = run.extent == 1 ? 0 : run.stride;
  }
  return true;
}

}  // namespace kvant
