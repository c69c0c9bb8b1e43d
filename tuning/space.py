"""The search space: the axes of each kernel family, and the points of them that are legal for a problem on a GPU.

`AXES` names what is searched and which values are tried; every other field of a configuration stays as the default has
it. What is legal is asked of the configuration itself, so nothing illegal is ever compiled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cuflash import backward_launch, backward_plan, launch, plan
from cuflash.backward_config import BackwardWgmmaConfig
from cuflash.backward_problem import BackwardProblem
from cuflash.config import NumpyConfig, WgmmaConfig
from cuflash.problem import Problem
from cuflash.winner import BACKWARD, FORWARD, GpuConfig

if TYPE_CHECKING:
    from cuflash.device import DeviceInfo
    from cuflash.problem import Spec

Axes = Mapping[str, tuple[int | bool, ...]]  # the values of each axis, by name

AXES: Mapping[str, Axes] = {
    "forward_simt": {
        "b_r": (16, 32, 64, 128),
        "b_c": (16, 32, 64, 128),
        "threads": (64, 128, 256),
        "lanes_per_row": (4, 8, 16),
    },
    "forward_mma": {
        "b_r": (32, 64, 128, 192, 256),
        "b_c": (16, 32, 48, 64, 96, 128),
        "warps": (2, 4, 8),
        "stages": (1, 2, 3),
        "q_in_registers": (False, True),
        "swizzle": (False, True),
        "min_blocks": (1, 2, 3),
    },
    "forward_wgmma": {
        "consumers": (1, 2, 3, 4),
        "b_c": (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
        "stages": (1, 2, 3, 4),
        "q_stages": (1, 2),
        "ping_pong": (False, True),
        "section_mb": (16, 32, 64),
    },
    "backward_simt": {
        "b_r": (8, 16, 32, 64),
        "b_c": (8, 16, 32, 64),
        "threads": (64, 128, 256),
        "lanes_per_row": (4, 8, 16),
        "both_tiles": (False, True),
    },
    "backward_mma": {
        "b_r": (32, 64, 128),
        "b_c": (32, 64, 96, 128, 192),
        "warps": (4, 8, 16),
        "key_warps": (1, 2, 4, 8),
        "stages": (1, 2),
        "swizzle": (False, True),
        "min_blocks": (1, 2),
    },
    "backward_wgmma": {
        "b_r": (64, 128),
        "b_c": (64, 128),
        "k_stages": (1, 2),
        "dq_stages": (2, 3, 4),
        "waves": (1, 2, 3, 4),
    },
}

Point = tuple[int | bool, ...]  # a value of each axis, in the order of `Space.axes`


class Space:
    """The points that may be chosen for one problem on one GPU; `Space.legal` finds them.

    Attributes
    ----------
    problem : Problem or BackwardProblem
    device : DeviceInfo
    default : GpuConfig
        What an untuned call gets; its point is the first.
    axes : dict of str to tuple
        The values of each axis.
    points : tuple of Point

    Examples
    --------
    >>> from cuflash.device import known_device
    >>> from cuflash.tuning import Workload
    >>> from cuflash.tuning.space import Space
    >>> workload = Workload("float32", 1, (8, 8), (512, 512), (64, 64))
    >>> space = Space.legal(workload.problem(), known_device("sm_90"), "simt")
    >>> space.config(space.points[0]) == space.default
    True
    """

    def __init__(
        self,
        problem: Problem | BackwardProblem,
        device: DeviceInfo,
        default: GpuConfig,
        axes: Axes,
        points: Iterable[Point],
    ) -> None:
        self.problem = problem
        self.device = device
        self.default = default
        self.family = default.family
        self.operation = operation_of(problem)
        self.kernel = f"{self.operation}_{self.family}"
        self.axes = dict(axes)
        self.points = tuple(points)
        self._costs: dict[Point, tuple[int, ...]] = {}

    @staticmethod
    def legal(problem: Problem | BackwardProblem, device: DeviceInfo, family: str | None = None) -> Space:
        """Every legal point for `problem` on `device`.

        `family` is by default that of an untuned call. The default's own values are added to the axes. Of points that
        are the same kernel launched in the same way, the space has one.
        """
        default = default_of(problem, device, family)
        axes: dict[str, tuple[int | bool, ...]] = {
            name: values if (own := getattr(default, name)) in values else tuple(sorted((*values, own)))
            for name, values in AXES[f"{operation_of(problem)}_{default.family}"].items()
        }
        return Space(problem, device, default, axes, _legal_points(problem, device, default, axes))

    def config(self, point: Point) -> GpuConfig:
        """The configuration at `point`."""
        chosen: dict[str, Any] = dict(zip(self.axes, point, strict=True))
        return replace(self.default, **chosen)

    def point(self, config: object) -> Point | None:
        """Where `config` lies; None where it is no point of this space."""
        if not isinstance(config, type(self.default)):
            return None
        point = tuple(getattr(config, name) for name in self.axes)
        return point if point in self.known and self.config(point) == config else None

    def cost(self, point: Point) -> tuple[int, ...]:
        """What a tie is decided by: the default first, then the least shared memory, then the axes in order."""
        if point in self._costs:
            return self._costs[point]
        config = self.config(point)
        order = tuple(self.axes[name].index(value) for name, value in zip(self.axes, point, strict=True))
        self._costs[point] = (config != self.default, config.shared_bytes(self.problem.spec), *order)
        return self._costs[point]

    def neighbours(self, point: Point) -> list[Point]:
        """The legal points that differ from `point` in one axis, the nearest values first."""
        found = []
        for axis, values in enumerate(self.axes.values()):
            here = values.index(point[axis])
            for index, value in enumerate(values):
                other = (*point[:axis], value, *point[axis + 1 :])
                if index != here and other in self.known:
                    found.append((abs(index - here), axis, index, other))
        return [other for *_, other in sorted(found)]

    def distance(self, a: Point, b: Point) -> tuple[int, int]:
        """In how many axes two points differ, and by how many steps of their axes."""
        steps = [abs(values.index(x) - values.index(y)) for values, x, y in zip(self.axes.values(), a, b, strict=True)]
        return sum(step > 0 for step in steps), sum(steps)

    @cached_property
    def known(self) -> frozenset[Point]:
        """The legal points, to look them up."""
        return frozenset(self.points)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve digits that change when an axis, the default or what is legal does."""
        described = json.dumps([self.kernel, repr(self.default), self.axes, self.points])
        return hashlib.sha256(described.encode()).hexdigest()[:12]


def _legal_points(
    problem: Problem | BackwardProblem, device: DeviceInfo, default: GpuConfig, axes: Axes
) -> Iterator[Point]:
    own = [getattr(default, name) for name in axes]
    # The default's value first: it stays where an axis changes nothing, as section_mb without a causal mask.
    ordered = [
        (first, *(value for value in axes[name] if value != first)) for name, first in zip(axes, own, strict=True)
    ]
    seen = set()
    for point in itertools.product(*ordered):
        config = replace(default, **dict(zip(axes, point, strict=True)))
        if config.why_illegal(problem.spec, device) is not None:
            continue
        effect = (*config.constants().items(), section_of(problem, config, device))
        if effect not in seen:
            seen.add(effect)
            yield point


def operation_of(problem: Problem | BackwardProblem) -> str:
    """As `cuflash.winner` names it."""
    return FORWARD if isinstance(problem, Problem) else BACKWARD


def section_of(problem: Problem | BackwardProblem, config: GpuConfig, device: DeviceInfo) -> int:
    """The one thing of a configuration that is not compiled in: how the Hopper families order their work."""
    if isinstance(problem, BackwardProblem) and isinstance(config, BackwardWgmmaConfig):
        return backward_launch.wgmma_section(problem, config, device)
    if isinstance(problem, Problem) and isinstance(config, WgmmaConfig):
        return launch.wgmma_section(problem, config)
    return 0


def default_of(problem: Problem | BackwardProblem, device: DeviceInfo, family: str | None = None) -> GpuConfig:
    """What an untuned call gets, or the default of `family`."""
    if isinstance(problem, BackwardProblem):
        return backward_default_of(problem, device, family)
    config = (choice := plan.default_choice(problem, device)).config
    if family not in (None, choice.family):
        if family == "mma":
            config = plan.adapted(plan.mma_default(problem.spec, device), problem)
        elif family == "simt":
            config = plan.simt_default(problem.spec, device)
        else:
            config = plan.wgmma_default(problem.spec, device, problem.n_q, problem.n_k)
    if isinstance(config, NumpyConfig):
        raise TypeError(f"no kernel of a GPU serves {problem}")
    return config


def backward_default_of(problem: BackwardProblem, device: DeviceInfo, family: str | None) -> GpuConfig:
    """As `default_of`, of the gradients."""
    choice = backward_plan.default_backward_choice(problem, device)
    config: GpuConfig | NumpyConfig = choice.config
    if family not in (None, choice.family):
        makers: dict[str | None, Callable[[Spec, DeviceInfo], GpuConfig]] = {
            "mma": backward_plan.backward_mma_default,
            "simt": backward_plan.backward_simt_default,
            "wgmma": backward_plan.backward_wgmma_default,
        }
        config = makers[family](problem.spec, device)
    if isinstance(config, NumpyConfig):
        raise TypeError(f"no kernel of a GPU serves {problem}")
    return config
