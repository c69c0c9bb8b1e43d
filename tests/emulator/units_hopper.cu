// Small kernels, right and wrong ones, for mbarriers, TMA, wgmma and setmaxnreg, that tests/test_emulator_hopper.py runs.
#include "ptx.cuh"
#include "variant.cuh"
#include "wgmma.cuh"

struct Params {
  TensorMap map, other_map;
  const void* in;
  void* out;
  i32 n, width;
  i32 x[4];
};
#define UNIT(name)                                                   \
  extern "C" __global__ void name(const __grid_constant__ Params p); \
  EMULATED_KERNEL(name);                                             \
  extern "C" __global__ void name(const __grid_constant__ Params p)

template <class T> __device__ __forceinline__ const T* in(const Params& p) { return static_cast<const T*>(p.in); }
template <class T> __device__ __forceinline__ T* out(const Params& p) { return static_cast<T*>(p.out); }

constexpr i32 kSlots = 2, kSlotWords = 32, kBarriers = 4096;  // mbarriers lie from offset kBarriers on

// ---- mbarriers: warp 0 hands numbers over to warp 1, in p.n steps, through two slots ----
struct Ring {
  bool fence_init = true, sync_init = true;
  bool wait_full = true, wait_empty = true, release = true, release_late = true;
  u32 consumer_parity = 0, producer_parity = 1, full_arrivals = 32, arrivals = 1;
};
template <class Between> __device__ __forceinline__ void hand_over(const Params& p, Ring ring, Between between) {
  DYNAMIC_SMEM(smem);
  const auto full = [&](i32 i) { return smem_address(smem) + kBarriers + i % kSlots * 8; };
  const auto empty = [&](i32 i) { return smem_address(smem) + kBarriers + (kSlots + i % kSlots) * 8; };
  const auto slot = [&](i32 i) { return reinterpret_cast<float*>(smem) + i % kSlots * kSlotWords; };
  if (threadIdx.x == 0) {
    for (i32 i = 0; i < kSlots; ++i) {
      mbarrier_init(full(i), ring.full_arrivals);
      mbarrier_init(empty(i), 32);
    }
    if (ring.fence_init) fence_mbarrier_init();
  }
  if (ring.sync_init) __syncthreads();
  const i32 lane = threadIdx.x % 32;
  for (i32 i = 0; i < p.n; ++i) {
    const u32 turn = i / kSlots % 2;
    if (threadIdx.x < 32) {
      if (ring.wait_empty) mbarrier_wait(empty(i), turn ^ ring.producer_parity);
      slot(i)[lane] = in<float>(p)[i * 32 + lane];
      for (u32 k = 0; k < ring.arrivals; ++k) mbarrier_arrive(full(i));
    } else {
      if (ring.wait_full) mbarrier_wait(full(i), turn ^ ring.consumer_parity);
      between(smem);
      if (!ring.release_late) mbarrier_arrive(empty(i));
      out<float>(p)[i * 32 + lane] = slot(i)[31 - lane];
      if (ring.release && ring.release_late) mbarrier_arrive(empty(i));
    }
  }
}
#define RING(name, ...)                          \
  UNIT(name) {                                   \
    Ring ring;                                   \
    __VA_ARGS__;                                 \
    hand_over(p, ring, [](u8*) {});              \
  }
RING(ring, )
RING(ring_without_wait_for_full, ring.wait_full = false)
RING(ring_without_wait_for_empty, ring.wait_empty = false)
RING(ring_without_release, ring.release = false)
RING(ring_with_early_release, ring.release_late = false)
RING(ring_where_the_consumer_starts_wrong, ring.consumer_parity = 1)
RING(ring_where_the_producer_starts_wrong, ring.producer_parity = 0)
RING(ring_for_fewer_arrivals, ring.full_arrivals = 31)
RING(ring_for_more_arrivals, ring.full_arrivals = 33)
RING(ring_without_fence_after_init, ring.fence_init = false)
RING(ring_without_barrier_after_init, ring.sync_init = false)
UNIT(ring_that_overwrites_a_barrier) {
  hand_over(p, {}, [](u8* smem) { smem[kBarriers + threadIdx.x % 32] = 0; });
}
UNIT(barrier_that_nobody_made) {
  DYNAMIC_SMEM(smem);
  mbarrier_arrive(smem_address(smem));
}
UNIT(barrier_made_twice) {
  DYNAMIC_SMEM(smem);
  for (i32 i = 0; i < 2; ++i) mbarrier_init(smem_address(smem), 1);
}
UNIT(phases_that_go_by) {  // a thread waits for phase 0 of a barrier that does not wait for it
  DYNAMIC_SMEM(smem);
  const u32 barrier = smem_address(smem);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 32) bar_sync(1, 64);
  if (threadIdx.x >= 32) bar_arrive(1, 64);
  if (threadIdx.x == 33) mbarrier_wait(barrier, 0);
  if (threadIdx.x == 0)
    for (i32 i = 0; i < p.n; ++i) mbarrier_arrive(barrier);
}

// ---- writes that change nothing ----
UNIT(equal_writes) {  // both warps write, either reads what may be the other's
  DYNAMIC_SMEM(smem);
  i32* const box = reinterpret_cast<i32*>(smem);
  box[threadIdx.x % 32] = p.n ? static_cast<i32>(threadIdx.x) : 7;
  __syncwarp();
  out<i32>(p)[threadIdx.x] = box[31 - threadIdx.x % 32];
}

// ---- TMA: one box, copied out as it lies in shared memory ----
struct Load {
  i32 announced = 0;  // bytes beyond those that come
  bool wait = true, barrier_before = true;
  i32 to = 0;
};
template <class Before> __device__ __forceinline__ void load_box(const Params& p, Load load, Before before) {
  DYNAMIC_SMEM(smem);
  const u32 base = smem_address(smem), aligned = (base + 1023) / 1024 * 1024, barrier = base + kBarriers;
  u8* const box = smem + (aligned - base);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  before(box);
  if (load.barrier_before) __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, p.n + load.announced);
    tma_load_4d(aligned + load.to, &p.map, barrier, p.x[0], p.x[1], p.x[2], p.x[3], 0);
  }
  if (load.wait) {
    mbarrier_wait(barrier, 0);
    for (i32 i = threadIdx.x; i < p.n; i += blockDim.x) out<u8>(p)[i] = box[i];
  }
}
#define LOAD(name, ...)             \
  UNIT(name) {                      \
    Load load;                      \
    __VA_ARGS__;                    \
    load_box(p, load, [](u8*) {});  \
  }
LOAD(load, )
LOAD(load_without_wait, load.wait = false; out<u8>(p)[threadIdx.x] = 0)
LOAD(load_with_too_few_bytes_announced, load.announced = -16)
LOAD(load_with_too_many_bytes_announced, load.announced = 16)
LOAD(load_to_a_crooked_address, load.to = 64)
LOAD(load_beyond_shared_memory, load.to = 1 << 16)
LOAD(load_over_its_barrier, load.to = 3200)
UNIT(load_that_is_read_too_early) {
  Load load;
  load.wait = false;
  load_box(p, load, [](u8*) {});
  DYNAMIC_SMEM(smem);
  out<u8>(p)[threadIdx.x] = smem[1024 + threadIdx.x];
}
UNIT(load_over_what_is_read) {
  Load load;
  load.barrier_before = false;
  load_box(p, load, [&](u8* box) {
    if (threadIdx.x >= 32) box[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x >= 32) out<u8>(p)[threadIdx.x] = box[threadIdx.x];
  });
}
UNIT(load_of_no_map) {
  Params other = p;
  other.map.opaque[0] = 0;
  load_box(other, {}, [](u8*) {});
}

// ---- TMA, the way back: one box, laid into shared memory as it is given ----
struct Store {
  bool fence = true, meet = true, wait = true;
  i32 from = 0;
};
__device__ __forceinline__ void store_box(const Params& p, Store store) {
  DYNAMIC_SMEM(smem);
  const u32 base = smem_address(smem), aligned = (base + 1023) / 1024 * 1024;
  for (i32 i = threadIdx.x; i < p.n; i += blockDim.x) smem[aligned - base + i] = in<u8>(p)[i];
  if (store.fence) fence_proxy_async();
  if (store.meet) __syncthreads();
  if (threadIdx.x != 0) return;
  tma_store_4d(&p.map, aligned + store.from, p.x[0], p.x[1], p.x[2], p.x[3]);
  bulk_commit_group();
  if (store.wait) bulk_wait_group<0>();
}
#define STORE(name, ...)  \
  UNIT(name) {            \
    Store store;          \
    __VA_ARGS__;          \
    store_box(p, store);  \
  }
STORE(store, )
STORE(store_without_fence, store.fence = false)
STORE(store_before_all_have_written, store.meet = false)
STORE(store_without_wait, store.wait = false)
STORE(store_from_a_crooked_address, store.from = 64)
STORE(store_from_where_nothing_is, store.from = 4096)

// ---- wgmma: D (64 x n) = A (64 x 64) B (64 x n) ----
// B is given as n rows of 64 in wgmma_ss and as 64 rows of n in wgmma_rs. TMA brings panels of p.width bytes a row, swizzled so; rows
// of 16 bytes are not swizzled.
constexpr i32 kDepth = 64, kStep = 16;
struct Faults {
  bool fence = true, commit = true, wait = true, wait_weakly = false;
  bool read_early = false, change_a = false, overwrite = false, load_over = false, write_b = false, fence_proxy = true, disagree = false;
  u64 flip = 0, shift = 0;  // in the descriptor of B
};

struct Operand {
  u32 start;
  i32 rows, width;
  bool transposed;
  __device__ i32 panel_bytes() const { return rows * width; }
  __device__ u64 descriptor(i32 step) const {
    const u64 kind = width == 128 ? 1 : width == 64 ? 2 : width == 32 ? 3 : 0;
    const i32 eight_rows = 8 * width;
    i32 offset, leading, stride;
    if (transposed) {
      offset = step * kStep * width;
      leading = kind ? panel_bytes() : eight_rows;
      stride = kind ? eight_rows : panel_bytes();
    } else {
      const i32 bytes = step * kStep * 2;
      offset = bytes / width * panel_bytes() + bytes % width;
      leading = panel_bytes();
      stride = eight_rows;
    }
    return static_cast<u64>((start + offset) >> 4) | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 | kind << 62;
  }
};

__device__ __forceinline__ void load_panels(const Operand& to, i32 columns, const TensorMap& map, u32 barrier) {
  mbarrier_arrive_expect_tx(barrier, to.rows * columns * 2);
  for (i32 first = 0; first < columns; first += to.width / 2)
    tma_load_4d(to.start + first * 2 / to.width * to.panel_bytes(), &map, barrier, first, 0, 0, 0, 0);
}

template <i32 n, bool kFromRegisters> __device__ __forceinline__ void multiply(const Params& p, Faults faults) {
  DYNAMIC_SMEM(smem);
  const u32 base = smem_address(smem), start = (base + 3 * 8 + 1023) / 1024 * 1024;
  const u32 a_barrier = base, b_barrier = base + 8, spare_barrier = base + 16;
  const i32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const Operand a = {start, 64, p.width, false};
  const Operand b = {start + 64 * kDepth * 2, kFromRegisters ? kDepth : n, p.width, kFromRegisters};
  u8* const b_smem = smem + (b.start - base);
  const auto load_b = [&](u32 barrier) { load_panels(b, kFromRegisters ? n : kDepth, p.other_map, barrier); };
  if (threadIdx.x == 0) {
    for (u32 barrier : {a_barrier, b_barrier, spare_barrier}) mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!kFromRegisters) load_panels(a, kDepth, p.map, a_barrier);
    load_b(b_barrier);
  }
  if (!kFromRegisters) mbarrier_wait(a_barrier, 0);
  mbarrier_wait(b_barrier, 0);
  if (faults.write_b) {
    reinterpret_cast<Element*>(b_smem)[threadIdx.x] = Element(0);
    if (faults.fence_proxy) fence_proxy_async();
    __syncthreads();
  }

  float d[n / 2] = {};
  u32 a_rmem[kDepth / 4];
  if (kFromRegisters) {
    const u32* const words = in<u32>(p);
    for (i32 i = 0; i < kDepth / 4; ++i) a_rmem[i] = words[(row + i % 2 * 8) * kDepth / 2 + i / 2 * 4 + lane % 4];
  }
  if (faults.fence) wgmma_fence();
  for (i32 step = 0; step < kDepth / kStep; ++step) {
    const u64 b_descriptor = (b.descriptor(faults.disagree && threadIdx.x >= 64 ? step ^ 1 : step) + faults.shift) ^ faults.flip;
    if constexpr (kFromRegisters)
      wgmma_rs<n>(d, a_rmem + 4 * step, b_descriptor);
    else
      wgmma_ss<n>(d, a.descriptor(step), b_descriptor, step > 0);
  }
  if (faults.commit) wgmma_commit_group();
  if (faults.read_early) out<float>(p)[threadIdx.x] = d[0];
  if (faults.change_a) a_rmem[5] = 0;
  if (faults.overwrite) b_smem[threadIdx.x] = static_cast<u8>(~b_smem[threadIdx.x]);
  if (faults.load_over && threadIdx.x == 0) load_b(spare_barrier);
  if (faults.wait) {
    if (faults.wait_weakly)
      wgmma_wait_group<1>();
    else
      wgmma_wait_group<0>();
  }
  pin(d);
  for (i32 i = 0; i < n / 2; ++i) out<float>(p)[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
UNIT(ss_16) { multiply<16, false>(p, {}); }
UNIT(ss_64) { multiply<64, false>(p, {}); }
UNIT(ss_256) { multiply<256, false>(p, {}); }
UNIT(rs_64) { multiply<64, true>(p, {}); }
UNIT(rs_128) { multiply<128, true>(p, {}); }
#define FAULT(name, ...)          \
  UNIT(name) {                    \
    Faults faults;                \
    __VA_ARGS__;                  \
    multiply<64, true>(p, faults); \
  }
FAULT(rs_after_writing_b, faults.write_b = true)
FAULT(rs_without_proxy_fence, faults.write_b = true; faults.fence_proxy = false)
FAULT(rs_without_fence, faults.fence = false)
FAULT(rs_without_commit, faults.commit = false)
FAULT(rs_without_wait, faults.wait = false)
FAULT(rs_with_too_weak_a_wait, faults.wait_weakly = true)
FAULT(rs_read_early, faults.read_early = true)
FAULT(rs_with_a_changed, faults.change_a = true)
FAULT(rs_with_b_overwritten, faults.overwrite = true)
FAULT(rs_with_b_loaded_over, faults.load_over = true)
FAULT(rs_of_different_warps, faults.disagree = true)
FAULT(rs_with_strange_bits, faults.flip = 1ULL << 14)
FAULT(rs_off_the_swizzle, faults.shift = 128 >> 4)
FAULT(rs_beyond_shared_memory, faults.shift = static_cast<u64>(0x20000 >> 4))
UNIT(rs_then_use_without_fence) {  // the registers are free again, but not for the next wgmma
  DYNAMIC_SMEM(smem);
  float d[8] = {};
  u32 a[4] = {};
  for (i32 i = threadIdx.x; i < 1024; i += 128) reinterpret_cast<u16*>(smem)[i] = 0;
  fence_proxy_async();
  __syncthreads();
  const u64 b = static_cast<u64>(smem_address(smem) >> 4) | 8ULL << 16 | 16ULL << 32;
  wgmma_fence();
  for (i32 i = 0; i < 2; ++i) {
    wgmma_rs<16>(d, a, b);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    out<float>(p)[threadIdx.x] = d[0];
    if (p.n) wgmma_fence();
  }
}
UNIT(rs_by_half_a_warp) {
  DYNAMIC_SMEM(smem);
  float d[8] = {};
  u32 a[4] = {};
  wgmma_fence();
  if (threadIdx.x % 32 < 16) wgmma_rs<16>(d, a, smem_address(smem) >> 4);
}

// ---- setmaxnreg: 384 threads start with 168 registers each ----
template <i32 kLess, i32 kMore> __device__ __forceinline__ void share_registers(const Params& p) {
  if (threadIdx.x < 128)
    setmaxnreg_dec<kLess>();
  else
    setmaxnreg_inc<kMore>();
  out<i32>(p)[threadIdx.x] = 1;
}
UNIT(registers) { share_registers<40, 232>(p); }
UNIT(registers_of_no_step) { share_registers<42, 232>(p); }
UNIT(registers_up_for_down) { share_registers<176, 232>(p); }
UNIT(registers_of_one_warp) {
  if (threadIdx.x < 32) setmaxnreg_dec<40>();
}
UNIT(registers_that_are_not_there) { share_registers<40, 240>(p); }

// ---- atomics ----
UNIT(tickets) {
  for (i32 i = 0; i < 3; ++i) out<u32>(p)[(blockIdx.x * blockDim.x + threadIdx.x) * 3 + i] = atomicInc(static_cast<u32*>(const_cast<void*>(p.in)), p.n);
}

// ---- elements of 16 bits that go from memory right into a call ----
__device__ __forceinline__ float as_float(Element x) { return static_cast<float>(x.bits); }
UNIT(elements_into_a_call) { out<float>(p)[threadIdx.x] = as_float(in<Element>(p)[threadIdx.x + p.n]); }
