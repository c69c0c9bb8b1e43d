// Fragments of mma.sync, as every kernel on it has them: an accumulator is a 16 x 8 block, lane 4g + t of which holds columns 2t, 2t + 1 of
// rows g and g + 8; operands come from tiles in shared memory (mma_tile.cuh) by ldmatrix.
#pragma once

constexpr i32 kRowBlock = 16;    // rows of an accumulator
constexpr i32 kColumnBlock = 8;  // and its columns
constexpr i32 kStepChunks = 2;   // of each row that one step of a product along rows takes: 32 bytes

struct Lane {
  i32 index = threadIdx.x % 32;
  i32 g = threadIdx.x % 32 / 4;  // row of a block, and g + 8
  i32 t = threadIdx.x % 4;       // column pair of a block
};

// Two floats rounded to T, x0 in the lower half. sm_75 has no instruction for it.
template <class T> __device__ __forceinline__ u32 packed(float x0, float x1, T) {
  if constexpr (kMmaK == 16)
    return pack2(x0, x1, T{});
  else
    return cvt_rn_f16_f32(x0).bits | static_cast<u32>(cvt_rn_f16_f32(x1).bits) << 16;
}

// d += a b over 16 elements, in one instruction or, for sm_75, in two
template <class T> __device__ __forceinline__ void multiply_block(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, T) {
  if constexpr (kMmaK == 16) {
    const u32 b[2] = {b0, b1};
    mma_m16n8k16(d, a, b, T{});
  } else {
    const u32 a0[2] = {a[0], a[1]}, a1[2] = {a[2], a[3]};
    mma_m16n8k8(d, a0, b0, T{});
    mma_m16n8k8(d, a1, b1, T{});
  }
}

// The addresses that a lane gives to ldmatrix for a 16 x 2-chunk piece of a tile: first the rows of one chunk, or the chunks of a row.
template <i32 kColumns> __device__ __forceinline__ u32 piece_by_rows(const u8* tile, i32 first_row, Lane lane) {
  return smem_address(tile + TileLayout<kColumns>::offset(first_row + lane.index % 16, lane.index / 16));
}
template <i32 kColumns> __device__ __forceinline__ u32 piece_by_chunks(const u8* tile, i32 first_row, Lane lane) {
  return smem_address(tile + TileLayout<kColumns>::offset(first_row + lane.index % 8 + lane.index / 16 * 8, lane.index / 8 % 2));
}
