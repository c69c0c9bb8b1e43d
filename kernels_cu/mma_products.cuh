// S = Q K^T and O += P V of one warp on tensor cores, fragment by fragment.
//
// P is made of S block by block, when the product needs it (`weigh`), so that exponentials are computed under products.
// A warp owns kRowBlocks blocks of 16 rows. An accumulator is a 16 x 8 block: lane 4g + t holds columns 2t, 2t + 1 of rows g and g + 8.
// 16-bit elements: the accumulators of S, rounded and packed in pairs, are the operand P as they stand. Tensor cores cut off what they add
// to an accumulator; over so many keys that this would show, P V of a tile is summed from zero (kTileSums) and added to O outside them.
// float: three TF32 products for one ("3xTF32"): with x = big + small, ab = small_a big_b + big_a small_b + big_a big_b. A
// step's sum is added to the accumulator outside the tensor cores. The k indices t and t + 4 of P V stand for the keys
// 2t and 2t + 1, which makes P's accumulators an operand without a shuffle.
#pragma once

constexpr i32 kRowBlock = 16;
constexpr i32 kKeyBlock = 8;  // columns of an accumulator
constexpr i32 kRowBlocks = kBr / (kWarps * kRowBlock);
constexpr i32 kKeyBlocks = kBc / kKeyBlock;
constexpr i32 kOutBlocks = kDv / kKeyBlock;
constexpr i32 kStepChunks = 2;  // of Q and K, in a step of S: 32 bytes of each row
constexpr i32 kQkSteps = TileLayout<kD>::kChunks / kStepChunks;

static_assert(kBr % (kWarps * kRowBlock) == 0, "warps own blocks of 16 rows");
static_assert(kBc % (2 * kKeyBlock) == 0, "K and V are read in blocks of 16 keys");

// Two floats rounded to T, x0 in the lower half. sm_75 has no instruction for it.
template <class T> __device__ __forceinline__ u32 packed(float x0, float x1, T) {
  if constexpr (kMmaK == 16)
    return pack2(x0, x1, T{});
  else
    return cvt_rn_f16_f32(x0).bits | static_cast<u32>(cvt_rn_f16_f32(x1).bits) << 16;
}

struct Lane {
  i32 index = threadIdx.x % 32;
  i32 g = threadIdx.x % 32 / 4;  // row of a block, and g + 8
  i32 t = threadIdx.x % 4;       // column pair of a block
};

using Accumulator = float[4];
using SAccumulators = float[kRowBlocks][kKeyBlocks][4];
constexpr i32 kSValues = kRowBlocks * kKeyBlocks * 4;
__device__ __forceinline__ float& value_of(SAccumulators& s, i32 i) { return s[i / (4 * kKeyBlocks)][i / 4 % kKeyBlocks][i % 4]; }
__device__ __forceinline__ constexpr i32 row_of_value(i32 i) { return i / (4 * kKeyBlocks) * 2 + i % 4 / 2; }  // its slot
using OAccumulators = float[kRowBlocks][kOutBlocks][4];
using QFragments = u32[kQkSteps][kRowBlocks][4];

// The addresses that a lane gives to ldmatrix for a 16 x 2-chunk piece of a tile.
template <i32 kColumns> __device__ __forceinline__ u32 piece_by_rows(const u8* tile, i32 first_row, Lane lane) {  // A: rows fastest
  return smem_address(tile + TileLayout<kColumns>::offset(first_row + lane.index % 16, lane.index / 16));
}
template <i32 kColumns> __device__ __forceinline__ u32 piece_by_chunks(const u8* tile, Lane lane) {  // B: chunks fastest
  return smem_address(tile + TileLayout<kColumns>::offset(lane.index % 8 + lane.index / 16 * 8, lane.index / 8 % 2));
}

// ---- 16-bit elements ----
template <class T> struct Products {
  // d += a b over 16 elements, in one instruction or, for sm_75, in two
  static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kMmaK == 16) {
      const u32 b[2] = {b0, b1};
      mma_m16n8k16(d, a, b, T{});
    } else {
      const u32 a0[2] = {a[0], a[1]}, a1[2] = {a[2], a[3]};
      mma_m16n8k8(d, a0, b0, T{});
      mma_m16n8k8(d, a1, b1, T{});
    }
  }

  template <class QStep> static __device__ __forceinline__ void multiply_q_k(SAccumulators& s, QStep q_step, const u8* k_tile, Lane lane) {
    using K = TileLayout<kD>;
    const u32 k_address = piece_by_chunks<kD>(k_tile, lane);
#pragma unroll
    for (i32 step = 0; step < kQkSteps; ++step) {
      u32 q[kRowBlocks][4];
      q_step(q, step);
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += 2) {
        u32 k[4];
        ldmatrix_x4(k, K::shifted(k_address, j * kKeyBlock, step * kStepChunks));
#pragma unroll
        for (i32 i = 0; i < kRowBlocks; ++i) {
          multiply(s[i][j], q[i], k[0], k[1]);
          multiply(s[i][j + 1], q[i], k[2], k[3]);
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
    const auto multiply_block = [&](float(&o0)[4], float(&o1)[4], const u32(&p)[4], const u32(&v)[4]) {
      multiply(o0, p, v[0], v[1]);
      multiply(o1, p, v[2], v[3]);
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
          multiply(of_tile[i], p[i], ones, ones);
        }
#pragma unroll
        for (i32 c = 0; c < kOutBlocks; c += 2) {
          u32 v[4];
          ldmatrix_x4_trans(v, V::shifted(v_address, j * kKeyBlock, c * kKeyBlock / kChunkElements));
#pragma unroll
          for (i32 i = 0; i < kRowBlocks; ++i) multiply_block(o[i][c], o[i][c + 1], p[i], v);
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
          multiply(of_tile[i], p[j / 2][i], ones, ones);
        }
      }
#pragma unroll
      for (i32 c = 0; c < kOutBlocks; c += 2) {
        float products[kRowBlocks][2][4] = {};
#pragma unroll
        for (i32 j = 0; j < kKeyBlocks; j += 2) {
          u32 v[4];
          ldmatrix_x4_trans(v, V::shifted(v_address, j * kKeyBlock, c * kKeyBlock / kChunkElements));
#pragma unroll
          for (i32 i = 0; i < kRowBlocks; ++i) multiply_block(products[i][0], products[i][1], p[j / 2][i], v);
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
// x as the sum of two TF32 numbers. Where x is infinite, `small` is NaN, unless kCareful makes it 0.
template <bool kCareful> __device__ __forceinline__ void split(float x, u32& big, u32& small) {
  if (!kCareful) {  // Dekker 1971: x rounded to its upper 11 bits, by additions, which are faster than conversions; small needs at most
    constexpr float kUpper = (1 << 13) + 1;  // one bit more than TF32 has
    const float enlarged = __fmul_rn(x, kUpper);
    const float upper = __fsub_rn(enlarged, __fsub_rn(enlarged, x));
    big = __float_as_uint(upper);
    small = __float_as_uint(__fsub_rn(x, upper));
    return;
  }
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

  struct A {
    u32 big[4], small[4];
  };
  struct B {
    u32 big[2], small[2];
  };

  static __device__ __forceinline__ void split_b(B& b, float b0, float b1) {
    split<kCareful>(b0, b.big[0], b.small[0]);
    split<kCareful>(b1, b.big[1], b.small[1]);
  }

  // d(i, n) += a_i b_n, each sum over the step rounded once on its own
  template <i32 kCount, class D> static __device__ __forceinline__ void multiply(D d, const A (&a)[kRowBlocks], const B (&b)[kCount]) {
    float cross[kRowBlocks][kCount][4] = {};
    for_each_pair<kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(cross[i][n], a[i].small, b[n].big); });
    for_each_pair<kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(cross[i][n], a[i].big, b[n].small); });
    if constexpr (kCareful) {  // 0 times an infinity: not of a and b
      for_each_pair<kCount>([&](i32 i, i32 n) {
        float of_big[4] = {};
        mma_m16n8k8_tf32(of_big, a[i].big, b[n].big);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) d(i, n)[e] += fabsf(of_big[e]) < kInfinity ? of_big[e] + cross[i][n][e] : of_big[e];
      });
    } else {
      for_each_pair<kCount>([&](i32 i, i32 n) { mma_m16n8k8_tf32(cross[i][n], a[i].big, b[n].big); });
      for_each_pair<kCount>([&](i32 i, i32 n) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) d(i, n)[e] += cross[i][n][e];
      });
    }
  }
  template <i32 kCount, class Visit> static __device__ __forceinline__ void for_each_pair(Visit visit) {
#pragma unroll
    for (i32 n = 0; n < kCount; ++n)
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i) visit(i, n);
  }

  template <class QStep> static __device__ __forceinline__ void multiply_q_k(SAccumulators& s, QStep q_step, const u8* k_tile, Lane lane) {
    using K = TileLayout<kD>;
    const u32 k_address = piece_by_chunks<kD>(k_tile, lane);
#pragma unroll kQInRegisters ? kQkSteps : kCareful ? 1 : 2
    for (i32 step = 0; step < kQkSteps; ++step) {
      u32 q_rmem[kRowBlocks][4];
      q_step(q_rmem, step);
      A q[kRowBlocks];
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) split<kCareful>(__uint_as_float(q_rmem[i][e]), q[i].big[e], q[i].small[e]);
#pragma unroll
      for (i32 j = 0; j < kKeyBlocks; j += kKeyGroup) {
        B k[kKeyGroup];
#pragma unroll
        for (i32 n = 0; n < kKeyGroup; n += 2) {
          u32 k_rmem[4];
          ldmatrix_x4(k_rmem, K::shifted(k_address, (j + n) * kKeyBlock, step * kStepChunks));
          split_b(k[n], __uint_as_float(k_rmem[0]), __uint_as_float(k_rmem[1]));
          split_b(k[n + 1], __uint_as_float(k_rmem[2]), __uint_as_float(k_rmem[3]));
        }
        multiply([&](i32 i, i32 n) -> Accumulator& { return s[i][j + n]; }, q, k);
      }
    }
  }

  template <class Weigh>
  __device__ __forceinline__ void multiply_p_v(OAccumulators& o, const SAccumulators& s, Weigh weigh, const u8* v_tile, i32 columns_live,
                                               Lane lane, float (&)[2 * kRowBlocks]) const {
    using V = TileLayout<kDv>;
    constexpr i32 kBlockChunks = kKeyBlock / kChunkElements;
    const u32 column_bytes = lane.g % kChunkElements * sizeof(float);
    const u32 even = V::offset(2 * lane.t, lane.g / kChunkElements) + column_bytes;
    const u32 odd = V::offset(2 * lane.t + 1, lane.g / kChunkElements) + column_bytes;
    const auto v_at = [&](u32 lane_offset, i32 j, i32 c) {
      const float x = *reinterpret_cast<const float*>(v_tile + V::shifted(lane_offset, j * kKeyBlock, c * kBlockChunks));
      return kCareful && v_unit != 1 ? fmaxf(-kLargestV, fminf(x * v_unit, kLargestV)) : x;
    };
#pragma unroll
    for (i32 j = 0; j < kKeyBlocks; ++j) {
      weigh(j);
      A p[kRowBlocks];
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i) {
        const float(&weight)[4] = s[i][j];
        split<kCareful>(weight[0], p[i].big[0], p[i].small[0]);
        split<kCareful>(weight[2], p[i].big[1], p[i].small[1]);
        split<kCareful>(weight[1], p[i].big[2], p[i].small[2]);
        split<kCareful>(weight[3], p[i].big[3], p[i].small[3]);
      }
#pragma unroll
      for (i32 c = 0; c < kOutBlocks; c += kOutGroup) {
        if (c * kKeyBlock >= columns_live) break;
        B v[kOutGroup];
#pragma unroll
        for (i32 n = 0; n < kOutGroup; ++n) split_b(v[n], v_at(even, j, c + n), v_at(odd, j, c + n));
        multiply([&](i32 i, i32 n) -> Accumulator& { return o[i][c + n]; }, p, v);
      }
    }
  }
};
template <> struct Products<float> : Tf32Products<false> {};
