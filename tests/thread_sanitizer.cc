// What the thread sanitizer is not to report: oneTBB comes without it, so it does not see how that
// orders its own memory. Of the bodies that oneTBB runs, it is told (backends/tbb_executor.cc).
#include "kvant_test_config.h"

#ifdef KVANT_SANITIZED
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:libtbb.so\n"; }
#endif
