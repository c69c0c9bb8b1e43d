// Which thread runs next, the launch from start to end, and the report of a deadlock.
#pragma once
#include <sys/mman.h>
#include <algorithm>
#include <map>
#include "bulk.h"
#include "tma.h"
#include "wgmma.h"

namespace emulator {

// ---- what kernels ask of the thread that runs ----
dim3 thread_index() { return {running->number, 0, 0}; }
dim3 block_index() { return running->block->index; }
dim3 block_dim() { return {machine.options.threads, 1, 1}; }
dim3 grid_dim() { return {machine.options.grid[0], machine.options.grid[1], machine.options.grid[2]}; }

// ---- the life of a thread ----
inline void leave_kernel(Thread& self) {
  Warp& warp = *self.warp;
  Block& block = *self.block;
  if (!self.bulk_copies.empty()) fail("leaves the kernel without waiting for its bulk copy issued at " + place(self.bulk_copies[0].caller));
  if (!self.copies.empty()) fail("leaves the kernel without waiting for its cp.async issued at " + place(self.copies[0].caller));
  for (const Meeting& meeting : warp.meetings)
    if (meeting.mask >> self.lane & 1) fail(format("leaves the kernel while lanes of its warp wait for it in %s, ", meeting.instruction) + place(meeting.site));
  if (self.wgmma_waited < self.wgmma_committed) fail("leaves the kernel without waiting for its wgmma");
  if (!warp.open.empty() || (!warp.handed.empty() && self.wgmma_handed > warp.issued))
    fail("leaves the kernel with a wgmma that is not committed, issued at " +
         place(warp.open.empty() ? warp.handed.front().caller : warp.open.front().caller));
  warp.alive &= ~(1u << self.lane);
  warp.ready &= ~(1u << self.lane);
  --block.alive;
  block.count = std::max(block.count, self.now);
  for (Barrier& barrier : block.barriers)
    if (barrier.threads == 0) release_if_complete(block, barrier);
}

inline void thread_main() {
  machine.kernel->call(machine.params);
  leave_kernel(*running);
  running->fiber.switch_to(machine.scheduler);  // for good
}

// ---- the life of a block ----
class Stacks {
 public:
  explicit Stacks(size_t count) : bytes_(count * kStackBytes) {
    base_ = static_cast<u8*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) fail("no memory for the stacks of the threads");
    for (size_t i = 0; i < count; ++i) mprotect(base_ + i * kStackBytes, kPage, PROT_NONE);  // where an overflow ends
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() { munmap(base_, bytes_); }
  u8* operator[](size_t i) const { return base_ + i * kStackBytes; }

 private:
  size_t bytes_;
  u8* base_;
};

inline void allocate(Block& block, const Stacks& stacks, size_t first_stack) {
  const u32 threads = machine.options.threads, warps = threads / kWarp, bytes = machine.options.shared_bytes;
  const u32 cells = (bytes + kCell - 1) / kCell;
  const size_t alignment = 1024;
  block.memory = std::make_unique<u8[]>(kSharedMargin * 2 + bytes + 2 * alignment);
  u8* const inside = block.memory.get() + kSharedMargin;
  block.shared = inside + (alignment - reinterpret_cast<u64>(inside) % alignment) % alignment + kWindow % alignment;
  block.threads = std::vector<Thread>(threads);
  block.warps = std::vector<Warp>(warps);
  block.written.assign(cells, Touch());
  block.read.assign(static_cast<size_t>(cells) * warps, Touch());
  block.initialised.assign(cells, 0);
  for (u32 number = 0; number < threads; ++number) {
    Thread& thread = block.threads[number];
    Warp& warp = block.warps[number / kWarp];
    thread.stack = stacks[first_stack + number];
    thread.warp = &warp;
    thread.block = &block;
    thread.number = number;
    thread.lane = number % kWarp;
    warp.block = &block;
    warp.number = number / kWarp;
    warp.lanes[thread.lane] = &thread;
  }
}

inline void start(Block& block, u64 linear) {
  const Options& options = machine.options;
  block.index = {static_cast<u32>(linear % options.grid[0]), static_cast<u32>(linear / options.grid[0] % options.grid[1]),
                 static_cast<u32>(linear / options.grid[0] / options.grid[1])};
  block.live = true;
  block.alive = options.threads;
  block.first_count = block.count;
  block.mbarriers.clear();
  block.mbarrier_at.clear();
  block.repeated.clear();
  block.products.clear();
  const u32 registers = std::min(kRegistersPerBlock / options.threads / kRegisterStep * kRegisterStep, kMostRegisters);
  block.free_registers = 0;
  std::fill(block.written.begin(), block.written.end(), Touch());
  memset(block.shared, kPoison, options.shared_bytes);
  std::fill(block.initialised.begin(), block.initialised.end(), 0);
  for (Barrier& barrier : block.barriers) barrier = Barrier();
  // What the block before this one did is ordered before all that this one does.
  const auto seen = std::make_shared<const Counts>(options.threads, block.count);
  for (Thread& thread : block.threads) {
    thread.now = block.count + 1;
    thread.see(seen);
    thread.copy_group = thread.bulk_group = 0;
    thread.proxy_fences.clear();
    thread.registers.clear();
    thread.doubt.bytes = 0;
    thread.callers.clear();
    thread.wgmma_fences = thread.wgmma_handed = thread.wgmma_committed = thread.wgmma_waited = 0;
    thread.fiber.start(thread.stack, kStackBytes, thread_main);
  }
  for (Warp& warp : block.warps) {
    warp.alive = warp.ready = kWholeWarp;
    warp.registers = registers;
    warp.issued = warp.products = warp.committed = warp.completed = 0;
    warp.from = warp.to = nullptr;
  }
}

// When all its threads have left
inline void end(Block& block) {
  const std::string name = format("block (%u, %u, %u) ends ", block.index.x, block.index.y, block.index.z);
  if (block.loads) fail(name + format("while %u loads by TMA are under way", block.loads));
  for (const MemoryBarrier& own : block.mbarriers) {
    if (own.bytes) fail(name + "with " + name_with_state(own));
    block.count = std::max(block.count, block.first_count + own.phase);
  }
  for (const Warp& warp : block.warps) {
    const Warp& first = block.warps[warp.number / kWarpgroup * kWarpgroup];
    if (warp.registers != first.registers)
      fail(name + format("with different setmaxnreg in warps %u and %u of a warpgroup", first.number, warp.number));
    block.count = std::max(block.count, block.first_count + warp.committed);
  }
}

// ---- rounds ----
inline void resume(Thread& thread) {
  running = &thread;
  ++machine.statistics.switches;
  machine.scheduler.switch_to(thread.fiber);
  running = nullptr;
  if (!machine.report.empty()) throw Failure();
  if (thread.doubt.bytes) {
    machine.issuer = &thread;
    settle_doubt(thread);
    machine.issuer = nullptr;
  }
}

inline u32 next_lane(u32 lanes) {
  const u32 lowest = static_cast<u32>(__builtin_ctz(lanes)), highest = kWarp - 1 - static_cast<u32>(__builtin_clz(lanes));
  if (machine.options.order == Order::forward) return lowest;
  if (machine.options.order == Order::reverse) return highest;
  const u32 from = machine.random() % kWarp;
  const u32 above = lanes & (kWholeWarp << from);
  return above ? static_cast<u32>(__builtin_ctz(above)) : lowest;
}

inline bool run(Warp& warp) {
  const bool at_random = machine.options.order == Order::random;
  const bool ahead = machine.options.run_ahead && (!at_random || machine.random() % 2);
  bool ran = false;
  do {
    for (u32 lanes = warp.ready; lanes;) {
      const u32 lane = next_lane(lanes);
      lanes &= ~(1u << lane);
      resume(*warp.lanes[lane]);
      ran = true;
    }
  } while (ahead && warp.ready);
  if (machine.options.asynchronous == Asynchronous::at_random) {
    if (machine.random() % 2) complete_some_copy(*warp.block);
    const u32 one_in = 1u << machine.options.seed % 5;  // each seed has its own pace
    if (!machine.work.empty() && machine.random() % one_in == 0) {
      do_work(machine.random() % machine.work.size());
      ran = true;
    }
  }
  return ran;
}

// Where asynchronous work is done at last, nothing else can go on.
inline bool do_overdue_work() {
  if (machine.work.empty()) return false;
  do_work(machine.options.order == Order::reverse ? machine.work.size() - 1 : 0);
  return true;
}

// Threads that wait for the same thing are told in one line.
inline std::string deadlock() {
  std::string report = "deadlock: no thread can go on";
  for (const auto& block : machine.blocks) {
    std::map<std::string, std::vector<u32>> waits;
    for (const Thread& thread : block->threads) {
      if (!(thread.warp->alive >> thread.lane & 1)) continue;
      const Wait& wait = thread.wait;
      std::string what = std::string(wait.what) + " at " + place(wait.site);
      if (!strcmp(wait.what, "mbarrier")) {
        what = name_with_state(block->mbarriers[static_cast<size_t>(wait.id)]) + format(", for parity %u, at ", wait.parity) + place(wait.site);
      } else if (!strcmp(wait.what, "barrier")) {
        const Barrier& barrier = block->barriers[wait.id];
        what = format("barrier %d, where %u of %u threads are, at ", wait.id, barrier.arrived, threads_of(*block, barrier)) + place(wait.site);
      }
      if (!strcmp(wait.what, "wgmma.wait_group"))
        what += format(", where %u of %u groups are done", thread.warp->completed, thread.wgmma_committed);
      waits[what].push_back(thread.number);
    }
    const dim3 index = block->index;
    for (const auto& [what, threads] : waits)
      report += format("\n  block (%u, %u, %u): %zu threads, %u to %u, wait in ", index.x, index.y, index.z, threads.size(), threads.front(), threads.back()) + what;
  }
  return report;
}

inline void run_blocks() {
  const Options& options = machine.options;
  const u64 total = static_cast<u64>(options.grid[0]) * options.grid[1] * options.grid[2];
  const u64 resident = std::min<u64>(std::max(options.resident, 1u), total);
  const Stacks stacks(resident * options.threads);
  std::vector<Warp*> order;
  u64 next = 0;
  for (; next < resident; ++next) {
    Block& block = *machine.blocks.emplace_back(std::make_unique<Block>());
    allocate(block, stacks, next * options.threads);
    start(block, next);
    for (Warp& warp : block.warps) order.push_back(&warp);
  }
  if (options.order == Order::reverse) std::reverse(order.begin(), order.end());
  for (u64 finished = 0; finished < total;) {
    bool ran = false;
    if (options.order == Order::random) std::shuffle(order.begin(), order.end(), machine.random);
    for (Warp* warp : order) ran |= run(*warp);
    if (!ran && !do_overdue_work()) {
      machine.report = deadlock();
      throw Failure();
    }
    for (const auto& block : machine.blocks) {
      if (!block->live || block->alive) continue;
      end(*block);
      ++finished;
      block->live = next < total;
      if (block->live) start(*block, next++);
    }
  }
}

}  // namespace emulator
