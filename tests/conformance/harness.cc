#include "kvant/tests/conformance/harness.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvant/backends/cpu/cpu_backend.h"
#include "kvant/graph/status.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/graph_runner.h"
#include "kvant_test_config.h"

namespace kvant::conformance {
namespace {

double RelativeBound(DataType type) {
  switch (type) {
    case kF16:
      return 2e-4;
    case kBF16:
      return 1.5e-3;
    case kS8:
      return 5e-3;
    default:
      return 1e-5;
  }
}

// Outputs that differ by no more than this are alike: f16 has nothing between them.
double SmallestStep(DataType type) { return type == kF16 ? 0x1p-24 : 0; }

// The bound of the CPU's products on codes here. What they promise is for any data.
constexpr double kOfTestData = 5e-4;

std::string JudgeOutput(const LogicalTensor& port, const TestBuffer& expected,
                        const TestBuffer& got, double rounding, bool by_point) {
  if (got.bytes() != expected.bytes()) return "different sizes";
  if (rounding == cpu::kRoundingOfCodes) rounding = kOfTestData;
  const Comparison comparison = Compare(port, expected.data(), got.data(), rounding);
  const double bound = std::max(RelativeBound(port.type), rounding);
  std::string why;
  const bool near = comparison.rel_l2 <= bound || comparison.max_abs <= SmallestStep(port.type);
  if ((by_point && !comparison.passed) || !near) {
    absl::StrAppend(&why, comparison.failing, " of ", comparison.total, " points differ, max abs ",
                    comparison.max_abs, ", rel l2 ", comparison.rel_l2, " (bound ", bound, ")");
  }
  if (!GapsIntact(port, got)) absl::StrAppend(&why, " written between its elements");
  if (!got.GuardIntact()) absl::StrAppend(&why, " written beyond its end");
  if (why.empty()) return why;
  return absl::StrCat("output '", port.name, "' ", port.ToString(), ": ", why, "\n");
}

// One GPU for all cases: starting it, and compiling what two cases share, takes longer than they
// do.
absl::StatusOr<Engine> EngineFor(const std::string& backend, int threads) {
  const EngineOptions options = EngineOptionsFor(backend, threads);
  if (options.device != Device::kCuda) return Engine::Create(options);
  static const auto* const gpu = new absl::StatusOr<Engine>(Engine::Create(options));
  return *gpu;
}

// Buffers as an engine's executions see them: themselves or, guards included, copies on its device.
class DeviceCopies {
 public:
  explicit DeviceCopies(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  ~DeviceCopies() {
    for (void* data : data_) memory_->Free(data);
  }

  absl::StatusOr<const void*> Place(const TestBuffer& buffer) {
    if (!memory_->asynchronous()) return static_cast<const void*>(buffer.data());
    KVANT_ASSIGN_OR_RETURN(const void* data, Copy(buffer));
    return data;
  }
  absl::StatusOr<void*> PlaceOutput(TestBuffer& buffer) {
    if (!memory_->asynchronous()) return static_cast<void*>(buffer.data());
    KVANT_ASSIGN_OR_RETURN(void* data, Copy(buffer));
    outputs_.emplace_back(&buffer, data);
    return data;
  }
  absl::Status FetchOutputs() const {
    for (const auto& [buffer, data] : outputs_) {
      KVANT_RETURN_IF_ERROR(memory_->CopyToHost(buffer->data(), data, buffer->bytes_with_guard()));
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<void*> Copy(const TestBuffer& buffer) {
    KVANT_ASSIGN_OR_RETURN(void* data, memory_->Allocate(buffer.bytes_with_guard()));
    data_.push_back(data);
    KVANT_RETURN_IF_ERROR(memory_->CopyFromHost(data, buffer.data(), buffer.bytes_with_guard()));
    return data;
  }

  const std::shared_ptr<DeviceMemory> memory_;
  std::vector<void*> data_;
  std::vector<std::pair<TestBuffer*, void*>> outputs_;
};

}  // namespace

std::vector<EngineUnderTest> EnginesUnderTest() {
  std::vector<EngineUnderTest> engines;
  const char* const chosen = std::getenv("KVANT_CONFORMANCE_ENGINES");
  std::vector<std::string> names = absl::StrSplit(chosen == nullptr ? "" : chosen, ',');
  const auto add = [&](const char* backend, bool fused, bool by_default) {
    if (chosen == nullptr ? by_default : std::erase(names, backend) > 0) {
      engines.push_back({backend, fused});
    }
  };
#define KVANT_CONFORMANCE_ENGINE(backend, fused, by_default) add(backend, fused, by_default);
#include "kvant/tests/conformance/engines.inc"
  if (chosen != nullptr && !names.empty()) {  // else every case would pass, on none
    std::fprintf(stderr, "KVANT_CONFORMANCE_ENGINES: there is no engine '%s'\n", names[0].c_str());
    std::abort();
  }
  return engines;
}

absl::StatusOr<Prepared> Prepare(const Case& c) {
  Prepared prepared;
  KVANT_ASSIGN_OR_RETURN(prepared.graph, BuildCase(c));
  KVANT_ASSIGN_OR_RETURN(std::vector<Partition> found, PartitionGraph(prepared.graph.graph));
  if (found.size() != 1 || found[0].kind() != Partition::Kind::kAttention) {
    return absl::InternalError(absl::StrCat(
        found.size(), " partitions, not one of attention: ",
        absl::StrJoin(found, "; ",
                      [](std::string* out, const Partition& p) { out->append(p.pattern()); }),
        ". ", absl::StrJoin(MissesOf(found), " ")));
  }
  prepared.partition = std::move(found[0]);
  for (const CaseInput& input : prepared.graph.inputs) {
    const LogicalTensor& tensor = prepared.graph.graph.tensor(input.id);
    prepared.inputs.emplace(input.id, FilledBuffer(tensor, input.fill));
  }
  return prepared;
}

absl::StatusOr<Outcome> RunOn(const std::string& backend, const Prepared& prepared,
                              const Buffers& inputs, int threads) {
  KVANT_ASSIGN_OR_RETURN(const Engine engine, EngineFor(backend, threads));
  Outcome outcome;
  KVANT_ASSIGN_OR_RETURN(outcome.compiled, engine.Compile(prepared.partition));
  const Partition& partition = outcome.compiled.partition();
  DeviceCopies copies(engine.shared_memory());
  std::vector<ConstTensor> in;
  for (const TensorId id : partition.inputs()) {
    const auto found = inputs.find(id);
    if (found == inputs.end()) return absl::InternalError(absl::StrCat("no data for tensor ", id));
    const bool on_host = partition.ops().tensor(id).property == Property::kHostScalar;
    const void* data = found->second.data();
    if (!on_host) {
      KVANT_ASSIGN_OR_RETURN(data, copies.Place(found->second));
    }
    in.emplace_back(data, found->second.bytes());
  }
  std::vector<Tensor> out;
  outcome.outputs.reserve(partition.outputs().size());
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    const auto bytes = static_cast<size_t>(partition.output(static_cast<int>(i)).memory_bytes());
    TestBuffer& buffer = outcome.outputs.emplace_back(bytes);
    KVANT_ASSIGN_OR_RETURN(void* data, copies.PlaceOutput(buffer));
    out.push_back({data, buffer.bytes()});
  }
  // Where scratch may hold anything, all of it is NaN.
  TestBuffer scratch(outcome.compiled.scratch_bytes());
  absl::Span<std::byte> lent;
  if (!outcome.compiled.keeps_scratch()) {
    KVANT_ASSIGN_OR_RETURN(void* data, copies.PlaceOutput(scratch));
    lent = {static_cast<std::byte*>(data), scratch.bytes()};
  }
  KVANT_RETURN_IF_ERROR(outcome.compiled.Execute(Stream(engine), in, out, lent));
  KVANT_RETURN_IF_ERROR(copies.FetchOutputs());
  if (!scratch.GuardIntact()) return absl::InternalError("wrote beyond scratch");
  return outcome;
}

std::string Judge(const Partition& partition, const std::vector<TestBuffer>& expected,
                  const std::vector<TestBuffer>& got, double rounding, bool by_point) {
  if (expected.size() != got.size()) return "different numbers of outputs";
  std::string why;
  for (size_t i = 0; i < got.size(); ++i) {
    why +=
        JudgeOutput(partition.output(static_cast<int>(i)), expected[i], got[i], rounding, by_point);
  }
  return why;
}

}  // namespace kvant::conformance
