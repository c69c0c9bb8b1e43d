// Attention backward for Hopper: float16 and bfloat16 by TMA, mbarriers and wgmma (sm_90a).
//
//   S^T = K Q^T,  P^T = exp(scale S^T - LSE),  dP^T = V dO^T,  dS^T = P^T o (dP^T - delta)
//   dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention, Algorithm 4, with S and dP transposed as in FlashAttention-3: P^T and dS^T leave their products as the next ones take
// them, in registers. A block owns a tile of B_c keys and walks over the tiles of B_r query rows that see them, for all query heads that
// share them. One thread of the first warpgroup asks TMA for tiles; each of the last two, the consumers, owns 64 keys and sums up their
// dK and dV; between them, one takes dS^T from both and multiplies it with K. These parts of dQ leave for sums in device memory, in an order
// that the last of the warps of the first warpgroup keeps (wgmma_backward_order.cuh); at the end they become dQ. Where the same bits on
// every run are not asked for, the sums start as zeros, and each warp adds its own part as soon as it is there.
//
// Where registers have no room for dK and dV of 64 keys, both consumers own the same 64, one of them for dV and the other for dK
// (wgmma_backward_split.cuh). So few keys make too many parts of dQ, which has a kernel of its own then, and no sums in device memory
// (wgmma_backward_rows.cuh).
//
// Of a step's five products a consumer has two under way while it computes: dP^T and dV while it makes dS^T, dK and the S^T of the next
// rows while it makes their P^T. While dV is under way, its operand P^T is read for dS^T: PTX leaves that undefined as much as a write, but
// the assembler, which complains of instructions that define such registers, takes reads, and the multiplier does nothing but read them.
#include "ptx.cuh"
#include "variant.cuh"
#include "wgmma.cuh"
#include "arithmetic.cuh"
#include "backward_params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "backward_statistics.cuh"
#include "wgmma_panels.cuh"
#include "wgmma_ring.cuh"
#include "wgmma_backward_tile.cuh"

struct BackwardWgmmaParams {
  TensorMap q_map, dout_map, k_map, v_map;  // boxes: the panels of a tile
  Params p;
  float* dq_sums;    // pieces of dQ, as wgmma_backward_tile.cuh has them, each as the threads of a warpgroup hold it
  i32* turns;        // for each tile of rows of a head, how many tiles of keys have added to its dQ, where they take turns
  u32* next_ticket;  // of tiles of keys, and of rows where they have a kernel of their own
  float* row_sizes;  // |dO| of every row, (batch, head, row), for float16
  float* v_sizes;    // the largest number of every tile of V, (batch, head, tile), where rows have a kernel of their own
  float* key_sums;   // dK and dV of keys that have several tickets, as the threads of consumers hold them (wgmma_backward_parts.cuh)
  i32* key_turns;    // for each tile of such keys and each consumer, how many parts have added to their sums
  i32 tickets;
  i32 parts, heads_of_part;  // of the query heads that share keys; the last part may have fewer
  i32 section;      // heads of k and v that are worked on together, of each direction (wgmma_backward_order.cuh)
  i32 row_section;  // query heads that are worked on together (wgmma_backward_rows.cuh)
  float scale;      // what P's exponent takes q . k by (wgmma_backward_weights.cuh): made of a double again in every step, it would be late
};
constexpr i32 kNoTicket = -1;

#include "wgmma_backward_order.cuh"
#include "wgmma_backward_shared.cuh"
#include "wgmma_backward_units.cuh"
#include "wgmma_backward_weights.cuh"
#include "wgmma_backward_consumer.cuh"
#include "wgmma_backward_parts.cuh"

// ---- constants ----
constexpr u64 kReadOnce = 0x12f0000000000000, kReadOften = 0x14f0000000000000;  // L2 policies: evict first, evict last
constexpr i32 kStoringThread = kWarpgroup - 32;       // of the first warpgroup
constexpr u32 kWarps = 4, kConsumerWarps = kWarps * kConsumers;  // of a warpgroup, and of the consumers
// Arrivals at "empty" of Q, and of dO: of who reads the statistics beside it every thread, else of every warp one
constexpr u32 kRowReaders = kWarpgroup + (kSplit ? kWarps : kWarpgroup);
// Arrivals at "empty" of K: of the consumers, and of the warpgroup of dQ and the storing thread
constexpr u32 kKeyReaders = kWarpgroup * kConsumers + (kSplit ? 0 : kWarpgroup + kDeterministic);
constexpr i32 kTileThreads = kWarpgroup * (kFirstConsumer + kConsumers);  // of a block that walks over tiles

static_assert(kBr % kStatisticsRows == 0, "the statistics of a tile of rows are written by whole blocks");

// ---- what is asked for ----
// A tile from `row` on, panel by panel; the caller has told `full` how many bytes come. The coordinate of an axis along which an array does
// not change is 0.
template <class Tile>
__device__ __forceinline__ void request_tile(u32 to, const TensorMap& map, u32 full, i32 row, i32 head, i32 batch, u64 policy) {
#pragma unroll
  for (i32 panel = 0; panel < Tile::kPanels; ++panel)
    tma_load_4d(to + panel * Tile::kPanelBytes, &map, full, panel * kPanelColumns, row, head, batch, policy);
}

// Where the statistics of a tile of rows start, in row_lse and row_delta
__device__ __forceinline__ i64 first_statistic(const Params& p, i32 batch, i32 head, i32 row_tile) {
  return (static_cast<i64>(batch) * p.heads + head) * p.statistics_rows + row_tile * kBr;
}

// ---- the thread that asks for tiles ----
__device__ __forceinline__ void produce(const BackwardWgmmaParams& a, const Shared& shared) {
  const Params& p = a.p;
  u32 ks = 0, steps = 0;  // tiles of K, and of V, and steps that have been asked for
#pragma unroll 1
  for (;; ++ks) {
    const i32 ticket = draw(a), k_slot = slot_of<kKStages>(ks);
    mbarrier_wait(shared.empty_k(k_slot), parity_of<kKStages>(ks) ^ kEmptyAtFirst);
    shared.ticket(k_slot) = ticket;
    if (ticket == kNoTicket) {
      mbarrier_arrive(shared.full_k(k_slot));
      return;
    }
    const KeyTile tile = key_tile(a, ticket);
    mbarrier_arrive_expect_tx(shared.full_k(k_slot), KTile::kBytes);
    request_tile<KTile>(shared.k(k_slot), a.k_map, shared.full_k(k_slot), tile.number * kBc, p.k_head == 0 ? 0 : tile.kv_head,
                        p.k_batch == 0 ? 0 : tile.batch, kReadOnce);

    const auto request_v = [&] {
      mbarrier_wait(shared.empty_v(), parity_of<1>(ks) ^ kEmptyAtFirst);
      mbarrier_arrive_expect_tx(shared.full_v(), VTile::kBytes);
      request_tile<VTile>(shared.v(), a.v_map, shared.full_v(), tile.number * kBc, p.v_head == 0 ? 0 : tile.kv_head,
                          p.v_batch == 0 ? 0 : tile.batch, kReadOnce);
    };
    Walk walk(a, tile);
    if (walk.left == 0) {
      request_v();
      // The warpgroup of dQ does not wait for this V. That of a later tile must not come to it before this one is there: it would take
      // a phase for another of the same parity.
      if (kHalf && !kSplit) mbarrier_wait(shared.full_v(), parity_of<1>(ks));
      continue;
    }
    const auto request_q = [&] {
      const i32 slot = slot_of<kSlots>(steps), head = walk.head(a, tile);
      mbarrier_wait(shared.empty_q(slot), parity_of<kSlots>(steps) ^ kEmptyAtFirst);
      mbarrier_arrive_expect_tx(shared.full_q(slot), QTile::kBytes + Shared::kStatisticsBytes);
      request_tile<QTile>(shared.q(slot), a.q_map, shared.full_q(slot), walk.row_tile * kBr, p.q_head == 0 ? 0 : head,
                          p.q_batch == 0 ? 0 : tile.batch, kReadOften);
      bulk_load(shared.lse(slot), p.row_lse + first_statistic(p, tile.batch, head, walk.row_tile), Shared::kStatisticsBytes, shared.full_q(slot));
    };
    request_q();
    request_v();
#pragma unroll 1
    for (;;) {
      const i32 slot = slot_of<kSlots>(steps), head = walk.head(a, tile);
      mbarrier_wait(shared.empty_dout(slot), parity_of<kSlots>(steps) ^ kEmptyAtFirst);
      mbarrier_arrive_expect_tx(shared.full_dout(slot), DoutTile::kBytes + Shared::kStatisticsBytes);
      request_tile<DoutTile>(shared.dout(slot), a.dout_map, shared.full_dout(slot), walk.row_tile * kBr, p.dout_head == 0 ? 0 : head,
                             p.dout_batch == 0 ? 0 : tile.batch, kReadOften);
      bulk_load(shared.delta(slot), p.row_delta + first_statistic(p, tile.batch, head, walk.row_tile), Shared::kStatisticsBytes,
                shared.full_dout(slot));
      ++steps;
      walk.advance(a.p);
      if (walk.left == 0) break;
      request_q();
    }
  }
}

// ---- the thread that adds pieces of dQ to their sums, in turn: where results are deterministic ----
__device__ __forceinline__ void add_in_turn(const BackwardWgmmaParams& a, const Shared& shared) {
  u32 ks = 0, pieces = 0;       // that have come
  bool is_under_way = false;    // the last piece: its memory has not been given back
  i32* turn_to_end = nullptr;   // where that piece was a tile's last
  const auto finish_piece = [&] {
    if (!is_under_way) return;
    mbarrier_arrive(shared.empty_dq(slot_of<kDqStages>(pieces - 1)));
    if (turn_to_end != nullptr) red_release_add(turn_to_end, 1);
    is_under_way = false;
  };
#pragma unroll 1
  for (;; ++ks) {
    const i32 k_slot = slot_of<kKStages>(ks);
    mbarrier_wait(shared.full_k(k_slot), parity_of<kKStages>(ks));
    const i32 ticket = shared.ticket(k_slot);
    if (ticket == kNoTicket) return;
    mbarrier_arrive(shared.empty_k(k_slot));
    const KeyTile tile = key_tile(a, ticket);
#pragma unroll 1
    for (Walk walk(a, tile); walk.left > 0; walk.advance(a.p)) {
      const i64 index = row_tile_index(a.p, tile.batch, walk.head(a, tile), walk.row_tile);
      const i32 turn = adders(visibility(a.p, tile.batch, 0), walk.row_tile).turn(tile);
#pragma unroll 1
      for (i32 piece = 0; piece < kDqPieces; ++piece, ++pieces) {
        const i32 slot = slot_of<kDqStages>(pieces);
        mbarrier_wait(shared.full_dq(slot), parity_of<kDqStages>(pieces));
        if (piece == 0) {
          if (ld_acquire(a.turns + index) != turn) {  // others may wait for this block meanwhile
            bulk_wait_group<0>();
            finish_piece();
            ld_acquire_until(a.turns + index, turn);
          }
          fence_proxy_async_global();
        }
        float* const sums = a.dq_sums + (index * kDqPieces + piece) * kDqPieceFloats;
        if (turn == 0)
          bulk_store(sums, shared.dq(slot), kDqPieceBytes);
        else
          bulk_add_f32(sums, shared.dq(slot), kDqPieceBytes);
        bulk_commit_group();
        bulk_wait_group<1>();
        finish_piece();
        is_under_way = true;
        turn_to_end = piece == kDqPieces - 1 ? a.turns + index : nullptr;
      }
    }
    bulk_wait_group<0>();
    finish_piece();
  }
}

// ---- the warpgroup that multiplies dS and K ----
__device__ __forceinline__ void multiply_ds_k(const BackwardWgmmaParams& a, const Shared& shared) {
  constexpr i32 kWarpBytes = kDqPieceBytes / kWarps;
  const i32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  u32 ks = 0, steps = 0, pieces = 0;  // that are over
#pragma unroll 1
  for (;; ++ks) {
    const i32 k_slot = slot_of<kKStages>(ks);
    mbarrier_wait(shared.full_k(k_slot), parity_of<kKStages>(ks));
    const i32 ticket = read(shared.ticket(k_slot));
    if (ticket == kNoTicket) break;
    const KeyTile tile = key_tile(a, ticket);
    i32 left = Walk(a, tile).left;
    if (kHalf && left > 0) {
      mbarrier_wait(shared.full_v(), parity_of<1>(ks));
      const i32 live_keys = min(visibility(a.p, tile.batch, 0).key_length - tile.number * kBc, kBc);
      float sizes[3];
      find_sizes(sizes, a, tile, &shared.at<u8>(shared.v()), live_keys, shared.maxima(), kMeetBarrier + kConsumers);
      const float unit = unit_for(sizes);
      shared.unit(k_slot) = unit;  // the same of all threads
      shared.per_unit(k_slot) = 1 / (kWeightUnit * unit);
    }
    if constexpr (kHalf) {
      mbarrier_arrive(shared.full_unit(k_slot));
      mbarrier_wait(shared.full_unit(k_slot), parity_of<kKStages>(ks));
    }
    Walk walk(a, tile);
    if constexpr (!kDeterministic) left = walk.left;  // as before, but kept in no register while the unit was made
#pragma unroll 1
    for (; left > 0; --left, walk.advance(a.p), ++steps) {
      const i32 slot = slot_of<kSlots>(steps);
      mbarrier_wait(shared.full_ds(slot), parity_of<kSlots>(steps));
#pragma unroll
      for (i32 piece = 0; piece < kDqPieces; ++piece, ++pieces) {
        const i32 rows = piece / kDqPanels, panel = piece % kDqPanels;
        float dq[kDqRegisters];
        wgmma_fence();
        issue_ds_k(dq, shared.ds(slot) + rows * DsTile::kPanelBytes, shared.k(k_slot) + panel * KTile::kPanelBytes);
        wgmma_wait_group<0>();
        pin(dq);
        if (piece == kDqPieces - 1) mbarrier_arrive_if(shared.empty_ds(slot), lane == 0);
        if constexpr (kHalf) {
          const float per_unit = shared.per_unit(k_slot);
#pragma unroll
          for (i32 i = 0; i < kDqRegisters; ++i) dq[i] *= per_unit;
        }

        const i32 dq_slot = slot_of<kDqStages>(pieces);
        if constexpr (kDeterministic) {
          mbarrier_wait(shared.empty_dq(dq_slot), parity_of<kDqStages>(pieces) ^ kEmptyAtFirst);
        } else {
          if (lane == 0) bulk_wait_group_read<kDqStages - 1>();
          __syncwarp();
        }
        const u32 to = shared.dq(dq_slot) + warp * kWarpBytes;
#pragma unroll
        for (i32 i = 0; i < kDqRegisters; i += 4)
          shared.at<Vector<float, 4>>(to + (i / 4 * 32 + lane) * 16) = {dq[i], dq[i + 1], dq[i + 2], dq[i + 3]};
        fence_proxy_async();
        __syncwarp();
        if constexpr (kDeterministic) {
          mbarrier_arrive_if(shared.full_dq(dq_slot), lane == 0);
        } else if (lane == 0) {
          const i64 index = row_tile_index(a.p, tile.batch, walk.head(a, tile), walk.row_tile);
          bulk_add_f32(a.dq_sums + ((index * kDqPieces + piece) * kWarps + warp) * (kDqPieceFloats / kWarps), to, kWarpBytes);
          bulk_commit_group();
        }
      }
    }
    mbarrier_arrive(shared.empty_k(k_slot));  // each thread for itself: it has read what lies beside K
  }
  if (!kDeterministic && lane == 0) bulk_wait_group<0>();
}

// ---- a consumer warpgroup ----
struct Consumer : KeyOwner {
  Ring<kKStages> k_ring;
  u32 steps = 0;  // that are over, of all tiles

  float s[kSRegisters], dp[kSRegisters], dk[kDkRegisters], dv[kDvRegisters];
  Weights p;
  u32 ds[kPRegisters];
  Slopes slopes;

  __device__ __forceinline__ Consumer(const BackwardWgmmaParams& a, const Shared& shared, i32 number)
      : KeyOwner{a, shared, number} {}

  __device__ __forceinline__ void issue_s(i32 slot) {
    wgmma_fence();
    issue_keys_by_rows<kD>(s, shared.k(k_ring.slot) + number * kKeysOfConsumer * kPanelRowBytes, shared.q(slot));
  }
  template <bool kMasked> __device__ __forceinline__ void weigh_scores(const float* lse, const KeyTile& of, const Walk& walk) {
    const i32 key = first_key(of) + own_key(), head = walk.head(a, of);
    const auto keep = [&](i32 i, float first, float second) { slopes.keep(i, first, second); };
    weigh<kMasked>(s, lse, scores_of(a, of.batch, head), visibility(a.p, of.batch, head), key, walk.row_tile * kBr + 2 * (lane() % 4), keep);
    p.cut_off_of(s);  // here, among the exponentials: behind both branches it would wait for all of them, and for dK
  }
  __device__ __forceinline__ void weigh_scores(i32 slot, const KeyTile& of, const Walk& walk) {
    const float* const lse = &shared.at<float>(shared.lse(slot)) + 4 * (lane() % 4);
    if (is_whole(of, walk.row_tile))
      weigh_scores<false>(lse, of, walk);
    else
      weigh_scores<true>(lse, of, walk);
  }

  // dP^T and dV, then S^T of the next rows and dK; of the last rows there are no next ones.
  template <bool kLast> __device__ __forceinline__ void step(const KeyTile& of, Walk& walk) {
    const i32 slot = slot_of<kSlots>(steps), next = slot_of<kSlots>(steps + 1);
    mbarrier_wait(shared.full_dout(slot), parity_of<kSlots>(steps));
    clear_query_rows<DoutTile>(shared.dout(slot), of, walk.row_tile);
    wgmma_fence();
    issue_keys_by_rows<kDv>(dp, shared.v() + number * kKeysOfConsumer * kPanelRowBytes, shared.dout(slot));
    wgmma_fence();
    issue_weights_by_rows<kDv>(dv, p.rounded, shared.dout(slot));

    wgmma_wait_group<1>();
    pin(dp);
    if (kLast) arrive(shared.empty_v());
    const float* const delta = &shared.at<float>(shared.delta(slot)) + 4 * (lane() % 4);
    if (is_whole(of, walk.row_tile))
      differentiate<false>(dp, p, slopes, delta, shared.unit(k_ring.slot));
    else
      differentiate<true>(dp, p, slopes, delta, shared.unit(k_ring.slot));
    wgmma_wait_group<0>();
    pin(dv);
    mbarrier_arrive(shared.empty_dout(slot));
    pack(ds, dp);

    mbarrier_wait(shared.empty_ds(slot), parity_of<kSlots>(steps) ^ kEmptyAtFirst);
    store_ds(shared.ds(slot), ds);
    fence_proxy_async();
    __syncwarp();
    arrive(shared.full_ds(slot));

    if constexpr (!kLast) {
      walk.advance(a.p);
      mbarrier_wait(shared.full_q(next), parity_of<kSlots>(steps + 1));
      clear_query_rows<QTile>(shared.q(next), of, walk.row_tile);
      issue_s(next);
    }
    wgmma_fence();
    issue_weights_by_rows<kD>(dk, ds, shared.q(slot));
    if constexpr (!kLast) {
      wgmma_wait_group<1>();
      pin(s);
      weigh_scores(next, of, walk);
    }
    wgmma_wait_group<0>();
    pin(dk);
    mbarrier_arrive(shared.empty_q(slot));
    if constexpr (!kLast) p.round(s);
    ++steps;
  }

  __device__ __forceinline__ void store(float per_unit) {
    const KeyTile of = key_tile(a, read(shared.ticket(k_ring.slot)));  // once more, so that it need not be kept
    if (a.parts > 1) {
#pragma unroll
      for (i32 i = 0; i < kDkRegisters; ++i) dk[i] *= per_unit;  // which each part has its own of
      per_unit = 1;
      const KeySums sums = {a, of};
      sums.begin();
      sums.add(0, dk);
      sums.add(kKeysOfConsumer * kD, dv);
      sums.end();
      if (!sums.is_last()) return;
    }
    const i32 key = first_key(of) + own_key();
    store_dv(of, key, dv);
    store_dk(of, key, dk, per_unit);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      const i32 k_slot = k_ring.slot;
      const u32 v_parity = kKStages == 1 ? k_ring.parity : k_slot;
      mbarrier_wait(shared.full_k(k_slot), k_ring.parity);
      const i32 ticket = read(shared.ticket(k_slot));
      if (ticket == kNoTicket) return;
      const KeyTile of = key_tile(a, ticket);
#pragma unroll
      for (i32 i = 0; i < kDkRegisters; ++i) dk[i] = 0;
#pragma unroll
      for (i32 i = 0; i < kDvRegisters; ++i) dv[i] = 0;
      Walk walk(a, of);
      float per_unit = 1;
      if (walk.left > 0) {
        const i32 slot = slot_of<kSlots>(steps);
        clear_keys<KTile>(shared.k(k_slot), of);
        mbarrier_wait(shared.full_q(slot), parity_of<kSlots>(steps));
        clear_query_rows<QTile>(shared.q(slot), of, walk.row_tile);
        issue_s(slot);
        wgmma_wait_group<0>();
        pin(s);
        weigh_scores(slot, of, walk);
        p.round(s);
        mbarrier_wait(shared.full_v(), v_parity);
        clear_keys<VTile>(shared.v(), of);
        if constexpr (kHalf) mbarrier_wait(shared.full_unit(k_slot), k_ring.parity);
#pragma unroll 1
        while (walk.left > 1) step<false>(of, walk);
        step<true>(of, walk);
        if (kHalf) per_unit = shared.per_unit(k_slot);
      } else {
        mbarrier_wait(shared.full_v(), v_parity);
        __syncwarp();  // all lanes have seen that V is there
        arrive(shared.empty_v());
        if constexpr (kHalf) mbarrier_wait(shared.full_unit(k_slot), k_ring.parity);
      }
      store(per_unit);
      mbarrier_arrive(shared.empty_k(k_slot));
      k_ring.advance();
    }
  }
};

#include "wgmma_backward_split.cuh"
#include "wgmma_backward_rows.cuh"

// ---- the kernels ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) backward_wgmma_statistics(const __grid_constant__ BackwardWgmmaParams a) {
  for_row_statistics<kHalf>(a.p, [&](i64 head, i32 row, const RowStatistics& of_row) {
    const i64 first = head * a.p.statistics_rows, at = first + place_of_statistic(row);
    a.p.row_lse[at] = lse_as_subtracted(a.p, of_row.lse);
    a.p.row_delta[at] = of_row.delta;
    if constexpr (kHalf) a.row_sizes[first + row] = of_row.dout_size;
  });
  const i32 blocks_of_head = (a.p.statistics_rows + kStatisticsRows - 1) / kStatisticsRows;
  const i32 first_row = static_cast<i32>(blockIdx.x % blocks_of_head) * kStatisticsRows;
  if (first_row >= a.p.row_tiles * kBr) return;
  if (blockIdx.x == 0 && threadIdx.x < 2) a.next_ticket[threadIdx.x] = 0;
  if (a.parts > 1 && blockIdx.x == 0)
    for (i32 i = threadIdx.x; i < a.p.batch * (a.p.heads / a.p.group) * a.p.key_tiles * kConsumers; i += kThreads) a.key_turns[i] = 0;
  if (kSplit) return;
  const i64 head = blockIdx.x / blocks_of_head, index = head * a.p.row_tiles + first_row / kBr;
  if constexpr (kDeterministic) {
    if (threadIdx.x == 0 && first_row % kBr == 0) a.turns[index] = 0;
  } else {
    constexpr i32 kVectors = kStatisticsRows * kDqPanels * kDqColumns / 4;  // of the sums of the block's rows
    Vector<float, 4>* const sums = reinterpret_cast<Vector<float, 4>*>(a.dq_sums) + (index * kBr + first_row % kBr) / kStatisticsRows * kVectors;
#pragma unroll
    for (i32 i = threadIdx.x; i < kVectors; i += kThreads) sums[i] = {};
  }
}

extern "C" __global__ void __launch_bounds__(kTileThreads, 1) backward_wgmma_keys(const __grid_constant__ BackwardWgmmaParams a) {
  ALIGNED_DYNAMIC_SMEM(smem, kAtomBytes);
  const Shared shared = {smem, smem_address(smem)};
  const i32 warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // the same in all lanes, as the compiler now knows

  // Prologue: barriers.
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&a.q_map, &a.dout_map, &a.k_map, &a.v_map}) prefetch_tensormap(map);
    for (i32 slot = 0; slot < kKStages; ++slot) {
      mbarrier_init(shared.full_k(slot), 1);
      mbarrier_init(shared.full_unit(slot), kWarpgroup);
      mbarrier_init(shared.empty_k(slot), kKeyReaders);
    }
    mbarrier_init(shared.full_v(), 1);
    mbarrier_init(shared.empty_v(), kWriterWarps);
    for (i32 slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(shared.full_q(slot), 1);
      mbarrier_init(shared.empty_q(slot), kRowReaders);
      mbarrier_init(shared.full_dout(slot), 1);
      mbarrier_init(shared.empty_dout(slot), kRowReaders);
      mbarrier_init(shared.full_ds(slot), kWriterWarps);
      mbarrier_init(shared.empty_ds(slot), kWarps);
      mbarrier_init(shared.clean_dout(slot), kWarps);
    }
    mbarrier_init(shared.full_p(), kWarpgroup);
    mbarrier_init(shared.empty_p(), kWarpgroup);
    for (i32 slot = 0; slot < kDqStages; ++slot) {
      mbarrier_init(shared.full_dq(slot), kWarps);
      mbarrier_init(shared.empty_dq(slot), 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<kCopyRegisters>();
    if (threadIdx.x == 0) produce(a, shared);
    if (!kSplit && kDeterministic && threadIdx.x == kStoringThread) add_in_turn(a, shared);
  } else if (warpgroup < kFirstConsumer) {
    if constexpr (!kSplit) {
      setmaxnreg_dec<kDqWarpgroupRegisters>();
      multiply_ds_k(a, shared);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    if constexpr (!kSplit)
      Consumer(a, shared, warpgroup - kFirstConsumer).run();
    else if (warpgroup == kFirstConsumer)
      Weigher(a, shared).run();
    else
      Differentiator(a, shared).run();
  }
}

// dQ from its sums: a warp for 16 rows of a piece
__device__ __forceinline__ void convert_sums(const BackwardWgmmaParams& a) {
  const Params& p = a.p;
  const i32 lane = threadIdx.x % 32;
  const i64 part = blockIdx.x * static_cast<i64>(kThreads / 32) + threadIdx.x / 32;
  const i32 in_tile = static_cast<i32>(part / kWarps % kDqPieces), index = static_cast<i32>(part / (kWarps * kDqPieces));
  const i32 index_of_head = index / p.row_tiles, row_tile = index - index_of_head * p.row_tiles;
  const i32 batch = index_of_head / p.heads, head = index_of_head - batch * p.heads;
  if (batch >= p.batch) return;
  const Adders all = adders(visibility(p, batch, head), row_tile);
  const bool any = all.first < all.end;
  float dq[kDqRegisters];
#pragma unroll
  for (i32 i = 0; i < kDqRegisters; i += 4) {
    Vector<float, 4> x = {};
    if (any) x = reinterpret_cast<const Vector<float, 4>*>(a.dq_sums)[part * (kDqRegisters / 4 * 32) + i / 4 * 32 + lane];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) dq[i + e] = x.x[e];
  }
  const i32 column = in_tile % kDqPanels * kPanelColumns;
  const i32 row = row_tile * kBr + in_tile / kDqPanels * kWarpgroupRows + static_cast<i32>(part % kWarps) * 16 + lane / 4;
  const float scale = static_cast<float>(p.gradient_scale);
  Element* const to = p.dq + batch * p.dq_batch + head * p.dq_head + row * p.dq_row + column;
  store_accumulator<kDqColumns>(to, p.dq_row, p.n_q - row, p.d - column, dq, lane, [&](i32, float x) { return x * scale; });
}

// dQ, by rows
__device__ __forceinline__ void make_rows(const BackwardWgmmaParams& a, u8* smem) {
  const RowShared shared = {smem, smem_address(smem)};
  const i32 warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&a.q_map, &a.dout_map, &a.k_map, &a.v_map}) prefetch_tensormap(map);
    for (const u32 full : {shared.full_q(), shared.full_dout(), shared.full_v()}) mbarrier_init(full, 1);
    mbarrier_init(shared.empty_q(), kWarpgroup * kConsumers);
    for (const u32 empty : {shared.empty_dout(), shared.empty_v()}) mbarrier_init(empty, kConsumerWarps);
    for (i32 slot = 0; slot < kRowKStages; ++slot) {
      mbarrier_init(shared.full_k(slot), 1);
      mbarrier_init(shared.empty_k(slot), kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<kCopyRegisters>();
    if (threadIdx.x == 0) produce_for_rows(a, shared);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    RowOwner{a, shared, warpgroup - kFirstConsumer}.run();
  }
}

extern "C" __global__ void __launch_bounds__(kSplit ? kTileThreads : kThreads, 1) backward_wgmma_rows(const __grid_constant__ BackwardWgmmaParams a) {
  ALIGNED_DYNAMIC_SMEM(smem, kAtomBytes);
  if constexpr (kSplit)
    make_rows(a, smem);
  else
    convert_sums(a);
}
