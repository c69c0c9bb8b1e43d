// Shared memory of a block of forward_wgmma: tiles in rings of slots, and the barriers that pass them between the two threads that ask TMA
// for them and the warpgroups that multiply them. One of the two asks for Q, and draws rows; the other asks for K and V.
// WgmmaConfig.shared_bytes has the same sum.
#pragma once

// What the thread that asks for Q tells the one that asks for K and V: from which tile of keys to which, and whose
struct alignas(16) KeyWork {
  i32 first, end;  // kNoRows: there is no more to do
  i32 kv_head, batch;
};
// And what it tells a warpgroup about its rows.
struct alignas(16) RowWork {
  RowTile rows;
  i32 passed_over;  // key tiles that the block needs, and not the warpgroup: before those that it needs
  KeyTiles tiles;
  i32 passed_over_behind;  // and behind
};
constexpr i32 kWarpRows = 16, kWarpPanelBytes = kWarpRows * kPanelRowBytes;
constexpr i32 kNoRows = -1;  // as row0: there is no more to do

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
  __device__ __forceinline__ u32 full_work() const { return barrier(kRingBarriers); }
  __device__ __forceinline__ u32 draw() const { return barrier(kRingBarriers + 1); }  // the next rows
  __device__ __forceinline__ KeyWork* key_work() const { return reinterpret_cast<KeyWork*>(base + kKeyWork); }
  __device__ __forceinline__ RowWork* row_work(i32 slot, i32 warpgroup) const {
    return reinterpret_cast<RowWork*>(base + kRowWork) + slot * kConsumers + warpgroup;
  }

  // The bias of a tile's keys, which comes with K: on K's full barrier. It has a slot more, so that K's empty barrier serves it too: a warp
  // that is done with a K is done with the bias of the tile before.
  __device__ __forceinline__ float* bias(i32 slot) const { return reinterpret_cast<float*>(base + kBiasTiles) + slot * kBc; }

  // Panels of a warp's rows of O, on their way to device memory
  __device__ __forceinline__ u32 stage(i32 warpgroup, i32 warp) const { return address + kStage + (4 * warpgroup + warp) * kStageBytes; }

  // From an address to a pointer
  __device__ __forceinline__ u8* at(u32 place) const { return base + (place - address); }

  static constexpr i32 kK = kQStages * kConsumers * QTile::kBytes;
  static constexpr i32 kV = kK + kStages * KTile::kBytes;
  static constexpr i32 kStage = kV + kStages * VTile::kBytes;
  static constexpr i32 kBarrierBytes = 8;
  static constexpr i32 kRingBarriers = 4 * kStages + 2 * kQStages * kConsumers, kBiasSlots = kStages + 1;
  static constexpr i32 kStageBytes = kStagePanels * kWarpPanelBytes;  // of a warp
  static constexpr i32 kBarriers = kStage + 4 * kConsumers * kStageBytes;
  static constexpr i32 kKeyWork = kBarriers + (kRingBarriers + 2) * kBarrierBytes;
  static constexpr i32 kRowWork = kKeyWork + static_cast<i32>(sizeof(KeyWork));
  static constexpr i32 kBiasTiles = kRowWork + kQStages * kConsumers * static_cast<i32>(sizeof(RowWork));
  static constexpr i32 kEnd = kBiasTiles + (kBiasOfKeys ? kBiasSlots * kBc * 4 : 0);

 private:
  __device__ __forceinline__ u32 barrier(i32 number) const { return address + kBarriers + number * kBarrierBytes; }
};
static_assert(Shared::kEnd + kAtomBytes <= kSharedBytes, "a block is launched with what it uses, and with what aligning it may cost");
static_assert(0 < kStagePanels && kStagePanels <= VTile::kPanels, "O leaves by some or all of its panels at a time");
