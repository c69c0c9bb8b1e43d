// Seam 2 of 2: what happens to a score between Q K^T and the softmax: scale, softcap, bias, in this order.
#pragma once

// unit softcap tanh(scale x) for |x| < limit, where |scale x| < kSeriesEnd; to 2^-23
struct SoftcapSeries {
  static constexpr float kSeriesEnd = 0.375f, kTanh3 = -0.33332333f, kTanh5 = 0.13289725f, kTanh7 = -0.0484872f;
  float k1, k3, k5, k7, limit;

  // Less `offset`
  __device__ __forceinline__ float operator()(float x, float offset = 0) const {
    const float square = x * x;
    return fmaf(x, fmaf(fmaf(fmaf(k7, square, k5), square, k3), square, k1), -offset);
  }
};

struct Scores {
  Real scale, softcap;
  Real scale_log2;  // for a kernel that has no more to do than to scale, and leaves that to the softmax
  const BiasElement* bias;
  i64 bias_head, bias_row, bias_column;

  // The same for the query head `offset` heads further on
  __device__ __forceinline__ Scores of_head(i32 offset) const {
    Scores other = *this;
    if (kBias) other.bias += offset * bias_head;
    return other;
  }
  // `dot` is q_row . k_key; (row, key) lies inside the arrays
  __device__ __forceinline__ Real operator()(Real dot, i32 row, i32 key) const {
    const Real score = kSoftcap ? softcap * tanh_of(dot * scale) : dot * scale;  // a softcap's scale is scale / softcap
    return kBias ? score + bias_at(row, key) : score;
  }
  // The score, and its derivative by scale q_row . k_key
  struct WithSlope {
    Real score, slope;
  };
  __device__ __forceinline__ WithSlope with_slope(Real dot, i32 row, i32 key) const {
    WithSlope of = {scale * dot, 1};
    if (kSoftcap) {
      const TanhWithSlope<Real> capped = tanh_with_slope(of.score);
      of = {softcap * capped.value, capped.slope};
    }
    if (kBias) of.score = bias_at(row, key) + of.score;
    return of;
  }
  // For floats; a limit of 0 where the powers of the scale would leave their range, and where a series is too coarse for the elements
  __device__ __forceinline__ SoftcapSeries softcap_series(float unit) const {
    using Series = SoftcapSeries;
    const float a = static_cast<float>(scale), square = a * a;
    const float k1 = unit * static_cast<float>(softcap) * a, k3 = k1 * square, k5 = k3 * square, k7 = k5 * square;
    const bool serves = sizeof(Element) == 2 && fabsf(k7) < kInfinity && square > 0;
    return {k1, Series::kTanh3 * k3, Series::kTanh5 * k5, Series::kTanh7 * k7, serves ? Series::kSeriesEnd / fabsf(a) : 0};
  }
  __device__ __forceinline__ Real bias_at(i32 row, i32 key) const { return to_real(bias[row * bias_row + key * bias_column]); }
};

__device__ __forceinline__ Scores scores(const Params& p, i32 batch, i32 head) {
  Scores score;
  score.scale = static_cast<Real>(p.scale);
  score.softcap = static_cast<Real>(p.softcap);
  score.scale_log2 = static_cast<Real>(p.scale_log2);
  score.bias = p.bias + batch * p.bias_batch + head * p.bias_head;
  score.bias_head = p.bias_head;
  score.bias_row = p.bias_row;
  score.bias_column = p.bias_column;
  return score;
}
