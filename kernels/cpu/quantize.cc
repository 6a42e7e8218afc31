#include "kvant/kernels/cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvant/kernels/cpu/ggml_groups.h"

namespace kvant::cpu {
namespace {

// Groups whose ranges are found before their codes: few enough to be read twice from the
// first-level cache.
constexpr int64_t kBatchElements = 2048;
constexpr int64_t kMaxBatch = kMaxQuantizeChunk;
constexpr int64_t kBufferBytes = 8192;
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
};

class Unit {
 public:
  Unit(const QuantizeCall& call, int64_t unit)
      : call_(call), p_(*call.problem), kernels_(*call.kernels->quantize) {
    const int64_t chunks = CeilDiv(p_.groups, p_.chunk);
    part_ = unit % p_.parts;
    const int64_t chunk = unit / p_.parts % chunks, run = unit / p_.parts / chunks;
    first_group_ = chunk * p_.chunk;
    groups_ = std::min(p_.chunk, p_.groups - first_group_);
    first_outer_ = run * p_.outer_run;
    last_outer_ = std::min(p_.outer_count, first_outer_ + p_.outer_run);
  }

  void FindRanges() {
    const int64_t begin = part_ * p_.part, size = std::min(p_.part, p_.group - begin);
    for (int64_t outer = first_outer_; outer < last_outer_; ++outer) {
      const Place place = PlaceOf(p_.outer, p_.outer_axes, outer);
      for (int64_t g = first_group_; g < first_group_ + groups_; ++g) {
        float* range = RangeOf(outer, g, part_);
        kernels_.row_ranges(p_.src_type, call_.src, place.src + g * p_.group + begin, size, 1,
                            Magnitude(), range, range + 1);
      }
    }
  }

  void Quantize() {
    for (int64_t outer = first_outer_; outer < last_outer_; ++outer) {
      Place place = PlaceOf(p_.outer, p_.outer_axes, outer);
      if (p_.rows > 0) {
        const int64_t row = outer / (p_.outer_count / p_.rows);
        const int64_t position = call_.positions[row * call_.position_step];
        if (position < 0) continue;
        place.Move(p_.per_position, position / p_.position_unit);
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

  void QuantizeRows(int64_t outer, Place line) {
    const int64_t most = p_.group <= kQuantizeRowGroup
                             ? std::min<int64_t>(64, kBatchElements / p_.group / 4 * 4)
                             : 1;
    for (int64_t g = first_group_; g < first_group_ + groups_; g += most) {
      const int64_t n = std::min(most, first_group_ + groups_ - g);
      Place place = line;
      place.Move(p_.next, g);
      if (p_.computes) {
        if (p_.parts > 1) {
          JoinRanges(outer, g);
        } else {
          kernels_.row_ranges(p_.src_type, call_.src, place.src, p_.group, n, Magnitude(),
                              batch_.min, batch_.max);
        }
      }
      const QuantizeParameters how = Parameters(place, n);
      const int64_t begin = part_ * p_.part;
      const int64_t end = p_.parts > 1 ? std::min(p_.group, begin + p_.part) : p_.group;
      if (!Representable(how, n)) {
        for (int64_t i = 0; i < n; ++i) {
          ExactCodes(place.src + i * p_.group + begin, 1, place.codes + i * p_.next.codes + begin,
                     1, end - begin, batch_.scales[i], batch_.zero_points[i]);
        }
      } else if (n > 1 && p_.next.codes != p_.group) {
        for (int64_t i = 0; i < n; ++i) {
          RowCodes(place.src + i * p_.group, place.codes + i * p_.next.codes, p_.group, 1,
                   From(how, i));
        }
      } else if (n > 1 || p_.group <= kQuantizeRowGroup) {
        RowCodes(place.src, place.codes, p_.group, n, how);
      } else {
        for (int64_t i = begin; i < end; i += kBatchElements) {
          RowCodes(place.src + i, place.codes + i, std::min(kBatchElements, end - i), 1, how);
        }
      }
    }
  }

  // Parameters from group i on.
  static QuantizeParameters From(QuantizeParameters how, int64_t i) {
    how.scales += i;
    how.values += i;
    if (how.reciprocals != nullptr) how.reciprocals += i;
    if (how.offsets != nullptr) how.offsets += i;
    return how;
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

  void RowCodes(int64_t src, int64_t codes, int64_t group, int64_t groups,
                const QuantizeParameters& how) {
    if (BitsOf(p_.code_type) == 8 && group % kCodeSlack == 0) {
      return kernels_.row_codes(p_.src_type, call_.src, src, group, groups, how,
                                static_cast<uint8_t*>(call_.codes) + codes);
    }
    kernels_.row_codes(p_.src_type, call_.src, src, group, groups, how, buffer_);
    StoreCodes(buffer_, group * groups, call_.codes, p_.code_type, codes);
  }

  void QuantizeColumns(int64_t outer, Place line) {
    Place place = line;
    place.Move(p_.next, first_group_);
    const QuantizeStrides& step = p_.lines.strides;
    const int64_t n = groups_;
    if (p_.computes) {
      kernels_.column_ranges(p_.src_type, call_.src, place.src, step.src, p_.lines.extent, n,
                             Magnitude(), batch_.min, batch_.max);
    }
    QuantizeParameters how = Parameters(place, n);
    if (outer + 1 < last_outer_) {
      how.ahead =
          (PlaceOf(p_.outer, p_.outer_axes, outer + 1).src - line.src) * BitsOf(p_.src_type) / 8;
    }
    const int64_t begin = p_.parts > 1 ? part_ * p_.part : 0;
    const int64_t end = p_.parts > 1 ? std::min(p_.lines.extent, begin + p_.part) : p_.lines.extent;
    if (!Representable(how, n)) {
      for (int64_t c = 0; c < n; ++c) {
        ExactCodes(place.src + begin * step.src + c, step.src, place.codes + begin * step.codes + c,
                   step.codes, end - begin, batch_.scales[c], batch_.zero_points[c]);
      }
    } else if (BitsOf(p_.code_type) == 8 && n % kCodeSlack == 0) {
      kernels_.column_codes(
          p_.src_type, call_.src, place.src + begin * step.src, step.src, end - begin, n, how,
          static_cast<uint8_t*>(call_.codes) + place.codes + begin * step.codes, step.codes);
    } else {
      const int64_t width = CeilDiv(n, kCodeSlack) * kCodeSlack;
      const int64_t block = kBufferBytes / width;
      for (int64_t i = begin; i < end; i += block) {
        const int64_t lines = std::min(block, end - i);
        kernels_.column_codes(p_.src_type, call_.src, place.src + i * step.src, step.src, lines, n,
                              how, buffer_, width);
        for (int64_t j = 0; j < lines; ++j) {
          StoreCodes(buffer_ + j * width, n, call_.codes, p_.code_type,
                     place.codes + (i + j) * step.codes);
        }
      }
    }
  }

  // Computes, rounds and stores the parameters of n groups whose ranges are known, or reads them.
  QuantizeParameters Parameters(const Place& place, int64_t n) {
    QuantizeParameters how;
    how.codes = p_.code_type;
    how.zero_points = p_.rule.zero_points;
    how.lowest = static_cast<float>(p_.rule.lowest);
    how.highest = static_cast<float>(p_.rule.highest);
    how.codebook = p_.rule.codebook;
    how.scales = batch_.scales;
    how.values = batch_.zero_points;
    const bool has_zero_points = how.zero_points != ZeroPoints::kNone;
    if (!p_.computes) {
      Read(p_.scale_type, call_.scales, place.scales, p_.next.scales, n, batch_.scales);
      if (!has_zero_points) return how;
      Read(p_.zero_point_type, call_.zero_points, place.zero_points, p_.next.zero_points, n,
           batch_.zero_points);
      return how;
    }
    if (p_.rule.ggml == GgmlFormat::kNone) {
      how.divide = !kernels_.parameters(p_.rule, n, batch_.min, batch_.max, batch_.scales,
                                        batch_.reciprocals, batch_.zero_points);
    } else {
      FindGgmlParameters(kernels_, p_.rule,
                         {p_.src_type, call_.src, place.src, p_.group, n, batch_.min, batch_.max,
                          batch_.scales, batch_.reciprocals, batch_.zero_points});
      how.ggml = p_.rule.ggml;
      how.offsets = batch_.min;
    }
    if (part_ == 0) {
      StoreParameters(p_.scale_type, batch_.scales, n, call_.scales, place.scales, p_.next.scales);
      if (has_zero_points) {
        StoreParameters(p_.zero_point_type, batch_.zero_points, n, call_.zero_points,
                        place.zero_points, p_.next.zero_points);
      }
    }
    how.reciprocals = batch_.reciprocals;
    return how;
  }

  void Read(DataType type, const void* data, int64_t index, int64_t step, int64_t n, float* out) {
    if (step == 1) return call_.kernels->load(type, data, index, n, out);
    if (step == 0) {
      call_.kernels->load(type, data, index, 1, out);
      std::fill(out + 1, out + n, out[0]);
      return;
    }
    for (int64_t i = 0; i < n; ++i) call_.kernels->load(type, data, index + i * step, 1, out + i);
  }

  // Whether the kernels take these zero points.
  bool Representable(const QuantizeParameters& how, int64_t n) const {
    if (p_.computes || how.zero_points != ZeroPoints::kCodes) return true;
    return std::all_of(batch_.zero_points, batch_.zero_points + n,
                       [](float z) { return std::fabs(z) <= kLargestZeroPoint; });
  }

  // Codes of whole bytes, or from the first bits of a byte on; bits behind the last code stay.
  void StoreCodes(const uint8_t* codes, int64_t n, void* out, DataType type, int64_t index) const {
    const int bits = BitsOf(type);
    uint8_t* to = static_cast<uint8_t*>(out) + index * bits / 8;
    if (bits == 8) {
      std::memcpy(to, codes, n);
      return;
    }
    const int64_t per_byte = 8 / bits, whole = n / per_byte * per_byte;
    kernels_.pack(bits, codes, whole, to);
    for (int64_t i = whole; i < n; ++i) {
      const int shift = static_cast<int>(i - whole) * bits;
      const int mask = ((1 << bits) - 1) << shift;
      uint8_t& last = to[whole / per_byte];
      last = static_cast<uint8_t>((last & ~mask) | (codes[i] << shift & mask));
    }
  }

  void StoreParameters(DataType type, const float* values, int64_t n, void* out, int64_t index,
                       int64_t step) {
    const int64_t bytes = BitsOf(type) / 8;
    if (IsFloat(type)) {
      if (step == 1) return kernels_.convert(kF32, values, 0, n, type, out, index);
      kernels_.convert(kF32, values, 0, n, type, buffer_, 0);
      uint8_t* const first = static_cast<uint8_t*>(out) + index * bytes;
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(first + i * step * bytes, buffer_ + i * bytes, bytes);
      }
    } else if (step != 1 || index * BitsOf(type) % 8 != 0) {
      for (int64_t i = 0; i < n; ++i) StoreElement(type, out, index + i * step, values[i]);
    } else if (type == kS32) {
      int32_t* const first = static_cast<int32_t*>(out) + index;
      for (int64_t i = 0; i < n; ++i) first[i] = static_cast<int32_t>(values[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        buffer_[i] = static_cast<uint8_t>(static_cast<int32_t>(values[i]));
      }
      StoreCodes(buffer_, n, out, type, index);
    }
  }

  // Element by element, in f64: of any zero point.
  void ExactCodes(int64_t src, int64_t src_step, int64_t codes, int64_t codes_step, int64_t n,
                  double scale, double zero_point) const {
    for (int64_t i = 0; i < n; ++i) {
      const double x = LoadElement(p_.src_type, call_.src, src + i * src_step);
      StoreElement(p_.code_type, call_.codes, codes + i * codes_step,
                   CodeOf(p_.rule, x, scale, zero_point, IsInteger(p_.code_type)));
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
  Batch batch_ = {};
  uint8_t buffer_[kBufferBytes + kCodeSlack];
};

}  // namespace

int64_t QuantizeUnits(const QuantizeProblem& problem) {
  return CeilDiv(problem.outer_count, problem.outer_run) * CeilDiv(problem.groups, problem.chunk) *
         problem.parts;
}

bool HasRangePass(const QuantizeProblem& problem) { return problem.computes && problem.parts > 1; }

int64_t RangeFloats(const QuantizeProblem& problem) {
  return HasRangePass(problem) ? problem.outer_count * problem.groups * problem.parts * 2 : 0;
}

void FindRanges(const QuantizeCall& call, int64_t unit) { Unit(call, unit).FindRanges(); }

void QuantizeUnit(const QuantizeCall& call, int64_t unit) { Unit(call, unit).Quantize(); }

}  // namespace kvant::cpu
