// Tiles of Element in shared memory, as ldmatrix reads them: rows of 16-byte chunks, eight rows at a time. So that the same chunk of
// eight neighbouring rows lies in eight different groups of banks, a row is padded by one chunk, or, where kSwizzle asks for it and rows
// are multiples of 128 bytes, chunk c of row r takes the place of chunk c ^ (r % 8).
#pragma once

constexpr i32 kChunkBytes = 16;
constexpr i32 kChunkElements = kChunkBytes / sizeof(Element);
constexpr i32 kMatrixRows = 8;  // of a matrix of ldmatrix
constexpr i32 kBankRowBytes = kChunkBytes * kMatrixRows;

template <i32 kColumns> struct TileLayout {
  static constexpr i32 kRowBytes = kColumns * sizeof(Element);
  static constexpr i32 kChunks = kRowBytes / kChunkBytes;
  static constexpr bool kSwizzled = kSwizzle && kRowBytes % kBankRowBytes == 0;
  static constexpr i32 kPitch = kSwizzled ? kRowBytes : kRowBytes + kChunkBytes;
  static_assert(kChunks % 2 == 0, "padding by one chunk makes the pitch an odd number of chunks");

  static __device__ __forceinline__ i32 offset(i32 row, i32 chunk) {
    return row * kPitch + (kSwizzled ? chunk ^ row % kMatrixRows : chunk) * kChunkBytes;
  }
  // From the address of (row, chunk), chunk 0 or 1, to that of (row + rows, chunk + chunks): rows a multiple of 8, chunks of 2
  static __device__ __forceinline__ u32 shifted(u32 address, i32 rows, i32 chunks) {
    const u32 in_row = kSwizzled ? (address ^ chunks % kMatrixRows * kChunkBytes) + chunks / kMatrixRows * kBankRowBytes
                                 : address + chunks * kChunkBytes;
    return in_row + rows * kPitch;
  }
};

// One chunk to shared memory: the `elements` first ones from device memory, then zeros.
__device__ __forceinline__ void copy_chunk(u8* chunk, const Element* source, i32 elements) {
  if constexpr (kAsyncCopy && kAligned) {
    cp_async_16(smem_address(chunk), source, elements > 0 ? kChunkBytes : 0);
  } else {
    using Access = Vector<Element, kElementsPerAccess>;
    Vector<Element, kChunkElements> from = {};
#pragma unroll
    for (i32 e = 0; e < kChunkElements; e += kElementsPerAccess)
      if (e < elements) *reinterpret_cast<Access*>(&from.x[e]) = *reinterpret_cast<const Access*>(source + e);
    *reinterpret_cast<Vector<Element, kChunkElements>*>(chunk) = from;
  }
}

// How the threads of a block share the chunks of a tile: a power of two of lanes for each row, so that a thread stays in its column.
template <i32 kColumns> struct CopyShare {
  static constexpr i32 kChunks = TileLayout<kColumns>::kChunks;
  static constexpr i32 kLanes = kChunks > 16 ? 32 : kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : 2;
  static constexpr i32 kRowsPerPass = kThreads / kLanes;
  i32 row = threadIdx.x / kLanes;
  i32 chunk = threadIdx.x % kLanes;
};

// Rows [0, rows_live) and columns [0, columns_live) of a tile, zeros elsewhere, so that what lies beyond a sequence never enters a
// product. `row_at(i)` is where row i starts in device memory.
template <i32 kRows, i32 kColumns, class RowAt>
__device__ __forceinline__ void copy_tile(u8* tile, RowAt row_at, i32 rows_live, i32 columns_live) {
  using Layout = TileLayout<kColumns>;
  using Share = CopyShare<kColumns>;
  const Share own = {};
  const i32 rows_left = rows_live - own.row;  // so that what is compared below are constants
#pragma unroll
  for (i32 first = 0; first < kRows; first += Share::kRowsPerPass) {
    const i32 row = first + own.row;
    if (kRows % Share::kRowsPerPass != 0 && row >= kRows) break;
#pragma unroll
    for (i32 next = 0; next < Layout::kChunks; next += Share::kLanes) {
      const i32 chunk = next + own.chunk;
      if (Layout::kChunks % Share::kLanes != 0 && chunk >= Layout::kChunks) break;
      const i32 column = chunk * kChunkElements;
      copy_chunk(tile + Layout::offset(row, chunk), row_at(row) + column, first < rows_left ? columns_live - column : 0);
    }
  }
}

__device__ __forceinline__ void commit_copies() {
  if constexpr (kAsyncCopy) cp_async_commit_group();
}

// Until at most kPending groups of this thread's copies are under way; then a barrier shows them to the block.
template <i32 kPending> __device__ __forceinline__ void wait_for_copies() {
  if constexpr (kAsyncCopy) cp_async_wait_group<kPending>();
}
