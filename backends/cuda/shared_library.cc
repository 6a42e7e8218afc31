#include "kvant/backends/cuda/shared_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvant/graph/status.h"

namespace kvant::cuda {

absl::StatusOr<SharedLibrary> SharedLibrary::Open(absl::Span<const std::string> names) {
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return SharedLibrary(handle, name);
    }
    const char* reason = dlerror();
    // dlerror's words mostly begin with the name.
    reasons.emplace_back(reason ? reason : absl::StrCat(name, ": no reason given"));
  }
  return MakeError(ErrorKind::kUnimplemented,
                   absl::StrCat("cannot open ", absl::StrJoin(names, " or "), " (",
                                absl::StrJoin(reasons, "; "), ")"));
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
