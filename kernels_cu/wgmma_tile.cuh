// The tiles of forward_wgmma, and the products S = Q K^T and O += P V.
#pragma once

constexpr i32 kSRegisters = kBc / 2, kPRegisters = kBc / 4, kORegisters = kDv / 2;

static_assert(kBc % kStep == 0 && kBc <= 256, "a wgmma is 16 deep in P V and up to 256 keys wide in Q K^T");

struct RowTile {
  i32 row0, head, batch;
};
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
// O = P V, plus O if `accumulate`
__device__ __forceinline__ void issue_p_v(float (&o)[kORegisters], const u32 (&p)[kPRegisters], u32 v, bool accumulate) {
  const u64 b = column_operand(v, VTile::kPanelBytes);
#pragma unroll
  for (i32 step = 0; step < kBc / kStep; ++step) wgmma_rs<kDv>(o, p + 4 * step, b + in_units(VTile::row_step(step)), accumulate || step > 0);
  wgmma_commit_group();
}

// The elements `column` and `column` + 1 of row `row` of a matrix, and zeros beyond it, as TMA fills them in. Without branches, which would
// cost the main loop its uniform registers.
__device__ __forceinline__ u32 load_pair(const Element* matrix, i64 stride, i32 row, i32 rows, i32 column, i32 columns) {
  const auto* const x = reinterpret_cast<const unsigned short*>(matrix + min(row, rows - 1) * stride);
  const u32 pair = x[min(column, columns - 1)] | static_cast<u32>(x[min(column + 1, columns - 1)]) << 16;
  return row >= rows || column >= columns ? 0 : column + 1 < columns ? pair : pair & 0xffff;
}

// S = Q K^T of the rows of a warp and 2 n keys from `key` on once more, by the warp itself with mma.sync, and slowly: from device memory,
// since the tiles in shared memory are others' by now. of.row0 and of.row0 + 8 are the lane's rows.
template <i32 n> __device__ __forceinline__ void multiply_q_k_again(float (&s)[n], const Params& p, const RowTile& of, i32 key, i32 lane) {
  const Element* const q = p.q + of.batch * p.q_batch + of.head * p.q_head;
  const Element* const k = p.k + of.batch * p.k_batch + of.head / p.group * p.k_head;
#pragma unroll
  for (i32 i = 0; i < n; ++i) s[i] = 0;
#pragma unroll 1
  for (i32 step = 0; step < kD / kStep; ++step) {
    const i32 column = kStep * step + 2 * (lane % 4);
    u32 a[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) a[i] = load_pair(q, p.q_row, of.row0 + 8 * (i % 2), p.n_q, column + kBlock * (i / 2), p.d);
#pragma unroll
    for (i32 block = 0; block < n / 4; ++block) {
      u32 b[2];
#pragma unroll
      for (i32 i = 0; i < 2; ++i) b[i] = load_pair(k, p.k_row, key + kBlock * block + lane / 4, p.n_k, column + kBlock * i, p.d);
      mma_m16n8k16(*reinterpret_cast<float(*)[4]>(s + 4 * block), a, b, Element{});
    }
  }
}
