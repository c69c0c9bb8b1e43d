// The end of rows: O and LSE to device memory, 16 bytes at a time, straight from the accumulators of a warpgroup (wgmma_tile.cuh).
#pragma once

// Four lanes give four words each and get word i of each of them, where i is the lane's number.
__device__ __forceinline__ void transpose_in_quad(u32 (&word)[4], i32 lane) {
#pragma unroll
  for (i32 step = 1; step < 4; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      if ((i & step) == 0) {
        const u32 got = __shfl_xor_sync(0xffffffff, upper ? word[i] : word[i + step], step);
        (upper ? word[i] : word[i + step]) = got;
      }
  }
}

// O / l and LSE of the rows row0 and row0 + 8 of a head. Rows beyond the live ones, and rows that saw no key, are 0 and -inf.
__device__ __forceinline__ void store_rows(const Params& p, const float (&o)[kORegisters], const Rows& rows, i32 row0, i32 head, i32 batch,
                                           i32 lane, float c) {
  const i32 query_length = visibility(p, batch, head).query_length;
  float per_l[2];
  bool empty[2];
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    const i32 row = row0 + 8 * r;
    const float l = sum_over_quad(rows.l[r]);
    empty[r] = row >= query_length || l == 0;
    per_l[r] = 1 / l;
    if (p.lse != nullptr && lane % 4 == 0 && row < p.n_q)
      p.lse[(static_cast<i64>(batch) * p.heads + head) * p.n_q + row] =
          empty[r] ? -static_cast<Lse>(kInfinity) : rows.log_sum_exp(r, l, c);
  }
  // Pieces of eight columns of a row lie across the four lanes of a quad, which store four of them at a time, one each.
  constexpr i32 kBlocks = kDv / kBlock;
  constexpr bool kOfOneRow = kBlocks % 4 == 0;  // else two of each row
  Element* const out = p.out + batch * p.out_batch + head * p.out_head + row0 * p.out_row;
#pragma unroll
  for (i32 first = 0; first < 2 * kBlocks; first += 4) {
    const auto row_of = [&](i32 i) { return kOfOneRow ? first / kBlocks : i % 2; };
    const auto block_of = [&](i32 i) { return kOfOneRow ? first % kBlocks + i : first / 2 + i / 2; };
    u32 word[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 r = row_of(i), x = 4 * block_of(i) + 2 * r;
      word[i] = empty[r] ? 0 : pack2(o[x] * per_l[r], o[x + 1] * per_l[r], Element{});
    }
    transpose_in_quad(word, lane);
    const i32 r = row_of(lane % 4), column = kBlock * block_of(lane % 4);
    if (row0 + 8 * r < p.n_q && column < p.d_v)
      *reinterpret_cast<Vector<u32, 4>*>(out + 8 * r * p.out_row + column) = {word[0], word[1], word[2], word[3]};
  }
}
