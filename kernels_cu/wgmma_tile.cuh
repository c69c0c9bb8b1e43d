// The tiles of forward_wgmma, and the products S = Q K^T and O += P V.
#pragma once

constexpr i32 kSRegisters = kBc / 2, kPRegisters = kBc / 4, kORegisters = kDv / 2;

static_assert(kBc % kStep == 0 && kBc <= 256, "a wgmma is 16 deep in P V and up to 256 keys wide in Q K^T");

using QTile = PanelTile<kWarpgroupRows, kD>;  // of one warpgroup
using KTile = PanelTile<kBc, kD>;
using VTile = PanelTile<kBc, kDv>;

// ---- the products: issued here, waited for by the caller ----
__device__ __forceinline__ void issue_q_k(float (&s)[kSRegisters], u32 q, u32 k) {
  const u64 a = row_operand(q), b = row_operand(k);
#pragma unroll
  for (i32 step = 0; step < kD / kStep; ++step)
    wgmma_ss<kBc>(s, a + in_units(QTile::column_step(step)), b + in_units(KTile::column_step(step)), step > 0);
  wgmma_commit_group();
}
__device__ __forceinline__ void issue_p_v(float (&o)[kORegisters], const u32 (&p)[kPRegisters], u32 v) {
  const u64 b = column_operand(v, VTile::kPanelBytes);
#pragma unroll
  for (i32 step = 0; step < kBc / kStep; ++step) wgmma_rs<kDv>(o, p + 4 * step, b + in_units(VTile::row_step(step)));
  wgmma_commit_group();
}

// S = Q K^T of one warp's rows and 2 n keys once more, by the warp itself and slowly, with mma.sync. `k` is where these keys start.
template <i32 n> __device__ __forceinline__ void multiply_q_k_again(float (&s)[n], u32 q, u32 k, i32 warp, i32 lane) {
#pragma unroll
  for (i32 i = 0; i < n; ++i) s[i] = 0;
  const i32 q_row = 16 * warp + lane % 16, k_row = lane / 16 * kBlock + lane % 8;
#pragma unroll 1
  for (i32 step = 0; step < kD / kStep; ++step) {
    u32 a[4];
    ldmatrix_x4(a, q + QTile::offset(q_row, 2 * step + lane / 16));
    const u32 b_address = k + KTile::offset(k_row, 2 * step + lane / 8 % 2);
#pragma unroll
    for (i32 keys = 0; keys < 2 * n; keys += 16) {
      u32 b[4];
      ldmatrix_x4(b, b_address + keys * kPanelRowBytes);
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        const u32 b_half[2] = {b[2 * half], b[2 * half + 1]};
        mma_m16n8k16(*reinterpret_cast<float(*)[4]>(s + keys / 2 + 4 * half), a, b_half, Element{});
      }
    }
  }
  __syncwarp();  // all lanes have read K before one of them releases it
}
