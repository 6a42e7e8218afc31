#include "call.h"

#include <nanobind/stl/string.h>

#include <atomic>

namespace kvant_python {
namespace {

// Under the GIL.
bool engine_made = false;
std::atomic<bool> forked = false;  // read by threads of others too

}  // namespace

void Fail(kvant_status kind, const std::string& sentence) {
  const nb::object error =
      nb::module_::import_("kvant.errors").attr("make_error")(kvant_status_name(kind), sentence);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void Check(kvant_status status) {
  if (status != KVANT_OK) Fail(status, kvant_error());
}

void EngineMade() { engine_made = true; }
void Forked() { forked = engine_made; }
bool InForkedChild() { return forked; }

void CheckNotForked() {
  if (forked) Fail(KVANT_INVALID_ARGUMENTS, kForked);
}

}  // namespace kvant_python
