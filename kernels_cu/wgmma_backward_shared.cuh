// Shared memory of a block of backward_wgmma: tiles, and the barriers that pass them on. Full: what was asked for, or computed, is there.
// Empty: all who read it are done.
//
// A wait that names a phase by its parity must not sleep through the next phase. Whoever waits for "full" of a slot says "empty" after that,
// and only then is the slot filled again; who fills slots waits for "empty" each time. Three are otherwise: full_unit has no "empty", but
// all who wait for it release K afterwards, and the slot's next tile of K comes before its next unit; the warpgroup of dQ waits for V and
// does not release it, but who does waits for the unit, which is made after; clean_dout is waited for before dO is released.
#pragma once

constexpr i32 kSlots = 2;  // of whatever comes anew with every tile of rows

// Number n of what passes through a ring is in this slot, in a phase of this parity.
template <i32 kOf> __device__ __forceinline__ i32 slot_of(u32 n) { return n % kOf; }
template <i32 kOf> __device__ __forceinline__ u32 parity_of(u32 n) { return n / kOf % 2; }

struct Shared {
  u8* base;
  u32 address;

  __device__ __forceinline__ u32 k(i32 slot) const { return address + kK + slot * KTile::kBytes; }
  __device__ __forceinline__ u32 v() const { return address + kV; }
  __device__ __forceinline__ u32 q(i32 slot) const { return address + kQ + slot * QTile::kBytes; }
  __device__ __forceinline__ u32 dout(i32 slot) const { return address + kDout + slot * DoutTile::kBytes; }
  __device__ __forceinline__ u32 ds(i32 slot) const { return address + kDs + slot * DsTile::kBytes; }
  __device__ __forceinline__ u32 dq(i32 slot) const { return address + kDq + slot * kDqPieceBytes; }
  __device__ __forceinline__ u32 lse(i32 slot) const { return address + kLse + slot * kStatisticsBytes; }
  __device__ __forceinline__ u32 delta(i32 slot) const { return address + kDelta + slot * kStatisticsBytes; }

  // With K come its ticket, and with Q and dO the statistics of the rows.
  __device__ __forceinline__ u32 full_k(i32 slot) const { return barrier(slot); }
  __device__ __forceinline__ u32 empty_k(i32 slot) const { return barrier(kKStages + slot); }
  __device__ __forceinline__ u32 full_v() const { return barrier(2 * kKStages); }
  __device__ __forceinline__ u32 empty_v() const { return barrier(2 * kKStages + 1); }
  __device__ __forceinline__ u32 full_q(i32 slot) const { return of_slot(0, slot); }
  __device__ __forceinline__ u32 empty_q(i32 slot) const { return of_slot(1, slot); }
  __device__ __forceinline__ u32 full_dout(i32 slot) const { return of_slot(2, slot); }
  __device__ __forceinline__ u32 empty_dout(i32 slot) const { return of_slot(3, slot); }
  __device__ __forceinline__ u32 full_ds(i32 slot) const { return of_slot(4, slot); }
  __device__ __forceinline__ u32 empty_ds(i32 slot) const { return of_slot(5, slot); }
  __device__ __forceinline__ u32 full_dq(i32 slot) const { return barrier(2 * kKStages + 2 + 6 * kSlots + slot); }
  __device__ __forceinline__ u32 empty_dq(i32 slot) const { return barrier(2 * kKStages + 2 + 6 * kSlots + kDqStages + slot); }
  __device__ __forceinline__ i32& ticket(i32 slot) const { return reinterpret_cast<i32*>(base + kTickets)[slot]; }
  // Of float16 only: the unit of dS (wgmma_backward_units.cuh) for each tile of K, what to multiply results with, and where it is made
  __device__ __forceinline__ u32 full_unit(i32 slot) const { return barrier(2 * kKStages + 2 + 6 * kSlots + 2 * kDqStages + slot); }
  __device__ __forceinline__ float& unit(i32 slot) const { return reinterpret_cast<float*>(base + kUnits)[2 * slot]; }
  __device__ __forceinline__ float& per_unit(i32 slot) const { return reinterpret_cast<float*>(base + kUnits)[2 * slot + 1]; }
  __device__ __forceinline__ float* maxima() const { return reinterpret_cast<float*>(base + kMaxima); }

  // Where consumers share out the products: P^T, or its product with the slopes, from the one that makes it to the one that needs it for
  // dS^T. The registers 2 i and 2 i + 1 of thread t of the one are those of thread t of the other, at place 128 i + t.
  __device__ __forceinline__ u32 full_p() const { return barrier(kBarriersBeforeP); }
  __device__ __forceinline__ u32 empty_p() const { return barrier(kBarriersBeforeP + 1); }
  __device__ __forceinline__ u32 clean_dout(i32 slot) const { return barrier(kBarriersBeforeP + 2 + slot); }  // rows beyond a length have been cleared
  __device__ __forceinline__ Vector<float, 2>* p() const { return reinterpret_cast<Vector<float, 2>*>(base + kP); }

  // From an address to what lies there
  template <class T> __device__ __forceinline__ T& at(u32 place) const { return *reinterpret_cast<T*>(base + (place - address)); }

  static constexpr i32 kK = 0;
  static constexpr i32 kV = kK + kKStages * KTile::kBytes;
  static constexpr i32 kQ = kV + VTile::kBytes;
  static constexpr i32 kDout = kQ + kSlots * QTile::kBytes;
  static constexpr i32 kDs = kDout + kSlots * DoutTile::kBytes;
  static constexpr i32 kDq = kDs + (kSplit ? 0 : kSlots * DsTile::kBytes);
  static constexpr i32 kP = kDq + (kSplit ? 0 : kDqStages * kDqPieceBytes);
  static constexpr i32 kLse = kP + (kSplit ? kWarpgroup * kSRegisters * 4 : 0);
  static constexpr i32 kStatisticsBytes = kBr * 4;
  static constexpr i32 kDelta = kLse + kSlots * kStatisticsBytes;
  static constexpr i32 kBarriers = kDelta + kSlots * kStatisticsBytes;
  static constexpr i32 kBarrierBytes = 8;
  static constexpr i32 kBarriersBeforeP = 3 * kKStages + 2 + 6 * kSlots + 2 * kDqStages;
  static constexpr i32 kTickets = kBarriers + (kBarriersBeforeP + 2 + kSlots) * kBarrierBytes;
  static constexpr i32 kUnits = kTickets + kKStages * 4;
  static constexpr i32 kMaxima = (kUnits + 2 * kKStages * 4 + 15) / 16 * 16;  // read as vectors, of nothing else
  static constexpr i32 kBytes = kMaxima + 3 * 4 * 4;

 private:
  __device__ __forceinline__ u32 barrier(i32 number) const { return address + kBarriers + number * kBarrierBytes; }
  __device__ __forceinline__ u32 of_slot(i32 kind, i32 slot) const { return barrier(2 * kKStages + 2 + kind * kSlots + slot); }
};
static_assert(KTile::kBytes % kAtomBytes == 0 && QTile::kBytes % kAtomBytes == 0, "tiles start where the swizzle does");
