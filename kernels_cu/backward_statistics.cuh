// What the backward pass needs of a row beside q and dO: its log-sum-exp, and
//   delta = rowsum(dO o O) - dlse,  of which  dP - delta  is the derivative by the score, once it is weighted with P.
// A row that sees no key, one beyond the live ones and one that only fills up the last tile get an infinite log-sum-exp: weights of 0.
#pragma once

constexpr i32 kStatisticsLanes = 4;  // neighbouring ones that share a row
constexpr i32 kStatisticsRows = kThreads / kStatisticsLanes;  // of a block

// Of a row: its log-sum-exp, delta and, where it is asked for, |dO|
struct RowStatistics {
  Lse lse;
  Real delta;
  float dout_size;
};

// The grid has ceil(statistics_rows / kStatisticsRows) blocks for each head of each batch entry. write(head, row, statistics) is called once
// for each row; `head` counts those of all batch entries.
template <bool kSized, class Write> __device__ __forceinline__ void for_row_statistics(const Params& p, const Write& write) {
  const i32 blocks_of_head = (p.statistics_rows + kStatisticsRows - 1) / kStatisticsRows;
  const i32 row = static_cast<i32>(blockIdx.x % blocks_of_head) * kStatisticsRows + threadIdx.x / kStatisticsLanes;
  const i32 head = static_cast<i32>(blockIdx.x / blocks_of_head) % p.heads;
  const i32 batch = static_cast<i32>(blockIdx.x / blocks_of_head) / p.heads;
  const i32 lane = threadIdx.x % kStatisticsLanes;

  Lse lse = -static_cast<Lse>(kInfinity);
  Real delta = 0, dlse = 0;
  float square = 0;
  if (row < visibility(p, batch, head).query_length) {  // all that is read of a row is under way at once
    lse = p.lse[batch * p.lse_batch + head * p.lse_head + row * p.lse_row];
    if (p.dlse != nullptr) dlse = static_cast<Real>(p.dlse[batch * p.dlse_batch + head * p.dlse_head + row * p.dlse_row]);
    const Element* const out = p.out + batch * p.out_batch + head * p.out_head + row * p.out_row;
    const Element* const dout = p.dout + batch * p.dout_batch + head * p.dout_head + row * p.dout_row;
    constexpr i32 kColumns = kStatisticsLanes * kElementsPerAccess, kAccesses = (kDv + kColumns - 1) / kColumns;
    constexpr i32 kTogether = kAccesses < 4 ? kAccesses : 4;  // more would take registers, and so warps
    for (i32 first = lane * kElementsPerAccess; first < p.d_v; first += kTogether * kColumns) {
      ElementVector o[kTogether] = {}, grad[kTogether] = {};
#pragma unroll
      for (i32 i = 0; i < kTogether; ++i)
        if (const i32 column = first + i * kColumns; column < p.d_v) {
          o[i] = *reinterpret_cast<const ElementVector*>(out + column);
          grad[i] = *reinterpret_cast<const ElementVector*>(dout + column);
        }
#pragma unroll
      for (i32 i = 0; i < kTogether * kElementsPerAccess; ++i) {
        const Real of_dout = to_real(grad[i / kElementsPerAccess].x[i % kElementsPerAccess]);
        delta += to_real(o[i / kElementsPerAccess].x[i % kElementsPerAccess]) * of_dout;
        if constexpr (kSized) square = fmaf(of_dout, of_dout, square);
      }
    }
  }
#pragma unroll
  for (i32 step = kStatisticsLanes / 2; step > 0; step /= 2) {
    delta += __shfl_xor_sync(0xffffffff, delta, step);
    if constexpr (kSized) square += __shfl_xor_sync(0xffffffff, square, step);
  }
  if (lane != 0 || row >= p.statistics_rows) return;
  const bool empty = lse == -static_cast<Lse>(kInfinity);
  const RowStatistics of_row = {empty ? static_cast<Lse>(kInfinity) : lse, empty ? Real(0) : delta - dlse, sqrtf(square)};
  write(static_cast<i64>(batch) * p.heads + head, row, of_row);
}
template <bool kSized = false> __device__ __forceinline__ void write_row_statistics(const Params& p, float* row_sizes = nullptr) {
  for_row_statistics<kSized>(p, [&](i64 head, i32 row, const RowStatistics& of_row) {
    const i64 at = head * p.statistics_rows + row;
    p.row_lse[at] = of_row.lse;
    p.row_delta[at] = of_row.delta;
    if constexpr (kSized) row_sizes[at] = of_row.dout_size;
  });
}

// The statistics of one row. A log-sum-exp wider than the scores is split in two, so that nothing is lost in  score - lse.
struct RowGradient {
  Real lse, lse_low, delta;

  __device__ __forceinline__ Real weight(Real score) const { return exp_of(sizeof(Lse) > sizeof(Real) ? (score - lse) - lse_low : score - lse); }
};

__device__ __forceinline__ RowGradient row_gradient(const Lse* row_lse, const Real* row_delta, i32 row) {
  const Lse lse = row_lse[row];
  const Real high = static_cast<Real>(lse);
  const Real low = lse == static_cast<Lse>(kInfinity) ? Real(0) : static_cast<Real>(lse - static_cast<Lse>(high));
  return {high, low, row_delta[row]};
}
