// Attention forward on CUDA cores: every dtype, any GPU.
//
//   S = scale Q K^T,  P = softmax(S),  O = P V,  LSE = m + log l
//
// FlashAttention-2, Algorithm 1 (Dao 2023). A block owns B_r query rows of one head, keeps its Q tile in shared memory and walks over
// the K and V tiles of B_c keys. kLanesPerRow neighbouring lanes share kRows rows: in S each owns every kLanesPerRow-th key, in O
// kOutColumns columns. So m, l and O stay in registers, a row's maximum is a few shuffles, and P crosses lanes of one warp only.
#include "ptx.cuh"
#include "variant.cuh"
#include "arithmetic.cuh"
#include "params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "simt_products.cuh"

// ---- constants ----
constexpr i32 kRows = kBr / kRowGroups;          // rows of a thread
constexpr i32 kKeys = kBc / kLanesPerRow;        // keys of a thread in S
constexpr i32 kOutColumns = kDv / kLanesPerRow;  // columns of a thread in O
constexpr i32 kOutVector = kVectorOf<kOutColumns>;
constexpr i32 kOutStore = kOutVector < kElementsPerAccess ? kOutVector : kElementsPerAccess;
constexpr i32 kQPitch = kD + kPad;
constexpr i32 kKvPitch = (kD > kDv ? kD : kDv) + kPad;
constexpr i32 kPPitch = kBc + kLanesPerRow;

static_assert(kBr % kRowGroups == 0 && kBc % kLanesPerRow == 0 && kDv % kLanesPerRow == 0, "every thread owns as much as any other");
static_assert(kBc % kRealsPerVector == 0, "rows of P are whole vectors");

// ---- shared memory ----
constexpr i32 kQReals = kBr * kQPitch;
constexpr i32 kKvReals = kBc * kKvPitch;

// ---- pieces ----
// S becomes P = e^(S - m), in shared memory; m and l go on, O is rescaled.
template <bool kMasked>
__device__ __forceinline__ void softmax(Real (&s)[kRows][kKeys], Real (&o)[kRows][kOutColumns], RowStatistics (&row_of)[kRows], Real* p,
                                        const Scores& score, const Visibility& see, i32 row0, i32 key0, Thread own) {
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) {
    const i32 row = row0 + own.row(i);
    Real tile_max = -kInfinity;
#pragma unroll
    for (i32 j = 0; j < kKeys; ++j) {
      const i32 key = key0 + own.key(j);
      if (kMasked)
        s[i][j] = see.sees(row, key) ? score(s[i][j], min(row, see.query_length - 1), key) : -kInfinity;
      else
        s[i][j] = score(s[i][j], min(row, see.query_length - 1), key);
      tile_max = max_of(tile_max, s[i][j]);
    }
#pragma unroll
    for (i32 step = kLanesPerRow / 2; step > 0; step /= 2) tile_max = max_of(tile_max, __shfl_xor_sync(0xffffffff, tile_max, step));

    const Real rescale = row_of[i].raise(tile_max);
    row_of[i].l *= rescale;
#pragma unroll
    for (i32 c = 0; c < kOutColumns; ++c) o[i][c] *= rescale;
#pragma unroll
    for (i32 j = 0; j < kKeys; ++j) {
      const Real weight = row_of[i].weight(s[i][j]);
      row_of[i].l += weight;  // the sum over this lane's keys; the lanes of a row meet in the epilogue
      p[own.row(i) * kPPitch + own.key(j)] = weight;
    }
  }
}

// ---- the kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) forward_simt(const __grid_constant__ Params p) {
  // Prologue: which rows of which head, and the Q tile.
  const i32 tile = p.row_tiles - 1 - static_cast<i32>(blockIdx.x % p.row_tiles);  // the longest rows of a causal mask first
  const i32 head = static_cast<i32>(blockIdx.x / p.row_tiles) % p.heads;
  const i32 batch = static_cast<i32>(blockIdx.x / p.row_tiles) / p.heads;
  const i32 kv_head = head / p.group;
  const i32 row0 = tile * kBr;
  const Visibility see = visibility(p, batch, head);
  const KeyTiles tiles = key_tiles(see, row0, row0 + kBr);
  const Scores score = scores(p, batch, head);
  const Thread own{};

  DYNAMIC_SMEM(smem);
  Real* const q_smem = reinterpret_cast<Real*>(smem);
  Real* const kv_smem = q_smem + kQReals;  // K, then V, of one tile
  Real* const p_smem = kv_smem + kKvReals;

  const Element* const q = p.q + batch * p.q_batch + head * p.q_head + row0 * p.q_row;
  const Element* const k = p.k + batch * p.k_batch + kv_head * p.k_head;
  const Element* const v = p.v + batch * p.v_batch + kv_head * p.v_head;
  load_tile<kBr, kD, kQPitch>(q_smem, q, p.q_row, see.query_length - row0, p.d);

  Real o[kRows][kOutColumns] = {};
  RowStatistics row_of[kRows];

  // Main loop: for each K_j, V_j.
  for (i32 j = tiles.first; j < tiles.end; ++j) {
    const i32 key0 = j * kBc;
    load_tile<kBc, kD, kKvPitch>(kv_smem, k + key0 * p.k_row, p.k_row, see.key_length - key0, p.d);
    __syncthreads();
    Real s[kRows][kKeys];
    multiply_transposed<kD, kQPitch, kKvPitch>(s, q_smem, kv_smem, own);
    __syncthreads();  // every warp is done with K
    load_tile<kBc, kDv, kKvPitch>(kv_smem, v + key0 * p.v_row, p.v_row, see.key_length - key0, p.d_v);
    if (tiles.whole(j))
      softmax<false>(s, o, row_of, p_smem, score, see, row0, key0, own);
    else
      softmax<true>(s, o, row_of, p_smem, score, see, row0, key0, own);
    __syncthreads();
    multiply_add<kBc, kPPitch, kKvPitch>(o, p_smem, kv_smem, own);
    __syncthreads();  // every warp is done with V
  }

  // Epilogue: O / l and LSE. Rows beyond the live ones, and rows that saw no key, are 0 and -inf.
  Element* const out = p.out + batch * p.out_batch + head * p.out_head;
  Lse* const lse = p.lse + batch * p.lse_batch + head * p.lse_head;
#pragma unroll
  for (i32 i = 0; i < kRows; ++i)
#pragma unroll
    for (i32 step = kLanesPerRow / 2; step > 0; step /= 2) row_of[i].l += __shfl_xor_sync(0xffffffff, row_of[i].l, step);
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) {
    const i32 row = row0 + own.row(i);
    if (row >= p.n_q) continue;
    const bool empty = row >= see.query_length || row_of[i].l == Real(0);
    if (p.lse != nullptr && own.lane == 0) lse[row] = empty ? -static_cast<Lse>(kInfinity) : row_of[i].log_sum_exp();
#pragma unroll
    for (i32 c = 0; c < kOutColumns / kOutVector; ++c)
#pragma unroll
      for (i32 w = 0; w < kOutVector; w += kOutStore) {
        Vector<Element, kOutStore> to;
#pragma unroll
        for (i32 e = 0; e < kOutStore; ++e) from_real(to.x[e], empty ? Real(0) : o[i][c * kOutVector + w + e] / row_of[i].l);
        const i32 column = own.column<kOutVector>(c) + w;
        if (column < p.d_v) *reinterpret_cast<Vector<Element, kOutStore>*>(out + row * p.out_row + column) = to;
      }
  }
}
