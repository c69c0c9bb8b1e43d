// The host twin of the header that cuflash/wgmma.py writes, for every shape at once.
#pragma once

#define EMULATOR_INLINE inline __attribute__((always_inline))
namespace emulator {
constexpr bool is_bf16(half_t) { return false; }
constexpr bool is_bf16(bf16_t) { return true; }
EMULATOR_INLINE void multiply(float* d, const u32* a, u64 a_bits, u64 b, u32 n, bool accumulate, bool a_transposed, bool transposed, Site site) {
  wgmma(d, a, {a_bits, b, n, false, accumulate, a_transposed, transposed, is_bf16(Element{})}, site);
}
}  // namespace emulator

template <i32 n> EMULATOR_INLINE void wgmma_ss(float* d, u64 a, u64 b, bool accumulate, emulator::Site site = emulator::here()) {
  emulator::multiply(d, nullptr, a, b, n, accumulate, false, false, site);
}
template <i32 n> EMULATOR_INLINE void wgmma_ss_first(float* d, u64 a, u64 b, emulator::Site site = emulator::here()) {
  emulator::multiply(d, nullptr, a, b, n, false, false, false, site);
}
template <i32 n> EMULATOR_INLINE void wgmma_rs(float* d, const u32* a, u64 b, bool accumulate = true, emulator::Site site = emulator::here()) {
  emulator::multiply(d, a, 0, b, n, accumulate, false, true, site);
}
template <i32 n> EMULATOR_INLINE void wgmma_ts(float* d, u64 a, u64 b, emulator::Site site = emulator::here()) {
  emulator::multiply(d, nullptr, a, b, n, true, true, true, site);
}
template <i32 n> EMULATOR_INLINE void wgmma_ts_first(float* d, u64 a, u64 b, emulator::Site site = emulator::here()) {
  emulator::multiply(d, nullptr, a, b, n, false, true, true, site);
}
