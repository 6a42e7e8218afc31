// The errors of a launch, each pair of source lines once.
#ifndef KVANT_KERNELS_DEVICE_SIMT_ERRORS_H_
#define KVANT_KERNELS_DEVICE_SIMT_ERRORS_H_

#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvant/kernels/device/simt.h"
#include "kvant/kernels/device/simt_calls.h"

namespace kvant::simt {

// "file:line".
inline std::string ToString(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

// Who does something where.
struct Actor {
  int64_t block = 0;
  int thread = 0;
  Site site;
};

class Errors {
 public:
  // Whether this is the first error of its kind between these two lines, and so worth a message.
  bool IsNew(Check check, Site site, Site other = {}) {
    return seen_.size() < kMost &&
           seen_.emplace(check, site.file, site.line, other.file, other.line).second;
  }
  void Add(Check check, std::string message) { errors_.push_back({check, std::move(message)}); }
  // "thread 3 of block 0 <what> at file:line".
  void Add(Check check, const Actor& actor, const std::string& what) {
    if (!IsNew(check, actor.site)) return;
    Add(check, Describe(actor) + " " + what + " at " + ToString(actor.site));
  }
  static std::string Describe(const Actor& actor) {
    return "thread " + std::to_string(actor.thread) + " of block " + std::to_string(actor.block);
  }
  std::vector<Error> Take() { return std::move(errors_); }

 private:
  static constexpr size_t kMost = 64;
  std::set<std::tuple<Check, const char*, int, const char*, int>> seen_;
  std::vector<Error> errors_;
};

}  // namespace kvant::simt

#endif  // KVANT_KERNELS_DEVICE_SIMT_ERRORS_H_
