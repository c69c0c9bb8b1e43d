// Attention backward on CUDA cores: every dtype, any GPU, the same bits on every run.
//
//   P = e^(S - LSE),  dP = dO V^T,  dS = P o (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO
//
// FlashAttention-2, Algorithm 2 (Dao 2023), as two passes, so that no sum is shared: in one a block owns B_c keys of a head of K and V and
// walks over the rows that see them, of all query heads of the group; in the other it owns B_r rows and walks over the keys that they
// see. Both are one function: the owner's two tiles A1, A2 (K, V or Q, dO) stay in shared memory, tiles B1, B2 of the other side pass by,
// S = A1 B1^T and dP = A2 B2^T, rows of which are the owner's; dS B1 and, for keys, P B2 are summed in registers. P and dS cross lanes of
// one warp only. S and dP are computed in both passes: seven products instead of five.
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

static_assert(kBr % kRowGroups == 0 && kBc % kRowGroups == 0, "every thread owns as many rows, or keys, as any other");
static_assert(kBr % kLanesPerRow == 0 && kBc % kLanesPerRow == 0, "and as many columns of S");
static_assert(kD % kLanesPerRow == 0 && kDv % kLanesPerRow == 0, "and of the gradients");

// ---- constants and shared memory: A1, A2, B1, B2 (where kBothTiles; else one buffer takes what passes by in turn), P or dS ----
constexpr i32 kPitch1 = kD + kPad;   // of K and Q
constexpr i32 kPitch2 = kDv + kPad;  // of V and dO
constexpr i32 kPitchShared = kPitch1 > kPitch2 ? kPitch1 : kPitch2;
constexpr i32 kPitchB1 = kBothTiles ? kPitch1 : kPitchShared;
constexpr i32 kPitchB2 = kBothTiles ? kPitch2 : kPitchShared;
constexpr i32 kAtOnce = kBothTiles || sizeof(Real) == 4 ? 8 : 1;  // loads of a thread, beside the sums in its registers
constexpr i32 kColumns1 = kD / kLanesPerRow;  // of a thread
constexpr i32 kColumns2 = kDv / kLanesPerRow;

template <bool kOwnsKeys> struct Owner {
  static constexpr i32 kOwn = kOwnsKeys ? kBc : kBr;
  static constexpr i32 kOther = kOwnsKeys ? kBr : kBc;
  static constexpr i32 kRows = kOwn / kRowGroups;
  static constexpr i32 kKeys = kOther / kLanesPerRow;
  static constexpr i32 kPitchP = kOther + (sizeof(Real) == 8 ? kPad : kLanesPerRow);  // so that rows of a warp use different banks
};

// ---- pieces ----
// Sums of a thread, times `factor`, to rows [0, rows_live) and columns [0, columns_live) in device memory; 0 for rows that are empty,
// where a sum may be 0 times infinity
template <i32 kRows, i32 kColumns>
__device__ __forceinline__ void store_rows(Element* target, i64 row_stride, const Real (&sums)[kRows][kColumns], Real factor,
                                           const bool (&is_empty)[kRows], i32 rows_live, i32 columns_live, Thread own) {
  constexpr i32 kVector = kVectorOf<kColumns>;
  constexpr i32 kStore = kVector < kElementsPerAccess ? kVector : kElementsPerAccess;
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) {
    if (own.row(i) >= rows_live) continue;
#pragma unroll
    for (i32 c = 0; c < kColumns / kVector; ++c)
#pragma unroll
      for (i32 w = 0; w < kVector; w += kStore) {
        const i32 column = own.column<kVector>(c) + w;
        Vector<Element, kStore> to;
#pragma unroll
        for (i32 e = 0; e < kStore; ++e) from_real(to.x[e], is_empty[i] ? Real(0) : sums[i][c * kVector + w + e] * factor);
        if (column < columns_live) *reinterpret_cast<Vector<Element, kStore>*>(target + own.row(i) * row_stride + column) = to;
      }
  }
}

// S and dP become P and dS
template <bool kOwnsKeys, bool kMasked, i32 kRows, i32 kKeys>
__device__ __forceinline__ void differentiate_tile(Real (&s)[kRows][kKeys], Real (&dp)[kRows][kKeys], const RowGradient* own_stats,
                                                   const Params& p, i64 statistics, const Scores& score, const Visibility& see, i32 own0,
                                                   i32 other0, Thread own) {
#pragma unroll
  for (i32 j = 0; j < kKeys; ++j) {
    const i32 across = other0 + own.key(j);
    RowGradient stats;
    if (kOwnsKeys) stats = row_gradient(p.row_lse + statistics, p.row_delta + statistics, across);
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) {
      const i32 along = own0 + own.row(i);
      const Pair pair = differentiate<kMasked>(s[i][j], dp[i][j], kOwnsKeys ? stats : own_stats[i], score, see,
                                               row_of<kOwnsKeys>(along, across), key_of<kOwnsKeys>(along, across));
      s[i][j] = pair.p;
      dp[i][j] = pair.ds;
    }
  }
}

// O += P B, of P in registers, by way of shared memory of one warp's own
template <i32 kDepth, i32 kPitchP, i32 kPitchB, i32 kRows, i32 kKeys, i32 kColumns>
__device__ __forceinline__ void accumulate(Real (&o)[kRows][kColumns], const Real (&p)[kRows][kKeys], Real* p_smem, const Real* b, Thread own) {
  __syncwarp();  // its lanes are done with what stood there
#pragma unroll
  for (i32 i = 0; i < kRows; ++i)
#pragma unroll
    for (i32 j = 0; j < kKeys; ++j) p_smem[own.row(i) * kPitchP + own.key(j)] = p[i][j];
  __syncwarp();
  multiply_add<kDepth, kPitchP, kPitchB>(o, p_smem, b, own);
}

// ---- one pass ----
template <bool kOwnsKeys> __device__ __forceinline__ void pass(const Params& p) {
  using Own = Owner<kOwnsKeys>;
  constexpr i32 kOwn = Own::kOwn, kOther = Own::kOther, kRows = Own::kRows, kKeys = Own::kKeys;

  // Prologue: which tile of which head, and the owner's tiles. The longest of a causal mask come first: early keys, late rows.
  const i32 tiles_of_head = kOwnsKeys ? p.key_tiles : p.row_tiles;
  const i32 heads = kOwnsKeys ? p.heads / p.group : p.heads;
  const i32 order = static_cast<i32>(blockIdx.x % tiles_of_head);
  const i32 own0 = (kOwnsKeys ? order : tiles_of_head - 1 - order) * kOwn;
  const i32 own_head = static_cast<i32>(blockIdx.x / tiles_of_head) % heads;
  const i32 batch = static_cast<i32>(blockIdx.x / tiles_of_head) / heads;
  const i32 head0 = kOwnsKeys ? own_head * p.group : own_head;  // the first query head
  const i32 kv_head = kOwnsKeys ? own_head : own_head / p.group;
  const Visibility see0 = visibility(p, batch, head0);
  const Scores score0 = scores(p, batch, head0);
  const Thread own{};

  DYNAMIC_SMEM(smem);
  Real* const a1 = reinterpret_cast<Real*>(smem);
  Real* const a2 = a1 + kOwn * kPitch1;
  Real* const b1 = a2 + kOwn * kPitch2;
  Real* const b2 = kBothTiles ? b1 + kOther * kPitchB1 : b1;
  Real* const p_smem = b2 + kOther * kPitchB2;

  const Element* const q0 = p.q + batch * p.q_batch + head0 * p.q_head;
  const Element* const k = p.k + batch * p.k_batch + kv_head * p.k_head;
  const Element* const v = p.v + batch * p.v_batch + kv_head * p.v_head;
  const Element* const dout0 = p.dout + batch * p.dout_batch + head0 * p.dout_head;
  const i32 own_live = (kOwnsKeys ? see0.key_length : see0.query_length) - own0;
  load_tile<kOwn, kD, kPitch1, kAtOnce>(a1, kOwnsKeys ? k + own0 * p.k_row : q0 + own0 * p.q_row, kOwnsKeys ? p.k_row : p.q_row, own_live, p.d);
  load_tile<kOwn, kDv, kPitch2, kAtOnce>(a2, kOwnsKeys ? v + own0 * p.v_row : dout0 + own0 * p.dout_row, kOwnsKeys ? p.v_row : p.dout_row, own_live, p.d_v);

  const i64 statistics0 = (static_cast<i64>(batch) * p.heads + head0) * p.statistics_rows;
  RowGradient own_stats[kRows];
  if (!kOwnsKeys)
#pragma unroll
    for (i32 i = 0; i < kRows; ++i) own_stats[i] = row_gradient(p.row_lse + statistics0, p.row_delta + statistics0, own0 + own.row(i));

  Real sum1[kRows][kColumns1] = {};  // dK or dQ
  Real sum2[kRows][kColumns2] = {};  // dV

  // Main loop: for each query head of the keys, each tile of the other side.
  const i32 heads_of_owner = kOwnsKeys ? p.group : 1;
  for (i32 h = 0; h < heads_of_owner; ++h) {
    const Visibility see = see0.of_head(h);
    const Scores score = score0.of_head(h);
    const i64 statistics = statistics0 + static_cast<i64>(h) * p.statistics_rows;
    const RowTiles rows = row_tiles(see, own0, own0 + kOwn);
    const KeyTiles keys = key_tiles(see, own0, own0 + kOwn);
    const Element* const source1 = kOwnsKeys ? q0 + h * p.q_head : k;
    const Element* const source2 = kOwnsKeys ? dout0 + h * p.dout_head : v;
    const i64 stride1 = kOwnsKeys ? p.q_row : p.k_row, stride2 = kOwnsKeys ? p.dout_row : p.v_row;
    const i32 end = kOwnsKeys ? rows.end : keys.end;
    for (i32 j = kOwnsKeys ? rows.first : keys.first; j < end; ++j) {
      const i32 other0 = j * kOther;
      const i32 live = (kOwnsKeys ? see.query_length : see.key_length) - other0;
      Real s[kRows][kKeys], dp[kRows][kKeys];
      load_tile<kOther, kD, kPitchB1, kAtOnce>(b1, source1 + other0 * stride1, stride1, live, p.d);
      if (kBothTiles) load_tile<kOther, kDv, kPitchB2, kAtOnce>(b2, source2 + other0 * stride2, stride2, live, p.d_v);
      __syncthreads();  // the tiles have come
      multiply_transposed<kD, kPitch1, kPitchB1>(s, a1, b1, own);
      if (!kBothTiles) {
        __syncthreads();  // every warp is done with B1
        load_tile<kOther, kDv, kPitchB2, kAtOnce>(b2, source2 + other0 * stride2, stride2, live, p.d_v);
        __syncthreads();
      }
      multiply_transposed<kDv, kPitch2, kPitchB2>(dp, a2, b2, own);
      if (kOwnsKeys ? rows.whole(j) : keys.whole(j))
        differentiate_tile<kOwnsKeys, false>(s, dp, own_stats, p, statistics, score, see, own0, other0, own);
      else
        differentiate_tile<kOwnsKeys, true>(s, dp, own_stats, p, statistics, score, see, own0, other0, own);
      if (kOwnsKeys) accumulate<kOther, Own::kPitchP, kPitchB2>(sum2, s, p_smem, b2, own);
      if (!kBothTiles) {
        __syncthreads();  // every warp is done with B2
        load_tile<kOther, kD, kPitchB1, kAtOnce>(b1, source1 + other0 * stride1, stride1, live, p.d);
        __syncthreads();
      }
      accumulate<kOther, Own::kPitchP, kPitchB1>(sum1, dp, p_smem, b1, own);
      __syncthreads();  // every warp is done with the tiles
    }
  }

  // Epilogue: rows and keys beyond the live ones, and rows that see no key, have gradients of 0.
  const Real scale = static_cast<Real>(p.gradient_scale);
  bool is_empty[kRows];
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) is_empty[i] = kOwnsKeys ? own.row(i) >= own_live : own_stats[i].lse == kInfinity;
  if (kOwnsKeys) {
    store_rows(p.dk + batch * p.dk_batch + kv_head * p.dk_head + own0 * p.dk_row, p.dk_row, sum1, scale, is_empty, p.n_k - own0, p.d, own);
    store_rows(p.dv + batch * p.dv_batch + kv_head * p.dv_head + own0 * p.dv_row, p.dv_row, sum2, Real(1), is_empty, p.n_k - own0, p.d_v, own);
  } else {
    store_rows(p.dq + batch * p.dq_batch + own_head * p.dq_head + own0 * p.dq_row, p.dq_row, sum1, scale, is_empty, p.n_q - own0, p.d, own);
  }
}

// ---- the kernels, in the order of their launches ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_simt_statistics(const __grid_constant__ Params p) { write_row_statistics(p); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_simt_keys(const __grid_constant__ Params p) {
  if (p.only_if == nullptr || *p.only_if != 0) pass<true>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_simt_rows(const __grid_constant__ Params p) {
  if (p.only_if == nullptr || *p.only_if != 0) pass<false>(p);
}
