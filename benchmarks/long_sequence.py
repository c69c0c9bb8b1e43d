"""A million rows: N = 1,048,576, D = 64, one head, float16: time, memory, error of sampled rows against float64.

python benchmarks/long_sequence.py
"""

from __future__ import annotations

import cupy
import numpy as np

import cuflash
from cuflash.timing import flops, interleaved

N, D, SAMPLED = 2**20, 64, 8


def main() -> None:
    """Print one line."""
    rng = np.random.default_rng()
    q, k, v = (cupy.asarray(rng.standard_normal((N, D), np.float32).astype(np.float16)) for _ in range(3))
    cuflash.prepare(q, k, v)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    out = cuflash.attention(q, k, v)
    taken = pool.used_bytes() - before
    rows = np.sort(rng.choice(N, SAMPLED, replace=False))
    s = q[rows].astype(np.float64) @ k.astype(np.float64).T / np.sqrt(D)
    p = cupy.exp(s - s.max(axis=-1, keepdims=True))
    gold = p @ v.astype(np.float64) / p.sum(axis=-1, keepdims=True)
    error = float(cupy.linalg.norm(out[rows] - gold) / cupy.linalg.norm(gold))
    ms = interleaved({"cuflash": lambda: cuflash.attention(q, k, v)}, rounds=3)["cuflash"]
    rate = flops(1, 1, N, N, D, False) / ms / 1e9
    print(cuflash.explain(q, k, v))
    print(
        f"{ms:.0f} ms, {rate:.0f} TFLOP/s, {taken / 2**20:.0f} MiB taken ({out.nbytes / 2**20:.0f} of them the result)"
    )
    print(f"relative L2 error of {SAMPLED} rows: {error:.2e}")


if __name__ == "__main__":
    main()
