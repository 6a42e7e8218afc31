// A table in a page of docs/ that is made from the sources: between the lines
// "<!-- table: begin -->" and "<!-- table: end -->".
#ifndef KVANT_TESTS_COMMON_DOC_TABLE_H_
#define KVANT_TESTS_COMMON_DOC_TABLE_H_

#include <string>

namespace kvant {

// Expects that docs/`page` holds `table`; with KVANT_UPDATE_DOCS=1, writes it there.
void ExpectDocTable(const std::string& page, const std::string& table);

}  // namespace kvant

#endif  // KVANT_TESTS_COMMON_DOC_TABLE_H_
