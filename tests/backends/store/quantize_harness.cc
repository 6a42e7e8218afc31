#include "kvant/tests/backends/store/quantize_harness.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"

namespace kvant::testing {
namespace {

LogicalTensor Describe(TensorId id, DataType type, const Dims& dims,
                       const std::optional<Dims>& strides) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = dims;
  tensor.strides = strides;
  return tensor;
}

Dims ParameterDims(const QuantizeLayout& layout) {
  if (layout.axis) return {layout.dims[*layout.axis]};
  if (layout.group.empty()) return {1};
  Dims dims = layout.dims;
  for (size_t d = 0; d < dims.size(); ++d) dims[d] /= layout.group[d];
  return dims;
}

// Dense index of the group that dense element `i` is in.
int64_t GroupOf(const QuantizeLayout& layout, int64_t i) {
  if (!layout.axis && layout.group.empty()) return 0;
  Dims at(layout.dims.size());
  for (size_t d = at.size(); d-- > 0; i /= layout.dims[d]) at[d] = i % layout.dims[d];
  if (layout.axis) return at[*layout.axis];
  int64_t group = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    group = group * (layout.dims[d] / layout.group[d]) + at[d] / layout.group[d];
  }
  return group;
}

// Against neighbours of the tensor's elements that were overwritten.
void ExpectGapsUntouched(const LogicalTensor& tensor, const Bytes& memory) {
  const Bytes again = Pack(tensor, Unpack(tensor, memory));
  for (size_t i = 0; i < memory.size(); ++i) {
    // NaN has more than one form.
    if (memory[i] != again[i] && !IsFloat(tensor.type)) {
      ADD_FAILURE() << tensor.ToString() << ": byte " << i << " was overwritten";
      return;
    }
  }
}

bool Same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

struct Judge {
  const QuantizeCase& test;
  std::vector<double> x, scales, zero_points, codes;

  double Value(double code, int64_t i) const {
    const int64_t group = GroupOf(test.layout, i);
    const double scale = scales[group];
    if (!test.codebook.empty()) return test.codebook[static_cast<size_t>(code)] * scale;
    if (zero_points.empty()) return code * scale;
    const double zp = zero_points[zero_points.size() == 1 ? 0 : group];
    return IsFloat(test.types.zero_points) ? code * scale - zp : (code - zp) * scale;
  }

  // Whether `code` serves element i as well as the oracle's, but for 1e-4 of a step (of f8 codes:
  // of their value).
  bool Accepts(double code, int64_t i) const {
    if (Same(code, codes[i])) return true;
    if (test.ggml) return false;
    const double scale = std::abs(scales[GroupOf(test.layout, i)]);
    const double error = std::abs(Value(code, i) - x[i]);
    const double least = std::abs(Value(codes[i], i) - x[i]);
    if (IsFloat(test.types.codes)) return error <= least + 1e-4 * std::abs(x[i]);
    return (!test.codebook.empty() || std::abs(code - codes[i]) <= 1) &&
           error <= least + 1e-4 * scale;
  }
};

void ExpectSameValues(const LogicalTensor& tensor, const Bytes& got, const Bytes& want,
                      const char* what) {
  const std::vector<double> a = Unpack(tensor, got), b = Unpack(tensor, want);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (!Same(a[i], b[i])) {
      ADD_FAILURE() << what << " " << i << " is " << a[i] << ", not " << b[i];
      return;
    }
  }
}

}  // namespace

std::string QuantizeTypes::ToString() const {
  std::string text;
  for (const DataType type : {src, codes, scales, zero_points}) {
    text += (text.empty() ? "" : "_") + std::string(DataTypeName(type));
  }
  return text;
}

Attributes QuantizeCase::attributes(bool computes) const {
  Attributes attrs;
  attrs.Set(Attr::kQType, std::string(layout.axis            ? "per_channel"
                                      : layout.group.empty() ? "per_tensor"
                                                             : "per_group"));
  if (layout.axis) attrs.Set(Attr::kAxis, *layout.axis);
  if (!layout.group.empty()) {
    attrs.Set(Attr::kGroupShape, std::vector<int64_t>(layout.group.begin(), layout.group.end()));
  }
  if (computes && power_of_two) attrs.Set(Attr::kPowerOfTwoScales, true);
  if (computes && floor != 0) attrs.Set(Attr::kScaleFloor, floor);
  if (!codebook.empty()) attrs.Set(Attr::kCodebook, codebook);
  if (computes && ggml) attrs.Set(Attr::kFormula, std::string("ggml"));
  return attrs;
}

LogicalTensor QuantizeCase::src() const {
  return Describe(0, types.src, layout.dims, layout.src_strides);
}
LogicalTensor QuantizeCase::codes() const {
  return Describe(1, types.codes, layout.dims, layout.code_strides);
}
LogicalTensor QuantizeCase::scales() const {
  return Describe(2, types.scales, ParameterDims(layout), layout.parameter_strides);
}
LogicalTensor QuantizeCase::zero_points() const {
  return Describe(3, types.zero_points, ParameterDims(layout), layout.parameter_strides);
}

Graph QuantizeCase::MakeGraph(bool computes) const {
  std::vector<LogicalTensor> inputs{src()}, outputs{codes()};
  std::vector<LogicalTensor>& parameters = computes ? outputs : inputs;
  parameters.push_back(scales());
  if (types.zero_points != kUndef) parameters.push_back(zero_points());
  Op op;
  op.kind = OpKind::kDynamicQuantize;
  op.name = "quantize";
  op.attrs = attributes(computes);
  Graph graph;
  absl::Status status = graph.AddOp(op, inputs, outputs);
  if (status.ok()) status = graph.Finalize();
  if (status.ok()) status = InferShapes(graph);
  EXPECT_TRUE(status.ok()) << status;
  return graph;
}

Partition QuantizeCase::MakePartition(bool computes) const {
  absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(MakeGraph(computes));
  EXPECT_TRUE(partitions.ok()) << partitions.status();
  return partitions->front();
}

QuantizeMemory RunQuantize(const QuantizeCase& test, const Executable& executable,
                           Executor& executor, const Bytes& src, const QuantizeMemory* given) {
  std::deque<cpu::GuardedBuffer> buffers;
  const auto guarded = [&buffers](const Bytes& bytes) {
    buffers.emplace_back(bytes.size());
    if (!bytes.empty()) std::memcpy(buffers.back().data(), bytes.data(), bytes.size());
    return buffers.back().data();
  };
  const bool has_zero_points = test.types.zero_points != kUndef;
  std::vector<const void*> inputs{guarded(src)};
  std::vector<void*> outputs{guarded(Pack(test.codes(), {}))};
  if (given != nullptr) {
    inputs.push_back(guarded(given->scales));
    if (has_zero_points) inputs.push_back(guarded(given->zero_points));
  } else {
    outputs.push_back(guarded(Pack(test.scales(), {})));
    if (has_zero_points) outputs.push_back(guarded(Pack(test.zero_points(), {})));
  }
  std::vector<float> scratch(executable.scratch_bytes(executor.max_concurrency()) / 4 + 1);
  const absl::Status done = executable.Run(
      {executor, inputs, absl::MakeSpan(outputs), reinterpret_cast<std::byte*>(scratch.data())});
  EXPECT_TRUE(done.ok()) << done;
  const auto copy = [](const LogicalTensor& tensor, const void* data) {
    Bytes bytes(tensor.memory_bytes());
    if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
    return bytes;
  };
  QuantizeMemory memory;
  memory.codes = copy(test.codes(), outputs[0]);
  if (given != nullptr) {
    memory.scales = given->scales;
    memory.zero_points = given->zero_points;
    return memory;
  }
  memory.scales = copy(test.scales(), outputs[1]);
  if (has_zero_points) memory.zero_points = copy(test.zero_points(), outputs[2]);
  return memory;
}

void ExpectAsOracle(const QuantizeCase& test, const std::vector<double>& x,
                    const QuantizeMemory& got, const QuantizeMemory& want, bool computes) {
  ExpectGapsUntouched(test.codes(), got.codes);
  if (computes) {
    ExpectSameValues(test.scales(), got.scales, want.scales, "scale");
    ExpectGapsUntouched(test.scales(), got.scales);
    if (test.types.zero_points != kUndef) {
      ExpectSameValues(test.zero_points(), got.zero_points, want.zero_points, "zero point");
      ExpectGapsUntouched(test.zero_points(), got.zero_points);
    }
  }
  Judge judge{test, x, Unpack(test.scales(), want.scales), {}, Unpack(test.codes(), want.codes)};
  if (test.types.zero_points != kUndef) {
    judge.zero_points = Unpack(test.zero_points(), want.zero_points);
  }
  const std::vector<double> codes = Unpack(test.codes(), got.codes);
  ASSERT_EQ(codes.size(), judge.codes.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    if (judge.Accepts(codes[i], static_cast<int64_t>(i))) continue;
    ADD_FAILURE() << "element " << i << " (" << x[i] << ") has code " << codes[i] << ", not "
                  << judge.codes[i];
    return;
  }
}

QuantizeMemory RunOracle(const QuantizeCase& test, const Bytes& src, const QuantizeMemory* given) {
  const auto executable = MakeOracleBackend()->Compile(test.MakePartition(given == nullptr));
  EXPECT_TRUE(executable.ok()) << executable.status();
  return RunQuantize(test, **executable, *MakeSerialExecutor(), src, given);
}

static void ExpectAllKernels(const QuantizeCase& test, const std::vector<double>& values,
                             const QuantizeMemory* given) {
  SCOPED_TRACE(test.layout.name + " " + test.types.ToString() +
               (given == nullptr ? ", computed" : ", taken"));
  const Bytes src = Pack(test.src(), values);
  const std::vector<double> x = Unpack(test.src(), src);  // as rounded
  const QuantizeMemory want = RunOracle(test, src, given);
  const Partition partition = test.MakePartition(given == nullptr);
  for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
    SCOPED_TRACE(kernels->name);
    const auto executable = std::move(*cpu::CompileStore(*partition.store(), *kernels));
    cpu::ThreadExecutor one(1);
    const QuantizeMemory got = RunQuantize(test, *executable, one, src, given);
    ExpectAsOracle(test, x, got, want, given == nullptr);
    for (const int threads : {2, 7}) {
      cpu::ThreadExecutor executor(threads);
      EXPECT_TRUE(got == RunQuantize(test, *executable, executor, src, given))
          << threads << " threads";
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << executable->kernel();
      return;
    }
  }
  // Tests of other codes are in cuda/store/quantize_kernel_test.cc.
  if (test.codebook.empty() && !test.ggml) return;
  const auto executable = MakeCudaSimtBackend()->Compile(partition);
  if (test.ggml && !executable.ok()) {
    EXPECT_NE(executable.status().message().find("no runs of up to 1024"), std::string::npos);
    const int64_t group = test.layout.group.empty() ? 70000 : test.layout.group.back();
    EXPECT_TRUE(group > 1024 || group * BitsOf(test.types.codes) % 8 != 0) << group;
    return;
  }
  ASSERT_TRUE(executable.ok()) << executable.status();
  SCOPED_TRACE((*executable)->kernel());
  const QuantizeMemory got = RunQuantize(test, **executable, *MakeSerialExecutor(), src, given);
  ExpectAsOracle(test, x, got, want, given == nullptr);
}

void ExpectQuantizes(const QuantizeCase& test, const std::vector<double>& values) {
  ExpectAllKernels(test, values, nullptr);
}

void ExpectQuantizesBothForms(const QuantizeCase& test, const std::vector<double>& values) {
  ExpectAllKernels(test, values, nullptr);
  const QuantizeMemory given = RunOracle(test, Pack(test.src(), values));
  ExpectAllKernels(test, values, &given);
}

void ExpectQuantizesWith(const QuantizeCase& test, const std::vector<double>& values,
                         const QuantizeMemory& given) {
  ExpectAllKernels(test, values, &given);
}

std::vector<double> QuantizeNumbers(const Dims& dims, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(ElementsOf(dims));
  double mean = 0, spread = 1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % 29 == 0) {
      mean = 3 * normal(rng);
      spread = std::exp(normal(rng));
    }
    values[i] = mean + spread * normal(rng);
  }
  return values;
}

std::vector<QuantizeTypes> AllQuantizeTypes() {
  std::vector<QuantizeTypes> all;
  constexpr DataType kScales[] = {kF16, kF32, kBF16};
  for (const DataType src : {kF32, kF16, kBF16}) {
    for (const DataType codes : {kS8, kU8, kS4, kU4, kS2, kU2, kF8E4M3, kF8E5M2}) {
      std::vector<DataType> zero_points{kUndef};
      if (IsInteger(codes)) zero_points = {kUndef, codes, kS32, kU8, kS8, kF32, kF16, kBF16};
      for (const DataType type : zero_points) {
        all.push_back({src, codes, kScales[all.size() % 3], type});
      }
    }
  }
  return all;
}

const std::vector<QuantizeLayout>& QuantizeLayouts() {
  static const auto* const layouts = new std::vector<QuantizeLayout>{
      {.name = "runs_of_32", .dims = {3, 5, 64}, .group = {1, 1, 32}},
      {.name = "runs_of_16", .dims = {2, 70, 16}, .group = {1, 1, 16}},
      {.name = "rows", .dims = {2, 3, 96}, .group = {1, 1, 96}},
      {.name = "rows_of_several_axes", .dims = {3, 4, 48}, .group = {1, 4, 48}},
      {.name = "runs_of_11", .dims = {7, 33}, .group = {1, 11}},
      {.name = "runs_of_5", .dims = {6, 40}, .group = {1, 5}},
      {.name = "runs_of_3_odd_rows", .dims = {5, 9}, .group = {1, 3}},
      {.name = "runs_of_20", .dims = {4, 120}, .group = {1, 20}},
      {.name = "runs_of_600", .dims = {4, 1200}, .group = {1, 600}},
      {.name = "rows_of_603", .dims = {4, 603}, .group = {1, 603}},
      {.name = "one_each", .dims = {5, 33}, .group = {1, 1}},
      {.name = "columns_of_32", .dims = {2, 64, 48}, .group = {1, 32, 1}},
      {.name = "columns_of_4_odd", .dims = {3, 8, 35}, .group = {1, 4, 1}},
      {.name = "columns_of_4_even", .dims = {3, 8, 36}, .group = {1, 4, 1}},
      {.name = "columns_beyond_a_chunk", .dims = {4, 300}, .group = {2, 1}},
      {.name = "static_channels", .dims = {2, 40, 20}, .group = {1, 40, 1}},
      {.name = "per_tensor", .dims = {3, 7, 11}},
      {.name = "scalar", .dims = {}},
      {.name = "channel_last", .dims = {6, 40}, .axis = 1},
      {.name = "channel_first", .dims = {6, 40}, .axis = 0},
      {.name = "channel_middle", .dims = {2, 5, 16}, .axis = 1},
      {.name = "blocks", .dims = {8, 64}, .group = {4, 16}},
      {.name = "padded_lines",
       .dims = {3, 5, 64},
       .group = {1, 1, 32},
       .src_strides = Dims{400, 72, 1},
       .code_strides = Dims{404, 80, 1}},
      {.name = "padded_columns",
       .dims = {2, 8, 20},
       .group = {1, 4, 1},
       .src_strides = Dims{200, 24, 1},
       .code_strides = Dims{256, 32, 1}},
      {.name = "one_group_per_padded_line",
       .dims = {9, 32},
       .group = {1, 32},
       .src_strides = Dims{48, 1}},
      {.name = "swapped_axes",
       .dims = {2, 16, 12},
       .group = {1, 1, 4},
       .src_strides = Dims{192, 1, 16}},
      {.name = "codes_apart", .dims = {4, 16}, .group = {1, 8}, .code_strides = Dims{40, 2}},
      {.name = "parameters_apart",
       .dims = {3, 4, 64},
       .group = {1, 1, 16},
       .parameter_strides = Dims{64, 12, 3}},
      {.name = "parameters_swapped",
       .dims = {6, 64},
       .group = {1, 16},
       .parameter_strides = Dims{1, 6}},
  };
  return *layouts;
}

}  // namespace kvant::testing
