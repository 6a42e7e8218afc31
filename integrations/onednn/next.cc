#include "kvant/integrations/onednn/next.h"

#include <dlfcn.h>

namespace kvant::dnnl_abi {
namespace {

constexpr char kAnchor[] = "dnnl_graph_graph_create";

// Whether oneDNN is what comes next in link order. Where it is not, functions come from the library
// that was opened, all of them: two builds of oneDNN must not mix.
bool IsLinked() {
  static std::atomic<bool> linked = false;
  if (!linked && dlsym(RTLD_NEXT, kAnchor) != nullptr) linked = true;
  return linked;
}

void* OpenedLibrary() {
  static std::atomic<void*> library = nullptr;
  for (const char* name : {"libdnnl.so.3", "libdnnl.so"}) {
    if (library != nullptr) break;
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  return library;
}

}  // namespace

void* FindNext(const char* symbol) {
  if (IsLinked()) return dlsym(RTLD_NEXT, symbol);
  void* const library = OpenedLibrary();
  return library == nullptr ? nullptr : dlsym(library, symbol);
}

bool HasNext() { return FindNext(kAnchor) != nullptr; }

void* NextLibrary() {
  if (!IsLinked()) return OpenedLibrary();
  Dl_info info;
  if (dladdr(dlsym(RTLD_NEXT, kAnchor), &info) == 0) return nullptr;
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

Version NextVersion() {
  const auto version = reinterpret_cast<const Version* (*)()>(FindNext("dnnl_version"));
  return version == nullptr ? Version{} : *version();
}

}  // namespace kvant::dnnl_abi
