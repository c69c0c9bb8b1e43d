// The numbers of a kernel: Element is how q, k, v and out are stored, Real what is computed in, Lse the type of the log-sum-exp.
#pragma once

template <class T> struct Arithmetic { using real = float; using lse = float; };  // 16-bit elements
template <> struct Arithmetic<float> { using real = float; using lse = double; };
template <> struct Arithmetic<double> { using real = double; using lse = double; };

using Real = Arithmetic<Element>::real;
using Lse = Arithmetic<Element>::lse;

#define kInfinity __int_as_float(0x7f800000)

__device__ __forceinline__ float to_real(half_t x) { return cvt_f32_f16(x); }
__device__ __forceinline__ float to_real(bf16_t x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ float to_real(float x) { return x; }
__device__ __forceinline__ double to_real(double x) { return x; }

__device__ __forceinline__ void from_real(half_t& y, float x) { y = cvt_rn_f16_f32(x); }
__device__ __forceinline__ void from_real(bf16_t& y, float x) {  // to nearest even; a NaN stays one
  const u32 bits = __float_as_uint(x);
  y.bits = x != x ? 0x7fff : static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ void from_real(float& y, float x) { y = x; }
__device__ __forceinline__ void from_real(double& y, double x) { y = x; }

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

__device__ __forceinline__ float exp2_of(float x) { return ex2_approx_ftz(x); }
__device__ __forceinline__ float exp_of(float x) { return exp2_of(x * static_cast<float>(kLog2E)); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float max_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double max_of(double a, double b) { return fmax(a, b); }

// tanh, accurate also near 0, where the LSE needs it: for 16-bit elements a series up to kTanhSmall, to 2^-25.
constexpr float kTanhSmall = 0.5f, kTanh3 = -0.33333136f, kTanh5 = 0.13325711f, kTanh7 = -0.053034651f, kTanh9 = 0.017219860f;
__device__ __forceinline__ float tanh_of_small(float x) {
  const float square = x * x;
  return fmaf(x * square, fmaf(fmaf(fmaf(kTanh9, square, kTanh7), square, kTanh5), square, kTanh3), x);
}
constexpr float kTwiceLog2E = 2 * kLog2E;
__device__ __forceinline__ float tanh_of_large(float x) {  // to 2^-22 elsewhere
  return 1 - 2 * rcp_approx_ftz(1 + exp2_of(kTwiceLog2E * x));
}
__device__ __forceinline__ float tanh_of(float x) {
  if (sizeof(Element) != 2) return tanhf(x);
  return fabsf(x) < kTanhSmall ? tanh_of_small(x) : tanh_of_large(x);
}
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// tanh_of(x) and its derivative 4 e / (1 + e)^2, where e = e^(-2 |x|): 1 - tanh^2 would be nothing but rounding where tanh is almost 1.
template <class T> struct TanhWithSlope { T value, slope; };
__device__ __forceinline__ TanhWithSlope<float> tanh_with_slope(float x) {
  if (sizeof(Element) != 2) {
    const float e = expf(-2 * fabsf(x));
    return {tanhf(x), 4 * e / ((1 + e) * (1 + e))};
  }
  if (fabsf(x) < kTanhSmall) {
    const float value = tanh_of_small(x);
    return {value, (1 - value) * (1 + value)};
  }
  const float e = exp2_of(kTwiceLog2E * x), per_sum = rcp_approx_ftz(1 + e);
  return {1 - 2 * per_sum, 4 * per_sum * fminf(e * per_sum, 1)};  // fminf: 0 times an infinity, a NaN, counts as 1
}
__device__ __forceinline__ TanhWithSlope<double> tanh_with_slope(double x) {
  const double e = exp(-2 * fabs(x));
  return {tanh(x), 4 * e / ((1 + e) * (1 + e))};
}
__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
