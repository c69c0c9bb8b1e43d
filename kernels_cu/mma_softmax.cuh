// Online softmax on the accumulators of a warp (mma_products.cuh): S becomes P, the row statistics go on, O is rescaled.
//
// A row's weights are 2^(c s - reference). Without softcap and bias, s is q . k as it left the tensor cores and c = |scale| log2(e) (Q
// took the sign), so that a weight costs one FFMA and one EX2; otherwise s is the finished score and c = log2(e). The reference is c
// times the row's maximum so far, so that its weight is 1 and loses nothing in P; float, which P does not round, makes do with a maximum
// that is exceeded by kSlack. A row decides by itself; warps vote only on whether to skip multiplications by 1.
#pragma once

constexpr bool kFolded = !kSoftcap && !kBias;
constexpr i32 kRows = 2 * kRowBlocks;  // rows of a thread: slot r is row g + 8 (r % 2) of block r / 2
constexpr Real kSlack = sizeof(Element) == 2 ? 0 : 8;  // in log2 units
constexpr float kLargest = 3.4028234664e38f;
constexpr Real kFar = 256;             // beyond it the rounding of c m would show: the largest weight would not be 1, nor its P exact

// c. Where the scale is folded into it, its sign, and a scale of 0, are Q's.
__device__ __forceinline__ float softmax_factor(const Params& p) {
  if (!kFolded) return static_cast<float>(kLog2E);
  const float c = fabsf(static_cast<float>(p.scale_log2));
  return c == 0 ? 1.0f : fminf(c, kLargest);
}

// The reference is c shift + offset: (0, c m) as long as c m is small, else (m, 0), which costs an FADD a weight.
struct RowReference {
  Real m = -kInfinity;  // in the unit of s

  __device__ __forceinline__ bool is_near(Real c) const { return fabsf(m * c) < kFar; }
  __device__ __forceinline__ Real offset(Real c) const { return is_near(c) ? m * c : Real(0); }
  __device__ __forceinline__ Real shift(Real c) const { return is_near(c) || m == -kInfinity ? Real(0) : m; }

  // Whether `tile_max` is too far above the reference
  __device__ __forceinline__ bool is_exceeded(Real tile_max, Real c) const {
    return kSlack == 0 ? tile_max > m : (tile_max - m) * c > kSlack;
  }

  // Moves to `tile_max`; returns the factor by which what was summed so far must be multiplied.
  __device__ __forceinline__ Real raise(Real tile_max, Real c) {
    const RowReference before = *this;
    m = tile_max;
    if (before.m == -kInfinity) return Real(1);  // of nothing
    return exp2_of(fmaf(before.shift(c) - shift(c), c, before.offset(c) - offset(c)));
  }
  __device__ __forceinline__ Lse log_sum_exp(Real l, Real c) const {
    const Lse log2_reference = static_cast<Lse>(shift(c)) * static_cast<Lse>(c) + static_cast<Lse>(offset(c));
    return log2_reference * static_cast<Lse>(kLn2) + log_of(static_cast<Lse>(l));
  }
};

__device__ __forceinline__ float sum_over_quad(float x) {  // of the four lanes that share rows
#pragma unroll
  for (i32 step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// The rows of one warp: their references and, in each lane, the sums over the keys of that lane.
struct RowsState {
  RowReference reference[kRows];
  Real l[kRows] = {};
  bool all_near = true;

  // Of the present tile: the exponent of the weight of s is tile_c s - tile_offset.
  Real tile_c, tile_offset[kRows];

  // Brings the references up to the scores of a tile.
  __device__ __forceinline__ void take(SAccumulators& s, OAccumulators& o, Real c) {
    Real tile_max[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      tile_max[r] = -kInfinity;
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; ++j)
#pragma unroll
        for (i32 e = 0; e < 2; ++e) tile_max[r] = max_of(tile_max[r], s[r / 2][j][2 * (r % 2) + e]);
#pragma unroll
      for (i32 step = 1; step < 4; step *= 2) tile_max[r] = max_of(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], step));
    }
    bool raised = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const bool exceeded = reference[r].is_exceeded(tile_max[r], c);
      if (!__any_sync(0xffffffff, exceeded)) continue;
      raised = true;
      rescale(r, exceeded ? reference[r].raise(tile_max[r], c) : Real(1), o);
    }
    if (raised) all_near = !is_any_far(c);

    tile_c = c;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) tile_offset[r] = reference[r].offset(c);
    if (!all_near) {  // s becomes the exponent, in one operation more
      tile_c = 1;
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
        for (i32 j = 0; j < kKeyBlocks; ++j)
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            Real& x = s[r / 2][j][2 * (r % 2) + e];
            x = fmaf(x - reference[r].shift(c), c, -tile_offset[r]);
          }
        tile_offset[r] = 0;
      }
    }
  }

  __device__ __forceinline__ Real sum(i32 r) const { return sum_over_quad(l[r]); }

  // The scores of key block j become weights, and are added up.
  __device__ __forceinline__ void weigh(SAccumulators& s, i32 j) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r)
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        Real& x = s[r / 2][j][2 * (r % 2) + e];
        x = exp2_of(fmaf(x, tile_c, -tile_offset[r]));
        l[r] += x;
      }
  }

 private:
  __device__ __forceinline__ void rescale(i32 r, Real factor, OAccumulators& o) {
    l[r] *= factor;
#pragma unroll
    for (i32 b = 0; b < kOutBlocks; ++b)
#pragma unroll
      for (i32 e = 0; e < 2; ++e) o[r / 2][b][2 * (r % 2) + e] *= factor;
  }
  __device__ __forceinline__ bool is_any_far(Real c) const {
    bool far = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) far |= reference[r].shift(c) != 0;
    return __any_sync(0xffffffff, far);
  }
};
