#include "kvant/bench/gpu/gpu_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "kvant/graph/status.h"
#include "kvant/tools/tensor_walk.h"

namespace kvant {
namespace {

using Clock = std::chrono::steady_clock;

// A share of the device's memory that copies may take; peers need some too.
constexpr double kMemoryShare = 0.2;
// Multiplications of a slice, more than which the oracle is not asked.
constexpr double kMostProducts = 5e8;

bool OfKeysOrValues(const std::string& name) {
  return name == "k" || name == "v" || absl::StartsWith(name, "k_") || absl::StartsWith(name, "v_");
}

Random KindOf(DataType type) {
  switch (type) {
    case kF32:
      return Random::kF32;
    case kF16:
      return Random::kF16;
    case kBF16:
      return Random::kBF16;
    default:
      return Random::kBytes;
  }
}

// So that dequantized keys and values are some +-1, as normalised queries and keys are.
DeviceData::Range RangeFor(const LogicalTensor& input, const std::optional<NumberFormat>& format) {
  const bool scales = absl::EndsWith(input.name, "_scales");
  const bool zero_points = absl::EndsWith(input.name, "_zps");
  if (!scales && !zero_points) {
    if (IsInteger(input.type)) return {Random::kBits, 0, 0};
    return {KindOf(input.type), -1.7f, 1.7f};
  }
  const auto low = static_cast<float>(LowestOf(format->type));
  const auto high = static_cast<float>(HighestOf(format->type));
  const float step = 3 / (high - low);
  const float middle = (low + high) / 2;
  if (scales) return {KindOf(input.type), 0.7f * step, 1.3f * step};
  if (IsFloat(input.type)) {
    const float shift = middle * step;
    return {KindOf(input.type), shift - 0.3f, shift + 0.3f};
  }
  const float around = (high - low) / 8;
  return {Random::kBytes, std::floor(middle - around), std::ceil(middle + around)};
}

double RelativeL2(const LogicalTensor& tensor, const std::byte* expected, const std::byte* got) {
  double error = 0, total = 0;
  ForEachElement(tensor, [&](int64_t, int64_t offset, const Dims&) {
    const double want = LoadElement(tensor.type, expected, offset);
    const double have = LoadElement(tensor.type, got, offset);
    error += (have - want) * (have - want);
    total += want * want;
  });
  return total > 0 ? std::sqrt(error / total) : 1;  // no data: nothing is shown
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuCase>> GpuCase::Create(const Engine& engine,
                                                         const DeviceData& data,
                                                         const CudaStream& stream,
                                                         const GpuCaseOptions& options) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, MakeAttentionGraph(options.graph));
  KVANT_ASSIGN_OR_RETURN(GraphRunner runner, GraphRunner::Create(graph, engine));
  if (runner.partitions().size() != 1) return absl::InternalError("more than one partition");
  auto made = std::unique_ptr<GpuCase>(new GpuCase(options, std::move(runner), stream));
  const Partition& partition = made->compiled().partition();
  double used = 1;  // of the capacity
  if (!options.lengths.empty()) {
    used = std::accumulate(options.lengths.begin(), options.lengths.end(), 0.0) /
           static_cast<double>(options.graph.batch * options.graph.kv_len);
  }
  double bytes = 0;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    const LogicalTensor& input = partition.input(static_cast<int>(i));
    if (OfKeysOrValues(input.name)) bytes += static_cast<double>(input.memory_bytes());
  }
  made->kv_bytes_ = std::llround(bytes * used);

  const cuda::DeviceProperties& device = data.launcher().properties();
  const double beyond_cache = std::ceil(4 * static_cast<double>(device.l2_bytes) / bytes) + 1;
  const double affordable =
      std::max(1.0, kMemoryShare * static_cast<double>(device.memory_bytes) / bytes);
  const auto copies = static_cast<uint32_t>(std::max(std::min(beyond_cache, affordable), 1.0));
  for (uint32_t i = 0; i < copies; ++i) {
    KVANT_ASSIGN_OR_RETURN(Copy copy, made->MakeCopy(data, i + 1));
    made->copies_.push_back(std::move(copy));
  }
  made->calls_ = std::max(options.calls, static_cast<int>(copies));
  // The first takes scratch, which capturing does not permit.
  KVANT_RETURN_IF_ERROR(made->Execute(0));
  KVANT_RETURN_IF_ERROR(stream.Synchronize());
  KVANT_ASSIGN_OR_RETURN(CudaGraph captured, stream.Capture([&]() -> absl::Status {
    for (int call = 0; call < made->calls_; ++call) {
      KVANT_RETURN_IF_ERROR(made->Execute(static_cast<size_t>(call) % copies));
    }
    return absl::OkStatus();
  }));
  made->captured_.emplace(std::move(captured));
  return made;
}

GpuCase::~GpuCase() {
  captured_.reset();
  for (void* memory : memory_) runner_.engine().memory().Free(memory);
}

absl::StatusOr<GpuCase::Copy> GpuCase::MakeCopy(const DeviceData& data, uint32_t seed) {
  DeviceMemory& memory = runner_.engine().memory();
  const Partition& partition = compiled().partition();
  const auto allocate = [&](const LogicalTensor& port) -> absl::StatusOr<void*> {
    KVANT_ASSIGN_OR_RETURN(void* data, memory.Allocate(static_cast<size_t>(port.memory_bytes())));
    memory_.push_back(data);
    return data;
  };
  Copy copy;
  for (size_t i = 0; i < partition.inputs().size(); ++i) {
    const LogicalTensor& port = partition.input(static_cast<int>(i));
    const auto bytes = static_cast<size_t>(port.memory_bytes());
    if (port.property == Property::kHostScalar) {
      // The shift of a bottom-right mask, of which the mask's graph has no other.
      copy.inputs.emplace_back(port.name == "kv_len" ? &kv_len_ : &q_len_, sizeof(int32_t));
      continue;
    }
    KVANT_ASSIGN_OR_RETURN(void* to, allocate(port));
    copy.inputs.emplace_back(to, bytes);
    if (port.name == "kv_lengths") {
      KVANT_RETURN_IF_ERROR(memory.CopyFromHost(to, options_.lengths.data(), bytes));
      continue;
    }
    const bool keys = absl::StartsWith(port.name, "k");
    const DeviceData::Range range = RangeFor(port, keys ? options_.graph.k : options_.graph.v);
    const uint32_t own = seed * 64 + static_cast<uint32_t>(i);
    KVANT_RETURN_IF_ERROR(data.Fill(to, bytes, own, range, stream_.native()));
  }
  for (size_t i = 0; i < partition.outputs().size(); ++i) {
    const LogicalTensor& port = partition.output(static_cast<int>(i));
    KVANT_ASSIGN_OR_RETURN(void* to, allocate(port));
    copy.outputs.push_back({to, static_cast<size_t>(port.memory_bytes())});
  }
  return copy;
}

absl::Status GpuCase::Execute(size_t copy) const {
  return compiled().Execute(Stream(runner_.engine(), stream_.native()), copies_[copy].inputs,
                            copies_[copy].outputs);
}

absl::StatusOr<double> GpuCase::Microseconds() const {
  KVANT_ASSIGN_OR_RETURN(const double all,
                         stream_.Time([&] { return stream_.Launch(*captured_); }));
  return all / calls_;
}

absl::StatusOr<double> GpuCase::HostMicroseconds() const {
  constexpr int kBatches = 15, kCalls = 100;  // fewer than a stream queues before it blocks
  std::vector<double> times;
  for (int batch = 0; batch < kBatches; ++batch) {
    KVANT_RETURN_IF_ERROR(stream_.Synchronize());
    const Clock::time_point start = Clock::now();
    for (size_t call = 0; call < kCalls; ++call) {
      KVANT_RETURN_IF_ERROR(Execute(call % copies_.size()));
    }
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                    kCalls);
  }
  KVANT_RETURN_IF_ERROR(stream_.Synchronize());
  std::nth_element(times.begin(), times.begin() + kBatches / 2, times.end());
  return times[kBatches / 2];
}

// The part of a tensor of [sequences, heads, ..] that belongs to the first key head of a sequence.
absl::StatusOr<Buffer> GpuCase::FetchSlice(const void* from, size_t bytes, size_t slice_bytes,
                                           int64_t sequence) const {
  const size_t per_sequence = bytes / static_cast<size_t>(options_.graph.batch);
  const bool whole = bytes == slice_bytes;  // the same for all sequences
  const size_t offset = whole ? 0 : static_cast<size_t>(sequence) * per_sequence;
  Buffer slice(slice_bytes);
  KVANT_RETURN_IF_ERROR(runner_.engine().memory().CopyToHost(
      slice.data(), static_cast<const std::byte*>(from) + offset, slice_bytes));
  return slice;
}

absl::StatusOr<std::optional<double>> GpuCase::Error() const {
  AttentionGraphOptions one = options_.graph;
  if (one.kv_heads == 0) one.kv_heads = one.heads;
  one.heads /= one.kv_heads;
  one.kv_heads = one.batch = 1;
  const double products =
      static_cast<double>(one.heads * one.q_len * one.kv_len) * static_cast<double>(one.head_size);
  if (products > kMostProducts) return std::nullopt;
  KVANT_ASSIGN_OR_RETURN(const Graph graph, MakeAttentionGraph(one));
  KVANT_ASSIGN_OR_RETURN(const Engine engine, Engine::Create(EngineOptionsFor("oracle", 0)));
  KVANT_ASSIGN_OR_RETURN(const GraphRunner oracle, GraphRunner::Create(graph, engine));
  const Partition& small = oracle.partitions()[0].partition();
  const int64_t sequence = options_.graph.batch - 1;
  const Copy& last = copies_[static_cast<size_t>(calls_ - 1) % copies_.size()];
  BufferMap buffers;
  for (size_t i = 0; i < small.inputs().size(); ++i) {
    const LogicalTensor& port = small.input(static_cast<int>(i));
    const auto slice = static_cast<size_t>(port.memory_bytes());
    Buffer buffer(slice);
    if (port.property == Property::kHostScalar) {
      std::memcpy(buffer.data(), last.inputs[i].data, slice);
    } else {
      KVANT_ASSIGN_OR_RETURN(
          buffer, FetchSlice(last.inputs[i].data, last.inputs[i].bytes, slice, sequence));
    }
    buffers.emplace(small.inputs()[i], std::move(buffer));
  }
  KVANT_RETURN_IF_ERROR(oracle.Run(buffers));
  const LogicalTensor& output = small.output(0);
  KVANT_ASSIGN_OR_RETURN(const Buffer got,
                         FetchSlice(last.outputs[0].data, last.outputs[0].bytes,
                                    static_cast<size_t>(output.memory_bytes()), sequence));
  return RelativeL2(output, buffers.at(small.outputs()[0]).data(), got.data());
}

}  // namespace kvant
