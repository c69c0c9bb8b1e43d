"""What the campaigns of the CUDA-core family have in common: legal tiles, times in turn, the table."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import cupy

from cuflash.timing import interleaved

RIVAL = "cupy"  # what a CuPy user writes without a fused kernel
Row = dict[str, Any]
ConfigT = TypeVar("ConfigT")


def prepared(prepare: Callable[[ConfigT], object], configs: Iterable[ConfigT]) -> list[ConfigT]:
    """The configurations that are legal, compiled and loaded."""

    def why_illegal(config: ConfigT) -> str | None:
        try:
            prepare(config)
        except ValueError as error:
            return str(error)
        return None

    candidates = list(configs)
    with ThreadPoolExecutor() as pool:
        return [c for c, reason in zip(candidates, pool.map(why_illegal, candidates), strict=True) if reason is None]


def timed(case: Row, runs: Mapping[str, Callable[[], object]], work: float, rounds: int) -> list[Row]:
    """A row for each of `runs`, the fastest first; one is the RIVAL."""
    times = interleaved(runs, rounds)
    return [
        {**case, "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": times[RIVAL] / ms}
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    ]


def run(title: str, file: str, cases: Sequence[tuple[Any, ...]], measure: Callable[..., tuple[list[Row], int]]) -> int:
    """Measure the cases (dtype, D, N, causal), print the table and write it to `file` in the folder OUT; the exit code.

    `measure(*case, rounds)` gives the rows of a case, and how many configurations were wrong.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=200, help="seconds after which no further case is started")
    options = parser.parse_args()
    began = time.monotonic()
    table: list[Row] = []
    failed = 0
    for case in cases:
        if time.monotonic() - began > options.budget:
            print("out of budget before", *case)
            break
        rows, wrong = measure(*case, options.rounds)
        table += rows
        failed += wrong
        cupy.get_default_memory_pool().free_all_blocks()
        for row in rows:
            name = f"{row['dtype']:8} D={row['D']:3} N={row['N']} {'causal' if row['causal'] else 'full':6}"
            print(f"{name} {row['tflops']:6.2f} TFLOP/s {row['ratio']:5.2f}x  {row['run']}", flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / file).write_text(json.dumps(table, indent=1))
    return 1 if failed else 0
