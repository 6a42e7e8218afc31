#include "kvant/tools/draw.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvant/graph/status.h"
#include "kvant/tools/dot.h"
#include "kvant/tools/files.h"

namespace kvant {
namespace {

bool IsInstalled(const std::string& program) {
  const char* const path = std::getenv("PATH");
  for (const std::string& folder :
       std::vector<std::string>(absl::StrSplit(std::string(path ? path : ""), ':'))) {
    if (access(absl::StrCat(folder, "/", program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

std::string ShellQuote(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

absl::Status DrawSvg(const Graph& graph, absl::Span<const Partition> partitions,
                     const std::string& path) {
  if (!IsInstalled("dot")) {
    return MakeError(ErrorKind::kUnimplemented,
                     "--svg needs Graphviz's 'dot', which is not installed (Debian package "
                     "graphviz); --dot prints the drawing as text");
  }
  const std::string dot = DrawDot(graph, partitions);
  return ReplaceFile(path, [&](const std::string& file) -> absl::Status {
    const std::string command = absl::StrCat("dot -Tsvg -o ", ShellQuote(file));
    std::FILE* const pipe = popen(command.c_str(), "w");
    if (pipe == nullptr) return absl::InternalError("cannot start 'dot'");
    // If it ends before it has read all, that is an error to say, not a signal to end by.
    const auto before = std::signal(SIGPIPE, SIG_IGN);
    const absl::Cleanup restore = [before] { std::signal(SIGPIPE, before); };
    const bool written = std::fwrite(dot.data(), 1, dot.size(), pipe) == dot.size();
    if (pclose(pipe) != 0 || !written) {
      return absl::InternalError(absl::StrCat("'dot' could not write ", path));
    }
    return absl::OkStatus();
  });
}

}  // namespace kvant
