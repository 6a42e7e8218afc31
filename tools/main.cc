// kvant: attention graphs on the command line.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "kvant/backends/cuda_simt.h"
#include "kvant/tools/command.h"

namespace {

// Whatever is wrong with the command line or its files; 1 is a failed check.
constexpr int kErrorCode = 2;

int Fail(const std::string& message) {
  std::fprintf(stderr, "kvant: %s\n", message.c_str());
  return kErrorCode;
}

// The code, if all that was printed could be written.
int Written(int code) {
  return std::fflush(stdout) == 0 ? code : Fail("cannot write to standard output");
}

// What is wrong with the first word of the command line, or nothing. CLI11 says of one that is no
// command only that it misses one.
std::string CheckCommand(const CLI::App& app, const std::string& word) {
  if (word.empty() || word[0] == '-') return "";
  std::string message = "'" + word + "' is not a command; there are";
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    if (command->get_name() == word) return "";
    message += " " + command->get_name();
  }
  return message;
}

int Run(int argc, char** argv) {
  CLI::App app(
      "Finds attention over a compressed KV cache in a graph, and compiles, runs, checks "
      "and times it.",
      "kvant");
  app.require_subcommand(1);
  kvant::EnableCudaSimt();
  kvant::Action action;
  kvant::AddMakeCommand(app, action);
  kvant::AddShowCommand(app, action);
  kvant::AddRunCommand(app, action);
  kvant::AddCheckCommand(app, action);
  kvant::AddBenchCommand(app, action);
  kvant::AddPrecompileCommand(app, action);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("kvant: ") + error.what() + "\nRun with --help for more information.\n";
  });
  if (const std::string wrong = CheckCommand(app, argc > 1 ? argv[1] : ""); !wrong.empty()) {
    return Fail(wrong);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? Written(0) : kErrorCode;
  }
  const absl::StatusOr<int> code = action();
  return code.ok() ? Written(*code) : Fail(std::string(code.status().message()));
}

}  // namespace

int main(int argc, char** argv) {
  // Nothing of kvant throws, but a graph may ask for more memory than there is.
  try {
    return Run(argc, argv);
  } catch (const std::bad_alloc&) {
    return Fail("not enough memory for this graph");
  } catch (const std::exception& error) {
    return Fail(error.what());
  }
}
