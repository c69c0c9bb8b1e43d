// Tiles of Element in shared memory as TMA writes them and wgmma reads them, and accumulators on their way to device memory.
//
// A tile is a row of panels of 64 columns; in a panel a row is 128 bytes, eight 16-byte chunks, and chunk c of row r takes the place of
// chunk c ^ (r % 8): the 128-byte swizzle. Columns beyond the last panel's are zeros, which the products leave out.
//
// In an accumulator of a warpgroup (64 rows), warp w owns rows 16 w to 16 w + 15. Of these, lane 4 g + t holds rows g and g + 8, and of
// each block of eight columns the columns 2t and 2t + 1: register 4 b + 2 r + e is row g + 8 r, column 8 b + 2 t + e.
#pragma once

constexpr i32 kPanelColumns = 64;
constexpr i32 kPanelRowBytes = 128;
constexpr i32 kChunkBytes = 16;
constexpr i32 kChunkElements = kChunkBytes / sizeof(Element);
constexpr i32 kSwizzleRows = 8;                             // rows after which the swizzle repeats
constexpr i32 kAtomBytes = kSwizzleRows * kPanelRowBytes;   // where tiles are aligned to
constexpr i32 kWarpgroup = 128;                             // threads
constexpr i32 kWarpgroupRows = 64;
constexpr i32 kStep = 16;                                   // depth of one wgmma
constexpr i32 kStepsPerPanel = kPanelColumns / kStep;
constexpr i32 kBlock = 8;                                   // columns of a block of an accumulator

static_assert(sizeof(Element) == 2, "wgmma multiplies 16-bit elements here");

template <i32 kRows, i32 kColumns> struct PanelTile {
  static constexpr i32 kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr i32 kPanelBytes = kRows * kPanelRowBytes;
  static constexpr i32 kBytes = kPanels * kPanelBytes;

  // Where the columns of step `step` of a product over columns start
  static __device__ __forceinline__ constexpr i32 column_step(i32 step) {
    return step / kStepsPerPanel * kPanelBytes + step % kStepsPerPanel * kStep * static_cast<i32>(sizeof(Element));
  }
  // Where the rows of step `step` of a product over rows start
  static __device__ __forceinline__ constexpr i32 row_step(i32 step) { return step * kStep * kPanelRowBytes; }
  // Where chunk `chunk` of a row lies
  static __device__ __forceinline__ i32 offset(i32 row, i32 chunk) {
    return chunk / kSwizzleRows * kPanelBytes + row * kPanelRowBytes + (chunk % kSwizzleRows ^ row % kSwizzleRows) * kChunkBytes;
  }
};

// ---- what wgmma is told of an operand: all in units of 16 bytes ----
__device__ __forceinline__ constexpr i32 in_units(i32 bytes) { return bytes >> 4; }
__device__ __forceinline__ u64 descriptor(u32 address, i32 leading_bytes) {
  constexpr u64 kSwizzle128 = 1ULL << 62;
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(in_units(leading_bytes)) << 16 |
         static_cast<u64>(in_units(kAtomBytes)) << 32 | kSwizzle128;
}
// Rows of the operand are rows of the tile: from one eight of them to the next it is an atom.
__device__ __forceinline__ u64 row_operand(u32 address) { return descriptor(address, kChunkBytes); }
// Columns of the operand are rows of the tile: its rows go from panel to panel, too.
__device__ __forceinline__ u64 column_operand(u32 address, i32 panel_bytes) { return descriptor(address, panel_bytes); }

// ---- accumulators ----
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

// The rows row[0] and row[8 stride] of a lane, as far as they are among the `live_rows` from row[0] on, and of them the first `columns`
// columns, 16 bytes at a time; `value(r, x)` is what becomes of x of row r. Pieces of eight columns of a row lie across the four lanes of
// a quad, which store four of them at a time, one each.
template <i32 kColumns, class Value>
__device__ __forceinline__ void store_accumulator(Element* row, i64 stride, i32 live_rows, i32 columns, const float (&x)[kColumns / 2], i32 lane,
                                                  const Value& value) {
  constexpr i32 kBlocks = kColumns / kBlock;
  constexpr bool kOfOneRow = kBlocks % 4 == 0;  // else two of each row
#pragma unroll
  for (i32 first = 0; first < 2 * kBlocks; first += 4) {
    const auto row_of = [&](i32 i) { return kOfOneRow ? first / kBlocks : i % 2; };
    const auto block_of = [&](i32 i) { return kOfOneRow ? first % kBlocks + i : first / 2 + i / 2; };
    u32 word[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 r = row_of(i), at = 4 * block_of(i) + 2 * r;
      word[i] = pack2(value(r, x[at]), value(r, x[at + 1]), Element{});
    }
    transpose_in_quad(word, lane);
    const i32 r = row_of(lane % 4), column = kBlock * block_of(lane % 4);
    if (8 * r < live_rows && column < columns)
      *reinterpret_cast<Vector<u32, 4>*>(row + 8 * r * stride + column) = {word[0], word[1], word[2], word[3]};
  }
}
