// What consumer warpgroups have in common: 64 keys of a tile, whose dK, or dV, they sum up.
#pragma once

constexpr i32 kMeetBarrier = 1;  // the first named barrier; one for each consumer, and one for dQ
constexpr i32 kFirstConsumer = kSplit ? 1 : 2;  // warpgroup; before it, one that copies, and, if it is here, one for dS K

// What stands beside a tile of K, in a form that the compiler knows to be the same in all lanes. Where lane 0 alone did the reading, NVRTC
// 13.0 kept every address of the kernel in each lane.
__device__ __forceinline__ i32 read(const i32& of_tile) { return __shfl_sync(0xffffffff, of_tile, 0); }

struct KeyOwner {
  const BackwardWgmmaParams& a;
  const Shared& shared;
  const i32 number;  // of the warpgroup, among the consumers

  static __device__ __forceinline__ u32 lane() { return thread_index_again() % 32; }
  // The first key, in the consumer's 64, of those that the thread holds
  static __device__ __forceinline__ i32 own_key() {
    const u32 thread = thread_index_again();
    return thread / 32 % 4 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ void arrive(u32 barrier) { mbarrier_arrive_if(barrier, lane() == 0); }
  // Of the keys of a tile
  __device__ __forceinline__ i32 first_own() const { return kSplit ? 0 : number * kKeysOfConsumer; }
  __device__ __forceinline__ i32 first_key(const KeyTile& of) const { return of.number * kBc + first_own(); }

  // Rows of a tile beyond a length may be anything; 0 times them must be 0.
  template <class Tile> __device__ __forceinline__ void clear_rows(u32 tile, i32 first, i32 end) const {
    constexpr i32 kChunks = Tile::kPanels * kSwizzleRows;
    if (first >= end) return;
    for (i32 i = threadIdx.x % kWarpgroup + first * kChunks; i < end * kChunks; i += kWarpgroup)
      shared.at<Vector<u32, 4>>(tile + Tile::offset(i / kChunks, i % kChunks)) = {};
    fence_proxy_async();
    bar_sync(kMeetBarrier + number, kWarpgroup);
  }
  template <class Tile> __device__ __forceinline__ void clear_query_rows(u32 of_rows, const KeyTile& of, i32 row_tile) const {
    if (kQLengths) clear_rows<Tile>(of_rows, visibility(a.p, of.batch, 0).query_length - row_tile * kBr, kBr);
  }
  template <class Tile> __device__ __forceinline__ void clear_keys(u32 of_keys, const KeyTile& of) const {
    const i32 end = first_own() + kKeysOfConsumer;
    if (kKvLengths) clear_rows<Tile>(of_keys, max(visibility(a.p, of.batch, 0).key_length - of.number * kBc, first_own()), end);
  }

  // Whether all rows of a tile see all keys of the consumer
  __device__ __forceinline__ bool is_whole(const KeyTile& of, i32 row_tile) const {
    const i32 own = first_key(of), end_key = own + kKeysOfConsumer;
    const i32 first_row = row_tile * kBr, end_row = first_row + kBr;
    const Visibility see = visibility(a.p, of.batch, 0);
    return !kMask && end_row <= see.query_length && end_key <= see.end_key(first_row) && own >= see.first_key(end_row - 1);
  }

  // dS^T of the own keys, to a tile that is multiplied with K
  __device__ __forceinline__ void store_ds(u32 tile, const u32 (&ds)[kPRegisters]) const {
    const u32 thread = thread_index_again(), row = first_own() + thread / 32 % 4 * 16 + thread % 16;
    const u32 to = tile + row * kPanelRowBytes + (thread / 16 % 2 ^ row % kSwizzleRows) * kChunkBytes;
#pragma unroll
    for (i32 i = 0; i < kBr / kStep; ++i)  // from step to step two chunks on, in a place that is swizzled: an exclusive or
      stmatrix_x4((to ^ 2 * (i % kStepsPerPanel) * kChunkBytes) + i / kStepsPerPanel * DsTile::kPanelBytes, ds + 4 * i);
  }
  // From the first of the thread's keys on
  __device__ __forceinline__ void store_dk(const KeyTile& of, i32 key, const float (&dk)[kDkRegisters], float per_unit) const {
    const Params& p = a.p;
    const float scale = static_cast<float>(p.gradient_scale) * per_unit;  // which is a power of two
    Element* const to = p.dk + of.batch * p.dk_batch + of.kv_head * p.dk_head + key * p.dk_row;
    store_accumulator<kD>(to, p.dk_row, p.n_k - key, p.d, dk, lane(), [&](i32, float x) { return x * scale; });
  }
  __device__ __forceinline__ void store_dv(const KeyTile& of, i32 key, const float (&dv)[kDvRegisters]) const {
    const Params& p = a.p;
    Element* const to = p.dv + of.batch * p.dv_batch + of.kv_head * p.dv_head + key * p.dv_row;
    store_accumulator<kDv>(to, p.dv_row, p.n_k - key, p.d_v, dv, lane(), [&](i32, float x) { return kHalf ? x * (1 / kWeightUnit) : x; });
  }
};
