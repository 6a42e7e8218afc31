// Queries, keys and values of magnitudes that are hard on products: see Case::Magnitudes.
#ifndef KVANT_TESTS_CONFORMANCE_HOSTILE_INPUTS_H_
#define KVANT_TESTS_CONFORMANCE_HOSTILE_INPUTS_H_

#include <cstddef>

#include "kvant/tests/conformance/cases.h"
#include "kvant/tests/conformance/data.h"

namespace kvant::conformance {

// Which dims of a tensor of K or V are tokens and channels.
struct KvAxes {
  bool keys = false;
  size_t token = 0, channel = 0;
};

Fill HostileQuery(const Case& c, Fill fill);
// Of floats, or codes that are zero at `zero`.
Fill HostileData(const Case& c, const KvAxes& axes, bool quantized, double zero, Fill fill);
// `by_token`: each token has scales of its own.
Fill HostileScales(const Case& c, const KvAxes& axes, bool by_token, Fill fill);

}  // namespace kvant::conformance

#endif  // KVANT_TESTS_CONFORMANCE_HOSTILE_INPUTS_H_
