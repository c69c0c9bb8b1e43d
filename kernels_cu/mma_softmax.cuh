// Online softmax on the accumulators of a warp (mma_products.cuh): S becomes P, the row statistics go on, O is rescaled.
//
// A row's weights are 2^(c s - reference). Without softcap and bias, s is q . k as it left the tensor cores and c = |scale| log2(e) (Q
// took the sign), so that a weight costs one FFMA and one EX2; otherwise s is the finished score and c = log2(e). The reference is c
// times a maximum that the row had once; it rises, and O and the sums are rescaled, when a score exceeds it by kSlack. P rounds weights
// above 1 as it does those below, so O is divided by the sum of the weights as P holds them, which tensor cores add up along with P V:
// O is an average of rows of V, whatever the reference. The log-sum-exp comes from the sum of the weights before they were rounded.
// A row decides by itself; warps vote only on whether code is to run.
#pragma once

constexpr bool kFolded = !kSoftcap && !kBias;
constexpr bool kCapsLate = kSoftcap && !kBias && sizeof(Element) == 2;
constexpr i32 kRows = 2 * kRowBlocks;  // rows of a thread: slot r is row g + 8 (r % 2) of block r / 2
constexpr bool kRoundsP = sizeof(Element) == 2;
constexpr Real kSlack = 8;             // in log2 units: weights stay below 2^8, and so within float16
constexpr float kLargest = 3.4028234664e38f;
constexpr Real kFar = 256;             // beyond it the rounding of c m would show in a weight

// c. Where the scale is folded into it, its sign, and a scale of 0, are Q's.
__device__ __forceinline__ float softmax_factor(const Params& p) {
  if (kCapsLate) return 1;
  if (!kFolded) return static_cast<float>(kLog2E);
  const float c = fabsf(static_cast<float>(p.scale_log2));
  return c == 0 ? 1.0f : fminf(c, kLargest);
}

// What s and c s are in natural logarithms, of scores as the backward pass computes them again: log(2) c s would be another, since c,
// rounded, is not quite the scale times log2(e).
struct LogUnits {
  Lse of_s, of_c_s;
};
__device__ __forceinline__ LogUnits log_units(const Params& p, Real c) {
  const Lse of_s = kCapsLate ? static_cast<Lse>(kLn2) : kFolded ? static_cast<Lse>(fabsf(static_cast<float>(p.scale))) : Lse(1);
  return {of_s, of_s / static_cast<Lse>(c)};
}

// The largest score, or magnitude, that a lane holds of its row in slot r
template <bool kMagnitude = false> __device__ __forceinline__ Real largest_in_slot(const SAccumulators& s, i32 r) {
  Real largest = kMagnitude ? Real(0) : -kInfinity;
#pragma unroll
  for (i32 i = 0; i < 2 * kKeyBlocks; ++i) {
    const Real x = s[r / 2][i / 2][2 * (r % 2) + i % 2];
    largest = max_of(largest, kMagnitude ? fabsf(x) : x);
  }
  return largest;
}
__device__ __forceinline__ void largest_of_lane(const SAccumulators& s, Real (&largest)[kRows]) {
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) largest[r] = largest_in_slot(s, r);
}

// A softcap that no bias follows needs no pass of its own (kCapsLate): s stays q . k, Q having taken the sign, until the references have
// risen; what caps it then also subtracts the reference. References are of capped scores, in log2 units, and c is 1. As long as all
// scores of a tile are small, the cap is a short series.
struct Capped {
  SoftcapSeries series;
  const Scores& score;

  // The capped score, less `offset`
  __device__ __forceinline__ float operator()(float x, float offset) const {
    const float most = score.softcap * static_cast<float>(kLog2E);
    return fabsf(x) < series.limit ? series(x, offset) : fmaf(most, tanh_of(x * score.scale), -offset);
  }
  // The score that a reference is compared with, or taken from
  __device__ __forceinline__ float of_largest(float x) const { return kCapsLate ? (*this)(x, 0) : x; }

  // Whether all scores of the warp are small; `bound`: no capped one of this lane exceeds it in its slot
  __device__ __forceinline__ bool are_small(const SAccumulators& s, Real (&bound)[kRows]) const {
    bool small = true;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float largest = largest_in_slot<true>(s, r);
      small &= largest < series.limit;
      bound[r] = largest < series.limit ? series(largest) : kInfinity;
    }
    return __all_sync(0xffffffff, small);
  }
  __device__ __forceinline__ void apply(SAccumulators& s, const Real (&offset)[kRows], bool small) const {
    if (small) {
#pragma unroll
      for (i32 i = 0; i < kSValues; ++i) value_of(s, i) = series(value_of(s, i), offset[row_of_value(i)]);
    } else {
#pragma unroll
      for (i32 i = 0; i < kSValues; ++i) value_of(s, i) = (*this)(value_of(s, i), offset[row_of_value(i)]);
    }
  }
};

__device__ __forceinline__ float sum_over_quad(float x) {  // of the four lanes that share rows
#pragma unroll
  for (i32 step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// The rows of one warp: their references and sums. A reference is c shift + offset: (0, c m) as long as c m is small, else (m, 0), which
// costs an FADD a weight. A row that has seen no key has the shift -inf.
struct RowsState {
  static constexpr i32 kQuad = 4;
  Real offset[kRows] = {};
  Real shifts[(kRows + kQuad - 1) / kQuad];  // lane t of a quad keeps those of the slots r for which r % 4 = t
  Real l[kRows] = {};         // over the keys of this lane, before P is rounded
  Real l_of_p[kRows] = {};    // over all keys, where kRoundsP
  bool all_near = false;  // all shifts of the warp are 0

  __device__ __forceinline__ RowsState() {
#pragma unroll
    for (Real& shift : shifts) shift = -kInfinity;
  }

  // Brings the references up to the scores of a tile; `largest`: no lane's scores in a slot exceed it.
  __device__ __forceinline__ void take(SAccumulators& s, OAccumulators& o, const Real (&largest)[kRows], Real c, const Capped& capped) {
    bool exceeded = !all_near;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) exceeded |= exceeds(r, largest[r], c);
    if (__any_sync(0xffffffff, exceeded)) raise(s, o, c, capped);
  }

  // Scores become what weigh() takes.
  __device__ __forceinline__ void subtract_shifts(SAccumulators& s) const {
    if (all_near) return;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const Real seen_shift = max_of(shift(r), -kLargest);  // if there is none, all scores are -inf
#pragma unroll
      for (i32 i = 0; i < 2 * kKeyBlocks; ++i) s[r / 2][i / 2][2 * (r % 2) + i % 2] -= seen_shift;
    }
  }

  // The scores of key block j become weights, and are added up.
  __device__ __forceinline__ void weigh(SAccumulators& s, i32 j, Real c) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r)
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        Real& x = s[r / 2][j][2 * (r % 2) + e];
        x = exp2_of(kCapsLate ? x : fmaf(x, c, -offset[r]));
        l[r] += x;
      }
  }

  __device__ __forceinline__ Real sum(i32 r) const { return sum_over_quad(l[r]); }
  __device__ __forceinline__ Real divisor(i32 r, Real sum) const { return kRoundsP ? l_of_p[r] : sum; }
  // Of a row that has seen a key, from its sum
  __device__ __forceinline__ Lse log_sum_exp(i32 r, Real sum, LogUnits units) const {
    return static_cast<Lse>(shift(r)) * units.of_s + (static_cast<Lse>(offset[r]) * units.of_c_s + log_of(static_cast<Lse>(sum)));
  }

 private:
  __device__ __forceinline__ Real shift(i32 r) const {
    return __shfl_sync(0xffffffff, shifts[r / kQuad], (threadIdx.x % 32 & ~(kQuad - 1)) + r % kQuad);
  }
  // Whether the score `largest`, from which the shift was taken, is too far above the reference of slot r
  __device__ __forceinline__ bool exceeds(i32 r, Real largest, Real c) const { return fmaf(largest, c, -offset[r]) > kSlack; }

  // Moves references that the tile exceeds to its maximum.
  __device__ __forceinline__ void raise(const SAccumulators& s, OAccumulators& o, Real c, const Capped& capped) {
    Real m[kRows], from_shift[kRows];
    u32 rises = 0;  // bit r for slot r
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      m[r] = largest_in_slot(s, r);
      from_shift[r] = shift(r);
      rises |= static_cast<u32>(exceeds(r, capped.of_largest(m[r]) - from_shift[r], c)) << r;
    }
#pragma unroll
    for (i32 step = 1; step < kQuad; step *= 2) {
      rises |= __shfl_xor_sync(0xffffffff, rises, step);
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) m[r] = max_of(m[r], __shfl_xor_sync(0xffffffff, m[r], step));
    }
    bool near = true;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const bool does = rises >> r & 1;
      const Real to = capped.of_largest(m[r]), product = to * c;
      const bool is_near = fabsf(product) < kFar;
      const Real to_offset = does ? is_near ? product : Real(0) : offset[r], to_shift = does ? is_near ? Real(0) : to : from_shift[r];
      const Real factor = does && from_shift[r] != -kInfinity
                              ? exp2_of(fmaf(from_shift[r] - to_shift, c, offset[r] - to_offset))
                              : Real(1);  // of nothing
      offset[r] = to_offset;
      if (threadIdx.x % kQuad == r % kQuad) shifts[r / kQuad] = to_shift;
      near &= to_shift == 0;
      if (__any_sync(0xffffffff, does)) rescale(r, factor, o);
    }
    all_near = __all_sync(0xffffffff, near);
  }
  __device__ __forceinline__ void rescale(i32 r, Real factor, OAccumulators& o) {
    l[r] *= factor;
    l_of_p[r] *= factor;
#pragma unroll
    for (i32 b = 0; b < kOutBlocks; ++b)
#pragma unroll
      for (i32 e = 0; e < 2; ++e) o[r / 2][b][2 * (r % 2) + e] *= factor;
  }
};
