// cp.async: copies from device to shared memory that are done at some time between their issue and the wait for them. Until then their
// destination is poisoned, and touching it is reported.
#pragma once
#include "memory.h"

namespace emulator {

constexpr u8 kPoison = 0xff;  // these bytes are a NaN in every format
constexpr u32 kCopyBytes = 16;

inline void complete(Copy& copy) {
  if (copy.done) return;
  memcpy(copy.to, copy.from, copy.bytes_read);
  memset(copy.to + copy.bytes_read, 0, kCopyBytes - copy.bytes_read);
  copy.done = true;
}

void copy_async(u32 shared, const void* global, u32 bytes_read) {
  const void* const caller = __builtin_return_address(0);
  Thread& self = *running;
  Block& block = *self.block;
  u8* const to = shared_pointer(shared, kCopyBytes, "cp.async", caller);
  const u8* const from = static_cast<const u8*>(global);
  if (bytes_read > kCopyBytes) fail(format("cp.async of %u bytes is to read %u, at ", kCopyBytes, bytes_read) + place(caller));
  if (reinterpret_cast<u64>(from) % kCopyBytes) fail(format("cp.async from an address that is no multiple of %u, at ", kCopyBytes) + place(caller));
  if (bytes_read) check_global(from, bytes_read, false, caller);
  check_shared(to, kCopyBytes, true, caller);
  ++machine.statistics.copies;
  memset(to, kPoison, kCopyBytes);
  if (machine.options.watched)
    for_cells(static_cast<u32>(to - block.shared), kCopyBytes, [&](u32 cell, u32) { block.written[cell].holds = Holds::copy; });
  self.copies.push_back({self.copy_group, to, from, bytes_read, false, caller});
  if (machine.options.asynchronous == Asynchronous::at_issue) complete(self.copies.back());
}

void commit_copies() { ++running->copy_group; }

// All but the last `pending` groups are complete, and the thread may touch them. For others to do so takes a barrier after this.
void wait_for_copies(u32 pending) {
  Thread& self = *running;
  Block& block = *self.block;
  size_t kept = 0;
  for (Copy& copy : self.copies) {
    if (copy.group + pending >= self.copy_group) {
      self.copies[kept++] = copy;
      continue;
    }
    complete(copy);
    if (machine.options.watched)
      for_cells(static_cast<u32>(copy.to - block.shared), kCopyBytes, [&](u32 cell, u32 mask) { note(block.written[cell], self, mask, copy.caller); });
  }
  self.copies.resize(kept);
}

// A copy of any thread of `block` is done now.
inline void complete_some_copy(Block& block) {
  Thread& thread = block.threads[machine.random() % block.threads.size()];
  if (!thread.copies.empty()) complete(thread.copies[machine.random() % thread.copies.size()]);
}

}  // namespace emulator
