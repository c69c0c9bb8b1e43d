// The gradient of the bias, on CUDA cores, beside any family that computes the others.
//
//   dbias = P o (dP - delta),  P = e^(S - LSE),  dP = dO V^T,  summed over the axes along which the bias is broadcast
//
// A block owns a tile of B_r x B_c of the bias itself and walks over all that share it: where the bias has one batch entry, head, row or
// key, over every one there is. So no sum is shared between blocks, and nothing is kept but the sums, in registers; in double for float,
// as what is summed over a row is 0 but for rounding.
#include "ptx.cuh"
#include "variant.cuh"
#include "arithmetic.cuh"
#include "backward_params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "simt_products.cuh"
#include "backward_statistics.cuh"
#include "backward_scores.cuh"

// ---- constants and shared memory: Q, dO, K, V (where kBothTiles; else in the place of K); sums of the row groups, in the end ----
constexpr i32 kRows = kBr / kRowGroups;
constexpr i32 kKeys = kBc / kLanesPerRow;
constexpr i32 kPitch1 = kD + kPad;
constexpr i32 kPitch2 = kDv + kPad;
constexpr i32 kPitchShared = kPitch1 > kPitch2 ? kPitch1 : kPitch2;
constexpr i32 kPitchK = kBothTiles ? kPitch1 : kPitchShared;
constexpr i32 kPitchV = kBothTiles ? kPitch2 : kPitchShared;

static_assert(kRowGroups * kBc * sizeof(Lse) <= (kBr * (kPitch1 + kPitch2) + kBc * kPitchShared) * sizeof(Real), "the sums take the tiles' place");
static_assert(kThreads >= kBc, "a thread adds up each key");

// ---- pieces ----
struct Range {
  i32 first, end;
};
__device__ __forceinline__ Range all_or_one(bool all, i32 count, i32 one) { return all ? Range{0, count} : Range{one, one + 1}; }

__device__ __forceinline__ void write(const Params& p, BiasElement* target, Lse sum) {
  const Real before = p.add_to_dbias ? to_real(*target) : Real(0);
  from_real(*target, before + static_cast<Real>(sum));
}

// ---- the kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_bias(const __grid_constant__ Params p) {
  // Prologue: which tile of the bias, and what shares it.
  const bool all_batches = p.dbias_batch == 0, all_heads = p.dbias_head == 0, all_rows = p.dbias_row == 0, all_keys = p.dbias_column == 0;
  i32 block = static_cast<i32>(blockIdx.x);
  const i32 key_tile = all_keys ? 0 : block % p.key_tiles;
  block = all_keys ? block : block / p.key_tiles;
  const i32 row_tile = all_rows ? 0 : block % p.row_tiles;
  block = all_rows ? block : block / p.row_tiles;
  const i32 head = all_heads ? 0 : block % p.heads;
  const i32 batch = all_heads ? block : block / p.heads;
  const Range batches = all_or_one(all_batches, p.batch, batch), heads = all_or_one(all_heads, p.heads, head);
  const Range rows = all_or_one(all_rows, p.row_tiles, row_tile), keys = all_or_one(all_keys, p.key_tiles, key_tile);
  const Thread own{};

  DYNAMIC_SMEM(smem);
  Real* const q_smem = reinterpret_cast<Real*>(smem);
  Real* const dout_smem = q_smem + kBr * kPitch1;
  Real* const k_smem = dout_smem + kBr * kPitch2;
  Real* const v_smem = kBothTiles ? k_smem + kBc * kPitchK : k_smem;

  Lse sums[kRows][kKeys] = {};

  // Main loop: for each batch entry, head, tile of rows and of keys that shares the bias.
  for (i32 b = batches.first; b < batches.end; ++b)
    for (i32 h = heads.first; h < heads.end; ++h) {
      const Visibility see = visibility(p, b, h);
      const Scores score = scores(p, b, h);
      const i64 statistics = (static_cast<i64>(b) * p.heads + h) * p.statistics_rows;
      for (i32 i = rows.first; i < rows.end; ++i) {
        const i32 row0 = i * kBr;
        const KeyTiles tiles = key_tiles(see, row0, row0 + kBr);
        const i32 first = max(tiles.first, keys.first), end = min(tiles.end, keys.end);
        if (first >= end) continue;
        const i32 rows_live = see.query_length - row0;
        load_tile<kBr, kD, kPitch1>(q_smem, p.q + b * p.q_batch + h * p.q_head + row0 * p.q_row, p.q_row, rows_live, p.d);
        load_tile<kBr, kDv, kPitch2>(dout_smem, p.dout + b * p.dout_batch + h * p.dout_head + row0 * p.dout_row, p.dout_row, rows_live, p.d_v);
        RowGradient stats[kRows];
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) stats[r] = row_gradient(p.row_lse + statistics, p.row_delta + statistics, row0 + own.row(r));
        for (i32 j = first; j < end; ++j) {
          const i32 key0 = j * kBc, keys_live = see.key_length - key0, kv_head = h / p.group;
          const Element* const v = p.v + b * p.v_batch + kv_head * p.v_head + key0 * p.v_row;
          Real s[kRows][kKeys], dp[kRows][kKeys];
          load_tile<kBc, kD, kPitchK>(k_smem, p.k + b * p.k_batch + kv_head * p.k_head + key0 * p.k_row, p.k_row, keys_live, p.d);
          if (kBothTiles) load_tile<kBc, kDv, kPitchV>(v_smem, v, p.v_row, keys_live, p.d_v);
          __syncthreads();  // the tiles have come
          multiply_transposed<kD, kPitch1, kPitchK>(s, q_smem, k_smem, own);
          if (!kBothTiles) {
            __syncthreads();  // every warp is done with K
            load_tile<kBc, kDv, kPitchV>(v_smem, v, p.v_row, keys_live, p.d_v);
            __syncthreads();
          }
          multiply_transposed<kDv, kPitch2, kPitchV>(dp, dout_smem, v_smem, own);
#pragma unroll
          for (i32 r = 0; r < kRows; ++r)
#pragma unroll
            for (i32 c = 0; c < kKeys; ++c)
              sums[r][c] += differentiate<true>(s[r][c], dp[r][c], stats[r], score, see, row0 + own.row(r), key0 + own.key(c)).dz;
          __syncthreads();  // every warp is done with the tiles
        }
      }
    }

  // Epilogue: sums over the keys of a row, over the rows of a key, or both; in the order of lanes and of row groups.
  BiasElement* const dbias = p.dbias + batch * p.dbias_batch + head * p.dbias_head;
  const i32 row0 = row_tile * kBr, key0 = key_tile * kBc;
  if (all_keys) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 c = 1; c < kKeys; ++c) sums[r][0] += sums[r][c];
#pragma unroll
      for (i32 step = kLanesPerRow / 2; step > 0; step /= 2) sums[r][0] += __shfl_xor_sync(0xffffffff, sums[r][0], step);
    }
  }
  if (all_rows) {
    Lse* const of_groups = reinterpret_cast<Lse*>(smem);
#pragma unroll
    for (i32 c = 0; c < kKeys; ++c) {
#pragma unroll
      for (i32 r = 1; r < kRows; ++r) sums[0][c] += sums[r][c];
      of_groups[own.row_group * kBc + own.key(c)] = sums[0][c];
    }
    __syncthreads();
    const i32 key = threadIdx.x;
    if (key >= (all_keys ? 1 : min(kBc, p.n_k - key0))) return;
    Lse sum = 0;
    for (i32 group = 0; group < kRowGroups; ++group) sum += of_groups[group * kBc + key];
    write(p, dbias + (key0 + key) * p.dbias_column, sum);
  } else {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r)
#pragma unroll
      for (i32 c = 0; c < kKeys; ++c) {
        const i32 row = row0 + own.row(r), key = key0 + own.key(c);
        if (row < p.n_q && (all_keys ? own.key(c) == 0 : key < p.n_k)) write(p, dbias + row * p.dbias_row + key * p.dbias_column, sums[r][c]);
      }
  }
}
