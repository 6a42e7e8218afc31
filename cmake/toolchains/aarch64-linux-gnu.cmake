# Cross-compiles for 64-bit Arm with Debian's g++-aarch64-linux-gnu and its arm64 packages. What is
# built runs here under qemu-user, as the processor that the environment variable QEMU_CPU names.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
