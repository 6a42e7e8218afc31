// The subcommands of kvant. Each adds itself to the command line and leaves what
// it will do in `action`, which main runs once the whole line is parsed.
#ifndef KVANT_TOOLS_COMMAND_H_
#define KVANT_TOOLS_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvant/backends/engine.h"
#include "kvant/graph/graph.h"
#include "kvant/patterns/partitioner.h"
#include "kvant/tools/overrides.h"

namespace kvant {

// The process's exit code, or the error to print.
using Action = std::function<absl::StatusOr<int>()>;

void AddMakeCommand(CLI::App& app, Action& action);
void AddShowCommand(CLI::App& app, Action& action);
void AddRunCommand(CLI::App& app, Action& action);
void AddCheckCommand(CLI::App& app, Action& action);
void AddBenchCommand(CLI::App& app, Action& action);
void AddPrecompileCommand(CLI::App& app, Action& action);

// What commands that read a graph take.
struct GraphArguments {
  std::string path;
  Overrides overrides;
  std::string grammar = "native";
  std::string backend = "auto";
  int threads = 0;

  // All of it, or only what the graph is and how it is partitioned.
  void AddTo(CLI::App& command);
  void AddGraphTo(CLI::App& command);
  // The graph, rewritten, its shapes inferred.
  absl::StatusOr<Graph> Load() const;
  absl::StatusOr<Engine> MakeEngine() const;
  PartitionOptions partition_options() const;
};

// A subcommand whose arguments are a struct with AddTo(CLI::App&) and
// absl::StatusOr<int> Run() const.
template <typename Arguments>
void AddCommand(CLI::App& app, Action& action, const std::string& name,
                const std::string& description) {
  CLI::App* const command = app.add_subcommand(name, description);
  const auto arguments = std::make_shared<Arguments>();
  arguments->AddTo(*command);
  command->callback([arguments, &action] { action = [arguments] { return arguments->Run(); }; });
}

}  // namespace kvant

#endif  // KVANT_TOOLS_COMMAND_H_
