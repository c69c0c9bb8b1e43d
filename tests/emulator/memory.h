// Every access to memory that a kernel makes. g++ -fsanitize=thread calls a function before each; these functions stand in for its
// run-time library, which is never linked. Seen here: accesses outside every array and outside shared memory, misaligned ones, writes
// to inputs, second writes to an output, races in shared memory, and reads of shared memory that nothing was written to.
#pragma once
#include "machine.h"

namespace emulator {

inline u32 byte_mask(u32 first, u32 end) { return (1u << end) - (1u << first); }

// ---- shared memory ----
inline void note(Touch& touch, const Thread& self, u32 bytes, const void* caller) {
  if (touch.thread == self.number && touch.count == self.now && touch.holds == Holds::data)
    touch.bytes |= bytes;
  else
    touch = {self.now, static_cast<u16>(self.number), static_cast<u8>(bytes), Holds::data, caller};
}

// Whether what `touch` tells of these bytes is not ordered before what the thread does now.
inline bool clashes(const Touch& touch, u32 bytes, const View& self) {
  return touch.bytes & bytes && touch.thread != self.number && touch.count > self.seen_of(touch.thread);
}

inline std::string name_of(const MemoryBarrier& barrier) { return format("mbarrier %u of ", barrier.of_line) + place(barrier.made); }

// `how` tells what is done to shared memory, such as "reads"; `earlier` what thread touch.thread has done.
[[noreturn]] inline void fail_cell(u32 offset, const char* how, const void* caller, const char* earlier, const Touch& touch) {
  const Block& block = *running->block;
  const std::string what = format("%s shared memory at offset %u at ", how, offset) + place(caller) + ", which ";
  const u32 first = block.mbarrier_clock(0);
  if (touch.holds == Holds::mbarrier) fail(what + "holds the mbarrier made at " + place(touch.caller));
  if (touch.thread >= first)
    conflict(what + "TMA fills; it has not waited for the phase of " + name_of(block.mbarriers[touch.thread - first]) +
             " that tells of it, the load was issued at " + place(touch.caller));
  conflict(what + format("thread %u %s at ", touch.thread, earlier) + place(touch.caller));
}

// Writes that change nothing, of what another thread wrote, need no order: a reader must know of one of them, a writer of all.
inline const Touch* known_repetition(const Block& block, const View& self, u32 cell, u32 bytes) {
  const auto found = block.repeated.find(cell);
  if (found == block.repeated.end()) return nullptr;
  for (const Touch& touch : found->second)
    if (!(bytes & ~touch.bytes) && !clashes(touch, bytes, self)) return &touch;
  return nullptr;
}
inline void check_repetitions(const Block& block, const View& self, u32 cell, u32 bytes, const char* how, const void* caller) {
  const auto found = block.repeated.find(cell);
  if (found == block.repeated.end()) return;
  for (const Touch& touch : found->second)
    if (clashes(touch, bytes, self)) fail_cell(cell * kCell, how, caller, "writes without a barrier between,", touch);
}

// What was written to these bytes must be done, and ordered before what the thread does now. Returns by whom.
inline const Touch& check_written(const Block& block, const View& self, u32 cell, u32 bytes, bool write, const char* how, const void* caller) {
  const Touch& written = block.written[cell];
  if (written.holds != Holds::data && written.bytes & bytes)
    fail_cell(cell * kCell, how, caller, "fills with an asynchronous copy that it has not waited for, issued", written);
  if (write && !block.repeated.empty()) check_repetitions(block, self, cell, bytes, how, caller);
  if (!clashes(written, bytes, self)) return written;
  if (const Touch* const other = write ? nullptr : known_repetition(block, self, cell, bytes)) return *other;
  fail_cell(cell * kCell, how, caller, "writes without a barrier between,", written);
}
[[noreturn]] inline void fail_uninitialised(u32 cell, const char* how, const void* caller) {
  fail(format("%s shared memory at offset %u, to which nothing was written, at ", how, cell * kCell) + place(caller));
}

// And so must be what was read.
inline void check_read(const Block& block, const View& self, u32 cell, u32 bytes, const char* how, const void* caller) {
  for (size_t i = cell; i < block.read.size(); i += block.written.size())
    if (clashes(block.read[i], bytes, self)) fail_cell(cell * kCell, how, caller, "reads without a barrier between,", block.read[i]);
}

// wgmma may not be reading these bytes, as far as the thread knows.
inline void check_wgmma_reads(const Block& block, const View& self, u32 offset, u32 bytes, const char* how, const void* caller) {
  if (block.wgmma_reads.empty()) return;
  const size_t lines = block.wgmma_reads.size() / block.warps.size();
  for (u32 warp = 0; warp < block.warps.size(); ++warp)
    for (u32 line = offset / kLine; line <= (offset + bytes - 1) / kLine; ++line) {
      const WgmmaRead& read = block.wgmma_reads[warp * lines + line];
      if (read.group > self.seen_of(block.wgmma_clock(warp)))
        conflict(format("%s shared memory at offset %u at ", how, line * kLine) + place(caller) +
             format(", which a wgmma of warp %u reads that may still run, issued at ", warp) + place(read.caller));
    }
}

// Nor may a bulk copy.
inline void check_bulk_reads(const Block& block, u32 offset, u32 bytes, const char* how, const void* caller) {
  for (const BulkCopy* copy : block.bulk_reads)
    if (offset < copy->offset + copy->bytes && copy->offset < offset + bytes)
      fail(format("%s shared memory at offset %u at ", how, offset) + place(caller) + ", which a bulk copy reads that may still be under way, issued at " + place(copy->caller));
}

inline void check_cell(Block& block, Thread& self, u32 cell, u32 bytes, bool write, const void* caller) {
  const char* const how = write ? "writes" : "reads";
  check_written(block, self, cell, bytes, write, how, caller);
  if (!write) {
    if (bytes & ~block.initialised[cell]) fail_uninitialised(cell, how, caller);
    return note(block.read[self.warp->number * block.written.size() + cell], self, bytes, caller);
  }
  check_read(block, self, cell, bytes, how, caller);
  note(block.written[cell], self, bytes, caller);
  if (!block.repeated.empty()) block.repeated.erase(cell);
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

inline u32 check_bounds(const u8* address, u32 bytes, const char* how, const void* caller) {
  const i64 offset = address - running->block->shared, end = machine.options.shared_bytes;
  if (offset < 0 || offset + bytes > end)
    fail(format("%s %u bytes at offset %lld of %lld bytes of shared memory, at ", how, bytes, offset, end) + place(caller));
  return static_cast<u32>(offset);
}

inline void check_shared(const u8* address, u32 bytes, bool write, const void* caller) {
  Thread& self = *running;
  Block& block = *self.block;
  const char* const how = write ? "writes" : "reads";
  const u32 offset = check_bounds(address, bytes, how, caller);
  if (!machine.options.watched) return;
  const auto check = [&] {
    if (write) check_wgmma_reads(block, self, offset, bytes, how, caller);
    if (write) check_bulk_reads(block, offset, bytes, how, caller);
    for_cells(offset, bytes, [&](u32 cell, u32 mask) { check_cell(block, self, cell, mask, write, caller); });
  };
  if (!write || bytes > sizeof self.doubt.before) return check();
  machine.may_change_nothing = true;
  try {
    check();
  } catch (const Conflict& conflict) {
    self.doubt = {block.shared + offset, bytes, {}, {self.now, static_cast<u16>(self.number), 0, Holds::data, caller}, conflict.report};
    memcpy(self.doubt.before, self.doubt.address, bytes);
  }
  machine.may_change_nothing = false;
}

// The write of which that was not known has been done.
inline void settle_doubt(Thread& self) {
  Block& block = *self.block;
  Doubt& doubt = self.doubt;
  if (memcmp(doubt.before, doubt.address, doubt.bytes)) fail(doubt.report);
  for_cells(static_cast<u32>(doubt.address - block.shared), doubt.bytes, [&](u32 cell, u32 mask) {
    std::vector<Touch>& all = block.repeated[cell];
    all.push_back(doubt.touch);
    all.back().bytes = static_cast<u8>(mask);
  });
  doubt.bytes = 0;
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

// ---- registers that wgmma works on: local arrays, on the stack of their thread ----
inline void check_registers(Thread& self, const u8* address, u32 bytes, bool write, const void* caller) {
  if (address + bytes <= self.registers_base || address >= self.registers_base + self.registers.size() * 4) return;
  const i64 offset = address - self.registers_base;
  for (i64 i = std::max<i64>(offset, 0) / 4; i <= (offset + bytes - 1) / 4 && i < static_cast<i64>(self.registers.size()); ++i) {
    Register& own = self.registers[static_cast<size_t>(i)];
    if (own.group > self.wgmma_waited && (write || !own.is_read_only))
      fail(std::string(write ? "writes" : "reads") + " a register of a wgmma that it has not waited for, at " + place(caller) + ", issued at " + place(own.issued));
    own.touched = caller;
  }
}

// ---- any access ----
inline void access(const void* pointer, u32 bytes, u32 alignment, bool write, const void* caller) {
  Thread& self = *running;
  if (self.doubt.bytes) settle_doubt(self);
  const u8* const address = static_cast<const u8*>(pointer);
  if (static_cast<size_t>(address - self.stack) < kStackBytes) {
    if (!self.registers.empty()) check_registers(self, address, bytes, write, caller);
    return;
  }
  if (++machine.statistics.accesses > kMaxAccesses) fail("goes on and on, at " + place(caller));
  if (reinterpret_cast<u64>(pointer) % alignment)
    fail(format("%s %u bytes at an address that is no multiple of %u, at ", write ? "writes" : "reads", bytes, alignment) + place(caller));
  const u8* const shared = self.block->shared;
  if (address + kSharedMargin >= shared && address < shared + machine.options.shared_bytes + kSharedMargin)
    check_shared(address, bytes, write, caller);
  else
    check_global(address, bytes, write, caller);
}

// ---- atomics: whole, as no other thread runs meanwhile ----
u32 atomic_inc(u32* address, u32 limit) {
  access(address, sizeof *address, sizeof *address, true, __builtin_return_address(0));
  const u32 before = *address;
  *address = before >= limit ? 0 : before + 1;
  maybe_give_way();
  return before;
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
void __tsan_func_entry(void* caller) { emulator::running->callers.push_back(caller); }
void __tsan_func_exit() { emulator::running->callers.pop_back(); }
}
