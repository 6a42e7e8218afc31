// What a process leaves behind: a line of JSON, and which instructions were executed.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <type_traits>

#include "kvant/tests/ptxemu/driver.h"
#include "kvant/tests/ptxemu/text.h"

namespace kvant::ptxemu {
namespace {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += static_cast<unsigned char>(c) >= 32 ? c : ' ';
    }
  }
  return out + '"';
}

template <class Map>
std::string Object(const Map& map) {
  std::string out;
  for (const auto& [key, value] : map) {
    out += StrCat(out.empty() ? "" : ", ", Quoted(key), ": ");
    if constexpr (std::is_convertible_v<decltype(value), std::string>) {
      out += Quoted(value);
    } else {
      out += StrCat(value);
    }
  }
  return StrCat("{", out, "}");
}

std::string Array(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += StrCat(out.empty() ? "" : ", ", Quoted(text));
  return StrCat("[", out, "]");
}

// HASH_NAME.cov: a line for each instruction: whether it was executed, its line, its text. What
// other processes executed of the same PTX stays.
void WriteCoverage(const std::string& folder, const Kernel& kernel) {
  std::string all;
  for (const Instruction& i : kernel.program) all.append(i.text->text).append("\n");
  const std::string path =
      StrCat(folder, "/", std::hex, std::hash<std::string>()(all), "_", kernel.name, ".cov");
  std::vector<bool> hit(kernel.program.size());
  for (size_t n = 0; n < hit.size(); ++n) hit[n] = kernel.executed[n] != 0;
  {
    std::ifstream before(path);
    std::string line;
    for (size_t n = 0; n < hit.size() && std::getline(before, line); ++n) {
      hit[n] = hit[n] || line[0] == '1';
    }
  }
  std::ofstream out(path);
  for (size_t n = 0; n < hit.size(); ++n) {
    std::string text = kernel.program[n].text->text;
    std::replace(text.begin(), text.end(), '\n', ' ');
    out << (hit[n] ? 1 : 0) << " " << kernel.program[n].text->line << " " << text << "\n";
  }
}

void WriteAllCoverage(const std::string& folder) {
  for (const auto& module : TheState().modules) {
    for (const auto& [name, function] : module->functions) {
      if (!function->kernel->executed.empty()) WriteCoverage(folder, *function->kernel);
    }
  }
}

void NoteWhatIsLeft() {
  State& s = TheState();
  const auto note = [&](const char* what, uint64_t count) {
    if (count > 0) s.notes[what] += count;
  };
  note("allocations not freed at exit", s.memory.live());
  const auto loaded = std::count_if(s.modules.begin(), s.modules.end(),
                                    [](const auto& module) { return !module->unloaded; });
  note("modules not unloaded at exit", static_cast<uint64_t>(loaded));
  note("context still retained at exit", static_cast<uint64_t>(s.retained));
}

void WriteLog() {
  if (const char* folder = std::getenv("PTXEMU_COVERAGE")) WriteAllCoverage(folder);
  const char* path = std::getenv("PTXEMU_LOG");
  if (path == nullptr) return;
  NoteWhatIsLeft();
  const State& s = TheState();
  const Counters& c = GlobalCounters();
  // One write, since other processes may append to the same file.
  const std::string line =
      StrCat("{\"arch\": ", Quoted(Device().name), ", \"launches\": ", c.launches,
             ", \"blocks\": ", c.blocks, ", \"instructions\": ", c.instructions,
             ", \"kernels\": ", Object(c.kernels), ", \"opcodes\": ", Object(c.opcodes),
             ", \"contracted\": ", Object(c.contracted), ", \"calls\": ", Object(s.calls),
             ", \"notes\": ", Object(s.notes), ", \"occupancy\": ", Object(s.occupancy),
             ", \"faults\": ", Array(s.faults), "}\n");
  std::ofstream(path, std::ios::app).write(line.data(), static_cast<std::streamsize>(line.size()));
}

}  // namespace

void WriteLogAtExit() { std::atexit(WriteLog); }

}  // namespace kvant::ptxemu
