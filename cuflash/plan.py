"""From a Spec and a GPU to a kernel family and its tile configuration, and why the others were ruled out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cuflash.config import MmaConfig, NumpyConfig, SimtConfig, TileConfig, WgmmaConfig, why_not_mma
from cuflash.device import DeviceInfo
from cuflash.problem import ITEM_BYTES, Problem, Spec
from cuflash.tensor_maps import why_no_tensor_map


@dataclass(frozen=True)
class SimtDefault:
    """A tile configuration, and the specs that it is a default for."""

    max_head_dim: int
    lean: bool
    config: SimtConfig

    def serves(self, spec: Spec) -> bool:
        """Whether `spec` is one of them."""
        is_lean = spec.aligned and not spec.mask and spec.bias is None
        return max(spec.d, spec.d_v) <= self.max_head_dim and (is_lean or not self.lean)


# Tiles of the CUDA-core family in order of preference, by accumulator: those for at most so large a head dim; the first
# legal one is the default. Lean ones hold so much in registers that a mask, a bias or unaligned rows would spill.
# Order: benchmarks/forward_simt.py.
SIMT_DEFAULTS = {
    "float32": (
        SimtDefault(128, lean=True, config=SimtConfig(b_r=64, b_c=64, threads=128, lanes_per_row=16)),
        SimtDefault(128, lean=False, config=SimtConfig(b_r=32, b_c=64, threads=128, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=64, b_c=64, threads=256, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=32, b_c=32, threads=128, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=32, b_c=16, threads=128, lanes_per_row=16)),
    ),
    "float64": (
        SimtDefault(64, lean=False, config=SimtConfig(b_r=32, b_c=32, threads=128, lanes_per_row=16)),
        SimtDefault(128, lean=False, config=SimtConfig(b_r=64, b_c=64, threads=256, lanes_per_row=16)),
        SimtDefault(128, lean=False, config=SimtConfig(b_r=32, b_c=32, threads=128, lanes_per_row=16)),
        SimtDefault(256, lean=True, config=SimtConfig(b_r=64, b_c=32, threads=256, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=32, b_c=16, threads=256, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=16, b_c=16, threads=128, lanes_per_row=16)),
        SimtDefault(256, lean=False, config=SimtConfig(b_r=8, b_c=16, threads=128, lanes_per_row=16)),
    ),
}


@dataclass(frozen=True)
class MmaDefault:
    """A tile configuration of the tensor-core family, and the specs that it is a default for."""

    max_head_dim: int
    lean: bool
    config: MmaConfig

    def serves(self, spec: Spec) -> bool:
        """Whether `spec` is one of them."""
        is_lean = not (spec.mask or spec.bias or spec.softcap)
        return max(spec.d, spec.d_v) <= self.max_head_dim and (is_lean or not self.lean)


# Tiles of the tensor-core family in order of preference, by bytes of an element; the first legal one is the default.
# Those of a warp with 32 rows read K and V half as often from shared memory as those with 16, and leave no registers
# for a mask, a bias or a softcap. The last ones are for sm_75. Order: benchmarks/forward_mma.py.
MMA_DEFAULTS = {
    2: (
        MmaDefault(64, lean=True, config=MmaConfig(b_r=128, b_c=64, warps=4, swizzle=True)),
        MmaDefault(96, lean=True, config=MmaConfig(b_r=128, b_c=64, warps=4)),
        MmaDefault(128, lean=True, config=MmaConfig(b_r=128, b_c=64, warps=4, swizzle=True)),
        MmaDefault(128, lean=True, config=MmaConfig(b_r=128, b_c=32, warps=4, swizzle=True)),
        MmaDefault(128, lean=False, config=MmaConfig(b_r=128, b_c=64, warps=8, swizzle=True)),
        MmaDefault(128, lean=False, config=MmaConfig(b_r=64, b_c=64, warps=4, stages=1, swizzle=True)),
        MmaDefault(256, lean=False, config=MmaConfig(b_r=128, b_c=64, warps=8, stages=1)),
        MmaDefault(256, lean=False, config=MmaConfig(b_r=64, b_c=32, warps=4, stages=1)),
        MmaDefault(128, lean=False, config=MmaConfig(b_r=64, b_c=64, warps=4, stages=1, mma_k=8, async_copy=False)),
        MmaDefault(256, lean=False, config=MmaConfig(b_r=64, b_c=16, warps=4, stages=1, mma_k=8, async_copy=False)),
    ),
    4: (
        MmaDefault(128, lean=False, config=MmaConfig(b_r=128, b_c=32, warps=8, mma_k=8)),
        MmaDefault(128, lean=False, config=MmaConfig(b_r=64, b_c=32, warps=4, stages=1, mma_k=8)),
        MmaDefault(256, lean=False, config=MmaConfig(b_r=64, b_c=16, warps=4, mma_k=8)),
        MmaDefault(256, lean=False, config=MmaConfig(b_r=32, b_c=16, warps=2, stages=1, mma_k=8)),
    ),
}
NUMPY_DEFAULT = NumpyConfig(b_r=256, b_c=256)
PACKING_PAYS = 0.9  # packed, a tile must be that much fuller


@dataclass(frozen=True)
class Choice:
    """The family and configuration that serve a call, and where they came from."""

    family: str
    config: TileConfig
    source: str
    ruled_out: Mapping[str, str] = field(default_factory=dict)


def default_config(spec: Spec, device: DeviceInfo) -> SimtConfig | MmaConfig:
    """The default family's default tiles: tensor cores wherever they serve `spec`."""
    return mma_default(spec, device) if why_not_mma(spec, device) is None else simt_default(spec, device)


def mma_default(spec: Spec, device: DeviceInfo) -> MmaConfig:
    """The default tiles of the tensor-core family, for query heads that are not packed."""
    for default in MMA_DEFAULTS[ITEM_BYTES[spec.dtype]]:
        if default.serves(spec) and default.config.why_illegal(spec, device) is None:
            return default.config
    raise ValueError(f"no tile configuration of the mma family is legal for {spec} on {device.name}")


def simt_default(spec: Spec, device: DeviceInfo) -> SimtConfig:
    """The default tiles of the CUDA-core family."""
    for default in SIMT_DEFAULTS[spec.accumulator]:
        if default.serves(spec) and default.config.why_illegal(spec, device) is None:
            return default.config
    raise ValueError(f"no tile configuration of the simt family is legal for {spec} on {device.name}")


def packed_if_it_pays(config: MmaConfig, problem: Problem) -> MmaConfig:
    """`config` with the query heads of a group packed into the rows of a tile, where that fills the tile better."""
    group = problem.h_q // max(problem.h_kv, 1)

    def rows_used(rows: int) -> float:
        return rows / (-(-rows // config.b_r) * config.b_r)

    pays = group > 1 and problem.n_q > 0 and rows_used(problem.n_q) < PACKING_PAYS * rows_used(problem.n_q * group)
    return replace(config, pack_gqa=True) if pays else config


def choose(problem: Problem, device: DeviceInfo | None, config: object = None) -> Choice:
    """Family and configuration for `problem` on `device` (None: the CPU).

    Raises
    ------
    TypeError, ValueError
        When `config` is given and cannot serve the call.
    """
    if device is None:
        if config is None:
            not_here = dict.fromkeys(("mma", "simt"), "the arrays are in the memory of the CPU")
            return Choice("numpy", NUMPY_DEFAULT, "default", not_here)
        if not isinstance(config, NumpyConfig):
            raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {config!r}")
        return Choice("numpy", config, "the caller", dict.fromkeys(("mma", "simt"), "config asks for numpy"))
    ruled_out = {"numpy": "the arrays are in the memory of a GPU"}
    if config is None:
        if reason := why_not_mma(problem.spec, device):
            return Choice("simt", simt_default(problem.spec, device), "default", {**ruled_out, "mma": reason})
        chosen = packed_if_it_pays(mma_default(problem.spec, device), problem)
        return Choice("mma", chosen, "default", {**ruled_out, "simt": "tensor cores serve the call"})
    if not isinstance(config, (SimtConfig, MmaConfig, WgmmaConfig)):
        raise TypeError(f"config must be a SimtConfig, MmaConfig or WgmmaConfig for arrays of a GPU, got {config!r}")
    reason = config.why_illegal(problem.spec, device)
    if reason is None and isinstance(config, WgmmaConfig):
        reason = why_no_tensor_map(problem)
    if reason is not None:
        raise ValueError(f"config is not legal here: {reason}; {config}")
    other = "simt" if config.family == "mma" else "mma"
    return Choice(config.family, config, "the caller", {**ruled_out, other: f"config asks for {config.family}"})
