// Text that says what was found.
#ifndef KVANT_TESTS_PTXEMU_TEXT_H_
#define KVANT_TESTS_PTXEMU_TEXT_H_

#include <sstream>
#include <string>

namespace kvant::ptxemu {

template <class... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace kvant::ptxemu

#endif  // KVANT_TESTS_PTXEMU_TEXT_H_
