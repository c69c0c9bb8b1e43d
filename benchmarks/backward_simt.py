"""Campaign: tiles of the CUDA-core family, backward, checked against and timed in turn with the plain formula in CuPy.

python benchmarks/backward_simt.py [--rounds 5]
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
from cuflash import BackwardSimtConfig
from cuflash.timing import interleaved

CASES = (  # dtype, D, N, causal; B * N = 8192, H * D = 2048
    ("float32", 128, 4096, False),
    ("float32", 128, 4096, True),
    ("float32", 128, 1024, False),
    ("float32", 64, 4096, False),
    ("float32", 256, 2048, False),
    ("float16", 128, 2048, False),
    ("float64", 128, 1024, False),
    ("float64", 64, 1024, False),
    ("float64", 256, 1024, False),
)
TOLERANCE = {"float16": 3e-3, "float32": 1e-5, "float64": 1e-12}
# b_r, b_c, threads, lanes_per_row, both_tiles
TILES = {
    "float32": (
        (64, 32, 128, 16),
        (32, 64, 128, 16),
        (32, 32, 128, 16),
        (64, 64, 256, 16),
        (64, 32, 256, 16),
        (32, 32, 256, 16),
        (32, 32, 128, 8),
        (64, 32, 128, 16, False),
        (32, 32, 256, 16, False),
        (16, 16, 128, 16, False),
    ),
    "float64": (
        (32, 32, 256, 16),
        (32, 16, 256, 16),
        (16, 32, 256, 16),
        (16, 16, 256, 16),
        (16, 16, 128, 16),
        (32, 32, 256, 16, False),
        (16, 16, 128, 8, False),
    ),
}


def naive(dout: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any, Any]:
    """What a CuPy user writes without a fused kernel, from the inputs of the forward pass."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = q @ k.swapaxes(-1, -2)
    s *= scale
    if causal:
        s = cupy.where(cupy.tri(s.shape[-2], s.shape[-1], dtype=bool), s, s.dtype.type(-cupy.inf))
    p = cupy.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (ds * p).sum(axis=-1, keepdims=True)
    ds *= p
    return scale * (ds @ k), scale * (ds.swapaxes(-1, -2) @ q), p.swapaxes(-1, -2) @ dout


def compiled(arrays: tuple[Any, ...], causal: bool, config: BackwardSimtConfig) -> BackwardSimtConfig | None:
    """`config`, compiled and loaded; None where it is not legal."""
    try:
        cuflash.prepare_backward(*arrays, causal=causal, config=config)
    except ValueError:
        return None
    return config


def measure(dtype: str, d: int, n: int, causal: bool, rounds: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of the table for one case, the fastest first, and how many configurations were wrong."""
    batch, heads = max(8192 // n, 1), 2048 // d
    rng = np.random.default_rng(0)
    dout, q, k, v = (
        cupy.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(4)
    )
    arrays = (dout, q, k, v, *cuflash.attention_forward(q, k, v, causal=causal))
    tiles = TILES["float64" if dtype == "float64" else "float32"]
    with ThreadPoolExecutor() as pool:
        configs = [c for c in pool.map(lambda t: compiled(arrays, causal, BackwardSimtConfig(*t)), tiles) if c]

    head = [x[-1:, -1:].astype("float64" if dtype == "float64" else "float32") for x in (dout, q, k, v)]
    expected = naive(*head, causal)
    runs = {}
    wrong = 0
    for config in configs:
        run = functools.partial(cuflash.attention_backward, *arrays, causal=causal, config=config)
        errors = [
            float(cupy.linalg.norm(x[-1:, -1:] - y) / cupy.linalg.norm(y)) for x, y in zip(run(), expected, strict=True)
        ]
        if max(errors) < TOLERANCE[dtype]:
            runs[str(config)] = run
        else:
            print("WRONG", dtype, d, causal, config, errors, flush=True)
            wrong += 1
    runs["cupy"] = functools.partial(naive, dout, q, k, v, causal)
    times = interleaved(runs, rounds)
    work = 10 * batch * heads * n * n * d / (2 if causal else 1)
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
        for row in rows:
            case_name = f"{row['dtype']:8} D={row['D']:3} N={row['N']} {'causal' if row['causal'] else 'full':6}"
            print(f"{case_name} {row['tflops']:6.2f} TFLOP/s {row['ratio']:5.2f}x  {row['run']}", flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "backward_simt.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
