// Files of any kind in and out: pipes, devices, folders, disks that are full.
#include "kvant/tools/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>

#include "kvant/tools/safetensors.h"

namespace kvant {
namespace {

using ::testing::HasSubstr;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() {
    folder_ = std::filesystem::path(::testing::TempDir()) / "kvant_files_XXXXXX";
    std::string name = folder_.string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~FilesTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  std::string Contents(const std::string& name) const {
    return ReadFile(Path(name), 1 << 20).value_or("(cannot be read)");
  }
  int FilesInFolder() const {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      files += entry.path().empty() ? 0 : 1;
    }
    return files;
  }

  std::filesystem::path folder_;
};

// No file of this process grows beyond so many bytes while it lives: a full disk.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    before_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit less{bytes, limit_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &less);
  }
  ~FileLimit() {
    setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, before_);
  }

 private:
  rlimit limit_;
  void (*before_)(int);
};

TEST_F(FilesTest, WritesAndReadsBack) {
  const std::string path = Path("a");
  ASSERT_TRUE(WriteFile(path, "first, and long").ok());
  ASSERT_TRUE(WriteFile(path, std::string_view("b\0c", 3)).ok());
  EXPECT_EQ(Contents("a"), std::string("b\0c", 3));
  EXPECT_EQ(FilesInFolder(), 1);
}

TEST_F(FilesTest, WritesInTheWorkingFolder) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  EXPECT_TRUE(WriteFile("plain", "x").ok());
  EXPECT_TRUE(WriteFile("plain", "y").ok());
  std::filesystem::current_path(before);
  EXPECT_EQ(Contents("plain"), "y");
}

TEST_F(FilesTest, KeepsTheOldFileWhenTheDiskIsFull) {
  ASSERT_TRUE(WriteFile(Path("a"), "precious").ok());
  absl::Status status;
  {
    const FileLimit limit(1000);
    status = WriteFile(Path("a"), std::string(100000, 'x'));
  }
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot write " + Path("a") + ": "));
  EXPECT_EQ(Contents("a"), "precious");
  EXPECT_EQ(FilesInFolder(), 1);
}

TEST_F(FilesTest, KeepsTheOldFileWhenItsWriterFails) {
  ASSERT_TRUE(WriteFile(Path("a"), "precious").ok());
  const absl::Status status = ReplaceFile(Path("a"), [](const std::string& file) {
    EXPECT_TRUE(WriteFile(file, "half of").ok());
    return absl::InternalError("the other half is missing");
  });
  EXPECT_EQ(status, absl::InternalError("the other half is missing"));
  EXPECT_EQ(Contents("a"), "precious");
  EXPECT_EQ(FilesInFolder(), 1);
}

TEST_F(FilesTest, KeepsLinksAndRights) {
  ASSERT_TRUE(WriteFile(Path("a"), "1").ok());
  ASSERT_EQ(chmod(Path("a").c_str(), 0604), 0);
  ASSERT_EQ(symlink("a", Path("link").c_str()), 0);
  ASSERT_TRUE(WriteFile(Path("link"), "2").ok());
  EXPECT_EQ(Contents("a"), "2");
  EXPECT_TRUE(std::filesystem::is_symlink(Path("link")));
  ASSERT_EQ(symlink("b", Path("to what is not there").c_str()), 0);
  ASSERT_TRUE(WriteFile(Path("to what is not there"), "3").ok());
  EXPECT_EQ(Contents("b"), "3");
  EXPECT_TRUE(std::filesystem::is_symlink(Path("to what is not there")));
  struct stat info;
  ASSERT_EQ(stat(Path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0604u);
}

TEST_F(FilesTest, SaysWhatIsInTheWay) {
  EXPECT_THAT(std::string(WriteFile(folder_.string(), "x").message()), HasSubstr("director"));
  EXPECT_THAT(std::string(WriteFile(Path("no/such"), "x").message()), HasSubstr("No such file"));
  EXPECT_THAT(std::string(WriteFile("", "x").message()), HasSubstr("a file without a name"));
  EXPECT_THAT(std::string(ReadFile(folder_.string(), 10).status().message()),
              HasSubstr("director"));
  EXPECT_THAT(std::string(ReadFile(Path("none"), 10).status().message()),
              HasSubstr("No such file"));
}

TEST_F(FilesTest, WritesIntoWhatIsNoFile) {
  EXPECT_TRUE(WriteFile("/dev/null", "x").ok());
  EXPECT_THAT(std::string(WriteFile("/dev/full", "x").message()), HasSubstr("No space left"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::string read;
  std::jthread reader([&] { read = Contents("pipe"); });
  EXPECT_TRUE(WriteFile(Path("pipe"), "through").ok());
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(std::filesystem::is_fifo(Path("pipe")));
}

TEST_F(FilesTest, ReadsNoMoreThanItMay) {
  ASSERT_TRUE(WriteFile(Path("ten"), "0123456789").ok());
  EXPECT_EQ(*ReadFile(Path("ten"), 10), "0123456789");
  EXPECT_EQ(std::string(ReadFile(Path("ten"), 9).status().message()),
            Path("ten") + " has 10 bytes; at most 9 are read");
  EXPECT_EQ(std::string(ReadFile("/dev/zero", 100000).status().message()),
            "/dev/zero has more than 100000 bytes; at most 100000 are read");
  EXPECT_FALSE(ReadFile("/proc/self/status", 1 << 20)->empty());
  // 8 TiB that are not there, where the file system has such files.
  if (truncate(Path("ten").c_str(), int64_t{1} << 43) != 0) return;
  EXPECT_THAT(std::string(ReadFile(Path("ten"), 1 << 28).status().message()),
              HasSubstr("has 8796093022208 bytes"));
}

std::string TensorOf(uint64_t begin, uint64_t end) {
  return R"({"x":{"dtype":"U8","shape":[)" + std::to_string(end - begin) + R"(],"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}}";
}

std::string SafeTensorsFile(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  return bytes + header + data;
}

TEST_F(FilesTest, TensorsAreReadAsFarAsTheirHeaderSays) {
  ASSERT_TRUE(WriteFile(Path("t"), SafeTensorsFile(TensorOf(0, 3), "abc and more")).ok());
  const auto error = [&](const std::string& path) {
    return std::string(ReadSafeTensors(path).status().message());
  };
  EXPECT_THAT(error(Path("t")), HasSubstr("9 bytes follow the data that its header speaks of"));
  EXPECT_THAT(error("/dev/zero"), HasSubstr("/dev/zero: safetensors: the header is not"));
  EXPECT_THAT(error(folder_.string()), HasSubstr("director"));
  // Sizes that no file has.
  ASSERT_TRUE(WriteFile(Path("t"), SafeTensorsFile(TensorOf(0, uint64_t{1} << 60), "abc")).ok());
  EXPECT_THAT(error(Path("t")), HasSubstr("of which the file has 3"));
  ASSERT_TRUE(WriteFile(Path("t"), std::string("\xff\xff\xff\x04\0\0\0\0{", 9)).ok());
  EXPECT_THAT(error(Path("t")), HasSubstr("of which 1 are in the file"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::jthread writer([&] {
    (void)WriteFile(Path("pipe"), SafeTensorsFile(TensorOf(0, uint64_t{1} << 60), "abc"));
  });
  EXPECT_THAT(error(Path("pipe")), HasSubstr("what is no regular file may have 4294967296"));
}

}  // namespace
}  // namespace kvant
