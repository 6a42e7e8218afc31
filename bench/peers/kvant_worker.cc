// kvant as a worker of run.py: JSON requests on standard input, one per line, and a
// JSON answer to each on standard output, {"failed": sentence} if it could not be done.
//
//   {"do": "prepare", "contestant": NAME, "graph": FILE, "inputs": SAFETENSORS, "output": FILE,
//    "beyond": bytes of buffers that are taken in turn}
//       -> {"bytes", "detail", "ms"}; FILE receives what the graph computed, raw
//   {"do": "time", "contestant": NAME, "iterations": N} -> {"ms": [N times]}
//   {"do": "read"} -> {"gb_per_s"}; the plain read bandwidth
//   {"do": "clear"} -> {}
//
// Usage: kvant_worker THREADS
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvant/graph/json.h"
#include "kvant/graph/status.h"
#include "kvant/tools/files.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/memory_speed.h"
#include "kvant/tools/overrides.h"
#include "kvant/tools/rotation.h"
#include "kvant/tools/safetensors.h"

namespace kvant {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

double MillisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The file has each input under its id, dense and packed as in memory.
absl::StatusOr<BufferMap> ReadInputs(const Graph& graph, const std::string& path) {
  KVANT_ASSIGN_OR_RETURN(const SafeTensors given, ReadSafeTensors(path));
  BufferMap inputs;
  for (TensorId id : graph.inputs()) {
    const LogicalTensor& tensor = graph.tensor(id);
    const auto it = given.find(absl::StrCat(id));
    const auto bytes = static_cast<size_t>(tensor.memory_bytes());
    if (it == given.end() || it->second.data.size() != bytes) {
      return InvalidArguments(absl::StrCat(path, " has no ", bytes, " bytes for input ", id, " (",
                                           tensor.ToString(), ")"));
    }
    Buffer buffer(bytes);
    std::memcpy(buffer.data(), it->second.data.data(), bytes);
    inputs.emplace(id, std::move(buffer));
  }
  return inputs;
}

class Contestant {
 public:
  static absl::StatusOr<Contestant> Create(const Graph& graph, const Engine& engine,
                                           const std::string& inputs_path, int64_t beyond) {
    KVANT_ASSIGN_OR_RETURN(GraphRunner runner, GraphRunner::Create(graph, engine));
    KVANT_ASSIGN_OR_RETURN(const BufferMap inputs, ReadInputs(graph, inputs_path));
    KVANT_ASSIGN_OR_RETURN(Rotation rotation,
                           MakeRotation(runner, inputs, PortBytes(graph), beyond));
    return Contestant(std::move(runner), std::move(rotation));
  }

  // One run on the next copy of the buffers, in milliseconds.
  absl::StatusOr<double> Run() {
    const auto& binding = rotation_.bindings[++runs_ % rotation_.bindings.size()];
    const Clock::time_point start = Clock::now();
    KVANT_RETURN_IF_ERROR(runner_.Run(binding));
    return MillisecondsSince(start);
  }

  // What the last run wrote as the tensor `id`.
  const Buffer& Output(TensorId id) const {
    return rotation_.buffers[runs_ % rotation_.buffers.size()]->at(id);
  }
  const GraphRunner& runner() const { return runner_; }

 private:
  Contestant(GraphRunner runner, Rotation rotation)
      : runner_(std::move(runner)), rotation_(std::move(rotation)) {}

  GraphRunner runner_;
  Rotation rotation_;
  size_t runs_ = 0;
};

class Worker {
 public:
  explicit Worker(Engine engine) : engine_(std::move(engine)) {}

  absl::StatusOr<Json> Answer(const Json& request) {
    const std::string what = request.at("do");
    if (what == "prepare") return Prepare(request);
    if (what == "time") return Time(request);
    if (what == "read") return Json{{"gb_per_s", MeasureReadGbPerSecond(engine_.executor())}};
    if (what == "clear") {
      contestants_.clear();
      return Json::object();
    }
    return InvalidArguments(absl::StrCat("no request '", what, "'"));
  }

 private:
  absl::StatusOr<Json> Prepare(const Json& request) {
    KVANT_ASSIGN_OR_RETURN(const std::string text, ReadFile(request.at("graph"), kMaxGraphBytes));
    KVANT_ASSIGN_OR_RETURN(Graph graph, GraphFromJson(text));
    KVANT_ASSIGN_OR_RETURN(graph, ApplyOverrides(graph, {}));
    KVANT_ASSIGN_OR_RETURN(
        Contestant contestant,
        Contestant::Create(graph, engine_, request.at("inputs"), request.at("beyond")));
    KVANT_ASSIGN_OR_RETURN(const double ms, contestant.Run());
    const Buffer& output = contestant.Output(graph.outputs().front());
    KVANT_RETURN_IF_ERROR(WriteFile(
        request.at("output"), {reinterpret_cast<const char*>(output.data()), output.bytes()}));
    const GraphRunner& runner = contestant.runner();
    Json answer = {{"bytes", PortBytes(graph)},
                   {"detail", absl::StrCat(runner.backends(), ": ", runner.kernels())},
                   {"ms", ms}};
    contestants_.insert_or_assign(request.at("contestant"), std::move(contestant));
    return answer;
  }

  absl::StatusOr<Json> Time(const Json& request) {
    const std::string name = request.at("contestant");
    const auto it = contestants_.find(name);
    if (it == contestants_.end()) {
      return InvalidArguments(absl::StrCat("contestant '", name, "' is not prepared"));
    }
    std::vector<double> times(request.at("iterations").get<size_t>());
    for (double& ms : times) {
      KVANT_ASSIGN_OR_RETURN(ms, it->second.Run());
    }
    return Json{{"ms", times}};
  }

  Engine engine_;
  std::map<std::string, Contestant> contestants_;
};

absl::StatusOr<int> Serve(int threads) {
  KVANT_ASSIGN_OR_RETURN(Engine engine, Engine::Create({.backends = {"cpu"}, .threads = threads}));
  Worker worker(std::move(engine));
  std::string line;
  while (std::getline(std::cin, line)) {
    Json answer;
    try {
      absl::StatusOr<Json> done = worker.Answer(Json::parse(line));
      answer =
          done.ok() ? *std::move(done) : Json{{"failed", std::string(done.status().message())}};
    } catch (const Json::exception& e) {
      answer = {{"failed", e.what()}};
    }
    std::cout << answer.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace kvant

int main(int argc, char** argv) {
  const absl::StatusOr<int> code = kvant::Serve(argc == 2 ? std::atoi(argv[1]) : 0);
  if (!code.ok()) std::cerr << "kvant_worker: " << code.status() << "\n";
  return code.ok() ? *code : 1;
}
