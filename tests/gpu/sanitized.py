"""Small problems for a run under compute-sanitizer: python sanitized.py [file, text, replacement].

The three arguments seed a fault in a kernel source, to show that the tool would find it.
"""

import sys
from types import MappingProxyType

import cupy
import numpy as np

import cuflash
from cuflash import compiler
from cuflash.config import why_not_mma
from cuflash.device import known_device
from cuflash.plan import mma_default

PROBLEMS = (  # dtype, N_q, N_k, D, options
    ("float32", 65, 70, 64, {}),
    ("float16", 40, 129, 40, {"causal": True}),
    ("float32", 33, 33, 59, {"window": (9, 4), "softcap": 5.0}),
    ("float64", 17, 50, 24, {"causal": True}),
    ("float16", 33, 150, 128, {}),
)


def seed_fault(file: str, text: str, replacement: str) -> None:
    """Compile the kernels with one piece of source replaced."""
    sources = dict(compiler.kernel_sources())
    if text not in sources[file]:
        raise SystemExit(f"{file} does not hold the text to replace: {text!r}")
    sources[file] = sources[file].replace(text, replacement)
    compiler.kernel_sources = lambda: MappingProxyType(sources)


def main() -> None:
    if len(sys.argv) > 1:
        seed_fault(*sys.argv[1:])
    cupy.cuda.set_allocator(None)  # every array by itself, so that its end is known
    rng = np.random.default_rng(0)
    for dtype, n_q, n_k, d, options in PROBLEMS:
        q = cupy.asarray(rng.standard_normal((1, 2, n_q, d)).astype(dtype))
        k, v = (cupy.asarray(rng.standard_normal((1, 1, n_k, d)).astype(dtype)) for _ in range(2))
        mask = cupy.asarray(rng.random((n_q, n_k)) < 0.8)
        bias = cupy.asarray(rng.standard_normal((2, 1, n_k)).astype(dtype))
        spec = cuflash.explain(q, k, v, **options).problem.spec
        device = known_device("sm_80")
        configs = [None, cuflash.SimtConfig(32, 32, 128, 16)]
        if why_not_mma(spec, device) is None:
            configs.append(mma_default(spec, device))
        for config in configs:
            cuflash.attention(q, k, v, **options, return_lse=True, config=config)
            cuflash.attention(q, k, v, **options, mask=mask, bias=bias, config=config)
    cupy.cuda.Device().synchronize()
    print("finished")


if __name__ == "__main__":
    main()
