// The host twin of the header that cuflash/wgmma.py writes, for every shape at once.
#pragma once

#define EMULATOR_INLINE inline __attribute__((always_inline))
namespace emulator {
constexpr bool is_bf16(half_t) { return false; }
constexpr bool is_bf16(bf16_t) { return true; }
}  // namespace emulator

template <i32 n> EMULATOR_INLINE void wgmma_ss(float* d, u64 a, u64 b, bool accumulate, emulator::Site site = emulator::here()) {
  emulator::wgmma(d, nullptr, a, b, n, accumulate, false, emulator::is_bf16(Element{}), site);
}
template <i32 n> EMULATOR_INLINE void wgmma_rs(float* d, const u32* a, u64 b, emulator::Site site = emulator::here()) {
  emulator::wgmma(d, a, 0, b, n, true, true, emulator::is_bf16(Element{}), site);
}
