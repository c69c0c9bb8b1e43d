// mbarriers, work that is done beside the threads, fence.proxy.async, and the pool of registers.
#pragma once
#include "collectives.h"
#include "copies.h"

namespace emulator {

// ---- asynchronous work ----
inline void post(std::function<void()> done) {
  if (machine.options.asynchronous == Asynchronous::at_issue) return done();
  machine.work.push_back({running, std::move(done)});
}

// By the scheduler
inline void do_work(size_t number) {
  const Work work = std::move(machine.work[number]);
  machine.work.erase(machine.work.begin() + static_cast<i64>(number));
  machine.issuer = work.issuer;
  work.done();
  machine.issuer = nullptr;
}

// ---- what goes through the asynchronous proxy: TMA and wgmma ----
// What a thread did to shared memory until now comes before what the asynchronous proxy does after this.
void fence_proxy_async() {
  running->proxy_fences.push_back(running->now);
  ++running->now;
}

inline void check_proxy_fence(const Block& block, const View& reader, const Touch& written, u32 cell, const void* caller) {
  if (written.thread >= block.threads.size()) return;
  const std::vector<Count>& fences = block.threads[written.thread].proxy_fences;
  const auto fence = std::lower_bound(fences.begin(), fences.end(), written.count);
  if (fence == fences.end() || (written.thread != reader.number && *fence > reader.seen_of(written.thread)))
    fail_cell(cell * kCell, "reads through the asynchronous proxy", caller, "writes without fence.proxy.async between,", written);
}

// ---- mbarriers ----
constexpr i64 kMostBytes = (1 << 20) - 1;  // that a phase can be told of
constexpr u32 kMostArrivals = (1 << 20) - 1;
constexpr u32 kMbarrierBytes = 8;

inline std::string name_with_state(const MemoryBarrier& own) {
  return name_of(own) + format(", whose phase %u lacks %u of %u arrivals and %lld bytes", own.phase, own.pending, own.arrivals, own.bytes);
}

inline u32 mbarrier_offset(u32 address, const void* caller) {
  return check_bounds(shared_pointer(address, kMbarrierBytes, "mbarrier", caller), kMbarrierBytes, "has an mbarrier of", caller);
}

void mbarrier_init(u32 address, u32 arrivals, Site site) {
  const void* const caller = __builtin_return_address(0);
  Thread& self = *running;
  Block& block = *self.block;
  const u32 offset = mbarrier_offset(address, caller);
  if (arrivals < 1 || arrivals > kMostArrivals) fail(format("an mbarrier cannot be for %u arrivals, at ", arrivals) + place(caller));
  if (block.mbarrier_at.empty()) block.mbarrier_at.assign(machine.options.shared_bytes / kMbarrierBytes, -1);
  if (block.mbarrier_at[offset / kMbarrierBytes] >= 0) fail("makes an mbarrier where there is one already, at " + place(caller));
  check_shared(block.shared + offset, kMbarrierBytes, true, caller);
  for (u32 cell = offset / kCell; cell < (offset + kMbarrierBytes) / kCell; ++cell) block.written[cell].holds = Holds::mbarrier;
  MemoryBarrier own;
  own.clock = block.mbarrier_clock(block.mbarriers.size());
  own.made = site;
  for (const MemoryBarrier& other : block.mbarriers) own.of_line += other.made.line == site.line && !strcmp(other.made.file, site.file);
  own.maker = self.number;
  own.arrivals = own.pending = arrivals;
  block.mbarrier_at[offset / kMbarrierBytes] = static_cast<i32>(block.mbarriers.size());
  block.mbarriers.push_back(std::move(own));
}

void fence_mbarrier_init() {
  for (MemoryBarrier& own : running->block->mbarriers)
    if (own.maker == running->number && !own.published) own.published = running->now;
  ++running->now;
}

// The mbarrier at an address, for a thread that may know of it
inline MemoryBarrier& mbarrier_at(u32 address, const void* caller) {
  Thread& self = *running;
  Block& block = *self.block;
  const u32 offset = mbarrier_offset(address, caller);
  const i32 number = block.mbarrier_at.empty() ? -1 : block.mbarrier_at[offset / kMbarrierBytes];
  if (number < 0) fail(format("there is no mbarrier at offset %u, at ", offset) + place(caller));
  MemoryBarrier& own = block.mbarriers[static_cast<size_t>(number)];
  if (!own.published) fail(name_of(own) + " is used without fence.mbarrier_init after it was made, at " + place(caller));
  if (own.maker != self.number && own.published > self.seen_of(own.maker))
    fail(name_of(own) + " is used without a barrier after it was made, at " + place(caller));
  return own;
}

inline void end_phase_if_complete(Block& block, MemoryBarrier& own) {
  if (own.pending || own.bytes) return;
  own.pending = own.arrivals;
  ++own.phase;
  Counts counts = *own.join.take();
  if (own.passed) merge(counts, *own.passed, block.first_count);
  if (counts.size() <= own.clock) counts.resize(own.clock + 1, block.first_count);
  counts[own.clock] = block.first_count + own.phase;
  own.passed = std::make_shared<const Counts>(std::move(counts));
  own.to.reset();
  for (Thread* thread : own.waiting) wake(*thread);
  own.waiting.clear();
}

inline void change_bytes(MemoryBarrier& own, i64 change, const void* caller) {
  own.bytes += change;
  if (std::abs(own.bytes) > kMostBytes) fail(name_of(own) + format(" cannot count %lld bytes, at ", own.bytes) + place(caller));
}

inline void arrive(u32 address, u32 bytes, const void* caller) {
  MemoryBarrier& own = mbarrier_at(address, caller);
  if (own.pending == 0) fail(name_of(own) + format(" is for %u arrivals, and one more comes in phase %u at ", own.arrivals, own.phase) + place(caller));
  change_bytes(own, bytes, caller);
  own.join.add(*running);
  --own.pending;
  end_phase_if_complete(*running->block, own);
  maybe_give_way();
}
void mbarrier_arrive(u32 address) { arrive(address, 0, __builtin_return_address(0)); }
void mbarrier_arrive_expect_tx(u32 address, u32 bytes) { arrive(address, bytes, __builtin_return_address(0)); }

void mbarrier_wait(u32 address, u32 parity, Site site) {
  const void* const caller = __builtin_return_address(0);
  Thread& self = *running;
  Block& block = *self.block;
  MemoryBarrier& own = mbarrier_at(address, caller);
  if (parity > 1) fail(format("a phase has parity 0 or 1, not %u, at ", parity) + place(caller));
  if (own.phase % 2 == parity) {
    const u32 phase = own.phase;
    own.waiting.push_back(&self);
    wait_for("mbarrier", site, static_cast<i32>(own.clock - block.mbarrier_clock(0)), parity);
    if (own.phase != phase + 1)
      fail(name_of(own) + format(" ends %u phases while a thread waits for one, at ", own.phase - phase) + place(caller));
  }
  if (own.passed) {
    if (own.from != self.seen || !own.to) {
      Counts counts = *self.seen;
      merge(counts, *own.passed, block.first_count);
      own.from = self.seen;
      own.to = std::make_shared<const Counts>(std::move(counts));
    }
    self.see(own.to);
  }
  maybe_give_way();
}

// By TMA, in the phase in which it was asked to
inline void complete_bytes(Block& block, MemoryBarrier& own, u32 bytes, u32 phase, const void* caller) {
  if (own.phase != phase)
    fail(name_of(own) + format(" is in phase %u when bytes arrive that belong to phase %u: too few were announced, at ", own.phase, phase) + place(caller));
  change_bytes(own, -static_cast<i64>(bytes), caller);
  end_phase_if_complete(block, own);
}

// ---- loads by TMA ----
// To be done at any time from now on, by `write`, which then reports its bytes. Until then nobody may touch their place.
template <class Write>
inline void begin_load(u32 shared, u32 bytes, u32 alignment, u32 mbarrier, const void* caller, Write write) {
  Thread& self = *running;
  Block& block = *self.block;
  const char* const how = "asks TMA to write";
  const u32 offset = check_bounds(shared_pointer(shared, alignment, "TMA", caller), bytes, how, caller);
  MemoryBarrier& own = mbarrier_at(mbarrier, caller);
  const u32 phase = own.phase;
  if (machine.options.watched) {
    check_wgmma_reads(block, self, offset, bytes, how, caller);
    check_bulk_reads(block, offset, bytes, how, caller);
    const Touch touch = {block.first_count + phase + 1, static_cast<u16>(own.clock), kWholeCell, Holds::data, caller};
    for_cells(offset, bytes, [&](u32 cell, u32 mask) {
      check_written(block, self, cell, mask, true, how, caller);
      check_read(block, self, cell, mask, how, caller);
      block.written[cell] = touch;
      if (!block.repeated.empty()) block.repeated.erase(cell);
      block.initialised[cell] = kWholeCell;
    });
  }
  ++machine.statistics.loads;
  ++block.loads;
  memset(block.shared + offset, kPoison, bytes);
  post([&block, &own, write, bytes, phase, caller] {
    write(block);
    --block.loads;
    complete_bytes(block, own, bytes, phase, caller);
  });
  maybe_give_way();
}

// ---- setmaxnreg ----
constexpr u32 kFewestRegisters = 24, kMostRegisters = 256, kRegisterStep = 8;

void set_registers(u32 count, bool more, Site site) {
  const void* const caller = __builtin_return_address(0);
  const char* const instruction = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
  Thread& self = *running;
  Block& block = *self.block;
  Warp& warp = *self.warp;
  const u32 before = warp.registers;
  meet(instruction, site, kWholeWarp, self, [](Thread* const*) {});
  if (count % kRegisterStep || count < kFewestRegisters || count > kMostRegisters || (more ? count < before : count > before))
    fail(format("%s of %u registers to %u, at ", instruction, before, count) + place(caller));
  if (self.lane == 0) {
    while (more && block.free_registers < (count - before) * kWarp) {
      block.waiting_for_registers.push_back(&self);
      wait_for(instruction, site);
    }
    block.free_registers += (before - count) * kWarp;
    warp.registers = count;
    for (Thread* thread : block.waiting_for_registers) wake(*thread);
    block.waiting_for_registers.clear();
  }
  meet(instruction, site, kWholeWarp, self, [](Thread* const*) {});
}

}  // namespace emulator
