// StoreSpec: what is written into a cache, or read back, and how. The one place where it is written
// down: a backend sees no graph.
//
//   x                    = values; rotated by runs of `hadamard` elements of the last dimension
//   scales, zero points  = given, or of each group of x by `rule`
//   codes                = of x by scales and zero points; without scales x itself, converted
//   or, if `dequantizes`,
//   values               = what codes stand for
#ifndef KVANT_PATTERNS_STORE_SPEC_H_
#define KVANT_PATTERNS_STORE_SPEC_H_

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/attention_spec.h"

namespace kvant {

struct StoreSpec {
  // How scales and zero points are computed, and codes made: docs/ops.md, DynamicQuantize.
  struct Rule {
    bool computes = false;  // scales and zero points are outputs
    bool power_of_two_scales = false;
    float scale_floor = 0.f;
    bool ggml = false;            // by ggml's formulas
    std::vector<float> codebook;  // not empty: codes are positions in it
  };

  // Where rows of dimension 0 are written, of codes that are longer along `axis` than values; with
  // pages, dimension 0 of codes is these.
  struct Position {
    PortArray array;       // s32 or s64 by row, or one; absent: values are all of codes. Negative:
                           // the row is left out
    int axis = 0;          // of tokens
    int64_t tokens = 0;    // of values
    int64_t capacity = 0;  // of codes
    int64_t group = 1;     // positions are multiples of it
    int64_t page = 0;      // tokens of one; 0: there are none
  };

  Dims dims;   // of values
  Dims group;  // elements per group along each
  // Strides of scales and zero points are from one group to the next.
  PortArray values, codes, scales, zero_points;
  int64_t hadamard = 0;  // 0: none
  bool dequantizes = false;
  Rule rule;
  Position position;

  bool appends() const { return position.array.present(); }
  bool converts() const { return !scales.present(); }
  // Nothing but a rotation.
  bool only_rotates() const { return hadamard > 0 && converts() && !appends(); }
  // What codes are made of: the values, or where they are rotated before, these in f32, dense.
  PortArray Source() const;
};

// An axis along which stores are walked.
struct StoreAxis {
  int64_t extent = 1;
  // Elements by which an index moves in each array.
  int64_t values = 0, codes = 0, scales = 0, zero_points = 0, positions = 0;
  bool in_group = false;
};
using StoreAxes = absl::InlinedVector<StoreAxis, 8>;

// Dimensions `first` to `last` - 1, each split into an axis of groups and one within groups; those
// of extent 1 are left out. `values` are those of Source().
StoreAxes SplitAxes(const StoreSpec& spec, int first, int last);
// Makes one of neighbours where the outer continues the inner in every array.
void MergeAxes(StoreAxes& axes);
// How far what a row writes moves per `position.group` tokens of its position: within its page, if
// there are pages.
StoreAxis PositionAxis(const StoreSpec& spec);
// How far it moves per page.
StoreAxis PageAxis(const StoreSpec& spec);

// Of the ops of a Partition::Kind::kStore, all shapes known, whose ports these are.
StoreSpec ResolveStore(const Graph& graph, absl::Span<const TensorId> inputs,
                       absl::Span<const TensorId> outputs);

}  // namespace kvant

#endif  // KVANT_PATTERNS_STORE_SPEC_H_
