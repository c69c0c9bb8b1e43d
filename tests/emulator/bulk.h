// Bulk copies between shared and device memory, stmatrix, and counters in device memory by which blocks tell each other of their work.
//
// Whatever order these counters make in device memory, data there is not watched; but a copy to it is done no earlier than its thread
// waits for it, unless the schedule says otherwise, so that a block that is told of it too early computes something else.
#pragma once
#include "mbarriers.h"
#include "matrices.h"
#include "tma.h"

namespace emulator {

constexpr u32 kBulkAlignment = 16;

inline void check_bulk(const void* global, u32 bytes, const void* caller) {
  if (bytes == 0 || bytes % kBulkAlignment || reinterpret_cast<u64>(global) % kBulkAlignment)
    fail(format("a bulk copy moves whole vectors of 16 bytes, not %u bytes at %p, at ", bytes, global) + place(caller));
}

// ---- to shared memory ----
void bulk_load(u32 shared, const void* global, u32 bytes, u32 mbarrier) {
  const void* const caller = __builtin_return_address(0);
  check_bulk(global, bytes, caller);
  check_global(static_cast<const u8*>(global), bytes, false, caller);
  begin_load(shared, bytes, kBulkAlignment, mbarrier, caller, [shared, global, bytes](Block& block) { memcpy(block.shared + (shared - kWindow), global, bytes); });
}

// ---- from shared memory ----
// What is read must have been written, for the asynchronous proxy to see.
inline void check_bulk_read(Block& block, u32 offset, u32 bytes, const char* how, const void* caller) {
  if (!machine.options.watched) return;
  for_cells(offset, bytes, [&](u32 cell, u32 mask) {
    const Touch& written = check_written(block, *running, cell, mask, false, how, caller);
    if (block.initialised[cell] != kWholeCell) fail_uninitialised(cell, how, caller);
    check_proxy_fence(block, *running, written, cell, caller);
  });
}
// write(from) does the copy, from the `bytes` of shared memory that start at `offset`.
template <class Write> inline void begin_bulk_write(u32 offset, u32 bytes, const void* caller, Write write) {
  Thread& self = *running;
  Block& block = *self.block;
  self.bulk_copies.push_back({self.bulk_group, offset, bytes, caller});
  BulkCopy* const own = &self.bulk_copies.back();
  block.bulk_reads.push_back(own);
  post([&block, own, write] {
    write(own->is_read ? own->words.data() : block.shared + own->offset);
    own->done = true;
    for (const auto& each : machine.blocks)
      for (Warp& warp : each->warps)
        for (Thread* thread : warp.lanes)
          if (!strcmp(thread->wait.what, "bulk copies")) wake(*thread);
  });
  maybe_give_way();
}

// One that adds keeps subnormal numbers on an H200, as measured, though PTX lets it take them for 0.
void bulk_write(void* global, u32 shared, u32 bytes, bool adds) {
  const void* const caller = __builtin_return_address(0);
  check_bulk(global, bytes, caller);
  check_global(static_cast<const u8*>(global), bytes, true, caller);
  const char* const how = "asks for a bulk copy of";
  const u32 offset = check_bounds(shared_pointer(shared, kBulkAlignment, "a bulk copy", caller), bytes, how, caller);
  check_bulk_read(*running->block, offset, bytes, how, caller);
  begin_bulk_write(offset, bytes, caller, [global, bytes, adds](const u8* from) {
    for (u32 i = 0; i < bytes; i += 4) {
      float x, sum;
      memcpy(&x, from + i, 4);
      memcpy(&sum, static_cast<u8*>(global) + i, 4);
      sum = adds ? sum + x : x;
      memcpy(static_cast<u8*>(global) + i, &sum, 4);
    }
  });
}

// Of a box of a tensor map, without what would leave the array
void tma_store(u32 shared, const void* encoded, u32 rank, Coordinates at) {
  const void* const caller = __builtin_return_address(0);
  const Map map = read_map(encoded, rank, caller);
  const u32 bytes = map.rows() * map.row_bytes();
  const char* const how = "asks for a copy by TMA of";
  const u32 offset = check_bounds(shared_pointer(shared, kBoxAlignment, "TMA", caller), bytes, how, caller);
  struct Line {
    u8* to;
    u32 from, bytes;
  };
  std::vector<Line> lines;
  for (u32 number = 0; number < map.rows(); ++number) {
    const Piece piece = piece_of(map, at, number);
    if (piece.bytes) check_global(piece.from, piece.bytes, true, caller);
    for (u32 i = 0, count; i < piece.bytes; i += count) {
      const u32 along = piece.to + i, from = swizzle(shared + number * map.row_bytes() + along, map.swizzle) - shared;
      count = std::min(kLine - along % kLine, piece.bytes - i);
      lines.push_back({const_cast<u8*>(piece.from) + i, from, count});
      check_bulk_read(*running->block, offset + from, count, how, caller);
    }
  }
  begin_bulk_write(offset, bytes, caller, [lines](const u8* from) {
    for (const Line& line : lines) memcpy(line.to, from + line.from, line.bytes);
  });
}

void bulk_commit_group() { ++running->bulk_group; }

// Its thread knows from now on that it has read shared memory, which it does now if it has not.
inline void end_read(Block& block, Thread& self, BulkCopy& copy) {
  if (copy.is_read) return;
  const u8* const from = block.shared + copy.offset;
  if (!copy.done) copy.words.assign(from, from + copy.bytes);
  copy.is_read = true;
  if (machine.options.watched)
    for_cells(copy.offset, copy.bytes, [&](u32 cell, u32 mask) {
      note(block.read[self.warp->number * block.written.size() + cell], self, mask, copy.caller);
    });
  block.bulk_reads.erase(std::find(block.bulk_reads.begin(), block.bulk_reads.end(), &copy));
}

// All but the last `pending` groups have read shared memory; in device memory they may be done later.
void bulk_wait_group_read(u32 pending) {
  Thread& self = *running;
  for (BulkCopy& copy : self.bulk_copies)
    if (copy.group + pending < self.bulk_group) end_read(*self.block, self, copy);
  maybe_give_way();
}

// All but the last `pending` groups are done.
void bulk_wait_group(u32 pending) {
  Thread& self = *running;
  Block& block = *self.block;
  const u32 group = std::max(self.bulk_group, pending) - pending;
  const auto is_waited_for = [&](const BulkCopy& copy) { return copy.group < group; };
  while (std::any_of(self.bulk_copies.begin(), self.bulk_copies.end(), [&](const BulkCopy& copy) { return is_waited_for(copy) && !copy.done; }))
    wait_for("bulk copies", {"wait_group", static_cast<i32>(pending)});
  self.wait.what = "";
  while (!self.bulk_copies.empty() && is_waited_for(self.bulk_copies.front())) {
    end_read(block, self, self.bulk_copies.front());
    self.bulk_copies.pop_front();
  }
}

// ---- stmatrix ----
void store_matrices(u32 address, Words4 words, Site site) {
  struct Operand {
    u32 address;
    Words4 words;
  } own = {address, words};
  const void* const caller = __builtin_return_address(0);
  check_shared(shared_pointer(address, kMatrixRowBytes, "stmatrix", caller), kMatrixRowBytes, true, caller);
  meet("stmatrix", site, kWholeWarp, own, [caller](Operand* const* lanes) {
    for (u32 matrix = 0; matrix < 4; ++matrix)
      for (u32 lane = 0; lane < kWarp; ++lane)
        memcpy(shared_pointer(lanes[8 * matrix + lane / 4]->address, kMatrixRowBytes, "stmatrix", caller) + 4 * (lane % 4), &lanes[lane]->words.x[matrix], 4);
  });
}

// ---- counters ----
void fence_proxy_async_global() {}

i32 ld_acquire(const i32* global) {
  access(global, sizeof *global, sizeof *global, false, __builtin_return_address(0));
  maybe_give_way();
  return *global;
}
void ld_acquire_until(const i32* global, i32 value, Site site) {
  access(global, sizeof *global, sizeof *global, false, __builtin_return_address(0));
  while (*global != value) {
    machine.value_waits.push_back({global, value, running});
    wait_for("device memory", site, value);
  }
  maybe_give_way();
}
void red_release_add(i32* global, i32 x) {
  access(global, sizeof *global, sizeof *global, true, __builtin_return_address(0));
  *global += x;
  const auto has_its_value = [](const ValueWait& wait) {
    if (*wait.global != wait.value) return false;
    wake(*wait.thread);
    return true;
  };
  machine.value_waits.erase(std::remove_if(machine.value_waits.begin(), machine.value_waits.end(), has_its_value), machine.value_waits.end());
  maybe_give_way();
}

}  // namespace emulator
