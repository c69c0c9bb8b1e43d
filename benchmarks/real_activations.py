"""Queries, keys and values of a language model, repeated to N = 4096, timed in turn with normal random numbers.

python benchmarks/real_activations.py [--rounds 9]

The numbers of an input decide how often a running maximum moves, and how much power a GPU takes. B = 4, 36 heads to 12,
D = 64: those of layer 14 of SmolLM2, four times over.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import statistics

import cupy
import ml_dtypes
import numpy as np

import cuflash
from cuflash.timing import interleaved_times

N, BATCH, REPEATED_HEADS = 4096, 4, 4


def repeated(x: np.ndarray) -> np.ndarray:
    """(1, H, n, D) as (BATCH, REPEATED_HEADS * H, N, D)."""
    times = -(-N // x.shape[2])
    return np.tile(x, (BATCH, REPEATED_HEADS, times, 1))[:, :, :N]


def main() -> None:
    """Print a line for each dtype and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    path = importlib.resources.files("cuflash") / "data" / "smollm2_alice_layer14.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        real = [repeated(data[name]) for name in "qkv"]
    random = np.random.default_rng()
    normal = [random.standard_normal(x.shape, np.float32) for x in real]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        inputs = {
            "real": [cupy.asarray(x.astype(dtype)) for x in real],
            "normal": [cupy.asarray(x.astype(dtype)) for x in normal],
        }
        for causal in (False, True):
            runs = {name: functools.partial(cuflash.attention, *x, causal=causal) for name, x in inputs.items()}
            times = interleaved_times(runs, rounds, repeats=5)
            ms = {name: statistics.median(taken) for name, taken in times.items()}
            plan = cuflash.explain(*inputs["real"], causal=causal)
            case = f"{np.dtype(dtype).name:8} {'causal' if causal else 'full':6}"
            change = f"{100 * (ms['real'] / ms['normal'] - 1):+.1f} %"
            print(f"{case} real {ms['real']:.4f} ms, normal {ms['normal']:.4f} ms: {change}", flush=True)
            print(f"  {plan.family} {plan.config}", flush=True)


if __name__ == "__main__":
    main()
