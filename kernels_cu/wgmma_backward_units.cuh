// The range of float16: P is multiplied by 2^kWeightExponent, so that the weights among many keys do not fall below it, and dP - delta by
// a power of two, the unit, which each tile of keys has its own of. Results are divided by both.
#pragma once

template <class T> struct IsHalf { static constexpr bool value = false; };
template <> struct IsHalf<half_t> { static constexpr bool value = true; };
constexpr bool kHalf = IsHalf<Element>::value;
constexpr i32 kWeightExponent = kHalf ? 14 : 0;
constexpr float kWeightUnit = 1 << kWeightExponent;

__device__ __forceinline__ float finite_size(float x) { return fabsf(x) < kInfinity ? fabsf(x) : 0; }

// Over the threads of a warpgroup
__device__ __forceinline__ float max_of_warpgroup(float x, float* shared, i32 barrier) {
#pragma unroll
  for (i32 step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32 % 4] = x;
  bar_sync(barrier, kWarpgroup);
  return fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
}

// The power of two that brings the bound  |dO| |V| + |delta|  of |dP - delta|, over what is finite, to between 1 and 2. `v` is the tile
// of V, of which `live_keys` count.
__device__ __forceinline__ float unit_of_ds(const BackwardWgmmaParams& a, const KeyTile& tile, const u8* v, i32 live_keys, float* shared, i32 barrier) {
  const i32 thread = threadIdx.x % kWarpgroup;
  float dout_size = 0, delta_size = 0, v_size = 0;
#pragma unroll 1
  for (Walk walk(a, tile); walk.left > 0; walk.advance(a.p)) {
    const i64 first = (static_cast<i64>(tile.batch) * a.p.heads + walk.head(a.p, tile)) * a.p.statistics_rows + walk.row_tile * kBr;
    for (i32 row = thread; row < kBr; row += kWarpgroup) {
      dout_size = fmaxf(dout_size, finite_size(a.row_sizes[first + row]));
      delta_size = fmaxf(delta_size, finite_size(a.p.row_delta[first + row]));
    }
  }
  constexpr i32 kChunks = VTile::kPanels * kSwizzleRows;
  for (i32 i = thread; i < live_keys * kChunks; i += kWarpgroup) {
    const auto chunk = *reinterpret_cast<const Vector<Element, kChunkElements>*>(v + VTile::offset(i / kChunks, i % kChunks));
#pragma unroll
    for (i32 e = 0; e < kChunkElements; ++e) v_size = fmaxf(v_size, finite_size(to_real(chunk.x[e])));
  }
  dout_size = max_of_warpgroup(dout_size, shared, barrier);
  delta_size = max_of_warpgroup(delta_size, shared + 4, barrier);
  v_size = max_of_warpgroup(v_size, shared + 8, barrier);
  const float bound = sqrtf(kDv) * dout_size * v_size + delta_size;
  const i32 exponent = static_cast<i32>(__float_as_uint(bound) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 - min(max(exponent, -60), 60)) << 23);
}
