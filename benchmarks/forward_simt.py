"""Campaign: tiles of the CUDA-core family, checked against float64, timed in interleaved rounds beside the formula in CuPy.

python benchmarks/forward_simt.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy
import numpy as np
from timing import flops, interleaved

import cuflash
from cuflash.config import SimtConfig

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
TILES = {
    "float32": [
        (64, 64, 128, 16),
        (64, 64, 256, 16),
        (64, 128, 128, 16),
        (128, 64, 256, 16),
        (128, 128, 256, 16),
        (64, 32, 128, 16),
    ]
    + [
        (32, 64, 128, 16),
        (32, 32, 128, 16),
        (64, 32, 128, 8),
        (64, 64, 128, 8),
        (128, 32, 256, 8),
        (128, 64, 256, 8),
        (64, 64, 256, 8),
    ]
    + [(128, 32, 128, 8), (128, 32, 256, 16)],
    "float64": [
        (32, 32, 128, 16),
        (32, 64, 128, 16),
        (64, 32, 128, 16),
        (64, 64, 256, 16),
        (64, 32, 256, 16),
        (32, 32, 128, 8),
        (64, 32, 256, 8),
    ]
    + [(32, 16, 128, 16), (32, 32, 256, 16), (16, 32, 128, 16)],
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=200, help="seconds after which no further case is started")
    options = parser.parse_args()
    began = time.monotonic()
    table, failed = [], 0
    for dtype, d, n, causal in CASES:
        if time.monotonic() - began > options.budget:
            print("out of budget before", dtype, d, n, causal)
            break
        batch, heads = 16384 // n, 2048 // d
        rng = np.random.default_rng()
        q, k, v = (cupy.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(3))
        configs = [SimtConfig(*tile) for tile in TILES["float64" if dtype == "float64" else "float32"]]

        def compiled(config: SimtConfig, q=q, k=k, v=v, causal=causal) -> SimtConfig | None:
            try:
                cuflash.prepare(q, k, v, causal=causal, config=config)
            except ValueError:
                return None
            return config

        with ThreadPoolExecutor(8) as pool:
            configs = [config for config in pool.map(compiled, configs) if config]
        rows = np.sort(rng.choice(n, 32, replace=False))
        mask = None if not causal else np.arange(n) <= rows[:, None]
        gold = cuflash.reference.standard_attention(
            cupy.asnumpy(q[-1, -1])[rows], cupy.asnumpy(k[-1, -1]), cupy.asnumpy(v[-1, -1]), mask=mask
        )
        right = []
        for config in configs:
            got = cupy.asnumpy(cuflash.attention(q, k, v, causal=causal, config=config)[-1, -1])[rows].astype(
                np.float64
            )
            error = np.linalg.norm(got - gold) / np.linalg.norm(gold)
            if not error < {"float16": 6e-4, "float32": 2e-6, "float64": 1e-14}[dtype]:
                print("WRONG", dtype, d, causal, config, error)
                failed += 1
                continue
            right.append(config)
        runs = {str(c): (lambda c=c: cuflash.attention(q, k, v, causal=causal, config=c)) for c in right}
        runs["cupy"] = lambda: naive(q, k, v, causal)
        times = interleaved(runs, options.rounds)
        work = flops(batch, heads, n, n, d, causal)
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            table.append(
                {
                    "dtype": dtype,
                    "D": d,
                    "N": n,
                    "causal": causal,
                    "run": name,
                    "ms": ms,
                    "tflops": work / ms / 1e9,
                    "ratio": times["cupy"] / ms,
                }
            )
        cupy.get_default_memory_pool().free_all_blocks()
    for _, group in itertools.groupby(table, key=lambda row: (row["dtype"], row["D"], row["causal"])):
        for row in list(group):
            print(
                f"{row['dtype']:8} D={row['D']:3} N={row['N']} {'causal' if row['causal'] else 'full':6} {row['tflops']:6.2f} TFLOP/s {row['ratio']:5.2f}x  {row['run']}"
            )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "forward_simt.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
