// What KVANT_VERBOSE asks for: a line for all that is partitioned, compiled and executed.
//
//   kvant,partition,9 ops in 2 partitions,4.6 us
//   kvant,compile,fused attention: scale; cpu, cpu/avx512 online softmax, ...,5.1 us
//   kvant,execute,cpu,attention: scale,132.7 us
//
// Unset, empty or 0: nothing. Another number: to stderr. Anything else: appended to the file of
// that path. It is read when the first line might be written. Times are of the call: on a GPU, what
// executing takes is the time that it takes to put kernels onto the stream.
#ifndef KVANT_GRAPH_VERBOSE_H_
#define KVANT_GRAPH_VERBOSE_H_

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"

namespace kvant {

// Where a variable like that has lines go: null for nowhere. Open for as long as the process lives.
std::FILE* OpenVerboseFile(const char* variable);
// One line of printable text, in one call, so that lines of threads do not mix.
void WriteVerboseLine(std::FILE* file, const std::string& text);

// From its construction to Done, one event. Costs next to nothing where nothing is asked for.
class VerboseEvent {
 public:
  // kind: "partition", "compile" or "execute".
  explicit VerboseEvent(std::string_view kind);
  // Calls `describe` only where a line is written; what it gives is made one line of printable
  // text.
  void Done(absl::FunctionRef<std::string()> describe) const {
    if (on_) Write(describe());
  }

 private:
  void Write(const std::string& text) const;

  const bool on_;
  const std::string_view kind_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvant

#endif  // KVANT_GRAPH_VERBOSE_H_
