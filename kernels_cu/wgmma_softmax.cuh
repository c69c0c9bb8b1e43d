// Online softmax on the accumulators of a warpgroup (wgmma_panels.cuh): S becomes P, the row statistics go on.
//
// The weight of a score s is 2^(c (s - m)). Without softcap and bias, s is q . k and c = |scale| log2(e), Q having taken the sign;
// otherwise s is the finished score and c = log2(e). The reference m of a row is
//   - the maximum so far, whose weight is exactly 1, where the row does not trust it;
//   - where it does (kSpeculative), a maximum that was, until the sum of a tile's weights shows, after the fact, that they have outgrown
//     it: weights must not overflow, and what is above 1 must not be most of l, because P rounds it and l does not.
// A row trusts its reference after a tile that it saw whole, unless scores rose steeply within it, until that was repaired kRepairs times,
// or weights overflowed. All of this is decided by the row's own scores; the warp votes only on whether code is to run at all.
#pragma once

constexpr bool kFolded = !kSoftcap && !kBias;
constexpr bool kScored = kFolded || kBiasOfKeys;  // before finish_scores
constexpr float kMostSum = 0x1p15f;  // of a lane's weights in a tile: so that each is a float16
constexpr float kMostOfSum = 2;      // times l: as much may the weights of a tile add
constexpr float kLost = 0x1p100f;    // such a sum is as good as infinite: the factor that makes up for it would not be a normal number
constexpr float kFar = 1024;         // of references in log2 units: beyond it, the rounding of c m would show in P
constexpr float kLargest = 3.4028234664e38f;
constexpr i32 kRepairs = kSpeculative ? 2 : 0;
constexpr float kSteep = 32;         // in log2 units: by as much the maximum of half a tile is above that of the half before
constexpr i32 kPartKeys = 16;        // of a tile, whose scores are computed again at a time

// c. Where the scale is folded into it, its sign, and a scale of 0, are Q's.
__device__ __forceinline__ float softmax_factor(const Params& p) {
  if (!kFolded) return static_cast<float>(kLog2E);
  const float c = fabsf(static_cast<float>(p.scale_log2));
  return c == 0 ? 1.0f : fminf(c, kLargest);
}

// Over the four lanes that share rows
__device__ __forceinline__ float sum_over_quad(float x) {
#pragma unroll
  for (i32 step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
__device__ __forceinline__ float max_over_quad(float x) {
#pragma unroll
  for (i32 step = 1; step < 4; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

__device__ __forceinline__ constexpr i32 row_of_s(i32 i) { return i / 2 % 2; }  // which of a lane's two rows register i holds
__device__ __forceinline__ constexpr i32 row_of_p(i32 i) { return i % 2; }

// Maxima over the lower and the upper half of the keys
struct Halves {
  float lower, upper;

  __device__ __forceinline__ float both() const { return fmaxf(lower, upper); }
};
template <i32 n> __device__ __forceinline__ Halves max_of_halves(const float (&s)[n], i32 row, float least) {
  Halves largest = {least, least};  // two chains of comparisons
#pragma unroll
  for (i32 b = 0; b < n / 4; ++b) {
    float& of_half = b < n / 8 ? largest.lower : largest.upper;
    of_half = fmaxf(of_half, fmaxf(s[4 * b + 2 * row], s[4 * b + 2 * row + 1]));
  }
  return largest;
}
template <i32 n> __device__ __forceinline__ float row_max(const float (&s)[n], i32 row, float least) {
  return max_over_quad(max_of_halves(s, row, least).both());
}

// P, rounded to Element, as wgmma takes it
__device__ __forceinline__ void pack_p(u32 (&p)[kPRegisters], const float (&s)[kSRegisters]) {
#pragma unroll
  for (i32 i = 0; i < kPRegisters; ++i) p[i] = pack2(s[2 * i], s[2 * i + 1], Element{});
}

// From q . k
__device__ __forceinline__ float biased(const Scores& score, float dot, float bias) {
  return kSoftcap ? score.softcap * tanh_of(dot * score.scale) + bias : fmaf(dot, score.scale, bias);
}
// Where the bias is one of keys: `bias` holds it from the lane's first key on.
template <i32 n> __device__ __forceinline__ void add_bias_of_keys(float (&s)[n], const Scores& score, const float* bias) {
#pragma unroll
  for (i32 b = 0; b < n / 4; ++b) {
    const auto pair = *reinterpret_cast<const Vector<float, 2>*>(bias + kBlock * b);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) s[4 * b + i] = biased(score, s[4 * b + i], pair.x[i % 2]);
  }
}

// Where rows differ in bias, of a tile that rows see whole. A few blocks of keys are loaded together.
template <i32 n>
__device__ __forceinline__ void add_bias_of_rows(float (&s)[n], const Scores& score, const Visibility& see, i32 row0, i32 key0) {
  using Pair = Vector<BiasElement, 2>;
  constexpr i32 kTogether = 16 / sizeof(BiasElement);
  const BiasElement* of_row[2];  // from the lane's first key on
#pragma unroll
  for (i32 r = 0; r < 2; ++r) of_row[r] = score.bias + min(row0 + 8 * r, see.query_length - 1) * score.bias_row + key0 * score.bias_column;
  const bool in_pairs = score.bias_column == 1 && score.bias_row % 2 == 0 && reinterpret_cast<u64>(score.bias) % sizeof(Pair) == 0;
#pragma unroll
  for (i32 first = 0; first < n / 4; first += kTogether) {
    float bias[4 * kTogether];
    if (in_pairs) {
#pragma unroll
      for (i32 i = 0; i < 2 * kTogether && 2 * first + i < n / 2; ++i) {
        const Pair pair = *reinterpret_cast<const Pair*>(of_row[i % 2] + kBlock * (first + i / 2));
#pragma unroll
        for (i32 e = 0; e < 2; ++e) bias[2 * i + e] = to_real(pair.x[e]);
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < 4 * kTogether && 4 * first + i < n; ++i)
        bias[i] = to_real(of_row[row_of_s(i)][(kBlock * (first + i / 4) + i % 2) * score.bias_column]);
    }
#pragma unroll
    for (i32 i = 0; i < 4 * kTogether && 4 * first + i < n; ++i) s[4 * first + i] = biased(score, s[4 * first + i], bias[i]);
  }
}

// The scores that the softmax sees, from q . k of the rows row0, row0 + 8 and the keys key0 + 8 b, key0 + 8 b + 1 of a lane; where kScored,
// from scores that lack nothing but the mask
template <bool kMasked, i32 n>
__device__ __forceinline__ void finish_scores(float (&s)[n], const Scores& score, const Visibility& see, i32 row0, i32 key0) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    const i32 row = row0 + 8 * r, scored_row = min(row, see.query_length - 1);
    const bool is_read = kScored || row < see.query_length;  // rows that nobody asked for have no bias
    const i32 first = see.first_key(row) - key0, end = (is_read ? see.end_key(row) : 0) - key0;
#pragma unroll
    for (i32 b = 0; b < n / 4; ++b)
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 key = kBlock * b + e;
        float& x = s[4 * b + 2 * r + e];
        if (kMasked && !(kMask ? see.sees(row, key0 + key) : (!kLeft || key >= first) && key < end))
          x = -kInfinity;
        else if (!kScored)
          x = score(x, scored_row, key0 + key);
      }
  }
}

// The two rows of a lane. Sums are over the lane's own keys.
struct Rows {
  float l[2] = {};
  float m[2] = {-kInfinity, -kInfinity};  // the reference in the unit of s; -inf: no key was visible yet
  i32 repairs_left[2] = {kRepairs, kRepairs};
  float checked_from[2] = {kInfinity, kInfinity};  // 1 where a row trusts its reference: a sum up to 1 is always right
  bool speculates = false, all_near = true;        // all rows of the warp
  bool settled = false, undecided = true;          // none of them will trust a reference; some may begin to

  __device__ __forceinline__ bool trusts(i32 row) const { return checked_from[row] != kInfinity; }
  __device__ __forceinline__ bool may_yet_trust(i32 row) const { return repairs_left[row] > 0 && !trusts(row); }

  // As long as c m is small, it is subtracted by the FFMA that multiplies by c; else m is, before.
  static __device__ __forceinline__ bool is_near(float m, float c) { return fabsf(m * c) < kFar; }
  static __device__ __forceinline__ float offset(float m, float c) { return is_near(m, c) ? __fmul_rn(m, c) : 0; }
  static __device__ __forceinline__ float shift(float m, float c) { return is_near(m, c) || m == -kInfinity ? 0 : m; }

  // A far reference is no guess that is worth trusting.
  __device__ __forceinline__ void note_if_far(i32 row, float c) {
    if (m[row] != -kInfinity && !is_near(m[row], c)) repairs_left[row] = 0;
  }
  // Moves a row's reference; returns the factor by which what was summed so far must be multiplied.
  __device__ __forceinline__ float move(i32 row, float to, float c) {
    const bool first = m[row] == -kInfinity;  // nothing was summed
    const float old_offset = offset(m[row], c), old_shift = shift(m[row], c);
    m[row] = to;
    note_if_far(row, c);
    return first ? 1 : exp2_of(fmaf(old_shift - shift(m[row], c), c, old_offset - offset(m[row], c)));
  }
  __device__ __forceinline__ void vote_on_near(float c) { all_near = !__any_sync(0xffffffff, shift(m[0], c) != 0 || shift(m[1], c) != 0); }
  // After a tile that all rows saw whole
  __device__ __forceinline__ void decide_on_trust() {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) checked_from[r] = repairs_left[r] > 0 && m[r] != -kInfinity ? 1 : kInfinity;
    vote_on_trust();
  }
  // After repairs, which give no row a trust that it did not have
  __device__ __forceinline__ void withdraw_trust() {
#pragma unroll
    for (i32 r = 0; r < 2; ++r)
      if (repairs_left[r] == 0) checked_from[r] = kInfinity;
    vote_on_trust();
  }
  __device__ __forceinline__ void vote_on_trust() {  // repairs_left > 0: trusts, or may yet
    speculates = !__any_sync(0xffffffff, !trusts(0) || !trusts(1));
    settled = !__any_sync(0xffffffff, repairs_left[0] > 0 || repairs_left[1] > 0);
    undecided = __any_sync(0xffffffff, may_yet_trust(0) || may_yet_trust(1));
  }
  // Scores that rise steeply within a tile, towards its lower keys, would outgrow one reference after the other. Rows that see a part of the
  // tile show nothing of the kind.
  __device__ __forceinline__ void note_if_steep(const Halves (&of_lane)[2], const float (&tile_max)[2], float c, bool whole) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const float upper = max_over_quad(of_lane[r].upper);
      if (whole & may_yet_trust(r) & (upper != -kInfinity) & ((tile_max[r] - upper) * c > kSteep)) repairs_left[r] = 0;
    }
  }

  // The references of rows that have none yet: the maximum of their first tile
  __device__ __forceinline__ void begin(float (&s)[kSRegisters], float c, float (&offset_of)[2], bool whole) {
    Halves of_lane[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      of_lane[r] = max_of_halves(s, r, -kInfinity);
      m[r] = max_over_quad(of_lane[r].both());
    }
    if (kSpeculative) note_if_steep(of_lane, m, c, whole);
    for (i32 r = 0; r < 2; ++r) note_if_far(r, c);
    vote_on_near(c);
    if (!all_near) subtract_shift(s, c);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) offset_of[r] = offset(m[r], c);
  }

  // Brings the rows that do not trust their references up to the maximum of the tile, and c (s - m) to c s - `offset`. Returns whether O
  // must be multiplied by `factor`.
  template <bool kSomeTrust>
  __device__ __forceinline__ bool raise(float (&s)[kSRegisters], float c, float (&offset_of)[2], float (&factor)[2], bool whole) {
    Halves of_lane[2];
    float tile_max[2], to[2];
    bool rises[2], leaves = false;  // whether a reference is no longer near
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      of_lane[r] = max_of_halves(s, r, -kInfinity);
      tile_max[r] = max_over_quad(of_lane[r].both());
      rises[r] = !(kSomeTrust && trusts(r)) & (tile_max[r] > m[r]);
      to[r] = rises[r] ? tile_max[r] : m[r];
      leaves |= rises[r] & !(fabsf(tile_max[r] * c) < kFar);
    }
    if (kSomeTrust && undecided) note_if_steep(of_lane, tile_max, c, whole);
    const bool raised = __any_sync(0xffffffff, rises[0] | rises[1]);
    if (all_near && !__any_sync(0xffffffff, leaves)) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        offset_of[r] = to[r] == -kInfinity ? 0 : __fmul_rn(to[r], c);
        factor[r] = rises[r] & (m[r] != -kInfinity) ? exp2_of(__fmul_rn(m[r], c) - offset_of[r]) : 1;
        m[r] = to[r];
        l[r] *= factor[r];
      }
      return raised;
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      factor[r] = rises[r] ? move(r, to[r], c) : 1;
      l[r] *= factor[r];
    }
    vote_on_near(c);
    if (!all_near) subtract_shift(s, c);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) offset_of[r] = offset(m[r], c);
    return raised;
  }
  template <i32 n> __device__ __forceinline__ void subtract_shift(float (&s)[n], float c) const {
    const float of_row[2] = {shift(m[0], c), shift(m[1], c)};
#pragma unroll
    for (i32 i = 0; i < n; ++i) s[i] -= of_row[row_of_s(i)];
  }

  // Scores become weights, `sum` their sums over this lane's keys.
  template <i32 n> static __device__ __forceinline__ void weigh(float (&s)[n], float c, const float (&offset_of)[2], float (&sum)[2]) {
    float of_two[4];  // two chains of additions a row
#pragma unroll
    for (i32 i = 0; i < n; ++i) {
      s[i] = exp2_of(fmaf(s[i], c, -offset_of[row_of_s(i)]));
      of_two[i % 4] = i < 4 ? s[i] : of_two[i % 4] + s[i];
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) sum[r] = of_two[2 * r] + of_two[2 * r + 1];
  }
  __device__ __forceinline__ void add(const float (&sum)[2]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) l[r] += sum[r];
  }

  // Whether weights of a tile that sum to `sum` have outgrown the reference of a row with `l` so far. What outgrows it over all keys does
  // so over those of a lane.
  __device__ __forceinline__ bool outgrows(i32 row, float sum, float l) const {
    return sum > fmaxf(checked_from[row], fminf(kMostOfSum * l, kMostSum));
  }
  __device__ __forceinline__ bool may_be_outgrown(const float (&sum)[2]) const {
    return __any_sync(0xffffffff, outgrows(0, sum[0], l[0]) | outgrows(1, sum[1], l[1]));
  }

  // Makes the largest weight the reference of rows that outgrew theirs, and multiplies everything that was measured from the old one, O included. Where
  // weights overflowed the scores are lost; `scores_again(part, key)` gives those of the keys from `key` on once more.
  template <class ScoresAgain>
  __device__ __forceinline__ void repair(float (&s)[kSRegisters], float (&sum)[2], u32 (&p)[kPRegisters], float (&o)[kORegisters], float c,
                                         const ScoresAgain& scores_again) {
    bool outgrown[2], lost[2];
    float factor[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const float of_row = sum_over_quad(sum[r]);
      outgrown[r] = outgrows(r, of_row, sum_over_quad(l[r]));
      lost[r] = outgrown[r] && of_row >= kLost;
    }
    if (!__any_sync(0xffffffff, outgrown[0] || outgrown[1])) return;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      factor[r] = 1;
      const float largest = row_max(s, r, 0);
      if (outgrown[r] && !lost[r]) {
        --repairs_left[r];
        factor[r] = move(r, m[r] + log2_of(largest) / c, c);
        sum[r] *= factor[r];
      }
    }
#pragma unroll
    for (i32 i = 0; i < kSRegisters; ++i) s[i] *= factor[row_of_s(i)];
    pack_p(p, s);

    if (__any_sync(0xffffffff, lost[0] || lost[1])) {
      float part[kPartKeys / 2], tile_max[2] = {-kInfinity, -kInfinity};
#pragma unroll 1
      for (i32 key = 0; key < kBc; key += kPartKeys) {
        scores_again(part, key);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) tile_max[r] = row_max(part, r, tile_max[r]);
      }
#pragma unroll
      for (i32 r = 0; r < 2; ++r)
        if (lost[r]) {
          repairs_left[r] = 0;
          sum[r] = 0;
          if (tile_max[r] != -kInfinity) factor[r] = move(r, tile_max[r], c);
        }
#pragma unroll
      for (i32 key = 0; key < kBc; key += kPartKeys) {
        float sum_of_part[2];
        scores_again(part, key);
        subtract_shift(part, c);
        weigh(part, c, {offset(m[0], c), offset(m[1], c)}, sum_of_part);
#pragma unroll
        for (i32 r = 0; r < 2; ++r)
          if (lost[r]) sum[r] += sum_of_part[r];
#pragma unroll
        for (i32 i = 0; i < kPartKeys / 4; ++i)
          if (lost[row_of_p(i)]) p[key / 4 + i] = pack2(part[2 * i], part[2 * i + 1], Element{});
      }
    }
    vote_on_near(c);
    withdraw_trust();
#pragma unroll
    for (i32 r = 0; r < 2; ++r) l[r] *= factor[r];
    rescale(o, factor);
  }

  static __device__ __forceinline__ void rescale(float (&o)[kORegisters], const float (&factor)[2]) {
#pragma unroll
    for (i32 i = 0; i < kORegisters; ++i) o[i] *= factor[row_of_s(i)];
  }

  static __device__ __forceinline__ Lse log_sum_exp(float m, float l, float c) {
    return fmaf(shift(m, c), c, offset(m, c)) * static_cast<Lse>(kLn2) + log_of(l);
  }
};
