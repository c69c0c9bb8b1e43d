// The end of rows: O and LSE to device memory, from the accumulators of a warpgroup (wgmma_panels.cuh).
#pragma once

// A warp's 16 rows from `row` on leave by way of shared memory, `stage`, from where TMA takes them, as many panels at a time as find room.
// They may be on their way still when this returns: lane 0 waits for them, before the stage is written again and at the end of the kernel.
template <i32 kColumns>
__device__ __forceinline__ void store_staged(const TensorMap& map, i32 row, i32 head, i32 batch, const float (&x)[kColumns / 2],
                                             const float (&factor)[2], u32 stage, i32 lane) {
  constexpr i32 kPanels = PanelTile<kWarpRows, kColumns>::kPanels, kChunks = kColumns / kChunkElements;
#pragma unroll
  for (i32 first = 0; first < kPanels; first += kStagePanels) {
    const i32 end = min(first + kStagePanels, kPanels);
    if (lane == 0) bulk_wait_group_read<0>();
    __syncwarp();
#pragma unroll
    for (i32 chunk = first * kSwizzleRows; chunk < min(end * kSwizzleRows, kChunks); chunk += 2) {
      u32 word[4];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 at = 4 * (chunk + i / 2) + 2 * (i % 2);
        word[i] = pack2(x[at] * factor[i % 2], x[at + 1] * factor[i % 2], Element{});
      }
      stmatrix_x4(stage + PanelTile<kWarpRows, kColumns>::offset(lane % 16, chunk - first * kSwizzleRows + lane / 16), word);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (i32 panel = first; panel < end; ++panel)
        tma_store_4d(&map, stage + (panel - first) * kWarpPanelBytes, panel * kPanelColumns, row, head, batch);
      bulk_commit_group();
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
    p.lse[of.batch * p.lse_batch + of.head * p.lse_head + row] =
        (r == 0 ? per_l[0] : per_l[1]) == 0 ? -static_cast<Lse>(kInfinity) : Rows::log_sum_exp(r == 0 ? rows.m[0] : rows.m[1], r == 0 ? l[0] : l[1], c);
}

// O / l, and 0 for an empty row, whatever was in O
__device__ __forceinline__ void store_rows(const TensorMap& map, float (&o)[kORegisters], const float (&per_l)[2], const RowTile& of, u32 stage,
                                           i32 lane) {
  if (__any_sync(0xffffffff, per_l[0] == 0 || per_l[1] == 0)) {
#pragma unroll
    for (i32 i = 0; i < kORegisters; ++i) o[i] = per_l[row_of_s(i)] == 0 ? 0 : o[i];
  }
  store_staged<kDv>(map, of.row0 - lane / 4, of.head, of.batch, o, per_l, stage, lane);
}
