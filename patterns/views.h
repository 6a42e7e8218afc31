// Folding reshapes and transposes into strides.
//
// A FoldedView says where the elements of a tensor lie in some memory. Each axis
// is a mixed-radix run of atoms {extent, stride}, outermost first, so that any
// reshape or transpose of a strided tensor can be expressed:
//
//   [2, 3, 4] with strides [12, 4, 1], transposed {1, 0, 2}, reshaped {3, 8}:
//   axis 0: {3, 4}          axis 1: {2, 12} {4, 1}
//
// Only at the end an axis must be a single atom (evenly strided), or for scales
// {groups, stride} {group, 0}: consecutive elements share one.
#ifndef KVANT_PATTERNS_VIEWS_H_
#define KVANT_PATTERNS_VIEWS_H_

#include <algorithm>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kvant/graph/logical_tensor.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

class FoldedView {
 public:
  struct Atom {
    int64_t extent = 1;
    int64_t stride = 0;
    bool operator==(const Atom&) const = default;
  };

  FoldedView() = default;
  // Axis i has extent dims[i] and stride strides[i].
  FoldedView(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides);
  // The tensor's memory. Needs has_shape().
  static FoldedView Of(const LogicalTensor& tensor);
  // For each element of a tensor of these dims, its coordinate along that axis.
  static FoldedView Counting(absl::Span<const int64_t> dims, int axis);

  int rank() const { return static_cast<int>(axes_.size()); }
  int64_t dim(int axis) const;
  // Without atoms of extent 1; empty for an extent of 1.
  absl::Span<const Atom> axis(int axis) const { return axes_[axis]; }
  // Of the outermost atom.
  int64_t stride(int axis) const { return axes_[axis].empty() ? 0 : axes_[axis][0].stride; }
  int64_t offset() const { return offset_; }
  // Whether coordinates of an axis lie apart.
  bool Moves(int axis) const {
    return std::ranges::any_of(axes_[axis], [](const Atom& atom) { return atom.stride != 0; });
  }

  // Output axis i is input axis order[i] (negative counts from the end). `order` is a permutation,
  // as shape inference has checked. False if it is of another rank.
  bool Transpose(absl::Span<const int64_t> order);
  bool InverseTranspose(absl::Span<const int64_t> order);
  // False if the extents cannot be regrouped along atom boundaries.
  bool Reshape(absl::Span<const int64_t> dims);
  // NumPy broadcast, right-aligned; broadcast axes get stride 0.
  bool BroadcastTo(absl::Span<const int64_t> dims);
  // Each element of axis i serves counts[i] consecutive coordinates.
  FoldedView Repeat(absl::Span<const int64_t> counts) const;
  // Coordinates [begin, begin + length) of an axis. False if it would cut a group.
  bool Slice(int axis, int64_t begin, int64_t length);

  // Axis 0 is pages and `axis` rows of a page: makes them `count` rows of a batch and the rows of
  // `most` pages, as if these continued each other. False if pages are not evenly strided.
  bool SpreadPages(int axis, int64_t count, int64_t most);

  // The axes [first, last) merged into one run: false unless it is
  // {count, stride} of groups of `group` (1 unless stride-0 atoms are inside).
  // A run that never moves is one group: count 1, stride 0.
  bool Merge(int first, int last, Atom* run, int64_t* group) const;

 private:
  using Axis = absl::InlinedVector<Atom, 2>;
  // Appends to an axis, merging runs that continue each other.
  static void Push(Atom atom, Axis& axis);
  // The axes [first, last) as one.
  Axis Flatten(int first, int last) const;
  // These, but for those of extent 1, instead of the axis' atoms.
  void Replace(int axis, absl::Span<const Atom> atoms);

  absl::InlinedVector<Axis, 6> axes_;
  int64_t offset_ = 0;
};

inline Dims DimsOf(const FoldedView& view) {
  Dims dims(view.rank());
  for (int i = 0; i < view.rank(); ++i) dims[i] = view.dim(i);
  return dims;
}

// Which axes of a tensor of the problem's rank make up the view's three batch
// axes: [begin[i], end[i]) each.
struct BatchAxes {
  int begin[3] = {0, 0, 0};
  int end[3] = {0, 0, 0};
};

// `folded` as a View with these row and column axes (-1: extent 1). Broadcast
// batch axes get extent 1, and so do rows and columns if `broadcast_matrix`.
// With `group`, the axes may be grouped, and group sizes are returned.
// False if an axis is not evenly strided.
bool ToView(const FoldedView& folded, const BatchAxes& batch, int row, int col,
            bool broadcast_matrix, View* view, std::array<int64_t, kViewRank>* group = nullptr);

}  // namespace kvant

#endif  // KVANT_PATTERNS_VIEWS_H_
