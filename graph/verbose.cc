#include "kvant/graph/verbose.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "kvant/graph/status.h"

namespace kvant {
namespace {

// Null: nothing is written. Open for as long as the process lives.
std::FILE* VerboseFile() {
  static std::FILE* const file = []() -> std::FILE* {
    const char* const value = std::getenv("KVANT_VERBOSE");
    const std::string_view asked = value == nullptr ? "" : value;
    if (asked.empty() || asked == "0") return nullptr;
    if (asked == "1") return stderr;
    std::FILE* const opened = std::fopen(value, "a");
    if (opened == nullptr) {
      std::fprintf(stderr, "kvant: KVANT_VERBOSE: cannot write '%s'\n", Printable(asked).c_str());
    }
    return opened;
  }();
  return file;
}

}  // namespace

VerboseEvent::VerboseEvent(std::string_view kind) : on_(VerboseFile() != nullptr), kind_(kind) {
  if (on_) start_ = std::chrono::steady_clock::now();
}

void VerboseEvent::Write(const std::string& text) const {
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start_;
  const std::string line =
      absl::StrFormat("kvant,%s,%s,%.1f us\n", std::string(kind_), Printable(text), taken.count());
  // One call, so that lines of threads do not mix.
  std::fwrite(line.data(), 1, line.size(), VerboseFile());
  std::fflush(VerboseFile());
}

}  // namespace kvant
