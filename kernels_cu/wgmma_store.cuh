// The end of rows: O and LSE to device memory, from the accumulators of a warpgroup (wgmma_panels.cuh).
#pragma once

// A warp's 16 rows from `rows` on, as far as they are live, and of them the first `columns` columns: panel after panel by way of shared
// memory, `stage`, where rows become whole again.
template <i32 kColumns>
__device__ __forceinline__ void store_staged(Element* rows, i64 stride, i32 live_rows, i32 columns, const float (&x)[kColumns / 2],
                                             const float (&factor)[2], u8* stage, i32 lane) {
  constexpr i32 kChunks = kColumns / kChunkElements;
  const auto place = [&](i32 row, i32 chunk) { return row * kPanelRowBytes + (chunk ^ row % kSwizzleRows) * kChunkBytes; };
#pragma unroll
  for (i32 panel = 0; panel < kChunks; panel += kSwizzleRows) {  // its first chunk
    __syncwarp();  // the panel before has been read, or that of the rows before
#pragma unroll
    for (i32 chunk = 0; chunk < min(kSwizzleRows, kChunks - panel); chunk += 2) {
      u32 word[4];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 at = 4 * (panel + chunk + i / 2) + 2 * (i % 2);
        word[i] = pack2(x[at] * factor[i % 2], x[at + 1] * factor[i % 2], Element{});
      }
      stmatrix_x4(smem_address(stage) + place(lane % 16, chunk + lane / 16), word);
    }
    __syncwarp();
#pragma unroll
    for (i32 first = 0; first < 16; first += 4) {
      const i32 row = first + lane / 8, chunk = lane % 8;
      if (row < live_rows && (panel + chunk) * kChunkElements < columns)
        *reinterpret_cast<Vector<u32, 4>*>(rows + row * stride + (panel + chunk) * kChunkElements) =
            *reinterpret_cast<const Vector<u32, 4>*>(stage + place(row, chunk));
    }
  }
}

// Writes LSE of rows whose last weights are known, and returns 1 / l of the lane's two, of.row0 and of.row0 + 8. Rows beyond the live ones, and
// rows that saw no key, are empty: -inf and 0.
__device__ __forceinline__ void end_rows(const Params& p, const Rows& rows, const RowTile& of, i32 lane, float c, float (&per_l)[2]) {
  const i32 query_length = visibility(p, of.batch, of.head).query_length;
  float l[2];
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    l[r] = sum_over_quad(rows.l[r]);
    per_l[r] = of.row0 + 8 * r >= query_length || l[r] == 0 ? 0 : rcp_approx_ftz(l[r]);
  }
  const i32 r = lane % 4, row = of.row0 + 8 * r;  // the first two of the four lanes that share rows write one each
  if (p.lse != nullptr && r < 2 && row < p.n_q)
    p.lse[(static_cast<i64>(of.batch) * p.heads + of.head) * p.n_q + row] =
        (r == 0 ? per_l[0] : per_l[1]) == 0 ? -static_cast<Lse>(kInfinity) : Rows::log_sum_exp(r == 0 ? rows.m[0] : rows.m[1], r == 0 ? l[0] : l[1], c);
}

// O / l, and 0 for an empty row, whatever was in O
__device__ __forceinline__ void store_rows(const Params& p, float (&o)[kORegisters], const float (&per_l)[2], const RowTile& of, u8* stage,
                                           i32 lane) {
  if (__any_sync(0xffffffff, per_l[0] == 0 || per_l[1] == 0)) {
#pragma unroll
    for (i32 i = 0; i < kORegisters; ++i) o[i] = per_l[row_of_s(i)] == 0 ? 0 : o[i];
  }
  const i32 first_row = of.row0 - lane / 4;
  Element* const out = p.out + of.batch * p.out_batch + of.head * p.out_head + first_row * p.out_row;
  store_staged<kDv>(out, p.out_row, p.n_q - first_row, p.d_v, o, per_l, stage, lane);
}
