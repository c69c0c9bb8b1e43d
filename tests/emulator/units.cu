// Small kernels, right and wrong ones, that tests/test_emulator.py runs on the emulator.
#include "ptx.cuh"

struct Params {
  const void* in;
  void* out;
  i32 n;
};
#define UNIT(name)                                                 \
  extern "C" __global__ void name(const __grid_constant__ Params p); \
  EMULATED_KERNEL(name);                                             \
  extern "C" __global__ void name(const __grid_constant__ Params p)

template <class T> __device__ __forceinline__ const T* in(const Params& p) { return static_cast<const T*>(p.in); }
template <class T> __device__ __forceinline__ T* out(const Params& p) { return static_cast<T*>(p.out); }
__device__ __forceinline__ u32 global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

constexpr u32 kFull = 0xffffffff;

// ---- barriers and shared memory: every thread takes what another thread put down ----
template <class Between> __device__ __forceinline__ void exchange(const Params& p, u32 distance, Between between) {
  DYNAMIC_SMEM(smem);
  float* const box = reinterpret_cast<float*>(smem);
  box[threadIdx.x] = in<float>(p)[global_thread()];
  between();
  out<float>(p)[global_thread()] = box[threadIdx.x ^ distance];
}
UNIT(exchange_with_barrier) {
  exchange(p, 32, [] { __syncthreads(); });
}
UNIT(exchange_without_barrier) {
  exchange(p, 32, [] {});
}
UNIT(exchange_with_warp_barrier) {
  exchange(p, 1, [] { __syncwarp(); });
}
UNIT(exchange_with_too_small_a_barrier) {
  exchange(p, 32, [] { __syncwarp(); });
}
UNIT(exchange_with_shuffle_for_barrier) {
  exchange(p, 1, [] { __shfl_xor_sync(kFull, 1, 1); });
}
UNIT(exchange_twice) {
  exchange(p, 32, [] { __syncthreads(); });
  __syncthreads();
  Params next = p;
  next.in = in<float>(p) + p.n;
  next.out = out<float>(p) + p.n;
  exchange(next, 64, [] { __syncthreads(); });
}
UNIT(exchange_twice_without_barrier_between) {
  exchange(p, 32, [] { __syncthreads(); });
  Params next = p;
  next.in = in<float>(p) + p.n;
  next.out = out<float>(p) + p.n;
  exchange(next, 64, [] { __syncthreads(); });
}
UNIT(halves_of_a_word) {  // neighbours write 16 bits each of one 32-bit word
  DYNAMIC_SMEM(smem);
  u16* const box = reinterpret_cast<u16*>(smem);
  box[threadIdx.x] = in<u16>(p)[threadIdx.x];
  out<u16>(p)[threadIdx.x] = box[threadIdx.x];
}
UNIT(beyond_shared_memory) {
  DYNAMIC_SMEM(smem);
  reinterpret_cast<float*>(smem)[threadIdx.x + 1] = 0;
}
UNIT(before_shared_memory) {
  DYNAMIC_SMEM(smem);
  out<float>(p)[threadIdx.x] = (reinterpret_cast<const float*>(smem) - 1)[threadIdx.x];
}

// ---- who waits for whom ----
UNIT(lanes_in_different_shuffles) {
  float x = 1;
  if (threadIdx.x % 2)
    x = __shfl_xor_sync(kFull, x, 1);
  else
    x = __shfl_xor_sync(kFull, x, 2);
  out<float>(p)[threadIdx.x] = x;
}
UNIT(lane_that_left) {
  if (threadIdx.x == 5) return;
  out<float>(p)[threadIdx.x] = __shfl_sync(kFull, 1.0f, 0);
}
UNIT(half_a_warp) {  // the halves shuffle on their own
  const u32 mask = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
  out<i32>(p)[threadIdx.x] = __shfl_sync(mask, static_cast<i32>(threadIdx.x), threadIdx.x / 16 * 16 % 32);
}
UNIT(lane_outside_the_mask) { out<i32>(p)[threadIdx.x] = __shfl_sync(0x0000ffff, 1, 0); }
UNIT(source_outside_the_mask) {
  if (threadIdx.x < 16) out<i32>(p)[threadIdx.x] = __shfl_sync(0x0000ffff, 1, 16);
}
UNIT(different_barriers) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
UNIT(barrier_against_shuffle) {  // a warp of which half waits here and half there never goes on
  if (threadIdx.x % 32 < 16)
    __syncthreads();
  else
    __shfl_sync(kFull, 1, 0);
}
UNIT(barriers_that_count) {
  const i32 odd = in<i32>(p)[threadIdx.x];
  const i32 results[] = {__syncthreads_count(odd), __syncthreads_or(odd), __syncthreads_and(odd)};
  for (i32 i = 0; i < 3; ++i) out<i32>(p)[i * blockDim.x + threadIdx.x] = results[i];
}
// The upper half of the block hands over to the lower half, without waiting for it.
template <class Arrive> __device__ __forceinline__ void hand_over(const Params& p, Arrive arrive) {
  DYNAMIC_SMEM(smem);
  float* const box = reinterpret_cast<float*>(smem);
  if (threadIdx.x >= 64) {
    box[threadIdx.x - 64] = in<float>(p)[threadIdx.x];
    return arrive();
  }
  bar_sync(1, 128);
  out<float>(p)[threadIdx.x] = box[threadIdx.x];
}
UNIT(named_barrier) {
  hand_over(p, [] { bar_arrive(1, 128); });
}
UNIT(named_barrier_without_arrival) {
  hand_over(p, [] {});
}
UNIT(named_barrier_of_another_size) {
  hand_over(p, [] { bar_arrive(1, 96); });
}
UNIT(other_named_barrier) {
  hand_over(p, [] { bar_arrive(2, 128); });
}
UNIT(barrier_of_those_left) {  // as CUDA has it: threads that left the kernel do not count
  if (threadIdx.x >= 32) return;
  __syncthreads();
  out<i32>(p)[threadIdx.x] = 1;
}
UNIT(trapped) {
  if (threadIdx.x == 7) __trap();
}
UNIT(order_of_threads) {  // the last one to come writes last
  out<i32>(p)[0] = static_cast<i32>(threadIdx.x);
}

// ---- device memory ----
UNIT(reads_beyond) { out<float>(p)[threadIdx.x] = in<float>(p)[threadIdx.x + p.n]; }
UNIT(writes_beyond) { out<float>(p)[threadIdx.x + p.n] = 0; }
UNIT(writes_to_input) { const_cast<float*>(in<float>(p))[threadIdx.x] = 0; }
UNIT(writes_twice) { out<float>(p)[threadIdx.x / 2] = 0; }
UNIT(misaligned) {
  struct alignas(16) Four {
    float x[4];
  };
  *reinterpret_cast<Four*>(out<float>(p) + 4 * threadIdx.x) = *reinterpret_cast<const Four*>(in<float>(p) + 4 * threadIdx.x + p.n);
}
UNIT(constants) {
  static const i32 table[4] = {3, 1, 4, 1};
  out<i32>(p)[threadIdx.x] = table[threadIdx.x % 4 * p.n];
}
UNIT(nothing_there) { out<float>(p)[threadIdx.x] = *static_cast<const float*>(nullptr); }

// ---- warps ----
UNIT(shuffles) {
  const float x = in<float>(p)[threadIdx.x];
  const float results[] = {
      __shfl_sync(kFull, x, 3),         __shfl_sync(kFull, x, threadIdx.x + 5, 8), __shfl_xor_sync(kFull, x, 16),
      __shfl_xor_sync(kFull, x, 9, 16), __shfl_up_sync(kFull, x, 3),               __shfl_down_sync(kFull, x, 2, 4),
  };
  for (i32 i = 0; i < 6; ++i) out<float>(p)[i * blockDim.x + threadIdx.x] = results[i];
}
UNIT(shuffle_of_doubles) { out<double>(p)[threadIdx.x] = __shfl_xor_sync(kFull, in<double>(p)[threadIdx.x], 1); }
UNIT(votes) {
  const i32 odd = in<i32>(p)[threadIdx.x];
  const u32 results[] = {__ballot_sync(kFull, odd), static_cast<u32>(__any_sync(kFull, odd)), static_cast<u32>(__all_sync(kFull, odd))};
  for (i32 i = 0; i < 3; ++i) out<u32>(p)[i * blockDim.x + threadIdx.x] = results[i];
}
UNIT(indices) {
  const u32 values[] = {threadIdx.x, threadIdx.y, blockIdx.x, blockIdx.y, blockIdx.z, blockDim.x, gridDim.x, gridDim.y, gridDim.z};
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (i32 i = 0; i < 9; ++i) out<u32>(p)[(block * blockDim.x + threadIdx.x) * 9 + i] = values[i];
}

// ---- cp.async: threads copy 16 bytes each, in p.n steps, through two slots in turn ----
struct Step {
  u32 bytes = 16;  // of a copy that are read
  bool wait = true, barrier_after_wait = true, barrier_at_end = true, wait_at_exit = true;
};
template <class Wait> __device__ __forceinline__ void copy_through(const Params& p, Step step, Wait wait) {
  DYNAMIC_SMEM(smem);
  const u32 threads = blockDim.x;
  const auto issue = [&](i32 i) {
    if (i < p.n) cp_async_16(smem_address(smem) + (i % 2 * threads + threadIdx.x) * 16, in<u8>(p) + (i * threads + threadIdx.x) * 16, step.bytes);
    cp_async_commit_group();
  };
  issue(0);
  for (i32 i = 0; i < p.n; ++i) {
    issue(i + 1);
    wait();
    if (step.barrier_after_wait) __syncthreads();
    for (u32 e = 0; e < 4; ++e) {
      const u32 word = (threadIdx.x ^ 32) * 4 + e;
      out<float>(p)[i * threads * 4 + word] = reinterpret_cast<const float*>(smem)[i % 2 * threads * 4 + word];
    }
    if (step.barrier_at_end) __syncthreads();
  }
}
UNIT(copies) {
  copy_through(p, {}, [] { cp_async_wait_group<1>(); });
}
UNIT(copies_of_12_bytes) {
  copy_through(p, {12}, [] { cp_async_wait_group<1>(); });
}
UNIT(copies_of_nothing) {
  copy_through(p, {0}, [] { cp_async_wait_group<1>(); });
}
UNIT(copies_without_wait) {
  copy_through(p, {}, [] {});
}
UNIT(copies_with_too_weak_a_wait) {
  copy_through(p, {}, [] { cp_async_wait_group<2>(); });
}
UNIT(copies_without_barrier_after_wait) {
  Step step;
  step.barrier_after_wait = false;
  copy_through(p, step, [] { cp_async_wait_group<1>(); });
}
UNIT(copies_without_barrier_at_end) {
  Step step;
  step.barrier_at_end = false;
  copy_through(p, step, [] { cp_async_wait_group<1>(); });
}
UNIT(copy_left_alone) {
  DYNAMIC_SMEM(smem);
  cp_async_16(smem_address(smem) + 16 * threadIdx.x, in<u8>(p) + 16 * threadIdx.x, 16);
}
UNIT(copy_from_outside) {
  DYNAMIC_SMEM(smem);
  cp_async_16(smem_address(smem) + 16 * threadIdx.x, in<u8>(p) + 16 * threadIdx.x + 1024 * p.n, 16);
  cp_async_wait_group<0>();
}

// ---- ldmatrix and mma.sync on matrices of 16-bit elements in shared memory, rows of 16 ----
UNIT(matrices) {
  DYNAMIC_SMEM(smem);
  for (u32 i = threadIdx.x; i < 16 * 16; i += 32) reinterpret_cast<u16*>(smem)[i] = in<u16>(p)[i];
  __syncwarp();
  // matrices 0 to 3: upper left, lower left, upper right, lower right
  const u32 address = smem_address(smem) + threadIdx.x % 16 * 32 + threadIdx.x / 16 * 16;
  u32 plain[4], transposed[4];
  ldmatrix_x4(plain, address);
  ldmatrix_x4_trans(transposed, address);
  for (i32 i = 0; i < 4; ++i) {
    out<u32>(p)[i * 32 + threadIdx.x] = plain[i];
    out<u32>(p)[(4 + i) * 32 + threadIdx.x] = transposed[i];
  }
}

// d (16 x 8) = d + a (16 x k) b (k x 8); a, b (transposed) and d lie one after the other, elements of 32 bits
template <class Load, class Multiply> __device__ __forceinline__ void multiply(const Params& p, i32 k, i32 per_word, Load load, Multiply multiply_add) {
  const float* const a = in<float>(p);
  const float* const b = a + 16 * k;
  const float* const d = b + 8 * k;
  const i32 group = threadIdx.x / 4, within = threadIdx.x % 4;
  u32 a_rmem[4] = {}, b_rmem[2] = {};
  for (i32 i = 0; i < k / (4 * per_word); ++i) {
    const i32 column = i * 4 * per_word + within * per_word;
    a_rmem[2 * i] = load(a + group * k + column);
    a_rmem[2 * i + 1] = load(a + (group + 8) * k + column);
    b_rmem[i] = load(b + group * k + column);
  }
  float d_rmem[4];
  for (i32 e = 0; e < 4; ++e) d_rmem[e] = d[(group + e / 2 * 8) * 8 + within * 2 + e % 2];
  multiply_add(d_rmem, a_rmem, b_rmem);
  for (i32 e = 0; e < 4; ++e) out<float>(p)[(group + e / 2 * 8) * 8 + within * 2 + e % 2] = d_rmem[e];
}
template <class T> __device__ __forceinline__ u32 two(const float* x) { return pack2(x[0], x[1], T()); }

UNIT(m16n8k16_f16) {
  multiply(p, 16, 2, two<half_t>, [](auto& d, const auto& a, const auto& b) { mma_m16n8k16(d, a, b, half_t()); });
}
UNIT(m16n8k16_bf16) {
  multiply(p, 16, 2, two<bf16_t>, [](auto& d, const auto& a, const auto& b) { mma_m16n8k16(d, a, b, bf16_t()); });
}
UNIT(m16n8k8_f16) {
  multiply(p, 8, 2, two<half_t>, [](auto& d, const auto& a, const auto& b) {
    const u32 first[2] = {a[0], a[1]};
    mma_m16n8k8(d, first, b[0], half_t());
  });
}
UNIT(m16n8k8_tf32) {
  multiply(p, 8, 1, [](const float* x) { return cvt_rna_tf32(*x); }, [](auto& d, const auto& a, const auto& b) { mma_m16n8k8_tf32(d, a, b); });
}
UNIT(m16n8k8_tf32_of_floats) {  // the tensor cores drop the bits that tf32 lacks
  multiply(p, 8, 1, [](const float* x) { return __float_as_uint(*x); }, [](auto& d, const auto& a, const auto& b) { mma_m16n8k8_tf32(d, a, b); });
}

// ---- numbers: the threads of the grid take one each ----
UNIT(f16_to_float) { out<float>(p)[global_thread()] = cvt_f32_f16(in<half_t>(p)[global_thread()]); }
UNIT(float_to_f16) { out<half_t>(p)[global_thread()] = cvt_rn_f16_f32(in<float>(p)[global_thread()]); }
UNIT(floats_to_f16) {
  const float x = in<float>(p)[global_thread()];
  out<u32>(p)[global_thread()] = pack2(x, -x, half_t());
}
UNIT(floats_to_bf16) {
  const float x = in<float>(p)[global_thread()];
  out<u32>(p)[global_thread()] = pack2(x, -x, bf16_t());
}
UNIT(float_to_tf32) { out<u32>(p)[global_thread()] = cvt_rna_tf32(in<float>(p)[global_thread()]); }
UNIT(power_of_two) { out<float>(p)[global_thread()] = ex2_approx_ftz(in<float>(p)[global_thread()]); }
UNIT(reciprocal) { out<float>(p)[global_thread()] = rcp_approx_ftz(in<float>(p)[global_thread()]); }
