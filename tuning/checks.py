"""What a candidate computes and how it is judged: random inputs, outputs between guard bytes, float64 beside them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import backward_launch, launch
from cuflash.arrays import DTYPE_OF
from cuflash.backward import workspace_layout
from cuflash.backward_config import BackwardConfig
from cuflash.backward_problem import BackwardProblem
from cuflash.problem import ITEM_BYTES
from cuflash.reference import standard_attention
from cuflash.tuning.workload import UNALIGNED, Workload
from cuflash.winner import GpuConfig

if TYPE_CHECKING:
    from cuflash.tuning.worker import Gpu

GUARD_BYTES = 4096
GUARD, POISON = 0xA5, 0xFF  # the latter is NaN in every dtype
HOST_ELEMENTS = (1 << 22) + 3  # random elements that are made once and repeated to fill an array
BLOCK_ROWS = 32

# Relative L2 errors of a block of 32 rows, beside float64: the default's may be so large; a candidate's, FACTOR times
# the default's and SLACK in units of the dtype's epsilon, by which two kernels that are equally exact differ.
LARGEST_ERROR = {"float16": 1.2e-3, "bfloat16": 8e-3, "float32": 4e-6, "float64": 2e-14}
FACTOR = 2.0
SLACK = {"float16": 1 / 16, "bfloat16": 1 / 16, "float32": 8.0, "float64": 16.0}
FEW_ELEMENTS, SLACK_OF_FEW = 64, 1.0  # of a block, in which chance decides; at least so much slack
# At full size, from the default's result, which has errors of its own.
LARGEST_DIFFERENCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 8e-6, "float64": 4e-14}
OF_GRADIENTS = 2.5  # times as much of either
LARGEST_LSE_ERROR = {"float16": 4e-3, "bfloat16": 4e-3, "float32": 1e-5, "float64": 1e-12}


def host_array(dtype: str, size: int, rng: np.random.Generator, longest: int) -> NDArray[Any]:
    """`size` random elements: standard normal, True for seven in ten, or lengths up to `longest`."""
    if dtype == "bool":
        return rng.random(size) < 0.7
    if dtype == "int32":
        return rng.integers(longest // 2, longest + 1, size, dtype=np.int32)
    return rng.standard_normal(size, np.float64 if dtype == "float64" else np.float32).astype(DTYPE_OF[dtype])


class Call:
    """The arrays of one workload on the GPU: random inputs, and between guard bytes what a kernel writes.

    Of large arrays, `inputs` holds only the elements that are repeated. `forward` is the call whose gradients these
    are, if they are some.
    """

    def __init__(self, workload: Workload, gpu: Gpu, seed: int) -> None:
        self.workload = workload
        self.problem = workload.problem()
        self.gpu = gpu
        self.forward = Call(workload._replace(backward=False), gpu, seed) if workload.backward else None
        rng = np.random.default_rng(seed + workload.backward)
        self.inputs: dict[str, NDArray[Any]] = {}
        self._memory: dict[str, Any] = {}
        self._address: dict[str, int] = {}
        if self.forward is not None:
            self.inputs |= self.forward.inputs
            self._address |= self.forward._address
        shapes, dtypes = workload.shapes(), workload.dtypes()
        for name in [name for name in shapes if name not in self.inputs]:
            shape = shapes[name]
            size, longest = int(np.prod(shape)), workload.seqlen[name == "kv_lengths"]
            part = host_array(dtypes[name], min(size, HOST_ELEMENTS), rng, longest)
            self.inputs[name] = part.reshape(shape) if part.size == size else part
            self._memory[name], self._address[name] = gpu.upload(part, size, workload.aligned)
        self._room: dict[str, int] = {}  # bytes between the guards of what is written
        for name, (shape, dtype) in self.outputs().items():
            shift = UNALIGNED * ITEM_BYTES[dtype] if name == "out" and not workload.aligned else 0
            self._make_room(name, int(np.prod(shape)) * ITEM_BYTES[dtype], shift)

    def _make_room(self, name: str, size: int, shift: int = 0) -> None:
        self._memory[name] = self.gpu.allocate(size + 2 * GUARD_BYTES)
        self._address[name] = self._memory[name].ptr + GUARD_BYTES + shift
        self._room[name] = size

    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array that is computed."""
        shapes, dtype = self.workload.shapes(), self.workload.dtype
        if self.workload.backward:
            return {f"d{name}": (shapes[name], dtype) for name in ("q", "k", "v")}
        rows = shapes["q"][:-1]
        return {"out": ((*rows, self.workload.head_dim[1]), dtype), "lse": (rows, self.problem.spec.lse_dtype)}

    def matrices(self) -> list[str]:
        """Those that are judged in blocks of rows."""
        return [name for name in self.outputs() if name != "lse"]

    def addresses(self, config: GpuConfig, lse: bool = True) -> list[int]:
        """What a launch of `config` takes."""
        if not self.workload.backward:
            known = self._address if lse else {**self._address, "lse": 0}
            return [known.get(name, 0) for name in launch.ADDRESSES]
        start, _ = self._workspace(config)
        given = [*backward_launch.INPUTS, *backward_launch.OUTPUTS]
        offsets, _ = self._layout(config)
        return [self._address.get(name, 0) for name in given] + [start + offset for offset in offsets]

    def _layout(self, config: GpuConfig) -> tuple[tuple[int, ...], int]:
        if not isinstance(self.problem, BackwardProblem) or not isinstance(config, BackwardConfig):
            raise TypeError(f"only the backward pass has a workspace, got {config}")
        return workspace_layout(self.problem, config)

    def _workspace(self, config: GpuConfig) -> tuple[int, int]:
        """Address and size of what the kernels of the backward pass hand to one another."""
        _, size = self._layout(config)
        if size > self._room.get("workspace", -1):
            self._make_room("workspace", size)
        return self._address["workspace"], size

    def written(self, config: GpuConfig) -> dict[str, tuple[int, int]]:
        """Address and bytes of every array that `config` writes."""
        found = {name: (self._address[name], self._room[name]) for name in self.outputs()}
        return {**found, "workspace": self._workspace(config)} if self.workload.backward else found

    def poison(self, config: GpuConfig) -> None:
        """Fill with NaN what `config` writes, and the bytes around it with the guard."""
        for name, (address, size) in self.written(config).items():
            self.gpu.fill(self._memory[name].ptr, GUARD, self._room[name] + 2 * GUARD_BYTES)
            self.gpu.fill(address, POISON, size)

    def broken_guard(self, config: GpuConfig) -> str | None:
        """The array beyond whose end, or before whose start, something was written."""
        for name, (address, size) in self.written(config).items():
            start, end = self._memory[name].ptr, address + size
            behind = min(GUARD_BYTES, start + self._room[name] + 2 * GUARD_BYTES - end)
            for first, count in ((start, address - start), (end, behind)):
                if np.any(self.gpu.download(first, count, np.dtype(np.uint8)) != GUARD):
                    return name
        return None

    def result(self, name: str) -> NDArray[Any]:
        """An array that was computed, on the host."""
        shape, dtype = self.outputs()[name]
        return self.gpu.download(self._address[name], self._room[name], DTYPE_OF[dtype]).reshape(shape)

    def output(self, name: str) -> tuple[int, int]:
        """Its address and its size in bytes."""
        return self._address[name], self._room[name]

    @functools.cached_property
    def gold(self) -> dict[str, NDArray[Any]]:
        """The results in float64: by the plain formula, and its gradients tile by tile."""
        options = self.workload.options()
        if self.forward is None:
            given: dict[str, Any] = {**self.inputs, **options, "return_lse": True}
            out, lse = standard_attention(**given)
            return {"out": out, "lse": lse}
        wide = {name: x if x.dtype.kind in "bi" else x.astype(np.float64) for name, x in self.inputs.items()}
        given = {**wide, **self.forward.gold, **options}
        gradients = cuflash.attention_backward(**given)
        return dict(zip(self.matrices(), gradients, strict=True))


def block_errors(call: Call) -> dict[str, NDArray[Any]]:
    """Relative L2 errors of each 32 rows, or keys, of each head; infinite where only zeros are right."""
    found = {}
    for name in call.matrices():
        got, gold, errors = call.result(name), call.gold[name], []
        for first in range(0, gold.shape[-2], BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            size = np.linalg.norm(gold[..., rows, :], axis=(-2, -1))
            off = np.linalg.norm(got[..., rows, :].astype(np.float64) - gold[..., rows, :], axis=(-2, -1))
            with np.errstate(divide="ignore", invalid="ignore"):
                errors.append(np.where(off == 0, 0.0, off / size))
        found[name] = np.stack(errors)
    return found


def why_wrong(call: Call, config: GpuConfig, default: Mapping[str, NDArray[Any]] | None) -> str | None:
    """What is wrong with the results of a small call, beside the errors of the `default`; None where they are right."""
    if name := call.broken_guard(config):
        return f"it writes beyond {name}"
    dtype = call.workload.dtype
    for name, errors in block_errors(call).items():
        most: Any = allowed(LARGEST_ERROR, call.workload)
        *_, rows, columns = call.outputs()[name][0]
        if default is not None:
            most = FACTOR * default[name] + slack(rows, columns, dtype)[:, None, None]
        if not np.all(errors <= most):  # NaN too
            first = BLOCK_ROWS * int(np.argmax(~np.all(errors <= most, axis=tuple(range(1, errors.ndim)))))
            return f"rows of {name} from {first} on have an error of {np.max(errors):.2g}"
    if call.workload.backward:
        return None
    lse, gold = call.result("lse"), call.gold["lse"]
    with np.errstate(invalid="ignore"):  # -inf of rows that see no key
        same = (lse == gold) | (np.abs(lse - gold) <= LARGEST_LSE_ERROR[dtype] * (1 + np.abs(gold)))
    return None if np.all(same) else "the log-sum-exp is wrong"


def slack(rows: int, columns: int, dtype: str) -> NDArray[Any]:
    """By how much equally exact results may differ in each block of 32 rows."""
    sizes = np.array([min(BLOCK_ROWS, rows - first) * columns for first in range(0, rows, BLOCK_ROWS)])
    usual = SLACK[dtype]
    epsilon = float(ml_dtypes.finfo(DTYPE_OF[dtype]).eps)
    return epsilon * np.where(sizes < FEW_ELEMENTS, max(usual, SLACK_OF_FEW), usual)


def allowed(table: Mapping[str, float], workload: Workload) -> float:
    """What a table of relative errors allows for the results of `workload`."""
    return table[workload.dtype] * (OF_GRADIENTS if workload.backward else 1.0)
