"""Launch an emulated kernel on memory that is watched."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from emulator.build import Kernel

MARGIN = 1 << 20  # between arrays lies memory that is never touched, and so takes no room
POISON = 0xFF  # these bytes are a NaN in every format
VECTOR = 16
PARAMS_ALIGNMENT = 64
TWIN_LINES = ("cuda.h:", "ptx.cuh:", "wgmma.cuh:", "?")  # of the emulator, not of a kernel


class EmulatorError(Exception):
    """The kernel did what it must not do; the message is the emulator's report."""


Writes = Literal["none", "once", "any"]


@dataclass(frozen=True)
class Schedule:
    """In which order threads run, and when asynchronous copies are done: what a kernel's results must not depend on.

    Attributes
    ----------
    order : {"forward", "reverse", "random"}
        Of warps in a round, and of the lanes of a warp.
    run_ahead : bool
        Whether a warp goes on until none of its lanes can, rather than once a round.
    resident : int
        Blocks that run side by side.
    asynchronous : {"at_issue", "at_last", "at_random"}
        When a copy is done: at once, when its thread waits for it, or at any time between.
    """

    order: Literal["forward", "reverse", "random"] = "forward"
    run_ahead: bool = False
    resident: int = 1
    asynchronous: Literal["at_issue", "at_last", "at_random"] = "at_last"
    seed: int = 0

    def __str__(self) -> str:
        ahead = "-ahead" if self.run_ahead else ""
        return f"{self.order}{ahead}-{self.asynchronous}" + (f"-seed{self.seed}" if self.seed else "")


SCHEDULES = (
    Schedule(),
    Schedule("reverse", run_ahead=True, asynchronous="at_issue"),
    Schedule("random", run_ahead=True, resident=2, asynchronous="at_random", seed=1),
    Schedule("forward", run_ahead=True, resident=3, asynchronous="at_random", seed=2),
    Schedule("random", resident=2, asynchronous="at_last", seed=3),
)


class Array:
    """Device memory that holds a NumPy array of the same shape and strides; around it lies nothing that may be touched.

    What is between the elements of a strided array is poison, which a kernel may neither use nor overwrite.
    """

    def __init__(self, name: str, values: np.ndarray[Any, Any], writes: Writes = "none") -> None:
        self.name = name
        self.writes = writes
        steps = [(n - 1) * s for n, s in zip(values.shape, values.strides, strict=True)]
        below = -sum(step for step in steps if step < 0)
        self.bytes = below + sum(step for step in steps if step > 0) + values.itemsize if values.size else 0
        self._memory = mmap.mmap(-1, 2 * MARGIN + self.bytes + VECTOR)
        first = MARGIN + (values.ctypes.data - below) % VECTOR  # aligned as the array was
        self._used = np.frombuffer(self._memory, np.uint8)[first : first + self.bytes]
        self._used[...] = POISON
        self.values: Any = np.ndarray(values.shape, values.dtype, self._used, below, values.strides)
        between = np.ones(self.bytes, bool)
        np.ndarray((*values.shape, values.itemsize), bool, between, below, (*values.strides, 1))[...] = False
        self._between = between
        if writes == "none":
            self.values[...] = values

    @property
    def address(self) -> int:
        """Of the first element."""
        return int(self.values.ctypes.data)

    @property
    def lowest_address(self) -> int:
        return int(self._used.ctypes.data)

    def check_gaps(self) -> None:
        """Raise EmulatorError where something was written between the elements."""
        if (self._used[self._between] != POISON).any():
            raise EmulatorError(f"the kernel writes between the elements of {self.name}")


@dataclass(frozen=True)
class Statistics:
    """What a launch did."""

    switches: int
    accesses: int
    multiplications: int
    copies: int
    loads: int
    warpgroup_multiplications: int


class _Entry(ctypes.Structure):
    _fields_ = (("call", ctypes.c_void_p), ("params_bytes", ctypes.c_uint64))


class _Options(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("threads", "shared_bytes", "resident", "order", "run_ahead", "seed")),
        *((name, ctypes.c_uint32) for name in ("asynchronous", "watched", "sum_bits")),
    )


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writes", ctypes.c_uint32),
    )


class _Statistics(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Statistics)]


def launch(
    kernel: Kernel,
    *,
    grid: int | tuple[int, ...],
    threads: int,
    params: bytes,
    arrays: Sequence[Array] = (),
    shared_bytes: int = 0,
    schedule: Schedule = SCHEDULES[0],
    watched: bool = True,
    sum_bits: int = 0,
) -> Statistics:
    """Run the kernel.

    `params` is its parameter block, `arrays` what it may touch of device memory. Without `watched`, neither races in
    shared memory nor reads of what was never written to it are reported: the schedule and poison may change numbers.
    With `sum_bits` tensor cores cut off what they add, as matrices.h says; else they add floats. 24 bits are those of a
    float, the least that a GPU keeps; newer ones are reported to keep one or two more.

    Raises
    ------
    EmulatorError
        With the emulator's report.
    """
    entry = _Entry.from_address(kernel.entry)
    if entry.params_bytes != len(params):
        raise ValueError(f"{kernel.name} takes {entry.params_bytes} bytes of parameters, got {len(params)}")
    dimensions = (grid,) if isinstance(grid, int) else grid
    options = _Options(
        (ctypes.c_uint32 * 3)(*dimensions, *(1,) * (3 - len(dimensions))),
        threads,
        shared_bytes,
        schedule.resident,
        ("forward", "reverse", "random").index(schedule.order),
        schedule.run_ahead,
        schedule.seed,
        ("at_issue", "at_last", "at_random").index(schedule.asynchronous),
        watched,
        sum_bits,
    )
    writes = ("none", "once", "any")
    regions = (_Region * len(arrays))(
        *(_Region(x.name.encode(), x.lowest_address, x.bytes, writes.index(x.writes)) for x in arrays)
    )
    statistics = _Statistics()
    memory = ctypes.create_string_buffer(len(params) + PARAMS_ALIGNMENT)
    first = -ctypes.addressof(memory) % PARAMS_ALIGNMENT
    memory[first : first + len(params)] = params
    kernel.core.emulator_launch.restype = ctypes.c_char_p
    report = kernel.core.emulator_launch(
        ctypes.c_void_p(kernel.entry),
        ctypes.c_void_p(ctypes.addressof(memory) + first),
        ctypes.byref(options),
        regions,
        ctypes.c_uint64(len(arrays)),
        ctypes.byref(statistics),
    )
    if report is not None:
        raise EmulatorError(with_lines(report.decode(), kernel))
    for array in arrays:
        array.check_gaps()
    return Statistics(**{field.name: getattr(statistics, field.name) for field in fields(Statistics)})


def with_lines(report: str, kernel: Kernel) -> str:
    """The report with file and line for addresses of code, <+0x...>; of inlined functions, the innermost is first."""

    def look_up(match: re.Match[str]) -> str:
        before_return = hex(int(match[1], 16) - 1)  # the address after a call belongs to the next line
        command = ["addr2line", "-i", "-s", "-e", str(kernel.path), before_return]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        places = [line.partition(" (")[0] for line in lines if not line.startswith(TWIN_LINES)]
        return ", called from ".join(places) or match[0]

    if shutil.which("addr2line") is None:
        return report
    report = re.sub(r"<\+(0x[0-9a-f]+)>", look_up, report)
    return re.sub(r"(\n  called from |, )<\+0x[0-9a-f]+>$", "", report)  # the emulator's own call of the kernel
