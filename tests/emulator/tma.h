// TMA: tensor maps, and copies of their boxes from device to shared memory.
#pragma once
#include "mbarriers.h"
#include "copies.h"

namespace emulator {

constexpr u32 kMostAxes = 5;
constexpr u64 kMapMagic = 0x70616d20726f736e;

struct Map {  // what emulator::encode_map puts into the 128 bytes of a tensor map
  u64 magic;
  u8* base;
  u64 extents[kMostAxes];
  u64 strides[kMostAxes];  // in bytes; that of the innermost axis is an element
  u16 box[kMostAxes];
  u8 rank, element_bytes, swizzle;

  u32 row_bytes() const { return box[0] * element_bytes; }
  u32 rows() const {
    u32 count = 1;
    for (u32 axis = 1; axis < rank; ++axis) count *= box[axis];
    return count;
  }
};
static_assert(sizeof(Map) <= 128, "a tensor map has 128 bytes");

// The 16-byte pieces of each 32, 64 or 128 bytes (mode 1, 2, 3) change places: the number of a piece is combined with that of its
// 128 bytes, both taken from the address.
inline u32 swizzle(u32 address, u32 mode) { return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4); }

inline u32 bytes_of_type(u32 type) {
  static const u8 bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // CUtensorMapDataType
  return type < sizeof bytes ? bytes[type] : 0;
}

// Null if the map was made, else the rule that is broken.
inline const char* encode_map(void* to, u32 type, u32 rank, void* base, const u64* extents, const u64* strides, const u32* box,
                              const u32* steps, u32 interleave, u32 swizzle, u32 fill) {
  Map map = {kMapMagic, static_cast<u8*>(base), {}, {}, {}, static_cast<u8>(rank), static_cast<u8>(bytes_of_type(type)), static_cast<u8>(swizzle)};
  if (reinterpret_cast<u64>(to) % 64) return "a map lies at a multiple of 64";
  if (map.element_bytes == 0 || swizzle > 3 || interleave || fill) return "this type, swizzle, interleave or fill is not known";
  if (rank < 1 || rank > kMostAxes) return "there are 1 to 5 axes";
  if (!base || reinterpret_cast<u64>(base) % 16) return "an array starts at a multiple of 16";
  for (u32 axis = 0; axis < kMostAxes; ++axis) map.extents[axis] = map.box[axis] = 1;
  map.strides[0] = map.element_bytes;
  for (u32 axis = 0; axis < rank; ++axis) {
    if (extents[axis] < 1 || extents[axis] > 1ull << 32) return "an axis has 1 to 2^32 elements";
    if (box[axis] < 1 || box[axis] > 256) return "a box has 1 to 256 elements along an axis";
    if (steps[axis] != 1) return "elements are taken one by one";
    map.extents[axis] = extents[axis];
    map.box[axis] = static_cast<u16>(box[axis]);
    if (axis == 0) continue;
    map.strides[axis] = strides[axis - 1];
    if (map.strides[axis] % 16 || map.strides[axis] >> 40) return "a stride is a multiple of 16 below 2^40";
  }
  if (map.row_bytes() % 16) return "a row of a box is a multiple of 16 bytes";
  if (swizzle && map.row_bytes() != 16u << swizzle) return "a row of a box is as wide as the swizzle; narrower ones are not modelled";
  memcpy(to, &map, sizeof map);
  return nullptr;
}

// Row `number` of the box at `at`: its bytes in device memory that lie inside the array, if there are any, and where they go in the row
struct Piece {
  const u8* from;
  u32 to, bytes;
};
inline Piece piece_of(const Map& map, const Coordinates& at, u32 number) {
  const u8* from = map.base;
  for (u32 axis = 1; axis < map.rank; ++axis) {
    const i64 place = static_cast<i64>(at.x[axis]) + number % map.box[axis];
    number /= map.box[axis];
    if (place < 0 || place >= static_cast<i64>(map.extents[axis])) return {nullptr, 0, 0};
    from += place * static_cast<i64>(map.strides[axis]);
  }
  const i64 first = std::max<i64>(at.x[0], 0), end = std::min<i64>(at.x[0] + static_cast<i64>(map.box[0]), static_cast<i64>(map.extents[0]));
  if (first >= end) return {nullptr, 0, 0};
  return {from + first * map.element_bytes, static_cast<u32>(first - at.x[0]) * map.element_bytes, static_cast<u32>(end - first) * map.element_bytes};
}

inline void write_box(Block& block, const Map& map, const Coordinates& at, u32 shared, const void* caller) {
  std::vector<u8> row(map.row_bytes());
  for (u32 number = 0; number < map.rows(); ++number) {
    const Piece piece = piece_of(map, at, number);
    std::fill(row.begin(), row.end(), 0);
    if (piece.bytes) {
      check_global(piece.from, piece.bytes, false, caller);
      memcpy(row.data() + piece.to, piece.from, piece.bytes);
    }
    for (u32 i = 0; i < row.size(); i += kLine) {
      const u32 address = swizzle(shared + number * map.row_bytes() + i, map.swizzle);
      memcpy(block.shared + (address - kWindow), row.data() + i, kLine);
    }
  }
}

constexpr u32 kBoxAlignment = 128;

inline Map read_map(const void* encoded, u32 rank, const void* caller) {
  Map map;
  memcpy(&map, encoded, sizeof map);
  if (reinterpret_cast<u64>(encoded) % 64 || map.magic != kMapMagic) fail("TMA is given what is no tensor map, at " + place(caller));
  if (map.rank != rank) fail(format("TMA is given %u coordinates for an array of %u axes, at ", rank, map.rank) + place(caller));
  return map;
}

void tma_load(u32 shared, const void* encoded, u32 rank, u32 mbarrier, Coordinates at) {
  const void* const caller = __builtin_return_address(0);
  const Map map = read_map(encoded, rank, caller);
  const u32 bytes = map.rows() * map.row_bytes();
  begin_load(shared, bytes, kBoxAlignment, mbarrier, caller, [map, at, shared, caller](Block& block) { write_box(block, map, at, shared, caller); });
}

}  // namespace emulator

// As the function of the CUDA driver; 0 or CUDA_ERROR_INVALID_VALUE.
extern "C" i32 cuTensorMapEncodeTiled(void* map, u32 type, u32 rank, void* base, const u64* extents, const u64* strides, const u32* box,
                                      const u32* steps, u32 interleave, u32 swizzle, u32 promotion, u32 fill) {
  (void)promotion;
  return emulator::encode_map(map, type, rank, base, extents, strides, box, steps, interleave, swizzle, fill) ? 1 : 0;
}
