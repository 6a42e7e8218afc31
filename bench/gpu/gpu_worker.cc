// kvant on a GPU, as a worker of bench.py: JSON requests on standard input, one per line, and a
// JSON answer to each on standard output, {"failed": sentence} if it could not be done.
//
//   {"do": "device"} -> {"name", "arch", "multiprocessors", "l2_bytes", "memory_bytes", "cuda"}
//   {"do": "prepare", "name", "case": CASE} -> {"kv_bytes", "calls", "copies", "kernel", "error"}
//       CASE: batch, heads, kv_heads, q_len, kv_len, head_size, k, v, dtype, causal, lengths
//   {"do": "time", "name", "replays"} -> {"us": [per call, of each replay]}
//   {"do": "copy", "replays"}, {"do": "read", "replays"} -> {"gb_per_s": [..]}
//       copy: bytes read and written; read: a reduction
//   {"do": "host", "name"} -> {"us"}; what Execute costs the host
//   {"do": "compile", "case": CASE, "folder"} -> {"cold_ms", "disk_ms", "memory_ms"}
//       with FOLDER, which is empty, for compiled kernels
//   {"do": "clear"} -> {}
//
// Without a GPU it says why and ends with 2.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvant/backends/cuda/runtime/driver.h"
#include "kvant/backends/cuda/runtime/driver_launcher.h"
#include "kvant/bench/gpu/device_data.h"
#include "kvant/bench/gpu/gpu_case.h"
#include "kvant/graph/status.h"
#include "kvant/tools/cuda_stream.h"

namespace kvant {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kNoGpu = 2;
// Of one buffer that is copied or read: so many times the second-level cache.
constexpr size_t kCopiedCaches = 16;

absl::StatusOr<GpuCaseOptions> OptionsFrom(const Json& json) {
  GpuCaseOptions options;
  AttentionGraphOptions& graph = options.graph;
  graph.batch = json.at("batch");
  graph.heads = json.at("heads");
  graph.kv_heads = json.at("kv_heads");
  graph.q_len = json.at("q_len");
  graph.kv_len = json.at("kv_len");
  graph.head_size = json.at("head_size");
  graph.dtype = DataTypeFromName(json.at("dtype").get<std::string>()).value_or(kF16);
  KVANT_ASSIGN_OR_RETURN(graph.k, ParseNumberFormat(json.at("k").get<std::string>()));
  KVANT_ASSIGN_OR_RETURN(graph.v, ParseNumberFormat(json.at("v").get<std::string>()));
  graph.single_op = true;
  if (json.at("causal")) graph.causal = AttentionGraphOptions::Causal::kBottomRight;
  options.lengths = json.at("lengths").get<std::vector<int32_t>>();
  graph.kv_lengths = !options.lengths.empty();
  return options;
}

// Where engines that are created meanwhile keep compiled kernels.
class ScopedCacheDir {
 public:
  explicit ScopedCacheDir(const std::string& folder) {
    if (const char* before = std::getenv(kName)) before_ = before;
    setenv(kName, folder.c_str(), 1);
  }
  ~ScopedCacheDir() {
    if (before_) {
      setenv(kName, before_->c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }
  ScopedCacheDir(const ScopedCacheDir&) = delete;
  ScopedCacheDir& operator=(const ScopedCacheDir&) = delete;

 private:
  static constexpr char kName[] = "KVANT_CACHE_DIR";
  std::optional<std::string> before_;
};

class Worker {
 public:
  static absl::StatusOr<std::unique_ptr<Worker>> Create() {
    KVANT_ASSIGN_OR_RETURN(Engine engine, Engine::Create({.device = Device::kCuda}));
    KVANT_ASSIGN_OR_RETURN(std::shared_ptr<cuda::Launcher> launcher, cuda::MakeDriverLauncher(0));
    KVANT_ASSIGN_OR_RETURN(DeviceData data, DeviceData::Create(std::move(launcher)));
    KVANT_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(0));
    return std::unique_ptr<Worker>(
        new Worker(std::move(engine), std::move(data), std::move(stream)));
  }

  ~Worker() {
    for (void* memory : copied_) engine_.memory().Free(memory);
  }

  absl::StatusOr<Json> Answer(const Json& request) {
    const std::string what = request.at("do");
    if (what == "device") return DescribeDevice();
    if (what == "prepare") return Prepare(request);
    if (what == "time") return Time(request);
    if (what == "copy") return Bandwidth(request.at("replays"), true);
    if (what == "read") return Bandwidth(request.at("replays"), false);
    if (what == "host") return HostCost(request);
    if (what == "compile") return Compile(request);
    if (what == "clear") {
      cases_.clear();
      return Json::object();
    }
    return InvalidArguments(absl::StrCat("no request '", what, "'"));
  }

 private:
  Worker(Engine engine, DeviceData data, CudaStream stream)
      : engine_(std::move(engine)), data_(std::move(data)), stream_(std::move(stream)) {}

  absl::StatusOr<Json> DescribeDevice() const {
    const cuda::DeviceProperties& device = data_.launcher().properties();
    KVANT_ASSIGN_OR_RETURN(const auto driver, cuda::Driver::Open());
    return Json{{"name", device.name},
                {"arch", device.arch()},
                {"multiprocessors", device.multiprocessors},
                {"l2_bytes", device.l2_bytes},
                {"memory_bytes", device.memory_bytes},
                {"cuda", cuda::CudaVersionToString(driver->version())}};
  }

  absl::StatusOr<Json> Prepare(const Json& request) {
    KVANT_ASSIGN_OR_RETURN(const GpuCaseOptions options, OptionsFrom(request.at("case")));
    KVANT_ASSIGN_OR_RETURN(std::unique_ptr<GpuCase> made,
                           GpuCase::Create(engine_, data_, stream_, options));
    KVANT_RETURN_IF_ERROR(made->Microseconds().status());
    KVANT_ASSIGN_OR_RETURN(const std::optional<double> error, made->Error());
    Json answer = {{"kv_bytes", made->kv_bytes()},
                   {"calls", made->calls()},
                   {"copies", made->copies()},
                   {"kernel", made->compiled().kernel()},
                   {"error", nullptr}};
    if (error) answer["error"] = *error;
    cases_.insert_or_assign(request.at("name"), std::move(made));
    return answer;
  }

  absl::StatusOr<const GpuCase*> Find(const Json& request) const {
    const auto it = cases_.find(request.at("name"));
    if (it != cases_.end()) return it->second.get();
    return InvalidArguments("a case that is not prepared");
  }

  absl::StatusOr<Json> Time(const Json& request) const {
    KVANT_ASSIGN_OR_RETURN(const GpuCase* found, Find(request));
    std::vector<double> times(request.at("replays").get<size_t>());
    for (double& us : times) {
      KVANT_ASSIGN_OR_RETURN(us, found->Microseconds());
    }
    return Json{{"us", times}};
  }

  absl::StatusOr<Json> Bandwidth(size_t replays, bool copy) {
    const size_t bytes = kCopiedCaches * data_.launcher().properties().l2_bytes;
    while (copied_.size() < 2) {
      KVANT_ASSIGN_OR_RETURN(void* memory, engine_.memory().Allocate(bytes));
      copied_.push_back(memory);
      KVANT_RETURN_IF_ERROR(data_.Fill(memory, bytes, 1, {}, stream_.native()));
    }
    std::vector<double> speeds(replays);
    for (double& gb_per_s : speeds) {
      KVANT_ASSIGN_OR_RETURN(const double us, stream_.Time([&] {
        return copy ? stream_.CopyOnDevice(copied_[0], copied_[1], bytes)
                    : data_.Read(copied_[0], bytes, stream_.native());
      }));
      gb_per_s = static_cast<double>(bytes) * (copy ? 2 : 1) / us * 1e-3;
    }
    return Json{{"gb_per_s", speeds}};
  }

  absl::StatusOr<Json> HostCost(const Json& request) const {
    KVANT_ASSIGN_OR_RETURN(const GpuCase* found, Find(request));
    KVANT_ASSIGN_OR_RETURN(const double us, found->HostMicroseconds());
    return Json{{"us", us}};
  }

  // One call each: what the first one costs is what one wants to know.
  static absl::StatusOr<Json> Compile(const Json& request) {
    KVANT_ASSIGN_OR_RETURN(const GpuCaseOptions options, OptionsFrom(request.at("case")));
    KVANT_ASSIGN_OR_RETURN(const Graph graph, MakeAttentionGraph(options.graph));
    KVANT_ASSIGN_OR_RETURN(const std::vector<Partition> partitions, PartitionGraph(graph));
    const ScopedCacheDir folder(request.at("folder").get<std::string>());
    const auto time = [&](const Engine& engine) -> absl::StatusOr<double> {
      const Clock::time_point start = Clock::now();
      KVANT_RETURN_IF_ERROR(engine.Compile(partitions.at(0)).status());
      return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    };
    Json answer;
    KVANT_ASSIGN_OR_RETURN(const Engine first, Engine::Create({.device = Device::kCuda}));
    KVANT_ASSIGN_OR_RETURN(answer["cold_ms"], time(first));
    KVANT_ASSIGN_OR_RETURN(answer["memory_ms"], time(first));
    KVANT_ASSIGN_OR_RETURN(const Engine second, Engine::Create({.device = Device::kCuda}));
    KVANT_ASSIGN_OR_RETURN(answer["disk_ms"], time(second));
    return answer;
  }

  Engine engine_;
  DeviceData data_;
  CudaStream stream_;
  std::vector<void*> copied_;
  std::map<std::string, std::unique_ptr<GpuCase>> cases_;
};

int Serve() {
  const absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create();
  if (!worker.ok()) {
    std::cerr << "kvant_gpu_worker: no GPU: " << worker.status().message() << "\n";
    return kNoGpu;
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    Json answer;
    try {
      absl::StatusOr<Json> done = (*worker)->Answer(Json::parse(line));
      answer =
          done.ok() ? *std::move(done) : Json{{"failed", std::string(done.status().message())}};
    } catch (const std::exception& e) {
      answer = {{"failed", e.what()}};
    }
    std::cout << answer.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace kvant

int main() { return kvant::Serve(); }
