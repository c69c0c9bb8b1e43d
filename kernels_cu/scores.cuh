// Seam 2 of 2: what happens to a score between Q K^T and the softmax: scale, softcap, bias, in this order.
// Scores leave here multiplied by log2(e), so that the softmax is one power of two.
#pragma once

constexpr double kLog2E = 1.4426950408889634;

struct Scores {
  Real scale_log2, softcap_log2;
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
    Real score = dot * scale_log2;
    if (kSoftcap) score = softcap_log2 * tanh_of(score);
    if (kBias) score += to_real(bias[row * bias_row + key * bias_column]) * static_cast<Real>(kLog2E);
    return score;
  }
};

__device__ __forceinline__ Scores scores(const Params& p, i32 batch, i32 head) {
  Scores score;
  score.scale_log2 = static_cast<Real>(p.scale_log2);
  score.softcap_log2 = static_cast<Real>(p.softcap_log2);
  score.bias = p.bias + batch * p.bias_batch + head * p.bias_head;
  score.bias_head = p.bias_head;
  score.bias_row = p.bias_row;
  score.bias_column = p.bias_column;
  return score;
}
