// The tiles of backward_wgmma, and its products. A consumer warpgroup owns 64 keys of a tile; or the tile has only 64 keys and both own
// them, one for dV and one for dK: registers have room for that up to 256 columns. dQ is another warpgroup's, or another kernel's.
#pragma once

constexpr i32 kKeysOfConsumer = kWarpgroupRows;
constexpr bool kSplit = kBc == kKeysOfConsumer;  // whether consumers share out the products, rather than the keys
constexpr i32 kSRegisters = kBr / 2, kPRegisters = kBr / 4, kDkRegisters = kD / 2, kDvRegisters = kDv / 2;

// dQ is summed in pieces: 64 rows of a panel
constexpr i32 kDqColumns = kD < kPanelColumns ? kD : kPanelColumns;
constexpr i32 kDqRegisters = kDqColumns / 2;
constexpr i32 kDqPanels = (kD + kPanelColumns - 1) / kPanelColumns;
constexpr i32 kDqPieces = kBr / kWarpgroupRows * kDqPanels;
constexpr i32 kDqPieceFloats = kWarpgroupRows * kDqColumns, kDqPieceBytes = kDqPieceFloats * 4;

static_assert(kConsumers == 2 && (kSplit || kBc == kKeysOfConsumer * kConsumers), "consumers own 64 keys each, or share them");
static_assert(kBr % kWarpgroupRows == 0 && kBr <= 256, "dS K has 64 rows at a time, and K Q^T up to 256 columns");

using QTile = PanelTile<kBr, kD>;
using DoutTile = PanelTile<kBr, kDv>;
using KTile = PanelTile<kBc, kD>;
using VTile = PanelTile<kBc, kDv>;
using DsTile = PanelTile<kBc, kBr>;  // dS^T: a row for each key

// ---- issued here, waited for by the caller ----
// S^T = K Q^T and dP^T = V dO^T of the 64 keys that start at `keys`
template <i32 kColumns> __device__ __forceinline__ void issue_keys_by_rows(float (&s)[kSRegisters], u32 keys, u32 rows) {
  using Keys = PanelTile<kBc, kColumns>;
  using Rows = PanelTile<kBr, kColumns>;
  const u64 a = row_operand(kSplit ? opaque(keys) : keys), b = row_operand(kSplit ? opaque(rows) : rows);
  wgmma_ss_first<kBr>(s, a, b);
#pragma unroll
  for (i32 step = 1; step < kColumns / kStep; ++step)
    wgmma_ss<kBr>(s, a + in_units(Keys::column_step(step)), b + in_units(Rows::column_step(step)), true);
  wgmma_commit_group();
}
// dV += P^T dO and dK += dS^T Q. An instruction is of 128 columns at most, for which a thread has the registers in any block.
constexpr i32 kMostColumns = 128;
template <i32 kColumns>
__device__ __forceinline__ void issue_weights_by_rows(float (&sum)[kColumns / 2], const u32 (&weights)[kPRegisters], u32 rows) {
  using Rows = PanelTile<kBr, kColumns>;
  const u64 b = column_operand(rows, Rows::kPanelBytes);
#pragma unroll
  for (i32 step = 0; step < kBr / kStep; ++step) {
    wgmma_rs<(kColumns < kMostColumns ? kColumns : kMostColumns)>(sum, weights + 4 * step, b + in_units(Rows::row_step(step)));
    if constexpr (kColumns > kMostColumns)
      wgmma_rs<kColumns - kMostColumns>(sum + kMostColumns / 2, weights + 4 * step,
                                        b + in_units(Rows::row_step(step) + kMostColumns / kPanelColumns * Rows::kPanelBytes));
  }
  wgmma_commit_group();
}
// A piece of dS K: of dS^T the panel that starts at `ds`, of K the one at `k`
__device__ __forceinline__ void issue_ds_k(float (&dq)[kDqRegisters], u32 ds, u32 k) {
  const u64 a = column_operand(ds, DsTile::kPanelBytes), b = column_operand(k, KTile::kPanelBytes);
  wgmma_ts_first<kDqColumns>(dq, a, b);
#pragma unroll
  for (i32 step = 1; step < kBc / kStep; ++step)
    wgmma_ts<kDqColumns>(dq, a + in_units(DsTile::row_step(step)), b + in_units(KTile::row_step(step)));
  wgmma_commit_group();
}
