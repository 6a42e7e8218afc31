"""Plants a fault of each kind that the PTX emulator and its driver are to find, and compares the
results of arithmetic that few kernels depend on with what the PTX ISA says.

Usage: selftest.py FOLDER [NAME..], where FOLDER holds libptxemu_cuda.so and libptxemu_nvrtc.so.
Skipped where there is no NVRTC. Each case is a process of its own, since most faults are sticky.
"""
import array
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
KERNELS = r"""
using u32 = unsigned int;
extern __shared__ int s[];
__device__ u32 At(int i) { return static_cast<u32>(__cvta_generic_to_shared(s + i)); }
__device__ void Copy(int i, const int* p) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(At(i)), "l"(p) : "memory");
}
__device__ void Commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ void WaitAll() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
#define KERNEL(name) extern "C" __global__ void name

KERNEL(__launch_bounds__(64, 1) axpy)(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
KERNEL(beyond)(int* p, int at) { p[at + threadIdx.x] = 1; }
KERNEL(misaligned)(char* p) { *reinterpret_cast<int*>(p + 2) = 1; }
KERNEL(read_only)(int* p) {
  p[threadIdx.x] = 1;
  __syncthreads();
  p[64] = __ldg(p + (threadIdx.x ^ 1));
}
KERNEL(copies)(const int* p, int* q) { q[threadIdx.x] = p[threadIdx.x]; }
KERNEL(uninitialised)(int* p) { p[threadIdx.x] = s[threadIdx.x]; }
KERNEL(race)(int* p) {
  s[threadIdx.x] = 1;
  __syncthreads();
  s[threadIdx.x] = 2;
  p[threadIdx.x] = s[threadIdx.x ^ 33];
}
KERNEL(warp_race)(int* p) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(At(threadIdx.x)), "r"(7) : "memory");
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(At(threadIdx.x ^ 1)) : "memory");
  p[threadIdx.x] = x;
}
KERNEL(no_race)(int* p) {
  s[threadIdx.x] = 1;
  __syncthreads();
  p[threadIdx.x] = s[threadIdx.x ^ 33];
}
KERNEL(no_wait)(int* p) {
  Copy(threadIdx.x, p + threadIdx.x);
  Commit();
  p[threadIdx.x] = s[threadIdx.x];
}
KERNEL(waits)(int* p) {
  Copy(threadIdx.x, p + threadIdx.x);
  Commit();
  WaitAll();
  p[threadIdx.x] = s[threadIdx.x] + 1;
}
KERNEL(barrier_before_wait)(int* p) {
  Copy(threadIdx.x, p + threadIdx.x);
  Commit();
  __syncwarp();
  WaitAll();
  p[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL(barrier_after_wait)(int* p) {
  Copy(threadIdx.x, p + threadIdx.x);
  Commit();
  WaitAll();
  __syncwarp();
  p[threadIdx.x] = s[threadIdx.x ^ 1];
}
KERNEL(copies_twice)(int* p) {
  Copy(threadIdx.x, p + threadIdx.x);
  Copy(threadIdx.x, p + threadIdx.x);
}
KERNEL(lanes_missing)(int* p) {
  if (threadIdx.x < 20) p[threadIdx.x] = __shfl_xor_sync(~0u, p[threadIdx.x], 1);
}
KERNEL(barriers_differ)(int* p) {
  if (threadIdx.x < 32) {
    asm volatile("bar.sync 1;" ::: "memory");
  } else {
    asm volatile("bar.sync 2;" ::: "memory");
  }
  p[threadIdx.x] = 1;
}
KERNEL(undefined)(int* p) {
  int x;
  asm volatile("{.reg .b32 u; add.s32 %0, u, 1;}" : "=r"(x));
  p[threadIdx.x] = x;
}
KERNEL(divides)(int* p, int by) { p[threadIdx.x] /= by; }
KERNEL(unknown)(float* p) {
  float x;
  asm volatile("sin.approx.f32 %0, %1;" : "=f"(x) : "f"(p[0]));
  p[threadIdx.x] = x;
}
// One operation after another on words of a, b and c.
#define PUT(instruction, ...)                                     \
  asm(instruction : "=r"(word) : __VA_ARGS__);                    \
  *to++ = word;
KERNEL(halves)(const u32* a, const u32* b, const u32* c, u32* to) {
  u32 word;
  PUT("abs.f16x2 %0, %1;", "r"(a[0]))
  PUT("neg.f16x2 %0, %1;", "r"(a[0]))
  PUT("abs.f16x2 %0, %1;", "r"(a[1]))
  PUT("max.f16x2 %0, %1, %2;", "r"(a[1]), "r"(b[1]))
  PUT("min.f16x2 %0, %1, %2;", "r"(a[1]), "r"(b[1]))
  PUT("max.f16x2 %0, %1, %2;", "r"(a[2]), "r"(b[2]))
  PUT("min.f16x2 %0, %1, %2;", "r"(a[2]), "r"(b[2]))
  PUT("add.rn.f16x2 %0, %1, %2;", "r"(a[3]), "r"(b[3]))
  PUT("mul.rn.f16x2 %0, %1, %2;", "r"(a[4]), "r"(b[4]))
  PUT("fma.rn.f16x2 %0, %1, %2, %3;", "r"(a[5]), "r"(b[5]), "r"(c[5]))
  PUT("fma.rn.bf16x2 %0, %1, %2, %3;", "r"(a[6]), "r"(b[6]), "r"(c[6]))
}
"""
# (a, b, c) by index, each the high half and the low.
HALVES = [
    (0xFC008001, 0, 0),           # -infinity, the smallest subnormal below 0
    (0xFE013C00, 0x40007E00, 0),  # a NaN and 2; 1 and a NaN
    (0xFFFF8000, 0x7E010000, 0),  # NaN and NaN; -0 and +0
    (0x00010001, 0x00018001, 0),  # sums of subnormals
    (0x04007BFF, 0x38003C01, 0),  # 2^-14 / 2; the largest times 1 + 2^-10
    # 2^-11 - 2^-31 + (1 + 2^-10), just below a tie; infinity - infinity
    (0x28017C00, 0x23FE3C00, 0x3C01FC00),
    # In bf16 2^-126 * 2^-7, the smallest subnormal; 2^-8 - 2^-16 + (1 + 2^-7), just below a tie
    (0x00803B80, 0x3C003F7F, 0x00003F81),
]
# What the kernel `halves` stores, or, of a half, NAN: any NaN.
NAN = None
EXPECTED_HALVES = [
    (0x7C00, 0x0001), (0x7C00, 0x0001), (NAN, 0x3C00), (0x4000, 0x3C00), (0x4000, 0x3C00),
    (0x7FFF, 0x0000), (0x7FFF, 0x8000), (0x0002, 0x0000), (0x0200, 0x7C00), (0x3C01, 0x7FFF),
    (0x0001, 0x3F81),
]
U64, I32, F32, SIZE, POINTER = (
    ctypes.c_uint64, ctypes.c_int, ctypes.c_float, ctypes.c_size_t, ctypes.c_void_p)


def compiled(folder):
    """The image that the shim makes of KERNELS."""
    rtc = ctypes.CDLL(str(folder / "libptxemu_nvrtc.so"))
    program, size = POINTER(), SIZE()
    by_reference = ctypes.byref(program)
    assert not rtc.nvrtcCreateProgram(by_reference, KERNELS.encode(), b"k.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90a", b"--ptxas-options=-v")
    if rtc.nvrtcCompileProgram(program, 2, options):
        rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetCUBIN(program, image)
    return image.raw


class Gpu:
    def __init__(self, folder, image):
        self.cu = ctypes.CDLL(str(folder / "libptxemu_cuda.so"))
        assert self.cu.cuInit(0) == 0
        context, self.module = POINTER(), POINTER()
        self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self.cu.cuCtxPushCurrent_v2(context)
        assert self.cu.cuModuleLoadData(ctypes.byref(self.module), image) == 0

    def function(self, name):
        f = POINTER()
        assert self.cu.cuModuleGetFunction(ctypes.byref(f), self.module, name.encode()) == 0
        return f

    def memory(self, size=1024, fill=True):
        p = U64()
        assert self.cu.cuMemAlloc_v2(ctypes.byref(p), SIZE(size)) == 0
        if fill:
            assert self.cu.cuMemsetD8Async(p, 1, SIZE(size), None) == 0
        return p.value

    def write(self, to, values):
        address, count = values.buffer_info()
        size = SIZE(count * values.itemsize)
        assert self.cu.cuMemcpyHtoDAsync_v2(U64(to), POINTER(address), size, None) == 0
        assert self.cu.cuStreamSynchronize(None) == 0

    def read(self, values, at):
        """Enqueues a copy into `values`."""
        address, count = values.buffer_info()
        size = SIZE(count * values.itemsize)
        assert self.cu.cuMemcpyDtoHAsync_v2(POINTER(address), U64(at), size, None) == 0

    def launch(self, name, *values, types=None, threads=64, shared=256):
        """The result of the launch, or else of waiting for it."""
        types = types or [U64] * len(values)

        class Params(ctypes.Structure):
            _fields_ = [(f"p{i}", t) for i, t in enumerate(types)]

        params = Params(*values)
        # Without the padding at its end, as .param has it.
        last = getattr(Params, f"p{len(types) - 1}")
        size = SIZE(last.offset + last.size)
        extra = (POINTER * 5)(1, ctypes.addressof(params), 2, ctypes.addressof(size), None)
        f = self.function(name)
        result = self.cu.cuLaunchKernel(f, 1, 1, 1, threads, 1, 1, shared, None, None, extra)
        return result or self.cu.cuStreamSynchronize(None)

    def capturing(self):
        stream = POINTER()
        self.cu.cuStreamCreate(ctypes.byref(stream), 1)
        self.cu.cuStreamBeginCapture_v2(stream, 1)
        return stream


CASES = {}


def case(result, says=""):
    """A case: the CUresult that it must return, and what must be said of it."""
    return lambda function: CASES.setdefault(function.__name__, (function, result, says))


def planted(name, kernel, result, says="", **options):
    CASES[name] = (lambda gpu: gpu.launch(kernel, gpu.memory(), **options), result, says)


planted("store_misaligned", "misaligned", 716, "misaligned")
planted("load_of_what_the_kernel_stored", "read_only", 719, "ld.global.nc")
planted("shared_never_stored", "uninitialised", 719, "never stored")
planted("shared_beyond", "no_race", 700, "shared address 128 of 128", shared=128)
planted("race_of_warps", "race", 719, "race in shared memory")
planted("race_within_a_warp", "warp_race", 719, "race in shared memory")
planted("no_race", "no_race", 0)
planted("copy_not_waited_for", "no_wait", 719, "not been waited for")
planted("copy_waited_for", "waits", 0)
planted("barrier_before_waiting_for_a_copy", "barrier_before_wait", 719, "race in shared memory")
planted("barrier_after_waiting_for_a_copy", "barrier_after_wait", 0)
planted("copies_to_one_place", "copies_twice", 719, "two cp.async")
planted("lanes_that_do_not_come", "lanes_missing", 719, "lanes that have left")
planted("different_barriers", "barriers_differ", 719, "different barriers")
planted("undefined_register_stored", "undefined", 719, "not defined")
planted("shared_beyond_48_kib", "no_race", 1, "dynamic shared memory", shared=64 << 10)

AXPY = [U64, U64, F32, I32]


@case(0)
def right_kernel(gpu):
    x, y = gpu.memory(256), gpu.memory(256)
    for p in (x, y):
        gpu.write(p, array.array("f", range(64)))
    assert gpu.launch("axpy", x, y, 2.0, 64, types=AXPY) == 0
    got = array.array("f", [0] * 64)
    gpu.read(got, y)
    assert list(got) == [0] * 64, "a copy that nobody waited for is there"
    gpu.cu.cuStreamSynchronize(None)
    assert list(got) == [3.0 * i for i in range(64)], list(got)
    return 0


@case(0)
def halves(gpu):
    operands = [gpu.memory() for _ in range(3)]
    for p, words in zip(operands, zip(*HALVES)):
        gpu.write(p, array.array("I", words))
    to = gpu.memory()
    assert gpu.launch("halves", *operands, to, threads=1) == 0
    got = array.array("I", [0] * len(EXPECTED_HALVES))
    gpu.read(got, to)
    gpu.cu.cuStreamSynchronize(None)
    for index, (word, pair) in enumerate(zip(got, EXPECTED_HALVES)):
        for half, expected in zip((word >> 16, word & 0xFFFF), pair):
            right = half & 0x7FFF > 0x7C00 if expected is NAN else half == expected
            assert right, f"operation {index}: {word:08x}, expected {pair}"
    return 0


@case(1, "20 bytes of parameters")
def short_parameters(gpu):
    return gpu.launch("axpy", gpu.memory(), gpu.memory(), 2.0, types=AXPY[:3])


@case(1, "__launch_bounds__")
def threads_beyond_launch_bounds(gpu):
    return gpu.launch("axpy", gpu.memory(), gpu.memory(), 2.0, 1, types=AXPY, threads=128)


@case(0)
def shared_beyond_48_kib_allowed(gpu):
    assert gpu.cu.cuFuncSetAttribute(gpu.function("no_race"), 8, 64 << 10) == 0
    return gpu.launch("no_race", gpu.memory(), shared=64 << 10)


@case(201, "without a current context")
def no_context(gpu):
    gpu.cu.cuCtxPopCurrent_v2(ctypes.byref(POINTER()))
    return gpu.cu.cuMemsetD8Async(U64(0), 0, SIZE(1), None)


@case(1, "freed before")
def freed_twice(gpu):
    p = gpu.memory()
    assert gpu.cu.cuMemFree_v2(U64(p)) == 0
    return gpu.cu.cuMemFree_v2(U64(p))


@case(700, "freed")
def used_after_free(gpu):
    p = gpu.memory()
    gpu.cu.cuMemFree_v2(U64(p))
    return gpu.launch("beyond", p, 0, types=[U64, I32])


@case(700, "bytes into an allocation")
def store_beyond(gpu):
    return gpu.launch("beyond", gpu.memory(), 250, types=[U64, I32])


@case(719, "nobody stored")
def global_never_stored(gpu):
    return gpu.launch("copies", gpu.memory(fill=False), gpu.memory())


@case(719, "division by zero")
def division_by_zero(gpu):
    return gpu.launch("divides", gpu.memory(), 0, types=[U64, I32])


@case(719)
def fault_is_sticky(gpu):
    gpu.launch("uninitialised", gpu.memory())
    return gpu.cu.cuStreamSynchronize(None)


@case(200, "not known here")
def unknown_instruction(gpu):
    return gpu.cu.cuModuleGetFunction(ctypes.byref(POINTER()), gpu.module, b"unknown")


@case(900, "under capture")
def captured_stream_synchronised(gpu):
    return gpu.cu.cuStreamSynchronize(gpu.capturing())


@case(900, "while a stream is captured")
def memory_allocated_during_capture(gpu):
    gpu.capturing()
    return gpu.cu.cuMemAlloc_v2(ctypes.byref(U64()), SIZE(64))


def run_here(*arguments):
    """This script with other arguments, under settings that the caller's environment lacks."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PTXEMU_")}
    env |= {"PTXEMU_RACES": "1", "PTXEMU_ARCH": "sm_90a"}
    if "PTXEMU_NVRTC" in os.environ:
        env["PTXEMU_NVRTC"] = os.environ["PTXEMU_NVRTC"]
    return subprocess.run([sys.executable, __file__, *map(str, arguments)], env=env,
                          capture_output=True, text=True, check=False, timeout=300)


class PlantedFaults(unittest.TestCase):
    """One test for each case."""


def add_test(name, folder, image):
    _, result, says = CASES[name]

    def test(self):
        ran = run_here("--case", folder, image, name)
        self.assertEqual(ran.stdout.strip(), str(result), ran.stderr)
        self.assertIn(says, ran.stderr)

    setattr(PlantedFaults, "test_" + name, test)


def main():
    if sys.argv[1] == "--compile":
        pathlib.Path(sys.argv[3]).write_bytes(compiled(pathlib.Path(sys.argv[2])))
        return 0
    if sys.argv[1] == "--case":
        folder, image, name = sys.argv[2:]
        print(CASES[name][0](Gpu(pathlib.Path(folder), pathlib.Path(image).read_bytes())))
        return 0
    folder = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        image = pathlib.Path(temporary) / "image"
        made = run_here("--compile", folder, image)
        if "no real NVRTC" in made.stderr:
            print("skipped:", made.stderr.strip())
            return SKIPPED
        if made.returncode:
            print(made.stderr)
            return 1
        for name in CASES:
            add_test(name, folder, image)
        names = ["PlantedFaults.test_" + name for name in sys.argv[2:]]
        program = unittest.main(argv=[sys.argv[0], *names], exit=False)
    return 0 if program.result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
