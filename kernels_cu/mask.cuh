// Seam 1 of 2: which keys a query row may see, which whole tiles no row sees, and which need no mask.
// Row i sees key j when  i + delta - left <= j <= i + delta + right,  j < key_length,  and the boolean mask, if any, allows it.
#pragma once

struct Visibility {
  i32 query_length, key_length;  // live rows and keys of this batch entry
  i32 delta;                     // the diagonal: row i is at key i + delta
  i32 left, right;
  const u8* mask;
  i64 mask_head, mask_row, mask_column;

  // The same for the query head `offset` heads further on
  __device__ __forceinline__ Visibility of_head(i32 offset) const {
    Visibility other = *this;
    if (kMask) other.mask += offset * mask_head;
    return other;
  }
  __device__ __forceinline__ i32 first_key(i32 row) const { return kLeft ? max(0, row + delta - left) : 0; }
  __device__ __forceinline__ i32 end_key(i32 row) const { return kRight ? min(key_length, row + delta + right + 1) : key_length; }

  __device__ __forceinline__ bool sees(i32 row, i32 key) const {
    if (key < first_key(row) || key >= end_key(row)) return false;
    return !kMask || (row < query_length && mask[row * mask_row + key * mask_column]);
  }
};

// The key tiles [first, end) that rows [first_row, end_row) need; those in [whole_first, whole_end) are seen whole by every row.
struct KeyTiles {
  i32 first, end, whole_first, whole_end;

  __device__ __forceinline__ bool whole(i32 tile) const { return !kMask && tile >= whole_first && tile < whole_end; }
};

__device__ __forceinline__ i32 clamp_length(const void* lengths, i32 is_long, i64 index, i32 n) {
  const i64 length = is_long ? static_cast<const i64*>(lengths)[index] : static_cast<const i32*>(lengths)[index];
  return static_cast<i32>(min(max(length, 0LL), static_cast<i64>(n)));
}

__device__ __forceinline__ Visibility visibility(const Params& p, i32 batch, i32 head) {
  Visibility see;
  see.query_length = kQLengths ? clamp_length(p.q_lengths, p.long_q_lengths, batch * p.q_lengths_batch, p.n_q) : p.n_q;
  see.key_length = kKvLengths ? clamp_length(p.kv_lengths, p.long_kv_lengths, batch * p.kv_lengths_batch, p.n_k) : p.n_k;
  see.delta = p.bottom_right ? see.key_length - see.query_length : 0;
  see.left = p.left;
  see.right = p.right;
  see.mask = p.mask + batch * p.mask_batch + head * p.mask_head;
  see.mask_head = p.mask_head;
  see.mask_row = p.mask_row;
  see.mask_column = p.mask_column;
  return see;
}

__device__ __forceinline__ KeyTiles key_tiles(const Visibility& see, i32 first_row, i32 end_row) {
  const i32 last_row = min(end_row, see.query_length) - 1;
  if (last_row < first_row) return {0, 0, 0, 0};  // no live row
  KeyTiles tiles;
  tiles.first = see.first_key(first_row) / kBc;
  tiles.end = max((see.end_key(last_row) + kBc - 1) / kBc, 0);
  tiles.whole_first = (see.first_key(last_row) + kBc - 1) / kBc;
  tiles.whole_end = see.end_key(first_row) / kBc;
  return tiles;
}

// The row tiles [first, end) that see keys [first_key, end_key); the rows of those in [whole_first, whole_end) see every one of them.
struct RowTiles {
  i32 first, end, whole_first, whole_end;

  __device__ __forceinline__ bool whole(i32 tile) const { return !kMask && tile >= whole_first && tile < whole_end; }
};

__device__ __forceinline__ RowTiles row_tiles(const Visibility& see, i32 first_key, i32 end_key) {
  const i32 last_key = min(end_key, see.key_length) - 1;
  if (last_key < first_key) return {0, 0, 0, 0};  // no live key
  const i32 from_first = kRight ? max(0, first_key - see.delta - see.right) : 0;  // the first row that sees the first key
  const i32 from_last = kRight ? max(0, last_key - see.delta - see.right) : 0;
  const i32 to_first = kLeft ? min(see.query_length, first_key - see.delta + see.left + 1) : see.query_length;  // and the end of those
  const i32 to_last = kLeft ? min(see.query_length, last_key - see.delta + see.left + 1) : see.query_length;
  if (from_first >= to_last) return {0, 0, 0, 0};  // no live row sees any of them
  RowTiles tiles;
  tiles.first = from_first / kBr;
  tiles.end = max((to_last + kBr - 1) / kBr, 0);
  tiles.whole_first = (from_last + kBr - 1) / kBr;
  tiles.whole_end = last_key == end_key - 1 ? max(to_first, 0) / kBr : 0;
  return tiles;
}
