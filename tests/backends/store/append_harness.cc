#include "kvant/tests/backends/store/append_harness.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/backends/cuda_simt.h"
#include "kvant/graph/shape_inference.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tests/backends/attention/harness.h"
#include "kvant/tests/common/simt_turn.h"

namespace kvant::testing {
namespace {

LogicalTensor Describe(TensorId id, DataType type, const Dims& dims,
                       const std::optional<Dims>& strides = std::nullopt) {
  LogicalTensor tensor;
  tensor.id = id;
  tensor.type = type;
  tensor.dims = dims;
  tensor.strides = strides;
  return tensor;
}

// Calls visit(index in memory, i) for the elements of `tensor` where those of `part` go that lie
// `position` of its elements further along the axis; i is the dense index in `part`.
template <typename Visit>
void ForEachWritten(const AppendCase& test, const LogicalTensor& tensor, const Dims& part,
                    int64_t unit, Visit visit) {
  const Dims strides = tensor.StridesOrDense();
  int64_t count = 1;
  for (const int64_t dim : part) count *= dim;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, index = 0, row = 0;
    for (int d = static_cast<int>(part.size()) - 1; d >= 0; rest /= part[d--]) {
      row = rest % part[d];
      if (d > 0 || test.pages == 0) index += row * strides[d];
    }
    const int64_t position = test.PositionOf(row);
    if (position < 0) continue;
    const int64_t page = position / test.capacity, token = position % test.capacity;
    index += test.pages > 0 ? page * strides[0] + token * strides[test.axis]
                            : position / unit * strides[test.axis];
    visit(index, i);
  }
}

// Bits of an element, without what reading a NaN as a number may do to it.
void CopyElement(DataType type, const Bytes& from, Bytes& to, int64_t index) {
  const int bits = BitsOf(type);
  if (bits < 8) {
    const DataType plain = bits == 4 ? kU4 : kU2;
    StoreElement(plain, to.data(), index, LoadElement(plain, from.data(), index));
  } else {
    std::memcpy(to.data() + index * bits / 8, from.data() + index * bits / 8, bits / 8);
  }
}

// The dims of the parameters of src alone, and tokens to one of them.
struct PartGroups {
  Dims dims;
  int64_t unit = 1;
  bool one = false;  // a group has all of the capacity
};
PartGroups GroupsOf(const AppendCase& test) {
  PartGroups groups{test.dims};
  groups.one = test.group[test.axis] >= test.capacity;
  for (size_t d = 0; d < groups.dims.size(); ++d) {
    // Rows of given groups that share parameters are taken one by one.
    if (d > 0) groups.dims[d] /= std::min(test.group[d], test.dims[d]);
  }
  groups.unit = test.group[test.axis];
  return groups;
}

// The parameters of src's elements among those of dst, dense.
Bytes GivenFor(const AppendCase& test, const LogicalTensor& parameters, const Bytes& memory) {
  const PartGroups groups = GroupsOf(test);
  const Dims strides = parameters.StridesOrDense();
  std::vector<double> values;
  int64_t count = 1;
  for (const int64_t dim : groups.dims) count *= dim;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, index = 0, row = 0;
    for (int d = static_cast<int>(groups.dims.size()) - 1; d >= 0; rest /= groups.dims[d--]) {
      row = rest % groups.dims[d];
      if (d > 0) index += row * strides[d];
    }
    int64_t position = std::max<int64_t>(0, test.PositionOf(row));
    if (test.pages > 0) row = position / test.capacity;
    if (test.pages > 0) position %= test.capacity;
    index += row / test.group[0] * strides[0];
    if (!groups.one) index += position / groups.unit * strides[test.axis];
    values.push_back(LoadElement(parameters.type, memory.data(), index));
  }
  return Pack(Describe(0, parameters.type, groups.dims), values);
}

// DynamicQuantize of src.
QuantizeCase Alone(const AppendCase& test) {
  Dims group = test.group;
  group[0] = 1;
  for (size_t d = 0; d < group.size(); ++d) group[d] = std::min(group[d], test.dims[d]);
  return {.layout = {.name = test.name, .dims = test.dims, .group = group},
          .types = test.types,
          .codebook = test.codebook,
          .ggml = test.ggml};
}

}  // namespace

LogicalTensor AppendCase::src() const {
  Dims packed = dims;
  if (pages > 0) packed.erase(packed.begin() + axis);
  return Describe(0, types.src, packed, src_strides);
}
LogicalTensor AppendCase::position() const {
  return Describe(1, position_type, {static_cast<int64_t>(positions.size())});
}
LogicalTensor AppendCase::dst() const {
  Dims whole = dims;
  whole[axis] = capacity;
  if (pages > 0) whole[0] = pages;
  return Describe(2, types.codes, whole, dst_strides);
}
LogicalTensor AppendCase::scales() const {
  Dims whole = *dst().dims;
  for (size_t d = 0; d < whole.size(); ++d) whole[d] /= group[d];
  return Describe(3, types.scales, whole, parameter_strides);
}
LogicalTensor AppendCase::zero_points() const {
  LogicalTensor tensor = scales();
  tensor.id = 4;
  tensor.type = types.zero_points;
  return tensor;
}

absl::StatusOr<Partition> AppendCase::MakePartition() const {
  std::vector<LogicalTensor> inputs{src(), position()}, outputs{dst()};
  Op op;
  op.kind = pages > 0 ? OpKind::kAppendPages : OpKind::kAppend;
  op.name = "append";
  op.attrs.Set(Attr::kTokenAxis, static_cast<int64_t>(axis));
  if (!converts()) {
    op.attrs.Set(Attr::kQType, std::string("per_group"));
    op.attrs.Set(Attr::kGroupShape, std::vector<int64_t>(group.begin(), group.end()));
    if (!codebook.empty()) op.attrs.Set(Attr::kCodebook, codebook);
    if (ggml) op.attrs.Set(Attr::kFormula, std::string("ggml"));
    std::vector<LogicalTensor>& parameters = given ? inputs : outputs;
    parameters.push_back(scales());
    if (types.zero_points != kUndef) parameters.push_back(zero_points());
  }
  Graph graph;
  KVANT_RETURN_IF_ERROR(graph.AddOp(op, inputs, outputs));
  KVANT_RETURN_IF_ERROR(graph.Finalize());
  KVANT_RETURN_IF_ERROR(InferShapes(graph));
  KVANT_ASSIGN_OR_RETURN(std::vector<Partition> partitions, PartitionGraph(graph));
  // As an engine does it: what the graph says of outputs must be enough.
  return partitions.front().WithPorts({});
}

QuantizeMemory MemoryBefore(const AppendCase& test, uint32_t seed) {
  std::mt19937 rng(seed);
  const auto any = [&rng](const LogicalTensor& tensor) {
    Bytes bytes(tensor.memory_bytes());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
    return bytes;
  };
  QuantizeMemory memory;
  memory.codes = any(test.dst());
  if (test.converts()) return memory;
  memory.scales = any(test.scales());
  if (test.types.zero_points != kUndef) memory.zero_points = any(test.zero_points());
  if (!test.given) return memory;
  std::vector<double> scales(test.scales().elements()), zero_points(scales.size());
  for (double& scale : scales) scale = 0.05 + static_cast<double>(rng() % 64) / 64;
  for (double& zp : zero_points) zp = static_cast<double>(rng() % 4);
  memory.scales = Pack(test.scales(), scales);
  if (test.types.zero_points != kUndef) {
    memory.zero_points = Pack(test.zero_points(), zero_points);
  }
  return memory;
}

absl::StatusOr<QuantizeMemory> RunAppend(const AppendCase& test, const Executable& executable,
                                         Executor& executor, const Bytes& src,
                                         const QuantizeMemory& before) {
  std::deque<cpu::GuardedBuffer> buffers;
  const auto guarded = [&buffers](const Bytes& bytes) {
    buffers.emplace_back(bytes.size());
    if (!bytes.empty()) std::memcpy(buffers.back().data(), bytes.data(), bytes.size());
    return buffers.back().data();
  };
  std::vector<double> positions(test.positions.begin(), test.positions.end());
  std::vector<const void*> inputs{guarded(src), guarded(Pack(test.position(), positions))};
  std::vector<void*> outputs{guarded(before.codes)};
  for (const Bytes* parameters : {&before.scales, &before.zero_points}) {
    if (parameters->empty()) continue;
    if (test.given) {
      inputs.push_back(guarded(*parameters));
    } else {
      outputs.push_back(guarded(*parameters));
    }
  }
  std::vector<float> scratch(executable.scratch_bytes(executor.max_concurrency()) / 4 + 1);
  const absl::Status done = executable.Run(
      {executor, inputs, absl::MakeSpan(outputs), reinterpret_cast<std::byte*>(scratch.data())});
  const auto copy = [](const Bytes& like, const void* data) {
    Bytes bytes(like.size());
    if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
    return bytes;
  };
  QuantizeMemory after = before;
  after.codes = copy(before.codes, outputs[0]);
  if (outputs.size() > 1) after.scales = copy(before.scales, outputs[1]);
  if (outputs.size() > 2) after.zero_points = copy(before.zero_points, outputs[2]);
  if (done.ok()) return after;
  EXPECT_TRUE(after == before) << "written in spite of " << done;
  return done;
}

void ExpectAppended(const AppendCase& test, const std::vector<double>& values,
                    const QuantizeMemory& before, const QuantizeMemory& after) {
  const Bytes src = Pack(test.src(), values);
  const std::vector<double> x = Unpack(test.src(), src);  // as rounded
  QuantizeMemory rest = after;
  if (test.converts()) {
    ForEachWritten(test, test.dst(), test.dims, 1, [&](int64_t index, int64_t i) {
      const double got = LoadElement(test.types.codes, after.codes.data(), index);
      const double want = RoundTo(test.types.codes, x[i]);
      EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
          << "element " << i << " is " << got << ", not " << want;
      CopyElement(test.types.codes, before.codes, rest.codes, index);
    });
    EXPECT_TRUE(rest == before) << "something else was written";
    return;
  }
  const QuantizeCase alone = Alone(test);
  const Bytes dense = Pack(alone.src(), x);
  QuantizeMemory want;
  if (test.given) {
    QuantizeMemory given{{}, GivenFor(test, test.scales(), before.scales), {}};
    if (test.types.zero_points != kUndef) {
      given.zero_points = GivenFor(test, test.zero_points(), before.zero_points);
    }
    want = RunOracle(alone, dense, &given);
  } else {
    want = RunOracle(alone, dense);
  }
  // Rows that are left out are as wanted already.
  QuantizeMemory got = want;
  const PartGroups groups = GroupsOf(test);
  const auto collect = [&](const LogicalTensor& tensor, const Dims& part, int64_t unit,
                           Bytes QuantizeMemory::*bytes) {
    std::vector<double> parts = Unpack(Describe(0, tensor.type, part), want.*bytes);
    ForEachWritten(test, tensor, part, unit, [&](int64_t index, int64_t i) {
      parts[i] = LoadElement(tensor.type, (after.*bytes).data(), index);
      CopyElement(tensor.type, before.*bytes, rest.*bytes, index);
    });
    got.*bytes = Pack(Describe(0, tensor.type, part), parts);
  };
  collect(test.dst(), test.dims, 1, &QuantizeMemory::codes);
  if (!test.given) {
    collect(test.scales(), groups.dims, groups.unit, &QuantizeMemory::scales);
    if (test.types.zero_points != kUndef) {
      collect(test.zero_points(), groups.dims, groups.unit, &QuantizeMemory::zero_points);
    }
  }
  ExpectAsOracle(alone, x, got, want, !test.given);
  EXPECT_TRUE(rest == before) << "something else was written";
}

const std::vector<AppendBackend>& AppendBackends() {
  static const auto* const backends = [] {
    const auto of = [](std::shared_ptr<const Backend> backend) {
      return [backend](const Partition& partition) { return backend->Compile(partition); };
    };
    auto* all = new std::vector<AppendBackend>{{"oracle", of(MakeOracleBackend())}};
    for (int i = 0; const cpu::KernelSet* kernels = cpu::KernelsAt(i); ++i) {
      const auto compile = [kernels](const Partition& partition) {
        return cpu::CompileStore(*partition.store(), *kernels);
      };
      all->push_back({kernels->name, compile, /*threads=*/true});
    }
    all->push_back({"cuda_simt", of(MakeCudaSimtBackend())});
    return all;
  }();
  return *backends;
}

void ExpectAppends(const AppendCase& test, const std::vector<double>& values) {
  SCOPED_TRACE(test.name + " " + test.types.ToString() + (test.given ? ", given" : ""));
  const absl::StatusOr<Partition> partition = test.MakePartition();
  ASSERT_TRUE(partition.ok()) << partition.status();
  const Bytes src = Pack(test.src(), values);
  const QuantizeMemory before = MemoryBefore(test);
  // NaN has more than one form.
  const bool finite =
      std::all_of(values.begin(), values.end(), [](double x) { return x - x == 0; });
  std::optional<QuantizeMemory> first;
  for (const AppendBackend& backend : AppendBackends()) {
    const auto executable = backend.compile(*partition);
    // Tokens that come in any order own no byte that they share.
    if (test.pages > 0 &&
        absl::StrContains(executable.status().message(), "within bytes that others write")) {
      EXPECT_EQ(backend.name, "cuda_simt");
      continue;
    }
    ASSERT_TRUE(executable.ok()) << backend.name << ": " << executable.status();
    SCOPED_TRACE(backend.name + ": " + (*executable)->kernel());
    if (backend.name == "cuda_simt" && !HasSimtTurn()) continue;
    cpu::ThreadExecutor one(1);
    const auto after = RunAppend(test, **executable, one, src, before);
    ASSERT_TRUE(after.ok()) << after.status();
    ExpectAppended(test, values, before, *after);
    // Element by element, quotients are f64.
    const std::string kernel = (*executable)->kernel();
    if (backend.threads && kernel.find("element by element") == std::string::npos) first = *after;
    EXPECT_TRUE(!first || !finite || *after == *first) << "other bits than another backend's";
    for (const int threads : {2, 7}) {
      if (!backend.threads) continue;
      cpu::ThreadExecutor executor(threads);
      EXPECT_TRUE(*RunAppend(test, **executable, executor, src, before) == *after)
          << threads << " threads";
    }
    EXPECT_TRUE(*RunAppend(test, **executable, one, src, *after) == *after) << "once more";
  }
}

void ExpectAppends(const AppendCase& test) { ExpectAppends(test, QuantizeNumbers(test.dims)); }

}  // namespace kvant::testing
