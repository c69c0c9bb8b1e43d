// float on tensor cores: three TF32 products for one ("3xTF32"). With x = big + small,
//   ab = small_a big_b + big_a small_b + big_a big_b.
// Tensor cores cut off what they add to an accumulator, so a step's sum starts from zero and is added outside them.
#pragma once

// x as the sum of two TF32 numbers (Dekker 1971): x rounded to its upper 11 bits, by additions, which are faster than conversions, and the
// rest, which needs at most one bit more than TF32 has.
__device__ __forceinline__ void split(float x, u32& big, u32& small) {
  constexpr float kUpper = (1 << 13) + 1;
  const float enlarged = __fmul_rn(x, kUpper);
  const float upper = __fsub_rn(enlarged, __fsub_rn(enlarged, x));
  big = __float_as_uint(upper);
  small = __float_as_uint(__fsub_rn(x, upper));
}

struct Tf32A {
  u32 big[4], small[4];
  __device__ __forceinline__ void take(i32 e, float x) { split(x, big[e], small[e]); }
};
struct Tf32B {
  u32 big[2], small[2];
  __device__ __forceinline__ void take(i32 e, float x) { split(x, big[e], small[e]); }
};

template <i32 kRowBlocks, i32 kCount, class Visit> __device__ __forceinline__ void for_each_pair(Visit visit) {
#pragma unroll
  for (i32 n = 0; n < kCount; ++n)
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) visit(i, n);
}

// x(i, j + n) += a_i b_n, of products that need not wait for one another
template <i32 kCount, i32 kRowBlocks, i32 kColumnBlocks>
__device__ __forceinline__ void multiply_step(float (&x)[kRowBlocks][kColumnBlocks][4], i32 j, const Tf32A (&a)[kRowBlocks],
                                              const Tf32B (&b)[kCount]) {
  float sum[kCount][kRowBlocks][4] = {};
  for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(sum[n][i], a[i].small, b[n].big); });
  for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(sum[n][i], a[i].big, b[n].small); });
  for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(sum[n][i], a[i].big, b[n].big); });
  for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) x[i][j + n][e] += sum[n][i][e];
  });
}
