"""What the emulator makes of mbarriers, TMA, wgmma and setmaxnreg: right kernels, and wrong ones that it must find."""

import ctypes
import functools
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import SCHEDULES, Array, EmulatorError, Kernel, Schedule, Statistics, build, launch, why_no_emulator
from emulator.values import floats, sum_error

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

UNITS = {"units_hopper.cu": (Path(__file__).parent / "emulator" / "units_hopper.cu").read_text()}
SEEDED = tuple(Schedule("random", True, asynchronous="at_random", seed=seed) for seed in range(4, 8))
BACKWARDS = Schedule("reverse", asynchronous="at_last")
each_schedule = pytest.mark.parametrize("schedule", [*SCHEDULES, *SEEDED, BACKWARDS], ids=str)
some_schedules = pytest.mark.parametrize("schedule", [*SCHEDULES[:3], BACKWARDS], ids=str)

DATA_TYPES = {"u1": 0, "u4": 2, "f2": 6, "f4": 7, "V2": 9}  # CUtensorMapDataType
NO_MAP = bytes(128)


@functools.cache
def unit(name: str, element: str = "half_t") -> Kernel:
    return build("units_hopper", f"using Element = {element};", UNITS, name, optimized=False)


def launch_unit(
    name: str,
    given: Any,
    result: Any,
    n: int = 0,
    *,
    maps: tuple[bytes, bytes] = (NO_MAP, NO_MAP),
    arrays: tuple[Array, ...] = (),
    width: int = 0,
    at: tuple[int, ...] = (0, 0, 0, 0),
    element: str = "half_t",
    writes: Any = "once",
    threads: int = 64,
    **options: Any,
) -> tuple[Any, Statistics]:
    """Run a kernel of units_hopper.cu on the array `given`; the array that it fills, and what it did."""
    own = Array("in", given), Array("out", result, writes)
    params = b"".join(maps) + struct.pack("<2Q6i24x", own[0].address, own[1].address, n, width, *at)
    options = {"shared_bytes": 48 << 10, "threads": threads, "grid": 1} | options
    statistics = launch(unit(name, element), params=params, arrays=(*own, *arrays), **options)
    return own[1].values, statistics


def run(name: str, *given: Any, **options: Any) -> Any:
    return launch_unit(name, *given, **options)[0]


def lines_of(text: str) -> list[int]:
    return [number for number, line in enumerate(UNITS["units_hopper.cu"].splitlines(), 1) if text in line]


# ---- mbarriers ----


@each_schedule
def test_mbarriers_hand_over_through_a_ring_of_slots(schedule):
    given = floats(7, 32)
    assert np.array_equal(run("ring", given, given, 7, schedule=schedule), given[:, ::-1])


WRONG_RINGS = {
    "ring_without_wait_for_full": "nothing was written|without a barrier between",
    "ring_without_wait_for_empty": r"without a barrier between|ends \d phases while a thread waits for one|deadlock",
    "ring_without_release": "deadlock",
    "ring_with_early_release": "without a barrier between",
    "ring_where_the_consumer_starts_wrong": "nothing was written|without a barrier between|deadlock",
    "ring_where_the_producer_starts_wrong": "deadlock",
    "ring_for_fewer_arrivals": "without a barrier|nothing was written|for 31 arrivals, and one more|ends 2 phases",
    "ring_for_more_arrivals": "deadlock",
    "ring_without_fence_after_init": r"mbarrier 0 of units_hopper\.cu:\d+ is used without fence\.mbarrier_init",
    "ring_without_barrier_after_init": "there is no mbarrier|is used without a barrier|is used without fence",
    "ring_that_overwrites_a_barrier": r"writes shared memory at offset 4.* holds the mbarrier made at units_hopper",
}


@each_schedule
@pytest.mark.parametrize("name", WRONG_RINGS)
def test_wrong_ring_is_reported(name, schedule):
    given = floats(7, 32)
    with pytest.raises(EmulatorError, match=WRONG_RINGS[name]):
        run(name, given, given, 7, schedule=schedule)


def test_deadlock_tells_what_the_mbarriers_lack():
    with pytest.raises(EmulatorError) as raised:
        run("ring_for_more_arrivals", floats(7, 32), floats(7, 32), 7)
    made, waits = lines_of("mbarrier_init(full(i)"), lines_of("mbarrier_wait(full(i)")
    assert (
        f"32 threads, 32 to 63, wait in mbarrier 0 of units_hopper.cu:{made[0]}, whose phase 0 lacks 1 of 33 arrivals "
        f"and 0 bytes, for parity 0, at units_hopper.cu:{waits[0]}"
    ) in str(raised.value)


def test_mbarrier_must_be_made():
    with pytest.raises(EmulatorError, match=r"there is no mbarrier at offset 0, at units_hopper\.cu"):
        run("barrier_that_nobody_made", floats(1), floats(1))


def test_mbarrier_must_not_be_made_twice():
    with pytest.raises(EmulatorError, match=r"makes an mbarrier where there is one already, at units_hopper\.cu"):
        run("barrier_made_twice", floats(1), floats(1), threads=32)


@pytest.mark.parametrize("order", ["forward", "random"])
def test_phases_must_not_go_by_unseen(order):
    run("phases_that_go_by", floats(1), floats(1), 1, schedule=Schedule(order, seed=1))
    with pytest.raises(EmulatorError, match=r"ends 2 phases while a thread waits for one|deadlock"):
        run("phases_that_go_by", floats(1), floats(1), 2, schedule=Schedule(order, seed=1))


# ---- writes that change nothing ----


@each_schedule
def test_threads_may_write_the_same_value_without_a_barrier(schedule):
    result = run("equal_writes", floats(1), np.zeros(64, np.int32), schedule=schedule)
    assert set(result) == {7}


@each_schedule
def test_threads_may_not_write_different_values_without_a_barrier(schedule):
    with pytest.raises(EmulatorError, match=r"shared memory at offset .* without a barrier between"):
        run("equal_writes", floats(1), np.zeros(64, np.int32), 1, schedule=schedule)


# ---- TMA ----


def encode(
    name: str,
    array: Any,
    box: tuple[int, ...],
    swizzle: int = 0,
    element: str = "half_t",
    *,
    address: int | None = None,
    extents: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    type_: int | None = None,
    steps: int = 1,
) -> bytes | None:
    """The tensor map of an Array, innermost axis first and four in all; None where it is refused."""
    values = array.values
    if values.ndim < 4:
        values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    extents = values.shape[::-1] if extents is None else extents
    strides = values.strides[-2::-1] if strides is None else strides
    buffer = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(buffer) % 64
    function = unit(name, element).core.cuTensorMapEncodeTiled
    kind = f"{values.dtype.kind}{values.dtype.itemsize}"
    status = function(
        ctypes.c_void_p(ctypes.addressof(buffer) + start),
        DATA_TYPES[kind] if type_ is None else type_,
        4,
        ctypes.c_void_p(array.address if address is None else address),
        (ctypes.c_uint64 * 4)(*extents),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(*box),
        (ctypes.c_uint32 * 4)(*(steps,) * 4),
        *(0, swizzle, 0, 0),
    )
    return buffer.raw[start : start + 128] if status == 0 else None


def swizzled(rows: Any, mode: int) -> Any:
    """Where the bytes of a box lie in shared memory: piece c, of 16 bytes, of the 128-byte line r goes to c ^ r."""
    pieces = rows.reshape(-1, 16)
    number = np.arange(len(pieces))
    result = np.empty_like(pieces)
    result[number ^ (number // 8 % (1 << mode))] = pieces
    return result.reshape(-1)


def box_of(values: Any, box: tuple[int, ...], at: tuple[int, ...]) -> Any:
    """The box at `at` (both innermost axis first), with zeros beyond the array."""
    index = np.meshgrid(*(np.arange(n) + x for n, x in zip(box[::-1], at[::-1], strict=True)), indexing="ij")
    inside = np.all([(i >= 0) & (i < n) for i, n in zip(index, values.shape, strict=True)], axis=0)
    clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, values.shape, strict=True))
    return np.where(inside, values[clipped], 0).astype(values.dtype)


BOXES = {
    "inside": ((16, 3, 2, 2), (16, 2, 1, 0), 0),
    "rows beyond the end": ((16, 8, 1, 1), (0, 5, 0, 1), 0),
    "columns beyond the end": ((16, 4, 1, 1), (40, 0, 0, 0), 0),
    "before the start": ((16, 4, 3, 1), (-8, -2, -1, 1), 0),
    "all outside": ((16, 4, 1, 1), (0, 0, 3, 0), 0),
    "swizzle of 32 bytes": ((16, 8, 1, 1), (8, 1, 2, 0), 1),
    "swizzle of 64 bytes": ((32, 8, 1, 1), (5, 1, 2, 0), 2),
    "swizzle of 128 bytes": ((64, 8, 2, 1), (-3, 1, 2, 0), 3),
}


@some_schedules
@pytest.mark.parametrize("which", BOXES)
def test_tma_brings_a_box_with_zeros_outside_the_array(which, schedule):
    box, at, swizzle = BOXES[which]
    base = floats(2, 9, 3, 56).astype(np.float16)
    array = Array("source", base.swapaxes(1, 2)[..., :48])
    expected = swizzled(box_of(array.values, box, at).view(np.uint8), swizzle)
    options = {"maps": (encode("load", array, box, swizzle), NO_MAP), "arrays": (array,), "at": at}
    result, statistics = launch_unit("load", floats(1), expected, expected.size, schedule=schedule, **options)
    assert np.array_equal(result, expected)
    assert statistics.loads == 1


REFUSED: dict[str, dict[str, Any]] = {
    "unaligned address": {"address": 8},
    "null": {"address": 0},
    "empty axis": {"extents": (64, 0, 1, 1)},
    "unaligned stride": {"strides": (136, 1024, 1024)},
    "far stride": {"strides": (128, 1 << 40, 1024)},
    "box of 257": {"box": (64, 257, 1, 1)},
    "empty box": {"box": (64, 0, 1, 1)},
    "row that is no multiple of 16 bytes": {"box": (60, 1, 1, 1)},
    "row wider than the swizzle": {"swizzle": 2},
    "type that is not known": {"type_": 99},
    "elements left out": {"steps": 2},
}


@pytest.mark.parametrize("why", REFUSED)
def test_tensor_map_is_refused_as_the_driver_does(why):
    array = Array("source", np.zeros((1, 1, 64, 64), np.float16))
    good: dict[str, Any] = {"box": (64, 64, 1, 1), "swizzle": 3}
    assert encode("load", array, **good) is not None
    assert encode("load", array, **good | REFUSED[why]) is None


WRONG_LOADS = {
    "load_without_wait": "ends while 1 loads by TMA are under way",
    "load_that_is_read_too_early": "TMA fills; it has not waited for the phase of mbarrier 0 of|nothing was written",
    "load_with_too_few_bytes_announced": "cannot|deadlock|too few were announced",
    "load_with_too_many_bytes_announced": "phase 0 lacks 0 of 1 arrivals and 16 bytes",
    "load_to_a_crooked_address": "TMA with shared address .* no multiple of 128",
    "load_beyond_shared_memory": "asks TMA to write 2048 bytes at offset 66432 of 49152",
    "load_over_its_barrier": "asks TMA to write shared memory at offset 4096 at .* holds the mbarrier made",
    "load_over_what_is_read": r"asks TMA to write .* which thread \d+ reads without a barrier between|which TMA fills",
    "load_of_no_map": "TMA is given what is no tensor map",
}


@some_schedules
@pytest.mark.parametrize("name", WRONG_LOADS)
def test_wrong_load_is_reported(name, schedule):
    if name == "load_without_wait" and schedule.asynchronous != "at_last":
        pytest.skip("the load may be done in time")
    array = Array("source", np.zeros((1, 1, 16, 64), np.float16))
    maps = encode(name, array, (64, 16, 1, 1)), NO_MAP
    with pytest.raises(EmulatorError, match=WRONG_LOADS[name]):
        run(name, floats(1), np.zeros(2048, np.uint8), 2048, maps=maps, arrays=(array,), schedule=schedule)


def test_tma_may_only_read_what_the_kernel_may():
    array = Array("source", np.zeros((1, 1, 16, 64), np.float16))
    maps = encode("load", array, (64, 16, 1, 1), extents=(64, 17, 1, 1)), NO_MAP
    line = lines_of("tma_load_4d(aligned")[0]
    with pytest.raises(EmulatorError, match=rf"reads 128 bytes outside every array at units_hopper\.cu:{line}"):
        run("load", floats(1), np.zeros(2048, np.uint8), 2048, maps=maps, arrays=(array,), at=(0, 1, 0, 0))


@some_schedules
@pytest.mark.parametrize("which", BOXES)
def test_tma_stores_a_box_without_what_would_leave_the_array(which, schedule):
    box, at, swizzle = BOXES[which]
    base = np.full((2, 9, 3, 56), 7, np.float16)
    array = Array("target", base.swapaxes(1, 2)[..., :48], "any")
    array.values[...] = 7
    given = floats(*box[::-1]).astype(np.float16)
    expected = array.values.copy()
    for index in np.ndindex(given.shape):
        place = tuple(i + x for i, x in zip(index, at[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(place, expected.shape, strict=True)):
            expected[place] = given[index]
    lying = swizzled(given.view(np.uint8), swizzle)
    options = {"maps": (encode("store", array, box, swizzle), NO_MAP), "arrays": (array,), "at": at, "writes": "none"}
    launch_unit("store", lying, np.zeros(1), lying.size, schedule=schedule, **options)
    assert np.array_equal(array.values, expected)


WRONG_STORES = {
    "store_without_fence": r"reads through the asynchronous proxy .* without fence\.proxy\.async between",
    "store_before_all_have_written": "asks for a copy by TMA of .* without a barrier|nothing was written",
    "store_without_wait": "leaves the kernel without waiting for its bulk copy",
    "store_from_a_crooked_address": "TMA with shared address .* no multiple of 128",
    "store_from_where_nothing_is": "asks for a copy by TMA of .* nothing was written",
}


@some_schedules
@pytest.mark.parametrize("name", WRONG_STORES)
def test_wrong_store_is_reported(name, schedule):
    array = Array("target", np.zeros((1, 1, 16, 64), np.float16), "any")
    maps = encode(name, array, (64, 16, 1, 1)), NO_MAP
    with pytest.raises(EmulatorError, match=WRONG_STORES[name]):
        run(name, np.zeros(2048, np.uint8), np.zeros(1), 2048, maps=maps, arrays=(array,), schedule=schedule)


# ---- wgmma ----

ELEMENTS = {"half_t": np.float16, "bf16_t": ml_dtypes.bfloat16}
SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}


DEPTH = 64


def multiply(name: str, n: int, width: int, element: str = "half_t", **options: Any) -> tuple[bool, Statistics]:
    """Whether D as the kernel computes it is A B, but for rounding; and what the launch did."""
    dtype = ELEMENTS[element]
    a, b = floats(64, DEPTH, seed=1).astype(dtype), floats(DEPTH, n, seed=2).astype(dtype)
    in_registers = name.startswith("rs")
    lying = Array("a", a), Array("b", b if in_registers else np.ascontiguousarray(b.T))
    boxes = (width // 2, 64, 1, 1), (width // 2, 64 if in_registers else n, 1, 1)
    maps = [
        encode(name, array, box, SWIZZLES[width], element, type_=6) for array, box in zip(lying, boxes, strict=True)
    ]
    options = {"width": width, "maps": tuple(maps), "arrays": lying, "element": element, "threads": 128} | options
    result, statistics = launch_unit(name, a, floats(64, n), **options)
    if "after_writing_b" in name:
        b[:2] = 0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool((abs(result - a @ b) <= sum_error(DEPTH, abs(a) @ abs(b))).all()), statistics


PRODUCTS = [
    *(("ss_64", 64, width) for width in SWIZZLES),
    *(("rs_64", 64, width) for width in SWIZZLES),
    *(("ss_16", 16, 128), ("ss_256", 256, 128), ("ss_256", 256, 64), ("rs_128", 128, 128), ("rs_128", 128, 64)),
]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("name", "n", "width"), PRODUCTS)
def test_wgmma_multiplies_swizzled_matrices(name, n, width, element):
    is_right, statistics = multiply(name, n, width, element)
    assert is_right
    assert statistics.warpgroup_multiplications == 4


@each_schedule
@pytest.mark.parametrize(("name", "n"), [("ss_64", 64), ("rs_64", 64), ("rs_after_writing_b", 64)])
def test_wgmma_is_done_when_it_was_waited_for(name, n, schedule):
    assert multiply(name, n, 128, schedule=schedule)[0]


WRONG_PRODUCTS = {
    "rs_without_proxy_fence": r"asynchronous proxy .* thread \d+ writes without fence\.proxy\.async between",
    "rs_without_fence": r"wgmma without wgmma\.fence, at",
    "rs_without_commit": "reads a register of a wgmma that it has not waited for|not committed",
    "rs_without_wait": "reads a register of a wgmma that it has not waited for",
    "rs_with_too_weak_a_wait": "reads a register of a wgmma that it has not waited for",
    "rs_read_early": "reads a register of a wgmma that it has not waited for",
    "rs_with_a_changed": "writes a register of a wgmma that it has not waited for",
    "rs_with_b_overwritten": "which a wgmma of warp . reads that may still run|without a barrier between",
    "rs_with_b_loaded_over": "asks TMA to write .* which a wgmma of warp . reads that may still run|which TMA fills",
    "rs_of_different_warps": "the warps of a warpgroup issue different wgmmas",
    "rs_with_strange_bits": "has bits set that mean nothing",
    "rs_off_the_swizzle": "does not start where the swizzle repeats",
    "rs_beyond_shared_memory": "reads by wgmma at offset .* outside shared memory",
}


@some_schedules
@pytest.mark.parametrize("name", WRONG_PRODUCTS)
def test_wrong_use_of_wgmma_is_reported(name, schedule):
    with pytest.raises(EmulatorError, match=WRONG_PRODUCTS[name]):
        multiply(name, 64, 128, schedule=schedule)


def test_registers_need_a_fence_between_their_use_and_the_next_wgmma():
    run("rs_then_use_without_fence", floats(1), floats(128), 1, threads=128, writes="any")
    with pytest.raises(EmulatorError, match=r"wgmma without wgmma\.fence works on a register that was used at"):
        run("rs_then_use_without_fence", floats(1), floats(128), 0, threads=128, writes="any")


def test_wgmma_takes_whole_warps():
    with pytest.raises(EmulatorError, match="leaves the kernel with a wgmma that is not committed"):
        run("rs_by_half_a_warp", floats(1), floats(1), threads=128)


# ---- setmaxnreg, atomics ----


@each_schedule
def test_registers_go_from_one_warpgroup_to_others(schedule):
    assert run("registers", floats(1), np.zeros(384, np.int32), threads=384, schedule=schedule).all()


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("registers_of_no_step", "setmaxnreg.dec of 168 registers to 42"),
        ("registers_up_for_down", "setmaxnreg.dec of 168 registers to 176"),
        ("registers_of_one_warp", "different setmaxnreg in warps 0 and 1 of a warpgroup"),
        ("registers_that_are_not_there", r"deadlock(.|\n)*wait in setmaxnreg\.inc at units_hopper\.cu"),
    ],
)
def test_wrong_use_of_setmaxnreg_is_reported(name, report):
    with pytest.raises(EmulatorError, match=report):
        run(name, floats(1), np.zeros(384, np.int32), threads=384)


@each_schedule
def test_atomics_hand_out_each_number_once(schedule):
    counter = Array("counter", np.zeros(1, np.uint32), writes="any")
    counter.values[...] = 0
    out = Array("out", np.zeros(3 * 192, np.uint32), "once")
    params = bytes(256) + struct.pack("<2Q6i24x", counter.address, out.address, 575, 0, 0, 0, 0, 0)
    options = {"shared_bytes": 0, "threads": 64, "grid": 3, "schedule": schedule}
    launch(unit("tickets"), params=params, arrays=(counter, out), **options)
    assert sorted(out.values) == list(range(576))
    assert counter.values[0] == 0


# ---- elements of 16 bits ----


@pytest.mark.parametrize("element", ELEMENTS)
def test_element_that_goes_from_memory_right_into_a_call_is_watched(element):
    given = np.arange(64, dtype=np.uint16)
    options = {"element": element, "schedule": SCHEDULES[0]}
    assert np.array_equal(run("elements_into_a_call", given, np.zeros(64, np.float32), **options), given)
    with pytest.raises(EmulatorError, match=r"thread 63: reads 2 bytes outside every array(.|\n)*units_hopper\.cu:"):
        run("elements_into_a_call", given, np.zeros(64, np.float32), 1, **options)
