// A library opened at run time, so that nothing needs it to build or to start.
#ifndef KVANT_BACKENDS_CUDA_RUNTIME_SHARED_LIBRARY_H_
#define KVANT_BACKENDS_CUDA_RUNTIME_SHARED_LIBRARY_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvant::cuda {

// Cheap to copy. Never closed again: what is opened here starts threads of its own.
class SharedLibrary {
 public:
  // The first of `names`, file names that the loader searches for or paths, that opens.
  // kUnimplemented with all names and the loader's reasons.
  static absl::StatusOr<SharedLibrary> Open(absl::Span<const std::string> names);

  // Null where the library has no such symbol.
  void* Symbol(const char* name) const;
  // The name that opened.
  const std::string& name() const { return name_; }

 private:
  SharedLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}

  void* handle_;
  std::string name_;
};

// The path of the file that `symbol` was loaded from, links resolved; empty if it has none.
std::string FileOfSymbol(const void* symbol);

// `names`, or what the environment variable has instead, alone, if it is set and not empty.
std::vector<std::string> NamesOrOverride(const char* variable, std::vector<std::string> names);

}  // namespace kvant::cuda

#endif  // KVANT_BACKENDS_CUDA_RUNTIME_SHARED_LIBRARY_H_
