// The products of the backward pass for float (mma_tf32.cuh).
//
// The k indices t and t + 4 of a step along columns stand for the rows 2t and 2t + 1 of B, which lie in different banks for all lanes. To
// that end, a row of P^T and dS^T has of each eight columns first the even ones, then the odd ones.
//
// Infinities have no parts, and of small numbers the parts, or their products, are too small. Where there are such numbers in q, k, v or
// dO, these kernels do nothing, and those on CUDA cores everything.
#pragma once

constexpr float kSmallest = 0x1p-40f, kLargest = 0x1p60f;  // of a row's largest number, if it is not 0

// Whether a row is of numbers that cannot be served; of the lanes that share it, each looks at its own.
__device__ __forceinline__ bool is_special(const Element* row, i32 columns) {
  u32 largest = 0;  // its bits, of which NaN has the most
  for (i32 column = threadIdx.x % kStatisticsLanes; column < columns; column += kStatisticsLanes)
    largest = max(largest, __float_as_uint(to_real(row[column])) & 0x7fffffff);
#pragma unroll
  for (i32 step = kStatisticsLanes / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
  return largest >= __float_as_uint(kLargest) || (largest != 0 && largest < __float_as_uint(kSmallest));
}

// Looks at every live row of q, k, v and dO, which the threads of the grid share.
__device__ __forceinline__ void find_special_rows(const Params& p, i32* special) {
  const i64 rows_at_once = static_cast<i64>(gridDim.x) * kStatisticsRows;
  const i64 first = static_cast<i64>(blockIdx.x) * kStatisticsRows + threadIdx.x / kStatisticsLanes;
  const i32 kv_heads = p.heads / p.group;
  const i64 q_rows = static_cast<i64>(p.batch) * p.heads * p.n_q, k_rows = static_cast<i64>(p.batch) * kv_heads * p.n_k;
  bool found = false;
  for (i64 begin = 0; begin < q_rows; begin += rows_at_once) {  // by all lanes of a warp together
    const i64 row = min(begin + first, q_rows - 1);
    const i32 n = static_cast<i32>(row % p.n_q), head = static_cast<i32>(row / p.n_q % p.heads), batch = static_cast<i32>(row / p.n_q / p.heads);
    const bool live = n < visibility(p, batch, head).query_length;
    found |= is_special(p.q + batch * p.q_batch + head * p.q_head + n * p.q_row, live ? p.d : 0);
    found |= is_special(p.dout + batch * p.dout_batch + head * p.dout_head + n * p.dout_row, live ? p.d_v : 0);
  }
  for (i64 begin = 0; begin < k_rows; begin += rows_at_once) {
    const i64 row = min(begin + first, k_rows - 1);
    const i32 n = static_cast<i32>(row % p.n_k), head = static_cast<i32>(row / p.n_k % kv_heads), batch = static_cast<i32>(row / p.n_k / kv_heads);
    const bool live = n < visibility(p, batch, head * p.group).key_length;
    found |= is_special(p.k + batch * p.k_batch + head * p.k_head + n * p.k_row, live ? p.d : 0);
    found |= is_special(p.v + batch * p.v_batch + head * p.v_head + n * p.v_row, live ? p.d_v : 0);
  }
  if (found) *special = 1;
}

// Number e of an operand, as split() of mma_tf32.cuh parts it, by one operation less: 2^13 x is exact, and what rounding takes from
// (2^13 - 1) x is what x has beyond its upper 11 bits.
template <class Operand> __device__ __forceinline__ void take(Operand& operand, i32 e, float x) {
  constexpr float kShift = 1 << 13;
  const float upper = fmaf(x, kShift, -__fmul_rn(x, kShift - 1));
  operand.big[e] = __float_as_uint(upper);
  operand.small[e] = __float_as_uint(__fsub_rn(x, upper));
}

template <i32 kDepth, i32 kRowBlocks, i32 kColumnBlocks>
__device__ __forceinline__ void multiply_rows(float (&x)[kRowBlocks][kColumnBlocks][4], const u8* a_tile, i32 a_row, const u8* b_tile,
                                              i32 b_row, Lane lane, float) {
  using Tile = TileLayout<kDepth>;
  constexpr i32 kTogether = kColumnBlocks % 4 == 0 ? 4 : 2;  // blocks of B
  const u32 a_address = piece_by_rows<kDepth>(a_tile, a_row, lane), b_address = piece_by_chunks<kDepth>(b_tile, b_row, lane);
#pragma unroll 2
  for (i32 chunk = 0; chunk < Tile::kChunks; chunk += kStepChunks) {
    Tf32A a[kRowBlocks];
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) {
      u32 loaded[4];
      ldmatrix_x4(loaded, Tile::shifted(a_address, i * kRowBlock, chunk));
#pragma unroll
      for (i32 e = 0; e < 4; ++e) take(a[i], e, __uint_as_float(loaded[e]));
    }
#pragma unroll
    for (i32 j = 0; j < kColumnBlocks; j += kTogether) {
      Tf32B b[kTogether];
#pragma unroll
      for (i32 n = 0; n < kTogether; n += 2) {
        u32 loaded[4];
        ldmatrix_x4(loaded, Tile::shifted(b_address, (j + n) * kColumnBlock, chunk));
#pragma unroll
        for (i32 e = 0; e < 4; ++e) take(b[n + e / 2], e % 2, __uint_as_float(loaded[e]));
      }
      multiply_step(x, j, a, b);
    }
  }
}

template <class Tile> __device__ __forceinline__ u32 offset_of(i32 row, i32 column) {
  return Tile::offset(row, column / kChunkElements) + column % kChunkElements * sizeof(float);
}
// A number of a tile, `rows` (a multiple of 8) and `chunks` (of 2) from the one at `offset`
template <class Tile> __device__ __forceinline__ float number_at(const u8* tile, u32 offset, i32 rows, i32 chunks) {
  return *reinterpret_cast<const float*>(tile + Tile::shifted(offset, rows, chunks));
}

template <bool kTransposed, i32 kDepth, i32 kColumnsA, i32 kColumns, i32 kWarpsAside, i32 kRowBlocks>
__device__ __forceinline__ void multiply_columns(float (&x)[kRowBlocks][Share<kColumns, kWarpsAside>::kBlocks][4], const u8* a_tile, i32 a_first,
                                                 const u8* b_tile, i32 /*b_first: 0*/, Share<kColumns, kWarpsAside> own, Lane lane, float) {
  using ATile = TileLayout<kColumnsA>;
  using BTile = TileLayout<kColumns>;
  constexpr i32 kPairChunks = kPair / kChunkElements, kBlockChunks = kColumnBlock / kChunkElements;
  const i32 place = lane.g / 2 + 4 * (lane.g % 2);  // of column g among eight of P^T or dS^T
  const u32 a_address = piece_by_rows<kColumnsA>(a_tile, kTransposed ? 0 : a_first, lane);
  u32 a_offset[2], b_offset[2];  // of rows 2t and 2t + 1
#pragma unroll
  for (i32 odd = 0; odd < 2; ++odd) {
    a_offset[odd] = ATile::shifted(offset_of<ATile>(2 * lane.t + odd, place), 0, a_first / kChunkElements);
    b_offset[odd] = BTile::shifted(offset_of<BTile>(2 * lane.t + odd, lane.g), 0, own.aside * kPairChunks);
  }
#pragma unroll kColumns > 128 ? 1 : 2
  for (i32 depth = 0; depth < kDepth; depth += kColumnBlock) {
    Tf32A a[kRowBlocks];
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) {
      if constexpr (kTransposed) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e)
          take(a[i], e, number_at<ATile>(a_tile, a_offset[e / 2], depth, (2 * i + e % 2) * kBlockChunks));
      } else {
        u32 loaded[4];
        ldmatrix_x4(loaded, ATile::shifted(a_address, i * kRowBlock, depth / kChunkElements));
#pragma unroll
        for (i32 e = 0; e < 4; ++e) take(a[i], e, __uint_as_float(loaded[e]));
      }
    }
#pragma unroll
    for (i32 j = 0; j < own.kBlocks; j += 2) {
      if (!own.has(j)) break;
      Tf32B b[2];
#pragma unroll
      for (i32 n = 0; n < 2; ++n)
#pragma unroll
        for (i32 odd = 0; odd < 2; ++odd)
          take(b[n], odd, number_at<BTile>(b_tile, b_offset[odd], depth, j / 2 * kWarpsAside * kPairChunks + n * kBlockChunks));
      multiply_step(x, j, a, b);
    }
  }
}
