// Small kernels, right and wrong ones, for bulk copies, stmatrix and counters in device memory, that tests/test_emulator_bulk.py runs.
#include "ptx.cuh"
#include "variant.cuh"

struct Params {
  const float* in;
  float* out;
  i32* counter;
  i32 n;  // floats
};
#define UNIT(name)                                                   \
  extern "C" __global__ void name(const __grid_constant__ Params p); \
  EMULATED_KERNEL(name);                                             \
  extern "C" __global__ void name(const __grid_constant__ Params p)

constexpr i32 kBarrier = 8192;

__device__ __forceinline__ void load(const Params& p, u8* smem) {
  const u32 barrier = smem_address(smem) + kBarrier;
  mbarrier_init(barrier, 1);
  fence_mbarrier_init();
  mbarrier_arrive_expect_tx(barrier, p.n * 4);
  bulk_load(smem_address(smem), p.in, p.n * 4, barrier);
  mbarrier_wait(barrier, 0);
}

UNIT(store_and_add) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  bulk_wait_group<0>();
  bulk_add_f32(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  bulk_wait_group<0>();
  *reinterpret_cast<float*>(smem) = 0;
}
UNIT(add_by_red) {
  const u32 i = threadIdx.x;
  p.out[i] = p.in[i];
  __syncwarp();
  if (i % 8 == 0)
    red_add_f32x4(p.out + i, {p.in[i], p.in[i + 1], p.in[i + 2], p.in[i + 3]});
  else if (i % 8 >= 4)
    red_add_f32(p.out + i, p.in[i]);
}
UNIT(overwritten_once_it_is_read) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  bulk_wait_group_read<0>();
  for (i32 i = 0; i < p.n; ++i) reinterpret_cast<float*>(smem)[i] = 0;
  bulk_wait_group<0>();
}
UNIT(last_of_two_overwritten) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  for (i32 i = 0; i < 2; ++i) {
    bulk_store(p.out + i * 4, smem_address(smem) + i * 16, 16);
    bulk_commit_group();
  }
  bulk_wait_group_read<1>();
  reinterpret_cast<float*>(smem)[3] = 0;
  reinterpret_cast<float*>(smem)[4] = 0;
  bulk_wait_group<0>();
}
UNIT(left_when_it_is_read) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  bulk_wait_group_read<0>();
}
UNIT(overwritten_before_it_is_read) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  *reinterpret_cast<float*>(smem) = 0;
  bulk_wait_group<0>();
}
UNIT(written_without_a_proxy_fence) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  for (i32 i = 0; i < p.n; ++i) reinterpret_cast<float*>(smem)[i] = p.in[i];
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
  bulk_wait_group<0>();
}
UNIT(left_without_waiting) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), p.n * 4);
  bulk_commit_group();
}
UNIT(odd_bytes) {
  DYNAMIC_SMEM(smem);
  if (threadIdx.x != 0) return;
  load(p, smem);
  bulk_store(p.out, smem_address(smem), 12);
  bulk_commit_group();
  bulk_wait_group<0>();
}

// Words go to shared memory as matrices and come back as they were.
UNIT(matrices_there_and_back) {
  DYNAMIC_SMEM(smem);
  const u32 lane = threadIdx.x, address = smem_address(smem) + lane * 16;
  u32 words[4], back[4];
  for (i32 i = 0; i < 4; ++i) words[i] = __float_as_uint(p.in[4 * lane + i]);
  stmatrix_x4(address, words);
  __syncwarp();
  ldmatrix_x4(back, address);
  for (i32 i = 0; i < 4; ++i) p.out[4 * lane + i] = __uint_as_float(back[i]);
}

// Blocks write in the order of their turns.
UNIT(turns) {
  if (threadIdx.x != 0) return;
  ld_acquire_until(p.counter, static_cast<i32>(gridDim.x - 1 - blockIdx.x));
  p.out[blockIdx.x] = static_cast<float>(ld_acquire(p.counter));
  red_release_add(p.counter, 1);
}
UNIT(turn_that_never_comes) {
  if (threadIdx.x == 0) ld_acquire_until(p.counter, 1);
}
