// Every instruction that the kernels take from PTX, one named function each; no other file holds inline assembly.
// tests/emulator/ptx.cuh is the host twin: the same names, so that kernel files compile unchanged for a CPU.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

struct half_t { u16 bits; };  // IEEE binary16
struct bf16_t { u16 bits; };  // the upper half of an IEEE binary32

#define DYNAMIC_SMEM(name) extern __shared__ __align__(128) u8 name[]
#define ALIGNED_DYNAMIC_SMEM(name, bytes) extern __shared__ __align__(bytes) u8 name[]

// 2^x, flushing results below 2^-126 to zero; relative error at most 2^-22
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float cvt_f32_f16(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ half_t cvt_rn_f16_f32(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Two floats rounded to 16 bits, `low` in the lower half
__device__ __forceinline__ u32 pack2(float low, float high, half_t) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ u32 pack2(float low, float high, bf16_t) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// To TF32 (the upper 19 bits of a float), to nearest, halves away from zero
__device__ __forceinline__ u32 cvt_rna_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four bytes of x and y (0-3, 4-7), each named by four bits of `selector`; of a byte named with 8 more, only the sign, eight times
__device__ __forceinline__ u32 prmt(u32 x, u32 y, u32 selector) {
  u32 z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

// blockIdx.x, read anew each time: so that what follows from it needs no registers from one use to the next
__device__ __forceinline__ u32 block_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// ---- shared memory ----
// An address in shared memory, as the instructions below take it
__device__ __forceinline__ u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Asynchronous copies of 16 bytes from device to shared memory: the first `bytes` of them, then zeros
__device__ __forceinline__ void cp_async_16(u32 smem, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void cp_async_wait_group() {  // until at most kPending groups are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 8x8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i. Lane 4r + c gets elements 2c, 2c + 1 of row r;
// transposed, of column r.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The reverse of ldmatrix
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- tensor cores: D += A B, D and products in float ----
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], half_t) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16_t) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[2], u32 b, half_t) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Hopper: barriers in shared memory, the tensor memory accelerator (TMA), warpgroups ----
struct alignas(64) TensorMap { u64 opaque[16]; };  // how an array and a box of it lie in device memory; made by the host

// A barrier's phase ends when as many arrivals as it was made for have come, and all bytes that were announced.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_if(u32 barrier, bool arrives) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<u32>(arrives))
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {  // until the phase of this parity has ended
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies the map's box at (x, y, z, w), zeros where it leaves the array, and reports its bytes to the barrier.
__device__ __forceinline__ void tma_load_4d(u32 smem, const TensorMap* map, u32 barrier, i32 x, i32 y, i32 z, i32 w, u64 cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], %7;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(cache_policy)
      : "memory");
}
// The way back, without what would leave the array; a bulk copy (below)
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 smem, i32 x, i32 y, i32 z, i32 w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(smem), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}
// A copy from device memory as far as the L2 cache
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, i32 x, i32 y, i32 z, i32 w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Bulk copies of whole 16-byte vectors. The one to shared memory reports its bytes to a barrier; those from there are waited for by the
// thread that issued them, in groups: until at most kPending groups are not yet done in device memory.
__device__ __forceinline__ void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem), "l"(global), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, u32 smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_add_f32(float* global, u32 smem, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <i32 kPending> __device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <i32 kPending> __device__ __forceinline__ void bulk_wait_group_read() {  // until their shared memory has been read
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// What this thread did in shared memory comes before what TMA and wgmma will do there.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What this thread knows of device memory comes before what bulk copies will do there.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// threadIdx.x, read again rather than kept in a register
__device__ __forceinline__ u32 thread_index_again() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// x, of which the compiler knows nothing: what follows from it is worked out where it is used, rather than kept in registers
__device__ __forceinline__ u32 opaque(u32 x) {
  u32 y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Counters in device memory, by which blocks tell each other what they have done
__device__ __forceinline__ i32 ld_acquire(const i32* global) {
  i32 x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
__device__ __forceinline__ void ld_acquire_until(const i32* global, i32 value) {  // it is reached
  while (ld_acquire(global) != value) {
  }
}
__device__ __forceinline__ i32 ld_relaxed(const i32* global) {
  i32 x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
// Makes of ld_relaxed before it an ld_acquire, and of red_relaxed_add after it a red_release_add
__device__ __forceinline__ void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void red_release_add(i32* global, i32 x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}
__device__ __forceinline__ void red_relaxed_add(i32* global, i32 x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// Added in device memory, where nothing comes back from it; four at a time from sm_90 on
__device__ __forceinline__ void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}
__device__ __forceinline__ void red_add_f32x4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Named barriers, 1 to 15: `threads` threads meet, of which those that only arrive do not wait.
__device__ __forceinline__ void bar_sync(i32 barrier, i32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void bar_arrive(i32 barrier, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers of a thread, given back and taken by all warps of a warpgroup
template <i32 kRegisters> __device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <i32 kRegisters> __device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// wgmma works on its own: it is issued after a fence, in groups, and its registers may be touched again after the wait for its group.
// Its shapes are in wgmma.cuh.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <i32 kPending> __device__ __forceinline__ void wgmma_wait_group() {  // until at most kPending groups are under way
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <i32 n> __device__ __forceinline__ void pin(float (&x)[n]) {  // no use of x moves to before this point
#pragma unroll
  for (i32 i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <i32 n> __device__ __forceinline__ void pin(u32 (&x)[n]) {
#pragma unroll
  for (i32 i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
