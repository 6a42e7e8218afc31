// The oracle: any partition, op by op in f64.
//
// Values between ops are f64 whatever their declared type, so that what is compared with it shows
// all of its own rounding; only ports, and ops that make codes, round.
#include <cstddef>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvant/backends/backend.h"
#include "kvant/backends/oracle/ops.h"
#include "kvant/graph/shape_inference.h"

namespace kvant {
namespace oracle {

Array* OpContext::Output(int port) {
  if (port >= static_cast<int>(outputs.size())) return nullptr;
  outputs[port] = Array(out_dims(port));
  return &outputs[port];
}

Array OpContext::Take(int port) {
  if (inputs[port].last_use) return std::move(*inputs[port].array);
  return *inputs[port].array;
}

Array OpContext::NewOutput(const Dims& dims) {
  for (Input& input : inputs) {
    if (input.last_use && input.array->dims == dims) {
      Array taken;
      taken.dims = dims;
      taken.values = std::move(input.array->values);
      return taken;
    }
  }
  return Array(dims);
}

namespace {

using EvalFn = absl::StatusOr<Array> (*)(OpContext&);

constexpr EvalFn kEval[] = {
#define KVANT_OP(kind, ...) Eval##kind,
#include "kvant/graph/ops.inc"
};

// Takes arrays that have dims of 1 where their elements repeat; see ops.h.
bool TakesRepeated(OpKind kind) {
  return ClassOf(kind) == OpClass::kBinary || kind == OpKind::kGreaterEqual ||
         kind == OpKind::kSelect || kind == OpKind::kTypeCast || kind == OpKind::kGenIndex;
}

// One execution: the values that are alive, and how often each is still needed.
class Walk {
 public:
  Walk(const Partition& partition, Executor& executor)
      : partition_(partition), graph_(partition.ops()), executor_(executor) {
    for (const Op& op : graph_.ops()) {
      for (TensorId id : op.inputs) ++uses_[id];
    }
    for (TensorId id : partition.outputs()) ++uses_[id];
  }

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const LogicalTensor& desc = partition_.input(static_cast<int>(i));
      values_[partition_.inputs()[i]] = Load(executor_, desc, inputs[i]);
    }
    for (const Op& op : graph_.ops()) {
      for (const TensorId id : op.inputs) {
        const LogicalTensor& tensor = graph_.tensor(id);
        if (tensor.value) values_[id] = Load(executor_, tensor, tensor.value->data());
      }
    }
    for (const Op& op : graph_.ops()) KVANT_RETURN_IF_ERROR(Evaluate(op));
    for (size_t i = 0; i < outputs.size(); ++i) {
      const LogicalTensor& desc = partition_.output(static_cast<int>(i));
      Store(desc, Full(partition_.outputs()[i]), outputs[i]);
    }
    return absl::OkStatus();
  }

 private:
  // The value with all of its tensor's elements.
  Array& Full(TensorId id) {
    Array& array = values_[id];
    const Dims& dims = *graph_.tensor(id).dims;
    if (array.size() != ElementsOf(dims)) {
      array = Gather(executor_, array, dims, GroupMap(array.dims, dims));
    }
    return array;
  }

  absl::Status Evaluate(const Op& op) {
    OpContext context(graph_, op, executor_);
    context.outputs.resize(op.outputs.size());
    for (TensorId id : op.inputs) {
      Array& array = TakesRepeated(op.kind) ? values_[id] : Full(id);
      // With one use left, this op has the tensor at one input only.
      context.inputs.push_back({&array, uses_[id] == 1});
    }
    KVANT_ASSIGN_OR_RETURN(Array first, kEval[static_cast<size_t>(op.kind)](context));
    if (!context.outputs.empty()) context.outputs[0] = std::move(first);
    for (TensorId id : op.inputs) {
      if (--uses_[id] == 0) values_.erase(id);
    }
    for (size_t i = 0; i < op.outputs.size(); ++i) {
      const TensorId id = op.outputs[i];
      if (uses_[id] == 0) continue;
      Array& array = values_[id] = std::move(context.outputs[i]);
      const Dims& dims = *graph_.tensor(id).dims;
      if (array.size() == ElementsOf(dims)) array.dims = dims;
    }
    return absl::OkStatus();
  }

  const Partition& partition_;
  const Graph& graph_;
  Executor& executor_;
  absl::flat_hash_map<TensorId, int> uses_;
  // References into it hold until a value is added, which Evaluate does last.
  absl::flat_hash_map<TensorId, Array> values_;
};

class OracleExecutable : public Executable {
 public:
  explicit OracleExecutable(const Partition& partition) : partition_(partition) {}

  std::string kernel() const override { return "f64, op by op"; }
  absl::Status Run(const Execution& run) const override {
    return Walk(partition_, run.executor).Run(run.inputs, run.outputs);
  }

 private:
  const Partition partition_;
};

class OracleBackend : public Backend {
 public:
  std::string_view name() const override { return "oracle"; }
  bool fused() const override { return false; }

  absl::StatusOr<std::unique_ptr<Executable>> Compile(const Partition& partition) const override {
    const Graph& graph = partition.ops();
    for (const Op& op : graph.ops()) {
      if (op.kind == OpKind::kWildcard) {
        return OpError(ErrorKind::kUnimplemented, op, "a wildcard has no meaning to evaluate");
      }
      KVANT_RETURN_IF_ERROR(CheckShapesKnown(graph, op));
    }
    return std::make_unique<OracleExecutable>(partition);
  }
};

}  // namespace
}  // namespace oracle

std::unique_ptr<Backend> MakeOracleBackend() { return std::make_unique<oracle::OracleBackend>(); }

}  // namespace kvant
