"""Small problems of the backward pass for a run under compute-sanitizer, as sanitized.py has them of the forward."""

import sys

import cupy
import numpy as np
from sanitized import PROBLEMS, seed_fault

import cuflash

CONFIGS = (
    None,
    cuflash.BackwardSimtConfig(16, 16, 128, 16),
    cuflash.BackwardSimtConfig(16, 16, 128, 16, both_tiles=False),
)


def main() -> None:
    if len(sys.argv) > 1:
        seed_fault(*sys.argv[1:])
    cupy.cuda.set_allocator(None)  # every array by itself, so that its end is known
    rng = np.random.default_rng(0)
    for dtype, n_q, n_k, d, options in PROBLEMS:
        q, dout = (cupy.asarray(rng.standard_normal((1, 2, n_q, d)).astype(dtype)) for _ in range(2))
        k, v = (cupy.asarray(rng.standard_normal((1, 1, n_k, d)).astype(dtype)) for _ in range(2))
        mask = cupy.asarray(rng.random((n_q, n_k)) < 0.8)
        bias = cupy.asarray(rng.standard_normal((2, 1, n_k)).astype(dtype))
        for more in ({}, {"mask": mask, "bias": bias}):
            out, lse = cuflash.attention_forward(q, k, v, **options, **more)
            for config in CONFIGS:
                cuflash.attention_backward(
                    dout, q, k, v, out, lse, dlse=lse, **options, **more, return_dbias=bool(more), config=config
                )
    cupy.cuda.Device().synchronize()
    print("finished")


if __name__ == "__main__":
    main()
