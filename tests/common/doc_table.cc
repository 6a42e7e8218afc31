#include "kvant/tests/common/doc_table.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"
#include "kvant_test_config.h"

namespace kvant {

void ExpectDocTable(const std::string& page, const std::string& table) {
  const std::string begin_line = "<!-- table: begin -->\n", end_line = "<!-- table: end -->\n";
  const std::string path = KVANT_SOURCE_DIR "/docs/" + page;
  std::stringstream file;
  file << std::ifstream(path).rdbuf();
  const std::string text = file.str();
  const size_t begin = text.find(begin_line), end = text.find(end_line);
  ASSERT_NE(begin, std::string::npos) << path;
  ASSERT_NE(end, std::string::npos) << path;
  const size_t at = begin + begin_line.size();
  if (std::getenv("KVANT_UPDATE_DOCS")) {
    std::ofstream(path) << text.substr(0, at) << table << text.substr(end);
    return;
  }
  EXPECT_EQ(text.substr(at, end - at), table);
}

}  // namespace kvant
