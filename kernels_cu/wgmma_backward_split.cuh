// The two consumers of a tile of 64 keys: the weigher makes P^T and sums up dV, the differentiator makes dS^T and sums up dK. P^T goes from
// one to the other in shared memory, as it is in registers, in float. Of P^T, of the row statistics and of what lies beside K each thread says
// for itself that it is done with them: to the tools an arrival of one lane speaks for that lane alone.
//
// No wait can close a circle. Tiles of rows are asked for in the order Q 0, dO 0, Q 1, dO 1, ... Of step j, the weigher waits for Q j + 1,
// then for dO j; P j + 1 for P j to have been read. The differentiator waits for P j, then for dO j + 1, and releases Q j thereafter. So
// whoever waits for what belongs to step j has released all that belongs to step j - 2, and both slots of Q and of dO were released for
// what comes into them once both consumers came to step j.
#pragma once

constexpr u32 kWriterWarps = kSplit ? 4 : 4 * kConsumers;  // that read V, and make dS^T if it goes through shared memory

struct Weigher : KeyOwner {
  Ring<kKStages> k_ring;
  u32 steps = 0;   // that are over, of all tiles
  u32 weighed = 0;  // tiles of P^T

  float s[kSRegisters], dv[kDvRegisters];
  u32 p[kPRegisters];

  __device__ __forceinline__ Weigher(const BackwardWgmmaParams& a, const Shared& shared) : KeyOwner{a, shared, 0} {}

  __device__ __forceinline__ void issue_s(i32 slot) {
    wgmma_fence();
    issue_keys_by_rows<kD>(s, shared.k(k_ring.slot), shared.q(slot));
  }
  template <bool kMasked> __device__ __forceinline__ void weigh_scores(const float* lse, const KeyTile& of, const Walk& walk) {
    const i32 head = walk.head(a, of), row = walk.row_tile * kBr + 2 * (lane() % 4);
    Vector<float, 2>* const to = shared.p() + thread_index_again() % kWarpgroup;
    const auto keep = [&](i32 i, float first, float second) {
      to[i * kWarpgroup] = {kSoftcap ? s[2 * i] * first : s[2 * i], kSoftcap ? s[2 * i + 1] * second : s[2 * i + 1]};
    };
    weigh<kMasked>(s, lse, scores_of(a, of.batch, head), visibility(a.p, of.batch, head), first_key(of) + own_key(), row, keep);
  }
  // S^T of the rows whose Q is in `slot` becomes P^T, here and for the other.
  __device__ __forceinline__ void weigh_scores(i32 slot, const KeyTile& of, const Walk& walk) {
    const float* const lse = &shared.at<float>(shared.lse(slot)) + 4 * (lane() % 4);
    mbarrier_wait(shared.empty_p(), parity_of<1>(weighed) ^ kEmptyAtFirst);
    if (is_whole(of, walk.row_tile))
      weigh_scores<false>(lse, of, walk);
    else
      weigh_scores<true>(lse, of, walk);
    mbarrier_arrive(shared.full_p());
    mbarrier_arrive(shared.empty_q(slot));
    ++weighed;
  }

  // S^T of the next rows and dV; of the last rows there are no next ones.
  template <bool kLast> __device__ __forceinline__ void step(const KeyTile& of, Walk& walk) {
    const i32 slot = slot_of<kSlots>(steps), next = slot_of<kSlots>(steps + 1);
    if constexpr (!kLast) {
      walk.advance(a.p);
      mbarrier_wait(shared.full_q(next), parity_of<kSlots>(steps + 1));
      clear_query_rows<QTile>(shared.q(next), of, walk.row_tile);
      issue_s(next);
    }
    mbarrier_wait(shared.full_dout(slot), parity_of<kSlots>(steps));
    if (kQLengths) mbarrier_wait(shared.clean_dout(slot), parity_of<kSlots>(steps));
    wgmma_fence();
    issue_weights_by_rows<kDv>(dv, p, shared.dout(slot));
    if constexpr (!kLast) {
      wgmma_wait_group<1>();
      pin(s);
      weigh_scores(next, of, walk);
    }
    wgmma_wait_group<0>();
    pin(dv);
    arrive(shared.empty_dout(slot));
    if constexpr (!kLast) pack(p, s);
    ++steps;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      const i32 k_slot = k_ring.slot;
      mbarrier_wait(shared.full_k(k_slot), k_ring.parity);
      const i32 ticket = read(shared.ticket(k_slot));
      if (ticket == kNoTicket) return;
      const KeyTile of = key_tile(a, ticket);
#pragma unroll
      for (i32 i = 0; i < kDvRegisters; ++i) dv[i] = 0;
      Walk walk(a, of);
      if (walk.left > 0) {
        const i32 slot = slot_of<kSlots>(steps);
        clear_keys<KTile>(shared.k(k_slot), of);
        mbarrier_wait(shared.full_q(slot), parity_of<kSlots>(steps));
        clear_query_rows<QTile>(shared.q(slot), of, walk.row_tile);
        issue_s(slot);
        wgmma_wait_group<0>();
        pin(s);
        weigh_scores(slot, of, walk);
        pack(p, s);
#pragma unroll 1
        while (walk.left > 1) step<false>(of, walk);
        step<true>(of, walk);
      }
      const KeyTile again = key_tile(a, read(shared.ticket(k_slot)));  // so that it need not be kept
      store_dv(again, first_key(again) + own_key(), dv);
      mbarrier_arrive(shared.empty_k(k_slot));
      k_ring.advance();
    }
  }
};

struct Differentiator : KeyOwner {
  Ring<kKStages> k_ring;
  u32 steps = 0;  // that are over, of all tiles

  float dp[kSRegisters], dk[kDkRegisters];
  u32 ds[kPRegisters];
  float unit = 1;  // of dS (wgmma_backward_units.cuh)

  __device__ __forceinline__ Differentiator(const BackwardWgmmaParams& a, const Shared& shared) : KeyOwner{a, shared, 1} {}

  // And tells those who make dQ how large V is
  __device__ __forceinline__ void choose_unit(const KeyTile& of) {
    const i32 live_keys = min(visibility(a.p, of.batch, 0).key_length - of.number * kBc, kBc);
    float sizes[3];
    find_sizes(sizes, a, of, &shared.at<u8>(shared.v()), live_keys, shared.maxima(), kMeetBarrier + number);
    unit = unit_for(sizes);
    const i64 head = static_cast<i64>(of.batch) * (a.p.heads / a.p.group) + of.kv_head;
    if (threadIdx.x % kWarpgroup == 0) a.v_sizes[head * a.p.key_tiles + of.number] = sizes[2];
  }
  // dP^T of the rows of step `n`
  __device__ __forceinline__ void issue_dp(u32 n, const KeyTile& of, const Walk& walk) {
    const i32 slot = slot_of<kSlots>(n);
    mbarrier_wait(shared.full_dout(slot), parity_of<kSlots>(n));
    clear_query_rows<DoutTile>(shared.dout(slot), of, walk.row_tile);
    if (kQLengths) arrive(shared.clean_dout(slot));
    wgmma_fence();
    issue_keys_by_rows<kDv>(dp, shared.v(), shared.dout(slot));
  }
  // dS = P o (dP - delta), in place. Of pairs that are not seen nothing is multiplied: delta may be anything there.
  template <bool kMasked> __device__ __forceinline__ void differentiate_weighed(const float* delta) {
    const Vector<float, 2>* const weights = shared.p() + thread_index_again() % kWarpgroup;
#pragma unroll
    for (i32 b = 0; b < kBr / kBlock; ++b) {
      const auto of_two_blocks = *reinterpret_cast<const Vector<float, 4>*>(delta + kBlock * (b - b % 2));
      const float shift[2] = {of_two_blocks.x[2 * (b % 2)] * unit, of_two_blocks.x[2 * (b % 2) + 1] * unit};
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const Vector<float, 2> p = weights[(2 * b + r) * kWarpgroup];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          float& x = dp[4 * b + 2 * r + e];
          const float ds = p.x[e] * less_delta(x, shift[e], unit);
          x = kMasked && p.x[e] < Weights::kLeast ? 0 : ds;
        }
      }
    }
  }

  // From dP^T to dS^T, then dK and dP^T of the next rows; of the last rows there are no next ones.
  template <bool kLast> __device__ __forceinline__ void step(const KeyTile& of, Walk& walk) {
    const i32 slot = slot_of<kSlots>(steps);
    const float* const delta = &shared.at<float>(shared.delta(slot)) + 4 * (lane() % 4);
    mbarrier_wait(shared.full_p(), parity_of<1>(steps));
    if (is_whole(of, walk.row_tile))
      differentiate_weighed<false>(delta);
    else
      differentiate_weighed<true>(delta);
    pack(ds, dp);
    mbarrier_arrive(shared.empty_p());
    mbarrier_arrive(shared.empty_dout(slot));
    if (kLast) arrive(shared.empty_v());

    mbarrier_wait(shared.full_q(slot), parity_of<kSlots>(steps));
    wgmma_fence();
    issue_weights_by_rows<kD>(dk, ds, shared.q(slot));
    if constexpr (!kLast) {
      walk.advance(a.p);
      issue_dp(steps + 1, of, walk);
      wgmma_wait_group<1>();
    } else {
      wgmma_wait_group<0>();
    }
    pin(dk);
    arrive(shared.empty_q(slot));
    if constexpr (!kLast) {
      wgmma_wait_group<0>();
      pin(dp);
    }
    ++steps;
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
      Walk walk(a, of);
      mbarrier_wait(shared.full_v(), v_parity);
      if (walk.left > 0) {
        clear_keys<VTile>(shared.v(), of);
        issue_dp(steps, of, walk);
        if (kHalf) choose_unit(of);
        wgmma_wait_group<0>();
        pin(dp);
#pragma unroll 1
        while (walk.left > 1) step<false>(of, walk);
        step<true>(of, walk);
      } else {
        if (kHalf) choose_unit(of);
        __syncwarp();  // all lanes have seen that V is there
        arrive(shared.empty_v());
      }
      const KeyTile again = key_tile(a, read(shared.ticket(k_slot)));  // so that it need not be kept
      store_dk(again, first_key(again) + own_key(), dk, kHalf ? 1 / (kWeightUnit * unit) : 1);
      mbarrier_arrive(shared.empty_k(k_slot));
      k_ring.advance();
    }
  }
};
