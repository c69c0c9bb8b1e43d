// Where threads wait for each other: barriers of a block, and instructions that lanes of a warp execute together.
#pragma once
#include "memory.h"

namespace emulator {

// ---- barriers of a block ----
inline u32 threads_of(const Block& block, const Barrier& barrier) { return barrier.threads ? barrier.threads : block.alive; }

inline bool release_if_complete(Block& block, Barrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived < threads_of(block, barrier)) return false;
  const std::shared_ptr<const Counts> seen = barrier.join.take();
  for (Thread* thread : barrier.waiting) {
    thread->see(seen);
    thread->votes = barrier.votes;
    wake(*thread);
  }
  barrier.waiting.clear();
  barrier.arrived = barrier.votes = 0;
  return true;
}

// bar.sync, bar.red and, without `wait`, bar.arrive
u32 barrier(i32 id, u32 threads, bool wait, bool predicate, Site site) {
  Thread& self = *running;
  Block& block = *self.block;
  if (id < 0 || id >= static_cast<i32>(kBarriers)) fail(format("barrier %d does not exist, at ", id) + place(site));
  if (threads % kWarp || threads > machine.options.threads) fail(format("barrier %d cannot be for %u threads, at ", id, threads) + place(site));
  Barrier& own = block.barriers[id];
  if (own.arrived == 0) {
    own.threads = threads;
    own.site = site;
  } else if (own.threads != threads) {
    fail(format("barrier %d is for %u threads at ", id, threads) + place(site) + format(" and for %u at ", own.threads) + place(own.site));
  } else if (threads == 0 && own.site.line != site.line) {
    fail("threads of one block wait at different barriers, " + place(site) + " and " + place(own.site));
  }
  own.join.add(self);
  ++own.arrived;
  own.votes += predicate;
  if (wait) own.waiting.push_back(&self);
  if (!release_if_complete(block, own) && wait) wait_for("barrier", site, id);
  return self.votes;
}

// ---- instructions of a warp ----
// `work` is done once, by the last lane of `mask` to come, on what every lane handed in.
template <class Operand, class Work> void meet(const char* instruction, Site site, u32 mask, Operand& operand, Work work) {
  Thread& self = *running;
  Warp& warp = *self.warp;
  const u32 bit = 1u << self.lane;
  if (!(mask & bit)) fail(format("%s with mask %08x, which lacks the lane itself, at ", instruction, mask) + place(site));
  if (mask & ~warp.alive) fail(format("%s with mask %08x, of which lanes %08x have left the kernel, at ", instruction, mask, mask & ~warp.alive) + place(site));
  size_t i = 0;
  while (i < warp.meetings.size() && !(warp.meetings[i].mask & mask)) ++i;
  if (i == warp.meetings.size()) warp.meetings.push_back({instruction, site, mask, 0, {}});
  Meeting& meeting = warp.meetings[i];
  if (meeting.mask != mask || meeting.site.line != site.line || strcmp(meeting.site.file, site.file) || strcmp(meeting.instruction, instruction))
    fail(format("lanes of one warp diverge: %s with mask %08x at ", instruction, mask) + place(site) +
         format(" here, %s with mask %08x at ", meeting.instruction, meeting.mask) + place(meeting.site) + " in another lane");
  meeting.arrived |= bit;
  meeting.operands[self.lane] = &operand;
  if (meeting.arrived != mask) return wait_for(instruction, site);

  Operand* operands[kWarp];
  for (u32 lane = 0; lane < kWarp; ++lane) operands[lane] = static_cast<Operand*>(meeting.operands[lane]);
  warp.meetings.erase(warp.meetings.begin() + static_cast<i64>(i));
  work(operands);
  warp.ready |= mask;
}
constexpr u32 kWholeWarp = 0xffffffff;

template <class Visit> void for_lanes(u32 mask, Visit visit) {
  for (u32 lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & 1) visit(lane);
}

// The only one of these that orders memory accesses.
void sync_warp(u32 mask, Site site) {
  Thread* self = running;
  meet("__syncwarp", site, mask, *self, [mask](Thread* const* threads) {
    Join join;
    for_lanes(mask, [&](u32 lane) { join.add(*threads[lane]); });
    const std::shared_ptr<const Counts> seen = join.take();
    for_lanes(mask, [&](u32 lane) { threads[lane]->see(seen); });
  });
}

u64 shuffle(u32 mask, u64 word, u32 source, Site site) {
  struct Operand {
    u64 word, result;
    u32 source;
  } own = {word, 0, source};
  meet("__shfl_sync", site, mask, own, [mask, site](Operand* const* lanes) {
    for_lanes(mask, [&](u32 lane) {
      const u32 from = lanes[lane]->source;
      if (from >= kWarp || !(mask >> from & 1)) fail(format("lane %u reads from lane %u, which takes no part, at ", lane, from) + place(site));
      lanes[lane]->result = lanes[from]->word;
    });
  });
  return own.result;
}

u32 vote(u32 mask, bool predicate, Site site) {
  struct Operand {
    bool predicate;
    u32 result;
  } own = {predicate, 0};
  meet("__ballot_sync", site, mask, own, [mask](Operand* const* lanes) {
    u32 ballot = 0;
    for_lanes(mask, [&](u32 lane) { ballot |= static_cast<u32>(lanes[lane]->predicate) << lane; });
    for_lanes(mask, [&](u32 lane) { lanes[lane]->result = ballot; });
  });
  return own.result;
}

}  // namespace emulator
