#include "kvant/backends/cuda/runtime/shared_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {
namespace {

// The loader's words for why `name` did not open, without what the sentence around them says.
std::string Reason(const std::string& name) {
  const char* words = dlerror();
  std::string_view reason = words != nullptr ? words : "no reason given";
  for (const std::string& start : {name + ": ", std::string("cannot open shared object file: ")}) {
    if (reason.starts_with(start)) reason.remove_prefix(start.size());
  }
  return std::string(reason);
}

}  // namespace

absl::StatusOr<SharedLibrary> SharedLibrary::Open(absl::Span<const std::string> names) {
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return SharedLibrary(handle, name);
    }
    reasons.push_back(absl::StrCat(name, " (", Reason(name), ")"));
  }
  return MakeError(ErrorKind::kUnimplemented, "cannot open ", absl::StrJoin(reasons, ", "));
}

void* SharedLibrary::Symbol(const char* name) const { return dlsym(handle_, name); }

std::string FileOfSymbol(const void* symbol) {
  Dl_info info;
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return "";
  char* resolved = realpath(info.dli_fname, nullptr);
  if (resolved == nullptr) return "";
  std::string path = resolved;
  std::free(resolved);
  return path;
}

std::vector<std::string> NamesOrOverride(const char* variable, std::vector<std::string> names) {
  const char* value = std::getenv(variable);
  if (value != nullptr && *value != '\0') return {value};
  return names;
}

}  // namespace kvant::cuda
