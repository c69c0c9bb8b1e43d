#pragma once

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
