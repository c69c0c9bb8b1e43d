// ldmatrix and mma.sync, done once a warp. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and its neighbours.
// Products are exact and sums are float, in the order of k; how tensor cores round inside a sum is not modelled.
#pragma once
#include "collectives.h"
#include "numbers.h"

namespace emulator {

constexpr u32 kMatrixRowBytes = 16;  // 8 elements of 16 bits

// Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i. Lane l gets of each matrix, in one register, the elements
// (l / 4, 2 (l % 4)) and its right neighbour; transposed: (2 (l % 4), l / 4) and its lower neighbour.
Words4 load_matrices(u32 count, bool transposed, u32 address, Site site) {
  struct Operand {
    u32 address;
    Words4 result;
  } own = {address, {}};
  const void* const caller = __builtin_return_address(0);
  const char* const instruction = transposed ? "ldmatrix.trans" : "ldmatrix";
  const u8* const own_row = shared_pointer(address, kMatrixRowBytes, instruction, caller);
  check_bounds(own_row, kMatrixRowBytes, "reads", caller);  // of every lane: sm_75 wants valid addresses also where they count for nothing
  if (running->lane < 8 * count) check_shared(own_row, kMatrixRowBytes, false, caller);
  meet(instruction, site, kWholeWarp, own, [count, transposed, instruction, caller](Operand* const* lanes) {
    for (u32 matrix = 0; matrix < count; ++matrix) {
      const u8* rows[8];
      for (u32 row = 0; row < 8; ++row) rows[row] = shared_pointer(lanes[8 * matrix + row]->address, kMatrixRowBytes, instruction, caller);
      for (u32 lane = 0; lane < kWarp; ++lane) {
        u16 pair[2];
        for (u32 e = 0; e < 2; ++e) {
          const u32 along = lane % 4 * 2 + e, across = lane / 4;
          memcpy(&pair[e], transposed ? rows[along] + 2 * across : rows[across] + 2 * along, 2);
        }
        lanes[lane]->result.x[matrix] = pair[0] | static_cast<u32>(pair[1]) << 16;
      }
    }
  });
  return own.result;
}

inline float element(u32 word, u32 half, Shape shape) {
  const u16 bits = static_cast<u16>(word >> 16 * half);
  return shape == Shape::m16n8k16_bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// d (16 x 8) += a (16 x k) b (k x 8). A lane's registers of `a` hold rows lane / 4 and lane / 4 + 8 in turn, then the next 8 (or, of
// 32-bit elements, 4) columns; `b` likewise with rows and columns exchanged; `d` two neighbouring columns of either row.
Floats4 multiply_add(Floats4 d, Words4 a, Words2 b, Shape shape, Site site) {
  struct Operand {
    Floats4 d;
    Words4 a;
    Words2 b;
  } own = {d, a, b};
  meet("mma.sync", site, kWholeWarp, own, [shape](Operand* const* lanes) {
    ++machine.statistics.multiplications;
    const bool narrow = shape != Shape::m16n8k8_tf32;                 // two elements a register
    const u32 k = shape == Shape::m16n8k16_f16 || shape == Shape::m16n8k16_bf16 ? 16 : 8;
    const u32 per_word = narrow ? 2 : 1, words = k * 8 / kWarp / per_word;  // registers of b; a has twice as many
    float left[16][16], right[16][8], sum[16][8];
    for (u32 lane = 0; lane < kWarp; ++lane) {
      const u32 group = lane / 4, within = lane % 4;
      const Operand& from = *lanes[lane];
      for (u32 word = 0; word < words; ++word)
        for (u32 e = 0; e < per_word; ++e) {
          const u32 depth = word * 4 * per_word + within * per_word + e;
          const auto value = [&](u32 bits) { return narrow ? element(bits, e, shape) : tf32_to_float(bits); };
          right[depth][group] = value(from.b.x[word]);
          left[group][depth] = value(from.a.x[2 * word]);
          left[group + 8][depth] = value(from.a.x[2 * word + 1]);
        }
      for (u32 e = 0; e < 4; ++e) sum[group + e / 2 * 8][within * 2 + e % 2] = from.d.x[e];
    }
    for (u32 row = 0; row < 16; ++row)
      for (u32 depth = 0; depth < k; ++depth)
        for (u32 column = 0; column < 8; ++column) sum[row][column] += left[row][depth] * right[depth][column];
    for (u32 lane = 0; lane < kWarp; ++lane)
      for (u32 e = 0; e < 4; ++e) lanes[lane]->d.x[e] = sum[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
  });
  return own.d;
}

}  // namespace emulator
