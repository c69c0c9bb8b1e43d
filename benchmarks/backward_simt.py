"""Campaign: tiles of the CUDA-core family, backward, checked against and timed in turn with the plain formula in CuPy.

python benchmarks/backward_simt.py [--rounds 5]
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import cupy
import numpy as np
from simt_campaign import RIVAL, Row, prepared, run, timed

import cuflash
from cuflash import BackwardSimtConfig
from cuflash.timing import BACKWARD_WORK, flops

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


def measure(dtype: str, d: int, n: int, causal: bool, rounds: int) -> tuple[list[Row], int]:
    """Rows of the table for one case, the fastest first, and how many configurations were wrong."""
    batch, heads = max(8192 // n, 1), 2048 // d
    rng = np.random.default_rng(0)
    dout, q, k, v = (
        cupy.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(4)
    )
    arrays = (dout, q, k, v, *cuflash.attention_forward(q, k, v, causal=causal))
    tiles = TILES["float64" if dtype == "float64" else "float32"]
    prepare = functools.partial(cuflash.prepare_backward, *arrays, causal=causal)
    configs = prepared(lambda config: prepare(config=config), (BackwardSimtConfig(*tile) for tile in tiles))

    head = [x[-1:, -1:].astype("float64" if dtype == "float64" else "float32") for x in (dout, q, k, v)]
    expected = naive(*head, causal)
    runs = {}
    wrong = 0
    for config in configs:
        call = functools.partial(cuflash.attention_backward, *arrays, causal=causal, config=config)
        errors = [
            float(cupy.linalg.norm(x[-1:, -1:] - y) / cupy.linalg.norm(y))
            for x, y in zip(call(), expected, strict=True)
        ]
        if max(errors) < TOLERANCE[dtype]:
            runs[str(config)] = call
        else:
            print("WRONG", dtype, d, causal, config, errors, flush=True)
            wrong += 1
    runs[RIVAL] = functools.partial(naive, dout, q, k, v, causal)
    case = {"dtype": dtype, "D": d, "N": n, "causal": causal}
    return timed(case, runs, BACKWARD_WORK * flops(batch, heads, n, n, d, causal), rounds), wrong


if __name__ == "__main__":
    sys.exit(run(__doc__, "backward_simt.json", CASES, measure))
