// kvant check through oneDNN Graph's C functions: a graph goes through the ABI on random data, and
// its outputs are compared with the oracle's, and with kvant's own.
//
//   check_dnnl graph.json [--graph-library PATH] [--library PATH] [--data integer|real]
//
// Prints JSON. Without paths the functions are those that the program is preloaded and linked with.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/status.h"
#include "kvant/tools/acceptance.h"
#include "kvant/tools/command.h"
#include "kvant/tools/dnnl_replay.h"
#include "kvant/tools/graph_runner.h"
#include "kvant/tools/random_data.h"

namespace kvant {
namespace {

using Json = nlohmann::ordered_json;

BufferMap CopyOf(const BufferMap& buffers) {
  BufferMap copies;
  for (const auto& [id, buffer] : buffers) copies.emplace(id, buffer.Copy());
  return copies;
}

absl::StatusOr<double> RunOn(const std::string& backend, const Graph& graph, BufferMap& buffers) {
  KVANT_ASSIGN_OR_RETURN(Engine engine, Engine::Create(EngineOptionsFor(backend, 0)));
  KVANT_ASSIGN_OR_RETURN(const GraphRunner runner, GraphRunner::Create(graph, std::move(engine)));
  KVANT_RETURN_IF_ERROR(runner.Run(buffers));
  return runner.rounding();
}

struct Arguments {
  GraphArguments graph;
  std::string graph_library, library, data = "integer";
};

absl::StatusOr<Json> Check(const Arguments& arguments) {
  KVANT_ASSIGN_OR_RETURN(const Graph graph, arguments.graph.Load());
  KVANT_ASSIGN_OR_RETURN(const dnnl_abi::DnnlApi api,
                         dnnl_abi::LoadDnnl(arguments.graph_library, arguments.library));
  KVANT_ASSIGN_OR_RETURN(const auto engine, dnnl_abi::DnnlEngine::Create(api));
  KVANT_ASSIGN_OR_RETURN(const auto replay, dnnl_abi::DnnlReplay::Create(*engine, graph));

  const RandomDataOptions data{
      .kind = arguments.data == "real" ? DataKind::kReal : DataKind::kInteger, .seed = 1};
  const std::unique_ptr<Executor> executor = MakeSerialExecutor();
  KVANT_ASSIGN_OR_RETURN(BufferMap got, MakeRandomInputs(graph, data, *executor));
  BufferMap expected = CopyOf(got), own = CopyOf(got);
  {
    KVANT_ASSIGN_OR_RETURN(const auto binding, replay->Bind(got));
    KVANT_RETURN_IF_ERROR(replay->Run(binding));
  }
  KVANT_RETURN_IF_ERROR(RunOn("oracle", graph, expected).status());
  KVANT_ASSIGN_OR_RETURN(const double rounding, RunOn("auto", graph, own));

  Json partitions = Json::array();
  for (const auto& part : replay->parts()) {
    partitions.push_back({{"ops", part.ops}, {"supported", part.supported}});
  }
  Json outputs = Json::array();
  for (const TensorId id : graph.outputs()) {
    const Buffer &a = got.at(id), &b = own.at(id);
    const Comparison c = Compare(graph.tensor(id), expected.at(id).data(), a.data(), rounding);
    outputs.push_back({{"id", id},
                       {"passed", c.passed},
                       {"rel_l2", c.rel_l2},
                       {"max_abs", c.max_abs},
                       {"as_kvant", std::memcmp(a.data(), b.data(), b.bytes()) == 0}});
  }
  return Json{{"partitions", partitions}, {"outputs", outputs}};
}

}  // namespace
}  // namespace kvant

int main(int argc, char** argv) {
  CLI::App app("kvant check through oneDNN Graph's C functions");
  kvant::Arguments arguments;
  arguments.graph.AddGraphTo(app);
  app.add_option("--graph-library", arguments.graph_library);
  app.add_option("--library", arguments.library);
  app.add_option("--data", arguments.data)->check(CLI::IsMember({"integer", "real"}));
  CLI11_PARSE(app, argc, argv);
  const auto result = kvant::Check(arguments);
  if (!result.ok()) {
    std::puts(kvant::Json{{"error", std::string(result.status().message())}}.dump().c_str());
    return 2;
  }
  std::puts(result->dump(2).c_str());
  return 0;
}
