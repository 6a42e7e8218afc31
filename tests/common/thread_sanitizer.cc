// oneTBB is not built for the thread sanitizer, which would report oneTBB's own memory. How oneTBB
// orders the bodies that it runs, backends/tbb_executor.cc tells.
#include "kvant_test_config.h"

#ifdef KVANT_SANITIZED
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:libtbb.so\n"; }
#endif
