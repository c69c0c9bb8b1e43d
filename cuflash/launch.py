"""From a Problem and its plan to kernel launches: grid, parameter block, batch axes that one launch cannot take."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuflash.compiler import Variant, load_function
from cuflash.config import MEGABYTE, WARP_ROWS, WARPGROUP_ROWS, MmaConfig, SimtConfig, WgmmaConfig
from cuflash.counters import Counters, current_counters
from cuflash.device import DeviceInfo
from cuflash.driver import Kernel
from cuflash.plan import Choice
from cuflash.problem import ITEM_BYTES, Problem, Spec, contiguous_strides
from cuflash.tensor_maps import MAP_BYTES, MapLayout, TensorMaps, map_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOG2_E = math.log2(math.e)
LEAST_FLOAT32 = 2.0**-149
MAX_GRID = 2**31 - 1

# The parameter block of kernels_cu/params.cuh: addresses first, then what does not change from call to call.
ADDRESSES = ("q", "k", "v", "out", "lse", "mask", "bias", "q_lengths", "kv_lengths")
ADDRESS_BLOCK = struct.Struct(f"<{len(ADDRESSES)}Q")
SIZE_BLOCK = struct.Struct("<24q3d12i")
# Strides of an array beside that along the batch
STRIDES_PER_ARRAY = {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 1, "mask": 3, "bias": 3, "q_lengths": 0, "kv_lengths": 0}


@dataclass(frozen=True)
class Launch:
    """Everything of a call that does not depend on addresses.

    Attributes
    ----------
    offsets : tuple
        For each kernel launch, what to add to every address, in bytes; one launch of zeros unless batch axes cannot be
        merged.
    """

    function: Any
    grid: int
    threads: int
    shared_bytes: int
    sizes: bytes
    offsets: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The function, with all parameters but the addresses."""
        content = bytes(ADDRESS_BLOCK.size) + self.sizes
        return Kernel(self.function, self.grid, self.threads, self.shared_bytes, content)

    def __call__(self, addresses: Sequence[int], stream: Any = None) -> None:
        """Launch on the current device and on `stream`, by default the current one.

        `addresses` are those of `ADDRESSES` in order, 0 for what is absent.
        """
        kernel = self.kernel
        pointer = kernel.stream(stream)
        for offset in self.offsets:
            parameters = kernel.take()
            shifted = addresses if offset is NO_OFFSET else shift(addresses, offset)
            ADDRESS_BLOCK.pack_into(parameters.block, 0, *shifted)
            kernel.launch(parameters, pointer)


NO_OFFSET = (0,) * len(ADDRESSES)


def shift(addresses: Sequence[int], offset: Sequence[int]) -> Sequence[int]:
    """The addresses of one of several launches; what is absent, 0, stays so."""
    return [address + step if address else 0 for address, step in zip(addresses, offset, strict=True)]


# What WgmmaParams of kernels_cu/forward_wgmma.cu adds to the parameter block: four tensor maps before it, this behind.
SCHEDULE_BLOCK = struct.Struct("<Q2i32x")  # up to a multiple of 64 bytes, the alignment of a map
WGMMA_BLOCK = struct.Struct(f"<{4 * f'{MAP_BYTES}s'}{len(ADDRESSES)}Q{SIZE_BLOCK.size}sQ")  # up to the counter


@dataclass(frozen=True)
class WgmmaLaunch:
    """As `Launch`, of forward_wgmma: with tensor maps, and as many blocks as share out the tiles.

    Attributes
    ----------
    maps : tuple of TensorMaps
        Those of q, k, v and out.
    """

    function: Any
    grid: int
    threads: int
    shared_bytes: int
    sizes: bytes
    offsets: tuple[tuple[int, ...], ...]
    maps: tuple[TensorMaps, TensorMaps, TensorMaps, TensorMaps]
    tiles: int
    section: int
    counters: Counters

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The function, with all parameters but maps, addresses and the counter."""
        none = bytes(MAP_BYTES)
        content = wgmma_block((none, none, none, none), NO_OFFSET, self.sizes, 0, self.tiles, self.section)
        return Kernel(self.function, self.grid, self.threads, self.shared_bytes, content)

    def __call__(self, addresses: Sequence[int], stream: Any = None) -> None:
        """Launch on the current device and on `stream`, as `Launch` does."""
        kernel, (q, k, v, out) = self.kernel, self.maps
        pointer = kernel.stream(stream)
        for offset in self.offsets:
            shifted = addresses if offset is NO_OFFSET else shift(addresses, offset)
            parameters = kernel.take()
            maps = q.at(shifted[0]), k.at(shifted[1]), v.at(shifted[2]), out.at(shifted[3])
            WGMMA_BLOCK.pack_into(parameters.block, 0, *maps, *shifted, self.sizes, self.counters.next(pointer))
            kernel.launch(parameters, pointer)


def wgmma_block(
    maps: Sequence[bytes], addresses: Sequence[int], sizes: bytes, counter: int, tiles: int, section: int
) -> bytes:
    """The parameter block of forward_wgmma."""
    return b"".join((*maps, ADDRESS_BLOCK.pack(*addresses), sizes, SCHEDULE_BLOCK.pack(counter, tiles, section)))


def wgmma_maps(problem: Problem, config: WgmmaConfig) -> tuple[MapLayout, MapLayout, MapLayout, MapLayout]:
    """How q, k, v and out are described to TMA."""
    batch, steps, _ = split_batch(problem)
    rank, shapes = len(problem.batch), problem.shapes()
    box_rows = (("q", WARPGROUP_ROWS), ("k", config.b_c), ("v", config.b_c), ("out", WARP_ROWS))
    q, k, v, out = (
        map_layout(problem.spec.dtype, shapes[name], problem.strides[name][rank : rank + 2], batch, steps[name], rows)
        for name, rows in box_rows
    )
    return q, k, v, out


def wgmma_section(problem: Problem, config: WgmmaConfig) -> int:
    """How many query heads are worked on together: those whose keys and values stay in the L2 cache."""
    if problem.right is None or problem.left is not None:
        return 1  # rows are of one length
    kv_head_bytes = problem.n_k * (problem.d + problem.d_v) * ITEM_BYTES[problem.spec.dtype]
    kv_heads = max(1, config.section_mb * MEGABYTE // kv_head_bytes)
    return min(kv_heads * (problem.h_q // problem.h_kv), problem.heads_total)


def merge_batch_axes(
    batch: tuple[int, ...], strides: Mapping[str, tuple[int, ...]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Batch axes with neighbours merged wherever every array allows it; axes of one element vanish."""
    extents: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for axis, extent in enumerate(batch):
        if extent == 1:
            continue
        own = {name: steps[axis] for name, steps in strides.items()}
        if extents and all(merged[name][-1] == own[name] * extent for name in strides):
            extents[-1] *= extent
            for name in strides:
                merged[name][-1] = own[name]
        else:
            extents.append(extent)
            for name in strides:
                merged[name].append(own[name])
    return extents, merged


def all_strides(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Strides of every array of the call, the log-sum-exp included."""
    return {**problem.strides, "lse": contiguous_strides((*problem.batch, problem.h_q, problem.n_q))}


def take_longest_axis(
    batch: tuple[int, ...], strides: Mapping[str, tuple[int, ...]]
) -> tuple[int, dict[str, int], list[dict[str, int]]]:
    """The batch of one launch, every array's stride along it, and the offsets (in elements) of every launch."""
    extents, merged = merge_batch_axes(batch, strides)
    inner, steps = 1, dict.fromkeys(merged, 0)
    if extents:
        axis = extents.index(max(extents))
        inner, steps = extents.pop(axis), {name: own.pop(axis) for name, own in merged.items()}
    offsets = [
        {name: sum(i * s for i, s in zip(index, own, strict=True)) for name, own in merged.items()}
        for index in itertools.product(*map(range, extents))
    ]
    return inner, steps, offsets


def split_batch(problem: Problem) -> tuple[int, dict[str, int], list[dict[str, int]]]:
    """What `take_longest_axis` makes of the arrays of a call."""
    rank = len(problem.batch)
    return take_longest_axis(problem.batch, {name: own[:rank] for name, own in all_strides(problem).items()})


def scale_log2(scale: float, spec: Spec) -> float:
    """`scale` log2(e), which is 0 in float32 only where the scale is."""
    factor = scale * LOG2_E
    if spec.accumulator == "float64" or factor == 0 or abs(factor) >= LEAST_FLOAT32:
        return factor
    return math.copysign(LEAST_FLOAT32, factor)


def pack_sizes(problem: Problem, b_r: int, pack_gqa: bool = False) -> tuple[int, bytes, tuple[tuple[int, ...], ...]]:
    """Blocks of one launch, the parameter block after its addresses, and the address offsets of every launch in bytes.

    With `pack_gqa`, the `b_r` rows of a block are those of all query heads that share a head of k and v.
    """
    batch, steps, offsets = split_batch(problem)
    rank, known = len(problem.batch), all_strides(problem)
    strides: list[int] = []
    for name, count in STRIDES_PER_ARRAY.items():
        own = known.get(name)
        strides += [0] * (1 + count) if own is None else [steps[name], *own[rank : rank + count]]
    softcap = problem.softcap
    group = problem.h_q // max(problem.h_kv, 1)
    packed = group if pack_gqa else 1
    row_tiles = -(-problem.n_q * packed // b_r)
    sizes = SIZE_BLOCK.pack(
        *strides,
        problem.scale if softcap is None else problem.scale / softcap,
        scale_log2(problem.scale, problem.spec),
        0.0 if softcap is None else softcap,
        problem.h_q,
        group,
        problem.n_q,
        problem.n_k,
        problem.d,
        problem.d_v,
        problem.left or 0,
        problem.right or 0,
        problem.bottom_right,
        row_tiles,
        problem.long_q_lengths,
        problem.long_kv_lengths,
    )
    items = item_bytes(problem)
    in_bytes = tuple(tuple(offset.get(name, 0) * items[name] for name in ADDRESSES) for offset in offsets)
    grid = row_tiles * (problem.h_q // packed) * batch
    if grid > MAX_GRID:
        raise ValueError(f"batch * H_q * ceil(N_q / {b_r}) must be at most 2^31 - 1, got {grid}; split the batch")
    return grid, sizes, in_bytes if len(in_bytes) > 1 else (NO_OFFSET,)


def item_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of an element of every array of the call."""
    element = ITEM_BYTES[problem.spec.dtype]
    return {
        **dict.fromkeys(("q", "k", "v", "out"), element),
        "lse": ITEM_BYTES[problem.spec.lse_dtype],
        "mask": 1,
        "bias": ITEM_BYTES[problem.spec.bias or problem.spec.dtype],
        "q_lengths": 8 if problem.long_q_lengths else 4,
        "kv_lengths": 8 if problem.long_kv_lengths else 4,
    }


def make_launch(problem: Problem, choice: Choice, device: DeviceInfo) -> Launch | WgmmaLaunch:
    """Compile and load what `problem` needs on the current device, `device`."""
    config = choice.config
    if not isinstance(config, (SimtConfig, MmaConfig, WgmmaConfig)):
        raise TypeError(f"no GPU kernel for {config!r}")
    packs_gqa = isinstance(config, MmaConfig) and config.pack_gqa
    grid, sizes, offsets = pack_sizes(problem, config.b_r, packs_gqa)
    variant = Variant(
        kernel=f"forward_{choice.family}", spec=problem.spec, config=config, architecture=device.architecture
    )
    if isinstance(config, WgmmaConfig):
        q, k, v, out = (TensorMaps(layout) for layout in wgmma_maps(problem, config))
        return WgmmaLaunch(
            function=load_function(variant),
            grid=min(grid, device.multiprocessors),
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.spec),
            sizes=sizes,
            offsets=offsets,
            maps=(q, k, v, out),
            tiles=grid,
            section=wgmma_section(problem, config),
            counters=current_counters(),
        )
    return Launch(
        function=load_function(variant),
        grid=grid,
        threads=config.threads,
        shared_bytes=config.shared_bytes(problem.spec),
        sizes=sizes,
        offsets=offsets,
    )
