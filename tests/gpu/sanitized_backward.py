"""Small problems of the backward pass for a run under compute-sanitizer, as sanitized.py has them of the forward."""

import sys

import cupy
import numpy as np
from sanitized import PROBLEMS, seed_fault

import cuflash
from cuflash.backward_plan import backward_mma_default
from cuflash.device import device_info

SIMT = (
    cuflash.BackwardSimtConfig(16, 16, 128, 16),
    cuflash.BackwardSimtConfig(16, 16, 128, 16, both_tiles=False),
)
WGMMA = (
    cuflash.BackwardWgmmaConfig(64, 64),
    cuflash.BackwardWgmmaConfig(64, 128),
    cuflash.BackwardWgmmaConfig(128, 128),
)


def configs(spec, family, device):
    """The default, which is of `family`, and tiles of the other families that serve `spec`."""
    mma = (backward_mma_default(spec, device),) if family == "wgmma" else ()
    wgmma = (config for config in WGMMA if config.why_illegal(spec, device) is None)
    return (None, *SIMT, *mma, *wgmma)


def main() -> None:
    if len(sys.argv) > 1:
        seed_fault(*sys.argv[1:])
    cupy.cuda.set_allocator(None)  # every array by itself, so that its end is known
    rng = np.random.default_rng(0)
    device = device_info(cupy.cuda.Device().id)
    for dtype, n_q, n_k, d, options in PROBLEMS:
        q, dout = (cupy.asarray(rng.standard_normal((1, 2, n_q, d)).astype(dtype)) for _ in range(2))
        k, v = (cupy.asarray(rng.standard_normal((1, 1, n_k, d)).astype(dtype)) for _ in range(2))
        mask = cupy.asarray(rng.random((n_q, n_k)) < 0.8)
        bias = cupy.asarray(rng.standard_normal((2, 1, n_k)).astype(dtype))
        for more in ({}, {"mask": mask, "bias": bias}):
            out, lse = cuflash.attention_forward(q, k, v, **options, **more)
            call = {"dlse": lse, **options, **more, "return_dbias": bool(more)}
            plan = cuflash.explain_backward(dout, q, k, v, out, lse, **call)
            for config in configs(plan.problem.spec, plan.family, device):
                cuflash.attention_backward(dout, q, k, v, out, lse, **call, config=config)
    # So many query heads share keys that these have several tickets, and so many rows that slots are used again.
    q, dout = (cupy.asarray(rng.standard_normal((1, 5, 1024, 64)).astype("float16")) for _ in range(2))
    k, v = (cupy.asarray(rng.standard_normal((1, 1, 100, 64)).astype("float16")) for _ in range(2))
    out, lse = cuflash.attention_forward(q, k, v, causal="top-left")
    several = cuflash.BackwardWgmmaConfig(64)
    if several.why_illegal(cuflash.explain(q, k, v, causal="top-left").problem.spec, device) is None:
        cuflash.attention_backward(dout, q, k, v, out, lse, causal="top-left", config=several)
    cupy.cuda.Device().synchronize()
    print("finished")


if __name__ == "__main__":
    main()
