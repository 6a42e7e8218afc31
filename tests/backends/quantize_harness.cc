#include "kvant/tests/backends/quantize_harness.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>

#include "gtest/gtest.h"
#include "kvant/backends/cpu/quantize_plan.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/cpu_attention_harness.h"

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
    if (zero_points.empty()) return code * scale;
    const double zp = zero_points[zero_points.size() == 1 ? 0 : group];
    return IsFloat(test.types.zero_points) ? code * scale - zp : (code - zp) * scale;
  }

  // Whether `code` serves element i as well as the oracle's, but for 1e-4 of a step (of f8 codes:
  // of their value).
  bool Accepts(double code, int64_t i) const {
    if (Same(code, codes[i])) return true;
    const double scale = std::abs(scales[GroupOf(test.layout, i)]);
    const double error = std::abs(Value(code, i) - x[i]);
    const double least = std::abs(Value(codes[i], i) - x[i]);
    if (IsFloat(test.types.codes)) return error <= least + 1e-4 * std::abs(x[i]);
    return std::abs(code - codes[i]) <= 1 && error <= least + 1e-4 * scale;
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

Partition QuantizeCase::MakePartition(bool computes) const {
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
  absl::StatusOr<std::vector<Partition>> partitions = PartitionGraph(graph);
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
  const absl::Status done = executable.Run({executor}, inputs, absl::MakeSpan(outputs),
                                           reinterpret_cast<std::byte*>(scratch.data()));
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
    const auto executable = cpu::CompileQuantize(partition, *kernels);
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

}  // namespace kvant::testing
