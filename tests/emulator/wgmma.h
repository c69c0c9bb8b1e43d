// wgmma: products of a warpgroup that run beside its threads. A warp computes its 16 rows of D by itself.
//
// From issue to completion the operands in shared memory must stay as they are, and from issue to the wait for its group a thread may
// not use the registers of D, nor change those of A. Both are reported as they happen; the operands are read, and D is written, when the work is done.
#pragma once
#include "matrices.h"
#include "mbarriers.h"

namespace emulator {

constexpr u32 kDepth = 16, kWarpRows = 16, kMostColumns = 256;
constexpr u32 kNobody = ~0u;

// ---- operands in shared memory ----
// Bits 0-13: start / 16, 16-29: leading offset / 16, 32-45: stride offset / 16, 62-63: swizzle of 128, 64 or 32 bytes (1, 2, 3) or none.
struct Descriptor {
  u32 start, leading, stride, mode;  // mode: as in swizzle()
};
inline Descriptor decode(u64 bits) {
  const u32 kind = static_cast<u32>(bits >> 62);
  const auto field = [bits](u32 shift) { return static_cast<u32>(bits >> shift & 0x3fff) << 4; };
  return {field(0), field(16), field(32), kind ? 4 - kind : 0};
}
inline void check_descriptor(u64 bits, const void* caller) {
  const Descriptor own = decode(bits);
  if (bits & 0x3ff1c000c000c000) fail(format("descriptor %016llx has bits set that mean nothing, at ", bits) + place(caller));
  if (bits >> 49 & 7 || (own.start >> 7 & ((1u << own.mode) - 1)))
    fail(format("descriptor %016llx does not start where the swizzle repeats, which is not modelled, at ", bits) + place(caller));
}

// visit(offset in shared memory, row, depth) for each 8 elements of a matrix of `rows` rows that is 16 deep: along depth, or, if
// `transposed`, along rows. Layouts: PTX ISA, "Canonical layouts" of wgmma.
template <class Visit> inline void for_pieces(u64 bits, bool transposed, u32 first_row, u32 rows, Visit visit) {
  const Descriptor own = decode(bits);
  const u32 across = 16u << own.mode;  // bytes until the next row, or the next step in depth, of a swizzled matrix
  const auto offset = [&](u32 place) { return swizzle(own.start + place, own.mode) - kWindow; };
  if (!transposed) {
    for (u32 row = first_row; row < first_row + rows; ++row)
      for (u32 piece = 0; piece < 2; ++piece) {
        const u32 along = piece * (own.mode ? kLine : own.leading);
        visit(offset(row / 8 * own.stride + row % 8 * across + along), row, 8 * piece);
      }
    return;
  }
  for (u32 depth = 0; depth < kDepth; ++depth)
    for (u32 piece = first_row / 8; piece < (first_row + rows) / 8; ++piece) {
      const u32 along = own.mode ? (piece >> own.mode) * own.leading + piece % (1u << own.mode) * kLine : piece * own.stride;
      visit(offset(along + depth % 8 * across + depth / 8 * (own.mode ? own.stride : own.leading)), 8 * piece, depth);
    }
}

// `out(row, depth)` becomes each element.
template <class Out> inline void read_operand(const Block& block, const Product& product, u64 bits, bool transposed, u32 first_row, u32 rows, Out out) {
  for_pieces(bits, transposed, first_row, rows, [&](u32 offset, u32 row, u32 depth) {
    u16 element[8];
    memcpy(element, block.shared + offset, sizeof element);
    for (u32 e = 0; e < 8; ++e) {
      const float x = product.is_bf16 ? bf16_to_float(element[e]) : f16_to_float(element[e]);
      out(transposed ? row + e : row, transposed ? depth : depth + e) = x;
    }
  });
}

// At issue: what is read must have been written, for the asynchronous proxy to see; from now on it may not change.
inline void begin_to_read(Warp& warp, const Wgmma& own, u64 bits, bool transposed, u32 rows) {
  Block& block = *warp.block;
  const size_t lines = (machine.options.shared_bytes + kLine - 1) / kLine;
  const char* const how = "reads by wgmma";
  if (block.wgmma_reads.empty()) block.wgmma_reads.assign(lines * block.warps.size(), WgmmaRead());
  const WgmmaRead read = {block.first_count + warp.committed + 1, own.caller};
  for_pieces(bits, transposed, 0, rows, [&](u32 offset, u32, u32) {
    if (offset + kLine > machine.options.shared_bytes)
      fail(format("%s at offset %d, outside shared memory, at ", how, static_cast<i32>(offset)) + place(own.caller));
    if (!machine.options.watched) return;
    for (u32 cell = offset / kCell; cell < (offset + kLine) / kCell; ++cell)
      for (const View& view : own.views) {
        const Touch& written = check_written(block, view, cell, kWholeCell, false, how, own.caller);
        if (block.initialised[cell] != kWholeCell) fail_uninitialised(cell, how, own.caller);
        check_proxy_fence(block, view, written, cell, own.caller);
      }
    block.wgmma_reads[warp.number * lines + offset / kLine] = read;
  });
}

// ---- the product ----
struct Tile {
  float left[kWarpRows][kDepth], right[kDepth][kMostColumns], sum[kWarpRows][kMostColumns];
};

// visit(row, column, number) for the numbers of D that a lane has
template <class Visit> inline void for_own_numbers(u32 lane, u32 n, Visit visit) {
  for (u32 i = 0; i < n / 2; ++i) visit(lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2, i);
}

inline void multiply(const Warp& warp, const Wgmma& own, Tile& tile) {
  const Product& product = own.product;
  const Block& block = *warp.block;
  const u32 first_row = warp.number % kWarpgroup * kWarpRows;
  if (product.from_registers) {
    for (u32 lane = 0; lane < kWarp; ++lane)
      for (u32 e = 0; e < 8; ++e) {
        const u16 bits = static_cast<u16>(own.a[lane][e / 2] >> 16 * (e % 2));
        tile.left[lane / 4 + e / 2 % 2 * 8][lane % 4 * 2 + e % 2 + e / 4 * 8] = product.is_bf16 ? bf16_to_float(bits) : f16_to_float(bits);
      }
  } else {
    const auto left_of = [&](u32 row, u32 depth) -> float& { return tile.left[row - first_row][depth]; };
    read_operand(block, product, product.a, product.a_transposed, first_row, kWarpRows, left_of);
  }
  const auto right_of = [&](u32 row, u32 depth) -> float& { return tile.right[depth][row]; };
  read_operand(block, product, product.b, product.transposed, 0, product.n, right_of);
  for (u32 row = 0; row < kWarpRows; ++row) {
    float(&sum)[kMostColumns] = tile.sum[row];
    if (!product.accumulate) std::fill(sum, sum + product.n, 0.0f);
    add_products(sum, tile.left[row], tile.right, kDepth, product.n);
  }
}

// The oldest group that is not complete
inline void complete_group(Warp& warp) {
  static Tile tile;
  const std::vector<Wgmma>& group = warp.groups.front();
  for (size_t i = 0; i < group.size(); ++i) {
    const Wgmma& own = group[i];
    const u32 n = own.product.n;
    const auto has_the_same_d = [&](size_t other) { return other < group.size() && group[other].d[0] == own.d[0] && group[other].product.n == n; };
    const auto for_lanes_of_d = [&](auto visit) {
      for (u32 lane = 0; lane < kWarp; ++lane)
        for_own_numbers(lane, n, [&](u32 row, u32 column, u32 number) { visit(tile.sum[row][column], own.d[lane][number]); });
    };
    if (!has_the_same_d(i - 1)) for_lanes_of_d([](float& sum, float d) { sum = d; });
    multiply(warp, own, tile);
    if (!has_the_same_d(i + 1)) for_lanes_of_d([](float sum, float& d) { d = sum; });
  }
  warp.groups.pop_front();
  ++warp.completed;
  warp.ready |= warp.waiting;
  warp.waiting = 0;
}

// ---- issue: an instruction is issued by the last lane that comes to it ----
inline void issue(Warp& warp, Wgmma& own) {
  Block& block = *warp.block;
  if (own.commits) {
    warp.groups.push_back(std::move(warp.open));
    warp.open.clear();
    ++warp.committed;
    return post([&warp] { complete_group(warp); });
  }
  block.products.resize(block.warps.size() / kWarpgroup + 1);
  std::vector<Product>& products = block.products[warp.number / kWarpgroup];
  if (warp.products == products.size()) {
    products.push_back(own.product);
    ++machine.statistics.warpgroup_multiplications;
  } else if (!(products[warp.products] == own.product)) {
    fail("the warps of a warpgroup issue different wgmmas, at " + place(own.caller));
  }
  ++warp.products;
  if (!own.product.from_registers) begin_to_read(warp, own, own.product.a, own.product.a_transposed, kWarpgroup * kWarpRows);
  begin_to_read(warp, own, own.product.b, own.product.transposed, own.product.n);
  warp.open.push_back(std::move(own));
}

inline void hand_in(Wgmma&& mine) {
  Thread& self = *running;
  Warp& warp = *self.warp;
  const size_t number = self.wgmma_handed++ - warp.issued;
  if (number == warp.handed.size()) warp.handed.push_back(std::move(mine));
  Wgmma& own = warp.handed[number];
  if (own.commits != mine.commits || own.site.line != mine.site.line || strcmp(own.site.file, mine.site.file))
    fail("lanes of one warp diverge: wgmma at " + place(mine.site) + " here, at " + place(own.site) + " in another lane");
  if (!(own.product == mine.product)) fail("lanes of one warp issue different wgmmas, at " + place(mine.caller));
  own.lanes |= 1u << self.lane;
  own.d[self.lane] = mine.d[self.lane];
  own.a[self.lane] = mine.a[self.lane];
  bool is_known = own.commits;
  for (const View& view : own.views) is_known |= view.seen == self.seen;
  if (!is_known) {
    own.views.push_back(self);
    own.views.back().number = kNobody;
  }
  if (own.lanes != kWholeWarp) return;
  issue(warp, own);
  warp.handed.pop_front();
  ++warp.issued;
}

// ---- registers ----
inline void use_registers(Thread& self, const void* first, u32 count, bool only_reads, const void* caller) {
  const u8* const address = static_cast<const u8*>(first);
  if (self.registers.empty()) self.registers_base = address;
  if (address < self.registers_base) {
    self.registers.insert(self.registers.begin(), static_cast<size_t>(self.registers_base - address) / 4, Register());
    self.registers_base = address;
  }
  const size_t offset = static_cast<size_t>(address - self.registers_base) / 4;
  if (self.registers.size() < offset + count) self.registers.resize(offset + count);
  for (size_t i = offset; i < offset + count; ++i) {
    Register& own = self.registers[i];
    if (own.touched) fail("wgmma without wgmma.fence works on a register that was used at " + place(own.touched) + ", at " + place(caller));
    own.group = self.wgmma_committed + 1;
    own.is_read_only = only_reads;
    own.issued = caller;
  }
}

void wgmma(float* d, const u32* a, Product product, Site site) {
  const void* const caller = __builtin_return_address(0);
  Thread& self = *running;
  const u32 n = product.n;
  if (n < 8 || n > kMostColumns || n % 8) fail(format("a wgmma cannot have %u columns, at ", n) + place(caller));
  if (self.wgmma_fences == 0) fail("wgmma without wgmma.fence, at " + place(caller));
  use_registers(self, d, n / 2, false, caller);
  if (a) use_registers(self, a, 4, true, caller);
  product.from_registers = a != nullptr;
  if (!a) check_descriptor(product.a, caller);
  check_descriptor(product.b, caller);
  Wgmma mine = {product, false, site, caller};
  mine.d[self.lane] = d;
  mine.a[self.lane] = a;
  hand_in(std::move(mine));
}

void wgmma_fence() {
  Thread& self = *running;
  ++self.wgmma_fences;
  for (Register& own : self.registers) own.touched = nullptr;
}

void wgmma_commit_group(Site site) {
  ++running->wgmma_committed;
  hand_in({{}, true, site, __builtin_return_address(0)});
}

void wgmma_wait_group(u32 pending, Site site) {
  Thread& self = *running;
  Warp& warp = *self.warp;
  Block& block = *self.block;
  const u32 group = std::max(self.wgmma_committed, pending) - pending;
  while (warp.completed < group) {
    warp.waiting |= 1u << self.lane;
    wait_for("wgmma.wait_group", site);
  }
  self.wgmma_waited = std::max(self.wgmma_waited, group);
  if (!warp.to || warp.from != self.seen || warp.to_group != group) {
    const u32 clock = block.wgmma_clock(warp.number);
    Counts counts = *self.seen;
    if (counts.size() <= clock) counts.resize(clock + 1, block.first_count);
    counts[clock] = std::max(counts[clock], block.first_count + group);
    warp.from = self.seen;
    warp.to = std::make_shared<const Counts>(std::move(counts));
    warp.to_group = group;
  }
  self.see(warp.to);
  maybe_give_way();
}

}  // namespace emulator
