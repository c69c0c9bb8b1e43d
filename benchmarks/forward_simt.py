"""Campaign: tiles of the CUDA-core family, checked against float64, timed in turn with the plain formula in CuPy.

python benchmarks/forward_simt.py [--rounds 5]
"""

from __future__ import annotations

import functools
import sys

import cupy
import numpy as np
from simt_campaign import RIVAL, Row, prepared, run, timed

import cuflash
from cuflash.config import SimtConfig
from cuflash.timing import flops

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


def measure(dtype: str, d: int, n: int, causal: bool, rounds: int) -> tuple[list[Row], int]:
    """Rows of the table for one case, the fastest first, and how many configurations were wrong."""
    batch, heads = 16384 // n, 2048 // d
    rng = np.random.default_rng()
    q, k, v = (cupy.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(3))
    tiles = TILES["float64" if dtype == "float64" else "float32"]
    prepare = functools.partial(cuflash.prepare, q, k, v, causal=causal)
    configs = prepared(lambda config: prepare(config=config), (SimtConfig(*tile) for tile in tiles))

    rows = np.sort(rng.choice(n, 32, replace=False))
    head = [cupy.asnumpy(x[-1, -1]) for x in (q, k, v)]
    mask = np.arange(n) <= rows[:, None] if causal else None
    gold = cuflash.reference.standard_attention(head[0][rows], *head[1:], mask=mask)
    runs = {}
    wrong = 0
    for config in configs:
        call = functools.partial(cuflash.attention, q, k, v, causal=causal, config=config)
        error = np.linalg.norm(cupy.asnumpy(call()[-1, -1])[rows] - gold) / np.linalg.norm(gold)
        if error < CAPS[dtype]:
            runs[str(config)] = call
        else:
            print("WRONG", dtype, d, causal, config, error, flush=True)
            wrong += 1
    runs[RIVAL] = functools.partial(naive, q, k, v, causal)
    case = {"dtype": dtype, "D": d, "N": n, "causal": causal}
    return timed(case, runs, flops(batch, heads, n, n, d, causal), rounds), wrong


if __name__ == "__main__":
    sys.exit(run(__doc__, "forward_simt.json", CASES, measure))
