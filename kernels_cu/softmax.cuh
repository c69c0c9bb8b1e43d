// Online softmax (Milakov & Gimelshein 2018; FlashAttention, Algorithm 1) of one row: the running maximum m and the running sum l of
// e^(score - m).
#pragma once

struct RowStatistics {
  Real m = -kInfinity;
  Real l = 0;

  // Takes in the maximum of a tile; returns the factor by which what was summed so far must be multiplied.
  __device__ __forceinline__ Real raise(Real tile_max) {
    const Real before = m;
    m = max_of(m, tile_max);
    return exp_of(before - reference());
  }
  // What scores are measured from: m, or 0 while the row has seen nothing but -inf.
  __device__ __forceinline__ Real reference() const { return m == -kInfinity ? Real(0) : m; }
  __device__ __forceinline__ Real weight(Real score) const { return exp_of(score - reference()); }

  // log of the sum of e^score over the row
  __device__ __forceinline__ Lse log_sum_exp() const { return static_cast<Lse>(m) + log_of(static_cast<Lse>(l)); }
};
