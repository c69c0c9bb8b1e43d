// Attention backward on tensor cores with mma.sync: float16 and bfloat16, float32 as 3xTF32; sm_75 and up.
//
//   P = exp(scale Q K^T - LSE),  dP = dO V^T,  dS = P o (dP - delta),  dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-2, Algorithm 2 (Dao 2023). A block owns the B_c keys of a tile, of one head of K and V, and walks over the row tiles of the
// heads that share it, from the last rows to the first. A group of kWarpsAside warps owns kKeys of the keys, for which each warp computes
// S^T and dP^T of kRows of the rows; P^T and dS^T go through shared memory; dK and dV stay in registers, a share of the columns in each
// warp. dQ of a row tile is summed in device memory, in float, by one block after the other: in the order of key tiles, so that every run
// gives the same bits. A block takes its tile when it starts, the next in that order, and so waits only for blocks that have started.
#include "ptx.cuh"
#include "variant.cuh"
#include "arithmetic.cuh"
#include "backward_params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "backward_statistics.cuh"
#include "mma_tile.cuh"
#include "mma_fragments.cuh"
#include "mma_tf32.cuh"
#include "backward_mma_products.cuh"
#include "backward_mma_tf32.cuh"
#include "backward_mma_shared.cuh"
#include "backward_mma_order.cuh"
#include "backward_mma_scores.cuh"

// ---- copies ----
// The log-sum-exp, or delta, of the rows of a tile
__device__ __forceinline__ void copy_statistics(float* to, const float* from) {
  constexpr i32 kPerCopy = kChunkBytes / sizeof(float);
  for (i32 i = static_cast<i32>(threadIdx.x) * kPerCopy; i < kBr; i += kThreads * kPerCopy) {
    if constexpr (kAsyncCopy)
      cp_async_16(smem_address(to + i), from + i, kChunkBytes);
    else
      *reinterpret_cast<Vector<float, kPerCopy>*>(to + i) = *reinterpret_cast<const Vector<float, kPerCopy>*>(from + i);
  }
}

__device__ __forceinline__ void copy_statistics(float* to, const double* from) {
  for (i32 i = threadIdx.x; i < kBr; i += kThreads) {
    const float high = static_cast<float>(from[i]);
    to[i] = high;
    to[kBr + i] = fabsf(high) == kInfinity ? 0 : static_cast<float>(from[i] - high);
  }
}

// Rows [0, rows_live) and columns [0, columns_live) of a tile to device memory
template <i32 kTileRows, i32 kColumns>
__device__ __forceinline__ void store_tile(Element* to, i64 row_stride, const u8* tile, i32 rows_live, i32 columns_live) {
  using Tile = TileLayout<kColumns>;
  constexpr i32 kPerRow = kColumns / kElementsPerAccess;
  for (i32 i = threadIdx.x; i < kTileRows * kPerRow; i += kThreads) {
    const i32 row = i / kPerRow, column = i % kPerRow * kElementsPerAccess;
    if (row < rows_live && column < columns_live)
      *reinterpret_cast<ElementVector*>(to + row * row_stride + column) = *reinterpret_cast<const ElementVector*>(
          tile + Tile::offset(row, column / kChunkElements) + column % kChunkElements * sizeof(Element));
  }
}

// Fragments, times `unit`, to a tile in shared memory; zeros in rows for which `is_empty`.
template <i32 kColumns, i32 kRowBlocks, i32 kBlocks, class Columns, class IsEmpty>
__device__ __forceinline__ void store_fragments(u8* tile, const float (&x)[kRowBlocks][kBlocks][4], i32 first_row, Columns columns, float unit,
                                                IsEmpty is_empty, Lane lane) {
  using Tile = TileLayout<kColumns>;
#pragma unroll
  for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
    for (i32 e = 0; e < 4; e += 2) {
      const i32 row = first_row + i * kRowBlock + lane.g + 4 * e;
      const bool empty = is_empty(row);
#pragma unroll
      for (i32 j = 0; j < kBlocks; ++j) {
        if (!columns.has(j)) continue;
        const i32 column = columns.column(j) + 2 * lane.t;
        u8* const to = tile + Tile::offset(row, column / kChunkElements) + column % kChunkElements * sizeof(Element);
        const float x0 = empty ? 0 : x[i][j][e] * unit, x1 = empty ? 0 : x[i][j][e + 1] * unit;
        if constexpr (sizeof(Element) == 4)
          *reinterpret_cast<Vector<float, 2>*>(to) = {x0, x1};
        else
          *reinterpret_cast<u32*>(to) = packed(x0, x1, Element{});
      }
    }
}

// ---- the kernels ----
extern "C" __global__ void __launch_bounds__(kThreads) backward_mma_begin(const __grid_constant__ MmaParams own) {
  if (threadIdx.x == 0) *own.special = 0;
}

// What a row of dO is summed up in. The sums of dQ start anew.
extern "C" __global__ void __launch_bounds__(kThreads) backward_mma_statistics(const __grid_constant__ MmaParams own) {
  const Params& p = own.p;
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread < static_cast<i64>(p.batch) * p.heads * p.row_tiles * kWarps) own.turns[thread] = 0;
  if (thread == 0) *own.next_tile = 0;
  if (p.n_q == 0) return;
  write_row_statistics<kHalf>(p, own.row_sizes);
  if constexpr (sizeof(Element) == 4) find_special_rows(p, own.special);
}

// dK and dV, and the sums of dQ
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) backward_mma_keys(const __grid_constant__ MmaParams own) {
  DYNAMIC_SMEM(smem);
  const Params& p = own.p;
  const Shared shared = {smem};
  const Lane lane = {};
  const Warp warp = {};

  if (sizeof(Element) == 4 && *own.special != 0) return;

  // Prologue: which keys of which head, and which rows see them.
  const Place at = take_tile(own, reinterpret_cast<u32*>(shared.p()));
  const i32 first_key = at.key_tile * kBc, first_head = at.kv_head * p.group;
  const Visibility see = visibility(p, at.batch, first_head);
  const Scores score = scores(p, at.batch, first_head);
  const RowTiles rows = row_tiles(see, first_key, first_key + kBc);
  const i32 steps = p.group * max(rows.end - rows.first, 0);
  Sums sums = {own, see, at, warp, lane};

  const Element* const k = p.k + at.batch * p.k_batch + at.kv_head * p.k_head + first_key * p.k_row;
  const Element* const v = p.v + at.batch * p.v_batch + at.kv_head * p.v_head + first_key * p.v_row;
  copy_tile<kBc, kD>(shared.k(), [&](i32 row) { return k + row * p.k_row; }, see.key_length - first_key, p.d);
  copy_tile<kBc, kDv>(shared.v(), [&](i32 row) { return v + row * p.v_row; }, see.key_length - first_key, p.d_v);
  const auto load_rows = [&](i32 step, Visit to) {
    const i32 head = first_head + to.head, first_row = to.tile * kBr;
    const Element* const q = p.q + at.batch * p.q_batch + head * p.q_head + first_row * p.q_row;
    const Element* const dout = p.dout + at.batch * p.dout_batch + head * p.dout_head + first_row * p.dout_row;
    copy_tile<kBr, kD>(shared.q(step), [&](i32 row) { return q + row * p.q_row; }, see.query_length - first_row, p.d);
    copy_tile<kBr, kDv>(shared.dout(step), [&](i32 row) { return dout + row * p.dout_row; }, see.query_length - first_row, p.d_v);
    const i64 statistics = static_cast<i64>(at.batch * p.heads + head) * p.statistics_rows + first_row;
    copy_statistics(shared.lse(step), p.row_lse + statistics);
    copy_statistics(shared.delta(step), p.row_delta + statistics);
  };
  float unit = 1;
  const auto add_dq = [&](i32 step, Visit of) {  // of a step whose dS^T is in shared memory
    const bool is_turn = sums.look(of);
    DqFragments dq = {};
    multiply_columns<true, kBc, kBr, kD>(dq, shared.ds(step), warp.dq_row, shared.k(), 0, warp.dq_columns, lane, Element{});
    sums.take_turn(of, is_turn);
    sums.add(of, dq, 1 / unit);
  };

  float dk[kKeyBlocks][KColumns::kBlocks][4] = {}, dv[kKeyBlocks][VColumns::kBlocks][4] = {};
  Visit now = {0, rows.end - 1};
  if (steps > 0) load_rows(0, now);
  commit_copies();
  if constexpr (kHalf) {
    wait_for_copies<0>();
    __syncthreads();
    unit = unit_of_ds(own, at, rows, shared);
  }

  // Main loop: for each Q_i, dO_i, and once more for the last dQ. Half of the warps compute dQ first, the others last, so that one warp's
  // exponentials run under another's products.
  const bool is_early = threadIdx.x < kWarps / 2 * 32;
#pragma unroll 1
  for (i32 step = 0;; ++step, now = now.after(p.group)) {
    if (kStages == 1 && step > 0) {
      __syncthreads();  // every warp is done with Q and dO
      if (step < steps) load_rows(step, now);
      commit_copies();
    }
    wait_for_copies<0>();  // Q_i and dO_i have arrived
    __syncthreads();       // for every thread; dS of the step before is whole, and every warp is done with what is replaced below
    if (step > 0 && (is_early || step == steps)) add_dq(step - 1, now.before(p.group));
    if (step == steps) break;

    if (kStages == 2 && step + 1 < steps) load_rows(step + 1, now.after(p.group));
    commit_copies();
    const i32 first_row = now.tile * kBr;
    const bool whole = rows.whole(now.tile);
    ScoreFragments s = {};
    multiply_rows<kD>(s, shared.k(), warp.key, shared.q(step), warp.row, lane, Element{});
    if (whole)
      weigh<false>(s, shared.p(), shared.lse(step), score.of_head(now.head), see, first_row, first_key, warp, lane);
    else
      weigh<true>(s, shared.p(), shared.lse(step), score.of_head(now.head), see.of_head(now.head), first_row, first_key, warp, lane);
    if constexpr (kOwnInRegisters) multiply_own(dv, s, shared.dout(step), warp.row, warp.v_columns, lane, Element{});

    ScoreFragments dp = {};
    multiply_rows<kDv>(dp, shared.v(), warp.key, shared.dout(step), warp.row, lane, Element{});
    if (whole)
      store_ds<false>(shared.ds(step), s, dp, shared.delta(step), unit, warp, lane);
    else
      store_ds<true>(shared.ds(step), s, dp, shared.delta(step), unit, warp, lane);

    if constexpr (kOwnInRegisters) multiply_own(dk, dp, shared.q(step), warp.row, warp.k_columns, lane, Element{});
    if (kWarpsAside > 1)
      bar_sync(1 + warp.index / kWarpsAside, 32 * kWarpsAside);  // P^T and dS^T of the warps that share keys are whole
    else
      __syncwarp();
    if constexpr (kOwnInRegisters) {
#pragma unroll
      for (i32 other = kRows; other < kBr; other += kRows) {
        const i32 row = (warp.row + other) % kBr;
        multiply_columns<false, kRows, kBr, kDv>(dv, shared.p(), warp.key, shared.dout(step), row, warp.v_columns, lane, Element{});
        multiply_columns<false, kRows, kBr, kD>(dk, shared.ds(step), warp.key, shared.q(step), row, warp.k_columns, lane, Element{});
      }
    } else {
      multiply_columns<false, kBr, kBr, kDv>(dv, shared.p(), warp.key, shared.dout(step), 0, warp.v_columns, lane, Element{});
      multiply_columns<false, kBr, kBr, kD>(dk, shared.ds(step), warp.key, shared.q(step), 0, warp.k_columns, lane, Element{});
    }
    if (step > 0 && !is_early) add_dq(step - 1, now.before(p.group));
  }

  // Epilogue: dK and dV by way of shared memory.
  __syncthreads();
  sums.end_turn();
  const auto is_empty = [&](i32 row) { return first_key + row >= see.key_length; };
  store_fragments<kD>(shared.k(), dk, warp.key, warp.k_columns, static_cast<float>(p.gradient_scale) / unit, is_empty, lane);
  store_fragments<kDv>(shared.v(), dv, warp.key, warp.v_columns, 1 / kWeightUnit, is_empty, lane);
  __syncthreads();
  Element* const dk_out = p.dk + at.batch * p.dk_batch + at.kv_head * p.dk_head + first_key * p.dk_row;
  Element* const dv_out = p.dv + at.batch * p.dv_batch + at.kv_head * p.dv_head + first_key * p.dv_row;
  store_tile<kBc, kD>(dk_out, p.dk_row, shared.k(), p.n_k - first_key, p.d);
  store_tile<kBc, kDv>(dv_out, p.dv_row, shared.v(), p.n_k - first_key, p.d_v);
}

// dQ of its sums
extern "C" __global__ void __launch_bounds__(kThreads) backward_mma_rows(const __grid_constant__ MmaParams own) {
  DYNAMIC_SMEM(smem);
  const Params& p = own.p;
  const Lane lane = {};
  const Warp warp = {};
  const i32 tile = static_cast<i32>(blockIdx.x % p.row_tiles), number = static_cast<i32>(blockIdx.x / p.row_tiles);
  const i32 batch = number / p.heads, head = number % p.heads, first_row = tile * kBr;
  const Visibility see = visibility(p, batch, head);
  if (sizeof(Element) == 4 && *own.special != 0) return;

  const i64 part = static_cast<i64>(blockIdx.x) * kWarps + warp.index;
  const bool nothing = own.turns[part] == 0;
  const float* const from = own.sums + part * Sums::kOfWarp;
  DqFragments dq;
#pragma unroll
  for (i32 i = 0; i < kDqRowBlocks; ++i)
#pragma unroll
    for (i32 j = 0; j < DqColumns::kBlocks; ++j)
#pragma unroll
      for (i32 e = 0; e < 4; ++e)
        dq[i][j][e] = nothing || !warp.dq_columns.has(j) ? 0 : Sums::sum_of(from + (i * DqColumns::kBlocks + j) * Sums::kOfFragment, e, lane);
  const auto is_empty = [&](i32 row) {
    return first_row + row >= see.query_length || see.first_key(first_row + row) >= see.end_key(first_row + row);
  };
  store_fragments<kD>(smem, dq, warp.dq_row, warp.dq_columns, static_cast<float>(p.gradient_scale), is_empty, lane);
  __syncthreads();
  Element* const dq_out = p.dq + batch * p.dq_batch + head * p.dq_head + first_row * p.dq_row;
  store_tile<kBr, kD>(dq_out, p.dq_row, smem, p.n_q - first_row, p.d);
}
