// The parts of kvant._core.
#ifndef KVANT_PYTHON_CORE_MODULE_H_
#define KVANT_PYTHON_CORE_MODULE_H_

#include <nanobind/nanobind.h>

namespace kvant_python {

void BindGraphs(nanobind::module_& m);
void BindCompiled(nanobind::module_& m);
void BindCaches(nanobind::module_& m);
void BindJax(nanobind::module_& m);

}  // namespace kvant_python

#endif  // KVANT_PYTHON_CORE_MODULE_H_
