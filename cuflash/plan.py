"""From a Spec and a GPU to a kernel family and its tile configuration, and why the others were ruled out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cuflash import tuned
from cuflash.backward_config import BackwardConfig
from cuflash.config import (
    AMPERE,
    HOPPER,
    MmaConfig,
    NumpyConfig,
    SimtConfig,
    TileConfig,
    WgmmaConfig,
    mma_depths,
    why_not_mma,
    why_not_wgmma,
)
from cuflash.cost_model import cycles_per_score
from cuflash.device import DeviceInfo
from cuflash.problem import ITEM_BYTES, Problem, Spec
from cuflash.tensor_maps import why_no_tensor_map
from cuflash.winner import GpuConfig


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
    """A tile configuration of the tensor-core family, and the specs that it is a default for.

    `most_features` is how many of `features` it has registers for; from compute capability `below` on, the compiler
    needs more registers, and it is none. One that is `crowded` leaves so few that the compiler may keep addresses, 64
    bytes at most, in local memory, and read them once or twice a tile: it was timed to be faster all the same. It
    serves aligned rows, on GPUs of which a multiprocessor holds ENOUGH_WARPS of it.
    """

    max_head_dim: int
    most_features: int
    config: MmaConfig
    below: tuple[int, int] = (99, 0)
    features: tuple[str, ...] = ("mask", "bias", "softcap")
    crowded: bool = False

    def serves(self, spec: Spec, device: DeviceInfo) -> bool:
        """Whether `spec` is one of them."""
        used = {name for name in ("mask", "bias", "softcap") if getattr(spec, name)}
        if max(spec.d, spec.d_v) > self.max_head_dim or len(used) > self.most_features or used - set(self.features):
            return False
        if self.crowded and not (spec.aligned and self.config.resident_warps(spec, device) >= ENOUGH_WARPS):
            return False
        return device.compute_capability < self.below


BLACKWELL = (10, 0)
ENOUGH_WARPS = 8

# Tiles of the tensor-core family in order of preference, by bytes of an element. The default is the first legal one of
# which a multiprocessor holds ENOUGH_WARPS, so that one warp's softmax runs under another's products; else the first.
# On GPUs where none was timed, the cost model may prefer another that is not crowded, with one stage or two. A warp of
# 32 rows reads K and V half as often from shared memory as one with 16, and has no registers to spare. The last ones
# are for GPUs with less shared memory, and for sm_75. Order: benchmarks/forward_mma.py.
MMA_DEFAULTS = {
    2: (
        MmaDefault(64, 0, MmaConfig(b_r=128, b_c=64, warps=4, q_in_registers=True, swizzle=True)),
        MmaDefault(64, 2, MmaConfig(b_r=128, b_c=64, warps=4, swizzle=True)),
        MmaDefault(96, 0, MmaConfig(b_r=128, b_c=64, warps=4)),
        MmaDefault(96, 2, MmaConfig(b_r=128, b_c=32, warps=4)),
        MmaDefault(128, 0, MmaConfig(b_r=128, b_c=64, warps=4, stages=1, swizzle=True), crowded=True),
        MmaDefault(128, 0, MmaConfig(b_r=128, b_c=48, warps=4), below=BLACKWELL),
        MmaDefault(128, 1, MmaConfig(b_r=128, b_c=64, warps=4, swizzle=True), BLACKWELL, ("softcap",), crowded=True),
        MmaDefault(128, 1, MmaConfig(b_r=128, b_c=32, warps=4, swizzle=True), features=("bias",), crowded=True),
        MmaDefault(128, 1, MmaConfig(b_r=128, b_c=32, warps=4, swizzle=True), features=("mask", "softcap")),
        MmaDefault(128, 1, MmaConfig(b_r=128, b_c=32, warps=4, stages=1, swizzle=True)),
        MmaDefault(128, 3, MmaConfig(b_r=128, b_c=64, warps=8, swizzle=True)),
        MmaDefault(128, 3, MmaConfig(b_r=64, b_c=64, warps=4, stages=1, swizzle=True)),
        MmaDefault(256, 0, MmaConfig(b_r=64, b_c=64, warps=4, stages=1, swizzle=True)),
        MmaDefault(256, 2, MmaConfig(b_r=128, b_c=64, warps=8, stages=1, swizzle=True)),
        MmaDefault(256, 3, MmaConfig(b_r=64, b_c=32, warps=4, stages=1, swizzle=True)),
        MmaDefault(128, 3, MmaConfig(b_r=64, b_c=64, warps=4, stages=1, mma_k=8, async_copy=False)),
        MmaDefault(256, 3, MmaConfig(b_r=64, b_c=16, warps=4, stages=1, swizzle=True, mma_k=8, async_copy=False)),
    ),
    4: (
        MmaDefault(128, 3, MmaConfig(b_r=64, b_c=32, warps=4, stages=1, min_blocks=2, mma_k=8)),
        MmaDefault(256, 3, MmaConfig(b_r=64, b_c=16, warps=4, mma_k=8)),
        MmaDefault(256, 3, MmaConfig(b_r=32, b_c=16, warps=2, stages=1, mma_k=8)),
    ),
}


@dataclass(frozen=True)
class WgmmaDefault:
    """A tile configuration of the Hopper family, and the specs and numbers of queries and keys it is a default for.

    A `lean` one leaves no registers for a mask, a softcap or a bias, unless it is one of keys alone; without
    `bias_of_keys`, none for that either, and without `bounds`, none for a window's left bound and for lengths of
    queries. One of `windows` serves calls with a left bound alone. One that is `crowded` may need local memory as in
    MmaDefault.
    """

    max_head_dim: int
    lean: bool
    config: WgmmaConfig
    min_keys: int = 0
    max_queries: float = math.inf
    crowded: bool = False
    bounds: bool = True
    bias_of_keys: bool = True
    windows: bool = False

    def serves(self, spec: Spec, n_q: float, n_k: int) -> bool:
        """Whether `spec` with `n_q` queries and `n_k` keys is one of them."""
        is_bounded = spec.left or spec.q_lengths
        is_light = spec.bias is None or (spec.bias_of_keys and self.bias_of_keys and not is_bounded)
        has_features = spec.mask or spec.softcap or not is_light
        if (self.lean and has_features) or (is_bounded and not self.bounds) or (self.windows and not spec.left):
            return False
        return max(spec.d, spec.d_v) <= self.max_head_dim and n_q <= self.max_queries and n_k >= self.min_keys


# A window cuts tiles at both of its ends: narrow ones waste less, and three warpgroups hide what each costs.
WINDOW_TILES = WgmmaConfig(3, 64, stages=3, q_stages=2, ping_pong=False)
# Tiles of the Hopper family in order of preference; the first legal one is the default. A mask, a bias by
# rows or a softcap needs registers that narrower tiles leave. Order: benchmarks/forward_wgmma.py.
WGMMA_DEFAULTS = (
    WgmmaDefault(64, lean=True, config=WgmmaConfig(3, 128, stages=3), min_keys=2048, bias_of_keys=False),
    WgmmaDefault(64, True, WgmmaConfig(4, 64, stages=5, q_stages=2), crowded=True, bounds=False, bias_of_keys=False),
    WgmmaDefault(64, lean=True, config=WgmmaConfig(2, 128, stages=3, q_stages=2)),
    WgmmaDefault(128, lean=True, config=WgmmaConfig(1, 128, stages=2, ping_pong=False), max_queries=64),
    WgmmaDefault(128, lean=True, config=WINDOW_TILES, windows=True),
    WgmmaDefault(80, lean=True, config=WgmmaConfig(3, 96, stages=2), crowded=True, bias_of_keys=False),
    WgmmaDefault(128, lean=True, config=WgmmaConfig(2, 128, stages=2, q_stages=2)),
    WgmmaDefault(256, lean=True, config=WgmmaConfig(1, 64, stages=2, ping_pong=False), max_queries=64),
    WgmmaDefault(192, lean=True, config=WgmmaConfig(2, 96, stages=2)),
    WgmmaDefault(256, lean=True, config=WgmmaConfig(2, 64, stages=2)),
    WgmmaDefault(128, lean=False, config=WgmmaConfig(2, 64, stages=3, q_stages=2), crowded=True),
    WgmmaDefault(256, lean=False, config=WgmmaConfig(2, 32, stages=2)),
)
LARGE_HEAD_DIM = 192  # from which on, with a causal mask, warpgroups are faster if they do not take turns
NUMPY_DEFAULT = NumpyConfig(b_r=256, b_c=256)
GPU_FAMILIES = ("wgmma", "mma", "simt")  # in order of preference
MODEL_IS_SURE = 0.9  # the cost model is wrong by 10 % (root mean square) on the sweeps of an H200
NOT_NUMPY = {"numpy": "the arrays are in the memory of a GPU"}
PACKING_PAYS = 0.9  # packed, a tile must be that much fuller
MANY_KEYS = 2**17  # beyond it, what tensor cores cut off adds up to more than O may be wrong


@dataclass(frozen=True)
class Choice:
    """The family and configuration that serve a call, and where they came from.

    `stale` is why a tuned configuration may no longer be the fastest.
    """

    family: str
    config: TileConfig | BackwardConfig
    source: str
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    stale: str | None = None


def default_config(spec: Spec, device: DeviceInfo) -> SimtConfig | MmaConfig | WgmmaConfig:
    """The default family's default tiles: tensor cores wherever they serve `spec`."""
    if why_not_wgmma(spec, device) is None:
        return wgmma_default(spec, device)
    return mma_default(spec, device) if why_not_mma_by_default(spec, device) is None else simt_default(spec, device)


def wgmma_default(spec: Spec, device: DeviceInfo, n_q: float = math.inf, n_k: int = 0) -> WgmmaConfig:
    """The default tiles of the Hopper family for `n_q` queries or fewer and `n_k` keys or more."""
    for default in WGMMA_DEFAULTS:
        if default.serves(spec, n_q, n_k) and default.config.why_illegal(spec, device) is None:
            takes_turns = max(spec.d, spec.d_v) < LARGE_HEAD_DIM or not spec.right
            return replace(default.config, ping_pong=takes_turns and default.config.ping_pong)
    raise ValueError(f"no tile configuration of the wgmma family is legal for {spec} on {device.name}")


def why_not_wgmma_here(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the Hopper family does not serve `problem`, or not best; None where it does."""
    if reason := why_not_wgmma(problem.spec, device):
        return reason
    if reason := why_no_tensor_map(problem):
        return reason
    if problem.n_k > MANY_KEYS:
        return f"sums over {problem.n_k} keys in tensor cores lose too much"
    return None


def why_not_mma_by_default(spec: Spec, device: DeviceInfo) -> str | None:
    """Why the tensor-core family does not serve `spec`, or not best; None where it does."""
    crowded = spec.mask and spec.bias is not None and spec.softcap and max(spec.d, spec.d_v) > 128
    if crowded and (spec.dtype == "float32" or device.compute_capability < AMPERE):
        return f"{spec.dtype} of such head dims with mask, bias and softcap together would spill registers"
    return why_not_mma(spec, device)


def mma_default(spec: Spec, device: DeviceInfo) -> MmaConfig:
    """The default tiles of the tensor-core family, for query heads that are not packed."""
    deepest = mma_depths(spec, device)[0]
    rows = [default for default in MMA_DEFAULTS[ITEM_BYTES[spec.dtype]] if default.serves(spec, device)]
    serving = [default for default in rows if default.config.mma_k == deepest]
    legal = [default.config for default in serving if default.config.why_illegal(spec, device) is None]
    if not legal:
        raise ValueError(f"no tile configuration of the mma family is legal for {spec} on {device.name}")
    first = next((config for config in legal if config.resident_warps(spec, device) >= ENOUGH_WARPS), legal[0])
    if device.compute_capability == HOPPER:
        return first
    roomy = [default.config for default in serving if not default.crowded]
    staged = (replace(config, stages=stages) for config in roomy for stages in (1, 2))
    others = [config for config in staged if config.why_illegal(spec, device) is None]
    least = min(others, key=lambda config: cycles_per_score(config, spec, device))
    is_faster = cycles_per_score(least, spec, device) < MODEL_IS_SURE * cycles_per_score(first, spec, device)
    return least if is_faster else first


def simt_default(spec: Spec, device: DeviceInfo) -> SimtConfig:
    """The default tiles of the CUDA-core family."""
    for default in SIMT_DEFAULTS[spec.accumulator]:
        if default.serves(spec) and default.config.why_illegal(spec, device) is None:
            return default.config
    raise ValueError(f"no tile configuration of the simt family is legal for {spec} on {device.name}")


def adapted(config: MmaConfig, problem: Problem) -> MmaConfig:
    """`config` for the sizes of a problem.

    The query heads of a group are packed into the rows of a tile where that fills it better, and 16-bit products of a
    tile are summed on their own where there are very many keys.
    """
    group = problem.h_q // max(problem.h_kv, 1)

    def rows_used(rows: int) -> float:
        return rows / (-(-rows // config.b_r) * config.b_r)

    pays = group > 1 and problem.n_q > 0 and rows_used(problem.n_q) < PACKING_PAYS * rows_used(problem.n_q * group)
    return replace(config, pack_gqa=pays, tile_sums=problem.n_k > MANY_KEYS and ITEM_BYTES[problem.spec.dtype] == 2)


def default_choice(problem: Problem, device: DeviceInfo) -> Choice:
    """Family and configuration of a call on a GPU that is not tuned."""
    not_wgmma = why_not_wgmma_here(problem, device)
    if not_wgmma is None:
        others = dict.fromkeys(("mma", "simt"), "wgmma serves the call")
        config = wgmma_default(problem.spec, device, problem.n_q, problem.n_k)
        return Choice("wgmma", config, "default", {**NOT_NUMPY, **others})
    ruled_out = {**NOT_NUMPY, "wgmma": not_wgmma}
    if reason := why_not_mma_by_default(problem.spec, device):
        return Choice("simt", simt_default(problem.spec, device), "default", {**ruled_out, "mma": reason})
    chosen = adapted(mma_default(problem.spec, device), problem)
    return Choice("mma", chosen, "default", {**ruled_out, "simt": "tensor cores serve the call"})


def tuned_choice(problem: Problem, device: DeviceInfo) -> Choice | None:
    """Family and configuration of a call on a GPU that is tuned; None where it is not, which is logged.

    Raises
    ------
    UntunedError
        When it is not, and tuning is required.
    """
    if problem.is_empty(want_lse=True):
        return None
    found = tuned.find(problem, device, lambda config: why_not_tuned(config, problem, device))
    if found is None:
        return None
    config = found.winner.config
    if isinstance(config, MmaConfig):
        config = adapted(config, problem)
    others = dict.fromkeys(GPU_FAMILIES, f"the {found.source} configuration is of {config.family}")
    del others[config.family]
    return Choice(config.family, config, found.source, {**NOT_NUMPY, **others}, found.stale)


def why_not_tuned(config: GpuConfig, problem: Problem, device: DeviceInfo) -> str | None:
    """Why a configuration that is legal for the Spec of `problem` does not serve its sizes; None where it does."""
    return why_not_wgmma_here(problem, device) if isinstance(config, WgmmaConfig) else None


def choose(problem: Problem, device: DeviceInfo | None, config: object = None) -> Choice:
    """Family and configuration for `problem` on `device` (None: the CPU).

    Raises
    ------
    TypeError, ValueError
        When `config` is given and cannot serve the call.
    UntunedError
        When none is given, the call is not tuned, and tuning is required.
    """
    if device is None:
        if config is None:
            not_here = dict.fromkeys(GPU_FAMILIES, "the arrays are in the memory of the CPU")
            return Choice("numpy", NUMPY_DEFAULT, "default", not_here)
        if not isinstance(config, NumpyConfig):
            raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {config!r}")
        return Choice("numpy", config, "the caller", dict.fromkeys(GPU_FAMILIES, "config asks for numpy"))
    if config is None:
        return tuned_choice(problem, device) or default_choice(problem, device)
    if not isinstance(config, (SimtConfig, MmaConfig, WgmmaConfig)):
        raise TypeError(f"config must be a SimtConfig, MmaConfig or WgmmaConfig for arrays of a GPU, got {config!r}")
    reason = config.why_illegal(problem.spec, device)
    if reason is None and isinstance(config, WgmmaConfig):
        reason = why_no_tensor_map(problem)
    if reason is not None:
        raise ValueError(f"config is not legal here: {reason}; {config}")
    others = {family: f"config asks for {config.family}" for family in GPU_FAMILIES if family != config.family}
    return Choice(config.family, config, "the caller", {**NOT_NUMPY, **others})
