"""From a BackwardProblem and its plan to kernel launches: grids, parameter blocks, workspace, batch axes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuflash.backward_config import (
    STATISTICS_LANES,
    STATISTICS_ROWS,
    BackwardConfig,
    BackwardMmaConfig,
    BackwardSimtConfig,
    BackwardWgmmaConfig,
)
from cuflash.backward_plan import BackwardChoice, backward_simt_default, is_deterministic
from cuflash.backward_problem import BackwardProblem
from cuflash.compiler import Variant, load_functions
from cuflash.config import WARP
from cuflash.device import DeviceInfo
from cuflash.driver import Kernel, Parameters
from cuflash.launch import MAX_GRID, scale_log2, take_longest_axis
from cuflash.problem import ITEM_BYTES, contiguous_strides, round_up
from cuflash.tensor_maps import TensorMaps, map_layout

# The parameter block of kernels_cu/backward_params.cuh: addresses first, then what does not change from call to call.
INPUTS = ("q", "k", "v", "out", "dout", "lse", "dlse", "mask", "bias", "q_lengths", "kv_lengths")
OUTPUTS = ("dq", "dk", "dv", "dbias")
WORKSPACE = ("row_lse", "row_delta")
ADDRESSES = (*INPUTS, *OUTPUTS, *WORKSPACE)
PLACES = {name: place for place, name in enumerate(ADDRESSES)}
address_block = functools.cache(lambda count: struct.Struct(f"<{count}Q"))
ADDRESS_BLOCK = address_block(len(ADDRESSES))
STRIDES_PER_ARRAY = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "lse", "dlse"), 3),
    **{"mask": 4, "bias": 4, "q_lengths": 1, "kv_lengths": 1, "dq": 3, "dk": 3, "dv": 3, "dbias": 4},
}
SIZE_BLOCK = struct.Struct(f"<{sum(STRIDES_PER_ARRAY.values())}q4d16iQ")
MAP_ALIGNMENT_IN_BLOCK = 64
LEAST_HEADS = 8  # that are worked on together without a mask, on Hopper
CONDITION_BLOCK = struct.Struct("<Q")  # what SIZE_BLOCK ends with
# On Hopper: how many query heads that share keys one ticket has at most; if there are more, how many then; and from how
# many tiles of rows on. Under a causal mask (by the rows of a tile), and otherwise.
MOST_HEADS_CAUSAL, HEADS_OF_PART_CAUSAL, LEAST_ROW_TILES_CAUSAL = 4, {64: 2, 128: 4}, 16
MOST_HEADS, HEADS_OF_PART, LEAST_ROW_TILES = 16, 8, 8
STEPS_APART = 3  # from when dQ of a tile is added to when the next block may add its own


MAX_KNOWN_CALLS = 256  # of which the parameters are remembered
MOST_KNOWN_LAUNCHES = 4  # of a call of which they are


class Stage(NamedTuple):
    """One kernel of a call: the entry function of its file, and how it is launched."""

    entry: str
    grid: int
    threads: int
    shared_bytes: int


class Part(NamedTuple):
    """The kernels of one file, launched one after the other for each block of parameters.

    Attributes
    ----------
    variant : Variant
    stages : tuple of Stage
    blocks : tuple of (offsets, sizes)
        For each launch what to add to every address, in bytes, and the parameter block after the addresses; one unless
        batch axes cannot be merged.
    maps : tuple of (name, TensorMaps)
        Of the arrays that TMA reads; in the parameter block, they come first.
    condition : int or None
        Which of the addresses is that of an integer without which, if it is 0, the kernels do nothing.
    tail : bytes or None
        What the kernels' own parameters, behind the common ones, hold after the addresses of `scratch`; None where
        there are no such parameters.
    """

    variant: Variant
    stages: tuple[Stage, ...]
    blocks: tuple[tuple[tuple[int, ...], bytes], ...]
    tail: bytes | None = None
    condition: int | None = None
    maps: tuple[tuple[str, TensorMaps], ...] = ()

    def block(self, addresses: Sequence[int], offsets: Sequence[int], sizes: bytes) -> bytes:
        """The parameters of one launch, as long as kernels declare them.

        `addresses` are those of `ADDRESSES` and then those of `scratch`.
        """
        common = shifted_block(addresses[: len(ADDRESSES)], offsets) + sizes
        if self.condition is not None:
            common = common[: -CONDITION_BLOCK.size] + CONDITION_BLOCK.pack(addresses[self.condition])
        if self.tail is None:
            return common
        own = addresses[len(ADDRESSES) :]
        maps = b""
        for name, map_of in self.maps:
            place = PLACES[name]
            maps += map_of.at(addresses[place] + offsets[place])
        block = maps + common + address_block(len(own)).pack(*own) + self.tail
        return block + bytes(-len(block) % MAP_ALIGNMENT_IN_BLOCK) if maps else block


@dataclass(frozen=True)
class BackwardLaunch:
    """Everything of a call that does not depend on addresses: the parts, with their kernels loaded."""

    parts: tuple[tuple[tuple[Kernel, ...], Part], ...]

    def __call__(self, addresses: Sequence[int], stream: Any = None) -> None:
        """Launch on the current device and on `stream`, by default the current one.

        `addresses` are those of `ADDRESSES` in order, 0 for what is absent, and then those of `scratch`.
        """
        for (kernels, _), launches in zip(self.parts, self.known_parameters(tuple(addresses)), strict=True):
            pointer = kernels[0].stream(stream)
            for parameters in launches:
                for kernel in kernels:
                    kernel.run(parameters, pointer)

    @functools.cached_property
    def known_parameters(self) -> Callable[[tuple[int, ...]], tuple[tuple[Parameters, ...], ...]]:
        """Those of every launch, by part, remembered: most calls of a training run meet addresses again."""
        few = sum(len(part.blocks) for _, part in self.parts) <= MOST_KNOWN_LAUNCHES
        return functools.lru_cache(MAX_KNOWN_CALLS)(self.parameters) if few else self.parameters

    def parameters(self, addresses: tuple[int, ...]) -> tuple[tuple[Parameters, ...], ...]:
        """Those of every launch, by part; nothing writes to them any more."""
        return tuple(
            tuple(Parameters(part.block(addresses, *block)) for block in part.blocks) for _, part in self.parts
        )


def shifted_block(addresses: Sequence[int], offsets: Sequence[int]) -> bytes:
    """The addresses of one of several launches; what is absent, 0, stays so."""
    if not any(offsets):
        return ADDRESS_BLOCK.pack(*addresses)
    return ADDRESS_BLOCK.pack(*(a + step if a else 0 for a, step in zip(addresses, offsets, strict=True)))


def workspace(problem: BackwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array that the kernels hand to one another."""
    forward = problem.forward
    rows = (*forward.batch, forward.h_q, round_up(forward.n_q, STATISTICS_ROWS))
    return {"row_lse": (rows, problem.spec.lse_dtype), "row_delta": (rows, problem.spec.accumulator)}


def scratch(problem: BackwardProblem, config: BackwardConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the arrays that only the kernels of one family know; every launch of a call uses them anew."""
    if isinstance(config, BackwardMmaConfig):
        return mma_scratch(problem, config)
    return wgmma_scratch(problem, config) if isinstance(config, BackwardWgmmaConfig) else {}


def split_batch(problem: BackwardProblem) -> tuple[int, dict[str, int], list[dict[str, int]]]:
    """The batch of one launch, every array's stride along it, and the offsets (in elements) of every launch."""
    rank = len(problem.batch)
    strides = {name: steps[:rank] for name, steps in problem.strides.items()}
    strides |= {name: contiguous_strides(shape)[:rank] for name, (shape, _) in workspace(problem).items()}
    return take_longest_axis(problem.batch, strides)


def item_bytes(problem: BackwardProblem) -> dict[str, int]:
    """Bytes of an element of every array of the call, as the kernels see it."""
    spec, forward = problem.spec, problem.forward
    lse, element = ITEM_BYTES[spec.lse_dtype], ITEM_BYTES[spec.dtype]
    bias = ITEM_BYTES[spec.bias or spec.dtype]
    return {
        **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), element),
        **{"lse": lse, "dlse": lse, "row_lse": lse, "row_delta": ITEM_BYTES[spec.accumulator]},
        **{"mask": 1, "bias": bias, "dbias": bias},
        "q_lengths": 8 if forward.long_q_lengths else 4,
        "kv_lengths": 8 if forward.long_kv_lengths else 4,
    }


def pack_blocks(problem: BackwardProblem, b_r: int, b_c: int) -> tuple[tuple[tuple[int, ...], bytes], ...]:
    """For each launch, the address offsets in bytes, and the parameter block after the addresses."""
    forward = problem.forward
    batch, steps, offsets = split_batch(problem)
    rank = len(problem.batch)
    strides: list[int] = []
    for name, count in STRIDES_PER_ARRAY.items():
        own = problem.strides.get(name)
        strides += [0] * count if own is None else [steps[name], *own[rank : rank + count - 1]]
    softcap, items = forward.softcap, item_bytes(problem)
    written: set[int] = set()
    blocks = []
    for offset in offsets:
        sizes = SIZE_BLOCK.pack(
            *strides,
            forward.scale if softcap is None else forward.scale / softcap,
            scale_log2(forward.scale, forward.spec),
            0.0 if softcap is None else softcap,
            forward.scale,
            batch,
            forward.h_q,
            query_heads_of_keys(problem),
            forward.n_q,
            forward.n_k,
            forward.d,
            forward.d_v,
            forward.left or 0,
            forward.right or 0,
            forward.bottom_right,
            -(-forward.n_q // b_r),
            -(-forward.n_k // b_c),
            round_up(forward.n_q, STATISTICS_ROWS),
            forward.long_q_lengths,
            forward.long_kv_lengths,
            offset.get("dbias", 0) in written,
            0,
        )
        written.add(offset.get("dbias", 0))
        blocks.append((tuple(offset.get(name, 0) * items[name] for name in ADDRESSES), sizes))
    return tuple(blocks)


def simt_stages(problem: BackwardProblem, config: BackwardSimtConfig) -> tuple[Stage, ...]:
    """The kernels of backward_simt.cu."""
    forward = problem.forward
    batch = split_batch(problem)[0]
    threads, shared = config.threads, config.shared_bytes(problem.spec)
    rows_at_once = threads // STATISTICS_LANES
    chunks = -(-round_up(forward.n_q, STATISTICS_ROWS) // rows_at_once)
    stages = (
        Stage("backward_simt_statistics", batch * forward.h_q * chunks, threads, 0),
        Stage("backward_simt_keys", batch * forward.h_kv * -(-forward.n_k // config.b_c), threads, shared),
        Stage("backward_simt_rows", batch * forward.h_q * -(-forward.n_q // config.b_r), threads, shared),
    )
    return launchable(stages)


def mma_scratch(problem: BackwardProblem, config: BackwardMmaConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays behind Params in MmaParams of backward_mma.cu, in that order."""
    forward = problem.forward
    heads = split_batch(problem)[0] * forward.h_q
    tiles = heads * -(-forward.n_q // config.b_r)
    sized_rows = heads * round_up(forward.n_q, STATISTICS_ROWS) if problem.spec.dtype == "float16" else 0
    return {
        "sums": ((tiles, config.sums_of_tile(problem.spec)), "float32"),
        "turns": ((tiles, config.warps), "int32"),
        "next_tile": ((1,), "int32"),
        "row_sizes": ((sized_rows,), "float32"),
        "special": ((1,), "int32"),
    }


def mma_stages(problem: BackwardProblem, config: BackwardMmaConfig) -> tuple[Stage, ...]:
    """The kernels of backward_mma.cu."""
    forward, spec = problem.forward, problem.spec
    batch, threads = split_batch(problem)[0], config.threads
    chunks = -(-round_up(forward.n_q, STATISTICS_ROWS) // (threads // STATISTICS_LANES))
    row_tiles, key_tiles = -(-forward.n_q // config.b_r), -(-forward.n_k // config.b_c)
    stages = (
        Stage("backward_mma_statistics", max(batch * forward.h_q * chunks, 1), threads, 0),
        Stage("backward_mma_keys", batch * forward.h_kv * key_tiles, threads, config.shared_bytes(spec)),
        Stage("backward_mma_rows", batch * forward.h_q * row_tiles, threads, config.row_tile_bytes(spec)),
    )
    begin = (Stage("backward_mma_begin", 1, threads, 0),) if spec.dtype == "float32" else ()
    return launchable((*begin, *stages))


def instead_of_mma(problem: BackwardProblem, config: BackwardMmaConfig, device: DeviceInfo) -> Part:
    """The kernels on CUDA cores, where there are numbers that TF32 does not serve; the row statistics are there."""
    tiles = backward_simt_default(problem.spec, device)
    return Part(
        variant=Variant("backward_simt", problem.spec, tiles, device.architecture),
        stages=simt_stages(problem, tiles)[1:],
        blocks=pack_blocks(problem, tiles.b_r, tiles.b_c),
        condition=len(ADDRESSES) + list(mma_scratch(problem, config)).index("special"),
    )


def mma_section(problem: BackwardProblem, config: BackwardMmaConfig, device: DeviceInfo) -> int:
    """How many heads of k and v are worked on together.

    As many as it takes that a block which starts finds the one before it, of the same head, `STEPS_APART` steps ahead,
    if starts are spread over the time that a block takes; and that all blocks start with keys that many rows see.
    """
    forward = problem.forward
    longest = -(-forward.n_q // config.b_r) * query_heads_of_keys(problem)
    steps = max(longest // 4 if problem.spec.right else longest, 1)  # the last blocks of a head are short
    key_tiles = max(-(-forward.n_k // config.b_c), 1)
    resident = device.multiprocessors * config.resident_blocks(problem.spec, device)
    wanted = max(-(-STEPS_APART * resident // steps), -(-resident // key_tiles))
    return max(1, min(wanted, split_batch(problem)[0] * forward.h_kv))


def wgmma_scratch(problem: BackwardProblem, config: BackwardWgmmaConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays behind Params in BackwardWgmmaParams of backward_wgmma.cu, in that order."""
    forward = problem.forward
    heads = split_batch(problem)[0] * forward.h_q
    tiles = 0 if config.splits_products else heads * -(-forward.n_q // config.b_r)
    is_half = problem.spec.dtype == "float16"
    sized_rows = heads * round_up(forward.n_q, STATISTICS_ROWS) if is_half else 0
    key_tiles = split_batch(problem)[0] * forward.h_kv * -(-forward.n_k // config.b_c)
    summed_tiles = key_tiles if wgmma_heads_of_part(problem, config) < query_heads_of_keys(problem) else 0
    return {
        "dq_sums": ((tiles, config.pieces(problem.spec) * config.piece_floats(problem.spec)), "float32"),
        "turns": ((tiles,), "int32"),
        "next_ticket": ((2,), "int32"),
        "row_sizes": ((sized_rows,), "float32"),
        "v_sizes": ((key_tiles if is_half and config.splits_products else 0,), "float32"),
        "key_sums": ((summed_tiles, config.b_c, problem.spec.d + problem.spec.d_v), "float32"),
        "key_turns": ((summed_tiles, config.consumers), "int32"),
    }


def query_heads_of_keys(problem: BackwardProblem) -> int:
    """How many query heads share a head of k and v."""
    return max(problem.forward.h_q // max(problem.forward.h_kv, 1), 1)


def wgmma_heads_of_part(problem: BackwardProblem, config: BackwardWgmmaConfig) -> int:
    """How many of the query heads that share keys a ticket has, at most.

    Few, so that there are tickets for all blocks; and the fewer under a causal mask, where walks differ in length: with
    many heads in one, blocks wait long for each other, and what one block reads falls out of the L2 cache before
    another, heads behind it, asks for it. But each further ticket of the same keys costs the traffic of dK and dV once
    more. The order of sums follows from this number: it must not depend on the batch.
    """
    spec, group = problem.spec, query_heads_of_keys(problem)
    if config.splits_products:
        return group
    row_tiles = -(-problem.forward.n_q // config.b_r)
    if spec.left != spec.right and group > MOST_HEADS_CAUSAL and row_tiles >= LEAST_ROW_TILES_CAUSAL:
        return HEADS_OF_PART_CAUSAL[config.b_r]
    return HEADS_OF_PART if group > MOST_HEADS and row_tiles >= LEAST_ROW_TILES else group


def wgmma_section(problem: BackwardProblem, config: BackwardWgmmaConfig, device: DeviceInfo) -> int:
    """How many heads of k and v are worked on together.

    Where all tiles of keys see the same rows, blocks start one behind the other: the more heads there are to start
    with, the sooner all have started.
    """
    spec = problem.spec
    heads = round(config.waves * device.multiprocessors / max(-(-problem.forward.n_k // config.b_c), 1))
    return max(heads, 1 if spec.left or spec.right else LEAST_HEADS)


def wgmma_row_section(problem: BackwardProblem, config: BackwardWgmmaConfig, device: DeviceInfo) -> int:
    """How many query heads are worked on together where rows have a kernel of their own: two tiles for each block."""
    return -(-2 * device.multiprocessors // max(-(-problem.forward.n_q // config.owned_rows), 1))


def wgmma_scale(problem: BackwardProblem) -> bytes:
    """The factor of q . k in P's exponent, a float, as `scores_of` in wgmma_backward_weights.cuh wants it."""
    forward = problem.forward
    in_log2 = forward.spec.dtype == "bfloat16"
    with np.errstate(over="ignore"):
        scale = np.float32(scale_log2(forward.scale, forward.spec) if in_log2 else forward.scale)
    return struct.pack("f", float(scale))


def wgmma_part(problem: BackwardProblem, config: BackwardWgmmaConfig, device: DeviceInfo) -> Part:
    """The kernels of backward_wgmma.cu, and what they are told beyond the common parameters."""
    forward, spec = problem.forward, problem.spec
    (batch, steps, _), rank, shapes = split_batch(problem), len(problem.batch), problem.shapes()
    chunks = -(-round_up(forward.n_q, STATISTICS_ROWS) // (config.threads // STATISTICS_LANES))
    key_tiles = -(-forward.n_k // config.b_c)
    directions = 2 if spec.left != spec.right else 1  # a head of an odd number that lacks a second one has void tickets
    heads_of_part = wgmma_heads_of_part(problem, config)
    parts = -(-query_heads_of_keys(problem) // heads_of_part)
    columns = batch * -(-forward.h_kv // directions)  # of wgmma_backward_order.cuh
    tickets = columns * directions * key_tiles * parts
    if tickets > MAX_GRID:
        raise ValueError(f"{tickets} tiles of keys are to be walked over, more than 2^31 - 1; split the batch")
    blocks = min(batch * forward.h_kv * key_tiles * parts, device.multiprocessors)
    rows_of_blocks = batch * forward.h_q * -(-forward.n_q // config.owned_rows)
    parts_of_dq = batch * forward.h_q * -(-forward.n_q // config.b_r) * config.pieces(spec) * 4  # one for a warp
    row_blocks = (
        min(rows_of_blocks, device.multiprocessors)
        if config.splits_products
        else -(-parts_of_dq // (config.threads // WARP))
    )
    row_threads = config.tile_threads if config.splits_products else config.threads
    stages = (
        Stage("backward_wgmma_statistics", batch * forward.h_q * chunks, config.threads, 0),
        Stage("backward_wgmma_keys", blocks, config.tile_threads, config.key_shared_bytes(spec)),
        Stage("backward_wgmma_rows", row_blocks, row_threads, config.row_shared_bytes(spec)),
    )
    maps = []
    for name, rows in (("q", config.b_r), ("dout", config.b_r), ("k", config.b_c), ("v", config.b_c)):
        own = problem.strides[name][rank : rank + 2]
        maps.append((name, TensorMaps(map_layout(spec.dtype, shapes[name], own, batch, steps[name], rows))))
    return Part(
        Variant("backward_wgmma", spec, config, device.architecture, is_deterministic(problem, config)),
        launchable(stages),
        pack_blocks(problem, config.b_r, config.b_c),
        tail=struct.pack(
            "<5i",
            tickets,
            parts,
            heads_of_part,
            min(wgmma_section(problem, config, device), columns),
            wgmma_row_section(problem, config, device),
        )
        + wgmma_scale(problem),
        maps=tuple(maps),
    )


def bias_stages(problem: BackwardProblem, config: BackwardSimtConfig) -> tuple[Stage, ...]:
    """The kernel of the bias gradient: a block for each tile of the bias itself."""
    forward = problem.forward
    batch, steps, _ = split_batch(problem)
    head, row, column = problem.strides["dbias"][len(problem.batch) :]
    grid = (
        (batch if steps["dbias"] else 1)
        * (forward.h_q if head else 1)
        * (-(-forward.n_q // config.b_r) if row else 1)
        * (-(-forward.n_k // config.b_c) if column else 1)
    )
    return launchable((Stage("backward_bias", grid, config.threads, config.shared_bytes(problem.spec)),))


def launchable(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages, which CUDA can launch."""
    for stage in stages:
        if stage.grid > MAX_GRID:
            raise ValueError(f"{stage.entry} would take {stage.grid} blocks, more than 2^31 - 1; split the batch")
    return tuple(stages)


def make_parts(problem: BackwardProblem, config: BackwardConfig, device: DeviceInfo) -> tuple[Part, ...]:
    """All launches of a call."""
    blocks = pack_blocks(problem, config.b_r, config.b_c)
    variant = Variant(f"backward_{config.family}", problem.spec, config, device.architecture)
    if isinstance(config, BackwardWgmmaConfig):
        parts = [wgmma_part(problem, config, device)]
    elif isinstance(config, BackwardMmaConfig):
        section = struct.pack("<i4x", mma_section(problem, config, device))
        parts = [Part(variant, mma_stages(problem, config), blocks, section)]
        if problem.spec.dtype == "float32":
            parts.append(instead_of_mma(problem, config, device))
    else:
        parts = [Part(variant, simt_stages(problem, config), blocks)]
    if "dbias" in problem.gradients and 0 not in problem.gradients["dbias"].shape:
        tiles = backward_simt_default(problem.spec, device)
        blocks = pack_blocks(problem, tiles.b_r, tiles.b_c)
        if isinstance(config, BackwardWgmmaConfig):  # whose row statistics have an order and a unit of their own
            plain = Variant("backward_simt", problem.spec, tiles, device.architecture)
            parts.append(Part(plain, simt_stages(problem, tiles)[:1], blocks))
        variant = Variant("backward_bias", problem.spec, tiles, device.architecture)
        parts.append(Part(variant, bias_stages(problem, tiles), blocks))
    return tuple(parts)


def make_backward_launch(problem: BackwardProblem, choice: BackwardChoice, device: DeviceInfo) -> BackwardLaunch:
    """Compile and load what `problem` needs on the current device, `device`."""
    if not isinstance(choice.config, BackwardConfig):
        raise TypeError(f"no GPU kernel for {choice.config!r}")
    parts = [(load_kernels(part), part) for part in make_parts(problem, choice.config, device)]
    return BackwardLaunch(tuple((kernels, part) for kernels, part in parts if kernels))


def load_kernels(part: Part) -> tuple[Kernel, ...]:
    """The kernels of the stages that have blocks to run, on the current device."""
    functions = load_functions(part.variant, [stage.entry for stage in part.stages])
    return tuple(
        Kernel(function, stage.grid, stage.threads, stage.shared_bytes)
        for function, stage in zip(functions, part.stages, strict=True)
        if stage.grid
    )
