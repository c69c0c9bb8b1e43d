// From S^T and dP^T of a warp to P^T and dS^T in shared memory.
//
// float16 does not reach far: P is multiplied by 2^15, dS by a power of two that a block finds before it starts.
#pragma once

constexpr float kWeightExponent = kHalf ? 15 : 0, kWeightUnit = kHalf ? 0x1p15f : 1;

// Two neighbours of a row of P^T or dS^T to shared memory; floats as backward_mma_tf32.cuh wants them
template <class T> __device__ __forceinline__ void store_pair(u8* tile, i32 row, i32 column, float x0, float x1, T) {
  u8* const to = tile + TileLayout<kBr>::offset(row, column / kChunkElements) + column % kChunkElements * sizeof(Element);
  *reinterpret_cast<u32*>(to) = packed(x0, x1, Element{});
}
__device__ __forceinline__ void store_pair(u8* tile, i32 row, i32 column, float x0, float x1, float) {
  const i32 chunk = column / kColumnBlock * 2, place = column % kColumnBlock / 2;
  reinterpret_cast<float*>(tile + TileLayout<kBr>::offset(row, chunk))[place] = x0;
  reinterpret_cast<float*>(tile + TileLayout<kBr>::offset(row, chunk + 1))[place] = x1;
}

// S^T becomes P^T times the slope of the scores, and P^T goes to shared memory. Where a row does not see a key, -0 tells of it.
template <bool kMasked>
__device__ __forceinline__ void weigh(ScoreFragments& s, u8* p_tile, const float* row_lse, const Scores& score, const Visibility& see,
                                      i32 first_row, i32 first_key, const Warp& warp, Lane lane) {
  const float scale = score.scale;
#pragma unroll
  for (i32 j = 0; j < kRowPieces; ++j) {
    const i32 column = warp.row + j * kColumnBlock + 2 * lane.t;
    const auto lse = *reinterpret_cast<const Vector<float, 2>*>(row_lse + column);
    Vector<float, 2> lse_low = {};
    if (kLsePartCount > 1) lse_low = *reinterpret_cast<const Vector<float, 2>*>(row_lse + kBr + column);
#pragma unroll
    for (i32 i = 0; i < kKeyBlocks; ++i) {
      float weights[4];
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        const i32 row = first_row + column + e % 2, key = first_key + warp.key + i * kRowBlock + lane.g + 8 * (e / 2);
        float& x = s[i][j][e];
        float log_weight, slope = 1;
        if constexpr (kSoftcap || kBias) {
          const auto z = score.with_slope(x, min(row, see.query_length - 1), kMasked && key >= see.key_length ? 0 : key);
          log_weight = z.score - lse.x[e % 2];
          slope = z.slope;
        } else {
          log_weight = fmaf(x, scale, -lse.x[e % 2]);
        }
        if (kLsePartCount > 1) log_weight -= lse_low.x[e % 2];
        weights[e] = exp2_of(fmaf(log_weight, static_cast<float>(kLog2E), kWeightExponent));
        x = weights[e] * slope;
        if (kMasked && !see.sees(row, key)) {
          weights[e] = 0;
          x = -0.0f;
        }
      }
#pragma unroll
      for (i32 e = 0; e < 4; e += 2) store_pair(p_tile, warp.key + i * kRowBlock + lane.g + 4 * e, column, weights[e], weights[e + 1], Element{});
    }
  }
}

// dP^T becomes dS^T, times `unit`, and goes to shared memory.
template <bool kMasked>
__device__ __forceinline__ void store_ds(u8* ds_tile, const ScoreFragments& s, ScoreFragments& dp, const float* row_delta, float unit,
                                         const Warp& warp, Lane lane) {
  const float factor = unit / kWeightUnit;  // a power of two
#pragma unroll
  for (i32 j = 0; j < kRowPieces; ++j) {
    const i32 column = warp.row + j * kColumnBlock + 2 * lane.t;
    const auto delta = *reinterpret_cast<const Vector<float, 2>*>(row_delta + column);
    const float scaled_delta[2] = {delta.x[0] * factor, delta.x[1] * factor};
#pragma unroll
    for (i32 i = 0; i < kKeyBlocks; ++i) {
      float ds[4];
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        const float above = fmaf(dp[i][j][e], factor, -scaled_delta[e % 2]);
        const bool unseen = kMasked && __float_as_uint(s[i][j][e]) == 0x80000000;
        ds[e] = dp[i][j][e] = unseen ? 0 : s[i][j][e] * above;
      }
#pragma unroll
      for (i32 e = 0; e < 4; e += 2) store_pair(ds_tile, warp.key + i * kRowBlock + lane.g + 4 * e, column, ds[e], ds[e + 1], Element{});
    }
  }
}

// ---- the range of float16 ----
// The largest of the block's x, each on its own
template <i32 n> __device__ __forceinline__ void max_of_block(float (&x)[n], float* shared) {
#pragma unroll
  for (i32 i = 0; i < n; ++i) {
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) x[i] = fmaxf(x[i], __shfl_xor_sync(0xffffffff, x[i], step));
    if (threadIdx.x % 32 == 0) shared[i * kWarps + threadIdx.x / 32] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (i32 i = 0; i < n; ++i)
#pragma unroll
    for (i32 warp = 0; warp < kWarps; ++warp) x[i] = fmaxf(x[i], shared[i * kWarps + warp]);
  __syncthreads();
}

// The power of two that brings the bound  |dO| |V| + |delta|  of a block's |dS| close to, but not beyond, what float16 can hold
__device__ __forceinline__ float unit_of_ds(const MmaParams& own, const Place& at, const RowTiles& rows, const Shared& shared) {
  const Params& p = own.p;
  using Four = Vector<float, 4>;
  using Chunk = Vector<Element, kChunkElements>;
  float size[3] = {};  // of dO, delta and V
  for (i32 head = 0; head < p.group; ++head) {
    const i64 first = static_cast<i64>(at.batch * p.heads + at.kv_head * p.group + head) * p.statistics_rows;
#pragma unroll 4  // loads under way together
    for (i32 row = rows.first * kBr + 4 * static_cast<i32>(threadIdx.x); row < rows.end * kBr; row += 4 * kThreads) {
      const Four dout_size = *reinterpret_cast<const Four*>(own.row_sizes + first + row);
      const Four delta = *reinterpret_cast<const Four*>(p.row_delta + first + row);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        size[0] = fmaxf(size[0], dout_size.x[e]);
        size[1] = fmaxf(size[1], fabsf(delta.x[e]));
      }
    }
  }
  constexpr i32 kChunks = TileLayout<kDv>::kChunks;
  for (i32 i = threadIdx.x; i < kBc * kChunks; i += kThreads) {
    const Chunk v = *reinterpret_cast<const Chunk*>(shared.v() + TileLayout<kDv>::offset(i / kChunks, i % kChunks));
#pragma unroll
    for (i32 e = 0; e < kChunkElements; ++e) size[2] = fmaxf(size[2], fabsf(to_real(v.x[e])));
  }
  max_of_block(size, reinterpret_cast<float*>(shared.p()));
  const float bound = sqrtf(kDv) * size[0] * size[2] + size[1];
  if (!(bound < kInfinity)) return 1;
  const i32 exponent = static_cast<i32>(__float_as_uint(bound) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + min(max(14 - exponent, -60), 60)) << 23);
}
