// Shared memory of a block of forward_wgmma: tiles in rings of slots, and the barriers that pass them between the thread that asks TMA
// for them and the warpgroups that multiply them.
#pragma once

struct Shared {
  u8* base;
  u32 address;

  __device__ __forceinline__ u32 q(i32 slot, i32 warpgroup) const { return address + (slot * kConsumers + warpgroup) * QTile::kBytes; }
  __device__ __forceinline__ u32 k(i32 slot) const { return address + kK + slot * KTile::kBytes; }
  __device__ __forceinline__ u32 v(i32 slot) const { return address + kV + slot * VTile::kBytes; }

  // Full: TMA has written the tile. Empty: every warp is done with it.
  __device__ __forceinline__ u32 full_k(i32 slot) const { return barrier(slot); }
  __device__ __forceinline__ u32 empty_k(i32 slot) const { return barrier(kStages + slot); }
  __device__ __forceinline__ u32 full_v(i32 slot) const { return barrier(2 * kStages + slot); }
  __device__ __forceinline__ u32 empty_v(i32 slot) const { return barrier(3 * kStages + slot); }
  __device__ __forceinline__ u32 full_q(i32 slot, i32 warpgroup) const { return barrier(4 * kStages + slot * kConsumers + warpgroup); }
  __device__ __forceinline__ u32 empty_q(i32 slot, i32 warpgroup) const {
    return barrier(4 * kStages + (kQStages + slot) * kConsumers + warpgroup);
  }
  __device__ __forceinline__ i32* row_tile(i32 slot, i32 warpgroup) const {
    return reinterpret_cast<i32*>(base + kRowTiles + (slot * kConsumers + warpgroup) * kRowTileBytes);
  }

  // From an address to a pointer
  __device__ __forceinline__ u8* at(u32 place) const { return base + (place - address); }

  static constexpr i32 kK = kQStages * kConsumers * QTile::kBytes;
  static constexpr i32 kV = kK + kStages * KTile::kBytes;
  static constexpr i32 kBarriers = kV + kStages * VTile::kBytes;
  static constexpr i32 kBarrierBytes = 8, kRowTileBytes = 16;
  static constexpr i32 kRowTiles = kBarriers + (4 * kStages + 2 * kQStages * kConsumers) * kBarrierBytes;

 private:
  __device__ __forceinline__ u32 barrier(i32 number) const { return address + kBarriers + number * kBarrierBytes; }
};

// A place in a ring of slots, and the parity of the phase to wait for there
template <i32 kSlots> struct Ring {
  i32 slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};
constexpr u32 kEmptyAtFirst = 1;  // the parity that a producer starts with
