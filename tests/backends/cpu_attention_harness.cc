#include "kvant/tests/backends/cpu_attention_harness.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <thread>

#include "kvant/backends/cpu/plan.h"
#include "kvant/kernels/philox.h"

namespace kvant::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Visit>
void ForEachPosition(const Dims5& dims, Visit visit) {
  Dims5 p{};
  for (int64_t extent : dims) {
    if (extent == 0) return;
  }
  while (true) {
    visit(p);
    int axis = kViewRank - 1;
    while (axis >= 0 && ++p[axis] == dims[axis]) p[axis--] = 0;
    if (axis < 0) return;
  }
}

// The f64 loops. Reads through views only, element by element.
class Judge {
 public:
  Judge(const AttentionSpec& spec, const std::deque<GuardedBuffer>& inputs)
      : spec_(spec), inputs_(inputs) {}

  struct Row {
    std::vector<double> out;
    double stats = 0;
  };

  Row Compute(Dims5 p) {
    const int64_t length = Length(p);
    std::vector<double> probs(length);
    Row row;
    if (spec_.over_queries) {
      for (int64_t c = 0; c < length; ++c) probs[c] = Column(p, c)[p[3]];
    } else {
      for (int64_t c = 0; c < length; ++c) probs[c] = Score(p, c, length);
      row.stats = Softmax(p, probs);
    }
    for (int64_t c = 0; c < length; ++c) probs[c] = Finish(p, c, probs[c]);
    row.out.assign(spec_.v_head_size, 0.0);
    for (int64_t d = 0; d < spec_.v_head_size; ++d) {
      for (int64_t c = 0; c < length; ++c) row.out[d] += probs[c] * Token(spec_.v, p, c, d);
    }
    Rotate(spec_.output_hadamard, row.out);
    return row;
  }

  bool Kept(const Dims5& p, int64_t c) const {
    const Dropout& dropout = *spec_.dropout;
    int64_t index = p[0];
    index = index * spec_.batch[1] + p[1];
    index = index * spec_.batch[2] + p[2];
    index = (index * spec_.q_len + p[3]) * spec_.kv_len + c;
    return DropoutKeeps(static_cast<uint64_t>(Value(dropout.seed, p)),
                        static_cast<uint64_t>(Value(dropout.offset, p)), index,
                        Value(dropout.probability, p));
  }

 private:
  int64_t Length(const Dims5& p) const {
    if (spec_.kv_lengths.present()) return static_cast<int64_t>(Read(spec_.kv_lengths, p));
    if (!spec_.segment_ranges.present()) return spec_.kv_len;
    int64_t length = 0;
    for (size_t s = 0; s < spec_.k.size(); ++s) length += Range(p, static_cast<int64_t>(s))[1];
    return length;
  }
  // First token and tokens of K's segments, then V's.
  std::array<int64_t, 2> Range(const Dims5& p, int64_t segment) const {
    const View& view = spec_.segment_ranges;
    return {static_cast<int64_t>(Read(view, {p[0], 0, 0, segment, 0})),
            static_cast<int64_t>(Read(view, {p[0], 0, 0, segment, 1}))};
  }
  double Read(const View& view, const Dims5& p) const {
    return LoadElement(view.type, inputs_[view.port].data(), IndexOf(view, p));
  }
  double Value(const Operand& operand, const Dims5& p) const {
    if (operand.constant) return *operand.constant;
    return operand.view.present() ? Read(operand.view, p) : 0.0;
  }
  double Dequantized(const View& data, const std::optional<Quantization>& q, const Dims5& p) const {
    double code = Read(data, p);
    if (!q) return code;
    if (!q->scales.present()) {
      const int64_t i = q->static_axis < 0 ? 0 : p[q->static_axis];
      const double zp = q->static_zps.empty() ? 0.0 : static_cast<double>(q->static_zps[i]);
      return (code - zp) * q->static_scales[i];
    }
    Dims5 g;
    for (int a = 0; a < kViewRank; ++a) g[a] = p[a] / q->group[a];
    const double scale = Read(q->scales, g);
    if (!q->codebook.empty()) return q->codebook[static_cast<size_t>(code)] * scale;
    if (!q->zero_points.present()) return code * scale;
    const double zp = Read(q->zero_points, g);
    return IsFloat(q->zero_points.type) ? code * scale - zp : (code - zp) * scale;
  }
  double Token(const absl::InlinedVector<KvSegment, 1>& segments, Dims5 p, int64_t token,
               int64_t channel) const {
    int64_t row = &segments == &spec_.k ? 0 : static_cast<int64_t>(spec_.k.size());
    for (const KvSegment& segment : segments) {
      const int64_t capacity = segment.data.dims[3];
      const bool ranges = spec_.segment_ranges.present();
      const auto [first, tokens] = ranges ? Range(p, row++) : std::array<int64_t, 2>{0, capacity};
      if (token < tokens) {
        p[3] = (first + token) % capacity;
        p[4] = channel;
        // Coordinates along axes that the data is broadcast over do not exist for it.
        for (int a = 0; a < 3; ++a) p[a] = segment.data.dims[a] == 1 ? 0 : p[a];
        return Dequantized(segment.data, segment.quantization, p);
      }
      token -= tokens;
    }
    ADD_FAILURE() << "no such token";
    return 0;
  }
  // Element (i, j) of the matrix is -1 where i and j have an odd number of ones in common.
  static void Rotate(int64_t block, std::vector<double>& x) {
    if (block == 0) return;
    const std::vector<double> from = x;
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t n = block, first = i / n * n;
      x[i] = 0;
      for (size_t j = 0; j < n; ++j) {
        x[i] += from[first + j] * (std::popcount((i - first) & j) % 2 == 0 ? 1 : -1);
      }
      x[i] /= std::sqrt(static_cast<double>(block));
    }
  }
  const std::vector<double>& Query(Dims5 p) {
    std::vector<double>& q = queries_[{p[0], p[1], p[2], p[3]}];
    if (!q.empty()) return q;
    for (p[4] = 0; p[4] < spec_.head_size; ++p[4]) {
      q.push_back(Dequantized(spec_.q, spec_.q_quantization, p));
    }
    Rotate(spec_.q_hadamard, q);
    return q;
  }
  double Score(Dims5 p, int64_t c, int64_t length) {
    const std::vector<double>& q = Query(p);
    double s = 0;
    for (int64_t d = 0; d < spec_.head_size; ++d) s += q[d] * Token(spec_.k, p, c, d);
    p[4] = c;
    for (const ScoreStep& step : spec_.steps) s = Step(step, p, s, length);
    return s;
  }
  double Step(const ScoreStep& step, const Dims5& p, double s, int64_t length) const {
    using Kind = ScoreStep::Kind;
    const double x = Value(step.operand, p);
    int64_t shift = 0;
    if (step.alignment == ScoreStep::Alignment::kBottomRight) shift = length - spec_.q_len;
    if (step.alignment == ScoreStep::Alignment::kRuntime) {
      shift = static_cast<int64_t>(Value(step.shift_add, p) - Value(step.shift_sub, p));
    }
    const int64_t distance = p[4] - (p[3] + shift);
    switch (step.kind) {
      case Kind::kMultiply:
        return s * x;
      case Kind::kDivide:
        return s / x;
      case Kind::kAdd:
        return s + x;
      case Kind::kSubtract:
        return s - x;
      case Kind::kMaximum:
        return std::max(s, x);
      case Kind::kMinimum:
        return std::min(s, x);
      case Kind::kTanh:
        return std::tanh(s);
      case Kind::kSelect:
        return (Read(step.condition, p) != 0) != step.inverted ? s : x;
      case Kind::kAlibi:
        return s + x * static_cast<double>(distance);
      case Kind::kBand:
        break;
    }
    const bool in =
        (!step.left || -*step.left <= distance) && (!step.right || distance <= *step.right);
    return in != step.inverted ? s : x;
  }
  // Probabilities over the queries.
  const std::vector<double>& Column(Dims5 p, int64_t c) {
    std::vector<double>& column = columns_[{p[0], p[1], p[2], c}];
    if (!column.empty()) return column;
    for (p[3] = 0; p[3] < spec_.q_len; ++p[3]) column.push_back(Score(p, c, spec_.kv_len));
    Softmax(p, column);
    return column;
  }
  // Turns scores into probabilities; returns the statistics.
  double Softmax(const Dims5& p, std::vector<double>& s) const {
    double max = spec_.sinks.present() ? Read(spec_.sinks, p) : -kInf;
    const double sink = max;
    for (double x : s) max = std::max(max, x);
    const auto hidden = [](double x) { return x == -kInf; };
    if (max == -kInf && std::all_of(s.begin(), s.end(), hidden)) {
      const bool zero = spec_.softmax_mode == SoftmaxMode::kInfAsZero;
      for (double& x : s) x = zero ? 0.0 : std::nan("");
      return zero ? 0.0 : std::nan("");
    }
    double sum = spec_.sinks.present() ? std::exp(sink - max) : 0.0;
    for (double& x : s) sum += x = std::exp(x - max);
    for (double& x : s) x /= sum;
    return max + std::log(sum);
  }
  double Finish(const Dims5& p, int64_t c, double x) const {
    if (spec_.dropout) x = Kept(p, c) ? x / (1 - Value(spec_.dropout->probability, p)) : 0.0;
    if (!spec_.probs_quantization) return x;
    const FakeQuantize& q = *spec_.probs_quantization;
    const double code = RoundTo(q.type, std::nearbyint(x / q.scale) + q.zero_point);
    return (code - q.zero_point) * q.scale;
  }

  const AttentionSpec& spec_;
  const std::deque<GuardedBuffer>& inputs_;
  std::map<std::array<int64_t, 4>, std::vector<double>> queries_;
  std::map<std::array<int64_t, 4>, std::vector<double>> columns_;  // with over_queries
};

}  // namespace

int64_t IndexOf(const View& view, const Dims5& p) {
  int64_t index = view.offset;
  for (int a = 0; a < kViewRank; ++a) index += (view.dims[a] == 1 ? 0 : p[a]) * view.strides[a];
  return index;
}

Dims5 Dense(const Dims5& dims) {
  Dims5 strides{};
  int64_t stride = 1;
  for (int a = kViewRank - 1; a >= 0; --a) {
    strides[a] = stride;
    stride *= dims[a];
  }
  return strides;
}

GuardedBuffer::GuardedBuffer(size_t bytes) : bytes_(bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + page - 1) / page * page;
  mapped_ = usable + page;
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base_ == MAP_FAILED) std::abort();
  mprotect(static_cast<char*>(base_) + usable, page, PROT_NONE);
  data_ = static_cast<char*>(base_) + usable - bytes;
}

GuardedBuffer::~GuardedBuffer() { munmap(base_, mapped_); }

void ThreadExecutor::ParallelFor(int64_t n, absl::FunctionRef<void(int64_t, int)> body) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (int slot = threads_ - 1; slot >= 0; --slot) {
    threads.emplace_back([&, slot] {
      for (int64_t i = next++; i < n; i = next++) body(n - 1 - i, slot);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Case::Case(const Shape& s, uint32_t seed) : shape(s), rng_(seed) {
  spec.batch = {s.b0, s.b1, s.ratio};
  spec.q_len = s.q_len;
  spec.kv_len = s.kv_len;
  spec.head_size = s.d;
  spec.v_head_size = s.dv;
  const Dims5 dims{s.b0, s.b1, s.ratio, s.q_len, s.dv};
  spec.output = AddOutput(kF32, dims, Dense(dims));
}

double Case::Random(double low, double high) {
  return low + (high - low) * (static_cast<double>(rng_()) / 4294967296.0);
}

View Case::AddInput(DataType type, const Dims5& dims, const Dims5& strides,
                    const std::function<double(const Dims5&)>& value, int64_t offset) {
  View view{static_cast<int>(inputs.size()), type, dims, strides, offset};
  int64_t last = offset;
  for (int a = 0; a < kViewRank; ++a) last += std::max<int64_t>(0, dims[a] - 1) * strides[a];
  GuardedBuffer& buffer = inputs.emplace_back(BytesFor(type, last + 1));
  for (size_t i = 0; i < buffer.bytes(); ++i) {
    static_cast<uint8_t*>(buffer.data())[i] = static_cast<uint8_t>(rng_());
  }
  ForEachPosition(
      dims, [&](const Dims5& p) { StoreElement(type, buffer.data(), IndexOf(view, p), value(p)); });
  for (int a = 0; a < kViewRank; ++a) view.strides[a] = dims[a] == 1 ? 0 : strides[a];
  return view;
}

View Case::AddDense(DataType type, const Dims5& dims,
                    const std::function<double(const Dims5&)>& value) {
  return AddInput(type, dims, Dense(dims), value);
}

View Case::AddScalar(DataType type, double value) {
  return AddDense(type, {1, 1, 1, 1, 1}, [=](const Dims5&) { return value; });
}

View Case::AddOutput(DataType type, const Dims5& dims, const Dims5& strides) {
  int64_t last = 0;
  for (int a = 0; a < kViewRank; ++a) last += std::max<int64_t>(0, dims[a] - 1) * strides[a];
  outputs.emplace_back(BytesFor(type, last + 1));
  return {static_cast<int>(outputs.size()) - 1, type, dims, strides, 0};
}

KvSegment Case::MakeSegment(const Format& f, int64_t tokens, int64_t channels) {
  const Dims5 dims{shape.b0, shape.b1, f.per_query_head ? shape.ratio : 1, tokens, channels};
  Dims5 strides = Dense(dims);
  if (f.order == Format::Order::kChannelMajor) {
    strides[3] = 1;
    strides[4] = tokens;
  } else if (f.order == Format::Order::kPadded) {
    strides = Dense({dims[0], dims[1], dims[2], tokens + 3, channels + 5});
  } else if (f.order == Format::Order::kInterleaved) {
    for (int64_t& stride : strides) stride *= 3;
  }
  KvSegment segment;
  const bool codes = IsInteger(f.type);
  const int64_t low = codes ? LowestOf(f.type) : 0, high = codes ? HighestOf(f.type) : 0;
  segment.data = AddInput(
      f.type, dims, strides,
      [&](const Dims5& p) {
        return codes ? std::floor(Random(static_cast<double>(low), static_cast<double>(high) + 1))
                     : Random(-1, 1.3) + 0.1 * static_cast<double>(p[1]);
      },
      f.order == Format::Order::kPadded ? 7 : 0);
  if (f.scales == kUndef) return segment;
  Quantization& q = segment.quantization.emplace();
  Dims5 groups;
  for (int a = 0; a < kViewRank; ++a) {
    q.group[a] = f.group[a] == 0 ? dims[a] : f.group[a];
    groups[a] = dims[a] / q.group[a];
  }
  Dims5 parameter_strides = Dense(groups);
  if (f.parameters_by_channel) {
    parameter_strides[3] = 1;
    parameter_strides[4] = groups[3];
  }
  q.codebook = f.codebook;
  const double unit = !f.codebook.empty()
                          ? 1 / *std::max_element(f.codebook.begin(), f.codebook.end())
                      : codes ? 2.0 / static_cast<double>(high - low + 1)
                              : 1.0;
  q.scales = AddInput(f.scales, groups, parameter_strides,
                      [&](const Dims5&) { return Random(0.5, 1.5) * unit; });
  if (f.zero_points == kUndef) return segment;
  q.zero_points = AddInput(f.zero_points, groups, parameter_strides, [&](const Dims5&) {
    if (IsFloat(f.zero_points)) return Random(-0.5, 1.0);
    const double top =
        std::min<double>(static_cast<double>(HighestOf(f.zero_points)), static_cast<double>(high));
    return std::floor(Random(std::max(0.0, static_cast<double>(low)), top + 1));
  });
  return segment;
}

void Case::SetK(const Format& format, const std::vector<int64_t>& tokens) {
  spec.k.clear();
  for (int64_t n : tokens) spec.k.push_back(MakeSegment(format, n, shape.d));
}

void Case::SetV(const Format& format, const std::vector<int64_t>& tokens) {
  spec.v.clear();
  for (int64_t n : tokens) spec.v.push_back(MakeSegment(format, n, shape.dv));
}

void Case::SetRanges(const std::vector<std::vector<SegmentRange>>& ranges) {
  const int64_t count = static_cast<int64_t>(spec.k.size() + spec.v.size());
  spec.segment_ranges =
      AddDense(kS32, {static_cast<int64_t>(ranges.size()), 1, 1, count, 2}, [&](const Dims5& p) {
        return static_cast<double>(p[4] == 0 ? ranges[p[0]][p[3]].first
                                             : ranges[p[0]][p[3]].tokens);
      });
  size_t row = 0;
  for (auto* side : {&spec.k, &spec.v}) {
    for (const KvSegment& segment : *side) {
      const int64_t capacity = segment.data.dims[3];
      const auto exists = [&](int64_t b, int64_t token) {
        const SegmentRange& range = ranges[ranges.size() == 1 ? 0 : b][row];
        return (token - range.first + capacity) % capacity < range.tokens;
      };
      Spoil(segment, exists);
      ++row;
    }
  }
}

// Overwrites the tokens that do not exist, and parameters that are of such tokens alone, by NaN or
// the highest code.
void Case::Spoil(const KvSegment& segment, const std::function<bool(int64_t, int64_t)>& exists) {
  const auto spoil = [&](const View& view, const Dims5& groups) {
    ForEachPosition(view.dims, [&](const Dims5& p) {
      for (int64_t b = p[0] * groups[0]; b < (p[0] + 1) * groups[0]; ++b) {
        for (int64_t t = p[3] * groups[3]; t < (p[3] + 1) * groups[3]; ++t) {
          if (exists(b, t)) return;
        }
      }
      StoreElement(view.type, inputs[view.port].data(), IndexOf(view, p),
                   IsFloat(view.type) ? std::nan("") : static_cast<double>(HighestOf(view.type)));
    });
  };
  spoil(segment.data, {1, 1, 1, 1, 1});
  if (!segment.quantization) return;
  spoil(segment.quantization->scales, segment.quantization->group);
  if (segment.quantization->zero_points.present()) {
    spoil(segment.quantization->zero_points, segment.quantization->group);
  }
}

void Case::SetQ(DataType type) {
  spec.q = AddDense(type, {shape.b0, shape.b1, shape.ratio, shape.q_len, shape.d},
                    [&](const Dims5&) { return Random(-1, 1.2); });
}

void Case::AddStats() {
  const Dims5 dims{shape.b0, shape.b1, shape.ratio, shape.q_len, 1};
  spec.stats = AddOutput(kF32, dims, Dense(dims));
}

void Case::AddScale() {
  ScoreStep step;
  step.kind = ScoreStep::Kind::kDivide;
  step.operand.constant = std::sqrt(static_cast<float>(shape.d));
  spec.steps.push_back(step);
}

Case Plain(const Shape& shape, const Format& k, const Format& v) {
  Case c(shape);
  c.SetQ(kF32);
  c.SetK(k);
  c.SetV(v);
  c.AddScale();
  return c;
}

const KernelSet& HighestKernels() {
  const KernelSet* highest = KernelsAt(0);
  for (int i = 1; const KernelSet* set = KernelsAt(i); ++i) highest = set;
  return *highest;
}

absl::Status Case::Run(const KernelSet& kernels, int threads) {
  auto executable = CompileAttention(spec, kernels);
  if (!executable.ok()) return executable.status();
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const GuardedBuffer& buffer : inputs) in.push_back(buffer.data());
  for (const GuardedBuffer& buffer : outputs) {
    std::memset(buffer.data(), 0xA5, buffer.bytes());
    out.push_back(buffer.data());
  }
  const GuardedBuffer scratch((*executable)->scratch_bytes(threads));
  std::memset(scratch.data(), 0xFF, scratch.bytes());  // NaN
  ThreadExecutor executor(threads);
  return (*executable)->Run({executor}, in, out, static_cast<std::byte*>(scratch.data()));
}

void Case::Check(double tolerance) {
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    std::vector<std::vector<char>> first;
    for (int threads : {1, 2, 7}) {
      const absl::Status status = Run(*kernels, threads);
      ASSERT_TRUE(status.ok()) << status;
      for (size_t o = 0; o < outputs.size(); ++o) {
        const char* data = static_cast<const char*>(outputs[o].data());
        if (first.size() <= o) first.emplace_back(data, data + outputs[o].bytes());
        ASSERT_EQ(std::memcmp(data, first[o].data(), outputs[o].bytes()), 0)
            << "output " << o << " differs with " << threads << " threads";
      }
    }
    CompareWithOracle(tolerance);
  }
}

void Case::CompareWithOracle(double tolerance) {
  Judge judge(spec, inputs);
  const auto same = [&](double got, double want) {
    if (std::isnan(want)) return std::isnan(got);
    if (got == want) return true;  // also infinities
    const double error = std::abs(got - want);
    return error <= tolerance || error <= 0.4 * tolerance * std::abs(want);
  };
  const Dims5 rows{shape.b0, shape.b1, shape.ratio, shape.q_len, 1};
  ForEachPosition(rows, [&](Dims5 p) {
    if (testing::Test::HasFailure()) return;
    const Judge::Row row = judge.Compute(p);
    const std::string where = testing::PrintToString(p);
    for (p[4] = 0; p[4] < shape.dv; ++p[4]) {
      const View& o = spec.output;
      double got = LoadElement(o.type, outputs[o.port].data(), IndexOf(o, p));
      double want = row.out[p[4]];
      if (!row.out.empty() && std::isnan(row.stats)) want = std::nan("");
      if (const auto& q = spec.output_quantization) {
        want = RoundTo(q->type, std::nearbyint(want / q->scale) + q->zero_point);
      } else {
        want = RoundTo(o.type, want);
      }
      ASSERT_TRUE(same(got, want))
          << "at " << where << " channel " << p[4] << ": " << got << ", expected " << want;
    }
    p[4] = 0;
    if (spec.stats.present()) {
      const double got = LoadElement(kF32, outputs[spec.stats.port].data(), IndexOf(spec.stats, p));
      ASSERT_TRUE(same(got, row.stats))
          << "stats at " << where << ": " << got << ", expected " << row.stats;
    }
    if (!spec.dropout || !spec.dropout->mask.present()) return;
    const View& mask = spec.dropout->mask;
    for (p[4] = 0; p[4] < shape.kv_len; ++p[4]) {
      ASSERT_EQ(LoadElement(mask.type, outputs[mask.port].data(), IndexOf(mask, p)),
                judge.Kept(p, p[4]) ? 1 : 0)
          << "mask at " << where << " column " << p[4];
    }
  });
}

}  // namespace kvant::cpu
