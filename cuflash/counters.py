"""Counters in device memory, by which the blocks of one launch share out its tiles.

A counter is 0 before a launch and after it. Launches that may run at the same time, on different streams, must not have
the same one; so every launch takes the next of a ring that is far longer than the queues of a GPU. A launch that is
captured into a CUDA graph may run at any time from then on, and takes one that no other launch gets.
"""

from __future__ import annotations

import functools
import itertools

COUNTER_BYTES = 4
COUNTERS = 1 << 16  # of each of the two kinds
NOT_CAPTURABLE = frozenset({0, 1})  # the legacy default stream


class Counters:
    """The counters of one device, which is CuPy's current one when they are made."""

    def __init__(self) -> None:
        import cupy

        size = 2 * COUNTERS * COUNTER_BYTES
        self._memory = cupy.cuda.memory.Memory(size)
        self._first = int(self._memory.ptr)
        cupy.cuda.runtime.memset(self._first, 0, size)
        cupy.cuda.Stream.null.synchronize()
        self._launches = itertools.count()
        self._captured_launches = itertools.count()
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing

    def next(self, stream: int) -> int:
        """The address of a counter for a launch on the stream at that address."""
        if stream not in NOT_CAPTURABLE and self._is_capturing(stream):
            number = COUNTERS + next(self._captured_launches) % COUNTERS
        else:
            number = next(self._launches) % COUNTERS
        return self._first + COUNTER_BYTES * number


@functools.cache
def _counters(device: int) -> Counters:
    return Counters()


def current_counters() -> Counters:
    """The counters of CuPy's current device."""
    from cupy.cuda import runtime

    return _counters(runtime.getDevice())
