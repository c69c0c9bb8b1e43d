// The part of the backward pass on CUDA cores that is the same whoever owns a tile: from S and dP of a tile to P and dZ, the derivative
// by the score, and its slope. One side of the tile, rows or keys, lies along the rows of a thread, the other along its columns.
#pragma once

// Where a pair stands: `along` is what the thread owns, `across` what passes by.
template <bool kOwnsKeys> __device__ __forceinline__ i32 row_of(i32 along, i32 across) { return kOwnsKeys ? across : along; }
template <bool kOwnsKeys> __device__ __forceinline__ i32 key_of(i32 along, i32 across) { return kOwnsKeys ? along : across; }

struct Pair {
  Real p;   // the weight
  Real dz;  // the derivative by the score, bias included: P (dP - delta)
  Real ds;  // by scale q . k
};

// Nothing of a pair that is not seen, or has no weight, is multiplied: dP may be anything there.
template <bool kMasked>
__device__ __forceinline__ Pair differentiate(Real s, Real dp, const RowGradient& stats, const Scores& score, const Visibility& see, i32 row, i32 key) {
  if (kMasked && (row >= see.query_length || !see.sees(row, key))) return {0, 0, 0};
  const Scores::WithSlope z = score.with_slope(s, min(row, see.query_length - 1), key);
  const Real p = stats.weight(z.score);
  const Real dz = p == Real(0) ? Real(0) : p * (dp - stats.delta);
  return {p, dz, dz * z.slope};
}
