#include "kvant/kernels/cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvant/kernels/cpu/ggml_groups.h"

namespace kvant::cpu {
namespace {

constexpr int64_t kMaxBatch = kMaxQuantizeChunk;
constexpr float kLargestZeroPoint = 32768;  // see QuantizeParameters

// Indices in the four arrays.
struct Place {
  int64_t src = 0, codes = 0, scales = 0, zero_points = 0;

  void Move(const QuantizeStrides& by, int64_t times) {
    src += by.src * times;
    codes += by.codes * times;
    scales += by.scales * times;
    zero_points += by.zero_points * times;
  }
};

// Of an index into the product of axes.
Place PlaceOf(const QuantizeAxis* axes, int count, int64_t index) {
  Place place;
  for (int a = count - 1; a >= 0; --a) {
    place.Move(axes[a].strides, index % axes[a].extent);
    index /= axes[a].extent;
  }
  return place;
}

struct Batch {
  float min[kMaxBatch], max[kMaxBatch];
  float scales[kMaxBatch], reciprocals[kMaxBatch], zero_points[kMaxBatch];
  uint8_t stored[kMaxBatch * sizeof(float)];
};

// Groups of a batch: runs of them, and where the first is.
struct Groups {
  Place at;
  int64_t count = 1, run = 1;
};

int64_t GroupsOf(const QuantizeProblem& problem) { return problem.runs.extent * problem.groups; }

class Unit {
 public:
  Unit(const QuantizeCall& call, int64_t unit)
      : call_(call), p_(*call.problem), kernels_(*call.kernels->quantize) {
    const int64_t chunks = CeilDiv(GroupsOf(p_), p_.chunk);
    part_ = unit % p_.parts;
    const int64_t chunk = unit / p_.parts % chunks, run = unit / p_.parts / chunks;
    first_group_ = chunk * p_.chunk;
    groups_ = std::min(p_.chunk, GroupsOf(p_) - first_group_);
    first_outer_ = run * p_.outer_run;
    last_outer_ = std::min(p_.outer_count, first_outer_ + p_.outer_run);
  }

  void FindRanges() {
    const int64_t begin = part_ * p_.part, size = std::min(p_.part, p_.group - begin);
    for (int64_t outer = first_outer_; outer < last_outer_; ++outer) {
      const Place place = PlaceOf(p_.outer, p_.outer_axes, outer);
      for (int64_t g = first_group_; g < first_group_ + groups_; ++g) {
        float* range = RangeOf(outer, g, part_);
        kernels_.row_ranges(
            {p_.src_type, call_.src, place.src + g * p_.group + begin, size, /*groups=*/1},
            Magnitude(), range, range + 1);
      }
    }
  }

  void Quantize() {
    for (int64_t outer = first_outer_; outer < last_outer_; ++outer) {
      Place place = PlaceOf(p_.outer, p_.outer_axes, outer);
      if (p_.rows > 0) {
        const int64_t row = outer / (p_.outer_count / p_.rows);
        const int64_t position = call_.positions.Of(row);
        if (position < 0) continue;
        const int64_t units = position / p_.position_unit;
        place.Move(p_.per_page, units / p_.page_units);
        place.Move(p_.per_position, units % p_.page_units);
      }
      if (p_.converts) {
        Convert(place);
        continue;
      }
      switch (p_.layout) {
        case QuantizeLayout::kRows:
          QuantizeRows(outer, place);
          break;
        case QuantizeLayout::kColumns:
          QuantizeColumns(outer, place);
          break;
        case QuantizeLayout::kElements:
          QuantizeElements(place);
          break;
      }
    }
  }

 private:
  bool Magnitude() const { return p_.rule.by_magnitude(); }

  float* RangeOf(int64_t outer, int64_t group, int64_t part) const {
    return call_.ranges + ((outer * p_.groups + group) * p_.parts + part) * 2;
  }

  void Convert(Place place) const {
    place.Move(p_.next, first_group_);
    const int64_t begin = part_ * p_.part;
    const int64_t n = p_.parts > 1 ? std::min(p_.group - begin, p_.part) : p_.group;
    for (int64_t g = 0; g < groups_; ++g) {
      kernels_.convert(p_.src_type, call_.src, place.src + begin, n, p_.code_type, call_.codes,
                       place.codes + begin);
      place.Move(p_.next, 1);
    }
  }

  void QuantizeRows(int64_t outer, const Place& line) {
    int64_t most = QuantizeBatch(p_.group);
    if (p_.runs.extent > 1) most = most / p_.groups * p_.groups;
    for (int64_t g = first_group_; g < first_group_ + groups_; g += most) {
      Groups groups{line, std::min(most, first_group_ + groups_ - g)};
      groups.at.Move(p_.runs.strides, g / p_.groups);
      groups.at.Move(p_.next, g % p_.groups);
      groups.run = std::min(groups.count, p_.groups);
      QuantizeBatchOfRows(outer, g, groups);
    }
  }

  void QuantizeBatchOfRows(int64_t outer, int64_t g, const Groups& groups) {
    const int64_t begin = part_ * p_.part;
    const int64_t size = p_.parts > 1 ? std::min(p_.group - begin, p_.part) : p_.group;
    NumberRows rows{p_.src_type,  call_.src,  groups.at.src + begin, size,
                    groups.count, groups.run, p_.runs.strides.src};
    if (p_.computes && p_.parts > 1) {
      JoinRanges(outer, g);
    } else if (p_.computes) {
      kernels_.row_ranges(rows, Magnitude(), batch_.min, batch_.max);
    }
    const QuantizeParameters how = Parameters(groups);
    if (!Representable(how, groups.count)) {
      for (int64_t i = 0; i < groups.count; ++i) {
        Place place = groups.at;
        place.Move(p_.runs.strides, i / groups.run);
        place.Move(p_.next, i % groups.run);
        ExactCodes(place.src + begin, 1, place.codes + begin, 1, size, batch_.scales[i],
                   ZeroPointAt(place.zero_points, i));
      }
      return;
    }
    CodeRuns out{call_.codes, groups.at.codes + begin, p_.runs.strides.codes};
    if (groups.run > 1 && p_.next.codes != p_.group) {
      rows.run = 1;
      rows.step = p_.group;
      out.step = p_.next.codes;
    }
    kernels_.row_codes(rows, how, out);
  }

  void JoinRanges(int64_t outer, int64_t group) {
    float min = RangeOf(outer, group, 0)[0], max = RangeOf(outer, group, 0)[1];
    for (int64_t part = 1; part < p_.parts; ++part) {
      const float* range = RangeOf(outer, group, part);
      // Once NaN, it stays.
      min = range[0] >= min || min != min ? min : range[0];
      max = range[1] <= max || max != max ? max : range[1];
    }
    batch_.min[0] = min;
    batch_.max[0] = max;
  }

  void QuantizeColumns(int64_t outer, Place line) {
    Place place = line;
    place.Move(p_.next, first_group_);
    const QuantizeStrides& step = p_.lines.strides;
    const int64_t n = groups_;
    NumberColumns columns{p_.src_type, call_.src, place.src, step.src, p_.lines.extent, n};
    if (outer + 1 < p_.outer_count) {
      columns.ahead =
          (PlaceOf(p_.outer, p_.outer_axes, outer + 1).src - line.src) * BitsOf(p_.src_type) / 8;
    }
    if (p_.computes) {
      kernels_.column_ranges(columns, Magnitude(), batch_.min, batch_.max);
    }
    // Lanes beyond the last column have parameters, too.
    for (float* values : {batch_.scales, batch_.reciprocals, batch_.zero_points}) {
      std::fill(values + n, values + CeilDiv(n, kColumnBlock) * kColumnBlock, 1.f);
    }
    const QuantizeParameters how = Parameters({place, n, n});
    const int64_t begin = p_.parts > 1 ? part_ * p_.part : 0;
    const int64_t end = p_.parts > 1 ? std::min(p_.lines.extent, begin + p_.part) : p_.lines.extent;
    if (!Representable(how, n)) {
      for (int64_t c = 0; c < n; ++c) {
        ExactCodes(place.src + begin * step.src + c, step.src, place.codes + begin * step.codes + c,
                   step.codes, end - begin, batch_.scales[c],
                   ZeroPointAt(place.zero_points + c * p_.next.zero_points, c));
      }
      return;
    }
    columns.index += begin * step.src;
    columns.lines = end - begin;
    kernels_.column_codes(columns, how,
                          {call_.codes, place.codes + begin * step.codes, step.codes});
  }

  // Computes, rounds and stores the parameters of groups whose ranges are known, or reads them.
  QuantizeParameters Parameters(const Groups& groups) {
    const int64_t n = groups.count;
    QuantizeParameters how;
    how.codes = p_.code_type;
    how.bits = BitsOf(p_.code_type);
    how.lowest = IsInteger(p_.code_type) ? static_cast<int>(LowestOf(p_.code_type)) : 0;
    how.zero_points = p_.rule.zero_points;
    how.codebook = p_.rule.codebook;
    how.scales = batch_.scales;
    how.values = batch_.zero_points;
    const bool has_zero_points = how.zero_points != ZeroPoints::kNone;
    if (!p_.computes) {
      Read(p_.scale_type, call_.scales, groups, &Place::scales, &QuantizeStrides::scales,
           batch_.scales);
      if (!has_zero_points) return how;
      Read(p_.zero_point_type, call_.zero_points, groups, &Place::zero_points,
           &QuantizeStrides::zero_points, batch_.zero_points);
      return how;
    }
    if (p_.rule.ggml == GgmlFormat::kNone) {
      how.divide = !kernels_.parameters(p_.rule, n, batch_.min, batch_.max, batch_.scales,
                                        batch_.reciprocals, batch_.zero_points);
    } else {
      FindGgmlParameters(kernels_, p_.rule,
                         {p_.src_type, call_.src, groups.at.src, p_.group, n, batch_.min,
                          batch_.max, batch_.scales, batch_.reciprocals, batch_.zero_points});
      how.ggml = p_.rule.ggml;
      how.offsets = batch_.min;
    }
    if (part_ == 0) {
      StoreParameters(p_.scale_type, batch_.scales, groups, call_.scales, &Place::scales,
                      &QuantizeStrides::scales);
      if (has_zero_points) {
        StoreParameters(p_.zero_point_type, batch_.zero_points, groups, call_.zero_points,
                        &Place::zero_points, &QuantizeStrides::zero_points);
      }
    }
    how.reciprocals = batch_.reciprocals;
    return how;
  }

  // Calls f(index of the first parameter of a run in memory, index of its group in the batch).
  template <typename F>
  void ForEachRun(const Groups& groups, int64_t Place::*at, int64_t QuantizeStrides::*strides,
                  F f) const {
    int64_t index = groups.at.*at;
    for (int64_t i = 0; i < groups.count; i += groups.run, index += p_.runs.strides.*strides) {
      f(index, i);
    }
  }

  void Read(DataType type, const void* data, const Groups& groups, int64_t Place::*at,
            int64_t QuantizeStrides::*strides, float* out) const {
    const int64_t step = p_.next.*strides, n = groups.run;
    ForEachRun(groups, at, strides, [&](int64_t index, int64_t i) {
      float* const to = out + i;
      if (step == 1) return call_.kernels->load(type, data, index, n, to);
      if (step == 0) {
        call_.kernels->load(type, data, index, 1, to);
        std::fill(to + 1, to + n, to[0]);
        return;
      }
      for (int64_t j = 0; j < n; ++j) call_.kernels->load(type, data, index + j * step, 1, to + j);
    });
  }

  // Whether the kernels take these zero points.
  bool Representable(const QuantizeParameters& how, int64_t n) const {
    if (p_.computes || how.zero_points != ZeroPoints::kCodes) return true;
    return std::all_of(batch_.zero_points, batch_.zero_points + n,
                       [](float z) { return std::fabs(z) <= kLargestZeroPoint; });
  }

  // Neighbours of integers of less than a byte stay.
  void StoreParameters(DataType type, const float* values, const Groups& groups, void* out,
                       int64_t Place::*at, int64_t QuantizeStrides::*strides) {
    const int64_t step = p_.next.*strides, n = groups.run;
    const bool one_run = groups.count == n;
    if (IsFloat(type) && one_run && step == 1) {
      return kernels_.convert(kF32, values, 0, n, type, out, groups.at.*at);
    }
    if (IsFloat(type)) kernels_.convert(kF32, values, 0, groups.count, type, batch_.stored, 0);
    ForEachRun(groups, at, strides, [&](int64_t index, int64_t i) {
      if (IsFloat(type) && BitsOf(type) == 16) return Spread<uint16_t>(i, n, out, index, step);
      if (IsFloat(type)) return Spread<uint32_t>(i, n, out, index, step);
      if (step != 1) {
        for (int64_t j = 0; j < n; ++j) StoreElement(type, out, index + j * step, values[i + j]);
      } else if (type == kS32) {
        int32_t* const to = static_cast<int32_t*>(out) + index;
        for (int64_t j = 0; j < n; ++j) to[j] = static_cast<int32_t>(values[i + j]);
      } else {
        for (int64_t j = 0; j < n; ++j) {
          batch_.stored[j] = static_cast<uint8_t>(static_cast<int32_t>(values[i + j]));
        }
        kernels_.pack(BitsOf(type), batch_.stored, n, out, index);
      }
    });
  }

  // Elements i to i + n - 1 of batch_.stored go `step` apart.
  template <typename T>
  void Spread(int64_t i, int64_t n, void* out, int64_t index, int64_t step) const {
    const uint8_t* const from = batch_.stored + i * sizeof(T);
    uint8_t* const to = static_cast<uint8_t*>(out) + index * sizeof(T);
    for (int64_t j = 0; j < n; ++j) {
      std::memcpy(to + j * step * sizeof(T), from + j * sizeof(T), sizeof(T));
    }
  }

  // Of the batch's group i. One that is given may have more bits than f32.
  double ZeroPointAt(int64_t at, int64_t i) const {
    const bool given = !p_.computes && p_.rule.zero_points != ZeroPoints::kNone;
    return given ? LoadElement(p_.zero_point_type, call_.zero_points, at)
                 : double{batch_.zero_points[i]};
  }

  // Element by element, in f64: of any zero point.
  void ExactCodes(int64_t src, int64_t src_step, int64_t codes, int64_t codes_step, int64_t n,
                  double scale, double zero_point) const {
    for (int64_t i = 0; i < n; ++i) {
      const double x = LoadElement(p_.src_type, call_.src, src + i * src_step);
      StoreElement(p_.code_type, call_.codes, codes + i * codes_step,
                   CodeOf(p_.rule, x, scale, zero_point));
    }
  }

  template <typename Visit>
  void ForEachInner(const Place& base, Visit visit) const {
    int64_t count = 1;
    for (int a = 0; a < p_.inner_axes; ++a) count *= p_.inner[a].extent;
    for (int64_t i = 0; i < count; ++i) {
      const Place in = PlaceOf(p_.inner, p_.inner_axes, i);
      visit(Place{base.src + in.src, base.codes + in.codes, base.scales + in.scales,
                  base.zero_points + in.zero_points});
    }
  }

  void QuantizeElements(const Place& base) {
    const bool has_zero_points = p_.rule.zero_points != ZeroPoints::kNone;
    if (p_.computes) {
      const GroupParameters parameters = ElementParameters(base);
      StoreElement(p_.scale_type, call_.scales, base.scales, parameters.scale);
      if (has_zero_points) {
        StoreElement(p_.zero_point_type, call_.zero_points, base.zero_points,
                     parameters.zero_point);
      }
    }
    ForEachInner(base, [&](const Place& at) {
      const double scale = LoadElement(p_.scale_type, call_.scales, at.scales);
      const double zero_point =
          has_zero_points ? LoadElement(p_.zero_point_type, call_.zero_points, at.zero_points) : 0;
      ExactCodes(at.src, 0, at.codes, 0, 1, scale, zero_point);
    });
  }

  GroupParameters ElementParameters(const Place& base) const {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    float min = kInfinity, max = -kInfinity;
    bool any = false, nan = false;
    ForEachInner(base, [&](const Place& at) {
      const auto x = static_cast<float>(LoadElement(p_.src_type, call_.src, at.src));
      any = true;
      nan |= x != x;
      min = std::min(min, x);
      max = std::max(max, x);
    });
    if (!any) min = max = 0;
    if (nan) min = max = std::numeric_limits<float>::quiet_NaN();
    return ParametersOf(p_.rule, min, max);
  }

  const QuantizeCall& call_;
  const QuantizeProblem& p_;
  const QuantizeKernels& kernels_;
  int64_t part_ = 0, first_group_ = 0, groups_ = 0, first_outer_ = 0, last_outer_ = 0;
  Batch batch_;
};

}  // namespace

int64_t QuantizeUnits(const QuantizeProblem& problem) {
  return CeilDiv(problem.outer_count, problem.outer_run) *
         CeilDiv(GroupsOf(problem), problem.chunk) * problem.parts;
}

bool HasRangePass(const QuantizeProblem& problem) { return problem.computes && problem.parts > 1; }

int64_t RangeFloats(const QuantizeProblem& problem) {
  return HasRangePass(problem) ? problem.outer_count * problem.groups * problem.parts * 2 : 0;
}

void FindRanges(const QuantizeCall& call, int64_t unit) { Unit(call, unit).FindRanges(); }

void QuantizeUnit(const QuantizeCall& call, int64_t unit) { Unit(call, unit).Quantize(); }

}  // namespace kvant::cpu
