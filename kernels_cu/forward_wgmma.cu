// Attention forward for Hopper: float16 and bfloat16 by TMA, mbarriers and wgmma (sm_90a).
//
//   S = scale Q K^T,  P = softmax(S),  O = P V,  LSE = m + log l
//
// FlashAttention-3, Algorithm 2 (Shah et al. 2024), with a scheduler. As many blocks as there are multiprocessors take tiles of
// B_r = 64 kConsumers query rows of a head until none is left. In a block, two threads of the producer warpgroup ask TMA for tiles, one
// for those of Q, the other for those of K and V; every consumer warpgroup owns 64 rows and keeps its S, P, O and row statistics in
// registers. Keys are walked from the last tile to the first.
//
// Products run while the softmax does, twice over: within a warpgroup, O += P_j+1 V_j+1 runs under the softmax of S_j, also across the
// end of a tile of rows; and warpgroups take turns in issuing products (kPingPong), so that one's products run under another's softmax.
#include "ptx.cuh"
#include "variant.cuh"
#include "wgmma.cuh"
#include "arithmetic.cuh"
#include "params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "wgmma_panels.cuh"
#include "wgmma_tile.cuh"
#include "wgmma_ring.cuh"
#include "wgmma_shared.cuh"
#include "wgmma_softmax.cuh"
#include "wgmma_store.cuh"

struct WgmmaParams {
  TensorMap q_map, k_map, v_map, out_map;  // boxes: the panels of a tile, and of O those of a warp
  Params p;
  u32* next_tile;  // 0 before and after a launch, and no other launch's meanwhile
  i32 tiles;       // of rows, over all heads and batch entries
  i32 section;     // heads that are worked on together, so that their keys and values stay in the L2 cache
};

// ---- constants ----
constexpr u64 kReadOnce = 0x12f0000000000000, kReadOften = 0x14f0000000000000;  // L2 policies: evict first, evict last
constexpr bool kPassesOver = kLeft || kRight;  // a warpgroup may need fewer key tiles than its block
// A block draws its next rows so many steps before the last one of those at hand; at the first one, if it walks over fewer than four tiles.
constexpr i32 kStepsAhead = 3;
constexpr i32 kTurnBarrier = 1, kMeetBarrier = 8;  // the first named barriers of their kind; one for each warpgroup

static_assert(kThreads == kWarpgroup * (kConsumers + 1), "one warpgroup produces");
static_assert(kBr == kWarpgroupRows * kConsumers, "a consumer warpgroup owns 64 rows");
static_assert(kTurnBarrier + kConsumers <= kMeetBarrier && kMeetBarrier + kConsumers <= 16, "there are 16 named barriers");
static_assert(!kPingPong || kConsumers > 1, "turns are taken by two or more");

// ---- which rows, which keys ----
// Heads in sections; in a section the longest rows of a causal mask first, of all its heads.
__device__ __forceinline__ RowTile row_tile(const WgmmaParams& a, i32 index) {
  const i32 row_tiles = a.p.row_tiles, heads = a.tiles / row_tiles;
  const i32 first_head = index / (a.section * row_tiles) * a.section;
  const i32 in_section = index - first_head * row_tiles, width = min(a.section, heads - first_head);
  const i32 head = first_head + in_section % width;
  return {(row_tiles - 1 - in_section / width) * kBr, head % a.p.heads, head / a.p.heads};
}

// At least one tile, so that there is always a product to wait for; where no key is visible, `otherwise` is one that is masked whole.
__device__ __forceinline__ KeyTiles some_key_tiles(const Visibility& see, i32 row0, i32 rows, i32 otherwise) {
  const KeyTiles tiles = key_tiles(see, row0, row0 + rows);
  return tiles.end > tiles.first ? tiles : KeyTiles{otherwise, otherwise + 1, 0, 0};
}

// What a warpgroup does of a tile of rows, for which its block walks over the tiles of `of_block`
__device__ __forceinline__ RowWork row_work(const Visibility& see, const RowTile& tile, const KeyTiles& of_block, i32 warpgroup) {
  RowWork work;
  work.rows = tile;
  work.rows.row0 += kWarpgroupRows * warpgroup;
  work.tiles = kPassesOver ? some_key_tiles(see, work.rows.row0, kWarpgroupRows, of_block.first) : of_block;
  work.passed_over = of_block.end - work.tiles.end;
  work.passed_over_behind = work.tiles.first - of_block.first;
  return work;
}

// ---- the producers: two threads ----
// The coordinate of an axis along which an array does not change is 0.
template <class Tile>
__device__ __forceinline__ void request_tile(u32 to, const TensorMap& map, u32 full, i32 row, i32 head, i32 batch, u64 policy) {
  mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
  for (i32 panel = 0; panel < Tile::kPanels; ++panel)
    tma_load_4d(to + panel * Tile::kPanelBytes, &map, full, panel * kPanelColumns, row, head, batch, policy);
}

// The same as far as the L2 cache
template <class Tile> __device__ __forceinline__ void prefetch_tile(const TensorMap& map, i32 row, i32 head, i32 batch) {
#pragma unroll
  for (i32 panel = 0; panel < Tile::kPanels; ++panel) tma_prefetch_4d(&map, panel * kPanelColumns, row, head, batch);
}

// One thread draws tiles of rows, tells the other and the warpgroups of them, and asks for their Q. It draws the next rows when the block is
// nearly done with those at hand: drawn sooner, long rows would wait behind long ones while other blocks run out of work.
__device__ __forceinline__ void produce_q(const WgmmaParams& a, const Shared& shared) {
  const Params& p = a.p;
  const u32 tiles_of_rows = a.tiles;
  Ring<kQStages> q_ring;
  Ring<1> draw_ring;
  q_ring.parity = kEmptyAtFirst;

  u32 index = blockIdx.x;  // which is below tiles_of_rows
#pragma unroll 1
  while (index < tiles_of_rows) {
    const RowTile rows = row_tile(a, static_cast<i32>(index));
    const Visibility see = visibility(p, rows.batch, rows.head);
    const KeyTiles keys = some_key_tiles(see, rows.row0, kBr, 0);
    *shared.key_work() = {keys.first, keys.end, rows.head / p.group, rows.batch};
    mbarrier_arrive(shared.full_work());

    const i32 q_head = p.q_head == 0 ? 0 : rows.head, q_batch = p.q_batch == 0 ? 0 : rows.batch;
    if (kQStages == 1)  // there is no room for it yet, but in the L2 cache
#pragma unroll
      for (i32 w = 0; w < kConsumers; ++w) prefetch_tile<QTile>(a.q_map, rows.row0 + w * kWarpgroupRows, q_head, q_batch);
#pragma unroll 1  // registers are few here; the last first, which has most keys under a causal mask
    for (i32 w = kConsumers - 1; w >= 0; --w) {
      const RowWork work = row_work(see, rows, keys, w);
      mbarrier_wait(shared.empty_q(q_ring.slot, w), q_ring.parity);
      *shared.row_work(q_ring.slot, w) = work;
      request_tile<QTile>(shared.q(q_ring.slot, w), a.q_map, shared.full_q(q_ring.slot, w), work.rows.row0, q_head, q_batch, kReadOnce);
    }
    q_ring.advance();
    mbarrier_wait(shared.draw(), draw_ring.parity);
    draw_ring.advance();
    index = gridDim.x + atomicInc(a.next_tile, tiles_of_rows - 1);  // back to 0 after as many times
  }
  shared.key_work()->end = kNoRows;
  mbarrier_arrive(shared.full_work());
  for (i32 w = 0; w < kConsumers; ++w) {
    mbarrier_wait(shared.empty_q(q_ring.slot, w), q_ring.parity);
    *shared.row_work(q_ring.slot, w) = {{kNoRows}};
    mbarrier_arrive(shared.full_q(q_ring.slot, w));
  }
}

// The other asks for K and V in the order of their use: K_j comes before V_j+1, and the first K of a tile of rows before the last V of the
// one before. The warpgroups wait for this thread: it does nothing else.
__device__ __forceinline__ void produce_k_v(const WgmmaParams& a, const Shared& shared) {
  const Params& p = a.p;
  Ring<kStages> k_ring, v_ring;
  Ring<1> work_ring;
  k_ring.parity = v_ring.parity = kEmptyAtFirst;

  const auto next_work = [&] {
    mbarrier_wait(shared.full_work(), work_ring.parity);
    work_ring.advance();
    return *shared.key_work();
  };
  const auto load_k = [&](const KeyWork& of, i32 j) {
    mbarrier_wait(shared.empty_k(k_ring.slot), k_ring.parity);
    request_tile<KTile>(shared.k(k_ring.slot), a.k_map, shared.full_k(k_ring.slot), j * kBc, p.k_head == 0 ? 0 : of.kv_head,
                        p.k_batch == 0 ? 0 : of.batch, kReadOften);
    k_ring.advance();
  };
  const auto load_v = [&](const KeyWork& of, i32 j) {
    mbarrier_wait(shared.empty_v(v_ring.slot), v_ring.parity);
    request_tile<VTile>(shared.v(v_ring.slot), a.v_map, shared.full_v(v_ring.slot), j * kBc, p.v_head == 0 ? 0 : of.kv_head,
                        p.v_batch == 0 ? 0 : of.batch, kReadOften);
    v_ring.advance();
  };

  KeyWork now = next_work(), next;
  load_k(now, now.end - 1);
#pragma unroll 1
  for (bool more = true; more; now = next) {
    const i32 draws_at = min(now.first + kStepsAhead, now.end - 1);
#pragma unroll 1
    for (i32 j = now.end - 1; j >= now.first; --j) {
      if (j == draws_at) mbarrier_arrive(shared.draw());
      if (j > now.first) {
        load_k(now, j - 1);
      } else {
        next = next_work();
        more = next.end != kNoRows;
        if (more) load_k(next, next.end - 1);
      }
      load_v(now, j);
    }
  }
}

// ---- the producer of a bias of keys: one warp, which is told of rows as the first warpgroup is ----
__device__ __forceinline__ void produce_bias(const WgmmaParams& a, const Shared& shared) {
  constexpr i32 kPerLane = (kBc + 31) / 32;
  const Params& p = a.p;
  const i32 lane = threadIdx.x % 32;
  Ring<kStages> k_ring;
  Ring<kQStages> q_ring;
  Ring<Shared::kBiasSlots> bias_ring;
  k_ring.parity = kEmptyAtFirst;
  for (;; q_ring.advance()) {
    mbarrier_wait(shared.full_q(q_ring.slot, 0), q_ring.parity);
    const RowWork work = *shared.row_work(q_ring.slot, 0);
    if (work.rows.row0 == kNoRows) return;
    mbarrier_arrive(shared.empty_q(q_ring.slot, 0));
    const Scores score = scores(p, work.rows.batch, work.rows.head);
    const i32 first = work.tiles.first - work.passed_over_behind;
#pragma unroll 1
    for (i32 j = work.tiles.end + work.passed_over - 1; j >= first; --j) {
      float bias[kPerLane];
#pragma unroll
      for (i32 i = 0; i < kPerLane; ++i) {
        const i32 key = j * kBc + 32 * i + lane;
        bias[i] = key < p.n_k ? score.bias_at(0, key) : 0;
      }
      mbarrier_wait(shared.empty_k(k_ring.slot), k_ring.parity);
#pragma unroll
      for (i32 i = 0; i < kPerLane; ++i)
        if (kBc % 32 == 0 || 32 * i + lane < kBc) shared.bias(bias_ring.slot)[32 * i + lane] = bias[i];
      __syncwarp();
      mbarrier_arrive_if(shared.full_k(k_ring.slot), lane == 0);
      k_ring.advance();
      bias_ring.advance();
    }
  }
}

// ---- a consumer warpgroup ----
// By what the rows of a warp weigh a tile (wgmma_softmax.cuh): all by their maximum, all by a reference that they trust, or each by either
enum class Reference { kFirstMaximum, kMaximum, kTrusted, kEither };

struct Consumer {
  const WgmmaParams& a;
  const Shared& shared;
  const i32 warpgroup, warp, lane;
  const float c;
  const bool q_takes_sign = kFolded && __double_as_longlong(a.p.scale_log2) <= 0;  // by its bits: to compare doubles takes long

  Ring<kStages> k_ring, v_ring;
  Ring<kQStages> q_ring;
  Ring<Shared::kBiasSlots> bias_ring;
  RowWork work = {};  // rows.row0: this lane's first row
  i32 j;              // the key tile at hand

  float s[kSRegisters], o[kORegisters], sum[2];
  u32 p[kPRegisters];
  bool o_has_products = false;
  Rows rows;

  __device__ __forceinline__ Consumer(const WgmmaParams& a, const Shared& shared, i32 warpgroup)
      : a(a), shared(shared), warpgroup(warpgroup), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), c(softmax_factor(a.p)) {}

  __device__ __forceinline__ void meet() const { bar_sync(kMeetBarrier + warpgroup, kWarpgroup); }
  __device__ __forceinline__ void arrive(u32 barrier) const { mbarrier_arrive_if(barrier, lane == 0); }

  // Turns
  __device__ __forceinline__ void give_first_turn() const {
    if (kPingPong && warpgroup == kConsumers - 1) bar_arrive(kTurnBarrier, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void begin_turn() const {
    if (kPingPong) bar_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn() const {
    if (kPingPong) bar_arrive(kTurnBarrier + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }

  // Waits for a Q and the rows that it is of; false if there is none.
  __device__ __forceinline__ bool next_rows() {
    mbarrier_wait(shared.full_q(q_ring.slot, warpgroup), q_ring.parity);
    const RowWork next = *shared.row_work(q_ring.slot, warpgroup);
    if (next.rows.row0 == kNoRows) return false;
    work = next;
    work.rows.row0 += 16 * warp + lane / 4;
    j = work.tiles.end - 1;
    if (q_takes_sign) scale_q(a.p.scale_log2 < 0 ? -1.0f : 0.0f);
    return true;
  }
  __device__ __forceinline__ Visibility visible() const { return visibility(a.p, work.rows.batch, work.rows.head); }

  // A negative scale moves into Q, and so does 0, which would turn masked scores into NaN.
  __device__ __forceinline__ void scale_q(float factor) const {
    u8* const q = shared.at(shared.q(q_ring.slot, warpgroup));
    for (i32 i = threadIdx.x % kWarpgroup; i < QTile::kBytes / kChunkBytes; i += kWarpgroup)
      for (Element& x : *reinterpret_cast<Element(*)[kChunkElements]>(q + i * kChunkBytes)) from_real(x, to_real(x) * factor);
    fence_proxy_async();
    meet();
  }
  // Values beyond a length may be anything; 0 times them must be 0.
  __device__ __forceinline__ void clear_v_beyond(i32 live_rows) const {
    mbarrier_wait(shared.full_v(v_ring.slot), v_ring.parity);
    u8* const v = shared.at(shared.v(v_ring.slot));
    constexpr i32 kChunks = VTile::kPanels * kSwizzleRows;
    for (i32 i = threadIdx.x % kWarpgroup + live_rows * kChunks; i < kBc * kChunks; i += kWarpgroup)
      *reinterpret_cast<Vector<u32, 4>*>(v + VTile::offset(i / kChunks, i % kChunks)) = {};
    fence_proxy_async();
    meet();
  }

  // From the dot products with the keys of the tile at hand, from its key `key` on
  template <bool kMayBeCut, i32 n> __device__ __forceinline__ void finish_scores_of_tile(float (&s)[n], i32 key, i32 j, i32 bias_slot) const {
    const Scores score = scores(a.p, work.rows.batch, work.rows.head);
    const i32 key0 = j * kBc + key + 2 * (lane % 4);
    if constexpr (kBiasOfKeys) {
      add_bias_of_keys(s, score, shared.bias(bias_slot) + key + 2 * (lane % 4));
      __syncwarp();  // all lanes have read it before one of them releases the next K
    }
    if (kMayBeCut && !work.tiles.whole(j))
      finish_scores<true>(s, score, visible(), work.rows.row0, key0);
    else if constexpr (kBias && !kScored)
      add_bias_of_rows(s, score, visible(), work.rows.row0, key0);
    else if (!kScored)
      finish_scores<false>(s, score, visible(), work.rows.row0, key0);
  }

  // S_j = Q K_j^T, then its softmax, while O += P V of the tile before runs, if there is one (kPending): if K_j is the first of its
  // rows (kFirst), that is the last product of the rows before, whose O is stored. Returns whether a reference was outgrown, so that
  // `repair` must follow.
  template <Reference kReference, bool kPending> __device__ __forceinline__ bool step(const RowTile& rows_before) {
    constexpr bool kFirst = kReference == Reference::kFirstMaximum;
    constexpr bool kMayOutgrow = kReference == Reference::kTrusted || kReference == Reference::kEither;
    constexpr bool kFromTheRight = kFirst || kReference == Reference::kEither || !kSpeculative;  // no tile seen whole has come before
    constexpr bool kMayBeCut = kFirst || kMask || kLeft || (kRight && kFromTheRight);

    mbarrier_wait(shared.full_k(k_ring.slot), k_ring.parity);
    begin_turn();
    wgmma_fence();
    issue_q_k(s, shared.q(q_ring.slot, warpgroup), shared.k(k_ring.slot));
    if constexpr (kPending) issue_p_v();
    end_turn();

    float per_l[2];
    if constexpr (kFirst && kPending) end_rows(a.p, rows, rows_before, lane, c, per_l);
    if constexpr (kFirst) rows = Rows{};
    wgmma_wait_group<kPending ? 1 : 0>();
    pin(s);
    arrive(shared.empty_k(k_ring.slot));
    mbarrier_arrive_if(shared.empty_q(q_ring.slot, warpgroup), j == work.tiles.first);  // each for itself, which has read of its rows
    finish_scores_of_tile<kMayBeCut>(s, 0, j, bias_ring.slot);
    float offset[2] = {rows.m[0] * c, rows.m[1] * c}, factor[2];
    bool raised = false;
    if constexpr (kFirst)
      rows.begin(s, c, offset, work.tiles.whole(j));
    else if constexpr (kReference != Reference::kTrusted)
      raised = rows.raise<kReference == Reference::kEither>(s, c, offset, factor, work.tiles.whole(j));
    Rows::weigh(s, c, offset, sum);

    if constexpr (kPending) {
      wgmma_wait_group<0>();
      pin(o);
      arrive(shared.empty_v(v_ring.slot));
      v_ring.advance();
    }
    if constexpr (kFirst && kPending) store(per_l, rows_before);
    if constexpr (kFirst) o_has_products = false;
    pack_p(p, s);
    if (raised) Rows::rescale(o, factor);
    if (kKvLengths && kFirst) {
      const i32 live_rows = visible().key_length - j * kBc;
      if (live_rows < kBc) clear_v_beyond(live_rows);
    }
    if (j == work.tiles.first) q_ring.advance();
    k_ring.advance();
    bias_ring.advance();
    --j;
    if (kMayOutgrow && rows.may_be_outgrown(sum)) return true;
    rows.add(sum);
    return false;
  }

  // The last step's softmax again, where references were too small for it
  __device__ __forceinline__ void repair() {
    const i32 bias_slot = (bias_ring.slot == 0 ? Shared::kBiasSlots : bias_ring.slot) - 1;
    rows.repair(s, sum, p, o, c, [&](float (&part)[kPartKeys / 2], i32 key) {
      multiply_q_k_again(part, a.p, work.rows, (j + 1) * kBc + key, lane);
      if (kFolded && a.p.scale_log2 < 0)  // as Q had it
        for (float& x : part) x = -x;
      finish_scores_of_tile<kPassesOver || kMask>(part, key, j + 1, bias_slot);
    });
    rows.add(sum);
  }
  // After a step
  __device__ __forceinline__ void decide_on_trust() {
    if (kSpeculative && rows.undecided && work.tiles.whole(j + 1)) rows.decide_on_trust();
  }

  // O += P V of the last tile, where nothing can run beside it, and the end of its rows
  __device__ __forceinline__ void finish_rows(const RowTile& of) {
    issue_p_v();
    float per_l[2];
    end_rows(a.p, rows, of, lane, c, per_l);
    wgmma_wait_group<0>();
    pin(o);
    arrive(shared.empty_v(v_ring.slot));
    v_ring.advance();
    store(per_l, of);
  }
  __device__ __forceinline__ void issue_p_v() {
    mbarrier_wait(shared.full_v(v_ring.slot), v_ring.parity);
    wgmma_fence();
    ::issue_p_v(o, p, shared.v(v_ring.slot), o_has_products);
    o_has_products = true;
  }
  __device__ __forceinline__ void store(const float (&per_l)[2], const RowTile& of) {
    const i32 thread = static_cast<i32>(thread_index_again());  // rather than what registers hold
    store_rows(a.out_map, o, per_l, of, shared.stage(warpgroup, thread / 32 % 4), thread % 32);
  }
  __device__ __forceinline__ void pass_over(i32 count) {
    for (; count > 0; --count) {
      begin_turn();
      end_turn();
      mbarrier_wait(shared.full_k(k_ring.slot), k_ring.parity);
      __syncwarp();  // all lanes have seen the phase end before one of them lets the next begin
      arrive(shared.empty_k(k_ring.slot));
      k_ring.advance();
      bias_ring.advance();
      mbarrier_wait(shared.full_v(v_ring.slot), v_ring.parity);
      __syncwarp();
      arrive(shared.empty_v(v_ring.slot));
      v_ring.advance();
    }
  }

  __device__ __forceinline__ void run() {
    give_first_turn();
    bool pending = false;  // whether there are rows whose last product is still to be issued
    for (;;) {
      const RowTile rows_before = work.rows;
      if (!next_rows()) {
        if (pending) finish_rows(rows_before);
        return;
      }
      if (kPassesOver && work.passed_over > 0) {
        if (pending) finish_rows(rows_before);
        pending = false;
        pass_over(work.passed_over);
      }
      if (pending)
        step<Reference::kFirstMaximum, true>(rows_before);
      else
        step<Reference::kFirstMaximum, false>(rows_before);
      decide_on_trust();
#pragma unroll 1  // rows that have settled take the maximum to their end, in a loop of their own with nothing to check
      while (kSpeculative && !rows.settled && j >= work.tiles.first) {
        bool outgrown;
        if (rows.speculates) {
#pragma unroll 1
          do outgrown = step<Reference::kTrusted, true>(rows_before);
          while (!outgrown && j >= work.tiles.first);
        } else {
          outgrown = step<Reference::kEither, true>(rows_before);
        }
        if (outgrown) repair();
        decide_on_trust();
      }
#pragma unroll 1
      while (j >= work.tiles.first) step<Reference::kMaximum, true>(rows_before);
      pending = true;
      if (kLeft && work.passed_over_behind > 0) {
        finish_rows(work.rows);
        pending = false;
        pass_over(work.passed_over_behind);
      }
    }
  }
};

// ---- the kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) forward_wgmma(const __grid_constant__ WgmmaParams a) {
  DYNAMIC_SMEM(smem);
  const u32 address = (smem_address(smem) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
  const Shared shared = {smem + (address - smem_address(smem)), address};
  const i32 warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // the same in all lanes, as the compiler now knows

  // Prologue: barriers.
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&a.q_map, &a.k_map, &a.v_map, &a.out_map}) prefetch_tensormap(map);
    constexpr u32 kConsumerWarps = 4 * kConsumers;
    constexpr u32 kBiasWarps = kBiasOfKeys ? 1 : 0;
    for (i32 slot = 0; slot < kStages; ++slot) {
      mbarrier_init(shared.full_k(slot), 1 + kBiasWarps);
      mbarrier_init(shared.full_v(slot), 1);
      mbarrier_init(shared.empty_k(slot), kConsumerWarps);
      mbarrier_init(shared.empty_v(slot), kConsumerWarps);
    }
    for (i32 slot = 0; slot < kQStages; ++slot)
      for (i32 w = 0; w < kConsumers; ++w) {
        mbarrier_init(shared.full_q(slot, w), 1);
        mbarrier_init(shared.empty_q(slot, w), kWarpgroup + (w == 0 ? 32 * kBiasWarps : 0));
      }
    mbarrier_init(shared.full_work(), 1);
    mbarrier_init(shared.draw(), 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  // Main loop, and epilogues between: see Consumer::step.
  if (warpgroup == 0) {
    if constexpr (kProducerRegisters > 0) setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) produce_k_v(a, shared);
    if (threadIdx.x == 32) produce_q(a, shared);
    if (kBiasOfKeys && threadIdx.x / 32 == 2) produce_bias(a, shared);
  } else {
    if constexpr (kConsumerRegisters > 0) setmaxnreg_inc<kConsumerRegisters>();
    Consumer(a, shared, warpgroup - 1).run();
    if (threadIdx.x % 32 == 0) bulk_wait_group<0>();  // O has left shared memory
  }
}
