#include "kvant/backends/cuda/runtime/driver_launcher.h"

#include <numeric>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/driver_api.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"

namespace kvant::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Params {
  const void* in;
  int n;
};

KernelSpec Spec(const std::string& name, size_t shared_bytes = 0) {
  KernelSpec spec;
  spec.source = {name, "// " + name, name + "_entry"};
  spec.threads = 128;
  spec.shared_bytes = shared_bytes;
  return spec;
}

JitOptions InMemory() {
  JitOptions options;
  options.disk_cache = false;
  return options;
}

class DriverLauncherTest : public ::testing::Test {
 protected:
  std::shared_ptr<Launcher> Make(int device = 0) {
    return MakeDriverLauncher(device, InMemory()).value();
  }
  FakeEnvironment fake_;
};

TEST_F(DriverLauncherTest, PassesOnWhyThereIsNone) {
  fake_.cuda().version = 11000;
  EXPECT_THAT(std::string(MakeDriverLauncher(0).status().message()), HasSubstr("CUDA 11.0"));
  fake_.cuda().version = 13000;
  EXPECT_EQ(ErrorKindOf(MakeDriverLauncher(1).status()), ErrorKind::kInvalidArguments);
  fake_.cuda().devices[0].major = 6;
  EXPECT_EQ(ErrorKindOf(MakeDriverLauncher(0).status()), ErrorKind::kUnimplemented);
}

TEST_F(DriverLauncherTest, LaunchesWithTheParamsByValueOnTheStream) {
  fake_.cuda().devices.resize(2);
  const auto launcher = Make(1);
  const auto kernel = launcher->Load(Spec("plain", 70000));
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  EXPECT_THAT((*kernel)->description(), HasSubstr("plain for sm_90a"));
  auto& attributes = fake_.cuda().kernel_attributes["plain_entry"];
  EXPECT_EQ(attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES], 70000);
  EXPECT_EQ(attributes[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT], 100);

  const Params params = {&fake_, 17};
  void* const stream = &fake_;
  fake_.cuda().calls.clear();
  ASSERT_TRUE(launcher->Launch(**kernel, 1000, &params, sizeof(params), stream).ok());
  // A captured stream takes nothing else.
  EXPECT_EQ(fake_.cuda().calls,
            (std::map<std::string, int>{
                {"cuCtxPushCurrent_v2", 1}, {"cuLaunchKernel", 1}, {"cuCtxPopCurrent_v2", 1}}));
  ASSERT_EQ(fake_.cuda().launches.size(), 1u);
  const FakeLaunch& launch = fake_.cuda().launches[0];
  EXPECT_EQ(launch.device, 1);
  EXPECT_EQ(launch.kernel, "plain_entry");
  EXPECT_EQ(launch.blocks, 1000u);
  EXPECT_EQ(launch.threads, 128u);
  EXPECT_EQ(launch.shared_bytes, 70000u);
  EXPECT_EQ(launch.stream, stream);
  EXPECT_EQ(launch.params, std::string(reinterpret_cast<const char*>(&params), sizeof(params)));
}

TEST_F(DriverLauncherTest, FailedLaunchSaysWhatWasLaunched) {
  const auto launcher = Make();
  const auto kernel = launcher->Load(Spec("plain"));
  fake_.cuda().failures["cuLaunchKernel"] = 719;
  const absl::Status status = launcher->Launch(**kernel, 12, "", 1, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(),
            "kernel 'plain', 12 blocks of 128 threads, 0 shared bytes each: cuLaunchKernel: "
            "CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure");
}

TEST_F(DriverLauncherTest, RefusesLaunchesThatCannotBe) {
  const auto launcher = Make();
  const auto kernel = launcher->Load(Spec("plain"));
  const std::string params(5000, 'x');
  for (const int64_t blocks : {int64_t{-1}, int64_t{0}, int64_t{1} << 31}) {
    const absl::Status status = launcher->Launch(**kernel, blocks, "", 1, nullptr);
    EXPECT_EQ(ErrorKindOf(status), ErrorKind::kInvalidArguments);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(blocks) + " blocks"));
  }
  const absl::Status status = launcher->Launch(**kernel, 1, params.data(), 5000, nullptr);
  EXPECT_THAT(std::string(status.message()), HasSubstr("5000 bytes of parameters"));
  EXPECT_TRUE(fake_.cuda().launches.empty());
}

TEST_F(DriverLauncherTest, RefusesBlocksThatDoNotFit) {
  const auto launcher = Make();
  const auto kernel = launcher->Load(Spec("big", 300000));
  EXPECT_EQ(ErrorKindOf(kernel.status()), ErrorKind::kInvalidArguments);
  EXPECT_THAT(std::string(kernel.status().message()),
              AllOf(HasSubstr("'big'"), HasSubstr("300000"), HasSubstr("232448")));
  KernelSpec wide = Spec("wide");
  wide.threads = 1025;
  EXPECT_THAT(std::string(launcher->Load(wide).status().message()), HasSubstr("1025 threads"));
}

TEST_F(DriverLauncherTest, ModulesAreUnloadedAfterUseAndAfterErrors) {
  auto launcher = Make();
  auto kernel = launcher->Load(Spec("plain", 64));
  EXPECT_EQ(fake_.cuda().modules, 1);
  launcher.reset();
  EXPECT_EQ(fake_.cuda().devices[0].retained, 1);  // by the kernel
  kernel->reset();
  EXPECT_EQ(fake_.cuda().modules, 0);
  EXPECT_EQ(fake_.cuda().devices[0].retained, 0);

  launcher = Make();
  fake_.cuda().missing_kernel = "absent_entry";
  EXPECT_THAT(std::string(launcher->Load(Spec("absent")).status().message()),
              HasSubstr("kernel 'absent_entry': cuModuleGetFunction"));
  EXPECT_EQ(fake_.cuda().modules, 0);
  fake_.cuda().failures["cuFuncSetAttribute"] = 719;
  EXPECT_FALSE(launcher->Load(Spec("plain", 64)).ok());
  EXPECT_EQ(fake_.cuda().modules, 0);
}

TEST_F(DriverLauncherTest, ModuleThatTheDriverRefusesIsDescribed) {
  const auto launcher = Make();
  fake_.cuda().failures["cuModuleLoadData"] = 209;
  EXPECT_THAT(std::string(launcher->Load(Spec("plain")).status().message()),
              HasSubstr("kernel 'plain', compiled for sm_90a by NVRTC 13.0, onto Fake H200 by a "
                        "driver of CUDA 13.0: cuModuleLoadData: error 209"));
}

TEST_F(DriverLauncherTest, AnNvrtcThatIsTooNewForTheDriverIsPassedOver) {
  fake_.cuda().version = 12040;
  const auto kernel = Make()->Load(Spec("plain"));
  EXPECT_EQ(ErrorKindOf(kernel.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(kernel.status().message()),
              HasSubstr("is version 13.0, and the driver loads code of CUDA 12 at most"));
}

TEST_F(DriverLauncherTest, MemoryIsZeroedAndCopied) {
  const auto launcher = Make();
  const auto memory = launcher->memory()->Allocate(1000);
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<char> back(1000, 'x');
  ASSERT_TRUE(launcher->memory()->CopyToHost(back.data(), *memory, back.size()).ok());
  EXPECT_EQ(back, std::vector<char>(1000, 0));
  std::iota(back.begin(), back.end(), '\0');
  const std::vector<char> sent = back;
  ASSERT_TRUE(launcher->memory()->CopyFromHost(*memory, sent.data(), sent.size()).ok());
  std::fill(back.begin(), back.end(), 'x');
  ASSERT_TRUE(launcher->memory()->CopyToHost(back.data(), *memory, back.size()).ok());
  EXPECT_EQ(back, sent);
  EXPECT_FALSE(launcher->memory()->FindUnreachable({*memory}));
  EXPECT_TRUE(launcher->memory()->FindUnreachable({back.data()}));
  EXPECT_TRUE(launcher->memory()->Synchronize(nullptr).ok());
  launcher->memory()->Free(*memory);
  launcher->memory()->Free(nullptr);
  EXPECT_TRUE(fake_.cuda().memory.empty());
}

TEST_F(DriverLauncherTest, NothingIsAllocatedForNothing) {
  const auto launcher = Make();
  EXPECT_EQ(launcher->memory()->Allocate(0).value(), nullptr);
  EXPECT_TRUE(launcher->memory()->CopyFromHost(nullptr, nullptr, 0).ok());
  EXPECT_TRUE(launcher->memory()->CopyToHost(nullptr, nullptr, 0).ok());
}

TEST_F(DriverLauncherTest, MemoryThatCannotBeZeroedIsGivenBack) {
  const auto launcher = Make();
  for (const char* call : {"cuMemsetD8Async", "cuStreamSynchronize"}) {
    fake_.cuda().failures = {{call, 719}};
    EXPECT_THAT(std::string(launcher->memory()->Allocate(64).status().message()), HasSubstr(call));
    EXPECT_TRUE(fake_.cuda().memory.empty());
  }
  fake_.cuda().failures = {{"cuMemAlloc_v2", 2}};
  EXPECT_EQ(launcher->memory()->Allocate(64).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(DriverLauncherTest, SeveralThreadsLoadAndLaunch) {
  const auto launcher = Make();
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto kernel = launcher->Load(Spec(t % 2 ? "odd" : "even"));
      ASSERT_TRUE(kernel.ok()) << kernel.status();
      for (int i = 0; i < 100; ++i) {
        ASSERT_TRUE(launcher->Launch(**kernel, t + 1, &i, sizeof(i), nullptr).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fake_.cuda().launches.size(), 400u);
  EXPECT_EQ(fake_.cuda().modules, 0);
}

}  // namespace
}  // namespace kvant::cuda
