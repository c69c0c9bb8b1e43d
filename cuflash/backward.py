"""One call of the backward pass: checked, planned, run. On a GPU all but the addresses is remembered by signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays import (
    CUPY,
    DTYPE_OF,
    KIND_OF_TYPE,
    CupyKind,
    NumpyKind,
    canonical_view,
    describe,
    import_cupy,
    is_strided,
    kind_of,
)
from cuflash.backward_config import BackwardConfig
from cuflash.backward_launch import OUTPUTS, BackwardLaunch, make_backward_launch, scratch, workspace
from cuflash.backward_plan import BackwardChoice, choose_backward
from cuflash.backward_problem import BackwardProblem, Gradient, read_backward_problem
from cuflash.backward_reference import tiled_gradients
from cuflash.call import Memo, Options, first_that_loads, make_options
from cuflash.config import NumpyConfig
from cuflash.device import DeviceInfo, device_info
from cuflash.problem import ITEM_BYTES
from cuflash.winner import key_of

MATRICES = ("dout", "q", "k", "v", "out")  # whose last axis must be contiguous
REQUIRED = (*MATRICES, "lse")
ALIGNMENT = 256  # of each part of the workspace, in bytes


class BackwardCall(NamedTuple):
    """The arguments that are arrays, in the order of the kernels' parameters."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dlse: Any = None
    mask: Any = None
    bias: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None

    def given(self) -> dict[str, Any]:
        """Those that are there, by name."""
        return {name: array for name, array in zip(self._fields, self, strict=True) if array is not None}

    def viewed_by(self, kind: NumpyKind) -> BackwardCall:
        """The NumPy or CuPy arrays to compute on."""
        views = {}
        for name, array in self.given().items():
            try:
                views[name] = kind.view(name, array)
            except RuntimeError as error:  # the array's own library: deleted, lazy, of a kind that has no memory
                raise ValueError(f"{name} cannot be read: {error}") from error
        return self._replace(**views)


def common_kind(call: BackwardCall) -> NumpyKind:
    """The one kind of all arrays of a call."""
    kind = kind_of("q", call.q)
    for name, array in zip(call._fields, call, strict=True):
        absent = array is None and name not in REQUIRED
        if not absent and (other := kind_of(name, array)) is not kind:
            raise TypeError(f"all arrays of a call must be of one kind, got q {kind} and {name} {other}")
    return kind


class Wanted(NamedTuple):
    """What is asked for: the gradient of the bias too, and the same bits on every run."""

    dbias: bool = False
    deterministic: bool = True


def make_wanted(return_dbias: bool, deterministic: Any) -> Wanted:
    """What is asked for."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {deterministic!r}")
    return Wanted(return_dbias, deterministic)


class Planned(NamedTuple):
    """A checked call and what serves it; `device` is None for the CPU."""

    problem: BackwardProblem
    choice: BackwardChoice
    device: DeviceInfo | None


def plan_backward(call: BackwardCall, options: Options, wanted: Wanted, config: Any) -> Planned:
    """Check a call on NumPy or CuPy arrays and choose its kernels.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what is allowed.
    """
    on_cpu = isinstance(call.q, np.ndarray)
    given = call.given()
    if not on_cpu:
        for name, array in given.items():
            if array.device != call.q.device:
                raise ValueError(
                    f"all arrays of a call must be on one device, got q on {call.q.device} and {name} on {array.device}"
                )
    operands = {name: describe(name, array) for name, array in given.items()}
    problem = read_backward_problem(
        **operands, **options._asdict(), return_dbias=wanted.dbias, deterministic=wanted.deterministic
    )
    device = None if on_cpu else device_info(call.q.device.id)
    return Planned(problem, choose_backward(problem, device, config), device)


def gradient_dtype(problem: BackwardProblem, name: str) -> str:
    """The dtype of dq, dk, dv or dbias."""
    return problem.spec.bias or problem.spec.dtype if name == "dbias" else problem.spec.dtype


def summed(full: Any, gradient: Gradient) -> Any:
    """A NumPy or CuPy gradient for all batch entries, as one of the input's own shape."""
    if gradient.summed_axes:
        wide = np.float32 if full.dtype.itemsize == 2 else np.float64
        full = full.astype(wide).sum(axis=gradient.summed_axes).astype(full.dtype)  # CuPy sums no bfloat16
    return full.reshape(gradient.shape)


def differentiate(arrays: Sequence[Any], options: Sequence[Any], wanted: Wanted, config: Any) -> tuple[Any, ...]:
    """(dq, dk, dv) or (dq, dk, dv, dbias), of the kind of the arguments.

    `arrays` and `options` are in the order of `BackwardCall` and `Options`.
    """
    kind = KIND_OF_TYPE.get(arrays[0].__class__) or kind_of("q", arrays[0])
    if isinstance(kind, CupyKind):  # that the others are of this kind is seen when they are read
        return differentiate_gpu(kind, arrays, options, wanted, config)
    call, given = BackwardCall(*arrays), make_options(*options)
    kind = common_kind(call)
    with kind.current(call.q):
        views = call.viewed_by(kind)
        if kind.on_gpu:
            computed = differentiate_gpu(CUPY, views, given, wanted, config)
        else:
            computed = differentiate_numpy(views, given, wanted, config)
        return tuple(kind.result(gradient, call.q) for gradient in computed)


# ---- the CPU ----


def differentiate_numpy(call: BackwardCall, options: Options, wanted: Wanted, config: Any) -> tuple[Any, ...]:
    """`differentiate` on NumPy arrays."""
    problem, choice, _ = plan_backward(call, options, wanted, config)
    if not isinstance(choice.config, NumpyConfig):
        raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {choice.config!r}")
    full = {
        name: np.empty(gradient.full_shape, DTYPE_OF[gradient_dtype(problem, name)])
        for name, gradient in problem.gradients.items()
    }
    if not problem.is_empty():
        shapes = problem.shapes()
        arrays = {
            name: canonical_view(array, shapes[name], problem.strides[name])
            for name, array in (*call.given().items(), *full.items())
            if name != "dbias"
        }
        if wanted.dbias:
            arrays["dbias"] = full["dbias"]
        tiled_gradients(problem, choice.config, arrays)
    return tuple(summed(full[name], gradient) for name, gradient in problem.gradients.items())


# ---- the GPU ----


@dataclass(frozen=True, slots=True)
class RememberedBackward:
    """What a call of one signature on arrays of a GPU needs, checked, compiled and loaded.

    `launch` is None where there is nothing to compute, and where arrays must be copied first. `makers` make the
    gradients, and `make_workspace` the memory that holds the arrays of the kernels at `offsets`, in bytes. `absent`
    are addresses of gradients that are not asked for.
    """

    device: int
    current_device: Callable[[], int]
    launch: BackwardLaunch | None
    copies: bool
    gradients: tuple[Gradient, ...]
    makers: tuple[Callable[[Any], Any], ...]
    make_workspace: Callable[[Any], tuple[Any, int]]
    offsets: tuple[int, ...]
    absent: tuple[int, ...]
    as_made: bool
    lse_dtype: str


def workspace_layout(problem: BackwardProblem, config: BackwardConfig) -> tuple[tuple[int, ...], int]:
    """Where the arrays that kernels hand to one another lie in their memory, and its size, in bytes."""
    offsets, size = [], 0
    for shape, dtype in (*workspace(problem).values(), *scratch(problem, config).values()):
        offsets.append(size)
        size += -(-math.prod(shape) * ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), size


def remember(
    kind: CupyKind, arrays: Sequence[Any], options: Options, wanted: Wanted, config: Any
) -> RememberedBackward:
    """Check, plan, compile and load a call on arrays of a GPU."""
    call = BackwardCall(*arrays)
    common_kind(call)
    with kind.current(call.q):
        views = call.viewed_by(kind)
        problem, choice, device = plan_backward(views, options, wanted, config)
        if device is None:
            raise TypeError(f"q must be an array of a GPU, got {type(call.q).__name__}")
        copies = problem.converts or any(is_strided(getattr(views, name)) for name in MATRICES)
        launch, chosen = None, choice
        if not problem.is_empty() and not copies:
            launch, chosen = launch_of(problem, choice, device)
        offsets, size = workspace_layout(problem, config_of(chosen)) if launch is not None else ((), 0)
        gradients = tuple(problem.gradients.values())
        return RememberedBackward(
            device=views.q.device.id,
            current_device=import_cupy().cuda.runtime.getDevice,
            launch=launch,
            copies=copies,
            gradients=gradients,
            makers=tuple(
                kind.maker(gradient.full_shape, gradient_dtype(problem, name), call.q)
                for name, gradient in problem.gradients.items()
            ),
            make_workspace=kind.memory_maker(size),
            offsets=offsets,
            absent=(0,) * (len(OUTPUTS) - len(gradients)),
            as_made=all(gradient.shape == gradient.full_shape for gradient in gradients),
            lse_dtype=problem.spec.lse_dtype,
        )


def config_of(choice: BackwardChoice) -> BackwardConfig:
    """The configuration of a choice for a GPU."""
    if isinstance(choice.config, NumpyConfig):
        raise TypeError(f"no GPU kernel for {choice.config!r}")
    return choice.config


def launch_of(
    problem: BackwardProblem, choice: BackwardChoice, device: DeviceInfo
) -> tuple[BackwardLaunch, BackwardChoice]:
    """Compile and load what was chosen, or what comes after it; and which that is."""
    return first_that_loads(
        choice,
        lambda chosen: (make_backward_launch(problem, chosen, device), chosen),
        lambda: choose_backward(problem, device),
        lambda: key_of(problem, device),
    )


CALLS = Memo(remember)


def copied(call: BackwardCall, lse_dtype: str) -> BackwardCall:
    """The call on CuPy arrays as the kernels take them."""
    cupy = import_cupy()
    matrices = {name: cupy.ascontiguousarray(x) for name in MATRICES if is_strided(x := getattr(call, name))}
    rows = {name: x.astype(lse_dtype, copy=False) for name in ("lse", "dlse") if (x := getattr(call, name)) is not None}
    return call._replace(**matrices, **rows)


def differentiate_gpu(
    kind: CupyKind, arrays: Sequence[Any], options: Sequence[Any], wanted: Wanted, config: Any
) -> tuple[Any, ...]:
    """`differentiate` on arrays of a GPU: a look-up, allocations and launches, once the signature is known."""
    known, addresses = CALLS.ready(kind, arrays, options, wanted, config)
    q = arrays[0]
    if known.copies or known.current_device() != known.device:
        with kind.current(q):
            if known.copies:
                views = copied(BackwardCall(*arrays).viewed_by(kind), known.lse_dtype)
                computed = differentiate_gpu(CUPY, views, options, wanted, config)
                return tuple(kind.result(gradient, q) for gradient in computed)
            return differentiate_gpu(kind, arrays, options, wanted, config)

    gradients = tuple([make(q) for make in known.makers])
    if known.launch is not None:
        _kept, start = known.make_workspace(q)  # until everything is launched
        addresses += map(kind.address, gradients)
        addresses += known.absent
        addresses += [start + offset for offset in known.offsets]
        known.launch(addresses, kind.stream(q))
    if known.as_made:
        return gradients
    return tuple(own_shape(kind, full, own, q) for full, own in zip(gradients, known.gradients, strict=True))


def own_shape(kind: CupyKind, full: Any, gradient: Gradient, like: Any) -> Any:
    """A gradient for all batch entries, an array of `kind`, as one of the input's own shape."""
    if not gradient.summed_axes:
        return full if gradient.shape == gradient.full_shape else full.reshape(gradient.shape)
    with kind.current(like):
        return kind.result(summed(kind.view("gradient", full), gradient), like)


def inspect_backward(call: BackwardCall, options: Options, wanted: Wanted, config: Any, load: bool) -> Planned:
    """Check and plan a call as `differentiate` does; with `load`, compile and load what it needs on a GPU."""
    kind = common_kind(call)
    with kind.current(call.q):
        views = call.viewed_by(kind)
        planned = plan_backward(views, options, wanted, config)
        if load and kind.on_gpu:
            known, _ = CALLS.ready(CUPY, views, options, wanted, config)
            if known.copies:
                CALLS.ready(CUPY, copied(views, known.lse_dtype), options, wanted, config)
            elif isinstance(kind, CupyKind):
                CALLS.ready(kind, call, options, wanted, config)
        return planned
