// Shared memory of a block: K and V, then kStages times Q, dO and the row statistics, then P^T, and dS^T of two steps.
#pragma once

constexpr i32 kLsePartCount = sizeof(Lse) / sizeof(Real);  // a double log-sum-exp is a high and a low float

constexpr i32 kKBytes = kBc * TileLayout<kD>::kPitch;
constexpr i32 kVBytes = kBc * TileLayout<kDv>::kPitch;
constexpr i32 kQBytes = kBr * TileLayout<kD>::kPitch;
constexpr i32 kDoutBytes = kBr * TileLayout<kDv>::kPitch;
constexpr i32 kStatisticsBytes = (kLsePartCount + 1) * kBr * sizeof(float);
constexpr i32 kStageBytes = kQBytes + kDoutBytes + kStatisticsBytes;
constexpr i32 kPBytes = kBc * TileLayout<kBr>::kPitch;

struct Shared {
  u8* base;
  __device__ __forceinline__ u8* k() const { return base; }
  __device__ __forceinline__ u8* v() const { return base + kKBytes; }
  __device__ __forceinline__ u8* q(i32 step) const { return v() + kVBytes + step % kStages * kStageBytes; }
  __device__ __forceinline__ u8* dout(i32 step) const { return q(step) + kQBytes; }
  __device__ __forceinline__ float* lse(i32 step) const { return reinterpret_cast<float*>(dout(step) + kDoutBytes); }
  __device__ __forceinline__ float* delta(i32 step) const { return lse(step) + kLsePartCount * kBr; }
  __device__ __forceinline__ u8* p() const { return v() + kVBytes + kStages * kStageBytes; }
  __device__ __forceinline__ u8* ds(i32 step) const { return p() + (1 + step % 2) * kPBytes; }
};
