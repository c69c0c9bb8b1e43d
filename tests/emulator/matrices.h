// ldmatrix and mma.sync, done once a warp. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and its neighbours.
// Products are exact. Sums are float, one product after the other in the order of k, or, with Options::sum_bits, as tensor cores add (Fasi et
// al. 2021; Khattak and Mikaitis 2025): the products of an instruction and what is in the accumulator are each cut off at one place, so many
// bits from the leading one of the largest on, and so is, to a float, their sum.
#pragma once
#include "collectives.h"
#include "numbers.h"

namespace emulator {

constexpr u32 kMatrixRowBytes = 16;  // 8 elements of 16 bits

// Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i. Lane l gets of each matrix, in one register, the elements
// (l / 4, 2 (l % 4)) and its right neighbour; transposed: (2 (l % 4), l / 4) and its lower neighbour.
Words4 load_matrices(bool transposed, u32 address, Site site) {
  struct Operand {
    u32 address;
    Words4 result;
  } own = {address, {}};
  const void* const caller = __builtin_return_address(0);
  const char* const instruction = transposed ? "ldmatrix.trans" : "ldmatrix";
  const u8* const own_row = shared_pointer(address, kMatrixRowBytes, instruction, caller);
  check_shared(own_row, kMatrixRowBytes, false, caller);
  meet(instruction, site, kWholeWarp, own, [transposed, instruction, caller](Operand* const* lanes) {
    for (u32 matrix = 0; matrix < 4; ++matrix) {
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

// x, cut off to a float
inline float cut_to_float(double x) {
  const float y = static_cast<float>(x);
  return std::isfinite(y) && fabs(static_cast<double>(y)) > fabs(x) ? nextafterf(y, 0) : y;
}

// sum + the products, as tensor cores add
inline float cut_sum(float sum, const float* left, const float* right, u32 right_stride, u32 count) {
  double terms[17] = {sum}, largest = fabs(sum), total = sum;
  for (u32 i = 0; i < count; ++i) {
    const double term = static_cast<double>(left[i]) * right[i * right_stride];
    terms[i + 1] = term;
    total += term;
    largest = std::max(largest, fabs(term));
  }
  if (!std::isfinite(total) || largest == 0) return static_cast<float>(total);
  const double unit = ldexp(1.0, ilogb(largest) + 1 - static_cast<i32>(machine.options.sum_bits));
  double whole = 0;  // exact
  for (u32 i = 0; i <= count; ++i) whole += trunc(terms[i] / unit);
  return cut_to_float(whole * unit);
}

// sum(column) += left . right(column), of `columns` columns
template <u32 kColumns> inline void add_products(float (&sum)[kColumns], const float* left, const float (*right)[kColumns], u32 depth, u32 columns) {
  if (machine.options.sum_bits) {
    for (u32 column = 0; column < columns; ++column) sum[column] = cut_sum(sum[column], left, right[0] + column, kColumns, depth);
    return;
  }
  for (u32 k = 0; k < depth; ++k)
    for (u32 column = 0; column < columns; ++column) sum[column] += left[k] * right[k][column];
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
    for (u32 row = 0; row < 16; ++row) add_products(sum[row], left[row], right, k, 8);
    for (u32 lane = 0; lane < kWarp; ++lane)
      for (u32 e = 0; e < 4; ++e) lanes[lane]->d.x[e] = sum[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
  });
  return own.d;
}

}  // namespace emulator
