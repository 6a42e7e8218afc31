#include "kvant/tests/backends/cuda/attention/codes_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kvant/graph/data_type.h"
#include "kvant/kernels/cuda/attention_codes.h"
#include "kvant/tests/backends/cuda/attention/codes_answer.h"
#include "kvant/tests/backends/cuda/attention/codes_side.h"

namespace kvant::cuda {
namespace {

constexpr AttentionTraits Largest() {
  AttentionTraits t{};
  t.arithmetic = kByF32;
  t.head_size = t.v_head_size = 256;
  t.warp_tile = 64;
  t.row_blocks = 4;
  t.channel_warps = 1;
  t.step_count = kMaxSteps;
  t.side_copy = 4;
  for (SegmentTraits* side : {&t.k[0], &t.v[0]}) {
    side->scales.type = side->zero_points.type = kFloat32;
    side->group[kCol] = 32;
  }
  return t;
}
struct Traits {
  static inline thread_local AttentionTraits k;
  static constexpr AttentionTraits kMax = Largest();
};

class Problem {
 public:
  explicit Problem(const CodesProblem& c) : c_(c), rng_(c.seed + 1) {
    k_ = Make(c.k, c.head_size, c.head_size <= 64 ? .15f : .1f, c.k_first, c.k_page);
    v_ = Make(c.v, c.v_head_size, c.v_scale, c.v_first, c.v_page);
    Harden(k_, c.hard.k_size, c.hard.k_outlier, c.hard.k_zeros);
    Harden(v_, c.hard.v_size, c.hard.v_outlier, c.hard.v_zeros);
    if (c.hard.q_outlier != 0) ZeroChannels(k_);
    if (c.hard.k_nan) k_.codes.Set(k_.Row(0, 0, k_.Place(0, 3)) * k_.channels + 7, std::nan(""));
    if (c.hard.v_nan) v_.codes.Set(v_.Row(0, 0, v_.Place(0, 3)) * v_.channels + 7, std::nan(""));
    if (c.latent) v_ = k_;
    rows_ = c.heads_per_kv * c.q_len;
    const int64_t q_rows = int64_t{c.batch} * c.kv_heads * rows_;
    q_ = Elements(c.q, q_rows * c.head_size);
    for (int64_t i = 0; i < q_rows * c.head_size; ++i) {
      const bool outlier = c.hard.q_outlier != 0 && IsOutlier(i % c.head_size);
      q_.Set(i, outlier ? c.hard.q_outlier : (Normal() + .2) * c.q_spread * c.hard.q_size);
    }
    if (c.hard.sink) MakeSink();
    output_ = Elements(c.output, q_rows * c.v_head_size);
    for (int64_t i = 0; i < q_rows * c.v_head_size; ++i) output_.Set(i, std::nan(""));
    sinks_.resize(static_cast<size_t>(c.heads_per_kv * c.kv_heads));
    for (float& x : sinks_) x = static_cast<float>(Normal()) + 3.f;
    lengths_ = c.lengths;
    k_table_ = k_.TableFor(LengthOfEach());
    v_table_ = v_.TableFor(LengthOfEach());
    for (int b = 0; b < c.batch && Ranges(); ++b) {
      const auto at = static_cast<size_t>(b);
      for (int x : {c.k_first[at], Length(b), c.v_first[at], Length(b)}) ranges_.push_back(x);
    }
    traits_ = MakeTraits();
    params_ = MakeParams();
  }

  CodesResult Run(bool watch) {
    CodesResult result;
    result.refused = WhyNotCodes(traits_, params_);
    if (!result.refused.empty()) return result;
    DeviceProperties device;
    device.major = c_.converts_e4m3 ? 9 : 8;
    device.multiprocessors = 8;
    device.shared_bytes_per_multiprocessor = 227 * 1024;
    PlanCodes(device, kAnyBlocks, plan_);
    if (c_.row_blocks) traits_.row_blocks = c_.row_blocks;
    if (c_.warp_tile) traits_.warp_tile = c_.warp_tile;
    if (c_.stages) traits_.stages = c_.stages;
    if (c_.splits) params_.split.splits = c_.splits;
    if (c_.normal_codes) traits_.subnormal_codes = 0;
    SizeCodes(plan_);
    std::vector<float> partials(plan_.partial_bytes / sizeof(float));
    std::vector<u32> done((plan_.scratch_bytes - plan_.partial_bytes) / sizeof(u32));
    params_.partials = partials.data();
    params_.done = done.data();
    simt::Options options;
    options.seed = c_.seed;
    options.count = watch;
    if (watch) options.watches = Watches();
    Traits::k = traits_;
    result.report = simt::Launch({plan_.blocks, plan_.threads, plan_.shared_bytes}, options,
                                 [&] { AttentionCodes<Traits>::Run(params_); });
    for (u32 count : done) result.wrong_reads += count != 0;
    if (watch) result.wrong_reads += WrongReads(result.report);
    CodesAnswer{c_, k_, v_, q_, sinks_, Scale()}.Judge(output_, result);
    result.traits = traits_;
    return result;
  }

 private:
  double Normal() { return std::normal_distribution<double>()(rng_); }
  int Below(int n) { return static_cast<int>(rng_() % static_cast<unsigned>(n)); }
  int Length(int b) const {
    return c_.lengths.size() == 1 ? c_.lengths[0] : c_.lengths[static_cast<size_t>(b)];
  }

  std::vector<int> LengthOfEach() const {
    std::vector<int> lengths;
    for (int b = 0; b < c_.batch; ++b) lengths.push_back(Length(b));
    return lengths;
  }
  bool Ranges() const { return !c_.k_first.empty(); }

  SideData Make(const CodesSide& side, int channels, float amplitude, const std::vector<int>& first,
                int page) {
    const int groups = side.tokens != 0 ? channels : side.group != 0 ? channels / side.group : 1;
    SideData s{side,  channels, groups, c_.kv_heads, c_.capacity, c_.heads_inside,
               first, page,     {},     {},          {},          {}};
    if (page != 0) s.table.resize(static_cast<size_t>(c_.batch * s.PagesOfEntry() + 2));
    std::iota(s.table.begin(), s.table.end(), 0);
    std::shuffle(s.table.begin(), s.table.end(), rng_);
    const int64_t rows = s.RowsFor(c_.batch);
    s.codes = Elements(side.type, rows * channels);
    const int64_t parameters = rows / s.GroupTokens() * s.groups;
    if (side.scales != kNone) s.scales = Elements(side.scales, parameters);
    if (side.zero_points != kNone) s.zero_points = Elements(side.zero_points, parameters);
    for (int64_t i = 0; i < parameters && side.scales != kNone; ++i) {
      s.scales.Set(i, std::nan(""));
    }
    const bool is_float = IsFloat(TypeOf(side.type));
    const int lowest = is_float ? -8 : static_cast<int>(LowestOf(TypeOf(side.type)));
    const int highest = is_float ? 7 : static_cast<int>(HighestOf(TypeOf(side.type)));
    const int count = highest - lowest + 1;
    for (int64_t i = 0; i < rows * channels; ++i) {
      s.codes.Set(i, is_float ? Normal() * 4 + 1 : lowest + Below(count));
    }
    const double unit = amplitude * 16. / count;
    for (int b = 0; b < c_.batch; ++b) {
      for (int h = 0; h < c_.kv_heads; ++h) {
        for (int t = 0; t < c_.capacity; ++t) {
          // Rows of all one code: its smallest, its largest.
          for (int d = 0; d < channels && t % 17 == 3; ++d) {
            s.codes.Set(s.Row(b, h, t) * channels + d, t % 2 ? lowest : lowest + count - 1);
          }
          const bool begins = t % s.GroupTokens() == 0;
          for (int g = 0; g < s.groups && side.scales != kNone && begins; ++g) {
            FillGroup(s, b, t, s.Group(b, h, t, g * (channels / s.groups)),
                      unit * (.3 + Below(1000) / 1000. + .2 * (g % 8) + .3 * h), lowest, count);
          }
        }
      }
    }
    return s;
  }
  // NaN beyond the real length.
  void FillGroup(SideData& s, int b, int t, int64_t at, double scale, int lowest, int count) {
    const bool real = s.HoldsInGroup(b, t, Length(b)) || (t == 0 && !Ranges());
    s.scales.Set(at, real ? scale : std::nan(""));
    if (s.side.zero_points == kNone) return;
    // From the middle of the codes, so that values have a mean.
    const double zero = lowest + count * .3 + Below(count / 3);
    if (s.side.real_zero_points) {
      s.zero_points.Set(at, real ? zero * scale : std::nan(""));
    } else {
      s.zero_points.Set(at, std::clamp(std::floor(zero), -128., 255.));
    }
  }

  // Groups of zeros, and sizes of scales.
  void Harden(SideData& s, double size, double outlier, bool zeros) {
    if (s.side.scales == kNone) return;
    for (int b = 0; b < c_.batch; ++b) {
      for (int h = 0; h < c_.kv_heads; ++h) {
        for (int t = 0; t < Length(b); ++t) {
          const int at = s.Place(b, t), n = s.GroupTokens();
          if (t > 0 && at % n != 0) continue;
          for (int g = 0; g < s.groups; ++g) {
            const bool zero = zeros && (t / n + g) % 3 == 1;
            const bool is_outlier = n == 1 ? t % 8 == 5 : g % 32 == 5;
            HardenGroup(s, b, h, at, g, is_outlier ? size * outlier : size, zero);
          }
        }
      }
    }
  }
  void HardenGroup(SideData& s, int b, int h, int at, int g, double size, bool zero) {
    const int length = s.channels / s.groups, first = g * length;
    const int64_t scale = s.ScaleAt(b, h, at, first);
    s.scales.Set(scale, zero ? 1. : s.scales.Get(scale) * size);
    if (s.side.zero_points != kNone) {
      const int64_t index = s.ZeroAt(b, h, at, first);
      if (s.side.real_zero_points) s.zero_points.Set(index, s.zero_points.Get(index) * size);
      if (zero) s.zero_points.Set(index, 0);
    }
    const int n = s.GroupTokens();
    for (int t = at / n * n; t < at / n * n + n && zero; ++t) {
      for (int d = first; d < first + length; ++d) {
        s.codes.Set(s.Row(b, h, t) * s.channels + d, 0);
      }
    }
  }

  static bool IsOutlier(int64_t channel) { return channel == 5 || channel == 40; }
  void ZeroChannels(SideData& s) {
    for (int b = 0; b < c_.batch; ++b) {
      for (int h = 0; h < c_.kv_heads; ++h) {
        for (int t = 0; t < c_.capacity; ++t) {
          for (int d = 0; d < s.channels; ++d) {
            if (!IsOutlier(d)) continue;
            const bool plain = s.side.zero_points == kNone;
            const double zero = plain ? 0 : s.zero_points.Get(s.ZeroAt(b, h, t, d));
            s.codes.Set(s.Row(b, h, t) * s.channels + d, zero);
          }
        }
      }
    }
  }

  // The first token's keys are those of the first query of each head, many times over.
  void MakeSink() {
    for (int b = 0; b < c_.batch; ++b) {
      for (int h = 0; h < c_.kv_heads; ++h) {
        const int64_t query = (int64_t{b} * c_.kv_heads + h) * rows_ * c_.head_size;
        const int at = k_.Place(b, 0);
        for (int d = 0; d < c_.head_size; ++d) {
          for (int r = 0; r < rows_; ++r) q_.Set(query + r * c_.head_size + d, q_.Get(query + d));
          k_.codes.Set(k_.Row(b, h, at) * c_.head_size + d, q_.Get(query + d) > 0 ? 1 : 0);
        }
        for (int g = 0; g < k_.groups; ++g) {
          const int d = g * (c_.head_size / k_.groups);
          k_.scales.Set(k_.ScaleAt(b, h, at, d), 5);
          if (k_.side.zero_points != kNone) k_.zero_points.Set(k_.ZeroAt(b, h, at, d), 0);
        }
        for (int g = 0; g < v_.groups; ++g) HardenGroup(v_, b, h, v_.Place(b, 0), g, 1, true);
      }
    }
  }

  static void SetStrides(Array& array, void* data, std::vector<int64_t> strides) {
    array = {};
    array.data = data;
    for (int a = 0; a < kAxes; ++a) array.strides[a] = strides[static_cast<size_t>(a)];
  }

  SegmentTraits TraitsOf(const SideData& s) const {
    SegmentTraits t{};
    t.data = {s.side.type, 31};
    const i32 by_head = 7, by_channel = 23;
    const i32 varies = s.side.tokens == CodesSide::kAll ? by_channel : 31;
    if (s.side.scales != kNone) t.scales = {s.side.scales, s.side.common_scale ? by_head : varies};
    if (s.side.zero_points != kNone) {
      t.zero_points = {s.side.zero_points, s.side.common_zero_point ? by_head : varies};
    }
    t.real_zero_points = s.side.real_zero_points;
    for (int a = 0; a < kAxes; ++a) t.group[a] = 1;
    t.group[kRow] = s.GroupTokens();
    t.group[kCol] = s.channels / s.groups;
    t.contiguous = kCol;
    t.vectors = 1;
    if (s.page != 0) {
      t.load = kByPages;
      t.load_varies = 1;
    }
    return t;
  }
  AttentionTraits MakeTraits() const {
    AttentionTraits t{};
    t.arithmetic = c_.q == kFloat32 ? kByF32 : kByF16;
    t.head_size = c_.head_size;
    t.v_head_size = c_.v_head_size;
    t.k_segments = t.v_segments = 1;
    t.q.data = {c_.q, 31};
    t.q.contiguous = kCol;
    t.q.vectors = 1;
    t.k[0] = TraitsOf(k_);
    t.v[0] = TraitsOf(v_);
    t.v_in_k = c_.latent;
    t.steps[t.step_count++].kind = kMultiply;
    if (c_.soft_cap) {
      t.steps[t.step_count++].kind = kDivide;
      t.steps[t.step_count++].kind = kTanh;
      t.steps[t.step_count++].kind = kMultiply;
    }
    if (c_.causal) {
      StepTraits& band = t.steps[t.step_count++];
      band.kind = kBand;
      band.alignment = kBottomRight;
      band.hides = 1;
    }
    t.inf_as_zero = 1;
    if (c_.sinks) t.sinks = {kFloat32, 7};
    if (Ranges()) {
      for (SegmentTraits* side : {&t.k[0], &t.v[0]}) {
        side->load = kByRange;
        side->load_varies = 1;
      }
    } else if (c_.lengths.size() > 1) {
      t.has_lengths = t.lengths_vary = 1;
    }
    t.output = {c_.output, 31};
    return t;
  }

  void SetSide(SideData& s, SegmentParams& p) {
    const int64_t n = c_.kv_heads, d = s.channels, g = s.groups;
    const int64_t cap = s.page != 0 ? s.page : c_.capacity;
    if (c_.heads_inside) {
      SetStrides(p.data, s.codes.data(), {cap * n * d, d, 0, n * d, 1});
    } else {
      SetStrides(p.data, s.codes.data(), {n * cap * d, cap * d, 0, d, 1});
    }
    const int64_t rows = cap / s.GroupTokens();
    SetStrides(p.scales, s.scales.data(), {n * rows * g, rows * g, 0, g, g > 1});
    SetStrides(p.zero_points, s.zero_points.data(), {n * rows * g, rows * g, 0, g, g > 1});
    if (s.side.tokens == CodesSide::kAll) p.scales.strides[kRow] = p.zero_points.strides[kRow] = 0;
    if (s.side.common_scale) p.scales.strides[kRow] = 0;
    if (s.side.common_zero_point) p.zero_points.strides[kRow] = 0;
    p.columns = c_.capacity;
    p.tokens = static_cast<i32>(cap);
    p.pages = static_cast<i32>(s.table.size());
  }
  AttentionParams MakeParams() {
    AttentionParams p{};
    p.batch[0] = c_.batch;
    p.batch[1] = c_.kv_heads;
    p.batch[2] = c_.heads_per_kv;
    p.q_len = c_.q_len;
    p.kv_len = c_.lengths.size() == 1 && !Ranges() ? c_.lengths[0] : c_.capacity;
    p.rows = rows_;
    const int64_t q = c_.q_len, r = rows_, n = c_.kv_heads, d = c_.head_size, dv = c_.v_head_size;
    SetStrides(p.q.data, q_.data(), {n * r * d, r * d, q * d, d, 1});
    SetStrides(p.output, output_.data(), {n * r * dv, r * dv, q * dv, dv, 1});
    SetSide(k_, p.k[0]);
    SetSide(v_, p.v[0]);
    int step = 0;
    p.steps[step++].constant = Scale();
    if (c_.soft_cap) {
      p.steps[step++].constant = CodesAnswer::kCap;
      ++step;
      p.steps[step++].constant = CodesAnswer::kCap;
    }
    if (c_.causal) {
      p.steps[step].constant = -std::numeric_limits<float>::infinity();
      p.steps[step].lower = -(int64_t{1} << 40);
    }
    if (c_.sinks) p.sinks = {sinks_.data(), 0, {0, c_.heads_per_kv, 1}};
    p.kv_lengths = {lengths_.data(), 0, 1, 0};
    p.k[0].load = {ranges_.data(), 0, 4, 1};
    p.v[0].load = {ranges_.data(), 2, 4, 1};
    if (k_.page != 0) p.k[0].load = {k_table_.data(), 0, k_.PagesOfEntry(), 1};
    if (v_.page != 0) p.v[0].load = {v_table_.data(), 0, v_.PagesOfEntry(), 1};
    if (c_.latent) p.v[0] = p.k[0];
    return p;
  }
  float Scale() const {
    const float scale =
        c_.scale != 0.f ? c_.scale : 1.f / std::sqrt(static_cast<float>(c_.head_size));
    return scale / (c_.hard.k_size * c_.hard.q_size);
  }

  std::vector<simt::Range> Watches() {
    std::vector<simt::Range> watches;
    for (SideData* s : {&k_, &v_}) {
      for (Elements* e : {&s->codes, &s->scales, &s->zero_points}) {
        watches.push_back({e->data(), e->bytes()});
      }
    }
    return watches;
  }
  int64_t WrongReads(const simt::Report& report) const {
    int64_t wrong = 0;
    size_t range = 0;
    for (const SideData* s : {&k_, &v_}) {
      for (const Elements* e : {&s->codes, &s->scales, &s->zero_points}) {
        const std::vector<uint32_t>& reads = report.reads[range++];
        if (c_.latent && s == &v_) continue;  // not what the kernel gets
        if (e == &s->scales && s->side.common_scale) continue;
        if (e == &s->zero_points && s->side.common_zero_point) continue;
        const std::vector<uint32_t> want =
            s->RowsRead(LengthOfEach(), c_.heads_inside && e == &s->codes);
        // Warps that share a tile read the parameters of its tokens each.
        const int warps = e == &s->codes ? 1 : traits_.channel_warps;
        // What groups of tokens have in common is read for each tile; so is, from a ring, a byte of
        // two zero points of 4 bits in odd rows.
        const bool by_channel = s->side.tokens != 0 && e != &s->codes;
        const bool odd = e == &s->zero_points && BitsOf(s->side.zero_points) == 4 && s->groups % 2;
        const size_t tokens = by_channel ? static_cast<size_t>(s->GroupTokens()) : 1;
        const size_t bytes = e->bytes(), groups = want.size() / tokens;
        for (size_t i = 0; i < bytes; ++i) {
          uint32_t times = 0;
          const size_t end = (((i + 1) * groups - 1) / bytes + 1) * tokens;
          for (size_t r = i * groups / bytes * tokens; r < end; ++r) times += want[r];
          if (by_channel || odd) {
            wrong += (reads[i] != 0) != (times != 0);
          } else {
            wrong +=
                reads[i] != times * static_cast<uint32_t>(RowTiles(traits_, params_.rows) * warps);
          }
        }
      }
    }
    return wrong;
  }
  CodesProblem c_;
  std::mt19937_64 rng_;
  int rows_ = 0;
  std::vector<int> lengths_, ranges_, k_table_, v_table_;
  std::vector<float> sinks_;
  SideData k_, v_;
  Elements q_, output_;
  AttentionPlan plan_;
  AttentionTraits& traits_ = plan_.traits;
  AttentionParams& params_ = plan_.params;
};

std::string SideName(const CodesSide& side) {
  static const char* const kNames[] = {"none", "f32", "f16", "bf16", "e4m3", "e5m2", "i64", "i32",
                                       "s8",   "u8",  "s4",  "u4",   "s2",   "u2",   "bool"};
  std::ostringstream out;
  out << kNames[side.type] << " by " << side.group;
  if (side.tokens != 0) out << " channel, " << side.tokens << " tokens,";
  out << " scales " << kNames[side.scales] << (side.real_zero_points ? " real" : "")
      << " zero points " << kNames[side.zero_points];
  return out.str();
}

}  // namespace

std::string CodesProblem::Name() const {
  std::ostringstream out;
  if (!hard.name.empty()) out << hard.name << ": ";
  out << (converts_e4m3 ? "e4m3 by an instruction: " : "") << "K " << SideName(k) << ", V "
      << (latent ? "in K" : SideName(v)) << ", D " << head_size << "/" << v_head_size << ", B "
      << batch << " Hkv " << kv_heads << " R " << heads_per_kv << " Sq " << q_len << ", lengths";
  for (int length : lengths) out << " " << length;
  for (int first : k_first) out << " from " << first;
  if (k_page != 0) out << ", pages of " << k_page << " and " << v_page;
  out << ", tile " << warp_tile << ", stages " << stages << ", row blocks " << row_blocks
      << ", splits " << splits << ", seed " << seed;
  return out.str();
}

CodesResult Solve(const CodesProblem& problem, bool watch) { return Problem(problem).Run(watch); }

}  // namespace kvant::cuda
