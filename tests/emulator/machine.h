// The state of a launch: blocks that are resident at the same time, their warps and threads, and how a launch fails.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>
#include "fiber.h"

namespace emulator {

constexpr u32 kWarp = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxSharedBytes = 227 * 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPage = 4096;
constexpr u64 kMaxAccesses = 200'000'000;  // a launch that makes more is taken for an endless loop

// ---- what a launch is asked to do; launch.py holds the same structures ----
enum class Order : u32 { forward, reverse, random };
enum class Asynchronous : u32 { at_issue, at_last, at_random };

struct Options {
  u32 grid[3];
  u32 threads;
  u32 shared_bytes;
  u32 resident;               // blocks that run side by side
  Order order;                // of warps in a round, and of lanes in a warp
  u32 run_ahead;              // a warp goes on until none of its lanes can, instead of once a round
  u32 seed;
  Asynchronous asynchronous;  // when asynchronous copies are done, between their issue and the wait for them
  u32 watched;                // whether races and reads of what nothing was written to are reported
};

enum class Writes : u32 { none, once, any };

// A piece of device memory that the kernel may touch.
struct Region {
  const char* name;
  u8* base;
  u64 bytes;
  Writes writes;
};

struct Statistics {
  u64 switches, accesses, multiplications, copies;
};

// ---- time, as far as it orders memory accesses ----
// Every thread counts its own synchronisations. `seen[t]` is the count of thread t whose accesses are ordered before this thread's.
using Count = u32;
using Counts = std::vector<Count>;
struct Thread;

// Where threads meet and learn what the others have seen.
class Join {
 public:
  void add(Thread& thread);                     // it arrives
  std::shared_ptr<const Counts> take();         // what all who arrived have seen; starts afresh

 private:
  std::shared_ptr<Counts> counts_;
  std::shared_ptr<const Counts> last_;
};

// ---- threads, warps, blocks ----
struct Wait {
  const char* what = "";
  Site site = {"", 0};
  i32 id = 0;
};

struct Copy {  // one cp.async
  u32 group;
  u8* to;
  const u8* from;
  u32 bytes, bytes_read;
  bool done;
  const void* caller;
};

struct Thread {
  Fiber fiber;
  u8* stack = nullptr;
  struct Warp* warp = nullptr;
  struct Block* block = nullptr;
  u32 number = 0, lane = 0;
  Wait wait;
  Count now = 0;
  std::shared_ptr<const Counts> seen;
  const Count* counts = nullptr;  // those of `seen`
  std::vector<Copy> copies;
  u32 copy_group = 0;  // the group that is open
  u32 votes = 0;       // of the barrier that it passed last

  void see(std::shared_ptr<const Counts> all) {
    seen = std::move(all);
    counts = seen->data();
  }
};

// Lanes that execute one instruction together.
struct Meeting {
  const char* instruction;
  Site site;
  u32 mask, arrived;
  void* operands[kWarp];
};

struct Warp {
  struct Block* block = nullptr;
  u32 number = 0;
  u32 alive = 0;  // lanes that have not left the kernel
  u32 ready = 0;  // of these, those that do not wait
  Thread* lanes[kWarp] = {};
  std::vector<Meeting> meetings;
};

struct Barrier {
  u32 arrived = 0;
  u32 votes = 0;  // of these, how many said true
  u32 threads = 0;  // that it is for; 0: all that are left
  Site site = {"", 0};
  Join join;
  std::vector<Thread*> waiting;
};

// What is known of 4 bytes of shared memory: who touched them last.
struct Touch {
  Count count = 0;
  u16 thread = 0;
  u8 bytes = 0;          // a bit each
  bool pending = false;  // a copy that its thread has not waited for
  const void* caller = nullptr;
};

constexpr u32 kBarriers = 16;
constexpr u32 kCell = 4;
constexpr u32 kWholeCell = (1 << kCell) - 1;  // a bit for each byte
constexpr u32 kWindow = 1024 + 128;      // where dynamic shared memory starts: not at 0, and aligned to 128 bytes but no better
constexpr u32 kSharedMargin = 64 << 10;  // around shared memory, so that what misses it is recognised

struct Block {
  dim3 index;
  bool live = false;                // whether it is one of the grid, not an empty place
  u32 alive = 0;                    // threads that have not left the kernel
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::unique_ptr<u8[]> memory;
  u8* shared = nullptr;             // dynamic shared memory
  Count count = 0;                  // the highest that any thread has reached; goes on from one block to the next
  std::vector<Touch> written;       // by cell
  std::vector<Touch> read;          // by warp and cell
  std::vector<u8> initialised;      // by cell: a bit for each byte
};

struct Machine {
  Options options;
  const Kernel* kernel;
  const void* params;
  std::vector<Region> regions;
  std::vector<std::vector<bool>> region_written;
  std::vector<std::unique_ptr<Block>> blocks;
  Fiber scheduler;
  std::mt19937 random;
  Statistics statistics;
  std::string report;  // why the launch failed
};

inline Machine machine;
inline Thread* running;  // null while the scheduler runs

// ---- failure ----
struct Failure {};

inline std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* text, ...) {
  char line[1024];
  va_list values;
  va_start(values, text);
  vsnprintf(line, sizeof line, text, values);
  va_end(values);
  return line;
}

inline std::string name_of(const Thread& thread) {
  const dim3 block = thread.block->index;
  return format("block (%u, %u, %u) thread %u", block.x, block.y, block.z, thread.number);
}

// An address of the kernel's code, for launch.py to look up.
inline std::string place(const void* caller) {
  return format("<+%#llx>", static_cast<unsigned long long>(static_cast<const u8*>(caller) - machine.kernel->low));
}
inline std::string place(Site site) { return format("%s:%d", site.file, site.line); }

// Ends the launch. A thread that fails is left where it stands; the scheduler finds the report.
[[noreturn]] inline void fail(const std::string& report) {
  if (!running) {
    machine.report = report;
    throw Failure();
  }
  machine.report = name_of(*running) + ": " + report;
  running->fiber.switch_to(machine.scheduler);
  __builtin_unreachable();
}

void trap(Site site) { fail("trap at " + place(site)); }

// The running thread waits until its warp's `ready` has its bit again.
inline void wait_for(const char* what, Site site, i32 id = 0) {
  Thread& self = *running;
  self.wait = {what, site, id};
  self.warp->ready &= ~(1u << self.lane);
  self.fiber.switch_to(machine.scheduler);
}
inline void wake(Thread& thread) { thread.warp->ready |= 1u << thread.lane; }

// ---- Join ----
inline void Join::add(Thread& thread) {
  if (!counts_) {
    counts_ = std::make_shared<Counts>(*thread.seen);
    last_ = thread.seen;
  } else if (last_ != thread.seen) {
    for (size_t i = 0; i < counts_->size(); ++i) (*counts_)[i] = std::max((*counts_)[i], (*thread.seen)[i]);
    last_ = thread.seen;
  }
  Count& own = (*counts_)[thread.number];
  own = std::max(own, thread.now);
  ++thread.now;
}
inline std::shared_ptr<const Counts> Join::take() {
  last_.reset();
  return std::move(counts_);
}

}  // namespace emulator
