#include "kvant/patterns/views.h"

#include <utility>

namespace kvant {
namespace {

// order as non-negative axes; false if it is no permutation.
bool NormalizeOrder(absl::Span<const int64_t> order, int rank,
                    absl::InlinedVector<int, 6>* result) {
  if (static_cast<int>(order.size()) != rank) return false;
  uint32_t seen = 0;
  for (int64_t axis : order) {
    if (axis < 0) axis += rank;
    if (axis < 0 || axis >= rank || (seen >> axis & 1)) return false;
    seen |= 1u << axis;
    result->push_back(static_cast<int>(axis));
  }
  return true;
}

}  // namespace

FoldedView::FoldedView(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides) {
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1) atoms_.push_back({dims[i], dims[i] == 0 ? 0 : strides[i]});
    ends_.push_back(static_cast<int32_t>(atoms_.size()));
  }
}

FoldedView FoldedView::Of(const LogicalTensor& tensor) {
  return FoldedView(*tensor.dims, tensor.StridesOrDense());
}

// Appends to the axis whose atoms begin at axis_begin, merging runs that
// continue each other.
void FoldedView::Push(Atom atom, size_t axis_begin) {
  if (atom.extent == 1) return;
  if (atoms_.size() > axis_begin && atoms_.back().stride == atom.extent * atom.stride) {
    atoms_.back() = {atoms_.back().extent * atom.extent, atom.stride};
    return;
  }
  atoms_.push_back(atom);
}

absl::Span<const FoldedView::Atom> FoldedView::axis(int axis) const {
  const int32_t begin = axis == 0 ? 0 : ends_[axis - 1];
  return absl::Span<const Atom>(atoms_.data() + begin, ends_[axis] - begin);
}

int64_t FoldedView::dim(int axis) const {
  int64_t product = 1;
  for (const Atom& atom : this->axis(axis)) product *= atom.extent;
  return product;
}

bool FoldedView::Transpose(absl::Span<const int64_t> order) {
  absl::InlinedVector<int, 6> axes;
  if (!NormalizeOrder(order, rank(), &axes)) return false;
  FoldedView result;
  result.offset_ = offset_;
  for (int source : axes) {
    for (const Atom& atom : axis(source)) result.atoms_.push_back(atom);
    result.ends_.push_back(static_cast<int32_t>(result.atoms_.size()));
  }
  *this = std::move(result);
  return true;
}

bool FoldedView::InverseTranspose(absl::Span<const int64_t> order) {
  absl::InlinedVector<int, 6> axes;
  if (!NormalizeOrder(order, rank(), &axes)) return false;
  Dims inverse(order.size());
  for (size_t i = 0; i < axes.size(); ++i) inverse[axes[i]] = static_cast<int64_t>(i);
  return Transpose(inverse);
}

bool FoldedView::Reshape(absl::Span<const int64_t> dims) {
  FoldedView flat;  // one axis
  int64_t total = 1;
  for (const Atom& atom : atoms_) {
    flat.Push(atom, 0);
    total *= atom.extent;
  }
  if (ElementsOf(dims) != total) return false;
  if (total == 0) {
    const Dims zeros(dims.size(), 0);
    *this = FoldedView(dims, zeros);
    return true;
  }
  FoldedView result;
  result.offset_ = offset_;
  size_t next = 0;
  for (int64_t dim : dims) {
    const size_t begin = result.atoms_.size();
    while (dim > 1) {
      Atom& atom = flat.atoms_[next];
      if (dim % atom.extent == 0) {
        result.Push(atom, begin);
        dim /= atom.extent;
        ++next;
      } else if (atom.extent % dim == 0) {
        atom.extent /= dim;  // the inner part stays for the next axis
        result.Push({dim, atom.stride * atom.extent}, begin);
        dim = 1;
      } else {
        return false;
      }
    }
    result.ends_.push_back(static_cast<int32_t>(result.atoms_.size()));
  }
  *this = std::move(result);
  return true;
}

bool FoldedView::BroadcastTo(absl::Span<const int64_t> dims) {
  const int missing = static_cast<int>(dims.size()) - rank();
  if (missing < 0) return false;
  FoldedView result;
  result.offset_ = offset_;
  for (int i = 0; i < static_cast<int>(dims.size()); ++i) {
    const int source = i - missing;
    if (source < 0 || axis(source).empty()) {
      if (dims[i] != 1) result.atoms_.push_back({dims[i], 0});
    } else {
      if (dim(source) != dims[i]) return false;
      for (const Atom& atom : axis(source)) result.atoms_.push_back(atom);
    }
    result.ends_.push_back(static_cast<int32_t>(result.atoms_.size()));
  }
  *this = std::move(result);
  return true;
}

FoldedView FoldedView::Repeat(absl::Span<const int64_t> counts) const {
  FoldedView result;
  result.offset_ = offset_;
  for (int i = 0; i < rank(); ++i) {
    const size_t begin = result.atoms_.size();
    for (const Atom& atom : axis(i)) result.Push(atom, begin);
    result.Push({counts[i], 0}, begin);
    result.ends_.push_back(static_cast<int32_t>(result.atoms_.size()));
  }
  return result;
}

void FoldedView::Replace(int axis, absl::Span<const Atom> atoms) {
  const int32_t begin = axis == 0 ? 0 : ends_[axis - 1];
  atoms_.erase(atoms_.begin() + begin, atoms_.begin() + ends_[axis]);
  int32_t end = begin;
  for (const Atom& atom : atoms) {
    if (atom.extent != 1) atoms_.insert(atoms_.begin() + end++, atom);
  }
  const int32_t more = end - ends_[axis];
  for (int i = axis; i < rank(); ++i) ends_[i] += more;
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
  if (this->axis(0).size() > 1) return false;
  const int64_t page_stride = stride(0);
  absl::InlinedVector<Atom, 4> rows(this->axis(axis).begin(), this->axis(axis).end());
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
  FoldedView flat;
  for (int axis = first; axis < last; ++axis) {
    for (const Atom& atom : this->axis(axis)) flat.Push(atom, 0);
  }
  Atoms& atoms = flat.atoms_;
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
