// Conversions between float and the narrower formats, bit by bit: no compiler support is needed.
#pragma once
#include "emulator.h"

namespace emulator {

constexpr u16 kNan16 = 0x7fff;       // what cvt makes of any NaN, in binary16 and bfloat16
constexpr u32 kNanTf32 = 0x7fffffff;

inline float bf16_to_float(u16 bits) { return bits_of<float>(static_cast<u32>(bits) << 16); }

float f16_to_float(u16 bits) {
  const u32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) return bits_of<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity or NaN
  const float x = bits_of<float>(magnitude << 13) * 0x1p112f;  // the exponents' biases differ by 112; exact, denormals included
  return bits_of<float>(bits_of<u32>(x) | sign);
}

// `bits` without its lowest `drop`, rounded to nearest, ties to even.
inline u32 round_off(u32 bits, u32 drop) {
  if (drop > 31) return 0;
  const u32 half = 1u << (drop - 1), odd = bits >> drop & 1;
  return (bits + half - 1 + odd) >> drop;
}

u16 float_to_f16(float x) {
  const u32 bits = bits_of<u32>(x), magnitude = bits & 0x7fffffff;
  const u16 sign = static_cast<u16>(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return kNan16;
  if (magnitude >= 0x47800000) return sign | 0x7c00;  // 2^16 or more
  if (magnitude >= 0x38800000) return sign | static_cast<u16>(round_off(magnitude - (112u << 23), 13));  // 2^-14 or more; may carry into infinity
  const u32 exponent = magnitude >> 23;
  if (exponent < 101) return sign;  // below half of the least denormal
  return sign | static_cast<u16>(round_off((magnitude & 0x7fffff) | 0x800000, 126 - exponent));
}

u16 float_to_bf16(float x) {
  if (x != x) return kNan16;
  return static_cast<u16>(round_off(bits_of<u32>(x), 16));
}

// cvt.rna: to nearest, ties away from zero
u32 float_to_tf32(float x) {
  const u32 bits = bits_of<u32>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return kNanTf32;
  if (magnitude == 0x7f800000) return bits;
  return (bits + 0x1000) & ~0x1fffu;
}

// What the tensor cores read: the lower 13 bits do not count.
inline float tf32_to_float(u32 bits) { return bits_of<float>(bits & ~0x1fffu); }

// What red.add makes of floats in device memory: what is subnormal, before or after, is 0 of the same sign.
inline float flushed(float x) { return (bits_of<u32>(x) & 0x7f800000) == 0 ? bits_of<float>(bits_of<u32>(x) & 0x80000000) : x; }
float flushed_sum(float a, float b) { return flushed(flushed(a) + flushed(b)); }

}  // namespace emulator
