// Products of tiles in shared memory, summed in registers. kLanesPerRow neighbouring lanes share the rows that they own, kRowGroups apart;
// of a row of scores each lane has every kLanesPerRow-th column, of a row of an output groups of neighbouring columns.
#pragma once

constexpr i32 kRowGroups = kThreads / kLanesPerRow;
static_assert(kThreads % 32 == 0 && 32 % kLanesPerRow == 0, "the lanes of a row lie in one warp");
static_assert(kLanesPerRow % kRealsPerVector == 0, "rows of weights start at a whole vector");

constexpr i32 kPad = kRealsPerVector;  // one vector a row keeps rows that are read side by side out of each other's banks

// How many neighbouring columns of an output a lane has at a time, of kColumns in all
template <i32 kColumns> constexpr i32 kVectorOf = kColumns % kRealsPerVector == 0 ? kRealsPerVector : kColumns % 2 == 0 ? 2 : 1;

struct Thread {
  i32 row_group = threadIdx.x / kLanesPerRow;
  i32 lane = threadIdx.x % kLanesPerRow;  // among the lanes of a row
  __device__ __forceinline__ i32 row(i32 i) const { return row_group + i * kRowGroups; }
  __device__ __forceinline__ i32 key(i32 j) const { return lane + j * kLanesPerRow; }
  template <i32 kVector> __device__ __forceinline__ i32 column(i32 c) const { return (lane + c * kLanesPerRow) * kVector; }  // of vector c
};

// S = A B^T, of rows of kDepth numbers
template <i32 kDepth, i32 kPitchA, i32 kPitchB, i32 kRows, i32 kKeys>
__device__ __forceinline__ void multiply_transposed(Real (&s)[kRows][kKeys], const Real* a, const Real* b, Thread own) {
#pragma unroll
  for (i32 i = 0; i < kRows; ++i)
#pragma unroll
    for (i32 j = 0; j < kKeys; ++j) s[i][j] = 0;
#pragma unroll 2
  for (i32 c = 0; c < kDepth; c += kRealsPerVector) {
    RealVector b_rmem[kKeys];
#pragma unroll
    for (i32 j = 0; j < kKeys; ++j) b_rmem[j] = *reinterpret_cast<const RealVector*>(b + own.key(j) * kPitchB + c);
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      const RealVector a_rmem = *reinterpret_cast<const RealVector*>(a + own.row(i) * kPitchA + c);
#pragma unroll
      for (i32 e = 0; e < kRealsPerVector; ++e)
#pragma unroll
        for (i32 j = 0; j < kKeys; ++j) s[i][j] += a_rmem.x[e] * b_rmem[j].x[e];
    }
  }
}

// O += P B, with kDepth columns of P
template <i32 kDepth, i32 kPitchP, i32 kPitchB, i32 kRows, i32 kColumns>
__device__ __forceinline__ void multiply_add(Real (&o)[kRows][kColumns], const Real* p, const Real* b, Thread own) {
  constexpr i32 kVector = kVectorOf<kColumns>;
#pragma unroll 1
  for (i32 key = 0; key < kDepth; key += kRealsPerVector) {
    RealVector p_rmem[kRows];
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) p_rmem[i] = *reinterpret_cast<const RealVector*>(p + own.row(i) * kPitchP + key);
#pragma unroll
    for (i32 e = 0; e < kRealsPerVector; ++e)
#pragma unroll
      for (i32 c = 0; c < kColumns / kVector; ++c) {
        const auto b_rmem = *reinterpret_cast<const Vector<Real, kVector>*>(b + (key + e) * kPitchB + own.column<kVector>(c));
#pragma unroll
        for (i32 i = 0; i < kRows; ++i)
#pragma unroll
          for (i32 w = 0; w < kVector; ++w) o[i][c * kVector + w] += p_rmem[i].x[e] * b_rmem.x[w];
      }
  }
}
