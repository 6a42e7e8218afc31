#include "kvant/backends/cuda/runtime/jit.h"

#include <filesystem>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/shared_library.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"
#include "kvant_test_config.h"

namespace kvant::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

KernelSource Source(const std::string& name) { return {name, "// text of " + name, "entry"}; }

// With the fake compiler, which is wherever NVRTC is looked for.
class JitTest : public ::testing::Test {
 protected:
  JitOptions Options(int driver_version = 0) const {
    JitOptions options;
    options.cache_dir = folder_.path() + "/cache";
    options.driver_version = driver_version;
    return options;
  }
  // A compiler of its own file, which can be taken away.
  std::string CopyOfCompiler(const std::string& name) const {
    std::string path = folder_.path() + "/" + name;
    fs::copy_file(KVANT_FAKE_LIBNVRTC, path);
    return path;
  }
  // The NVRTC version that Get gives a kernel of.
  std::string VersionOf(Jit& jit, const char* name = "kernel") const {
    const auto cubin = jit.Get(Source(name), "sm_90a");
    if (!cubin.ok()) return std::string(cubin.status().message());
    return std::to_string((*cubin)->nvrtc_major) + "." + std::to_string((*cubin)->nvrtc_minor);
  }

  FakeEnvironment fake_;
  TemporaryFolder folder_;
};

void ExpectCounts(const Jit& jit, int64_t compiled, int64_t from_disk, int64_t from_memory) {
  const JitCounts counts = jit.counts();
  EXPECT_EQ(counts.compiled, compiled);
  EXPECT_EQ(counts.from_disk, from_disk);
  EXPECT_EQ(counts.from_memory, from_memory);
}

TEST_F(JitTest, CompilesOnceAndKeepsInMemoryAndOnDisk) {
  Jit jit(Options());
  const auto first = jit.Get(Source("a"), "sm_90a");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->bytes, "\177ELF// text of a");
  EXPECT_EQ((*first)->arch, "sm_90a");
  EXPECT_EQ(jit.Get(Source("a"), "sm_90a").value(), *first);
  ExpectCounts(jit, 1, 0, 1);
  EXPECT_EQ(jit.cache_note(), "");
  EXPECT_EQ(jit.cache_dir(), folder_.path() + "/cache");

  Jit next(Options());
  EXPECT_EQ(next.Get(Source("a"), "sm_90a").value()->bytes, (*first)->bytes);
  ExpectCounts(next, 0, 1, 0);
}

TEST_F(JitTest, EveryPartOfTheSourceAndTheArchitectureCount) {
  Jit jit(Options());
  const KernelSource source = {"name", "text", "entry"};
  ASSERT_TRUE(jit.Get(source, "sm_90a").ok());
  for (std::string KernelSource::*part :
       {&KernelSource::name, &KernelSource::text, &KernelSource::entry}) {
    KernelSource other = source;
    other.*part += "x";
    ASSERT_TRUE(jit.Get(other, "sm_90a").ok());
  }
  ASSERT_TRUE(jit.Get(source, "sm_80").ok());
  // Not the parts run together.
  ASSERT_TRUE(jit.Get({"nam", "etext", "entry"}, "sm_90a").ok());
  ExpectCounts(jit, 6, 0, 0);
}

TEST_F(JitTest, ThreadsThatAskForTheSameWaitForOneCompile) {
  Jit jit(Options());
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const Cubin>> cubins(8);
  for (size_t t = 0; t < cubins.size(); ++t) {
    threads.emplace_back([&, t] { cubins[t] = jit.Get(Source("a"), "sm_90a").value(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& cubin : cubins) EXPECT_EQ(cubin, cubins[0]);
  ExpectCounts(jit, 1, 0, 7);
}

TEST_F(JitTest, DifferentKernelsCompileSideBySide) {
  // A copy, which has compiled nothing yet.
  const std::string compiler = CopyOfCompiler("own.so");
  const ScopedVariable library("KVANT_LIBNVRTC", compiler);
  Jit jit(Options());
  std::vector<std::thread> threads;
  threads.reserve(16);
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] { EXPECT_TRUE(jit.Get(Source(std::to_string(t)), "sm_80").ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectCounts(jit, 16, 0, 0);
  const auto most_at_once = reinterpret_cast<int (*)()>(
      SharedLibrary::Open({compiler}).value().Symbol("KvantFakeMostAtOnce"));
  EXPECT_GT(most_at_once(), 1);
}

TEST_F(JitTest, ErrorsAreTold) {
  Jit jit(Options());
  for (int i = 0; i < 2; ++i) {
    const auto cubin = jit.Get({"bad", "#error", "entry"}, "sm_90a");
    EXPECT_EQ(cubin.status().code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(cubin.status().message()),
                AllOf(HasSubstr("'bad'"), HasSubstr("bad.cu(1): error: as asked for")));
  }
  ExpectCounts(jit, 0, 0, 0);
  EXPECT_FALSE(fs::exists(jit.cache_dir()));
}

TEST_F(JitTest, DamagedFileIsCompiledAgainAndRewritten) {
  ASSERT_TRUE(Jit(Options()).Get(Source("a"), "sm_90a").ok());
  const std::string path = fs::directory_iterator(Options().cache_dir)->path().string();
  const std::string whole = ReadWholeFile(path);
  WriteWholeFile(path, whole.substr(0, whole.size() / 2));
  Jit jit(Options());
  ASSERT_TRUE(jit.Get(Source("a"), "sm_90a").ok());
  ExpectCounts(jit, 1, 0, 0);
  EXPECT_EQ(ReadWholeFile(path), whole);
}

TEST_F(JitTest, StoredKernelNeedsNoCompiler) {
  ASSERT_TRUE(Jit(Options()).Get(Source("kernel"), "sm_90a").ok());
  const ScopedVariable none("KVANT_LIBNVRTC", "/nowhere/libnvrtc.so");
  Jit jit(Options());
  EXPECT_EQ(VersionOf(jit), "13.0");
  const auto other = jit.Get(Source("other"), "sm_90a");
  EXPECT_EQ(ErrorKindOf(other.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("no NVRTC"));
  ExpectCounts(jit, 0, 1, 0);
}

TEST_F(JitTest, CompilerThatIsStillThereIsNotOpened) {
  ASSERT_TRUE(Jit(Options()).Get(Source("kernel"), "sm_90a").ok());
  // Had it been opened, it would say 13.5.
  const ScopedVariable newer("KVANT_FAKE_NVRTC", "13.5");
  Jit jit(Options());
  EXPECT_EQ(VersionOf(jit), "13.0");
}

TEST_F(JitTest, AnotherVersionCompilesAgainAndBothAreKept) {
  const std::string old_path = CopyOfCompiler("old.so"), new_path = CopyOfCompiler("new.so");
  const ScopedVariable old_library("KVANT_LIBNVRTC", old_path);
  Jit first(Options());
  EXPECT_EQ(VersionOf(first), "13.0");

  fs::remove(old_path);
  const ScopedVariable new_library("KVANT_LIBNVRTC", new_path);
  {
    const ScopedVariable newer("KVANT_FAKE_NVRTC", "13.5");
    Jit second(Options());
    EXPECT_EQ(VersionOf(second), "13.5");
    ExpectCounts(second, 1, 0, 0);
  }
  // The same version from another file is the same compiler.
  fs::remove(new_path);
  const ScopedVariable moved("KVANT_LIBNVRTC", CopyOfCompiler("moved.so"));
  Jit third(Options());
  EXPECT_EQ(VersionOf(third), "13.0");
  ExpectCounts(third, 0, 1, 0);
  // Without any, the newest.
  const ScopedVariable none("KVANT_LIBNVRTC", "/nowhere/libnvrtc.so");
  Jit fourth(Options());
  EXPECT_EQ(VersionOf(fourth), "13.5");
}

TEST_F(JitTest, WhatTheDriverCannotLoadIsPassedOver) {
  Jit first(Options(13000));
  EXPECT_EQ(VersionOf(first), "13.0");
  {
    Jit too_new(Options(12080));
    EXPECT_THAT(VersionOf(too_new), HasSubstr("the driver loads code of CUDA 12 at most"));
  }
  const ScopedVariable older("KVANT_FAKE_NVRTC", "12.9");
  Jit second(Options(12080));
  EXPECT_EQ(VersionOf(second), "12.9");
  Jit third(Options(12080));
  EXPECT_EQ(VersionOf(third), "12.9");
  ExpectCounts(third, 0, 1, 0);
}

TEST_F(JitTest, WorksWithoutAFolder) {
  WriteWholeFile(folder_.path() + "/cache", "a file");
  Jit jit(Options());
  EXPECT_TRUE(jit.Get(Source("a"), "sm_90a").ok());
  EXPECT_TRUE(jit.Get(Source("a"), "sm_90a").ok());
  ExpectCounts(jit, 1, 0, 1);
  EXPECT_THAT(jit.cache_note(),
              AllOf(HasSubstr(folder_.path() + "/cache"), HasSubstr("cannot make")));
}

TEST_F(JitTest, WorksWithoutAHome) {
  const ScopedVariable home("HOME", std::nullopt), xdg("XDG_CACHE_HOME", std::nullopt),
      own("KVANT_CACHE_DIR", std::nullopt);
  Jit jit;
  EXPECT_TRUE(jit.Get(Source("a"), "sm_90a").ok());
  EXPECT_EQ(jit.cache_dir(), "");
  EXPECT_THAT(jit.cache_note(), HasSubstr("HOME"));
}

TEST_F(JitTest, MemoryOnlyLeavesNothingBehind) {
  JitOptions options = Options();
  options.disk_cache = false;
  Jit jit(options);
  EXPECT_TRUE(jit.Get(Source("a"), "sm_90a").ok());
  EXPECT_EQ(jit.cache_dir(), "");
  EXPECT_EQ(jit.cache_note(), "");
  EXPECT_FALSE(fs::exists(options.cache_dir));
}

TEST_F(JitTest, ProcessesShareTheFolder) {
  const auto compiled_in_child = [&] {
    return RunInChild([&] {
      Jit jit(Options());
      for (int i = 0; i < 5; ++i) {
        if (!jit.Get(Source(std::to_string(i)), "sm_90a").ok()) return 99;
      }
      return static_cast<int>(jit.counts().compiled);
    });
  };
  EXPECT_EQ(compiled_in_child(), 5);
  EXPECT_EQ(compiled_in_child(), 0);
}

}  // namespace
}  // namespace kvant::cuda
