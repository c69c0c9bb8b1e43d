// Tiles of Element in shared memory as TMA writes them and wgmma reads them, and the products S = Q K^T and O += P V.
//
// A tile is a row of panels of 64 columns; in a panel a row is 128 bytes, eight 16-byte chunks, and chunk c of row r takes the place of
// chunk c ^ (r % 8): the 128-byte swizzle. Columns beyond the last panel's are zeros, which the products leave out.
//
// In an accumulator of a warpgroup (64 rows), warp w owns rows 16 w to 16 w + 15. Of these, lane 4 g + t holds rows g and g + 8, and of
// each block of eight columns the columns 2t and 2t + 1: register 4 b + 2 r + e is row g + 8 r, column 8 b + 2 t + e.
#pragma once

constexpr i32 kPanelColumns = 64;
constexpr i32 kPanelRowBytes = 128;
constexpr i32 kChunkBytes = 16;
constexpr i32 kChunkElements = kChunkBytes / sizeof(Element);
constexpr i32 kSwizzleRows = 8;                             // rows after which the swizzle repeats
constexpr i32 kAtomBytes = kSwizzleRows * kPanelRowBytes;   // where tiles are aligned to
constexpr i32 kWarpgroup = 128;                             // threads
constexpr i32 kWarpgroupRows = 64;
constexpr i32 kStep = 16;                                   // depth of one wgmma
constexpr i32 kStepsPerPanel = kPanelColumns / kStep;
constexpr i32 kBlock = 8;                                   // columns of a block of an accumulator
constexpr i32 kSRegisters = kBc / 2, kPRegisters = kBc / 4, kORegisters = kDv / 2;

static_assert(sizeof(Element) == 2, "wgmma multiplies 16-bit elements here");
static_assert(kBc % kStep == 0 && kBc <= 256, "a wgmma is 16 deep in P V and up to 256 keys wide in Q K^T");

template <i32 kRows, i32 kColumns> struct PanelTile {
  static constexpr i32 kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr i32 kPanelBytes = kRows * kPanelRowBytes;
  static constexpr i32 kBytes = kPanels * kPanelBytes;

  // Where the columns of step `step` of a product over columns start
  static __device__ __forceinline__ constexpr i32 column_step(i32 step) {
    return step / kStepsPerPanel * kPanelBytes + step % kStepsPerPanel * kStep * static_cast<i32>(sizeof(Element));
  }
  // Where the rows of step `step` of a product over rows start
  static __device__ __forceinline__ constexpr i32 row_step(i32 step) { return step * kStep * kPanelRowBytes; }
  // Where chunk `chunk` of a row lies
  static __device__ __forceinline__ i32 offset(i32 row, i32 chunk) {
    return chunk / kSwizzleRows * kPanelBytes + row * kPanelRowBytes + (chunk % kSwizzleRows ^ row % kSwizzleRows) * kChunkBytes;
  }
};
using QTile = PanelTile<kWarpgroupRows, kD>;  // of one warpgroup
using KTile = PanelTile<kBc, kD>;
using VTile = PanelTile<kBc, kDv>;

// ---- what wgmma is told of an operand: all in units of 16 bytes ----
__device__ __forceinline__ constexpr i32 in_units(i32 bytes) { return bytes >> 4; }
__device__ __forceinline__ u64 descriptor(u32 address, i32 leading_bytes) {
  constexpr u64 kSwizzle128 = 1ULL << 62;
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(in_units(leading_bytes)) << 16 |
         static_cast<u64>(in_units(kAtomBytes)) << 32 | kSwizzle128;
}
// Rows of the operand are rows of the tile: from one eight of them to the next it is an atom.
__device__ __forceinline__ u64 row_operand(u32 address) { return descriptor(address, kChunkBytes); }
// Columns of the operand are rows of the tile: its rows go from panel to panel, too.
__device__ __forceinline__ u64 column_operand(u32 address, i32 panel_bytes) { return descriptor(address, panel_bytes); }

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
