// What the backward pass needs of a row beside q and dO: its log-sum-exp, and
//   delta = rowsum(dO o O) - dlse,  of which  dP - delta  is the derivative by the score, once it is weighted with P.
// A row that sees no key, one beyond the live ones and one that only fills up the last tile get an infinite log-sum-exp: weights of 0.
#pragma once

constexpr i32 kStatisticsLanes = 8;  // neighbouring lanes that share a row
constexpr i32 kStatisticsRows = kThreads / kStatisticsLanes;  // of a block

// The grid has ceil(statistics_rows / kStatisticsRows) blocks for each head of each batch entry. write(head, row, lse, delta) is called once
// for each row; `head` counts those of all batch entries.
template <class Write> __device__ __forceinline__ void for_row_statistics(const Params& p, const Write& write) {
  const i32 blocks_of_head = (p.statistics_rows + kStatisticsRows - 1) / kStatisticsRows;
  const i32 row = static_cast<i32>(blockIdx.x % blocks_of_head) * kStatisticsRows + threadIdx.x / kStatisticsLanes;
  const i32 head = static_cast<i32>(blockIdx.x / blocks_of_head) % p.heads;
  const i32 batch = static_cast<i32>(blockIdx.x / blocks_of_head) / p.heads;
  const i32 lane = threadIdx.x % kStatisticsLanes;
  const bool live = row < visibility(p, batch, head).query_length;

  Real delta = 0;
  if (live) {
    const Element* const out = p.out + batch * p.out_batch + head * p.out_head + row * p.out_row;
    const Element* const dout = p.dout + batch * p.dout_batch + head * p.dout_head + row * p.dout_row;
#pragma unroll 2  // more would take registers, and so warps
    for (i32 column = lane * kElementsPerAccess; column < p.d_v; column += kStatisticsLanes * kElementsPerAccess) {
      const ElementVector o = *reinterpret_cast<const ElementVector*>(out + column);
      const ElementVector grad = *reinterpret_cast<const ElementVector*>(dout + column);
#pragma unroll
      for (i32 e = 0; e < kElementsPerAccess; ++e) delta += to_real(o.x[e]) * to_real(grad.x[e]);
    }
  }
#pragma unroll
  for (i32 step = kStatisticsLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffff, delta, step);
  if (lane != 0 || row >= p.statistics_rows) return;

  const Lse lse = live ? p.lse[batch * p.lse_batch + head * p.lse_head + row * p.lse_row] : -static_cast<Lse>(kInfinity);
  const bool empty = lse == -static_cast<Lse>(kInfinity);
  if (!empty && p.dlse != nullptr) delta -= static_cast<Real>(p.dlse[batch * p.dlse_batch + head * p.dlse_head + row * p.dlse_row]);
  write(static_cast<i64>(batch) * p.heads + head, row, empty ? static_cast<Lse>(kInfinity) : lse, empty ? Real(0) : delta);
}
__device__ __forceinline__ void write_row_statistics(const Params& p) {
  for_row_statistics(p, [&](i64 head, i32 row, Lse lse, Real delta) {
    p.row_lse[head * p.statistics_rows + row] = lse;
    p.row_delta[head * p.statistics_rows + row] = delta;
  });
}

// |dO| of every row, as write_row_statistics shares them out
__device__ __forceinline__ void write_row_sizes(const Params& p, float* row_sizes) {
  const i32 blocks_of_head = (p.statistics_rows + kStatisticsRows - 1) / kStatisticsRows;
  const i32 row = static_cast<i32>(blockIdx.x % blocks_of_head) * kStatisticsRows + threadIdx.x / kStatisticsLanes;
  const i32 head = static_cast<i32>(blockIdx.x / blocks_of_head) % p.heads;
  const i32 batch = static_cast<i32>(blockIdx.x / blocks_of_head) / p.heads;
  const i32 lane = threadIdx.x % kStatisticsLanes;
  float square = 0;
  if (row < visibility(p, batch, head).query_length) {
    const Element* const dout = p.dout + batch * p.dout_batch + head * p.dout_head + row * p.dout_row;
    for (i32 column = lane; column < p.d_v; column += kStatisticsLanes) square = fmaf(to_real(dout[column]), to_real(dout[column]), square);
  }
#pragma unroll
  for (i32 step = kStatisticsLanes / 2; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffff, square, step);
  if (lane == 0 && row < p.statistics_rows) row_sizes[(static_cast<i64>(batch) * p.heads + head) * p.statistics_rows + row] = sqrtf(square);
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
