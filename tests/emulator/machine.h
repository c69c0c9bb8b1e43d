// The state of a launch: blocks that are resident at the same time, their warps and threads, and how a launch fails.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
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
  Asynchronous asynchronous;  // when asynchronous work is done, between its issue and the wait for it
  u32 watched;                // whether races and reads of what nothing was written to are reported
  u32 sum_bits;               // that tensor cores keep of what they add; 0: they add floats
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
  u64 switches, accesses, multiplications, copies, loads, warpgroup_multiplications;
};

// ---- time, as far as it orders memory accesses ----
// Every thread counts its own synchronisations. `seen[t]` is the count of thread t whose accesses are ordered before this thread's.
// What works beside the threads has clocks of its own, which follow theirs: the wgmma groups of each warp, and for each mbarrier its
// phases, which are the time of what TMA writes. A clock that `seen` is too short for has not moved since the block started.
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
  u32 parity = 0;
};

struct Copy {  // one cp.async
  u32 group;
  u8* to;
  const u8* from;
  u32 bytes_read;
  bool done;
  const void* caller;
};

struct BulkCopy {  // from shared to device memory
  u32 group;
  u32 offset, bytes;
  const void* caller;
  bool done = false;
  bool is_read = false;        // shared memory, as its thread knows
  std::vector<u8> words = {};  // what lay there, if it was not done by then
};

struct Register {  // 4 bytes of a thread that wgmma works on
  u32 group = 0;                   // of the last wgmma that uses them, which was
  bool is_read_only = false;       // of A, which a thread may read meanwhile
  const void* issued = nullptr;    // here
  const void* touched = nullptr;   // where the thread used them last, if it did so after its last wgmma.fence
};

// What a thread, or lanes together, know of the others
struct View {
  struct Block* block = nullptr;
  u32 number = 0;
  std::shared_ptr<const Counts> seen;
  const Count* counts = nullptr;  // those of `seen`, which has `counted`
  u32 counted = 0;

  void see(std::shared_ptr<const Counts> all) {
    seen = std::move(all);
    counts = seen->data();
    counted = static_cast<u32>(seen->size());
  }
  inline Count seen_of(u32 clock) const;
};

// What is known of 4 bytes of shared memory: who touched them last.
enum class Holds : u8 { data, copy, mbarrier };  // copy: of cp.async that its thread has not waited for
struct Touch {
  Count count = 0;
  u16 thread = 0;        // or another clock
  u8 bytes = 0;          // a bit each
  Holds holds = Holds::data;
  const void* caller = nullptr;
};

// A write that is not ordered among those of other threads, until it is known whether it changes anything
struct Doubt {
  u8* address = nullptr;
  u32 bytes = 0;  // 0: there is none
  u8 before[16];
  Touch touch;
  std::string report;
};

struct Thread : View {
  Fiber fiber;
  u8* stack = nullptr;
  struct Warp* warp = nullptr;
  u32 lane = 0;
  Wait wait;
  Count now = 0;
  std::vector<Copy> copies;
  u32 copy_group = 0;  // the group that is open
  std::deque<BulkCopy> bulk_copies;  // a deque, so that work under way can tell one that it is done
  u32 bulk_group = 0;  // the group that is open
  u32 votes = 0;       // of the barrier that it passed last
  std::vector<Count> proxy_fences;   // when it executed fence.proxy.async
  const u8* registers_base = nullptr;
  std::vector<Register> registers;   // from registers_base on, all that wgmma has worked on
  u32 wgmma_fences = 0, wgmma_handed = 0, wgmma_committed = 0;
  u32 wgmma_waited = 0;              // the last group that it waited for
  Doubt doubt;
  std::vector<const void*> callers;  // of the functions that it is in
};

// Lanes that execute one instruction together.
struct Meeting {
  const char* instruction;
  Site site;
  u32 mask, arrived;
  void* operands[kWarp];
};

// All threads of a warpgroup must agree about a wgmma.
inline bool operator==(const Product& one, const Product& other) {
  return one.a == other.a && one.b == other.b && one.n == other.n && one.from_registers == other.from_registers &&
         one.accumulate == other.accumulate && one.a_transposed == other.a_transposed && one.transposed == other.transposed &&
         one.is_bf16 == other.is_bf16;
}

// One wgmma of a warp, 16 rows of it, or a commit_group. Its lanes need not come to it together.
struct Wgmma {
  Product product;
  bool commits;
  Site site;
  const void* caller;
  u32 lanes = 0;  // those that have come
  float* d[kWarp] = {};
  const u32* a[kWarp] = {};
  std::vector<View> views = {};  // of lanes that know different things
};

struct Warp {
  struct Block* block = nullptr;
  u32 number = 0;
  u32 alive = 0;  // lanes that have not left the kernel
  u32 ready = 0;  // of these, those that do not wait
  Thread* lanes[kWarp] = {};
  std::vector<Meeting> meetings;
  u32 registers = 0;            // of a thread
  u32 waiting = 0;              // lanes that wait for a wgmma group
  std::deque<Wgmma> handed;     // what some lanes have come to, from number `issued` on
  u32 issued = 0, products = 0;
  std::vector<Wgmma> open;      // issued, not committed
  std::deque<std::vector<Wgmma>> groups;   // committed, not complete
  u32 committed = 0, completed = 0;        // groups
  std::shared_ptr<const Counts> from, to;  // what the last lane that waited for group `to_group` had seen before and after
  u32 to_group = 0;
};

struct Barrier {
  u32 arrived = 0;
  u32 votes = 0;  // of these, how many said true
  u32 threads = 0;  // that it is for; 0: all that are left
  Site site = {"", 0};
  Join join;
  std::vector<Thread*> waiting;
};

struct MemoryBarrier {  // an mbarrier
  u32 clock = 0;
  Site made;
  u32 of_line = 0;         // which of those that this line made
  u32 maker = 0;           // thread
  Count published = 0;     // when its maker executed fence.mbarrier_init
  u32 arrivals = 0;        // that a phase takes
  u32 pending = 0;         // of these, those to come
  i64 bytes = 0;           // announced and not there yet
  u32 phase = 0;           // that is under way
  Join join;               // of this phase
  std::shared_ptr<const Counts> passed;    // of all phases that are complete
  std::shared_ptr<const Counts> from, to;  // what the last thread that passed had seen before and after
  std::vector<Thread*> waiting;
};

struct WgmmaRead {  // of 16 bytes of shared memory
  Count group = 0;
  const void* caller = nullptr;
};

constexpr u32 kBarriers = 16;
constexpr u32 kCell = 4;
constexpr u32 kWholeCell = (1 << kCell) - 1;  // a bit for each byte
constexpr u32 kLine = 16;                     // bytes that TMA and wgmma move at a time
constexpr u32 kWarpgroup = 4;                 // warps
constexpr u32 kRegistersPerBlock = 65536;
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
  Count count = 0;                  // the highest that any clock has reached; goes on from one block to the next
  Count first_count = 0;            // what it was when this block started
  std::vector<Touch> written;       // by cell
  std::vector<Touch> read;          // by warp and cell
  std::vector<u8> initialised;      // by cell: a bit for each byte
  std::unordered_map<u32, std::vector<Touch>> repeated;  // by cell: who has written what was there already
  std::deque<MemoryBarrier> mbarriers;
  std::vector<i32> mbarrier_at;     // by 8 bytes: its number, or -1
  std::vector<BulkCopy*> bulk_reads;   // under way, as far as their threads know
  std::vector<WgmmaRead> wgmma_reads;  // by warp and line; empty until there are any
  std::vector<std::vector<Product>> products;  // by warpgroup: all that its first warp to come to them issued
  u32 loads = 0;                    // of TMA that are under way
  u32 free_registers = 0;
  std::vector<Thread*> waiting_for_registers;

  u32 wgmma_clock(u32 warp) const { return static_cast<u32>(threads.size()) + warp; }
  u32 mbarrier_clock(size_t number) const { return static_cast<u32>(threads.size() + warps.size() + number); }
};

inline Count View::seen_of(u32 clock) const { return clock < counted ? counts[clock] : block->first_count; }

// Asynchronous work: what TMA and the tensor cores do beside the threads.
struct Work {
  Thread* issuer;
  std::function<void()> done;
};

struct ValueWait {  // until a word of device memory has a value
  const i32* global;
  i32 value;
  Thread* thread;
};

struct Machine {
  Options options;
  const Kernel* kernel;
  const void* params;
  std::vector<Region> regions;
  std::vector<std::vector<bool>> region_written;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<ValueWait> value_waits;
  std::vector<Work> work;  // issued and not done, oldest first
  Thread* issuer;          // of the work that is being done
  bool may_change_nothing; // the access that is being checked
  Fiber scheduler;
  std::mt19937 random;
  Statistics statistics;
  std::string report;  // why the launch failed
};

inline Machine machine;
inline Thread* running;  // null while the scheduler runs

// ---- failure ----
struct Failure {};
struct Conflict {  // that is none if the write in question changes nothing
  std::string report;
};

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
    machine.report = machine.issuer ? name_of(*machine.issuer) + ": " + report : report;
    throw Failure();
  }
  machine.report = name_of(*running) + ": " + report;
  const std::vector<const void*>& callers = running->callers;
  for (size_t i = callers.size(); i > 0; --i) machine.report += (i == callers.size() ? "\n  called from " : ", ") + place(callers[i - 1]);
  running->fiber.switch_to(machine.scheduler);
  __builtin_unreachable();
}

// As fail, but for what is done by a write that may change nothing
[[noreturn]] inline void conflict(const std::string& report) {
  if (!machine.may_change_nothing) fail(report);
  throw Conflict{report};
}

void trap(Site site) { fail("trap at " + place(site)); }

// The running thread waits until its warp's `ready` has its bit again.
inline void wait_for(const char* what, Site site, i32 id = 0, u32 parity = 0) {
  Thread& self = *running;
  self.wait = {what, site, id, parity};
  self.warp->ready &= ~(1u << self.lane);
  self.fiber.switch_to(machine.scheduler);
}
inline void wake(Thread& thread) { thread.warp->ready |= 1u << thread.lane; }

// Others may go on before the running thread does.
inline void maybe_give_way() {
  if (machine.options.order == Order::random && machine.random() % 4 == 0) running->fiber.switch_to(machine.scheduler);
}

// ---- Join ----
inline void merge(Counts& into, const Counts& from, Count first) {
  if (into.size() < from.size()) into.resize(from.size(), first);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}
inline void Join::add(Thread& thread) {
  if (!counts_) {
    counts_ = std::make_shared<Counts>(*thread.seen);
    last_ = thread.seen;
  } else if (last_ != thread.seen) {
    merge(*counts_, *thread.seen, thread.block->first_count);
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
