// kvant._core: the C ABI (kvant_c.h) for the Python package, which gives it names and defaults.
#include "module.h"

#include <nanobind/nanobind.h>

#include "call.h"

namespace kvant_python {

NB_MODULE(_core, m) {
  // Engines live in the package's globals until the process ends.
  nb::set_leak_warnings(false);
  if (kvant_abi_version() != KVANT_ABI_VERSION) {
    throw nb::import_error("kvant._core was built for another version of libkvant.so");
  }
  m.def("version", [] { return kvant_version(); });
  m.def("type_bits", [](const char* name) { return kvant_type_bits(kvant_type_from_name(name)); });
  m.def("after_fork", &Forked);
  m.def("check_not_forked", &CheckNotForked);
  BindGraphs(m);
  BindCompiled(m);
  BindCaches(m);
  BindJax(m);
}

}  // namespace kvant_python
