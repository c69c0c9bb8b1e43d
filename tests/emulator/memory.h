// Every access to memory that a kernel makes. g++ -fsanitize=thread calls a function before each; these functions stand in for its
// run-time library, which is never linked. Seen here: accesses outside every array and outside shared memory, misaligned ones, writes
// to inputs, second writes to an output, races in shared memory, and reads of shared memory that nothing was written to.
#pragma once
#include "machine.h"

namespace emulator {

inline u32 byte_mask(u32 first, u32 end) { return (1u << end) - (1u << first); }

// ---- shared memory ----
inline void note(Touch& touch, const Thread& self, u32 bytes, const void* caller) {
  if (touch.thread == self.number && touch.count == self.now && !touch.pending)
    touch.bytes |= bytes;
  else
    touch = {self.now, static_cast<u16>(self.number), static_cast<u8>(bytes), false, caller};
}

// Whether what `touch` tells of these bytes is not ordered before what the thread does now.
inline bool clashes(const Touch& touch, u32 bytes, const Thread& self) {
  return touch.bytes & bytes && touch.thread != self.number && touch.count > self.counts[touch.thread];
}

[[noreturn]] inline void fail_cell(u32 offset, bool write, const void* caller, const char* earlier, const Touch& touch) {
  fail(format("%s shared memory at offset %u at ", write ? "writes" : "reads", offset) + place(caller) +
       format(", which thread %u %s at ", touch.thread, earlier) + place(touch.caller));
}

inline void check_cell(Block& block, Thread& self, u32 cell, u32 bytes, bool write, const void* caller) {
  Touch& written = block.written[cell];
  if (written.pending && written.bytes & bytes)
    fail_cell(cell * kCell, write, caller, "fills with an asynchronous copy that it has not waited for, issued", written);
  if (clashes(written, bytes, self)) fail_cell(cell * kCell, write, caller, "writes without a barrier between,", written);
  if (!write) {
    if (bytes & ~block.initialised[cell]) fail(format("reads shared memory at offset %u, to which nothing was written, at ", cell * kCell) + place(caller));
    return note(block.read[self.warp->number * block.written.size() + cell], self, bytes, caller);
  }
  for (size_t i = cell; i < block.read.size(); i += block.written.size())
    if (clashes(block.read[i], bytes, self)) fail_cell(cell * kCell, write, caller, "reads without a barrier between,", block.read[i]);
  note(written, self, bytes, caller);
  block.initialised[cell] |= bytes;
}

template <class Visit> inline void for_cells(u32 offset, u32 bytes, Visit visit) {
  const u32 end = offset + bytes;
  if (offset % kCell == 0 && bytes % kCell == 0) {
    for (u32 cell = offset / kCell; cell < end / kCell; ++cell) visit(cell, kWholeCell);
    return;
  }
  for (u32 start = offset / kCell * kCell; start < end; start += kCell)
    visit(start / kCell, byte_mask(std::max(offset, start) - start, std::min(end - start, kCell)));
}

inline u32 check_bounds(const u8* address, u32 bytes, bool write, const void* caller) {
  const i64 offset = address - running->block->shared, end = machine.options.shared_bytes;
  if (offset < 0 || offset + bytes > end)
    fail(format("%s %u bytes at offset %lld of %lld bytes of shared memory, at ", write ? "writes" : "reads", bytes, offset, end) + place(caller));
  return static_cast<u32>(offset);
}

inline void check_shared(const u8* address, u32 bytes, bool write, const void* caller) {
  Thread& self = *running;
  Block& block = *self.block;
  const u32 offset = check_bounds(address, bytes, write, caller);
  if (!machine.options.watched) return;
  for_cells(offset, bytes, [&](u32 cell, u32 mask) { check_cell(block, self, cell, mask, write, caller); });
}

// ---- device memory ----
[[noreturn]] inline void fail_outside(const u8* address, u32 bytes, bool write, const void* caller) {
  const Region* nearest = nullptr;
  u64 least = ~0ull;
  for (const Region& region : machine.regions) {
    const u64 distance = address < region.base ? region.base - address : address - region.base;
    if (distance < least) least = distance, nearest = &region;
  }
  const std::string what = format("%s %u bytes outside every array at ", write ? "writes" : "reads", bytes) + place(caller);
  if (!nearest) fail(what);
  fail(what + format("; the nearest is %s, of %llu bytes, at byte %lld", nearest->name, nearest->bytes, static_cast<i64>(address - nearest->base)));
}

inline void check_global(const u8* address, u32 bytes, bool write, const void* caller) {
  for (size_t i = 0; i < machine.regions.size(); ++i) {
    const Region& region = machine.regions[i];
    const u64 offset = address - region.base;
    if (offset >= region.bytes) continue;
    if (offset + bytes > region.bytes) break;
    if (!write || region.writes == Writes::any) return;
    if (region.writes == Writes::none) fail(format("writes to %s at byte %llu, at ", region.name, offset) + place(caller));
    std::vector<bool>& written = machine.region_written[i];
    for (u64 byte = offset; byte < offset + bytes; ++byte) {
      if (written[byte]) fail(format("writes a second time to %s at byte %llu, at ", region.name, byte) + place(caller));
      written[byte] = true;
    }
    return;
  }
  const Kernel& kernel = *machine.kernel;
  if (!write && address >= kernel.low && address + bytes <= kernel.high) return;  // constants
  fail_outside(address, bytes, write, caller);
}

// ---- any access ----
inline void access(const void* pointer, u32 bytes, u32 alignment, bool write, const void* caller) {
  const Thread& self = *running;
  const u8* const address = static_cast<const u8*>(pointer);
  if (static_cast<size_t>(address - self.stack) < kStackBytes) return;
  if (++machine.statistics.accesses > kMaxAccesses) fail("goes on and on, at " + place(caller));
  if (reinterpret_cast<u64>(pointer) % alignment)
    fail(format("%s %u bytes at an address that is no multiple of %u, at ", write ? "writes" : "reads", bytes, alignment) + place(caller));
  const u8* const shared = self.block->shared;
  if (address + kSharedMargin >= shared && address < shared + machine.options.shared_bytes + kSharedMargin)
    check_shared(address, bytes, write, caller);
  else
    check_global(address, bytes, write, caller);
}

// ---- shared memory by 32-bit address, as PTX has it ----
u8* dynamic_shared() { return running->block->shared; }
u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - running->block->shared) + kWindow; }
inline u8* shared_pointer(u32 address, u32 alignment, const char* instruction, const void* caller) {
  if (address % alignment) fail(format("%s with shared address %u, no multiple of %u, at ", instruction, address, alignment) + place(caller));
  return running->block->shared + (static_cast<i64>(address) - kWindow);
}

}  // namespace emulator

// What the compiler calls.
extern "C" {
#define EMULATOR_HOOKS(bytes)                                                                                                        \
  void __tsan_read##bytes(void* address) { emulator::access(address, bytes, bytes, false, __builtin_return_address(0)); }            \
  void __tsan_write##bytes(void* address) { emulator::access(address, bytes, bytes, true, __builtin_return_address(0)); }            \
  void __tsan_unaligned_read##bytes(void* address) { emulator::access(address, bytes, 1, false, __builtin_return_address(0)); }      \
  void __tsan_unaligned_write##bytes(void* address) { emulator::access(address, bytes, 1, true, __builtin_return_address(0)); }
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
#undef EMULATOR_HOOKS
void __tsan_read_range(void* address, u64 bytes) { emulator::access(address, static_cast<u32>(bytes), 1, false, __builtin_return_address(0)); }
void __tsan_write_range(void* address, u64 bytes) { emulator::access(address, static_cast<u32>(bytes), 1, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
