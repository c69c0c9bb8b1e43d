"""Attention forward by an emulated kernel, from the same checks and the same parameter block as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.arrays import DTYPE_OF, describe, is_strided
from cuflash.compiler import Variant
from cuflash.config import MmaConfig, SimtConfig
from cuflash.launch import ADDRESS_BLOCK, ADDRESSES, pack_sizes
from cuflash.problem import Problem, read_problem
from emulator.build import build
from emulator.launch import SCHEDULES, Array, Schedule, launch

ARCHITECTURE = "sm_90"


def read(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], Problem]:
    """The arrays as a kernel takes them, and the Problem."""
    packed = {name: np.ascontiguousarray(x) if name in "qkv" and is_strided(x) else x for name, x in inputs.items()}
    return packed, read_problem(**{name: describe(name, x) for name, x in packed.items()}, **options)


def attention(
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    config: SimtConfig | MmaConfig,
    schedule: Schedule = SCHEDULES[0],
    *,
    out: Any = None,
    want_lse: bool = True,
    watched: bool = True,
    texts: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
    """O and LSE (None where it is not wanted) of `cuflash.attention(**inputs, **options)`.

    `out` gives the result its strides; nothing is written to it. `texts` are the kernel files, by default kernels_cu's.
    """
    packed, problem = read(inputs, options)
    if out is None:
        out = np.empty(problem.out_shape, DTYPE_OF[problem.spec.dtype])
    else:
        problem = read_problem(**{name: describe(name, x) for name, x in (*packed.items(), ("out", out))}, **options)
    arrays = {name: Array(name, x) for name, x in packed.items()}
    arrays["out"] = Array("out", out, writes="once")
    if want_lse:
        arrays["lse"] = Array("lse", np.empty(problem.lse_shape, DTYPE_OF[problem.spec.lse_dtype]), writes="once")
    if not problem.is_empty(want_lse):
        variant = Variant(f"forward_{config.family}", problem.spec, config, ARCHITECTURE)
        kernel = build(variant.kernel, variant.header(), texts)
        grid, sizes, offsets = pack_sizes(problem, config.b_r, isinstance(config, MmaConfig) and config.pack_gqa)
        addresses = [arrays[name].address if name in arrays else 0 for name in ADDRESSES]
        for offset in offsets:
            launch(
                kernel,
                grid=grid,
                threads=config.threads,
                params=ADDRESS_BLOCK.pack(*map(int.__add__, addresses, offset)) + sizes,
                arrays=list(arrays.values()),
                shared_bytes=config.shared_bytes(problem.spec),
                schedule=schedule,
                watched=watched,
            )
    return arrays["out"].values, arrays["lse"].values if want_lse else None
