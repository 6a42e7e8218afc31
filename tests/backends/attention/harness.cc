#include "kvant/tests/backends/attention/harness.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <numeric>
#include <thread>

#include "absl/types/span.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/tests/backends/attention/judge.h"
#include "kvant_test_config.h"

namespace kvant::cpu {

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
  } else if (f.order == Format::Order::kByToken) {
    strides[1] = dims[2] * channels;
    strides[2] = channels;
    strides[3] = dims[1] * strides[1];
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
  } else if (f.parameters_by_token) {
    parameter_strides[1] = groups[2] * groups[4];
    parameter_strides[2] = groups[4];
    parameter_strides[3] = groups[1] * parameter_strides[1];
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
    // Those of signed codes are in their middle half, so that values are no larger than without.
    const int64_t least = std::max(LowestOf(f.zero_points), low / 2);
    const int64_t most = std::min(HighestOf(f.zero_points), low < 0 ? high / 2 : high);
    return std::floor(Random(static_cast<double>(least), static_cast<double>(most) + 1));
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

std::vector<int32_t> PagesInNoOrder(const std::vector<int32_t>& lengths, int64_t page_tokens,
                                    int64_t of_row, int64_t pages, std::mt19937& random) {
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int32_t> table(lengths.size() * static_cast<size_t>(of_row), -1);
  auto next = order.begin();
  for (size_t row = 0; row < lengths.size(); ++row) {
    const int64_t own = CeilDiv(lengths[row], page_tokens);
    std::copy_n(next, own, table.begin() + static_cast<int64_t>(row) * of_row);
    next += own;
  }
  return table;
}

const KernelSet& HighestKernels() {
  const KernelSet* highest = KernelsAt(0);
  for (int i = 1; const KernelSet* set = KernelsAt(i); ++i) highest = set;
  return *highest;
}

absl::Status Case::Run(const KernelSet& kernels, int threads) {
  ThreadExecutor executor(threads);
  return Run(kernels, executor);
}

absl::Status Case::Run(const KernelSet& kernels, Executor& executor) {
  auto executable = CompileAttention(spec, kernels);
  if (!executable.ok()) return executable.status();
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const GuardedBuffer& buffer : inputs) in.push_back(buffer.data());
  for (const GuardedBuffer& buffer : outputs) {
    std::memset(buffer.data(), 0xA5, buffer.bytes());
    out.push_back(buffer.data());
  }
  const GuardedBuffer scratch((*executable)->scratch_bytes(executor.max_concurrency()));
  std::memset(scratch.data(), 0xFF, scratch.bytes());  // NaN
  return (*executable)->Run({executor, in, out, static_cast<std::byte*>(scratch.data())});
}

namespace {

// What outputs should be, each row computed when it is first compared.
struct Expectation {
  explicit Expectation(const Case& c) : judge(c.spec, c.inputs) {}

  Judge judge;
  std::vector<Judge::Row> rows;  // in the order of ForEachPosition
};

void Compare(const Case& c, double tolerance, Expectation& expected) {
  const AttentionSpec& spec = c.spec;
  const Shape& shape = c.shape;
  const auto same = [&](double got, double want) {
    if (std::isnan(want)) return std::isnan(got);
    if (got == want) return true;  // also infinities
    const double error = std::abs(got - want);
    return error <= tolerance || error <= 0.4 * tolerance * std::abs(want);
  };
  size_t at = 0;
  ForEachPosition({shape.b0, shape.b1, shape.ratio, shape.q_len, 1}, [&](Dims5 p) {
    if (testing::Test::HasFailure()) return;
    if (at == expected.rows.size()) expected.rows.push_back(expected.judge.Compute(p));
    const Judge::Row& row = expected.rows[at++];
    const std::string where = testing::PrintToString(p);
    for (p[4] = 0; p[4] < shape.dv; ++p[4]) {
      const View& o = spec.output;
      double got = LoadElement(o.type, c.outputs[o.port].data(), IndexOf(o, p));
      double want = row.out[p[4]];
      const bool codes = spec.probs_quantization && IsInteger(spec.probs_quantization->type);
      if (!codes && std::isnan(row.stats)) want = std::nan("");
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
      const double got =
          LoadElement(kF32, c.outputs[spec.stats.port].data(), IndexOf(spec.stats, p));
      ASSERT_TRUE(same(got, row.stats))
          << "stats at " << where << ": " << got << ", expected " << row.stats;
    }
    if (!spec.dropout || !spec.dropout->mask.present()) return;
    const View& mask = spec.dropout->mask;
    for (p[4] = 0; p[4] < shape.kv_len; ++p[4]) {
      ASSERT_EQ(LoadElement(mask.type, c.outputs[mask.port].data(), IndexOf(mask, p)),
                expected.judge.Kept(p, p[4]) ? 1 : 0)
          << "mask at " << where << " column " << p[4];
    }
  });
}

// Numbers of threads that a case runs with on a set of kernels: all. Under a sanitizer, where
// kernels are slow, one, mixed so that no set has always the same.
absl::Span<const int> ThreadCounts() {
  static constexpr int kCounts[] = {1, 2, 7};
#ifdef KVANT_SANITIZED
  static uint32_t runs = 0;
  return absl::MakeConstSpan(&kCounts[(runs++ * 2654435761u >> 16) % std::size(kCounts)], 1);
#else
  return kCounts;
#endif
}

}  // namespace

void Case::CompareWithOracle(double tolerance) {
  Expectation expected(*this);
  Compare(*this, tolerance, expected);
}

void Case::Check(double tolerance) {
  Expectation expected(*this);
  for (int i = 0; const KernelSet* kernels = KernelsAt(i); ++i) {
    std::vector<std::vector<char>> first;
    for (const int threads : ThreadCounts()) {
      const absl::Status status = Run(*kernels, threads);
      ASSERT_TRUE(status.ok()) << status;
      for (size_t o = 0; o < outputs.size(); ++o) {
        const char* data = static_cast<const char*>(outputs[o].data());
        if (first.size() <= o) first.emplace_back(data, data + outputs[o].bytes());
        ASSERT_EQ(std::memcmp(data, first[o].data(), outputs[o].bytes()), 0)
            << "output " << o << " differs with " << threads << " threads";
      }
    }
    Compare(*this, tolerance, expected);
  }
}

std::vector<double> Case::Expected() const {
  Judge judge(spec, inputs);
  std::vector<double> expected;
  ForEachPosition({shape.b0, shape.b1, shape.ratio, shape.q_len, 1}, [&](const Dims5& p) {
    const Judge::Row row = judge.Compute(p);
    expected.insert(expected.end(), row.out.begin(), row.out.end());
  });
  return expected;
}

double Case::RelativeError(const std::vector<double>& expected) const {
  const View& o = spec.output;
  double error = 0, norm = 0;
  auto want = expected.begin();
  ForEachPosition(o.dims, [&](const Dims5& p) {
    const double off = LoadElement(o.type, outputs[o.port].data(), IndexOf(o, p)) - *want;
    error += off * off;
    norm += *want * *want;
    ++want;
  });
  return std::sqrt(error / norm);
}

}  // namespace kvant::cpu
