"""From a Spec and a GPU to a kernel family and its tile configuration, and why the others were ruled out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuflash.config import NumpyConfig, SimtConfig, TileConfig
from cuflash.device import DeviceInfo
from cuflash.problem import Problem, Spec


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


# Tiles of the CUDA-core family in order of preference, by accumulator: those for at most so large a head dim; the first legal one is
# the default. Lean ones hold so much in registers that a mask, a bias or unaligned rows would spill. Order: benchmarks/forward_simt.py.
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
NUMPY_DEFAULT = NumpyConfig(b_r=128, b_c=256)


@dataclass(frozen=True)
class Choice:
    """The family and configuration that serve a call, and where they came from."""

    family: str
    config: TileConfig
    source: str
    ruled_out: Mapping[str, str] = field(default_factory=dict)


def default_config(spec: Spec, device: DeviceInfo) -> SimtConfig:
    """The default tiles of the CUDA-core family."""
    for default in SIMT_DEFAULTS[spec.accumulator]:
        if default.serves(spec) and default.config.why_illegal(spec, device) is None:
            return default.config
    raise ValueError(f"no tile configuration of the simt family is legal for {spec} on {device.name}")


def choose(problem: Problem, device: DeviceInfo | None, config: object = None) -> Choice:
    """Family and configuration for `problem` on `device` (None: the CPU).

    Raises
    ------
    TypeError, ValueError
        When `config` is given and cannot serve the call.
    """
    if device is None:
        if config is None:
            return Choice("numpy", NUMPY_DEFAULT, "default", {"simt": "the arrays are in the memory of the CPU"})
        if not isinstance(config, NumpyConfig):
            raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {config!r}")
        return Choice("numpy", config, "the caller", {"simt": "config asks for numpy"})
    ruled_out = {"numpy": "the arrays are in the memory of a GPU"}
    if config is None:
        return Choice("simt", default_config(problem.spec, device), "default", ruled_out)
    if not isinstance(config, SimtConfig):
        raise TypeError(f"config must be a SimtConfig for arrays of a GPU, got {config!r}")
    if reason := config.why_illegal(problem.spec, device):
        raise ValueError(f"config is not legal here: {reason}; {config}")
    return Choice("simt", config, "the caller", ruled_out)
