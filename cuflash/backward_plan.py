"""From a Spec and a GPU to a kernel family of the backward pass and its tile configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cuflash import tuned
from cuflash.backward_config import (
    BackwardConfig,
    BackwardMmaConfig,
    BackwardSimtConfig,
    BackwardWgmmaConfig,
    why_not_backward_mma,
)
from cuflash.backward_problem import BackwardProblem
from cuflash.config import HOPPER, NumpyConfig, mma_depths, why_not_wgmma
from cuflash.device import DeviceInfo
from cuflash.plan import BLACKWELL, GPU_FAMILIES, NOT_NUMPY
from cuflash.problem import ITEM_BYTES, Spec
from cuflash.tensor_maps import why_no_map, why_no_tensor_map

BACKWARD_NUMPY_DEFAULT = NumpyConfig(b_r=256, b_c=256)
LEAST_KEYS_IN_ANY_ORDER = 2048  # below, to clear the sums of dQ takes longer than to wait for turns at them


@dataclass(frozen=True)
class BackwardChoice:
    """The family and configuration that serve a call, where they came from, and why not another family.

    `stale` is why a tuned configuration may no longer be the fastest.
    """

    family: str
    config: BackwardConfig | NumpyConfig
    source: str
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    stale: str | None = None


@dataclass(frozen=True)
class BackwardSimtDefault:
    """A tile configuration, and the specs that it is a default for."""

    max_head_dim: int
    lean: bool
    config: BackwardSimtConfig

    def serves(self, spec: Spec) -> bool:
        """Whether `spec` is one of them."""
        is_lean = spec.aligned and not (spec.mask or spec.bias or spec.softcap)
        return max(spec.d, spec.d_v) <= self.max_head_dim and (is_lean or not self.lean)


# Tiles of the CUDA-core family in order of preference, by accumulator; the first legal one is the default. Lean ones
# hold so much in registers that a mask, a bias, a softcap or unaligned rows would spill.
BACKWARD_SIMT_DEFAULTS = {
    "float32": (
        BackwardSimtDefault(128, lean=True, config=BackwardSimtConfig(64, 32, threads=128, lanes_per_row=16)),
        BackwardSimtDefault(128, lean=False, config=BackwardSimtConfig(32, 32, threads=128, lanes_per_row=16)),
        BackwardSimtDefault(256, lean=False, config=BackwardSimtConfig(32, 32, threads=256, lanes_per_row=16)),
        BackwardSimtDefault(256, lean=False, config=BackwardSimtConfig(16, 16, 128, 16, both_tiles=False)),
    ),
    "float64": (
        BackwardSimtDefault(128, lean=False, config=BackwardSimtConfig(32, 32, threads=256, lanes_per_row=16)),
        BackwardSimtDefault(256, lean=False, config=BackwardSimtConfig(16, 16, threads=256, lanes_per_row=16)),
        BackwardSimtDefault(256, lean=False, config=BackwardSimtConfig(16, 16, 256, 16, both_tiles=False)),
        BackwardSimtDefault(256, lean=False, config=BackwardSimtConfig(8, 8, 64, 8, both_tiles=False)),
    ),
}


def backward_simt_default(spec: Spec, device: DeviceInfo) -> BackwardSimtConfig:
    """The default tiles of the CUDA-core family, and of the kernel of the bias gradient beside any family."""
    for default in BACKWARD_SIMT_DEFAULTS[spec.accumulator]:
        if default.serves(spec) and default.config.why_illegal(spec, device) is None:
            return default.config
    raise ValueError(f"no tile configuration of the simt family is legal for {spec} on {device.name}")


@dataclass(frozen=True)
class BackwardMmaDefault:
    """A tile configuration of the tensor-core family, and the specs that it is a default for.

    `most_features` is how many of mask, bias and softcap it has registers for; a bias counts twice. From compute
    capability `below` on, the compiler needs more of them, and it is none.
    """

    max_head_dim: int
    most_features: int
    config: BackwardMmaConfig
    below: tuple[int, int] = (99, 0)

    def serves(self, spec: Spec, device: DeviceInfo) -> bool:
        """Whether `spec` is one of them."""
        if device.compute_capability >= self.below:
            return False
        features = spec.mask + spec.softcap + 2 * (spec.bias is not None)
        return max(spec.d, spec.d_v) <= self.max_head_dim and features <= self.most_features


# Tiles of the tensor-core family in order of preference, by bytes of an element; the first legal one is the default.
# The last ones are for GPUs with less shared memory, and for sm_75. Order: benchmarks/backward_mma.py.
BACKWARD_MMA_DEFAULTS = {
    2: (
        BackwardMmaDefault(64, 1, BackwardMmaConfig(b_r=128, b_c=128, warps=8, key_warps=4)),
        BackwardMmaDefault(64, 4, BackwardMmaConfig(b_r=64, b_c=128, warps=8, key_warps=4)),
        BackwardMmaDefault(128, 1, BackwardMmaConfig(64, 128, warps=8, key_warps=4), below=BLACKWELL),
        BackwardMmaDefault(128, 1, BackwardMmaConfig(64, 128, warps=8, key_warps=4, stages=1), below=BLACKWELL),
        BackwardMmaDefault(128, 4, BackwardMmaConfig(b_r=64, b_c=64, warps=8, key_warps=2)),
        BackwardMmaDefault(256, 3, BackwardMmaConfig(b_r=64, b_c=64, warps=8, key_warps=2)),
        BackwardMmaDefault(256, 3, BackwardMmaConfig(b_r=64, b_c=64, warps=8, key_warps=2, stages=1)),
        BackwardMmaDefault(256, 4, BackwardMmaConfig(b_r=32, b_c=64, warps=8, key_warps=4)),
        BackwardMmaDefault(256, 4, BackwardMmaConfig(b_r=32, b_c=64, warps=8, key_warps=4, stages=1)),
        BackwardMmaDefault(256, 4, BackwardMmaConfig(b_r=32, b_c=32, warps=4, key_warps=2, stages=1)),
        BackwardMmaDefault(128, 4, BackwardMmaConfig(64, 64, 8, 2, stages=1, mma_k=8, async_copy=False)),
        BackwardMmaDefault(128, 4, BackwardMmaConfig(32, 32, 4, 2, stages=1, mma_k=8, async_copy=False)),
    ),
    4: (
        BackwardMmaDefault(64, 4, BackwardMmaConfig(b_r=64, b_c=64, warps=8, key_warps=2, mma_k=8)),
        BackwardMmaDefault(128, 4, BackwardMmaConfig(64, 64, 8, 2, stages=1, mma_k=8), below=BLACKWELL),
        BackwardMmaDefault(128, 4, BackwardMmaConfig(b_r=32, b_c=64, warps=8, key_warps=4, stages=1, mma_k=8)),
        BackwardMmaDefault(256, 4, BackwardMmaConfig(b_r=64, b_c=32, warps=8, key_warps=2, stages=1, mma_k=8)),
        BackwardMmaDefault(256, 4, BackwardMmaConfig(b_r=32, b_c=32, warps=4, key_warps=2, stages=1, mma_k=8)),
    ),
}


def backward_mma_default(spec: Spec, device: DeviceInfo) -> BackwardMmaConfig:
    """The default tiles of the tensor-core family."""
    deepest = mma_depths(spec, device)[0]
    for default in BACKWARD_MMA_DEFAULTS[ITEM_BYTES[spec.dtype]]:
        config = replace(default.config, vector_adds=device.compute_capability >= HOPPER)
        if default.serves(spec, device) and config.mma_k == deepest and config.why_illegal(spec, device) is None:
            return config
    raise ValueError(f"no tile configuration of the mma family is legal for {spec} on {device.name}")


def why_not_backward_mma_by_default(spec: Spec, device: DeviceInfo) -> str | None:
    """Why the tensor-core family does not serve `spec`, or has no tiles for it; None where it does."""
    if reason := why_not_backward_mma(spec, device):
        return reason
    try:
        backward_mma_default(spec, device)
    except ValueError as error:
        return str(error)
    return None


# Tiles of the Hopper family in order of preference, each for at most so large a head dim; the first legal one is the
# default: the more there is to remember of a pair, the fewer query rows. Order: benchmarks/backward_wgmma.py.
BACKWARD_WGMMA_DEFAULTS = (
    (64, BackwardWgmmaConfig(b_r=128, k_stages=2)),
    (64, BackwardWgmmaConfig(b_r=64, k_stages=2)),
    (128, BackwardWgmmaConfig(b_r=64, dq_stages=3)),
    (128, BackwardWgmmaConfig(b_r=64, b_c=64, k_stages=2)),
    (256, BackwardWgmmaConfig(b_r=64, b_c=64)),
)


def backward_wgmma_default(spec: Spec, device: DeviceInfo) -> BackwardWgmmaConfig:
    """The default tiles of the Hopper family."""
    for max_head_dim, config in BACKWARD_WGMMA_DEFAULTS:
        if max(spec.d, spec.d_v) <= max_head_dim and config.why_illegal(spec, device) is None:
            return config
    raise ValueError(f"no tile configuration of the wgmma family is legal for {spec} on {device.name}")


def why_not_backward_wgmma_by_default(spec: Spec, device: DeviceInfo) -> str | None:
    """Why the Hopper family does not serve `spec`, or has no tiles for it; None where it does."""
    if reason := why_not_wgmma(spec, device):
        return reason
    try:
        backward_wgmma_default(spec, device)
    except ValueError as error:
        return str(error)
    return None


def why_no_backward_maps(problem: BackwardProblem) -> str | None:
    """Why q, k, v or dO cannot be described to TMA; None where they can."""
    if reason := why_no_tensor_map(problem.forward, writes_out=False):
        return reason
    if problem.forward.n_q == 0:
        return "TMA does not read empty arrays"
    strides = problem.strides["dout"][: len(problem.batch) + 2]
    return why_no_map("dout", problem.spec.dtype, problem.forward.n_q, strides)


def default_backward_choice(problem: BackwardProblem, device: DeviceInfo) -> BackwardChoice:
    """Family and configuration of a call on a GPU that is not tuned."""
    not_wgmma = why_not_backward_wgmma_by_default(problem.spec, device) or why_no_backward_maps(problem)
    if not_wgmma is None:
        others = {**NOT_NUMPY, **dict.fromkeys(("mma", "simt"), "wgmma serves the call")}
        return BackwardChoice("wgmma", backward_wgmma_default(problem.spec, device), "default", others)
    ruled_out = {**NOT_NUMPY, "wgmma": not_wgmma}
    not_mma = why_not_backward_mma_by_default(problem.spec, device)
    if not_mma is None:
        others = {**ruled_out, "simt": "tensor cores serve the call"}
        return BackwardChoice("mma", backward_mma_default(problem.spec, device), "default", others)
    return BackwardChoice("simt", backward_simt_default(problem.spec, device), "default", {**ruled_out, "mma": not_mma})


def tuned_backward_choice(problem: BackwardProblem, device: DeviceInfo) -> BackwardChoice | None:
    """Family and configuration of a call on a GPU that is tuned; None where it is not, which is logged.

    Raises
    ------
    UntunedError
        When it is not, and tuning is required.
    """
    if problem.is_empty():
        return None
    found = tuned.find(problem, device, lambda config: why_not_here(config, problem))
    if found is None or not isinstance(config := found.winner.config, BackwardConfig):
        return None
    others = dict.fromkeys(GPU_FAMILIES, f"the {found.source} configuration is of {config.family}")
    del others[config.family]
    return BackwardChoice(config.family, config, found.source, {**NOT_NUMPY, **others}, found.stale)


def is_deterministic(problem: BackwardProblem, config: BackwardConfig | NumpyConfig) -> bool:
    """Whether gradients have the same bits on every run: where that is asked for, and where it costs nothing."""
    takes_turns = isinstance(config, BackwardWgmmaConfig) and not config.splits_products
    return problem.deterministic or not takes_turns or problem.forward.n_k < LEAST_KEYS_IN_ANY_ORDER


def why_not_here(config: object, problem: BackwardProblem) -> str | None:
    """Why a configuration that is legal for the Spec of `problem` does not serve its arrays; None where it does."""
    return why_no_backward_maps(problem) if isinstance(config, BackwardWgmmaConfig) else None


def choose_backward(problem: BackwardProblem, device: DeviceInfo | None, config: object = None) -> BackwardChoice:
    """Family and configuration for `problem` on `device` (None: the CPU).

    Raises
    ------
    TypeError, ValueError
        When `config` is given and cannot serve the call.
    UntunedError
        When none is given, the call is not tuned, and tuning is required.
    """
    if device is None:
        not_here = dict.fromkeys(GPU_FAMILIES, "the arrays are in the memory of the CPU")
        if config is None:
            return BackwardChoice("numpy", BACKWARD_NUMPY_DEFAULT, "default", not_here)
        if not isinstance(config, NumpyConfig):
            raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {config!r}")
        return BackwardChoice("numpy", config, "the caller", not_here)
    if config is None:
        return tuned_backward_choice(problem, device) or default_backward_choice(problem, device)
    if not isinstance(config, BackwardConfig):
        names = "a BackwardSimtConfig, BackwardMmaConfig or BackwardWgmmaConfig"
        raise TypeError(f"config must be {names} for arrays of a GPU, got {config!r}")
    if reason := config.why_illegal(problem.spec, device) or why_not_here(config, problem):
        raise ValueError(f"config is not legal here: {reason}; {config}")
    return BackwardChoice(config.family, config, "the caller", NOT_NUMPY)
