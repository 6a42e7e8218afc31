#include "kvant/backends/cuda/runtime/driver.h"

#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvant/backends/cuda/runtime/device_context.h"
#include "kvant/backends/cuda/runtime/shared_library.h"
#include "kvant/graph/status.h"
#include "kvant/tests/backends/cuda/cuda_testing.h"
#include "kvant_test_config.h"

namespace kvant::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string OpenError() {
  const auto driver = Driver::Open();
  EXPECT_FALSE(driver.ok());
  EXPECT_EQ(ErrorKindOf(driver.status()), ErrorKind::kUnimplemented);
  return std::string(driver.status().message());
}

std::shared_ptr<DeviceContext> MakeContext(int device) {
  return DeviceContext::Retain(*Driver::Open(), device).value();
}

TEST(SharedLibraryTest, SaysWhichNamesWereTriedAndWhy) {
  const TemporaryFolder folder;
  const std::string text = folder.path() + "/text";
  WriteWholeFile(text, std::string(100, 'x'));
  const auto library =
      SharedLibrary::Open({"libkvant-none.so.1", "/nowhere/libkvant-none.so", text});
  ASSERT_FALSE(library.ok());
  EXPECT_EQ(ErrorKindOf(library.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(library.status().message()),
              AllOf(HasSubstr("cannot open libkvant-none.so.1 (No such file or directory), "
                              "/nowhere/libkvant-none.so (No such file or directory)"),
                    HasSubstr(text + " (")));
}

TEST(SharedLibraryTest, TakesTheFirstNameThatOpens) {
  const auto library = SharedLibrary::Open({"libkvant-none.so", KVANT_FAKE_LIBCUDA});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->name(), KVANT_FAKE_LIBCUDA);
  EXPECT_NE(library->Symbol("cuInit"), nullptr);
  EXPECT_EQ(library->Symbol("cuNothing"), nullptr);
  EXPECT_EQ(FileOfSymbol(library->Symbol("cuInit")), KVANT_FAKE_LIBCUDA);
}

TEST(SharedLibraryTest, EmptyOverrideIsNone) {
  const ScopedVariable variable("KVANT_LIBCUDA", "");
  EXPECT_THAT(NamesOrOverride("KVANT_LIBCUDA", {"a", "b"}), ::testing::ElementsAre("a", "b"));
}

TEST(DriverTest, NoDriverAtAll) {
  const ScopedVariable variable("KVANT_LIBCUDA", "/nowhere/libcuda.so.1");
  EXPECT_THAT(OpenError(),
              AllOf(HasSubstr("no NVIDIA driver"), HasSubstr("/nowhere/libcuda.so.1")));
}

TEST(DriverTest, ALibraryThatIsNoDriver) {
  const ScopedVariable variable("KVANT_LIBCUDA", KVANT_FAKE_LIBNVRTC);
  EXPECT_THAT(OpenError(), AllOf(HasSubstr(KVANT_FAKE_LIBNVRTC),
                                 HasSubstr("has no cuDriverGetVersion"), HasSubstr("12.0")));
}

TEST(DriverTest, TooOld) {
  FakeEnvironment fake;
  fake.cuda().version = 11080;
  EXPECT_THAT(OpenError(), HasSubstr("supports CUDA 11.8; 12.0 or newer is needed"));
  EXPECT_EQ(fake.cuda().calls["cuInit"], 0);
}

TEST(DriverTest, NoDevice) {
  FakeEnvironment fake;
  fake.cuda().devices.clear();
  EXPECT_THAT(OpenError(), HasSubstr("sees no device"));
}

TEST(DriverTest, EveryFailureToStartNamesCallAndError) {
  for (const char* call : {"cuDriverGetVersion", "cuInit", "cuDeviceGetCount"}) {
    FakeEnvironment fake;
    fake.cuda().failures[call] = 803;
    EXPECT_THAT(OpenError(), HasSubstr(std::string(call) + ": error 803"));
  }
}

TEST(DriverTest, Properties) {
  FakeEnvironment fake;
  fake.cuda().devices.resize(2);
  fake.cuda().devices[1] = {"Fake A10", 8, 6, 72, 101376, 102400, 1536, 6 << 20, size_t{24} << 30};
  const auto driver = Driver::Open();
  ASSERT_TRUE(driver.ok()) << driver.status();
  EXPECT_EQ((*driver)->version(), 13000);
  EXPECT_EQ((*driver)->device_count(), 2);
  const auto properties = (*driver)->Properties(1);
  ASSERT_TRUE(properties.ok()) << properties.status();
  EXPECT_EQ(properties->name, "Fake A10");
  EXPECT_EQ(properties->major, 8);
  EXPECT_EQ(properties->minor, 6);
  EXPECT_EQ(properties->multiprocessors, 72);
  EXPECT_EQ(properties->shared_bytes_per_block, 101376u);
  EXPECT_EQ(properties->shared_bytes_per_multiprocessor, 102400u);
  EXPECT_EQ(properties->threads_per_multiprocessor, 1536);
  EXPECT_EQ(properties->l2_bytes, size_t{6} << 20);
  EXPECT_EQ(properties->memory_bytes, size_t{24} << 30);
  EXPECT_EQ(properties->arch(), "sm_86");
}

TEST(DriverTest, ArchitecturesWithInstructionsOfTheirOwn) {
  const auto arch = [](int major, int minor) {
    DeviceProperties properties;
    properties.major = major;
    properties.minor = minor;
    return properties.arch();
  };
  EXPECT_EQ(arch(8, 0), "sm_80");
  EXPECT_EQ(arch(8, 9), "sm_89");
  EXPECT_EQ(arch(9, 0), "sm_90a");
  EXPECT_EQ(arch(10, 0), "sm_100a");
  EXPECT_EQ(arch(10, 3), "sm_103");
  EXPECT_EQ(arch(12, 0), "sm_120");
}

TEST(DriverTest, RefusesOldDevices) {
  FakeEnvironment fake;
  fake.cuda().devices[0].name = "Fake V100";
  fake.cuda().devices[0].major = 7;
  const auto properties = (*Driver::Open())->Properties(0);
  EXPECT_EQ(ErrorKindOf(properties.status()), ErrorKind::kUnimplemented);
  EXPECT_THAT(std::string(properties.status().message()),
              HasSubstr("device 0 (Fake V100) has compute capability 7.0; 8.0 or newer is needed"));
}

TEST(DriverTest, RefusesDevicesThatAreNotThere) {
  FakeEnvironment fake;
  for (const int index : {-1, 1, 7}) {
    const auto properties = (*Driver::Open())->Properties(index);
    EXPECT_EQ(ErrorKindOf(properties.status()), ErrorKind::kInvalidArguments);
    EXPECT_THAT(std::string(properties.status().message()),
                HasSubstr("no CUDA device " + std::to_string(index) + ", only 1"));
  }
}

TEST(DriverTest, EveryFailedQueryNamesItsCall) {
  for (const char* call :
       {"cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem", "cuDeviceGetAttribute"}) {
    FakeEnvironment fake;
    const auto driver = *Driver::Open();
    fake.cuda().failures[call] = 719;
    fake.cuda().failures[std::string(call) + "_v2"] = 719;
    const auto properties = driver->Properties(0);
    EXPECT_EQ(properties.status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(properties.status().message(),
              std::string(call) + ": CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure");
  }
}

TEST(DeviceContextTest, RetainsAndReleasesThePrimaryContext) {
  FakeEnvironment fake;
  {
    const auto one = MakeContext(0), two = MakeContext(0);
    EXPECT_EQ(fake.cuda().devices[0].retained, 2);
  }
  EXPECT_EQ(fake.cuda().devices[0].retained, 0);
  fake.cuda().failures["cuDevicePrimaryCtxRetain"] = 2;
  const auto context = DeviceContext::Retain(*Driver::Open(), 0);
  EXPECT_EQ(context.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(context.status().message()),
              HasSubstr("device 0: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"));
}

TEST(DeviceContextTest, CallsLeaveTheThreadsContextAsItWas) {
  FakeEnvironment fake;
  const auto context = MakeContext(0);
  const auto memory = context->Allocate(64);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(fake.context_depth(), 0u);
  fake.cuda().failures["cuMemsetD8Async"] = 719;
  EXPECT_FALSE(context->Allocate(64).ok());
  EXPECT_EQ(fake.context_depth(), 0u);
  context->Free(*memory);
  EXPECT_TRUE(fake.cuda().memory.empty());
}

TEST(DeviceContextTest, OutOfMemorySaysHowMuchWasAskedFor) {
  FakeEnvironment fake;
  const auto context = MakeContext(0);
  fake.cuda().failures["cuMemAlloc_v2"] = 2;
  const auto memory = context->Allocate(123456789);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(memory.status().message(),
            "123456789 bytes on device 0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory");
}

TEST(DeviceContextTest, EveryFailedCallIsNamed) {
  FakeEnvironment fake;
  const auto context = MakeContext(0);
  char byte = 0;
  const std::vector<std::pair<std::string, std::function<absl::Status()>>> calls = {
      {"cuCtxPushCurrent", [&] { return context->Synchronize(nullptr); }},
      {"cuModuleLoadData", [&] { return context->LoadModule("\177ELF").status(); }},
      {"cuModuleGetFunction", [&] { return context->FindFunction(nullptr, "k").status(); }},
      {"cuFuncSetAttribute", [&] { return context->AllowSharedBytes(nullptr, 1); }},
      {"cuLaunchKernel",
       [&] {
         return context->Launch(nullptr, {1, 32, 0}, &byte, 1, nullptr);
       }},
      {"cuMemAlloc", [&] { return context->Allocate(1).status(); }},
      {"cuMemsetD8Async", [&] { return context->Allocate(1).status(); }},
      {"cuMemcpyHtoDAsync", [&] { return context->CopyFromHost(nullptr, &byte, 1); }},
      {"cuMemcpyDtoHAsync", [&] { return context->CopyToHost(&byte, nullptr, 1); }},
      {"cuStreamSynchronize", [&] { return context->Synchronize(nullptr); }},
      {"cuCtxSynchronize", [&] { return context->SynchronizeAll(); }},
      {"cuStreamIsCapturing", [&] { return context->OrderOf(nullptr).status(); }},
      {"cuStreamGetId", [&] { return context->OrderOf(nullptr).status(); }},
  };
  for (const auto& [call, make] : calls) {
    fake.cuda().failures = {{call, 719}, {call + "_v2", 719}};
    const absl::Status status = make();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << call;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(call + ": CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure"));
    EXPECT_EQ(fake.context_depth(), 0u) << call;
  }
}

std::string WhyUnreachable(const DeviceContext& context, const void* pointer) {
  const auto found = context.FindUnreachable({pointer});
  return found ? found->why : "";
}

// Handles come back, or stand for a stream in each thread; numbers do not.
TEST(DeviceContextTest, StreamsHaveNumbersOfTheirOwn) {
  FakeEnvironment fake;
  const auto context = MakeContext(0);
  int handle = 0;
  auto* const stream = reinterpret_cast<CUstream>(&handle);
  const uint64_t first = context->OrderOf(stream)->id;
  EXPECT_EQ(context->OrderOf(stream)->id, first);
  EXPECT_NE(context->OrderOf(nullptr)->id, first);
  fake.cuda().streams.erase(&handle);  // and a new one has its handle
  EXPECT_NE(context->OrderOf(stream)->id, first);
  const uint64_t here = context->OrderOf(CU_STREAM_PER_THREAD)->id;
  EXPECT_EQ(context->OrderOf(CU_STREAM_PER_THREAD)->id, here);
  std::thread([&] { EXPECT_NE(context->OrderOf(CU_STREAM_PER_THREAD)->id, here); }).join();
}

TEST(DeviceContextTest, ACapturedStreamHasTheNumberThatItHad) {
  FakeEnvironment fake;
  const auto context = MakeContext(0);
  int handle = 0;
  auto* const stream = reinterpret_cast<CUstream>(&handle);
  fake.cuda().streams[&handle].captured = true;
  EXPECT_THAT(std::string(context->OrderOf(stream).status().message()),
              HasSubstr("execute once before the capture"));
  fake.cuda().streams[&handle].captured = false;
  const auto before = context->OrderOf(stream);
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_FALSE(before->captured);
  fake.cuda().streams[&handle].captured = true;
  const auto captured = context->OrderOf(stream);
  ASSERT_TRUE(captured.ok()) << captured.status();
  EXPECT_EQ(captured->id, before->id);
  EXPECT_TRUE(captured->captured);
}

TEST(DeviceContextTest, TellsDevicePointersFromOthers) {
  FakeEnvironment fake;
  fake.cuda().devices.resize(2);
  const auto here = MakeContext(0), there = MakeContext(1);
  const auto pointer = [](void* memory, size_t offset = 0) {
    return static_cast<const char*>(memory) + offset;
  };
  void *const own = here->Allocate(64).value(), *const foreign = there->Allocate(64).value();
  const int host = 0;
  EXPECT_EQ(WhyUnreachable(*here, nullptr), "");
  EXPECT_EQ(WhyUnreachable(*here, pointer(own)), "");
  EXPECT_EQ(WhyUnreachable(*here, pointer(own, 63)), "");
  EXPECT_EQ(WhyUnreachable(*here, &host), "points to host memory");
  EXPECT_EQ(WhyUnreachable(*here, pointer(foreign)),
            "points to memory of device 1, not of device 0");
  FakeBlock& block = fake.cuda().memory[static_cast<char*>(foreign)];
  block.kind = FakeMemory::kManaged;
  EXPECT_EQ(WhyUnreachable(*here, pointer(foreign)), "");
  block.kind = FakeMemory::kPinnedHost;
  EXPECT_EQ(WhyUnreachable(*here, pointer(foreign)), "points to host memory");
  // Of several, the first, in one context.
  const int pushes = fake.cuda().calls["cuCtxPushCurrent_v2"];
  const auto found = here->FindUnreachable({pointer(own), &host, pointer(foreign)});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->index, 1);
  EXPECT_EQ(fake.cuda().calls["cuCtxPushCurrent_v2"], pushes + 1);
  fake.cuda().failures["cuPointerGetAttributes"] = 719;
  EXPECT_THAT(WhyUnreachable(*here, pointer(own)), HasSubstr("cuPointerGetAttributes"));
  here->Free(own);
  there->Free(foreign);
}

// Each thread uses every device in turn: what one makes current must not reach another's calls.
TEST(DeviceContextTest, SeveralDevicesFromSeveralThreads) {
  FakeEnvironment fake;
  fake.cuda().devices.resize(3);
  const std::shared_ptr<DeviceContext> contexts[] = {MakeContext(0), MakeContext(1),
                                                     MakeContext(2)};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const int device = (t + i) % 3;
        const auto memory = contexts[device]->Allocate(16);
        ASSERT_TRUE(memory.ok());
        EXPECT_EQ(WhyUnreachable(*contexts[device], *memory), "");
        EXPECT_NE(WhyUnreachable(*contexts[(device + 1) % 3], *memory), "");
        contexts[device]->Free(*memory);
      }
      EXPECT_EQ(fake.context_depth(), 0u);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(fake.cuda().memory.empty());
}

}  // namespace
}  // namespace kvant::cuda
