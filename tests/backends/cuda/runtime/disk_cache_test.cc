#include "kvant/backends/cuda/runtime/disk_cache.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"

namespace kvant::cuda {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

// What is on disk is found again by any build, on any machine.
TEST(DigestTest, IsXxh3Of128Bits) {
  EXPECT_EQ(DigestOf(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(DigestOf("abc"), "06b05ab6733a618578af5f94892f3950");
  EXPECT_NE(DigestOf(std::string(1000000, 'a')), DigestOf(std::string(1000001, 'a')));
}

constexpr std::pair<int, int> kVersion = {13, 0};

StoredKernel SomeKernel(int minor = 0) {
  StoredKernel kernel;
  kernel.cubin.bytes = std::string("\177ELF\0code", 9) + std::string(40, static_cast<char>(minor));
  kernel.cubin.arch = "sm_90a";
  kernel.cubin.stats = KernelStats{128, 4, 8, 16, 1024};
  kernel.cubin.nvrtc_major = 13;
  kernel.cubin.nvrtc_minor = minor;
  kernel.compiler = {"/opt/libnvrtc.so.13", 109338064, 1700000000123456789};
  return kernel;
}

void ExpectEqual(const StoredKernel& got, const StoredKernel& want) {
  EXPECT_EQ(got.cubin.bytes, want.cubin.bytes);
  EXPECT_EQ(got.cubin.arch, want.cubin.arch);
  EXPECT_EQ(got.cubin.nvrtc_major, want.cubin.nvrtc_major);
  EXPECT_EQ(got.cubin.nvrtc_minor, want.cubin.nvrtc_minor);
  EXPECT_EQ(got.compiler, want.compiler);
  ASSERT_EQ(got.cubin.stats.has_value(), want.cubin.stats.has_value());
  if (!want.cubin.stats) return;
  EXPECT_EQ(got.cubin.stats->registers, want.cubin.stats->registers);
  EXPECT_EQ(got.cubin.stats->spill_store_bytes, want.cubin.stats->spill_store_bytes);
  EXPECT_EQ(got.cubin.stats->spill_load_bytes, want.cubin.stats->spill_load_bytes);
  EXPECT_EQ(got.cubin.stats->stack_bytes, want.cubin.stats->stack_bytes);
  EXPECT_EQ(got.cubin.stats->static_shared_bytes, want.cubin.stats->static_shared_bytes);
}

class DiskCacheTest : public ::testing::Test {
 protected:
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    std::error_code error;
    for (const auto& file : fs::directory_iterator(cache_.folder(), error)) {
      names.push_back(file.path().filename().string());
    }
    return names;
  }
  std::string OnlyFile() const {
    const std::vector<std::string> files = Files();
    EXPECT_EQ(files.size(), 1u);
    return cache_.folder() + "/" + files.at(0);
  }

  const TemporaryFolder folder_;
  const DiskCache cache_{folder_.path() + "/made/later", int64_t{1} << 30};
  const CacheKey key_{"decode/u4 d128", "sm_90a", DigestOf("key")};
};

TEST_F(DiskCacheTest, GivesBackWhatWasStored) {
  EXPECT_FALSE(cache_.Load(key_, kVersion));
  EXPECT_THAT(cache_.Versions(key_), IsEmpty());
  EXPECT_EQ(cache_.Store(key_, SomeKernel()), "");
  EXPECT_THAT(Files(), ElementsAre("decode_u4_d128.sm_90a." + key_.digest + ".nvrtc-13.0.cubin"));
  const auto kernel = cache_.Load(key_, kVersion);
  ASSERT_TRUE(kernel);
  ExpectEqual(*kernel, SomeKernel());

  StoredKernel without = SomeKernel();
  without.cubin.stats.reset();
  EXPECT_EQ(cache_.Store(key_, without), "");
  ExpectEqual(cache_.Load(key_, kVersion).value(), without);
}

TEST_F(DiskCacheTest, VersionsAreNewestFirstByNumber) {
  for (const int minor : {2, 10, 9}) EXPECT_EQ(cache_.Store(key_, SomeKernel(minor)), "");
  StoredKernel older = SomeKernel(9);
  older.cubin.nvrtc_major = 12;
  EXPECT_EQ(cache_.Store(key_, older), "");
  const std::string file = cache_.folder() + "/" + Files().at(0);
  const std::string prefix = file.substr(0, file.find("nvrtc-")) + "nvrtc-";
  for (const char* odd : {"13.cubin", "13.x.cubin", ".cubin", "13.1.cubinx", "13.1 .cubin", "x"}) {
    WriteWholeFile(prefix + odd, "");
  }
  EXPECT_THAT(cache_.Versions(key_),
              ElementsAre(std::pair(13, 10), std::pair(13, 9), std::pair(13, 2), std::pair(12, 9)));
  EXPECT_THAT(cache_.Versions({key_.name, key_.arch, DigestOf("other")}), IsEmpty());
}

TEST_F(DiskCacheTest, EveryTruncationIsAMissAndRewritten) {
  ASSERT_EQ(cache_.Store(key_, SomeKernel()), "");
  const std::string path = OnlyFile(), whole = ReadWholeFile(path);
  for (size_t length = 0; length < whole.size(); ++length) {
    WriteWholeFile(path, whole.substr(0, length));
    ASSERT_FALSE(cache_.Load(key_, kVersion)) << length << " of " << whole.size() << " bytes";
  }
  WriteWholeFile(path, whole + '\0');
  EXPECT_FALSE(cache_.Load(key_, kVersion));
  EXPECT_EQ(cache_.Store(key_, SomeKernel()), "");
  EXPECT_TRUE(cache_.Load(key_, kVersion));
}

TEST_F(DiskCacheTest, EveryFlippedBitIsAMiss) {
  ASSERT_EQ(cache_.Store(key_, SomeKernel()), "");
  const std::string path = OnlyFile(), whole = ReadWholeFile(path);
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    WriteWholeFile(path, flipped);
    ASSERT_FALSE(cache_.Load(key_, kVersion)) << "bit " << bit;
  }
}

TEST_F(DiskCacheTest, ForeignFilesAreMisses) {
  ASSERT_EQ(cache_.Store(key_, SomeKernel()), "");
  const std::string path = OnlyFile(), whole = ReadWholeFile(path);
  WriteWholeFile(path, std::string(1 << 20, 'x'));
  EXPECT_FALSE(cache_.Load(key_, kVersion));
  // Under the name of another kernel, and of another version.
  WriteWholeFile(path, whole);
  const CacheKey other = {key_.name, key_.arch, DigestOf("other")};
  fs::copy_file(path, fs::path(path).replace_filename("decode_u4_d128.sm_90a." + other.digest +
                                                      ".nvrtc-13.0.cubin"));
  EXPECT_THAT(cache_.Versions(other), ElementsAre(kVersion));
  EXPECT_FALSE(cache_.Load(other, kVersion));
  fs::copy_file(path, fs::path(path).replace_filename("decode_u4_d128.sm_90a." + key_.digest +
                                                      ".nvrtc-13.7.cubin"));
  EXPECT_FALSE(cache_.Load(key_, {13, 7}));
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_FALSE(cache_.Load(key_, kVersion));
  EXPECT_THAT(cache_.Store(key_, SomeKernel()), HasSubstr("cannot rename a file"));
}

TEST_F(DiskCacheTest, OddNamesStayInTheFolder) {
  const CacheKey odd = {"../../up and \xff" + std::string(1000, 'n'), "../sm", DigestOf("odd")};
  EXPECT_EQ(cache_.Store(odd, SomeKernel()), "");
  EXPECT_TRUE(cache_.Load(odd, kVersion));
  EXPECT_EQ(Files().size(), 1u);
}

TEST_F(DiskCacheTest, ThreadsMayWriteAndReadTheSame) {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(cache_.Store(key_, SomeKernel()), "");
        EXPECT_TRUE(cache_.Load(key_, kVersion));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Files().size(), 1u);
}

TEST_F(DiskCacheTest, ProcessesMayWriteAndReadTheSame) {
  const int status = RunInChild([&] {
    for (int p = 0; p < 4; ++p) {
      const pid_t child = fork();
      if (child == 0) {
        int failed = 0;
        for (int i = 0; i < 50; ++i) {
          failed += !cache_.Store(key_, SomeKernel()).empty() || !cache_.Load(key_, kVersion);
        }
        _exit(failed);
      }
    }
    int failed = 0, child_status = 0;
    while (wait(&child_status) > 0) failed += child_status != 0;
    return failed;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Files().size(), 1u);
  EXPECT_TRUE(cache_.Load(key_, kVersion));
}

TEST_F(DiskCacheTest, FolderThatIsAFile) {
  WriteWholeFile(folder_.path() + "/made", "");
  EXPECT_THAT(cache_.Versions(key_), IsEmpty());
  EXPECT_FALSE(cache_.Load(key_, kVersion));
  EXPECT_THAT(cache_.Store(key_, SomeKernel()),
              AllOf(HasSubstr(cache_.folder()), HasSubstr("cannot make the folder"),
                    HasSubstr("Not a directory")));
}

TEST_F(DiskCacheTest, FolderThatMayOnlyBeRead) {
  ASSERT_EQ(cache_.Store(key_, SomeKernel()), "");
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(cache_.folder().c_str(), 0555), 0);
  const int status = RunInChild([&] {
    // Nothing is read-only to root.
    if (geteuid() == 0 && setuid(65534) != 0) return 1;
    if (!cache_.Load(key_, kVersion)) return 2;
    const std::string reason = cache_.Store(key_, SomeKernel(1));
    return reason.find("cannot make a file: Permission denied") == std::string::npos ? 3 : 0;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(DiskCacheTest, FullDisk) {
  const int status = RunInChild([&] {
    // As a full disk, writing comes to an end; without the signal that goes with this limit.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {50, 50};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const std::string reason = cache_.Store(key_, SomeKernel());
    return reason.find("cannot write a file: File too large") == std::string::npos ? 2 : 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_THAT(Files(), IsEmpty());  // half a file is not left behind
}

// What was stored or read last stays; files that are no kernels are nobody's to remove.
TEST_F(DiskCacheTest, WhatWasNotUsedForLongestMakesRoom) {
  const auto key = [](int i) { return CacheKey{"kernel", "sm_90a", DigestOf(std::to_string(i))}; };
  ASSERT_EQ(cache_.Store(key(0), SomeKernel()), "");
  const auto bytes = static_cast<int64_t>(fs::file_size(OnlyFile()));
  const DiskCache small(cache_.folder(), 3 * bytes);
  WriteWholeFile(cache_.folder() + "/foreign", std::string(10 * bytes, 'x'));
  const auto age = [&](int i, int minutes) {
    for (const std::string& name : Files()) {
      if (name.find(key(i).digest) == std::string::npos) continue;
      const timespec times[2] = {{time(nullptr) - minutes * 60, 0}, {0, UTIME_OMIT}};
      utimensat(AT_FDCWD, (cache_.folder() + "/" + name).c_str(), times, 0);
    }
  };
  for (const int i : {1, 2}) EXPECT_EQ(small.Store(key(i), SomeKernel()), "");
  for (const int i : {0, 1, 2}) {
    EXPECT_TRUE(small.Load(key(i), kVersion)) << i;
    age(i, 30 - i);
  }
  EXPECT_TRUE(small.Load(key(0), kVersion));  // it is the youngest now
  EXPECT_EQ(small.Store(key(3), SomeKernel()), "");
  EXPECT_FALSE(small.Load(key(1), kVersion));
  for (const int i : {0, 2, 3}) EXPECT_TRUE(small.Load(key(i), kVersion)) << i;
  EXPECT_TRUE(fs::exists(cache_.folder() + "/foreign"));
  // A kernel beyond the limit is not kept.
  EXPECT_EQ(DiskCache(cache_.folder(), 1).Store(key(4), SomeKernel()), "");
  EXPECT_THAT(Files(), ElementsAre("foreign"));
}

TEST(DefaultCacheBytesTest, FollowsTheEnvironment) {
  const ScopedVariable none("KVANT_CACHE_MIB", std::nullopt);
  EXPECT_EQ(DefaultCacheBytes(), int64_t{1} << 30);
  for (const char* odd : {"", "many", "-1", "0", "99999999999999999999"}) {
    const ScopedVariable given("KVANT_CACHE_MIB", odd);
    EXPECT_EQ(DefaultCacheBytes(), int64_t{1} << 30) << odd;
  }
  const ScopedVariable given("KVANT_CACHE_MIB", "5");
  EXPECT_EQ(DefaultCacheBytes(), 5 << 20);
}

TEST(DefaultCacheFolderTest, FollowsTheEnvironment) {
  const ScopedVariable home("HOME", "/home/me"), xdg("XDG_CACHE_HOME", "/caches"),
      own("KVANT_CACHE_DIR", "/mine");
  EXPECT_EQ(DefaultCacheFolder(), "/mine");
  const ScopedVariable no_own("KVANT_CACHE_DIR", std::nullopt);
  EXPECT_EQ(DefaultCacheFolder(), "/caches/kvant");
  const ScopedVariable relative("XDG_CACHE_HOME", "caches");
  EXPECT_EQ(DefaultCacheFolder(), "/home/me/.cache/kvant");
  const ScopedVariable no_home("HOME", std::nullopt);
  EXPECT_EQ(DefaultCacheFolder(), "");
}

TEST(CompilerFileTest, IsTheFileAsItWas) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/lib.so";
  EXPECT_EQ(CompilerFile::At(path).path, "");
  EXPECT_EQ(CompilerFile::At("").path, "");
  WriteWholeFile(path, "one");
  const CompilerFile before = CompilerFile::At(path);
  EXPECT_EQ(before.bytes, 3);
  EXPECT_EQ(CompilerFile::At(path), before);
  WriteWholeFile(path, "two!");
  EXPECT_NE(CompilerFile::At(path), before);
}

}  // namespace
}  // namespace kvant::cuda
