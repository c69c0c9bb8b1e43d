"""Attention forward by an emulated kernel, from the same checks and the same parameter block as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from cuflash import tensor_maps
from cuflash.arrays import DTYPE_OF, describe, is_strided
from cuflash.compiler import Variant
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.launch import ADDRESS_BLOCK, ADDRESSES, pack_sizes, shift, wgmma_block, wgmma_maps, wgmma_section
from cuflash.problem import Problem, read_problem
from emulator.build import Kernel, build
from emulator.launch import SCHEDULES, Array, EmulatorError, Schedule, launch

ARCHITECTURE = "sm_90"
BLOCKS = 2  # that share out the tiles where a kernel does so


def read(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], Problem]:
    """The arrays as a kernel takes them, and the Problem."""
    packed = {name: np.ascontiguousarray(x) if name in "qkv" and is_strided(x) else x for name, x in inputs.items()}
    return packed, read_problem(**{name: describe(name, x) for name, x in packed.items()}, **options)


def attention(
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    config: SimtConfig | MmaConfig | WgmmaConfig,
    schedule: Schedule = SCHEDULES[0],
    *,
    out: Any = None,
    want_lse: bool = True,
    watched: bool = True,
    sum_bits: int = 0,
    blocks: int = BLOCKS,
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
        kernel = build(variant.kernel, variant.header(), texts, optimized=isinstance(config, SimtConfig))
        grid, sizes, offsets = pack_sizes(problem, config.b_r, isinstance(config, MmaConfig) and config.pack_gqa)
        addresses = [arrays[name].address if name in arrays else 0 for name in ADDRESSES]
        if isinstance(config, WgmmaConfig):
            arrays["next_tile"] = Array("next_tile", np.zeros(1, np.uint32), writes="any")
            arrays["next_tile"].values[...] = 0
        for offset in offsets:
            shifted = shift(addresses, offset)
            params = ADDRESS_BLOCK.pack(*shifted) + sizes
            if isinstance(config, WgmmaConfig):
                counter, section = arrays["next_tile"].address, wgmma_section(problem, config)
                maps = encode_maps(kernel, problem, config, shifted)
                params = wgmma_block(maps, shifted, sizes, counter, grid, section)
            launch(
                kernel,
                grid=min(grid, blocks) if isinstance(config, WgmmaConfig) else grid,
                threads=config.threads,
                params=params,
                arrays=list(arrays.values()),
                shared_bytes=config.shared_bytes(problem.spec),
                schedule=schedule,
                watched=watched,
                sum_bits=sum_bits,
            )
            if "next_tile" in arrays and (left := arrays["next_tile"].values[0]) != 0:
                raise EmulatorError(f"the counter of tiles must be 0 after a launch, got {left}")
    return arrays["out"].values, arrays["lse"].values if want_lse else None


@contextlib.contextmanager
def emulated_maps(kernel: Kernel) -> Iterator[None]:
    """Tensor maps are made by the emulator's twin of the driver's function."""
    with mock.patch("ctypes.CDLL", return_value=kernel.core):
        encoder = tensor_maps._encoder.__wrapped__()
    with mock.patch.object(tensor_maps, "_encoder", return_value=encoder):
        yield


def encode_maps(kernel: Kernel, problem: Problem, config: WgmmaConfig, addresses: Sequence[int]) -> list[bytes]:
    """The tensor maps of q, k, v and out."""
    with emulated_maps(kernel):
        layouts = wgmma_maps(problem, config)
        return [tensor_maps.encode(layout, address) for layout, address in zip(layouts, addresses[:4], strict=True)]
