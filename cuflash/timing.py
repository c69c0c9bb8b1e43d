"""Timing on one GPU: interleaved rounds, cold L2, and a watchdog that ends a kernel that hangs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

HANG_SECONDS = 20.0
FLUSH_BYTES = 2**30  # several L2 caches
BACKWARD_WORK = 2.5  # operations of a backward pass, of a forward pass': five products rather than two
FILLS = (1, 2, 4, 8)  # how often they are written, until that takes the GPU longer than the host takes to queue a run


def wait(event: Any, what: str) -> None:
    """Wait for `event` by polling; a kernel that does not end takes the process with it."""
    end = time.monotonic() + HANG_SECONDS
    while not event.done:
        if time.monotonic() > end:
            print(f"HANG: {what} did not end within {HANG_SECONDS:.0f} s", flush=True)
            os._exit(3)  # the driver would wait for the kernel when the process ends in any other way
        time.sleep(50e-6)


def finish(run: Callable[[], Any], what: str) -> Any:
    """Run once and wait for it, under the watchdog."""
    import cupy

    result = run()
    event = cupy.cuda.Event()
    event.record()
    wait(event, what)
    return result


def queue(run: Callable[[], object], flush: Callable[[], object], stream: Any = None) -> tuple[Any, Any]:
    """Queue `flush`, which overwrites the L2, and then `run`: the events before and after that, on CuPy's `stream`.

    The GPU must not be done with the flush before the host has queued the run, whose time would be that of the host;
    where it was, both are queued again with more to write.
    """
    import cupy

    for fills in FILLS:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(fills):
            flush()
        start.record(stream)
        run()
        late = start.done
        end.record(stream)
        if not late:
            break
    return start, end


def time_once(run: Callable[[], object], scratch: Any, what: str) -> float:
    """Milliseconds of one run of `run` on the GPU's current stream, the L2 overwritten with `scratch` before it."""
    import cupy

    start, end = queue(run, lambda: scratch.fill(0))
    wait(end, what)
    return float(cupy.cuda.get_elapsed_time(start, end))


def time_on_host(run: Callable[[], object], scratch: Any, what: str) -> float:
    """As `time_once`, of work that no event of this process can bracket: by the clock, dispatch and all."""
    import cupy

    scratch.fill(0)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    run()
    cupy.cuda.Device().synchronize()
    return 1e3 * (time.perf_counter() - start)


def interleaved_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 9,
    repeats: int = 1,
    warm_up: int = 1,
    on_host: Collection[str] = (),
) -> dict[str, list[float]]:
    """Milliseconds of each of `runs` in each round, the median of `repeats`.

    They are taken in turn, every second round in reverse, so that they share clocks and heat. Those named in `on_host`
    are timed by the host's clock.
    """
    import cupy

    scratch = cupy.empty(FLUSH_BYTES, np.uint8)
    clocks = {name: time_on_host if name in on_host else time_once for name in runs}
    for name, run in runs.items():
        for _ in range(warm_up):
            clocks[name](run, scratch, name)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            taken[name].append(statistics.median(clocks[name](runs[name], scratch, name) for _ in range(repeats)))
    return taken


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int = 9, warm_up: int = 1) -> dict[str, float]:
    """Median milliseconds of each of `runs`, taken in turn."""
    taken = interleaved_times(runs, rounds, warm_up=warm_up)
    return {name: statistics.median(times) for name, times in taken.items()}


def flops(batch: int, heads: int, n_q: int, n_k: int, d: int, causal: bool) -> float:
    """Operations of a forward pass as the papers count them: 4 B H N_q N_k D, half of that with a causal mask.

    Examples
    --------
    >>> from cuflash.timing import flops
    >>> flops(batch=1, heads=16, n_q=16384, n_k=16384, d=128, causal=True) / 1e12
    1.099511627776
    """
    return 4.0 * batch * heads * n_q * n_k * d * (0.5 if causal else 1.0)
