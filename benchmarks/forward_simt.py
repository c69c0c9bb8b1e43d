"""Campaign: tiles of the CUDA-core family, checked against float64, timed in turn with the plain formula in CuPy.

python benchmarks/forward_simt.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import cuflash
from cuflash.config import SimtConfig
from cuflash.timing import flops, interleaved

CASES = (  # dtype, D, N, causal; B * N = 16384, H * D = 2048
    ("float32", 128, 4096, False),
    ("float32", 128, 4096, True),
    ("float16", 128, 4096, False),
    ("float32", 64, 4096, False),
    ("float32", 256, 4096, False),
    ("float64", 128, 1024, False),
    ("float64", 64, 1024, False),
    ("float64", 256, 1024, False),
)
CAPS = {"float16": 6e-4, "float32": 2e-6, "float64": 1e-14}
# b_r, b_c, threads, lanes_per_row
TILES = {
    "float32": (
        (128, 128, 256, 16),
        (128, 64, 256, 16),
        (64, 64, 128, 16),
        (64, 64, 256, 16),
        (64, 32, 128, 16),
        (32, 64, 128, 16),
        (32, 32, 128, 16),
        (128, 64, 256, 8),
        (64, 64, 128, 8),
    ),
    "float64": (
        (64, 64, 256, 16),
        (64, 32, 128, 16),
        (64, 32, 256, 16),
        (32, 64, 128, 16),
        (32, 32, 128, 16),
        (32, 16, 256, 16),
        (32, 16, 128, 16),
        (16, 32, 128, 16),
    ),
}


def naive(q: cupy.ndarray, k: cupy.ndarray, v: cupy.ndarray, causal: bool) -> cupy.ndarray:
    """What a CuPy user writes without a fused kernel."""
    s = q @ k.swapaxes(-1, -2)
    s *= s.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        s = cupy.where(cupy.tri(s.shape[-2], s.shape[-1], dtype=bool), s, s.dtype.type(-cupy.inf))
    p = cupy.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v


def compiled(arrays: tuple[cupy.ndarray, ...], causal: bool, config: SimtConfig) -> SimtConfig | None:
    """`config`, compiled and loaded; None where it is not legal."""
    try:
        cuflash.prepare(*arrays, causal=causal, config=config)
    except ValueError:
        return None
    return config


def measure(dtype: str, d: int, n: int, causal: bool, rounds: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of the table for one case, the fastest first, and how many configurations were wrong."""
    batch, heads = 16384 // n, 2048 // d
    rng = np.random.default_rng()
    q, k, v = (cupy.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(3))
    tiles = TILES["float64" if dtype == "float64" else "float32"]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda tile: compiled((q, k, v), causal, SimtConfig(*tile)), tiles)
        configs = [config for config in found if config]

    rows = np.sort(rng.choice(n, 32, replace=False))
    head = [cupy.asnumpy(x[-1, -1]) for x in (q, k, v)]
    mask = np.arange(n) <= rows[:, None] if causal else None
    gold = cuflash.reference.standard_attention(head[0][rows], *head[1:], mask=mask)
    runs = {}
    wrong = 0
    for config in configs:
        run = functools.partial(cuflash.attention, q, k, v, causal=causal, config=config)
        error = np.linalg.norm(cupy.asnumpy(run()[-1, -1])[rows] - gold) / np.linalg.norm(gold)
        if error < CAPS[dtype]:
            runs[str(config)] = run
        else:
            print("WRONG", dtype, d, causal, config, error, flush=True)
            wrong += 1
    runs["cupy"] = functools.partial(naive, q, k, v, causal)
    times = interleaved(runs, rounds)
    work = flops(batch, heads, n, n, d, causal)
    case = {"dtype": dtype, "D": d, "N": n, "causal": causal}
    return [
        {**case, "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": times["cupy"] / ms}
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    ], wrong


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=200, help="seconds after which no further case is started")
    options = parser.parse_args()
    began = time.monotonic()
    table: list[dict[str, Any]] = []
    failed = 0
    for case in CASES:
        if time.monotonic() - began > options.budget:
            print("out of budget before", *case)
            break
        rows, wrong = measure(*case, options.rounds)
        table += rows
        failed += wrong
        cupy.get_default_memory_pool().free_all_blocks()
    for row in table:
        case_name = f"{row['dtype']:8} D={row['D']:3} N={row['N']} {'causal' if row['causal'] else 'full':6}"
        print(f"{case_name} {row['tflops']:6.2f} TFLOP/s {row['ratio']:5.2f}x  {row['run']}")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "forward_simt.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
