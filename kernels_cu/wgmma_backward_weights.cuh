// From S^T to P^T and from dP^T to dS^T, on the accumulators of a warpgroup (wgmma_panels.cuh): rows are keys, columns query rows.
#pragma once

constexpr bool kFolded = !kSoftcap && !kBias;
constexpr bool kInLog2 = kFolded && !kHalf;  // where the log-sum-exp, in units of log 2, is exact enough

// Where scores are nothing but scaled, with the scale that is a float already
__device__ __forceinline__ Scores scores_of(const BackwardWgmmaParams& a, i32 batch, i32 head) {
  Scores score = scores(a.p, batch, head);
  if (kFolded) (kInLog2 ? score.scale_log2 : score.scale) = a.scale;
  return score;
}

// The derivatives of the scores of a tile by scale S, two in a word; none where they are 1
struct Slopes {
  u32 x[kSoftcap ? kPRegisters : 1];

  __device__ __forceinline__ void keep(i32 i, float first, float second) {
    if constexpr (kSoftcap) x[i] = pack2(first, second, Element{});
  }
};

__device__ __forceinline__ Vector<float, 2> unpack2(u32 x) {
  return {to_real(Element{static_cast<u16>(x)}), to_real(Element{static_cast<u16>(x >> 16)})};
}
__device__ __forceinline__ void pack(u32 (&packed)[kPRegisters], const float (&x)[kSRegisters]) {
#pragma unroll
  for (i32 i = 0; i < kPRegisters; ++i) packed[i] = pack2(x[2 * i], x[2 * i + 1], Element{});
}

// P of a tile: rounded to Element, as dV takes it, and the eight bits behind, so that dS has P as it was. There are no registers for all of
// it. Rounding goes up or down: a byte counts from half a unit of Element below what was rounded. Half-way between two numbers of Element,
// where a byte would not tell which of them it counts from, there is no P: its lowest bit is set.
struct Weights {
  u32 rounded[kPRegisters];
  u32 cut_off[kPRegisters / 2];

  static constexpr float kLeast = 0x1p-100f;  // what is less is noise behind a 0
  static constexpr i32 kUnitBits = kHalf ? 5 : 8;  // what a byte counts: 2^kUnitBits of a float's bits, where Element ends 8 bits higher

  __device__ __forceinline__ void round(const float (&p)[kSRegisters]) { pack(rounded, p); }
  __device__ __forceinline__ void cut_off_of(float (&p)[kSRegisters]) {
#pragma unroll
    for (i32 i = 0; i < kSRegisters; ++i) p[i] = __uint_as_float(__float_as_uint(p[i]) | 1);
#pragma unroll
    for (i32 i = 0; i < kPRegisters / 2; ++i) {
      const auto bits = [&](i32 e) { return __float_as_uint(p[4 * i + e]) * (1 << (8 - kUnitBits)); };
      cut_off[i] = prmt(prmt(bits(0), bits(1), 0x0051), prmt(bits(2), bits(3), 0x0051), 0x5410) ^ 0x80808080;
    }
    pin(p);  // done now, while products run
    pin(cut_off);
  }
  // The weights of registers 2i and 2i + 1
  __device__ __forceinline__ Vector<float, 2> of_pair(i32 i) const {
    constexpr i32 kHalfUnit = 128 << kUnitBits;
    Vector<float, 2> p;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      const i32 byte = 2 * (i % 2) + e;
      if constexpr (kHalf) {
        const i32 behind = static_cast<i32>(prmt(cut_off[i / 2], 0, 0x4440 + byte)) << kUnitBits;
        const i32 bits = __float_as_int(unpack2(rounded[i]).x[e]) + behind - kHalfUnit;
        p.x[e] = __int_as_float(max(bits, 0));  // what rounds to 0 may have had up to a half of it cut off
      } else {  // the two bytes of what was rounded, and the one behind, twice
        const i32 bits = static_cast<i32>(prmt(rounded[i], cut_off[i / 2], 0x1000 * (2 * e + 1) + 0x100 * (2 * e) + 0x11 * (4 + byte)));
        p.x[e] = __int_as_float(bits - kHalfUnit);
      }
    }
    return p;
  }
};

// Row statistics lie as accumulators hold columns: those of the four columns of a lane in two blocks side by side.
__device__ __forceinline__ i32 place_of_statistic(i32 row) { return (row & ~15) + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// LSE, in the unit of what it is subtracted from: where that is c q . k with c = scale log2(e), rounded, in that of this c. A subnormal c
// is coarse, but then c q . k is next to nothing.
constexpr float kLeastNormal = 0x1p-126f;
__device__ __forceinline__ float lse_as_subtracted(const Params& p, float lse) {
  if (!kInLog2) return lse;
  const float c = static_cast<float>(p.scale_log2);
  return static_cast<float>(lse * (fabsf(c) < kLeastNormal ? kLog2E : c / p.scale));
}

// P of a pair, from its score less the log-sum-exp
__device__ __forceinline__ float weight_of(float above) {
  return kInLog2 ? exp2_of(above) : kHalf ? exp2_of(fmaf(above, static_cast<float>(kLog2E), kWeightExponent)) : exp_of(above);
}
// The same from q . k, and the derivative of its score
__device__ __forceinline__ float weight_of(float dot, bool hidden, float lse, const Scores& score, i32 row, i32 key, float& slope) {
  if (kFolded) {
    slope = 1;
    const float weight = weight_of(fmaf(dot, kInLog2 ? score.scale_log2 : score.scale, -lse));
    return hidden ? 0 : weight;
  }
  slope = 0;
  if (hidden) return 0;
  const Scores::WithSlope own = score.with_slope(dot, row, key);
  slope = own.slope;
  return weight_of(own.score - lse);
}

// P = exp(score - LSE) of the keys key, key + 8 and the rows row + 8 b, row + 8 b + 1 of a lane, of which `lse` has the statistics.
// keep(i, ...) gets the slopes of registers 2i and 2i + 1 once these are there.
template <bool kMasked, class Keep>
__device__ __forceinline__ void weigh(float (&s)[kSRegisters], const float* lse, const Scores& score, const Visibility& see, i32 key, i32 row,
                                      const Keep& keep) {
  // The rows that see a key, from `row` on; the second key of a lane is 8 beyond the first.
  constexpr i32 kNever = 1 << 30;
  const i32 at = key - see.delta - row, live_rows = see.query_length - row, live_keys = see.key_length - key;
  const i32 first[2] = {live_keys > 0 ? kRight ? at - see.right : 0 : kNever, live_keys > 8 ? kRight ? at + 8 - see.right : 0 : kNever};
  const i32 end[2] = {kLeft ? min(live_rows, at + see.left + 1) : live_rows, kLeft ? min(live_rows, at + 8 + see.left + 1) : live_rows};
#pragma unroll
  for (i32 b = 0; b < kBr / kBlock; ++b) {
    const Vector<float, 4> of_two_blocks = *reinterpret_cast<const Vector<float, 4>*>(lse + kBlock * (b - b % 2));
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float slope[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 column = kBlock * b + e;
        float& x = s[4 * b + 2 * r + e];
        const bool hidden = kMasked && (kMask ? !see.sees(row + column, key + 8 * r) : column < first[r] || column >= end[r]);
        x = weight_of(x, hidden, of_two_blocks.x[2 * (b % 2) + e], score, row + column, key + 8 * r, slope[e]);
      }
      keep(2 * b + r, slope[0], slope[1]);
    }
  }
}

// dP - delta, in `unit`, a power of two; `shift` is delta in that unit
__device__ __forceinline__ float less_delta(float dp, float shift, float unit) { return kHalf ? fmaf(dp, unit, -shift) : dp - shift; }

// dS = P o (dP - delta), times the derivative of the score; in place. Of pairs that are not seen nothing is multiplied: delta may be
// anything there.
template <bool kMasked>
__device__ __forceinline__ void differentiate(float (&dp)[kSRegisters], const Weights& weights, const Slopes& slopes, const float* delta,
                                              const float& unit_of_ds) {
  const float unit = kHalf ? unit_of_ds : 1;
#pragma unroll
  for (i32 b = 0; b < kBr / kBlock; ++b) {
    const Vector<float, 4> of_two_blocks = *reinterpret_cast<const Vector<float, 4>*>(delta + kBlock * (b - b % 2));
    const float shift[2] = {of_two_blocks.x[2 * (b % 2)] * unit, of_two_blocks.x[2 * (b % 2) + 1] * unit};
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const Vector<float, 2> p = weights.of_pair(2 * b + r);
      Vector<float, 2> slope;
      if constexpr (kSoftcap) slope = unpack2(slopes.x[2 * b + r]);
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        float& x = dp[4 * b + 2 * r + e];
        const float ds = p.x[e] * less_delta(x, shift[e], unit);
        x = kMasked && p.x[e] < Weights::kLeast ? 0 : kSoftcap ? ds * slope.x[e] : ds;
      }
    }
  }
}
