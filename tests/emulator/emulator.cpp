// A GPU on one CPU thread, as far as a kernel's results depend on it. Compiled once; every kernel links against it.
//
// Each CUDA thread is a fiber, which runs until it meets others: at a barrier, in a shuffle, a vote, ldmatrix or mma.sync. So a schedule
// is the order in which fibers go on, and every launch option that concerns it is an adversary: what a kernel computes must not
// depend on any of them. Every load and store is checked on the way (memory.h), asynchronous copies (copies.h), TMA (tma.h) and wgmma
// (wgmma.h) do their work as early or as late as the rules allow, and what cannot go on is told as a deadlock (scheduler.h).
//
// Not modelled: time, caches and bank conflicts; the memory model beyond the order that barriers make; how approximate functions round;
// clusters, static __shared__ variables, descriptors with a base offset.
#include "scheduler.h"

namespace emulator {

inline void check_options(const Options& options) {
  if (options.threads == 0 || options.threads % kWarp || options.threads > kMaxThreads)
    fail(format("a block must have 32, 64, ... or 1024 threads, not %u", options.threads));
  if (options.shared_bytes > kMaxSharedBytes) fail(format("a block can have %u bytes of shared memory, not %u", kMaxSharedBytes, options.shared_bytes));
}

}  // namespace emulator

// Null where the kernel ran to its end, else the report.
extern "C" const char* emulator_launch(const emulator::Kernel* kernel, const void* params, const emulator::Options* options,
                                       const emulator::Region* regions, u64 region_count, emulator::Statistics* statistics) {
  using namespace emulator;
  machine.options = *options;
  machine.kernel = kernel;
  machine.params = params;
  machine.regions.assign(regions, regions + region_count);
  machine.region_written.clear();
  for (const Region& region : machine.regions) machine.region_written.emplace_back(region.writes == Writes::once ? region.bytes : 0);
  machine.random.seed(options->seed);
  machine.statistics = {};
  machine.report.clear();
  machine.work.clear();
  machine.value_waits.clear();
  machine.issuer = nullptr;
  machine.may_change_nothing = false;
  running = nullptr;
  try {
    check_options(*options);
    run_blocks();
  } catch (const Failure&) {
    running = nullptr;
  }
  machine.work.clear();
  machine.blocks.clear();
  *statistics = machine.statistics;
  return machine.report.empty() ? nullptr : machine.report.c_str();
}
