// kvant: attention graphs on the command line.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
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
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return written ? code : Fail("cannot write to standard output");
}

// What is wrong with the first word of the command line, or nothing. CLI11 says of one that is
// neither a command nor an option only that it misses a command.
std::string CheckCommand(const CLI::App& app, const std::string& word) {
  if (word.empty() || app.get_option_no_throw(word) != nullptr) return "";
  std::string message = "'" + word + "' is not a command; there are";
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    if (command->get_name() == word) return "";
    message += " " + command->get_name();
  }
  return message;
}

// CLI11 reads numbers as C does: 010 is 8, and what 64 bits do not hold becomes the nearest they
// do.
std::string CheckIntegers(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string type = option->get_type_name();
    const bool is_signed = type.starts_with("INT");
    if (!is_signed && !type.starts_with("UINT")) continue;
    const uint64_t most = is_signed ? uint64_t{std::numeric_limits<int64_t>::max()}
                                    : std::numeric_limits<uint64_t>::max();
    for (const std::string& text : option->results()) {
      const char* const end = text.data() + text.size();
      const size_t sign = is_signed && text[0] == '-' ? 1 : 0;
      uint64_t magnitude = 0;
      const auto [at, error] = std::from_chars(text.data() + sign, end, magnitude);
      const bool leading_zero = text.size() > sign + 1 && text[sign] == '0';
      if (error == std::errc() && at == end && !leading_zero && magnitude <= most) continue;
      const std::string quoted = option->get_name() + ": '" + text + "'";
      if (!is_signed && text.starts_with('-')) return quoted + " is below 0";
      return quoted + " is no decimal integer of 64 bits" +
             (leading_zero ? " without leading zeros" : "");
    }
  }
  return "";
}

int Run(int argc, char** argv) {
  CLI::App app(
      "Finds attention over a compressed KV cache in a graph, and compiles, runs, checks "
      "and times it.",
      "kvant");
  app.set_version_flag("--version", "kvant " KVANT_VERSION);
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
  for (const CLI::App* command : app.get_subcommands()) {
    if (const std::string wrong = CheckIntegers(*command); !wrong.empty()) return Fail(wrong);
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
