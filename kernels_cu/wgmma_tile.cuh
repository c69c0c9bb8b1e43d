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

// Four elements of row `row` of a matrix, from `column` on, a multiple of 4; and zeros beyond it, as TMA fills them in. Without branches,
// which would cost the main loop its uniform registers. Rows start at multiples of 16 bytes; kWhole: their lengths are multiples of 4.
template <bool kWhole>
__device__ __forceinline__ Vector<u32, 2> load_four(const Element* matrix, i64 stride, i32 row, i32 rows, i32 column, i32 columns) {
  const Element* const x = matrix + min(row, rows - 1) * stride;
  Vector<u32, 2> four;
  if (kWhole) {
    four = *reinterpret_cast<const Vector<u32, 2>*>(x + min(column, columns - 4));
    if (row >= rows || column >= columns) four = {};
  } else {
    u32 bits[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      bits[i] = reinterpret_cast<const unsigned short*>(x)[min(column + i, columns - 1)];
      if (row >= rows || column + i >= columns) bits[i] = 0;
    }
    four = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
  }
  return four;
}

// S = Q K^T of the rows of a warp and 2 n keys from `key` on once more, by the warp itself with mma.sync, from device memory, since the
// tiles in shared memory are others' by now. of.row0 and of.row0 + 8 are the lane's rows. Of each 16 columns a lane takes four that follow
// each other, in both factors: a product does not mind their order.
template <bool kWhole, i32 n>
__device__ __forceinline__ void multiply_q_k_again(float (&s)[n], const Params& p, const RowTile& of, i32 key, i32 lane) {
  constexpr i32 kAtOnce = kWhole ? 4 : 1;  // steps whose loads are under way together
  const Element* const q = p.q + of.batch * p.q_batch + of.head * p.q_head;
  const Element* const k = p.k + of.batch * p.k_batch + of.head / p.group * p.k_head;
#pragma unroll
  for (i32 i = 0; i < n; ++i) s[i] = 0;
#pragma unroll kAtOnce
  for (i32 step = 0; step < kD / kStep; ++step) {
    const i32 column = kStep * step + 4 * (lane % 4);
    Vector<u32, 2> a[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) a[r] = load_four<kWhole>(q, p.q_row, of.row0 + 8 * r, p.n_q, column, p.d);
#pragma unroll
    for (i32 block = 0; block < n / 4; ++block) {
      const Vector<u32, 2> b = load_four<kWhole>(k, p.k_row, key + kBlock * block + lane / 4, p.n_k, column, p.d);
      mma_m16n8k16(*reinterpret_cast<float(*)[4]>(s + 4 * block), {a[0].x[0], a[1].x[0], a[0].x[1], a[1].x[1]}, b.x, Element{});
    }
  }
}
template <i32 n> __device__ __forceinline__ void multiply_q_k_again(float (&s)[n], const Params& p, const RowTile& of, i32 key, i32 lane) {
  if (kConsumers < 4 && p.d % 4 == 0)  // four warpgroups have no registers for it
    multiply_q_k_again<true>(s, p, of, key, lane);
  else
    multiply_q_k_again<false>(s, p, of, key, lane);
}
