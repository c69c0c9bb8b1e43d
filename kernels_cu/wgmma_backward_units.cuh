// The range of float16: P is multiplied by 2^kWeightExponent, so that the weights among many keys do not fall below it, and dP - delta by
// a power of two, the unit, which each tile of keys has its own of. Results are divided by both.
#pragma once

template <class T> struct IsHalf { static constexpr bool value = false; };
template <> struct IsHalf<half_t> { static constexpr bool value = true; };
constexpr bool kHalf = IsHalf<Element>::value;
constexpr i32 kWeightExponent = kHalf ? 14 : 0;
constexpr float kWeightUnit = 1 << kWeightExponent;

__device__ __forceinline__ float finite_size(float x) { return fabsf(x) < kInfinity ? fabsf(x) : 0; }

// Of each of the numbers, over the threads of a warpgroup
template <i32 n> __device__ __forceinline__ void max_of_warpgroup(float (&x)[n], float* shared, i32 barrier) {
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2)
#pragma unroll
    for (i32 i = 0; i < n; ++i) x[i] = fmaxf(x[i], __shfl_xor_sync(0xffffffff, x[i], step));
  bar_sync(barrier, kWarpgroup);  // the maxima before have been read
#pragma unroll
  for (i32 i = 0; i < n; ++i) shared[4 * i + threadIdx.x / 32 % 4] = x[i];  // the same of all lanes
  bar_sync(barrier, kWarpgroup);
#pragma unroll
  for (i32 i = 0; i < n; ++i) x[i] = fmaxf(fmaxf(shared[4 * i], shared[4 * i + 1]), fmaxf(shared[4 * i + 2], shared[4 * i + 3]));
}

// The power of two that brings the bound  |dO| |V| + |delta|  of |dP - delta| to between 1 and 2; `sizes` of dO, delta and V
__device__ __forceinline__ float unit_for(const float (&sizes)[3]) {
  const float bound = sqrtf(kDv) * sizes[0] * sizes[2] + sizes[1];
  const i32 exponent = static_cast<i32>(__float_as_uint(bound) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 - min(max(exponent, -60), 60)) << 23);
}

// The largest finite numbers of dO (of its rows' norms), delta and V that a tile of keys meets. `v` is the tile of V, of which
// `live_keys` count.
__device__ __forceinline__ void find_sizes(float (&sizes)[3], const BackwardWgmmaParams& a, const KeyTile& tile, const u8* v, i32 live_keys,
                                           float* shared, i32 barrier) {
  using Four = Vector<float, 4>;
  const Params& p = a.p;
  const i32 thread = threadIdx.x % kWarpgroup;
  const RowTiles rows = row_tiles(visibility(p, tile.batch, 0), tile.number * kBc, (tile.number + 1) * kBc);
#pragma unroll
  for (i32 i = 0; i < 3; ++i) sizes[i] = 0;
#pragma unroll 1
  for (i32 head = first_head(a, tile); head < first_head(a, tile) + heads_of(a, tile); ++head) {
    const i64 first = (static_cast<i64>(tile.batch) * p.heads + head) * p.statistics_rows;
#pragma unroll 4  // loads that are under way together
    for (i32 row = rows.first * kBr + 4 * thread; row < rows.end * kBr; row += 4 * kWarpgroup) {
      const Four dout = *reinterpret_cast<const Four*>(a.row_sizes + first + row), delta = *reinterpret_cast<const Four*>(p.row_delta + first + row);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        sizes[0] = fmaxf(sizes[0], finite_size(dout.x[e]));
        sizes[1] = fmaxf(sizes[1], finite_size(delta.x[e]));
      }
    }
  }
  constexpr i32 kChunks = VTile::kPanels * kSwizzleRows;
  for (i32 i = thread; i < live_keys * kChunks; i += kWarpgroup) {
    const auto chunk = *reinterpret_cast<const Vector<Element, kChunkElements>*>(v + VTile::offset(i / kChunks, i % kChunks));
#pragma unroll
    for (i32 e = 0; e < kChunkElements; ++e) sizes[2] = fmaxf(sizes[2], finite_size(to_real(chunk.x[e])));
  }
  max_of_warpgroup(sizes, shared, barrier);
}
