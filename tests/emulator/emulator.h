// What a kernel compiled for the CPU sees of the emulator. No standard header is included: they would be most of the compile time.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct dim3 {
  u32 x = 1, y = 1, z = 1;
};

namespace emulator {

// Where a kernel calls the emulator. As the default of a function's last argument, here() is the line of the call.
struct Site {
  const char* file;
  i32 line;
};
constexpr Site here(const char* file = __builtin_FILE(), i32 line = __builtin_LINE()) { return {file, line}; }

// What is compiled with a kernel for the launcher: its entry, and the addresses of the library that holds it.
struct Kernel {
  void (*call)(const void* params);
  u64 params_bytes;
  const u8* low;
  const u8* high;
};

// The thread that runs.
[[gnu::const]] dim3 thread_index();
[[gnu::const]] dim3 block_index();
[[gnu::const]] dim3 block_dim();
[[gnu::const]] dim3 grid_dim();

struct Words2 {
  u32 x[2];
};
struct Words4 {
  u32 x[4];
};

// Barriers and warps (collectives.h)
u32 barrier(i32 id, u32 threads, bool wait, bool predicate, Site site);  // `threads` 0: all that are left; returns how many said true
void sync_warp(u32 mask, Site site);
u64 shuffle(u32 mask, u64 word, u32 source, Site site);
u32 vote(u32 mask, bool predicate, Site site);

// Shared memory (memory.h)
[[gnu::const]] u8* dynamic_shared();
u32 shared_address(const void* pointer);

// cp.async (copies.h)
void copy_async(u32 shared, const void* global, u32 bytes_read);
void commit_copies();
void wait_for_copies(u32 pending);

// mbarriers, fence.proxy.async and setmaxnreg (mbarriers.h)
void mbarrier_init(u32 address, u32 arrivals, Site site);
void fence_mbarrier_init();
void mbarrier_arrive(u32 address);
void mbarrier_arrive_expect_tx(u32 address, u32 bytes);
void mbarrier_wait(u32 address, u32 parity, Site site);
void fence_proxy_async();
void set_registers(u32 count, bool more, Site site);

// TMA (tma.h)
struct Coordinates {
  i32 x[5];
};
void tma_load(u32 shared, const void* map, u32 rank, u32 mbarrier, Coordinates at);

void tma_store(u32 shared, const void* map, u32 rank, Coordinates at);  // bulk.h

// wgmma (wgmma.h). `a` null: A is in shared memory. What escapes by address is watched: a thread may not use it too early.
struct Product {
  u64 a, b;  // descriptors; a is 0 where A is in registers
  u32 n;
  bool from_registers, accumulate, a_transposed, transposed, is_bf16;  // transposed: B has its columns, n, contiguous; A its rows
};
void wgmma(float* d, const u32* a, Product product, Site site);
void wgmma_fence();
void wgmma_commit_group(Site site);
void wgmma_wait_group(u32 pending, Site site);

// Bulk copies, stmatrix, and counters in device memory (bulk.h)
void bulk_load(u32 shared, const void* global, u32 bytes, u32 mbarrier);
void bulk_write(void* global, u32 shared, u32 bytes, bool adds);
void bulk_commit_group();
void bulk_wait_group(u32 pending);
void bulk_wait_group_read(u32 pending);
void store_matrices(u32 address, Words4 words, Site site);
i32 ld_acquire(const i32* global);
void ld_acquire_until(const i32* global, i32 value, Site site);
void red_release_add(i32* global, i32 x);
void fence_proxy_async_global();

// Device memory (memory.h)
u32 atomic_inc(u32* address, u32 limit);

// ldmatrix and mma.sync (matrices.h). By value: what escapes by address is watched like memory, access by access.
struct Floats4 {
  float x[4];
};
enum class Shape { m16n8k16_f16, m16n8k16_bf16, m16n8k8_f16, m16n8k8_tf32 };
Words4 load_matrices(bool transposed, u32 address, Site site);
Floats4 multiply_add(Floats4 d, Words4 a, Words2 b, Shape shape, Site site);

// Number formats (numbers.h)
float f16_to_float(u16 bits);
u16 float_to_f16(float x);
u16 float_to_bf16(float x);
u32 float_to_tf32(float x);
float flushed_sum(float a, float b);

[[noreturn]] void trap(Site site);

template <class To, class From> To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits, read as another type");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulator
