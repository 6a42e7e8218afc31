// DynamicQuantize, Append and AppendPages: codes of numbers, and the scales and zero points of
// their groups unless those are given; or numbers of another type.
#ifndef KVANT_KERNELS_CPU_QUANTIZE_H_
#define KVANT_KERNELS_CPU_QUANTIZE_H_

#include <cstdint>
#include <limits>

#include "kvant/kernels/cpu/kernels.h"

namespace kvant::cpu {

// Elements by which the four tensors move along an axis.
struct QuantizeStrides {
  int64_t src = 0, codes = 0, scales = 0, zero_points = 0;
};

struct QuantizeAxis {
  int64_t extent = 1;
  QuantizeStrides strides;
};

enum class QuantizeLayout : uint8_t {
  kRows,      // the elements of a group are side by side, and so are groups
  kColumns,   // groups are side by side, each a column of lines
  kElements,  // any: one element after another
};

// Columns of a chunk, at most; chunks begin at multiples of 4 groups, so at whole bytes where
// groups are side by side.
inline constexpr int64_t kMaxQuantizeChunk = 256;
// Groups of so many elements whose ranges are found before their codes, at most: as many as are
// read twice from the first-level cache; 1, or a multiple of 4.
constexpr int64_t QuantizeBatch(int64_t group) {
  constexpr int64_t kElements = 2048, kMost = 64;
  if (group * 4 > kElements) return 1;
  return group * kMost <= kElements ? kMost : kElements / group / 4 * 4;
}
inline constexpr int kMaxQuantizeAxes = 24;  // two of each dimension: groups, and within them

// Outer axes are walked index by index; each index has, by layout,
//   kRows     runs.extent runs of `groups` groups of `group` elements: runs of numbers side by side
//             in which groups are, too, and runs of codes. With several runs, codes of neighbouring
//             groups are side by side, and several runs are a batch
//   kColumns  `lines` lines of `groups` elements, which are dense in a line
//   kElements one group, over the inner axes
// In rows and columns, neighbouring groups are `next` apart. A conversion has one run.
struct QuantizeProblem {
  QuantizeLayout layout = QuantizeLayout::kElements;
  DataType src_type = kUndef, code_type = kUndef, scale_type = kUndef, zero_point_type = kUndef;
  bool computes = false;  // scales and zero points are outputs
  bool converts = false;  // codes are numbers, and there are no parameters
  ParameterRule rule;     // its zero_points and codes count for given parameters, too

  QuantizeAxis outer[kMaxQuantizeAxes];
  int outer_axes = 0;
  QuantizeAxis inner[kMaxQuantizeAxes];  // kElements
  int inner_axes = 0;
  int64_t groups = 1;
  int64_t group = 1;   // kRows
  QuantizeAxis runs;   // kRows
  QuantizeAxis lines;  // kColumns
  QuantizeStrides next;

  // Units of work: several outer indices, then chunks of groups (of all runs; whole runs, if there
  // are several), then parts of a group (of lines, in columns), which need two passes where they
  // share what they compute.
  int64_t outer_count = 1, outer_run = 1;
  int64_t chunk = 1;
  int64_t part = 0, parts = 1;

  // Append: the first outer index is a row of batches. A row whose position is negative is not
  // written. Positions are multiples of position_unit. Each unit of a position moves what the row
  // writes by `per_position`. With pages, each page_units of them are a page, which moves it by
  // `per_page`. DynamicQuantize has no positions: 0 rows.
  int64_t rows = 0;
  int64_t position_unit = 1;
  int64_t page_units = std::numeric_limits<int64_t>::max();  // without pages
  QuantizeStrides per_position, per_page;
};

// Where rows go: that of row r is element r * step, of type s32 or s64; what is negative goes
// nowhere.
struct RowPositions {
  const void* data = nullptr;  // null: rows have none
  DataType type = kS32;
  int64_t step = 0;

  int64_t Of(int64_t row) const {
    const int64_t index = row * step;
    return type == kS64 ? static_cast<const int64_t*>(data)[index]
                        : static_cast<const int32_t*>(data)[index];
  }
};

// Memory of one call, by port; scales and zero points are read or written.
struct QuantizeCall {
  const QuantizeProblem* problem = nullptr;
  const KernelSet* kernels = nullptr;
  const void* src = nullptr;
  void* codes = nullptr;
  void* scales = nullptr;
  void* zero_points = nullptr;
  float* ranges = nullptr;  // RangeFloats(problem), where it has parts to compute
  RowPositions positions;   // if the problem has rows
};

int64_t QuantizeUnits(const QuantizeProblem& problem);
// Whether units find ranges first, all of them before the first quantizes.
bool HasRangePass(const QuantizeProblem& problem);
int64_t RangeFloats(const QuantizeProblem& problem);

// Unit by unit, in any order, units at the same time. Quantization is, element by element,
// CodeOf with ParametersOf in group_parameters.h, with quotients in f32.
void FindRanges(const QuantizeCall& call, int64_t unit);
void QuantizeUnit(const QuantizeCall& call, int64_t unit);

}  // namespace kvant::cpu

#endif  // KVANT_KERNELS_CPU_QUANTIZE_H_
