// The order of the work, and with it of every sum.
//
// A block draws tickets: each is a tile of keys, and some of the query heads that share them. Where dQ has sums in device memory, a tile's
// dQ is added to what other tiles of the same head have added to the same rows, in the order of their tickets; so a block waits only for
// tiles with lower tickets, which others have drawn before it, and which wait in turn for lower ones only. Whatever number of blocks runs,
// the one with the lowest ticket goes on. Without kDeterministic nobody waits for that: dQ is added in whatever order it comes.
//
// Hardly any block does wait. Tiles of keys are walked upwards through their rows with tickets falling along the keys, or downwards with
// tickets rising. Under a causal mask blocks that walk upwards start at their diagonals, two tiles of rows apart, and end one after the
// other, the first with the fewest rows; so those that walk down after them, of other heads, start one after the other, the first with
// the most rows. Which way a head is walked depends on its number among the heads of its batch entry alone, and so do its bits. Where all
// tiles of a head see the same rows, blocks stay behind each other by what they waited at the start. And since blocks follow each other so
// closely through the rows of a head, what one has read another finds in the L2 cache.
#pragma once

constexpr bool kTurnsAround = kLeft != kRight;  // tiles of keys differ in how many rows see them
constexpr i32 kDirections = kTurnsAround ? 2 : 1;

struct KeyTile {
  i32 number, kv_head, batch;
  bool downwards;
  i32 part;  // of the query heads that share it
};

// A section has so many heads of each direction: the heads 2i and 2i + 1 of a batch entry for each of its columns. The last column of an
// odd number of heads lacks the second: its tickets are void. In a section, all tiles of keys come with the first part of their query
// heads, then with the next; of a part, those of one direction before those of the other.
__device__ __forceinline__ KeyTile key_tile(const BackwardWgmmaParams& a, i32 ticket) {
  const i32 key_tiles = a.p.key_tiles, columns = (a.p.heads / a.p.group + kDirections - 1) / kDirections;  // of a batch entry
  const i32 parts = kSplit ? 1 : a.parts, of_column = kDirections * key_tiles, all = a.tickets / (of_column * parts);
  const i32 of_section = a.section * of_column * parts;
  const i32 section = ticket / of_section, width = min(a.section, all - section * a.section);
  const i32 in_section = ticket - section * of_section, part = kSplit ? 0 : in_section / (width * of_column);
  const i32 in_part = in_section - part * (width * of_column);
  const i32 second = kTurnsAround && in_part >= width * key_tiles;
  const i32 in_half = in_part - second * (width * key_tiles), rank = in_half / width;
  const i32 column = section * a.section + in_half - rank * width, batch = column / columns;
  const bool downwards = kTurnsAround && (second != 0) != kLeft;
  return {downwards ? rank : key_tiles - 1 - rank, (column - batch * columns) * kDirections + second, batch, downwards, part};
}

// The next ticket that is not void
__device__ __forceinline__ i32 draw(const BackwardWgmmaParams& a) {
#pragma unroll 1
  for (;;) {
    const u32 ticket = atomicInc(a.next_ticket, ~0u);
    if (ticket >= static_cast<u32>(a.tickets)) return kNoTicket;
    if (!kTurnsAround || key_tile(a, static_cast<i32>(ticket)).kv_head < a.p.heads / a.p.group) return static_cast<i32>(ticket);
  }
}

// The query heads of a part: all, where dQ has a kernel of its own
__device__ __forceinline__ i32 first_head(const BackwardWgmmaParams& a, const KeyTile& tile) {
  return tile.kv_head * a.p.group + (kSplit ? 0 : tile.part * a.heads_of_part);
}
__device__ __forceinline__ i32 heads_of(const BackwardWgmmaParams& a, const KeyTile& tile) {
  return kSplit ? a.p.group : min(a.heads_of_part, a.p.group - tile.part * a.heads_of_part);
}

// The tiles of rows that see a tile of keys, one after the other, for each query head of a part
struct Walk {
  i32 left;  // steps
  i32 row_tile;
  i32 lowest;     // tile of rows; ~lowest if the walk goes down
  i32 highest;    // where it is not the last of all
  i32 in_part = 0;  // which of the query heads

  __device__ __forceinline__ Walk(const BackwardWgmmaParams& a, const KeyTile& tile) {
    const RowTiles rows = row_tiles(visibility(a.p, tile.batch, 0), tile.number * kBc, (tile.number + 1) * kBc);
    left = max(rows.end - rows.first, 0) * heads_of(a, tile);
    lowest = tile.downwards ? ~rows.first : rows.first;
    highest = rows.end - 1;
    row_tile = tile.downwards ? highest : rows.first;
  }
  __device__ __forceinline__ void advance(const Params& p) {
    const bool goes_down = kTurnsAround && lowest < 0;
    const i32 low = kLeft || kRight ? goes_down ? ~lowest : lowest : 0, high = kLeft || kQLengths ? highest : p.row_tiles - 1;
    const bool is_over = row_tile == (goes_down ? low : high);
    row_tile = is_over ? goes_down ? high : low : row_tile + (goes_down ? -1 : 1);
    in_part += is_over;
    --left;
  }
  __device__ __forceinline__ i32 head(const BackwardWgmmaParams& a, const KeyTile& tile) const { return first_head(a, tile) + in_part; }
};

// The tiles of keys that add to the dQ of a tile of rows
struct Adders {
  i32 first, end;

  __device__ __forceinline__ i32 turn(const KeyTile& tile) const { return tile.downwards ? tile.number - first : end - 1 - tile.number; }
};
__device__ __forceinline__ Adders adders(const Visibility& see, i32 row_tile) {
  const i32 first_row = row_tile * kBr, last_row = min(first_row + kBr, see.query_length) - 1;
  const bool none = see.first_key(first_row) >= see.end_key(last_row);  // though a tile may lie between
  const KeyTiles tiles = key_tiles(see, first_row, first_row + kBr);
  return none ? Adders{0, 0} : Adders{tiles.first, tiles.end};
}

// Where a tile of rows of a head is, of all
__device__ __forceinline__ i64 row_tile_index(const Params& p, i32 batch, i32 head, i32 row_tile) {
  return (static_cast<i64>(batch) * p.heads + head) * p.row_tiles + row_tile;
}
