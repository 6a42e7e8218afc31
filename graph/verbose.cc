#include "kvant/graph/verbose.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

std::FILE* VerboseFile() {
  static std::FILE* const file = OpenVerboseFile("KVANT_VERBOSE");
  return file;
}

}  // namespace

std::FILE* OpenVerboseFile(const char* variable) {
  const char* const value = std::getenv(variable);
  const std::string_view asked = value == nullptr ? "" : value;
  if (asked.empty() || asked == "0") return nullptr;
  // Other libraries have higher levels; here they are the same.
  if (asked.find_first_not_of("0123456789") == asked.npos) return stderr;
  std::FILE* const opened = std::fopen(value, "a");
  if (opened == nullptr) {
    std::fprintf(stderr, "kvant: %s: cannot write '%s'\n", variable, Printable(asked).c_str());
  }
  return opened;
}

void WriteVerboseLine(std::FILE* file, const std::string& text) {
  const std::string line = Printable(text) + "\n";
  std::fwrite(line.data(), 1, line.size(), file);
  std::fflush(file);
}

VerboseEvent::VerboseEvent(std::string_view kind) : on_(VerboseFile() != nullptr), kind_(kind) {
  if (on_) start_ = std::chrono::steady_clock::now();
}

void VerboseEvent::Write(const std::string& text) const {
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start_;
  WriteVerboseLine(VerboseFile(),
                   absl::StrFormat("kvant,%s,%s,%.1f us", std::string(kind_), text, taken.count()));
}

}  // namespace kvant
