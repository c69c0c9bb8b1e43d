// Tiles of a matrix on their way between device memory, shared memory and registers.
#pragma once

constexpr i32 kVectorBytes = 16;
constexpr i32 kRealsPerVector = kVectorBytes / sizeof(Real);

// Neighbouring numbers that move as one access.
template <class T, int n> struct alignas(n * sizeof(T)) Vector {
  T x[n];
};
using RealVector = Vector<Real, kRealsPerVector>;

// How many elements one access to device memory moves: 16 bytes where every row allows it, else one.
constexpr i32 kElementsPerAccess = kAligned ? kVectorBytes / sizeof(Element) : 1;
using ElementVector = Vector<Element, kElementsPerAccess>;

// Rows [0, rows_live) and columns [0, columns_live) of a tile from device memory, as Real, to shared memory of `kPitch` a row; zeros
// elsewhere, so that what lies beyond a sequence never enters a product. kAtOnce accesses of a thread are under way together.
template <i32 kRows, i32 kColumns, i32 kPitch, i32 kAtOnce = 8>
__device__ __forceinline__ void load_tile(Real* tile, const Element* source, i64 row_stride, i32 rows_live, i32 columns_live) {
  constexpr i32 kPerRow = kColumns / kElementsPerAccess;
  constexpr i32 kAccesses = kRows * kPerRow;
#pragma unroll kAtOnce
  for (i32 i = threadIdx.x; i < kAccesses; i += kThreads) {
    const i32 row = i / kPerRow, column = i % kPerRow * kElementsPerAccess;
    ElementVector from = {};
    if (row < rows_live && column < columns_live) from = *reinterpret_cast<const ElementVector*>(source + row * row_stride + column);
    constexpr i32 kStore = kElementsPerAccess < kRealsPerVector ? kElementsPerAccess : kRealsPerVector;
#pragma unroll
    for (i32 part = 0; part < kElementsPerAccess; part += kStore) {
      Vector<Real, kStore> to;
#pragma unroll
      for (i32 e = 0; e < kStore; ++e) to.x[e] = to_real(from.x[part + e]);
      *reinterpret_cast<Vector<Real, kStore>*>(tile + row * kPitch + column + part) = to;
    }
  }
}
