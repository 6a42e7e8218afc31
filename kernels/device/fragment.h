// Which element of a matrix each lane holds in which register: one table for tiles, for the SIMT
// executor and for tests. Freestanding, so that kernels may use it.
//
//   mma m16n8k16, A 16 x 16 of 16-bit elements      B 16 x 8             C and D 16 x 8, f32
//            k: 0 .. 7     8 .. 15                     n: 0 .. 7           n: 0 .. 7
//   m 0..7   register 0    register 2        k 0..7    register 0   m 0..7    registers 0, 1
//   m 8..15  register 1    register 3        k 8..15   register 1   m 8..15   registers 2, 3
//
// Within an 8 x 8 part, lane 4g + c holds row g and columns 2c, 2c + 1; of B, column g and rows 2c,
// 2c + 1. So C, packed in pairs, has the layout of A: the product of one mma feeds the next.
#ifndef KVANT_KERNELS_DEVICE_FRAGMENT_H_
#define KVANT_KERNELS_DEVICE_FRAGMENT_H_

#ifdef __CUDACC__
#define KVANT_HOST_DEVICE __host__ __device__
#else
#define KVANT_HOST_DEVICE
#endif

namespace kvant::device {

enum class Fragment {
  kMmaK16A,            // m16n8k16, 16-bit elements
  kMmaK16B,            //
  kMmaK8A,             // m16n8k8, 16-bit elements
  kMmaK8B,             //
  kMmaTF32A,           // m16n8k8, tf32
  kMmaTF32B,           //
  kMmaC,               // the f32 accumulator of all of them
  kMatrix4,            // LoadMatrix4: four 8 x 8 matrices, below each other
  kMatrix4Transposed,  // LoadMatrix4Transposed
  kMatrix,             // TransposeMatrix: its argument
  kMatrixTransposed,   // TransposeMatrix: its result
};

struct Element {
  int row;
  int column;
};

// All layouts are linear in the bits of (lane, register, half): the steps say by how much row and
// column grow with each.
struct FragmentLayout {
  int rows;
  int columns;
  int registers;       // per lane
  int halves;          // elements per register
  Element group;       // step of g = lane / 4
  Element in_group;    // step of c = lane % 4
  Element register_0;  // step of bit 0 of the register's index
  Element register_1;  // step of bit 1
  Element half;        // step from the low half of a register to its high half

  // The element in half `h` of register `r` of a lane.
  KVANT_HOST_DEVICE constexpr Element At(int lane, int r, int h) const {
    const int g = lane / 4;
    const int c = lane % 4;
    const int r0 = r % 2;
    const int r1 = r / 2;
    return {
        g * group.row + c * in_group.row + r0 * register_0.row + r1 * register_1.row + h * half.row,
        g * group.column + c * in_group.column + r0 * register_0.column + r1 * register_1.column +
            h * half.column};
  }
};

// A function, because device code may not refer to constants of the host.
KVANT_HOST_DEVICE constexpr FragmentLayout LayoutOf(Fragment fragment) {
  // clang-format off
  switch (fragment) {  //                    rows, columns, registers, halves; steps
    case Fragment::kMmaK16A:           return {16, 16, 4, 2, {1, 0}, {0, 2}, {8, 0}, {0, 8}, {0, 1}};
    case Fragment::kMmaK16B:           return {16, 8, 2, 2, {0, 1}, {2, 0}, {8, 0}, {0, 0}, {1, 0}};
    case Fragment::kMmaK8A:            return {16, 8, 2, 2, {1, 0}, {0, 2}, {8, 0}, {0, 0}, {0, 1}};
    case Fragment::kMmaK8B:            return {8, 8, 1, 2, {0, 1}, {2, 0}, {0, 0}, {0, 0}, {1, 0}};
    case Fragment::kMmaTF32A:          return {16, 8, 4, 1, {1, 0}, {0, 1}, {8, 0}, {0, 4}, {0, 0}};
    case Fragment::kMmaTF32B:          return {8, 8, 2, 1, {0, 1}, {1, 0}, {4, 0}, {0, 0}, {0, 0}};
    case Fragment::kMmaC:              return {16, 8, 4, 1, {1, 0}, {0, 2}, {0, 1}, {8, 0}, {0, 0}};
    case Fragment::kMatrix4:           return {32, 8, 4, 2, {1, 0}, {0, 2}, {8, 0}, {16, 0}, {0, 1}};
    case Fragment::kMatrix4Transposed: return {32, 8, 4, 2, {0, 1}, {2, 0}, {8, 0}, {16, 0}, {1, 0}};
    case Fragment::kMatrix:            return {8, 8, 1, 2, {1, 0}, {0, 2}, {0, 0}, {0, 0}, {0, 1}};
    case Fragment::kMatrixTransposed:  return {8, 8, 1, 2, {0, 1}, {2, 0}, {0, 0}, {0, 0}, {1, 0}};
  }
  // clang-format on
  return {};
}

}  // namespace kvant::device

#endif  // KVANT_KERNELS_DEVICE_FRAGMENT_H_
