"""What the emulator makes of bulk copies, stmatrix and counters in device memory: right kernels, and wrong ones."""

import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import SCHEDULES, Array, EmulatorError, Kernel, Schedule, build, launch, why_no_emulator
from emulator.values import floats

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

UNITS = {"units_bulk.cu": (Path(__file__).parent / "emulator" / "units_bulk.cu").read_text()}
each_schedule = pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("reverse", asynchronous="at_last")], ids=str)


@functools.cache
def unit(name: str) -> Kernel:
    return build("units_bulk", "", UNITS, name, optimized=False)


def run(name: str, given: Any, schedule: Schedule = SCHEDULES[0], threads: int = 32, grid: int = 1) -> Any:
    """Run a kernel of units_bulk.cu on `given`; the array of the same size that it fills."""
    counter = Array("counter", np.zeros(1, np.int32), "any")
    counter.values[...] = 0
    own = Array("in", given), Array("out", np.empty_like(given), "any"), counter
    params = struct.pack("<3Qi4x", *(array.address for array in own), given.size)
    launch(unit(name), grid=grid, threads=threads, params=params, arrays=own, shared_bytes=16 << 10, schedule=schedule)
    return own[1].values


@each_schedule
def test_bulk_copies_store_and_add(schedule):
    given = floats(256)
    assert np.array_equal(run("store_and_add", given, schedule), 2 * given)


@each_schedule
def test_memory_that_a_bulk_copy_has_read_may_be_overwritten(schedule):
    given = floats(256)
    assert np.array_equal(run("overwritten_once_it_is_read", given, schedule), given)


def test_red_takes_subnormal_numbers_for_zero_and_bulk_copies_keep_them():
    smallest = np.finfo(np.float32).smallest_normal
    given = np.resize(np.float32([smallest, -smallest / 2, smallest * 0.75, 1]), 32)
    assert np.array_equal(run("store_and_add", given), 2 * given)
    assert np.array_equal(run("add_by_red", given), np.where(abs(given) < smallest, 0, 2 * given))


WRONG = {
    "overwritten_before_it_is_read": "which a bulk copy reads that may still be under way",
    "last_of_two_overwritten": "offset 16 .* which a bulk copy reads that may still be under way",
    "left_when_it_is_read": "leaves the kernel without waiting for its bulk copy",
    "written_without_a_proxy_fence": "writes without fence.proxy.async between",
    "left_without_waiting": "leaves the kernel without waiting for its bulk copy",
    "odd_bytes": "a bulk copy moves whole vectors of 16 bytes, not 12 bytes",
}


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2]], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_bulk_copy_is_reported(name, schedule):
    with pytest.raises(EmulatorError, match=WRONG[name]):
        run(name, floats(256), schedule)


@each_schedule
def test_stmatrix_is_the_reverse_of_ldmatrix(schedule):
    given = floats(128)
    assert np.array_equal(run("matrices_there_and_back", given, schedule), given)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_blocks_wait_for_their_turns(order):
    turns = run("turns", floats(4), Schedule(order, resident=4, seed=3), grid=4)
    assert np.array_equal(turns, np.float32([3, 2, 1, 0]))


def test_turn_that_never_comes_is_a_deadlock():
    with pytest.raises(EmulatorError, match="deadlock: no thread can go on"):
        run("turn_that_never_comes", floats(4))
