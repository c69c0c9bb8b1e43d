"""One call: checked, planned, run. On a GPU everything but the addresses is remembered by signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cuflash import plan, reference, tuned
from cuflash.arrays import (
    CUPY,
    DTYPE_OF,
    KIND_OF_TYPE,
    CupyKind,
    Memory,
    NumpyKind,
    byte_bounds,
    canonical_view,
    describe,
    import_cupy,
    is_strided,
    kind_of,
    memory_of,
    overlap,
)
from cuflash.config import NumpyConfig
from cuflash.device import DeviceInfo, device_info
from cuflash.launch import ADDRESSES, Launch, WgmmaLaunch, make_launch
from cuflash.problem import VECTOR_BYTES, Operand, Problem, contiguous_strides, read_problem
from cuflash.winner import Key, key_of

MAX_REMEMBERED_CALLS = 4096

Kept = TypeVar("Kept")
Made = TypeVar("Made")
Chosen = TypeVar("Chosen", bound="Choice")


class Choice(Protocol):
    """A choice of the planner."""

    @property
    def source(self) -> str:
        """Where its configuration came from."""


class Options(NamedTuple):
    """The arguments that are not arrays."""

    scale: Any = None
    causal: Any = False
    window: Any = None
    softcap: Any = None
    layout: Any = "bhnd"


def make_options(scale: Any, causal: Any, window: Any, softcap: Any, layout: Any) -> Options:
    """The options, as far as possible as keys of a dictionary."""
    return Options(scale, causal, tuple(window) if isinstance(window, list) else window, softcap, layout)


class Call(NamedTuple):
    """The arguments that are arrays."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    mask: Any = None
    bias: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None

    def given(self) -> dict[str, Any]:
        """Those that are there, by name."""
        return {name: array for name, array in zip(self._fields, self, strict=True) if array is not None}

    def viewed_by(self, kind: NumpyKind) -> Call:
        """The NumPy or CuPy arrays to compute on."""
        views = {}
        for name, array in self.given().items():
            try:
                views[name] = kind.view(name, array)
            except RuntimeError as error:  # the array's own library: deleted, lazy, of a kind that has no memory
                raise ValueError(f"{name} cannot be read: {error}") from error
        return self._replace(**views)


class Planned(NamedTuple):
    """A checked call and what serves it; `device` is None for the CPU."""

    problem: Problem
    choice: plan.Choice
    device: DeviceInfo | None


def common_kind(call: Call) -> NumpyKind:
    """The one kind of all arrays of a call."""
    kind = kind_of("q", call.q)
    for name, array in zip(call._fields[1:], call[1:], strict=True):
        if array is not None and (other := kind_of(name, array)) is not kind:
            raise TypeError(f"all arrays of a call must be of one kind, got q {kind} and {name} {other}")
    if call.out is not None and not kind.writable:
        raise TypeError(f"out cannot be a {kind} array, which cannot be written to; use the returned array")
    return kind


def plan_call(call: Call, options: Options, config: Any) -> Planned:
    """Check a call and choose its kernel.

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
    if not on_cpu:
        operands |= {name: as_copied(operands[name]) for name in ("q", "k", "v") if is_strided(given[name])}
    problem = read_problem(**operands, **options._asdict())
    if not on_cpu and call.out is not None and is_strided(call.out):
        operands["out"] = as_copied(operands["out"])  # now that its own strides are checked
        problem = read_problem(**operands, **options._asdict())
    if on_cpu and call.out is not None and not call.out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array")
    refuse_overlap(call, memory_of)
    device = None if on_cpu else device_info(call.q.device.id)
    return Planned(problem, plan.choose(problem, device, config), device)


def as_copied(operand: Operand) -> Operand:
    """A strided array as the contiguous one that the kernel is given in its place."""
    return operand._replace(strides=contiguous_strides(operand.shape), alignment=VECTOR_BYTES)


def refuse_overlap(call: Call, memory: Callable[[Any], Memory]) -> None:
    """`out` is written while the inputs are still read."""
    if call.out is None:
        return
    written = memory(call.out)
    for name, array in call._replace(out=None).given().items():
        if overlap(written, memory(array)):
            raise ValueError(f"out must not overlap an input, got an array that shares memory with {name}")


def attend(arrays: Sequence[Any], options: Sequence[Any], return_lse: bool, config: Any) -> Any:
    """`attention`; `arrays` and `options` are in the order of `Call` and `Options`."""
    kind = KIND_OF_TYPE.get(arrays[0].__class__) or kind_of("q", arrays[0])
    if isinstance(kind, CupyKind):  # that the others are of this kind is seen when they are read
        return attend_gpu(kind, arrays, options, return_lse, config)
    call = Call(*arrays)
    return attend_foreign(common_kind(call), call, make_options(*options), return_lse, config)


# ---- the CPU ----


def attend_numpy(call: Call, options: Options, return_lse: bool, config: Any) -> Any:
    """`attention` on NumPy arrays."""
    problem, choice, _ = plan_call(call, options, config)
    if not isinstance(choice.config, NumpyConfig):
        raise TypeError(f"config must be a NumpyConfig for arrays of the CPU, got {choice.config!r}")
    out = np.empty(problem.out_shape, DTYPE_OF[problem.spec.dtype]) if call.out is None else call.out
    lse = np.empty(problem.lse_shape, DTYPE_OF[problem.spec.lse_dtype]) if return_lse else None
    if not problem.is_empty(return_lse):
        shapes = problem.shapes()
        views = {
            name: canonical_view(array, shapes[name], problem.strides[name])
            for name, array in call._replace(out=out).given().items()
        }
        if lse is not None:
            views["lse"] = lse.reshape(shapes["q"][:-1])
        names = ("mask", "bias", "q_lengths", "kv_lengths", "out", "lse")
        operands: list[Any] = [views.get(name) for name in ("q", "k", "v", *names)]
        reference.tiled_attention(problem, choice.config, *operands)
    return (out, lse) if return_lse else out


# ---- the GPU ----


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a call of one signature on arrays of a GPU needs, checked, compiled and loaded.

    `launch` is None where there is nothing to compute, and where an array is `strided`, not contiguous along its last
    axis. `new_out` and `new_lse` make arrays beside q. `inputs` are the arrays that are read: their place in a `Call`,
    and the first byte and the one after the last, relative to the address; `written` are those of `out`.
    """

    device: int
    current_device: Callable[[], int]
    launch: Launch | WgmmaLaunch | None
    strided: bool
    new_out: Callable[[Any], Any]
    new_lse: Callable[[Any], Any]
    inputs: tuple[tuple[int, int, int], ...]
    written: tuple[int, int]

    def may_overlap(self, addresses: Sequence[int]) -> bool:
        """Whether `out` may share memory with another array, by where they begin and end."""
        first, last = self.written
        low, high = addresses[OUT] + first, addresses[OUT] + last
        for place, first, last in self.inputs:
            if addresses[place] + first < high and low < addresses[place] + last:
                return True
        return False


OUT = Call._fields.index("out")
LSE = ADDRESSES.index("lse")  # which has its place among the addresses of the kernel, and is no argument


class Memo(Generic[Kept]):
    """What calls on arrays of a GPU need, made once for each signature: for all that a call is but the addresses.

    Parameters
    ----------
    make : callable
        Checks a call and makes what it needs, from its kind, arrays, options, what it is to return and a configuration.
    """

    def __init__(self, make: Callable[[CupyKind, Sequence[Any], Options, Any, Any], Kept]) -> None:
        self.known: dict[Any, Kept] = {}
        self._make = make
        tuned.when_changed.append(self.known.clear)

    def ready(
        self, kind: CupyKind, arrays: Sequence[Any], options: Sequence[Any], wanted: Any, config: Any
    ) -> tuple[Kept, list[int]]:
        """What a call needs, remembered or made now, and the addresses of its arrays.

        `options` are in the order of `Options`. Where the call is remembered it was checked then, and neither that nor
        another tuple of its arguments is made.
        """
        scale, causal, window, softcap, layout = options
        try:
            key, addresses = kind.read(arrays)
            types = scale.__class__, causal.__class__, softcap.__class__  # as keys, 1, 1.0 and True are equal
            signature = (*key, *types, scale, causal, softcap, layout, wanted, config)
            if window is not None:
                signature += (window.__class__, *window, *map(type, window))
            known = self.known.get(signature)
        except (AttributeError, RuntimeError, TypeError):  # arrays of several kinds, or unhashable: checks will tell
            return self._make(kind, arrays, make_options(*options), wanted, config), kind.read(arrays)[1]
        if known is None:
            configurations = tuned.version()
            known = self._make(kind, arrays, make_options(*options), wanted, config)
            if len(self.known) >= MAX_REMEMBERED_CALLS:
                self.known.clear()
            self.known[signature] = known
            if tuned.version() != configurations:  # another thread has tuned or loaded some meanwhile
                self.known.pop(signature, None)
        return known, addresses


def remember(kind: CupyKind, given: Sequence[Any], options: Options, return_lse: bool, config: Any) -> Remembered:
    """Check, plan, compile and load a call on arrays of a GPU."""
    call = Call(*given)
    common_kind(call)
    with kind.current(call.q):
        views = call.viewed_by(kind)
        problem, choice, device = plan_call(views, options, config)
        if device is None:
            raise TypeError(f"q must be an array of a GPU, got {type(call.q).__name__}")
        strided = any(is_strided(array) for array in (views.q, views.k, views.v, views.out) if array is not None)
        launch = None if strided or problem.is_empty(return_lse) else launch_of(problem, choice, device)
        ends = {place: byte_bounds(memory_of(x)._replace(address=0)) for place, x in enumerate(views) if x is not None}
        written = ends.pop(OUT, (0, 0))
        return Remembered(
            device=views.q.device.id,
            current_device=import_cupy().cuda.runtime.getDevice,
            launch=launch,
            strided=strided,
            new_out=kind.maker(problem.out_shape, problem.spec.dtype, call.q),
            new_lse=kind.maker(problem.lse_shape, problem.spec.lse_dtype, call.q),
            inputs=tuple((place, *end) for place, end in ends.items()),
            written=written,
        )


CALLS = Memo(remember)


def first_that_loads(
    choice: Chosen, make: Callable[[Chosen], Made], choose: Callable[[], Chosen], key: Callable[[], Key]
) -> Made:
    """What `make` makes of `choice`; where a tuned configuration cannot be loaded, of what comes after it."""
    while True:
        try:
            return make(choice)
        except RuntimeError as error:  # of NVRTC or the driver
            if not tuned.refuse(key(), choice.source, error):
                raise
            choice = choose()


def launch_of(problem: Problem, choice: plan.Choice, device: DeviceInfo) -> Launch | WgmmaLaunch:
    """Compile and load what was chosen, or what comes after it."""
    return first_that_loads(
        choice,
        lambda chosen: make_launch(problem, chosen, device),
        lambda: plan.choose(problem, device),
        lambda: key_of(problem, device),
    )


def contiguous(call: Call) -> Call:
    """The call on CuPy arrays with contiguous copies of strided inputs, and without a strided `out`."""
    q, k, v = (import_cupy().ascontiguousarray(x) if is_strided(x) else x for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, out=None if call.out is not None and is_strided(call.out) else call.out)


def prepare_gpu(call: Call, options: Options, return_lse: bool, config: Any, kind: NumpyKind) -> None:
    """Compile and load what `attend_gpu` needs."""
    with kind.current(call.q):
        if isinstance(kind, CupyKind) and not CALLS.ready(kind, call, options, return_lse, config)[0].strided:
            return
        views = call.viewed_by(kind)
        if CALLS.ready(CUPY, views, options, return_lse, config)[0].strided:
            CALLS.ready(CUPY, contiguous(views), options, return_lse, config)


def attend_gpu(kind: CupyKind, arrays: Sequence[Any], options: Sequence[Any], return_lse: bool, config: Any) -> Any:
    """`attention` on arrays of a GPU: a look-up, an allocation and a launch, once the signature is known."""
    known, addresses = CALLS.ready(kind, arrays, options, return_lse, config)
    q, out = arrays[0], arrays[OUT]
    if known.strided or known.current_device() != known.device:
        with kind.current(q):
            if known.strided:
                return attend_strided(kind, Call(*arrays), Options(*options), return_lse, config)
            return attend_gpu(kind, arrays, options, return_lse, config)

    if out is None:
        out = known.new_out(q)
        addresses[OUT] = kind.address(out)
    elif known.may_overlap(addresses):
        refuse_overlap(Call(*arrays), kind.memory)
    lse = known.new_lse(q) if return_lse else None
    addresses.insert(LSE, 0 if lse is None else kind.address(lse))
    if known.launch is not None:
        known.launch(addresses, kind.stream(q))
    return (out, lse) if return_lse else out


def attend_strided(kind: CupyKind, call: Call, options: Options, return_lse: bool, config: Any) -> Any:
    """`attend_gpu` where q, k, v or `out` are not contiguous along their last axis: on contiguous copies."""
    refuse_overlap(call, kind.memory)
    views = call.viewed_by(kind)
    computed = attend_gpu(CUPY, contiguous(views), options, return_lse, config)
    out, lse = computed if return_lse else (computed, None)
    if call.out is not None:
        if out is not views.out:
            views.out[...] = out
        out = call.out
    else:
        out = kind.result(out, call.q)
    return (out, kind.result(lse, call.q)) if return_lse else out


def attend_foreign(kind: NumpyKind, call: Call, options: Options, return_lse: bool, config: Any) -> Any:
    """`attention` on arrays that are viewed as NumPy or CuPy arrays."""
    with kind.current(call.q):
        views = call.viewed_by(kind)
        if kind.on_gpu:
            computed = attend_gpu(CUPY, views, options, return_lse, config)
        else:
            computed = attend_numpy(views, options, return_lse, config)
        out, lse = computed if return_lse else (computed, None)
        out = kind.result(out, call.q) if call.out is None else call.out
        return (out, kind.result(lse, call.q)) if return_lse else out
