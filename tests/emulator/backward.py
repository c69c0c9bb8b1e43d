"""Attention backward by emulated kernels, from the same checks and the same parameter blocks as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.arrays import DTYPE_OF, describe, is_strided
from cuflash.backward_config import BackwardConfig, BackwardWgmmaConfig
from cuflash.backward_launch import ADDRESSES, make_parts, scratch, workspace
from cuflash.backward_problem import BackwardProblem, read_backward_problem
from cuflash.device import known_device
from emulator.build import build
from emulator.forward import BLOCKS, emulated_maps
from emulator.launch import SCHEDULES, Array, Schedule, launch

MATRICES = ("q", "k", "v", "out", "dout")


def read(
    call: Mapping[str, Any], options: Mapping[str, Any], return_dbias: bool = False
) -> tuple[dict[str, Any], BackwardProblem]:
    """The arrays as kernels take them, and the BackwardProblem."""
    packed = {name: np.ascontiguousarray(x) if name in MATRICES and is_strided(x) else x for name, x in call.items()}
    operands = {name: describe(name, x) for name, x in packed.items()}
    return packed, read_backward_problem(**operands, **options, return_dbias=return_dbias)


def gradients(
    call: Mapping[str, Any],
    options: Mapping[str, Any],
    config: BackwardConfig,
    schedule: Schedule = SCHEDULES[0],
    *,
    return_dbias: bool = False,
    watched: bool = True,
    sum_bits: int = 0,
    texts: Mapping[str, str] | None = None,
    architecture: str = "sm_90",
    blocks: int = BLOCKS,
    deterministic: bool = True,
) -> tuple[Any, ...]:
    """(dq, dk, dv) or (dq, dk, dv, dbias) of `cuflash.attention_backward(**call, **options)`.

    `texts` are the kernel files, by default kernels_cu's. On Hopper, `blocks` share out the tiles of keys. Without
    `deterministic`, they add to dQ in no order however few keys there are.
    """
    packed, problem = read(call, options, return_dbias)
    dtype = DTYPE_OF[problem.spec.dtype]
    arrays = {name: Array(name, x) for name, x in packed.items()}
    for name, gradient in problem.gradients.items():
        element = DTYPE_OF[problem.spec.bias] if name == "dbias" and problem.spec.bias else dtype
        arrays[name] = Array(name, np.empty(gradient.full_shape, element), writes="once")
    for name, (shape, element) in workspace(problem).items():
        arrays[name] = Array(name, np.empty(shape, DTYPE_OF[element]), writes="any")
    own = scratch(problem, config)
    for name, (shape, element) in own.items():
        arrays[name] = Array(name, np.empty(shape, element), writes="any")
    addresses = [arrays[name].address if name in arrays else 0 for name in (*ADDRESSES, *own)]
    is_wgmma = isinstance(config, BackwardWgmmaConfig)
    device = known_device(architecture)
    if is_wgmma:
        device = replace(device, multiprocessors=blocks)
    for part in () if problem.is_empty() else make_parts(problem, config, device):
        if not deterministic and part.variant.kernel == "backward_wgmma":
            part = part._replace(variant=replace(part.variant, deterministic=False))
        entries = [stage.entry for stage in part.stages]
        for offsets, sizes in part.blocks:
            for stage in part.stages:
                if stage.grid == 0:
                    continue
                kernel = build(
                    part.variant.kernel,
                    part.variant.header(),
                    texts,
                    stage.entry,
                    entries=entries,
                    optimized=not is_wgmma,
                )
                with emulated_maps(kernel) if is_wgmma else contextlib.nullcontext():
                    params = part.block(addresses, offsets, sizes)
                launch(
                    kernel,
                    grid=stage.grid,
                    threads=stage.threads,
                    params=params,
                    arrays=list(arrays.values()),
                    shared_bytes=stage.shared_bytes,
                    schedule=schedule,
                    watched=watched,
                    sum_bits=sum_bits,
                )
    results = []
    for name, gradient in problem.gradients.items():
        full = arrays[name].values
        if gradient.summed_axes:
            wide = np.float64 if dtype.itemsize > 2 else np.float32
            full = full.sum(axis=gradient.summed_axes, dtype=wide).astype(dtype)
        results.append(full.reshape(gradient.shape))
    return tuple(results)
