// dQ where the two consumers of a block of keys share out the products (wgmma_backward_split.cuh): in a kernel of its own, which computes S
// and dP once more. A block owns 128 query rows, each of its consumers 64, and walks over the tiles of keys that they see; dQ stays in
// registers. For long rows of K that costs less than sums of dQ in device memory would, and nothing waits for anything else.
//
//   S = Q K^T,  P = exp(scale S - LSE),  dP = dO V^T,  dS = P o (dP - delta),  dQ = scale dS K
#pragma once

constexpr i32 kOwnedRows = kConsumers * kWarpgroupRows;
constexpr i32 kRowKStages = 2;  // K is read twice, by S of a step and by dQ of the next one

struct RowShared {
  u8* base;
  u32 address;

  __device__ __forceinline__ u32 q(i32 consumer) const { return address + kQ + consumer * QTile::kBytes; }
  __device__ __forceinline__ u32 dout(i32 consumer) const { return address + kDout + consumer * DoutTile::kBytes; }
  __device__ __forceinline__ u32 k(i32 slot) const { return address + kK + slot * KTile::kBytes; }
  __device__ __forceinline__ u32 v() const { return address + kV; }

  // Full: it is there. Empty: all who read it are done. With Q comes the ticket.
  __device__ __forceinline__ u32 full_q() const { return barrier(0); }
  __device__ __forceinline__ u32 empty_q() const { return barrier(1); }
  __device__ __forceinline__ u32 full_dout() const { return barrier(2); }
  __device__ __forceinline__ u32 empty_dout() const { return barrier(3); }
  __device__ __forceinline__ u32 full_v() const { return barrier(4); }
  __device__ __forceinline__ u32 empty_v() const { return barrier(5); }
  __device__ __forceinline__ u32 full_k(i32 slot) const { return barrier(6 + slot); }
  __device__ __forceinline__ u32 empty_k(i32 slot) const { return barrier(6 + kRowKStages + slot); }
  __device__ __forceinline__ i32& ticket() const { return *reinterpret_cast<i32*>(base + kTicket); }
  __device__ __forceinline__ float* maxima(i32 consumer) const { return reinterpret_cast<float*>(base + kMaxima) + 12 * consumer; }

  template <class T> __device__ __forceinline__ T& at(u32 place) const { return *reinterpret_cast<T*>(base + (place - address)); }

  static constexpr i32 kQ = 0;
  static constexpr i32 kDout = kQ + kConsumers * QTile::kBytes;
  static constexpr i32 kK = kDout + kConsumers * DoutTile::kBytes;
  static constexpr i32 kV = kK + kRowKStages * KTile::kBytes;
  static constexpr i32 kBarriers = kV + VTile::kBytes;
  static constexpr i32 kTicket = kBarriers + (6 + 2 * kRowKStages) * 8;
  static constexpr i32 kMaxima = (kTicket + 4 + 15) / 16 * 16;  // read as vectors, of nothing else
  static constexpr i32 kBytes = kMaxima + kConsumers * 12 * 4;

 private:
  __device__ __forceinline__ u32 barrier(i32 number) const { return address + kBarriers + number * 8; }
};

// ---- what a block works on ----
// Tickets go through the heads in sections, whose keys the L2 cache holds; in one, first come the rows that see most keys.
struct OwnedRows {
  i32 row0, head, batch;
  KeyTiles keys;
};
__device__ __forceinline__ i32 row_tickets(const BackwardWgmmaParams& a) {
  return a.p.batch * a.p.heads * ((a.p.n_q + kOwnedRows - 1) / kOwnedRows);
}
__device__ __forceinline__ OwnedRows owned_rows(const BackwardWgmmaParams& a, i32 ticket) {
  const i32 tiles = (a.p.n_q + kOwnedRows - 1) / kOwnedRows, heads = a.p.batch * a.p.heads;
  const i32 section = ticket / (a.row_section * tiles), width = min(a.row_section, heads - section * a.row_section);
  const i32 in_section = ticket - section * (a.row_section * tiles), rank = in_section / width;
  const i32 of_all = section * a.row_section + in_section - rank * width, batch = of_all / a.p.heads;
  const i32 row0 = (kLeft && !kRight ? rank : tiles - 1 - rank) * kOwnedRows;
  return {row0, of_all - batch * a.p.heads, batch, key_tiles(visibility(a.p, batch, 0), row0, row0 + kOwnedRows)};
}

// ---- the thread that asks for tiles ----
__device__ __forceinline__ void produce_for_rows(const BackwardWgmmaParams& a, const RowShared& shared) {
  const Params& p = a.p;
  u32 tiles = 0, steps = 0;  // that have been asked for
#pragma unroll 1
  for (;; ++tiles) {
    const u32 drawn = atomicInc(a.next_ticket + 1, ~0u);
    const i32 ticket = drawn < static_cast<u32>(row_tickets(a)) ? static_cast<i32>(drawn) : kNoTicket;
    mbarrier_wait(shared.empty_q(), parity_of<1>(tiles) ^ kEmptyAtFirst);
    shared.ticket() = ticket;
    if (ticket == kNoTicket) {
      mbarrier_arrive(shared.full_q());
      return;
    }
    const OwnedRows own = owned_rows(a, ticket);
    const i32 kv_head = own.head / p.group;
    mbarrier_arrive_expect_tx(shared.full_q(), kConsumers * QTile::kBytes);
    for (i32 w = 0; w < kConsumers; ++w)
      request_tile<QTile>(shared.q(w), a.q_map, shared.full_q(), own.row0 + w * kWarpgroupRows, p.q_head == 0 ? 0 : own.head,
                          p.q_batch == 0 ? 0 : own.batch, kReadOnce);
    const auto request_k = [&](i32 tile) {
      const i32 slot = slot_of<kRowKStages>(steps);
      mbarrier_wait(shared.empty_k(slot), parity_of<kRowKStages>(steps) ^ kEmptyAtFirst);
      mbarrier_arrive_expect_tx(shared.full_k(slot), KTile::kBytes);
      request_tile<KTile>(shared.k(slot), a.k_map, shared.full_k(slot), tile * kBc, p.k_head == 0 ? 0 : kv_head,
                          p.k_batch == 0 ? 0 : own.batch, kReadOften);
    };
    if (own.keys.first < own.keys.end) request_k(own.keys.first);
    mbarrier_wait(shared.empty_dout(), parity_of<1>(tiles) ^ kEmptyAtFirst);
    mbarrier_arrive_expect_tx(shared.full_dout(), kConsumers * DoutTile::kBytes);
    for (i32 w = 0; w < kConsumers; ++w)
      request_tile<DoutTile>(shared.dout(w), a.dout_map, shared.full_dout(), own.row0 + w * kWarpgroupRows, p.dout_head == 0 ? 0 : own.head,
                             p.dout_batch == 0 ? 0 : own.batch, kReadOnce);
#pragma unroll 1
    for (i32 tile = own.keys.first; tile < own.keys.end;) {
      mbarrier_wait(shared.empty_v(), parity_of<1>(steps) ^ kEmptyAtFirst);
      mbarrier_arrive_expect_tx(shared.full_v(), VTile::kBytes);
      request_tile<VTile>(shared.v(), a.v_map, shared.full_v(), tile * kBc, p.v_head == 0 ? 0 : kv_head, p.v_batch == 0 ? 0 : own.batch,
                          kReadOften);
      ++steps;
      if (++tile < own.keys.end) request_k(tile);
    }
  }
}

// ---- a consumer warpgroup ----
struct RowOwner {
  const BackwardWgmmaParams& a;
  const RowShared& shared;
  const i32 number;  // of the warpgroup, among the consumers

  u32 tiles = 0, steps = 0;  // that are over
  i32 row0;                  // the first row of the warpgroup
  float lse[2], shift[2], unit = 1;  // of the rows of a lane; `shift` is delta in `unit`
  float s[kSRegisters], dp[kSRegisters], dq[kDkRegisters];
  u32 ds[kPRegisters];

  static __device__ __forceinline__ u32 lane() { return thread_index_again() % 32; }
  static __device__ __forceinline__ i32 own_row() { return KeyOwner::own_key(); }
  static __device__ __forceinline__ void arrive(u32 barrier) { mbarrier_arrive_if(barrier, lane() == 0); }

  // LSE and delta of the rows of a lane, and the unit of dS
  __device__ __forceinline__ void read_statistics(const OwnedRows& own) {
    const Params& p = a.p;
    const i64 first = (static_cast<i64>(own.batch) * p.heads + own.head) * p.statistics_rows + row0;
    if constexpr (kHalf) {
      const i32 thread = threadIdx.x % kWarpgroup;
      float sizes[3] = {};  // of dO, delta, V
      if (thread < kWarpgroupRows) {
        sizes[0] = finite_size(a.row_sizes[first + thread]);
        sizes[1] = finite_size(p.row_delta[first + thread]);
      }
      const float* const v_sizes = a.v_sizes + (static_cast<i64>(own.batch) * (p.heads / p.group) + own.head / p.group) * p.key_tiles;
      for (i32 tile = own.keys.first + thread; tile < own.keys.end; tile += kWarpgroup) sizes[2] = fmaxf(sizes[2], v_sizes[tile]);
      max_of_warpgroup(sizes, shared.maxima(number), kMeetBarrier + number);
      unit = unit_for(sizes);
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i64 at = first + place_of_statistic(own_row() + 8 * r);
      lse[r] = p.row_lse[at];
      shift[r] = p.row_delta[at] * unit;
    }
  }

  // P, times the derivative of the score, in place of S
  template <bool kMasked> __device__ __forceinline__ void weigh_scores(const OwnedRows& own, i32 tile) {
    const Scores score = scores_of(a, own.batch, own.head);
    const Visibility see = visibility(a.p, own.batch, own.head);
    const i32 key0 = tile * kBc + 2 * (lane() % 4);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 row = row0 + own_row() + 8 * r, first = see.first_key(row) - key0, end = (row < see.query_length ? see.end_key(row) : 0) - key0;
#pragma unroll
      for (i32 b = 0; b < kBc / kBlock; ++b)
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          const i32 key = kBlock * b + e;
          float& x = s[4 * b + 2 * r + e];
          const bool hidden = kMasked && (kMask ? !see.sees(row, key0 + key) : (kLeft && key < first) || key >= end);
          float slope;
          x = weight_of(x, hidden, lse[r], score, row, key0 + key, slope);
          if (kSoftcap) x *= slope;
        }
    }
  }
  template <bool kMasked> __device__ __forceinline__ void differentiate_weighed() {
#pragma unroll
    for (i32 i = 0; i < kSRegisters; ++i) {
      const float product = s[i] * less_delta(dp[i], shift[i / 2 % 2], unit);
      dp[i] = kMasked && s[i] < Weights::kLeast ? 0 : product;
    }
  }

  // Rows of K beyond a length may be anything; 0 times them must be 0.
  __device__ __forceinline__ void clear_keys(u32 k, i32 live_keys) const {
    constexpr i32 kChunks = KTile::kPanels * kSwizzleRows;
    for (i32 i = threadIdx.x - kFirstConsumer * kWarpgroup + live_keys * kChunks; i < kBc * kChunks; i += kConsumers * kWarpgroup)
      shared.at<Vector<u32, 4>>(k + KTile::offset(i / kChunks, i % kChunks)) = {};
    fence_proxy_async();
    bar_sync(kMeetBarrier + kConsumers, kConsumers * kWarpgroup);
  }

  // dQ of the tile of keys before, if there is one, then S and dP of this one
  template <bool kFirst> __device__ __forceinline__ void step(const OwnedRows& own, const KeyTiles& keys, i32 tile) {
    const i32 slot = slot_of<kRowKStages>(steps), before = slot_of<kRowKStages>(steps - 1);
    mbarrier_wait(shared.full_k(slot), parity_of<kRowKStages>(steps));
    if (kKvLengths) {
      const i32 live_keys = visibility(a.p, own.batch, 0).key_length - tile * kBc;
      if (live_keys < kBc) clear_keys(shared.k(slot), live_keys);
    }
    if constexpr (!kFirst) issue_dq(before);
    wgmma_fence();
    issue_keys_by_rows<kD>(s, shared.q(number), shared.k(slot));
    if constexpr (kFirst) mbarrier_wait(shared.full_dout(), parity_of<1>(tiles));
    mbarrier_wait(shared.full_v(), parity_of<1>(steps));
    wgmma_fence();
    issue_keys_by_rows<kDv>(dp, shared.dout(number), shared.v());

    if constexpr (!kFirst) {
      wgmma_wait_group<2>();
      pin(dq);
      arrive(shared.empty_k(before));
    }
    wgmma_wait_group<1>();
    pin(s);
    const bool is_last = tile == own.keys.end - 1;
    mbarrier_arrive_if(shared.empty_q(), is_last);  // each thread for itself: it has read the ticket
    const bool whole = keys.whole(tile) && row0 + kWarpgroupRows <= visibility(a.p, own.batch, 0).query_length;
    if (whole)
      weigh_scores<false>(own, tile);
    else
      weigh_scores<true>(own, tile);
    wgmma_wait_group<0>();
    pin(dp);
    arrive(shared.empty_v());
    mbarrier_arrive_if(shared.empty_dout(), lane() == 0 && is_last);
    if (whole)
      differentiate_weighed<false>();
    else
      differentiate_weighed<true>();
    pack(ds, dp);
    ++steps;
  }
  __device__ __forceinline__ void issue_dq(i32 slot) {
    wgmma_fence();
    issue_weights_by_rows<kD>(dq, ds, shared.k(slot));
  }

  __device__ __forceinline__ void store(const OwnedRows& own) const {
    const Params& p = a.p;
    const i32 row = row0 + own_row();
    const float scale = static_cast<float>(p.gradient_scale) * (kHalf ? 1 / (kWeightUnit * unit) : 1);
    Element* const to = p.dq + own.batch * p.dq_batch + own.head * p.dq_head + row * p.dq_row;
    store_accumulator<kD>(to, p.dq_row, p.n_q - row, p.d, dq, lane(), [&](i32, float x) { return x * scale; });
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++tiles) {
      mbarrier_wait(shared.full_q(), parity_of<1>(tiles));
      const i32 ticket = read(shared.ticket());
      if (ticket == kNoTicket) return;
      const OwnedRows own = owned_rows(a, ticket);
      row0 = own.row0 + number * kWarpgroupRows;
#pragma unroll
      for (i32 i = 0; i < kDkRegisters; ++i) dq[i] = 0;
      if (own.keys.first < own.keys.end) {
        read_statistics(own);
        const KeyTiles keys = key_tiles(visibility(a.p, own.batch, 0), row0, row0 + kWarpgroupRows);
        step<true>(own, keys, own.keys.first);
#pragma unroll 1
        for (i32 tile = own.keys.first + 1; tile < own.keys.end; ++tile) step<false>(own, keys, tile);
        const i32 slot = slot_of<kRowKStages>(steps - 1);
        issue_dq(slot);
        wgmma_wait_group<0>();
        pin(dq);
        arrive(shared.empty_k(slot));
      } else {
        mbarrier_wait(shared.full_dout(), parity_of<1>(tiles));
        __syncwarp();
        mbarrier_arrive(shared.empty_q());
        arrive(shared.empty_dout());
      }
      store(own);
    }
  }
};
