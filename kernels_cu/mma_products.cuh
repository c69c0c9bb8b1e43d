// S = Q K^T and O += P V of one warp on tensor cores, fragment by fragment.
//
// P is made of S block by block, when the product needs it (`weigh`), so that exponentials are computed under products.
// A warp owns kRowBlocks blocks of 16 rows; fragments are those of mma_fragments.cuh.
// 16-bit elements: the accumulators of S, rounded and packed in pairs, are the operand P as they stand. Tensor cores cut off what they add
// to an accumulator; over so many keys that this would show, P V of a tile is summed from zero (kTileSums) and added to O outside them.
// float: 3xTF32 (mma_tf32.cuh). The k indices t and t + 4 of P V stand for the keys 2t and 2t + 1, which makes P's accumulators an operand
// without a shuffle.
#pragma once

constexpr i32 kRowBlocks = kBr / (kWarps * kRowBlock);
constexpr i32 kKeyBlocks = kBc / kColumnBlock;
constexpr i32 kOutBlocks = kDv / kColumnBlock;
constexpr i32 kQkSteps = TileLayout<kD>::kChunks / kStepChunks;

static_assert(kBr % (kWarps * kRowBlock) == 0, "warps own blocks of 16 rows");
static_assert(kBc % (2 * kColumnBlock) == 0, "K and V are read in blocks of 16 keys");

using SAccumulators = float[kRowBlocks][kKeyBlocks][4];
constexpr i32 kSValues = kRowBlocks * kKeyBlocks * 4;
__device__ __forceinline__ float& value_of(SAccumulators& s, i32 i) { return s[i / (4 * kKeyBlocks)][i / 4 % kKeyBlocks][i % 4]; }
__device__ __forceinline__ constexpr i32 row_of_value(i32 i) { return i / (4 * kKeyBlocks) * 2 + i % 4 / 2; }  // its slot
using OAccumulators = float[kRowBlocks][kOutBlocks][4];
using QFragments = u32[kQkSteps][kRowBlocks][4];

// ---- 16-bit elements ----
template <class T> struct Products {
  template <class QStep> static __device__ __forceinline__ void multiply_q_k(SAccumulators& s, QStep q_step, const u8* k_tile, Lane lane) {
    using K = TileLayout<kD>;
    const u32 k_address = piece_by_chunks<kD>(k_tile, 0, lane);
#pragma unroll
    for (i32 step = 0; step < kQkSteps; ++step) {
      u32 q[kRowBlocks][4];
      q_step(q, step);
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += 2) {
        u32 k[4];
        ldmatrix_x4(k, K::shifted(k_address, j * kColumnBlock, step * kStepChunks));
#pragma unroll
        for (i32 i = 0; i < kRowBlocks; ++i) {
          multiply_block(s[i][j], q[i], k[0], k[1], T{});
          multiply_block(s[i][j + 1], q[i], k[2], k[3], T{});
        }
      }
    }
  }

  // O += P V; to `sums`, by slot, those of the rows of P
  template <class Weigh>
  static __device__ __forceinline__ void multiply_p_v(OAccumulators& o, SAccumulators& s, Weigh weigh, const u8* v_tile, i32, Lane lane,
                                                      float (&sums)[2 * kRowBlocks]) {
    float of_tile[kRowBlocks][4] = {};
    const u32 ones = packed(1.0f, 1.0f, T{});
    using V = TileLayout<kDv>;
    const u32 v_address = piece_by_rows<kDv>(v_tile, 0, lane);
    const auto multiply_two = [&](float(&o0)[4], float(&o1)[4], const u32(&p)[4], const u32(&v)[4]) {
      multiply_block(o0, p, v[0], v[1], T{});
      multiply_block(o1, p, v[2], v[3], T{});
    };
    if constexpr (!kTileSums) {
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += 2) {
        weigh(j);
        weigh(j + 1);
        u32 p[kRowBlocks][4];
#pragma unroll
        for (i32 i = 0; i < kRowBlocks; ++i) {
          pack(p[i], s[i][j], s[i][j + 1]);
          multiply_block(of_tile[i], p[i], ones, ones, T{});
        }
#pragma unroll
        for (i32 c = 0; c < kOutBlocks; c += 2) {
          u32 v[4];
          ldmatrix_x4_trans(v, V::shifted(v_address, j * kColumnBlock, c * kColumnBlock / kChunkElements));
#pragma unroll
          for (i32 i = 0; i < kRowBlocks; ++i) multiply_two(o[i][c], o[i][c + 1], p[i], v);
        }
      }
    } else {
      u32 p[kKeyBlocks / 2][kRowBlocks][4];
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += 2) {
        weigh(j);
        weigh(j + 1);
#pragma unroll
        for (i32 i = 0; i < kRowBlocks; ++i) {
          pack(p[j / 2][i], s[i][j], s[i][j + 1]);
          multiply_block(of_tile[i], p[j / 2][i], ones, ones, T{});
        }
      }
#pragma unroll
      for (i32 c = 0; c < kOutBlocks; c += 2) {
        float products[kRowBlocks][2][4] = {};
#pragma unroll
        for (i32 j = 0; j < kKeyBlocks; j += 2) {
          u32 v[4];
          ldmatrix_x4_trans(v, V::shifted(v_address, j * kColumnBlock, c * kColumnBlock / kChunkElements));
#pragma unroll
          for (i32 i = 0; i < kRowBlocks; ++i) multiply_two(products[i][0], products[i][1], p[j / 2][i], v);
        }
#pragma unroll
        for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
          for (i32 e = 0; e < 8; ++e) o[i][c + e / 4][e % 4] += products[i][e / 4][e % 4];
      }
    }
#pragma unroll
    for (i32 r = 0; r < 2 * kRowBlocks; ++r) sums[r] += of_tile[r / 2][2 * (r % 2)];
  }

  // Two neighbouring accumulators of S as an operand
  static __device__ __forceinline__ void pack(u32 (&p)[4], const float (&s0)[4], const float (&s1)[4]) {
    p[0] = packed(s0[0], s0[1], T{});
    p[1] = packed(s0[2], s0[3], T{});
    p[2] = packed(s1[0], s1[1], T{});
    p[3] = packed(s1[2], s1[3], T{});
  }
};

// ---- float ----
// x as the sum of two TF32 numbers, also where it is infinite: then `small` is 0. split() makes NaN of it.
__device__ __forceinline__ void split_carefully(float x, u32& big, u32& small) {
  big = cvt_rna_tf32(x);
  if (fabsf(__uint_as_float(big)) == kInfinity) {
    if (fabsf(x) == kInfinity) {
      small = 0;
      return;
    }
    big = __float_as_uint(x) & 0xffffe000;  // rounded up, it would not be finite
  }
  small = cvt_rna_tf32(x - __uint_as_float(big));
}

template <bool kCareful> struct Tf32Products {
  float v_unit = 1;  // V is multiplied by it, a power of two, where kCareful
  static constexpr float kLargestV = 0x1p100f;  // then; so that a weight of 0 still takes it away

  // Accumulators that are worked on together, so that one product need not wait for another. Between groups of O stands a branch. It is
  // as good as never taken, and keeps the compiler from having more under way than registers hold.
  static constexpr i32 kKeyGroup = kKeyBlocks % 4 == 0 ? 4 : 2;
  static constexpr i32 kMostOutBlocks = kCareful ? 1 : kDv <= 128 ? 8 / kRowBlocks : 2;
  static constexpr i32 kOutGroup = kOutBlocks % kMostOutBlocks == 0 ? kMostOutBlocks : 2;

  static __device__ __forceinline__ void split_in_two(float x, u32& big, u32& small) {
    if constexpr (kCareful)
      split_carefully(x, big, small);
    else
      split(x, big, small);
  }
  static __device__ __forceinline__ void split_b(Tf32B& b, float b0, float b1) {
    split_in_two(b0, b.big[0], b.small[0]);
    split_in_two(b1, b.big[1], b.small[1]);
  }

  // x(i, j + n) += a_i b_n
  template <i32 kCount, i32 kColumnBlocks>
  static __device__ __forceinline__ void multiply(float (&x)[kRowBlocks][kColumnBlocks][4], i32 j, const Tf32A (&a)[kRowBlocks],
                                                  const Tf32B (&b)[kCount]) {
    if constexpr (!kCareful) {
      multiply_step(x, j, a, b);
    } else {
      float cross[kRowBlocks][kCount][4] = {};
      for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(cross[i][n], a[i].small, b[n].big); });
      for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(cross[i][n], a[i].big, b[n].small); });
      for_each_pair<kRowBlocks, kCount>([&](i32 i, i32 n) {  // 0 times an infinity: not of a and b
        float of_big[4] = {};
        mma_m16n8k8_tf32(of_big, a[i].big, b[n].big);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) x[i][j + n][e] += fabsf(of_big[e]) < kInfinity ? of_big[e] + cross[i][n][e] : of_big[e];
      });
    }
  }

  template <class QStep> static __device__ __forceinline__ void multiply_q_k(SAccumulators& s, QStep q_step, const u8* k_tile, Lane lane) {
    using K = TileLayout<kD>;
    const u32 k_address = piece_by_chunks<kD>(k_tile, 0, lane);
#pragma unroll kQInRegisters ? kQkSteps : kCareful ? 1 : 2
    for (i32 step = 0; step < kQkSteps; ++step) {
      u32 q_rmem[kRowBlocks][4];
      q_step(q_rmem, step);
      Tf32A q[kRowBlocks];
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) split_in_two(__uint_as_float(q_rmem[i][e]), q[i].big[e], q[i].small[e]);
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += kKeyGroup) {
        Tf32B k[kKeyGroup];
#pragma unroll
        for (i32 n = 0; n < kKeyGroup; n += 2) {
          u32 k_rmem[4];
          ldmatrix_x4(k_rmem, K::shifted(k_address, (j + n) * kColumnBlock, step * kStepChunks));
          split_b(k[n], __uint_as_float(k_rmem[0]), __uint_as_float(k_rmem[1]));
          split_b(k[n + 1], __uint_as_float(k_rmem[2]), __uint_as_float(k_rmem[3]));
        }
        multiply(s, j, q, k);
      }
    }
  }

  template <class Weigh>
  __device__ __forceinline__ void multiply_p_v(OAccumulators& o, const SAccumulators& s, Weigh weigh, const u8* v_tile, i32 columns_live,
                                               Lane lane, float (&)[2 * kRowBlocks]) const {
    using V = TileLayout<kDv>;
    constexpr i32 kBlockChunks = kColumnBlock / kChunkElements;
    const u32 column_bytes = lane.g % kChunkElements * sizeof(float);
    const u32 even = V::offset(2 * lane.t, lane.g / kChunkElements) + column_bytes;
    const u32 odd = V::offset(2 * lane.t + 1, lane.g / kChunkElements) + column_bytes;
    const auto v_at = [&](u32 lane_offset, i32 j, i32 c) {
      const float x = *reinterpret_cast<const float*>(v_tile + V::shifted(lane_offset, j * kColumnBlock, c * kBlockChunks));
      return kCareful && v_unit != 1 ? fmaxf(-kLargestV, fminf(x * v_unit, kLargestV)) : x;
    };
#pragma unroll
    for (i32 j = 0; j < kKeyBlocks; ++j) {
      weigh(j);
      Tf32A p[kRowBlocks];
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i) {
        const float(&weight)[4] = s[i][j];
        split_in_two(weight[0], p[i].big[0], p[i].small[0]);
        split_in_two(weight[2], p[i].big[1], p[i].small[1]);
        split_in_two(weight[1], p[i].big[2], p[i].small[2]);
        split_in_two(weight[3], p[i].big[3], p[i].small[3]);
      }
#pragma unroll
      for (i32 c = 0; c < kOutBlocks; c += kOutGroup) {
        if (c * kColumnBlock >= columns_live) break;
        Tf32B v[kOutGroup];
#pragma unroll
        for (i32 n = 0; n < kOutGroup; ++n) split_b(v[n], v_at(even, j, c + n), v_at(odd, j, c + n));
        multiply(o, c, p, v);
      }
    }
  }
};
template <> struct Products<float> : Tf32Products<false> {};
