"""Timing on one GPU: interleaved rounds, cold L2, medians, and a watchdog that ends a kernel that hangs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import cupy

HANG_SECONDS = 20.0


def wait(event: cupy.cuda.Event, what: str) -> None:
    """Wait for `event` by polling; a kernel that does not end takes the process with it."""
    end = time.monotonic() + HANG_SECONDS
    while not event.done:
        if time.monotonic() > end:
            print(f"HANG: {what} did not end within {HANG_SECONDS:.0f} s", flush=True)
            os._exit(3)
        time.sleep(50e-6)


def flush_l2(scratch: cupy.ndarray) -> None:
    """Overwrite more than the L2 cache holds."""
    scratch.fill(0)


def time_once(run: Callable[[], object], scratch: cupy.ndarray, what: str) -> float:
    """Milliseconds of one run of `run` on the GPU, with a cold L2."""
    flush_l2(scratch)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    run()
    end.record()
    wait(end, what)
    return float(cupy.cuda.get_elapsed_time(start, end))


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int = 9, warm_up: int = 1) -> dict[str, float]:
    """Median milliseconds of each of `runs`, taken in turn, so that they share clocks and heat."""
    scratch = cupy.empty(2**30, cupy.uint8)
    for name, run in runs.items():
        for _ in range(warm_up):
            time_once(run, scratch, name)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            taken[name].append(time_once(runs[name], scratch, name))
    return {name: statistics.median(times) for name, times in taken.items()}


def flops(batch: int, heads: int, n_q: int, n_k: int, d: int, causal: bool) -> float:
    """Operations of a forward pass as the papers count them: 4 B H N_q N_k D, half of that with a causal mask."""
    return 4.0 * batch * heads * n_q * n_k * d * (0.5 if causal else 1.0)
