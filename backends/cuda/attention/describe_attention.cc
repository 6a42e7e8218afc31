// An AttentionSpec in the words of the kernels.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvant/backends/cuda/attention/attention_plan.h"
#include "kvant/backends/cuda/element_type.h"
#include "kvant/kernels/cuda/codes_format.h"

namespace kvant::cuda {
namespace {

constexpr int64_t kUnbounded = int64_t{1} << 40;

i32 Clamp32(int64_t value) {
  return static_cast<i32>(std::min<int64_t>(value, std::numeric_limits<i32>::max()));
}

// Whether both begin at the same element and go on by the same strides. They may have different
// numbers of columns.
bool LiesAs(const View& a, const View& b) {
  if (!a.present() || !b.present()) return a.present() == b.present();
  bool same = a.port == b.port && a.type == b.type && a.offset == b.offset;
  for (int axis = 0; axis < kAxes; ++axis) {
    same &= (a.dims[axis] == 1 ? 0 : a.strides[axis]) == (b.dims[axis] == 1 ? 0 : b.strides[axis]);
    same &= axis == kCol || a.dims[axis] == b.dims[axis];
  }
  return same;
}

// Whether V is the first channels of K: the same codes, and the same parameters.
bool ValuesLieInKeys(const AttentionSpec& spec) {
  if (spec.k.size() != 1 || spec.v.size() != 1) return false;
  const KvSegment &k = spec.k[0], &v = spec.v[0];
  if (spec.v_head_size > spec.head_size || !LiesAs(k.data, v.data) || k.range.present() ||
      v.range.present() || !LiesAs(k.page_table, v.page_table) ||
      k.quantization.has_value() != v.quantization.has_value()) {
    return false;
  }
  if (!k.quantization) return true;
  const Quantization &of_k = *k.quantization, &of_v = *v.quantization;
  if (!of_k.scales.present() || of_k.codebook != of_v.codebook || !of_k.static_zps.empty() ||
      !of_v.static_zps.empty()) {
    return false;
  }
  for (int axis = 0; axis < kAxes; ++axis) {
    const bool whole =
        of_k.group[axis] >= k.data.dims[axis] && of_v.group[axis] >= v.data.dims[axis];
    if (of_k.group[axis] != of_v.group[axis] && !whole) return false;
  }
  return LiesAs(of_k.scales, of_v.scales) && LiesAs(of_k.zero_points, of_v.zero_points);
}

// Fills arrays of a plan in, and remembers whose pointers they have.
class Describer {
 public:
  Describer(const AttentionSpec& spec, AttentionPlan& plan) : spec_(spec), plan_(plan) {}

  void Describe() {
    AttentionTraits& t = plan_.traits;
    AttentionParams& p = plan_.params;
    t.head_size = Clamp32(spec_.head_size);
    t.v_head_size = Clamp32(spec_.v_head_size);
    for (int axis = 0; axis < 3; ++axis) p.batch[axis] = Clamp32(spec_.batch[axis]);
    p.q_len = Clamp32(spec_.q_len);
    p.kv_len = Clamp32(spec_.kv_len);
    Describe(spec_.q, spec_.q_quantization, /*pages=*/false, t.q, p.q);
    t.k_segments = DescribeSegments(spec_.k, t.k, p.k);
    t.v_segments = DescribeSegments(spec_.v, t.v, p.v);
    t.v_in_k = ValuesLieInKeys(spec_);
    t.one_codebook = t.k[0].codebook != 0 && t.v[0].codebook != 0 &&
                     spec_.k[0].quantization->codebook == spec_.v[0].quantization->codebook;
    t.step_count = static_cast<i32>(spec_.steps.size());
    for (size_t i = 0; i < spec_.steps.size(); ++i) {
      Describe(spec_.steps[i], t.steps[i], p.steps[i]);
    }
    MarkHidingBands();
    t.inf_as_zero = spec_.softmax_mode == SoftmaxMode::kInfAsZero;
    t.empty_is_ln0 = spec_.stats.present() && spec_.stats_of_empty != 0;
    Describe(spec_.sinks, t.sinks, p.sinks);
    t.has_lengths = Describe(spec_.kv_lengths, p.kv_lengths);
    t.lengths_vary = t.has_lengths && (spec_.kv_lengths.dims[0] > 1 || spec_.batch[0] == 1);
    t.has_first = Describe(spec_.kv_first, p.kv_first);
    t.ragged = Describe(spec_.query_offsets, p.query_offsets);
    Describe(spec_.stats, Extents(spec_.q_len, 1), t.stats, p.stats, /*output=*/true);
    Describe(spec_.output, Extents(spec_.q_len, spec_.v_head_size), t.output, p.output,
             /*output=*/true);
    const auto run = [](int64_t size) { return size > 1 ? Clamp32(size) : 0; };
    t.q_hadamard = run(spec_.q_hadamard);
    t.output_hadamard = run(spec_.output_hadamard);
    DescribeDropout();
    DescribeRounding();
    DescribeRows();
  }

 private:
  template <typename Pointer>
  void BindPort(const Pointer& field, int port, bool output) {
    plan_.binding.ports.push_back({OffsetIn(plan_.params, field), port, output});
  }
  template <typename Field>
  void BindValue(const Field& field, const View& view, HostValue::As as) {
    plan_.binding.values.push_back({OffsetIn(plan_.params, field), view.port, view.type, as});
  }
  template <typename Pointer, typename T>
  void BindConstants(const Pointer& field, const T* values, size_t count) {
    plan_.binding.AddConstants(OffsetIn(plan_.params, field), values, count * sizeof(T));
  }

  using Dims5 = std::array<int64_t, kAxes>;

  Dims5 Extents(int64_t rows, int64_t columns) const {
    return {spec_.batch[0], spec_.batch[1], spec_.batch[2], rows, columns};
  }

  // extents: of what the array lies over. Along an axis of which there is one, or none, an array
  // counts as one that varies, so that kernels do not depend on how many there are.
  void Describe(const View& view, const Dims5& extents, ArrayTraits& traits, Array& array,
                bool output = false) {
    if (!view.present()) return;
    traits.type = ElementTypeOf(view.type);
    array.offset = view.offset;
    for (int axis = 0; axis < kAxes; ++axis) {
      array.strides[axis] = view.dims[axis] == 1 ? 0 : view.strides[axis];
      if (array.strides[axis] != 0 || (extents[axis] <= 1 && !view.scalar())) {
        traits.varies |= 1 << axis;
      }
    }
    BindPort(array.data, view.port, output);
  }
  void Describe(const View& view, ArrayTraits& traits, BatchArray& array) {
    if (!view.present()) return;
    traits.type = ElementTypeOf(view.type);
    array.offset = view.offset;
    for (int axis = 0; axis < 3; ++axis) {
      array.strides[axis] = view.dims[axis] == 1 ? 0 : view.strides[axis];
      if (array.strides[axis] != 0) traits.varies |= 1 << axis;
    }
    if (spec_.batch[0] == 1) traits.varies |= 1;
    BindPort(array.data, view.port, /*output=*/false);
  }

  // Whether it is there.
  bool Describe(const View& view, IndexArray& array) {
    if (!view.present()) return false;
    array.offset = view.offset;
    array.stride = view.dims[0] == 1 ? 0 : Clamp32(view.strides[0]);
    array.step = Clamp32(&view == &spec_.query_offsets ? view.strides[0] : view.strides[kCol]);
    BindPort(array.data, view.port, /*output=*/false);
    return true;
  }

  // One value, or one per element of `axis`.
  template <typename T>
  void DescribeStatic(const std::vector<T>& values, int axis, ElementType type, ArrayTraits& traits,
                      Array& array) {
    if (values.empty()) return;
    traits.type = type;
    if (axis >= 0 && values.size() > 1) {
      array.strides[axis] = 1;
      traits.varies = 1 << axis;
    }
    BindConstants(array.data, values.data(), values.size());
  }

  // pages: axis b0 is these.
  void Describe(const View& data, const std::optional<Quantization>& quantization, bool pages,
                SegmentTraits& traits, StoredParams& params) {
    Dims5 extents = Extents(data.dims[kRow], data.dims[kCol]);
    if (pages) extents[0] = data.dims[0];
    Describe(data, extents, traits.data, params.data);
    std::fill(std::begin(traits.group), std::end(traits.group), 1);
    DescribeRuns(data, traits);
    if (!quantization) {
      traits.group[kCol] = std::max<i32>(1, Clamp32(data.dims[kCol]));
      return;
    }
    if (quantization->scales.present()) {
      Describe(quantization->scales, extents, traits.scales, params.scales);
      for (int axis = 0; axis < kAxes; ++axis) {
        traits.group[axis] = Clamp32(quantization->group[axis]);
      }
    } else {
      DescribeStatic(quantization->static_scales, quantization->static_axis, kFloat32,
                     traits.scales, params.scales);
    }
    DescribeCodebook(quantization->codebook, traits, params);
    if (quantization->zero_points.present()) {
      Describe(quantization->zero_points, extents, traits.zero_points, params.zero_points);
      traits.real_zero_points = IsFloat(quantization->zero_points.type);
    } else {
      DescribeStatic(quantization->static_zps, quantization->static_axis, kInt64,
                     traits.zero_points, params.zero_points);
    }
  }

  // Entries in f32; of 16 also in f16, as a CodebookTable is made of: divided by a power of two, so
  // that the largest is between 1 and 2, and after them that power.
  void DescribeCodebook(const std::vector<float>& entries, SegmentTraits& traits,
                        StoredParams& params) {
    traits.codebook = Clamp32(static_cast<int64_t>(entries.size()));
    if (entries.empty()) return;
    std::vector<float> constants = entries;
    if (entries.size() == CodebookTable::kEntries) {
      float largest = 0;
      for (const float x : entries) {
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
      }
      const float factor = largest == 0 ? 1 : std::ldexp(1.f, std::ilogb(largest));
      std::array<uint16_t, CodebookTable::kEntries> halves{};
      for (size_t i = 0; i < halves.size(); ++i) {
        StoreElement(kvant::kF16, halves.data(), static_cast<int64_t>(i), entries[i] / factor);
      }
      constants.resize(CodebookTable::kFactorAt + 1);
      std::memcpy(&constants[CodebookTable::kHalvesAt], halves.data(), sizeof(halves));
      constants[CodebookTable::kFactorAt] = factor;
    }
    BindConstants(params.codebook, constants.data(), constants.size());
  }

  // Which elements lie side by side, and whether 8 of them from a multiple of 8 on are aligned to
  // their size.
  static void DescribeRuns(const View& data, SegmentTraits& traits) {
    traits.contiguous = -1;
    for (const int axis : {kRow, kCol}) {
      if (data.dims[axis] > 1 && data.strides[axis] == 1) traits.contiguous = axis;
    }
    if (traits.contiguous < 0) return;
    bool aligned = data.offset % 8 == 0;
    for (int axis = 0; axis < kAxes; ++axis) {
      if (axis == traits.contiguous || data.dims[axis] == 1) continue;
      aligned &= data.strides[axis] % 8 == 0;
    }
    traits.vectors = aligned;
  }

  i32 DescribeSegments(const absl::InlinedVector<KvSegment, 1>& from, SegmentTraits* traits,
                       SegmentParams* params) {
    int64_t begin = 0;
    for (size_t i = 0; i < from.size(); ++i) {
      const KvSegment& segment = from[i];
      const bool pages = segment.page_table.present();
      Describe(segment.data, segment.quantization, pages, traits[i], params[i]);
      const View& load = pages ? segment.page_table : segment.range;
      if (Describe(load, params[i].load)) {
        traits[i].load = pages ? kByPages : kByRange;
        // Of one entry they count as different, so that kernels do not depend on how many there
        // are.
        traits[i].load_varies = load.dims[0] > 1 || spec_.batch[0] == 1;
      }
      params[i].tokens = Clamp32(segment.data.dims[kRow]);
      params[i].pages = Clamp32(segment.data.dims[0]);
      params[i].begin = Clamp32(begin);
      params[i].columns = Clamp32(segment.tokens());
      begin += segment.tokens();
    }
    return static_cast<i32>(from.size());
  }

  void Describe(const Operand& operand, ArrayTraits& traits, Array& array, float& constant) {
    if (operand.constant) {
      constant = static_cast<float>(operand.constant->value());
    } else if (operand.view.on_host) {
      BindValue(constant, operand.view, HostValue::As::kFloat);
    } else {
      Describe(operand.view, Extents(spec_.q_len, spec_.kv_len), traits, array);
    }
  }
  // Of a shift: over the batch axes only, an integer or a whole number.
  void DescribeShift(const Operand& operand, bool added, ArrayTraits& traits, BatchArray& array,
                     i64& shift) {
    if (operand.constant) {
      const int64_t by = ClampShift(operand.constant->integer());
      shift += added ? by : -by;
    } else if (operand.view.on_host) {
      BindValue(shift, operand.view,
                added ? HostValue::As::kAddedShift : HostValue::As::kSubtractedShift);
    } else {
      Describe(operand.view, traits, array);
    }
  }

  void Describe(const ScoreStep& from, StepTraits& traits, StepParams& params) {
    traits.kind = static_cast<StepKind>(from.kind);  // of the same table
    traits.inverted = from.inverted;
    traits.alignment = static_cast<Alignment>(from.alignment);  // the same three
    if (from.operand.constant || from.operand.view.present()) {
      Describe(from.operand, traits.operand, params.operand, params.constant);
    }
    Describe(from.condition, Extents(spec_.q_len, spec_.kv_len), traits.condition,
             params.condition);
    if (from.alignment == ScoreStep::Alignment::kRuntime) {
      DescribeShift(from.shift_add, true, traits.shift_add, params.shift_add, params.shift);
      DescribeShift(from.shift_sub, false, traits.shift_sub, params.shift_sub, params.shift);
    }
    params.lower = -std::clamp(from.left.value_or(kUnbounded), -kUnbounded, kUnbounded);
    params.upper = std::clamp(from.right.value_or(kUnbounded), -kUnbounded, kUnbounded);
  }

  // From the last step back: as long as every later step keeps -inf, a band that writes it hides.
  void MarkHidingBands() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (size_t i = spec_.steps.size(); i-- > 0;) {
      const ScoreStep& step = spec_.steps[i];
      const std::optional<Constant>& constant = step.operand.constant;
      const double value = constant ? constant->value() : 0;
      const bool writes_neg_inf = value == -kInfinity;
      using Kind = ScoreStep::Kind;
      if (step.kind == Kind::kBand && !step.inverted && writes_neg_inf) {
        plan_.traits.steps[i].hides = 1;
      }
      const bool scales = step.kind == Kind::kMultiply || step.kind == Kind::kDivide;
      const bool selects = step.kind == Kind::kSelect || step.kind == Kind::kBand;
      const bool adds =
          step.kind == Kind::kAdd || step.kind == Kind::kSubtract || step.kind == Kind::kAlibi;
      const bool keeps =
          adds || (selects && writes_neg_inf) || (scales && value > 0 && value < kInfinity);
      if (!keeps) return;
    }
  }

  void DescribeDropout() {
    AttentionTraits& t = plan_.traits;
    AttentionParams& p = plan_.params;
    t.dropout = spec_.dropout.has_value();
    if (!spec_.dropout) return;
    const auto describe = [this](const Operand& from, bool integer, ArrayTraits& traits,
                                 Scalar& scalar) {
      if (from.constant && integer) {
        scalar.integer = from.constant->integer();
      } else if (from.constant) {
        scalar.real = from.constant->value();
      } else if (from.view.on_host) {
        BindValue(scalar, from.view, integer ? HostValue::As::kInteger : HostValue::As::kDouble);
      } else {
        traits.type = ElementTypeOf(from.view.type);
        BindPort(scalar.data, from.view.port, /*output=*/false);
      }
    };
    describe(spec_.dropout->seed, true, t.seed, p.seed);
    describe(spec_.dropout->offset, true, t.dropout_offset, p.dropout_offset);
    describe(spec_.dropout->probability, false, t.probability, p.probability);
    Describe(spec_.dropout->mask, Extents(spec_.q_len, spec_.kv_len), t.dropout_mask,
             p.dropout_mask, /*output=*/true);
  }

  void DescribeRounding() {
    const auto rounding = [](const std::optional<FakeQuantize>& from) {
      return RoundingParams{from ? from->scale : 1.f,
                            from ? static_cast<float>(from->zero_point) : 0.f};
    };
    plan_.params.probs_rounding = rounding(spec_.probs_quantization);
    plan_.params.output_rounding = rounding(spec_.output_quantization);
    plan_.traits.probs_type =
        spec_.probs_quantization ? ElementTypeOf(spec_.probs_quantization->type) : kNone;
    plan_.traits.rounds_output = spec_.output_quantization.has_value();
  }

  void DescribeRows() {
    AttentionTraits& t = plan_.traits;
    const auto varies = [](const SegmentTraits& segment) {
      return ((segment.data.varies | segment.scales.varies | segment.zero_points.varies) >> 2 &
              1) != 0;
    };
    t.kv_varies_over_b2 =
        plan_.params.batch[2] > 1 && (std::any_of(t.k, t.k + t.k_segments, varies) ||
                                      std::any_of(t.v, t.v + t.v_segments, varies));
    plan_.params.rows = plan_.params.q_len * (t.kv_varies_over_b2 ? 1 : plan_.params.batch[2]);
  }

  const AttentionSpec& spec_;
  AttentionPlan& plan_;
};

}  // namespace

void DescribeAttention(const AttentionSpec& spec, AttentionPlan& plan) {
  Describer(spec, plan).Describe();
}

}  // namespace kvant::cuda
