// The products of the backward pass, of tiles in shared memory, by one warp on tensor cores. What a warp sums of an output are blocks of
// 16 rows by pairs of 8 columns; where several warps share its rows, they take the pairs in turn.
#pragma once

constexpr i32 kPair = 2 * kColumnBlock;  // columns

// Which of the kColumns of an output a warp sums, that shares its rows with kWarpsAside - 1 others and is number `aside` among them
template <i32 kColumns, i32 kWarpsAside> struct Share {
  static constexpr i32 kPairs = (kColumns / kPair + kWarpsAside - 1) / kWarpsAside;
  static constexpr i32 kBlocks = 2 * kPairs;
  i32 aside;

  __device__ __forceinline__ bool has(i32 block) const {
    return kColumns / kPair % kWarpsAside == 0 || (aside + block / 2 * kWarpsAside) * kPair < kColumns;
  }
  __device__ __forceinline__ i32 column(i32 block) const { return (aside + block / 2 * kWarpsAside) * kPair + block % 2 * kColumnBlock; }
};

// ---- who owns what ----
constexpr i32 kWarpsAside = kWarps / kKeyWarps;
constexpr i32 kKeys = kBc / kKeyWarps;
constexpr i32 kRows = kBr / kWarpsAside;
constexpr i32 kKeyBlocks = kKeys / kRowBlock;
constexpr i32 kRowPieces = kRows / kColumnBlock;

constexpr i32 kDqRows = 32;  // of a warp, where it computes dQ
constexpr i32 kDqRowWarps = kBr / kDqRows;
constexpr i32 kDqWarpsAside = kWarps / kDqRowWarps;
constexpr i32 kDqRowBlocks = kDqRows / kRowBlock;

static_assert(kThreads == 32 * kWarps && kWarps % kKeyWarps == 0, "groups of warps share the keys of a tile");
static_assert(kKeys % kRowBlock == 0 && kRows % kPair == 0, "warps own whole fragments of S^T");
static_assert(kBr % kDqRows == 0 && kWarps % kDqRowWarps == 0, "warps share the rows of dQ");
static_assert(kStages == 1 || kStages == 2, "Q and dO are copied one tile ahead at most");

using KColumns = Share<kD, kWarpsAside>;
using VColumns = Share<kDv, kWarpsAside>;
using DqColumns = Share<kD, kDqWarpsAside>;
using ScoreFragments = float[kKeyBlocks][kRowPieces][4];
using DqFragments = float[kDqRowBlocks][DqColumns::kBlocks][4];

// P^T and dS^T of the warp's own rows are operands from registers, P^T before there is dP^T: no more is live than S^T, dP^T, dK and dV. With a
// softcap, P^T is no longer there.
constexpr bool kOwnInRegisters = sizeof(Element) == 2 && !kSoftcap;

struct Warp {
  i32 index = threadIdx.x / 32;
  i32 key = index / kWarpsAside * kKeys;  // the first of its keys
  i32 row = index % kWarpsAside * kRows;  // and of its rows
  KColumns k_columns = {index % kWarpsAside};
  VColumns v_columns = {index % kWarpsAside};
  i32 dq_row = index / kDqWarpsAside * kDqRows;
  DqColumns dq_columns = {index % kDqWarpsAside};
};

// ---- products ----
// x += A B^T: rows of A from `a_row` on by rows of B from `b_row` on, each of kDepth numbers.
template <i32 kDepth, i32 kRowBlocks, i32 kColumnBlocks, class T>
__device__ __forceinline__ void multiply_rows(float (&x)[kRowBlocks][kColumnBlocks][4], const u8* a_tile, i32 a_row, const u8* b_tile,
                                              i32 b_row, Lane lane, T) {
  using Tile = TileLayout<kDepth>;
  constexpr i32 kSteps = Tile::kChunks / kStepChunks, kUnrolled = kSteps > 8 ? 2 : (kSteps + 1) / 2;  // more would take registers
  const u32 a_address = piece_by_rows<kDepth>(a_tile, a_row, lane), b_address = piece_by_chunks<kDepth>(b_tile, b_row, lane);
#pragma unroll kUnrolled
  for (i32 chunk = 0; chunk < Tile::kChunks; chunk += kStepChunks) {
    u32 a[kRowBlocks][4];
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) ldmatrix_x4(a[i], Tile::shifted(a_address, i * kRowBlock, chunk));
#pragma unroll
    for (i32 j = 0; j < kColumnBlocks; j += 2) {
      u32 b[4];
      ldmatrix_x4(b, Tile::shifted(b_address, j * kColumnBlock, chunk));
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i) {
        multiply_block(x[i][j], a[i], b[0], b[1], T{});
        multiply_block(x[i][j + 1], a[i], b[2], b[3], T{});
      }
    }
  }
}

// x += A B of a depth of 16: A in registers, of B the rows `depth` behind `b_address` and of these the warp's share of columns
template <i32 kColumns, i32 kWarpsAside, i32 kRowBlocks, class T>
__device__ __forceinline__ void multiply_share(float (&x)[kRowBlocks][Share<kColumns, kWarpsAside>::kBlocks][4], const u32 (&a)[kRowBlocks][4],
                                               u32 b_address, i32 depth, Share<kColumns, kWarpsAside> own, T) {
  constexpr i32 kPairChunks = kPair / kChunkElements;
#pragma unroll
  for (i32 j = 0; j < own.kBlocks; j += 2) {
    if (!own.has(j)) break;
    u32 b[4];
    ldmatrix_x4_trans(b, TileLayout<kColumns>::shifted(b_address, depth, j / 2 * kWarpsAside * kPairChunks));
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) {
      multiply_block(x[i][j], a[i], b[0], b[1], T{});
      multiply_block(x[i][j + 1], a[i], b[2], b[3], T{});
    }
  }
}

// The same summed over the warp's own rows: A is what it has computed for them, rounded, as an accumulator is an operand.
template <i32 kColumns, i32 kWarpsAside, i32 kRowBlocks, class T>
__device__ __forceinline__ void multiply_own(float (&x)[kRowBlocks][Share<kColumns, kWarpsAside>::kBlocks][4],
                                             const float (&own_a)[kRowBlocks][kRowPieces][4], const u8* b_tile, i32 first_row,
                                             Share<kColumns, kWarpsAside> own, Lane lane, T) {
  using BTile = TileLayout<kColumns>;
  const u32 b_address = BTile::shifted(piece_by_rows<kColumns>(b_tile, first_row, lane), 0, own.aside * kPair / kChunkElements);
#pragma unroll
  for (i32 j = 0; j < kRowPieces; j += 2) {
    u32 a[kRowBlocks][4];
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
      for (i32 e = 0; e < 4; ++e) a[i][e] = packed(own_a[i][j + e / 2][e % 2 * 2], own_a[i][j + e / 2][e % 2 * 2 + 1], T{});
    multiply_share(x, a, b_address, j * kColumnBlock, own, T{});
  }
}

// x += A B, summed over kDepth rows of B from `b_first` on, of which the warp takes its share of columns. A are rows from `a_first` on of a tile
// with that depth of columns or, transposed, columns from there on of a tile with that depth of rows; either tile has kColumnsA columns.
template <bool kTransposed, i32 kDepth, i32 kColumnsA, i32 kColumns, i32 kWarpsAside, i32 kRowBlocks, class T>
__device__ __forceinline__ void multiply_columns(float (&x)[kRowBlocks][Share<kColumns, kWarpsAside>::kBlocks][4], const u8* a_tile, i32 a_first,
                                                 const u8* b_tile, i32 b_first, Share<kColumns, kWarpsAside> own, Lane lane, T) {
  using ATile = TileLayout<kColumnsA>;
  using BTile = TileLayout<kColumns>;
  constexpr i32 kPairChunks = kPair / kChunkElements;
  const u32 a_address = kTransposed ? ATile::shifted(piece_by_chunks<kColumnsA>(a_tile, b_first, lane), 0, a_first / kChunkElements)
                                    : ATile::shifted(piece_by_rows<kColumnsA>(a_tile, a_first, lane), 0, b_first / kChunkElements);
  const u32 b_address = BTile::shifted(piece_by_rows<kColumns>(b_tile, b_first, lane), 0, own.aside * kPairChunks);
#pragma unroll kColumns > 128 ? 1 : kDepth / kPair
  for (i32 depth = 0; depth < kDepth; depth += kPair) {
    u32 a[kRowBlocks][4];
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) {
      if constexpr (kTransposed)
        ldmatrix_x4_trans(a[i], ATile::shifted(a_address, depth, i * kPairChunks));
      else
        ldmatrix_x4(a[i], ATile::shifted(a_address, i * kRowBlock, depth / kChunkElements));
    }
    multiply_share(x, a, b_address, depth, own, T{});
  }
}
