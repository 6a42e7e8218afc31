// kvant check: a backend against the oracle on random data.
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvant/graph/status.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/command.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/progress.h"
#include "kvant/tools/random_data.h"

namespace kvant {
namespace {

using Json = nlohmann::ordered_json;

struct OutputResult {
  TensorId id = 0;
  Comparison comparison;
};

void Print(const Graph& graph, const GraphRunner& runner,
           const std::vector<OutputResult>& outputs) {
  std::printf("%zu partition(s) on %s: %s\n", runner.partitions().size(), runner.backends().c_str(),
              runner.kernels().c_str());
  for (const auto& [id, c] : outputs) {
    absl::PrintF("output %d %s: %s, max abs %.3g, rel l2 %.3g, %d of %d points off%s\n", id,
                 graph.tensor(id).ToString(), c.passed ? "passed" : "FAILED", c.max_abs, c.rel_l2,
                 c.failing, c.total,
                 c.not_finite == 0
                     ? ""
                     : absl::StrCat(", ", c.not_finite, " of them infinite or NaN in one result"));
  }
}

Json ToJson(const GraphRunner& runner, const std::vector<OutputResult>& outputs, bool passed) {
  Json json = {{"partitions", runner.partitions().size()},
               {"backend", runner.backends()},
               {"kernel", runner.kernels()},
               {"outputs", Json::array()}};
  for (const auto& [id, c] : outputs) {
    json["outputs"].push_back({{"id", id},
                               {"max_abs", c.max_abs},
                               {"rel_l2", c.rel_l2},
                               {"failing", c.failing},
                               {"not_finite", c.not_finite},
                               {"passed", c.passed}});
  }
  json["passed"] = passed;
  return json;
}

struct CheckArguments {
  GraphArguments graph_arguments;
  uint64_t seed = 1;
  std::string data = "integer";
  bool json = false;

  void AddTo(CLI::App& command) {
    graph_arguments.AddTo(command);
    command.add_option("--seed", seed, "Of the random data")->capture_default_str();
    command
        .add_option("--data", data,
                    "integer: small whole numbers, as benchdnn fills; real: values whose means "
                    "differ per head, token and channel")
        ->check(CLI::IsMember({"integer", "real"}))
        ->capture_default_str();
    command.add_flag("--json", json, "Print JSON");
  }

  absl::StatusOr<int> Run() const {
    KVANT_ASSIGN_OR_RETURN(const Graph graph, graph_arguments.Load());
    KVANT_ASSIGN_OR_RETURN(Engine engine, graph_arguments.MakeEngine());
    const PartitionOptions partitioning = graph_arguments.partition_options();
    KVANT_ASSIGN_OR_RETURN(const GraphRunner runner,
                           GraphRunner::Create(graph, std::move(engine), partitioning));
    KVANT_ASSIGN_OR_RETURN(Engine oracle_engine,
                           Engine::Create(EngineOptionsFor("oracle", graph_arguments.threads)));
    KVANT_ASSIGN_OR_RETURN(const GraphRunner oracle,
                           GraphRunner::Create(graph, std::move(oracle_engine), partitioning));

    auto progress = std::make_unique<Progress>("making random data");
    const RandomDataOptions options{.kind = data == "real" ? DataKind::kReal : DataKind::kInteger,
                                    .seed = seed};
    KVANT_ASSIGN_OR_RETURN(BufferMap got,
                           MakeRandomInputs(graph, options, runner.engine().executor()));
    BufferMap expected;
    for (const auto& [id, buffer] : got) expected.emplace(id, buffer.Copy());
    progress.reset();
    progress = std::make_unique<Progress>("running " + runner.backends());
    KVANT_RETURN_IF_ERROR(runner.Run(got));
    progress.reset();
    progress = std::make_unique<Progress>("running the oracle");
    KVANT_RETURN_IF_ERROR(oracle.Run(expected));
    progress.reset();

    progress = std::make_unique<Progress>("comparing");
    std::vector<OutputResult> outputs;
    bool passed = true;
    for (TensorId id : graph.outputs()) {
      if (graph.FindTensor(id)->producer.op == Graph::kNoOp) continue;
      outputs.push_back({id, Compare(graph.tensor(id), expected.at(id).data(), got.at(id).data(),
                                     runner.rounding())});
      passed = passed && outputs.back().comparison.passed;
    }
    progress.reset();
    if (json) {
      std::puts(ToJson(runner, outputs, passed).dump(2).c_str());
    } else {
      Print(graph, runner, outputs);
    }
    return passed ? 0 : 1;
  }
};

}  // namespace

void AddCheckCommand(CLI::App& app, Action& action) {
  AddCommand<CheckArguments>(app, action, "check",
                             "Compare a backend with the oracle on random data, by benchdnn's "
                             "rule; exits with 1 when they differ");
}

}  // namespace kvant
