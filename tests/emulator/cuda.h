// CUDA C++ as the kernels use it: qualifiers, built-in variables, warp and block primitives, mathematics.
// `__shared__` is missing on purpose: a kernel takes its shared memory from DYNAMIC_SMEM.
#pragma once
#include <initializer_list>  // for (x : {a, b}), which NVRTC takes without a header
#include "emulator.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) alignas(n)

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_dim())
#define gridDim (emulator::grid_dim())

// ---- blocks and warps ----
constexpr i32 warpSize = 32;

__forceinline__ void __syncthreads(emulator::Site site = emulator::here()) { emulator::barrier(0, 0, true, false, site); }
__forceinline__ i32 __syncthreads_count(i32 predicate, emulator::Site site = emulator::here()) {
  return static_cast<i32>(emulator::barrier(0, 0, true, predicate != 0, site));
}
__forceinline__ i32 __syncthreads_or(i32 predicate, emulator::Site site = emulator::here()) { return __syncthreads_count(predicate, site) != 0; }
__forceinline__ i32 __syncthreads_and(i32 predicate, emulator::Site site = emulator::here()) { return __syncthreads_count(!predicate, site) == 0; }
__forceinline__ void __syncwarp(u32 mask = 0xffffffff, emulator::Site site = emulator::here()) { emulator::sync_warp(mask, site); }
__forceinline__ u32 __activemask() { return 0xffffffff; }

template <class T> __forceinline__ T shuffle_from(u32 mask, T value, u32 source, emulator::Site site) {
  u64 word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  word = emulator::shuffle(mask, word, source, site);
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}
template <class T> __forceinline__ T __shfl_sync(u32 mask, T value, i32 source, i32 width = 32, emulator::Site site = emulator::here()) {
  const u32 lane = threadIdx.x % 32;
  return shuffle_from(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T> __forceinline__ T __shfl_xor_sync(u32 mask, T value, i32 lane_mask, i32 width = 32, emulator::Site site = emulator::here()) {
  const u32 lane = threadIdx.x % 32, source = lane ^ lane_mask;
  return shuffle_from(mask, value, source / width > lane / width ? lane : source, site);  // no lane of a later group is reached
}
template <class T> __forceinline__ T __shfl_up_sync(u32 mask, T value, u32 delta, i32 width = 32, emulator::Site site = emulator::here()) {
  const u32 lane = threadIdx.x % 32;
  return shuffle_from(mask, value, lane % width < delta ? lane : lane - delta, site);
}
template <class T> __forceinline__ T __shfl_down_sync(u32 mask, T value, u32 delta, i32 width = 32, emulator::Site site = emulator::here()) {
  const u32 lane = threadIdx.x % 32;
  return shuffle_from(mask, value, lane % width + delta >= static_cast<u32>(width) ? lane : lane + delta, site);
}
__forceinline__ u32 __ballot_sync(u32 mask, i32 predicate, emulator::Site site = emulator::here()) {
  return emulator::vote(mask, predicate != 0, site);
}
__forceinline__ i32 __any_sync(u32 mask, i32 predicate, emulator::Site site = emulator::here()) {
  return emulator::vote(mask, predicate != 0, site) != 0;
}
__forceinline__ i32 __all_sync(u32 mask, i32 predicate, emulator::Site site = emulator::here()) {
  return emulator::vote(mask, predicate != 0, site) == mask;
}
__forceinline__ void __trap(emulator::Site site = emulator::here()) { emulator::trap(site); }

__forceinline__ u32 atomicInc(u32* address, u32 limit) { return emulator::atomic_inc(address, limit); }

// ---- bits ----
__forceinline__ float __int_as_float(i32 x) { return emulator::bits_of<float>(x); }
__forceinline__ i32 __float_as_int(float x) { return emulator::bits_of<i32>(x); }
__forceinline__ float __uint_as_float(u32 x) { return emulator::bits_of<float>(x); }
__forceinline__ u32 __float_as_uint(float x) { return emulator::bits_of<u32>(x); }
__forceinline__ double __longlong_as_double(i64 x) { return emulator::bits_of<double>(x); }
__forceinline__ i64 __double_as_longlong(double x) { return emulator::bits_of<i64>(x); }
__forceinline__ i32 __popc(u32 x) { return __builtin_popcount(x); }
__forceinline__ i32 __clz(i32 x) { return x == 0 ? 32 : __builtin_clz(x); }
__forceinline__ i32 __ffs(i32 x) { return __builtin_ffs(x); }

// ---- mathematics: the C library's, declared here ----
extern "C" {
float fabsf(float), fmaxf(float, float), fminf(float, float), fmaf(float, float, float), sqrtf(float), floorf(float);
float expf(float), exp2f(float), logf(float), log2f(float), log1pf(float), tanhf(float);
double fabs(double), fmax(double, double), fmin(double, double), fma(double, double, double), sqrt(double), floor(double);
double exp(double), exp2(double), log(double), log2(double), log1p(double), tanh(double);
}

// Rounded each on its own, never fused with a neighbour
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fsub_rn(float a, float b) { return a - b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }

__forceinline__ i32 min(i32 a, i32 b) { return a < b ? a : b; }
__forceinline__ u32 min(u32 a, u32 b) { return a < b ? a : b; }
__forceinline__ i64 min(i64 a, i64 b) { return a < b ? a : b; }
__forceinline__ u64 min(u64 a, u64 b) { return a < b ? a : b; }
__forceinline__ float min(float a, float b) { return fminf(a, b); }
__forceinline__ double min(double a, double b) { return fmin(a, b); }
__forceinline__ i32 max(i32 a, i32 b) { return a > b ? a : b; }
__forceinline__ u32 max(u32 a, u32 b) { return a > b ? a : b; }
__forceinline__ i64 max(i64 a, i64 b) { return a > b ? a : b; }
__forceinline__ u64 max(u64 a, u64 b) { return a > b ? a : b; }
__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ double max(double a, double b) { return fmax(a, b); }

// ---- the entry ----
extern "C" {
extern const u8 __ehdr_start[] __attribute__((visibility("hidden")));  // set by the linker: where the library starts and ends
extern const u8 _end[] __attribute__((visibility("hidden")));
}

namespace emulator {
template <auto> struct Entry;
template <class Params, void (*kernel)(Params)> struct Entry<kernel> {
  __attribute__((noinline, no_sanitize("thread"))) static void call(const void* params) { kernel(*static_cast<const Params*>(params)); }
  static constexpr u64 params_bytes = sizeof(Params);
};
}  // namespace emulator

// After the text of a kernel: what the launcher looks up in the library. A kernel has one parameter, a struct.
#define EMULATED_KERNEL(name)                                                                       \
  extern "C" const emulator::Kernel emulated_##name = {emulator::Entry<name>::call, emulator::Entry<name>::params_bytes, __ehdr_start, _end}
