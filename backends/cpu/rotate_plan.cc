#include "kvant/backends/cpu/rotate_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kvant/graph/status.h"
#include "kvant/kernels/cpu/rotate.h"
#include "kvant/patterns/partitioner.h"

namespace kvant::cpu {
namespace {

// A piece and its result stay in the first-level cache; a unit is worth some microseconds.
constexpr int64_t kPieceElements = 2048;
constexpr int64_t kUnitElements = 32 * 1024;

RotateProblem Describe(const LogicalTensor& src, const LogicalTensor& dst, int64_t block) {
  RotateProblem p;
  p.src_type = src.type;
  p.dst_type = dst.type;
  p.block = block;
  const Dims &dims = *src.dims, from = src.StridesOrDense(), to = dst.StridesOrDense();
  const int last = src.rank() - 1;
  p.line = {dims[last], from[last], to[last]};
  for (int d = 0; d < last; ++d) {
    p.lines *= dims[d];
    if (dims[d] != 1) p.outer[p.outer_axes++] = {dims[d], from[d], to[d]};
  }
  p.piece =
      std::clamp(std::max(block, kPieceElements), int64_t{1}, std::max<int64_t>(1, dims[last]));
  p.run = std::max<int64_t>(1, kUnitElements / p.piece);
  return p;
}

int64_t RoundToLine(int64_t bytes) { return CeilDiv(bytes, 64) * 64; }

void Rotate(const KernelSet& kernels, const RotateProblem& problem, Executor& executor,
            const void* src, void* dst, float* buffers) {
  const auto unit = [&](int64_t i, int slot) {
    RotateUnit(kernels, problem, src, dst, i, buffers + slot * problem.piece);
  };
  const int64_t units = RotateUnits(problem);
  if (units > 1 && executor.max_concurrency() > 1) return executor.ParallelFor(units, unit);
  for (int64_t i = 0; i < units; ++i) unit(i, 0);
}

std::string InWords(const RotateProblem& problem) {
  return absl::StrCat("Hadamard in blocks of ", problem.block);
}

int64_t BufferBytes(const RotateProblem& problem, int max_concurrency) {
  return RoundToLine(max_concurrency * problem.piece * static_cast<int64_t>(sizeof(float)));
}

class Rotation : public Executable {
 public:
  Rotation(const RotateProblem& problem, const KernelSet& kernels)
      : problem_(problem), kernels_(kernels) {}

  std::string kernel() const override {
    return absl::StrCat("cpu/", kernels_.name, " ", InWords(problem_));
  }
  size_t scratch_bytes(int max_concurrency) const override {
    return BufferBytes(problem_, max_concurrency);
  }
  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    Rotate(kernels_, problem_, place.executor, inputs[0], outputs[0],
           reinterpret_cast<float*>(scratch));
    return absl::OkStatus();
  }

 private:
  const RotateProblem problem_;
  const KernelSet& kernels_;
};

// Rotates into scratch, from which the rest reads.
class RotationBefore : public Executable {
 public:
  RotationBefore(const RotateProblem& problem, const KernelSet& kernels, const Partition& whole,
                 const Partition& rest, std::unique_ptr<Executable> executable)
      : problem_(problem), kernels_(kernels), rest_(std::move(executable)) {
    rotated_bytes_ =
        RoundToLine(problem.lines * problem.line.extent * static_cast<int64_t>(sizeof(float)));
    src_ = whole.InputPort(whole.ops().ops()[0].inputs[0]);
    for (const TensorId id : rest.inputs()) inputs_.push_back(whole.InputPort(id));
    for (const TensorId id : rest.outputs()) outputs_.push_back(whole.OutputPort(id));
  }

  std::string kernel() const override {
    return absl::StrCat(rest_->kernel(), " after ", InWords(problem_));
  }
  double rounding() const override { return rest_->rounding(); }
  size_t alignment() const override { return rest_->alignment(); }
  size_t scratch_bytes(int max_concurrency) const override {
    return rotated_bytes_ + std::max<size_t>(BufferBytes(problem_, max_concurrency),
                                             rest_->scratch_bytes(max_concurrency));
  }
  absl::Status Run(const ExecutionPlace& place, absl::Span<const void* const> inputs,
                   absl::Span<void* const> outputs, std::byte* scratch) const override {
    std::byte* const behind = scratch + rotated_bytes_;
    Rotate(kernels_, problem_, place.executor, inputs[src_], scratch,
           reinterpret_cast<float*>(behind));
    absl::InlinedVector<const void*, 8> in;
    for (const int port : inputs_) in.push_back(port == kNoPort ? scratch : inputs[port]);
    absl::InlinedVector<void*, 8> out;
    for (const int port : outputs_) out.push_back(outputs[port]);
    return rest_->Run(place, in, out, behind);
  }

 private:
  const RotateProblem problem_;
  const KernelSet& kernels_;
  const std::unique_ptr<Executable> rest_;
  int64_t rotated_bytes_ = 0;
  int src_ = 0;
  std::vector<int> inputs_, outputs_;  // ports of the whole; kNoPort: what was rotated
};

}  // namespace

bool IsRotation(const Partition& partition) {
  return partition.kind() == Partition::Kind::kOps && !partition.ops().ops().empty() &&
         partition.ops().ops()[0].kind == OpKind::kHadamard;
}

absl::StatusOr<std::unique_ptr<Executable>> CompileRotation(
    const Partition& partition, const KernelSet& kernels,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Executable>>(const Partition&)> compile_rest) {
  const Graph& graph = partition.ops();
  const Op& op = graph.ops()[0];
  const int64_t block = op.attrs.GetOr<int64_t>(Attr::kBlock, 1);
  LogicalTensor rotated = graph.tensor(op.outputs[0]);
  const LogicalTensor& src = graph.tensor(op.inputs[0]);
  if (graph.ops().size() == 1) {
    return std::make_unique<Rotation>(Describe(src, rotated, block), kernels);
  }
  std::vector<Graph::OpIndex> others(graph.ops().size() - 1);
  std::iota(others.begin(), others.end(), 1);
  Graph rest = graph.Subgraph(others);
  rotated.type = kF32;
  rotated.strides.reset();
  KVANT_RETURN_IF_ERROR(rest.SetTensor(rotated));
  KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(rest));
  if (partitions.size() != 1) {
    return MakeError(
        ErrorKind::kUnimplemented,
        absl::StrCat("what follows ", op.ToString(), " are ", partitions.size(), " partitions"));
  }
  KVANT_ASSIGN_OR_RETURN(std::unique_ptr<Executable> executable, compile_rest(partitions[0]));
  return std::make_unique<RotationBefore>(Describe(src, rotated, block), kernels, partition,
                                          partitions[0], std::move(executable));
}

}  // namespace kvant::cpu
