// The host twin of kernels_cu/ptx.cuh: the same names, without a GPU. A kernel built with this directory before kernels_cu on the
// include path runs on the emulator, unchanged.
#pragma once
#include "cuda.h"

// Its constructor copies it, so that it is watched also where it goes from memory right into a call: g++ -O0 would leave that out.
struct Bits16 {
  u16 bits;
  Bits16() = default;
  explicit constexpr Bits16(u16 all) : bits(all) {}
  Bits16(const Bits16& other) : bits(other.bits) {}
  Bits16& operator=(const Bits16& other) {
    bits = other.bits;
    return *this;
  }
};
struct half_t : Bits16 { using Bits16::Bits16; };  // IEEE binary16
struct bf16_t : Bits16 { using Bits16::Bits16; };  // the upper half of an IEEE binary32

#define DYNAMIC_SMEM(name) u8* const name = emulator::dynamic_shared()
#define ALIGNED_DYNAMIC_SMEM(name, bytes) u8* const name = emulator::dynamic_shared() + -smem_address(emulator::dynamic_shared()) % (bytes)

// ---- numbers ----
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  const float y = 1 / (fabsf(x) < 0x1p-126f ? 0 * x : x);
  return fabsf(y) < 0x1p-126f ? 0 * y : y;
}

__device__ __forceinline__ float cvt_f32_f16(half_t x) { return emulator::f16_to_float(x.bits); }
__device__ __forceinline__ half_t cvt_rn_f16_f32(float x) { return half_t(emulator::float_to_f16(x)); }
__device__ __forceinline__ u32 cvt_rna_tf32(float x) { return emulator::float_to_tf32(x); }

__device__ __forceinline__ u32 pack2(float low, float high, half_t) {
  return emulator::float_to_f16(low) | static_cast<u32>(emulator::float_to_f16(high)) << 16;
}
__device__ __forceinline__ u32 pack2(float low, float high, bf16_t) {
  return emulator::float_to_bf16(low) | static_cast<u32>(emulator::float_to_bf16(high)) << 16;
}

__device__ __forceinline__ u32 prmt(u32 x, u32 y, u32 selector) {
  const u64 bytes = static_cast<u64>(y) << 32 | x;
  u32 picked = 0;
  for (i32 i = 0; i < 4; ++i) {
    const u32 name = selector >> 4 * i, byte = static_cast<u32>(bytes >> 8 * (name & 7)) & 0xff;
    picked |= (name & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return picked;
}

__device__ __forceinline__ u32 block_index() { return blockIdx.x; }

// ---- cp.async ----
__device__ __forceinline__ u32 smem_address(const void* pointer) { return emulator::shared_address(pointer); }

__device__ __forceinline__ void cp_async_16(u32 smem, const void* global, u32 bytes) { emulator::copy_async(smem, global, bytes); }
__device__ __forceinline__ void cp_async_commit_group() { emulator::commit_copies(); }
template <i32 kPending> __device__ __forceinline__ void cp_async_wait_group() { emulator::wait_for_copies(kPending); }

// ---- ldmatrix ----
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address, emulator::Site site = emulator::here()) {
  const emulator::Words4 loaded = emulator::load_matrices(false, address, site);
  for (i32 i = 0; i < 4; ++i) r[i] = loaded.x[i];
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address, emulator::Site site = emulator::here()) {
  const emulator::Words4 loaded = emulator::load_matrices(true, address, site);
  for (i32 i = 0; i < 4; ++i) r[i] = loaded.x[i];
}
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32* r, emulator::Site site = emulator::here()) {
  emulator::store_matrices(address, {r[0], r[1], r[2], r[3]}, site);
}

// ---- mma.sync: d += a b ----
__device__ __forceinline__ void mma_of(float (&d)[4], emulator::Words4 a, emulator::Words2 b, emulator::Shape shape, emulator::Site site) {
  const emulator::Floats4 sum = emulator::multiply_add({d[0], d[1], d[2], d[3]}, a, b, shape, site);
  for (i32 i = 0; i < 4; ++i) d[i] = sum.x[i];
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], half_t, emulator::Site site = emulator::here()) {
  mma_of(d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, emulator::Shape::m16n8k16_f16, site);
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16_t, emulator::Site site = emulator::here()) {
  mma_of(d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, emulator::Shape::m16n8k16_bf16, site);
}
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[2], u32 b, half_t, emulator::Site site = emulator::here()) {
  mma_of(d, {a[0], a[1], 0, 0}, {b, 0}, emulator::Shape::m16n8k8_f16, site);
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], emulator::Site site = emulator::here()) {
  mma_of(d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, emulator::Shape::m16n8k8_tf32, site);
}

// ---- Hopper: mbarriers, TMA, warpgroups ----
struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals, emulator::Site site = emulator::here()) {
  emulator::mbarrier_init(barrier, arrivals, site);
}
__device__ __forceinline__ void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) { emulator::mbarrier_arrive(barrier); }
__device__ __forceinline__ void mbarrier_arrive_if(u32 barrier, bool arrives) {
  if (arrives) emulator::mbarrier_arrive(barrier);
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { emulator::mbarrier_arrive_expect_tx(barrier, bytes); }
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, emulator::Site site = emulator::here()) {
  emulator::mbarrier_wait(barrier, parity, site);
}

__device__ __forceinline__ void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, i32 x, i32 y, i32 z, i32 w, u64 cache_policy) {
  emulator::tma_load(smem, map, 4, barrier, {x, y, z, w, 0});
}
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 smem, i32 x, i32 y, i32 z, i32 w) {
  emulator::tma_store(smem, map, 4, {x, y, z, w, 0});
}
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, i32 x, i32 y, i32 z, i32 w) {}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {}
__device__ __forceinline__ void fence_proxy_async() { emulator::fence_proxy_async(); }

__device__ __forceinline__ void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier) { emulator::bulk_load(smem, global, bytes, barrier); }
__device__ __forceinline__ void bulk_store(void* global, u32 smem, u32 bytes) { emulator::bulk_write(global, smem, bytes, false); }
__device__ __forceinline__ void bulk_add_f32(float* global, u32 smem, u32 bytes) { emulator::bulk_write(global, smem, bytes, true); }
__device__ __forceinline__ void bulk_commit_group() { emulator::bulk_commit_group(); }
template <i32 kPending> __device__ __forceinline__ void bulk_wait_group() { emulator::bulk_wait_group(kPending); }
template <i32 kPending> __device__ __forceinline__ void bulk_wait_group_read() { emulator::bulk_wait_group_read(kPending); }
__device__ __forceinline__ void fence_proxy_async_global() { emulator::fence_proxy_async_global(); }

__device__ __forceinline__ u32 thread_index_again() { return threadIdx.x; }
__device__ __forceinline__ u32 opaque(u32 x) { return x; }

__device__ __forceinline__ i32 ld_acquire(const i32* global) { return emulator::ld_acquire(global); }
__device__ __forceinline__ void ld_acquire_until(const i32* global, i32 value, emulator::Site site = emulator::here()) {
  emulator::ld_acquire_until(global, value, site);
}
__device__ __forceinline__ i32 ld_relaxed(const i32* global) { return emulator::ld_acquire(global); }
__device__ __forceinline__ void fence_acq_rel() {}
__device__ __forceinline__ void red_relaxed_add(i32* global, i32 x) { emulator::red_release_add(global, x); }
__device__ __forceinline__ void red_release_add(i32* global, i32 x) { emulator::red_release_add(global, x); }
__device__ __forceinline__ void red_add_f32(float* global, float x) { *global = emulator::flushed_sum(*global, x); }
__device__ __forceinline__ void red_add_f32x4(float* global, const float (&x)[4]) {
  for (i32 i = 0; i < 4; ++i) red_add_f32(global + i, x[i]);
}

__device__ __forceinline__ void bar_sync(i32 barrier, i32 threads, emulator::Site site = emulator::here()) {
  emulator::barrier(barrier, static_cast<u32>(threads), true, false, site);
}
__device__ __forceinline__ void bar_arrive(i32 barrier, i32 threads, emulator::Site site = emulator::here()) {
  emulator::barrier(barrier, static_cast<u32>(threads), false, false, site);
}

template <i32 kRegisters> __device__ __forceinline__ void setmaxnreg_dec(emulator::Site site = emulator::here()) {
  emulator::set_registers(kRegisters, false, site);
}
template <i32 kRegisters> __device__ __forceinline__ void setmaxnreg_inc(emulator::Site site = emulator::here()) {
  emulator::set_registers(kRegisters, true, site);
}

__device__ __forceinline__ void wgmma_fence() { emulator::wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit_group(emulator::Site site = emulator::here()) { emulator::wgmma_commit_group(site); }
template <i32 kPending> __device__ __forceinline__ void wgmma_wait_group(emulator::Site site = emulator::here()) {
  emulator::wgmma_wait_group(kPending, site);
}
template <i32 n> __device__ __forceinline__ void pin(float (&x)[n]) {}
template <i32 n> __device__ __forceinline__ void pin(u32 (&x)[n]) {}

#ifndef __OPTIMIZE__  // a kernel's own functions are not inlined where time to compile counts; those above are, to keep their callers
#undef __forceinline__
#define __forceinline__ inline
#endif
