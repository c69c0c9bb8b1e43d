// dK and dV of keys that have several tickets, each for a part of the query heads that share them (wgmma_backward_order.cuh). A part adds what
// its heads give to sums in device memory, in the order of parts, and the last one makes dK and dV of them. So the bits are the same on
// every run, and who waits for a part waits for a lower ticket.
#pragma once

struct KeySums {
  const BackwardWgmmaParams& a;
  const KeyTile& of;

  static __device__ __forceinline__ i32 thread() { return thread_index_again() % kWarpgroup; }
  static __device__ __forceinline__ i32 consumer() { return thread_index_again() / kWarpgroup - kFirstConsumer; }
  // Of 64 keys, among all
  __device__ __forceinline__ i64 index() const {
    return ((static_cast<i64>(of.batch) * (a.p.heads / a.p.group) + of.kv_head) * a.p.key_tiles + of.number) * kConsumers + consumer();
  }
  __device__ __forceinline__ bool is_first() const { return of.part == 0; }
  __device__ __forceinline__ bool is_last() const { return of.part == a.parts - 1; }

  // Waits for the part before.
  __device__ __forceinline__ void begin() const {
    if (thread() == 0) ld_acquire_until(a.key_turns + index(), of.part);
    bar_sync(kMeetBarrier + consumer(), kWarpgroup);
  }
  // Lets the next part begin.
  __device__ __forceinline__ void end() const {
    bar_sync(kMeetBarrier + consumer(), kWarpgroup);
    if (thread() == 0) red_release_add(a.key_turns + index(), 1);
  }
  // Adds x to the sums from `first` on, those of 64 keys, or, as the last part, the sums to x.
  template <i32 n> __device__ __forceinline__ void add(i32 first, float (&x)[n]) const {
    using Four = Vector<float, 4>;
    Four* const sums = reinterpret_cast<Four*>(a.key_sums + index() * kKeysOfConsumer * (kD + kDv) + first) + thread();
#pragma unroll
    for (i32 i = 0; i < n; i += 4) {
      Four& sum = sums[i / 4 * kWarpgroup];
      const float own[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      if (is_first()) {
        sum = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      } else if (!is_last()) {
        red_add_f32x4(sum.x, own);
      } else {
        const Four before = sum;
#pragma unroll
        for (i32 e = 0; e < 4; ++e) x[i + e] += before.x[e];
      }
    }
  }
};
