"""The emulator itself: right kernels get right results under every schedule, wrong ones are found and told apart."""

import functools
import re
import struct
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import (
    SCHEDULES,
    Array,
    EmulatorError,
    Kernel,
    Schedule,
    Statistics,
    build,
    kernel_texts,
    launch,
    why_no_emulator,
)
from emulator.values import floats, sum_error

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

EMULATOR = Path(__file__).parent / "emulator"
UNITS = {"units.cu": (EMULATOR / "units.cu").read_text()}
ORDERS: tuple[Any, ...] = ("forward", "reverse")
TIMES: tuple[Any, ...] = ("at_issue", "at_last", "at_random")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
each_time = pytest.mark.parametrize("schedule", [Schedule(asynchronous=time, seed=3) for time in TIMES], ids=str)


@functools.cache
def unit(name: str) -> Kernel:
    return build("units", texts=UNITS, kernel=name)


def launch_unit(
    name: str,
    given: Any,
    result: Any,
    n: int = 0,
    *,
    threads: int = 128,
    grid: int | tuple[int, ...] = 1,
    shared_bytes: int = 4096,
    schedule: Schedule = SCHEDULES[0],
    watched: bool = True,
    writes: Any = "once",
    sum_bits: int = 0,
) -> tuple[Any, Statistics]:
    """Run a kernel of units.cu on the array `given`; the array that it fills, shaped as `result`, and what it did."""
    arrays = Array("in", given), Array("out", result, writes)
    params = struct.pack("<2Qi4x", arrays[0].address, arrays[1].address, n)
    statistics = launch(
        unit(name),
        **{"grid": grid, "threads": threads, "params": params, "arrays": arrays, "shared_bytes": shared_bytes},
        **{"schedule": schedule, "watched": watched, "sum_bits": sum_bits},
    )
    return arrays[1].values, statistics


def run(name: str, given: Any, result: Any, n: int = 0, **options: Any) -> Any:
    return launch_unit(name, given, result, n, **options)[0]


def exchanged(given: Any, distance: int) -> Any:
    """What each of the threads of a block finds in the box of the thread at `distance`."""
    return given[np.arange(given.size) ^ distance]


# ---- barriers and shared memory ----


@each_schedule
def test_barrier_lets_every_thread_see_what_the_others_wrote(schedule):
    given = floats(5 * 128)
    assert np.array_equal(run("exchange_with_barrier", given, given, grid=5, schedule=schedule), exchanged(given, 32))


@each_schedule
def test_warp_barrier_lets_lanes_see_what_the_others_wrote(schedule):
    given = floats(128)
    assert np.array_equal(run("exchange_with_warp_barrier", given, given, schedule=schedule), exchanged(given, 1))


@each_schedule
def test_shared_memory_can_be_reused_after_a_barrier(schedule):
    given = floats(256)
    expected = np.concatenate([exchanged(given[:128], 32), exchanged(given[128:], 64)])
    assert np.array_equal(run("exchange_twice", given, given, 128, schedule=schedule), expected)


def test_neighbours_may_write_the_halves_of_one_word():
    given = np.random.default_rng(7).integers(0, 1 << 16, 128, np.uint16)
    assert np.array_equal(run("halves_of_a_word", given, given), given)


@each_schedule
@pytest.mark.parametrize(
    "name",
    ["exchange_without_barrier", "exchange_with_too_small_a_barrier", "exchange_with_shuffle_for_barrier"],
)
def test_missing_barrier_is_reported_with_both_lines(name, schedule):
    with pytest.raises(EmulatorError) as raised:
        run(name, floats(128), floats(128), schedule=schedule)
    report = str(raised.value)
    assert "to which nothing was written" in report or "without a barrier between" in report
    assert set(re.findall(r"at units\.cu:(\d+)", report)) <= lines_of("box[threadIdx.x")


def lines_of(text: str) -> set[str]:
    return {str(number) for number, line in enumerate(UNITS["units.cu"].splitlines(), 1) if text in line}


@each_schedule
def test_overwriting_what_others_may_still_read_is_reported(schedule):
    with pytest.raises(EmulatorError, match=r"shared memory at offset .* without a barrier between"):
        run("exchange_twice_without_barrier_between", floats(256), floats(256), 128, schedule=schedule)


@pytest.mark.parametrize("name", ["exchange_without_barrier", "exchange_twice_without_barrier_between"])
def test_missing_barrier_changes_numbers_under_some_schedule_even_unwatched(name):
    given = floats(256)
    blocks = 2 if name == "exchange_without_barrier" else 1
    expected = np.concatenate([exchanged(given[:128], 32), exchanged(given[128:], 32 if blocks == 2 else 64)])
    options = {"grid": blocks, "watched": False}
    results = [run(name, given, given, 128, schedule=schedule, **options) for schedule in SCHEDULES]
    assert not all(np.array_equal(result, expected) for result in results)


def test_what_was_never_written_is_poison():
    values = run("exchange_without_barrier", floats(128), floats(128), watched=False)
    assert np.isnan(values[:32]).all()


def test_shared_memory_ends_where_the_launch_says():
    with pytest.raises(EmulatorError, match=r"thread 127: writes 4 bytes at offset 512 of 512 bytes of shared memory"):
        run("beyond_shared_memory", floats(1), floats(1), shared_bytes=512)


def test_shared_memory_starts_at_its_base():
    with pytest.raises(EmulatorError, match="thread 0: reads 4 bytes at offset -4 of 512 bytes of shared memory"):
        run("before_shared_memory", floats(1), floats(128), shared_bytes=512)


# ---- who waits for whom ----


@each_schedule
def test_lanes_in_different_shuffles_diverge(schedule):
    with pytest.raises(EmulatorError, match=r"lanes of one warp diverge: __shfl_sync .* here, __shfl_sync .*"):
        run("lanes_in_different_shuffles", floats(1), floats(128), schedule=schedule)


@each_schedule
def test_shuffle_with_a_lane_that_left_is_reported(schedule):
    with pytest.raises(EmulatorError, match=r"left the kernel|leaves the kernel while lanes of its warp wait for it"):
        run("lane_that_left", floats(1), floats(128), schedule=schedule)


@each_schedule
def test_halves_of_a_warp_may_shuffle_on_their_own(schedule):
    assert np.array_equal(
        run("half_a_warp", floats(1), np.zeros(128, np.int32), schedule=schedule), np.arange(128) // 16 * 16
    )


def test_lane_must_be_in_its_own_mask():
    with pytest.raises(EmulatorError, match="lacks the lane itself"):
        run("lane_outside_the_mask", floats(1), np.zeros(128, np.int32), schedule=Schedule("reverse"))


def test_lane_may_not_read_from_one_outside_the_mask():
    with pytest.raises(EmulatorError, match="reads from lane 16, which takes no part"):
        run("source_outside_the_mask", floats(1), np.zeros(128, np.int32))


@each_schedule
def test_threads_at_different_barriers_are_reported(schedule):
    with pytest.raises(EmulatorError, match="threads of one block wait at different barriers"):
        run("different_barriers", floats(1), floats(1), schedule=schedule)


@each_schedule
def test_deadlock_tells_who_waits_where(schedule):
    with pytest.raises(EmulatorError, match="deadlock: no thread can go on") as raised:
        run("barrier_against_shuffle", floats(1), floats(1), schedule=schedule)
    report = str(raised.value)
    assert "64 threads, 0 to 111, wait in barrier 0, where 64 of 128 threads are, at units.cu:" in report
    assert "64 threads, 16 to 127, wait in __shfl_sync at units.cu:" in report


@each_schedule
def test_barrier_is_for_those_that_have_not_left(schedule):
    assert run("barrier_of_those_left", floats(1), np.zeros(32, np.int32), schedule=schedule).all()


@each_schedule
@pytest.mark.parametrize("odd", [[0, 1] * 64, [1] * 128, [0] * 128], ids=["some", "all", "none"])
def test_barriers_count_the_threads_that_say_yes(odd, schedule):
    given = np.array(odd, np.int32)
    counts, some, every = run("barriers_that_count", given, np.zeros((3, 128), np.int32), schedule=schedule)
    assert set(counts) == {sum(odd)}
    assert set(some) == {int(any(odd))}
    assert set(every) == {int(all(odd))}


@each_schedule
def test_named_barrier_hands_over_from_those_that_arrive_to_those_that_wait(schedule):
    given = floats(128)
    assert np.array_equal(run("named_barrier", given, floats(64), schedule=schedule), given[64:])


@each_schedule
@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("named_barrier_without_arrival", "wait in barrier 1, where 64 of 128 threads are, at units.cu:"),
        ("named_barrier_of_another_size", r"barrier 1 is for \d+ threads at units.cu:\d+ and for \d+ at units.cu:"),
        ("other_named_barrier", "wait in barrier 1, where 64 of 128 threads are, at units.cu:"),
    ],
    ids=["without arrival", "of another size", "other barrier"],
)
def test_wrong_use_of_named_barriers_is_reported(name, report, schedule):
    with pytest.raises(EmulatorError, match=report):
        run(name, floats(128), floats(64), schedule=schedule)


def test_trap_names_block_thread_and_line():
    line = lines_of("__trap()").pop()
    with pytest.raises(EmulatorError, match=rf"block \(0, 0, 0\) thread 7: trap at units\.cu:{line}"):
        run("trapped", floats(1), floats(1))


def last_thread(schedule: Schedule, grid: int = 1) -> int:
    """The thread that ran last."""
    result = run("order_of_threads", floats(1), np.zeros(1, np.int32), schedule=schedule, writes="any", grid=grid)
    return int(result[0])


def test_schedules_run_threads_in_different_orders():
    last = {str(schedule): last_thread(schedule) for schedule in SCHEDULES}
    assert last["forward-at_last"] == 127
    assert last["reverse-ahead-at_issue"] == 0
    assert len(set(last.values())) > 2


def test_same_seed_gives_the_same_schedule():
    schedule = Schedule("random", run_ahead=True, resident=3, seed=5)
    assert len({last_thread(schedule, grid=9) for _ in range(3)}) == 1


# ---- device memory ----


@pytest.mark.parametrize("n", [1, 1000, -1, 1 << 28])
def test_reading_outside_an_array_is_reported(n):
    with pytest.raises(EmulatorError, match=r"thread \d+: reads 4 bytes outside every array at units\.cu:"):
        run("reads_beyond", floats(128), floats(128), n)


def test_report_tells_how_far_outside_an_access_is():
    with pytest.raises(EmulatorError, match=r"thread 127: writes .*; the nearest is out, of 512 bytes, at byte 512"):
        run("writes_beyond", floats(1), floats(128), 1)


def test_null_is_no_array():
    with pytest.raises(EmulatorError, match="thread 0: reads 4 bytes outside every array"):
        run("nothing_there", floats(1), floats(128))


def test_writing_to_an_input_is_reported():
    with pytest.raises(EmulatorError, match="writes to in at byte 0"):
        run("writes_to_input", floats(128), floats(128))


def test_writing_an_output_twice_is_reported():
    with pytest.raises(EmulatorError, match="thread 1: writes a second time to out at byte 0"):
        run("writes_twice", floats(128), floats(128))


def test_writing_between_the_elements_of_an_array_is_reported():
    wide = np.zeros((128, 2), np.float32)
    with pytest.raises(EmulatorError, match="writes between the elements of out"):
        run("exchange_with_barrier", floats(128), wide[:, 0])


@pytest.mark.parametrize("n", [0, 1])
def test_vectors_must_lie_at_multiples_of_their_size(n):
    given = floats(132)
    if n == 0:
        assert np.array_equal(run("misaligned", given, floats(128), n, threads=32), given[:128])
        return
    with pytest.raises(EmulatorError, match="reads 16 bytes at an address that is no multiple of 16"):
        run("misaligned", given, floats(128), n, threads=32)


def test_constants_of_the_kernel_may_be_read():
    assert np.array_equal(run("constants", floats(1), np.zeros(128, np.int32), 1), np.tile([3, 1, 4, 1], 32))


def test_arrays_keep_their_strides_and_poison_lies_between_their_elements():
    view = floats(6, 8)[::-2, 1::3]
    array = Array("x", view)
    assert array.values.strides == view.strides
    assert np.array_equal(array.values, view)
    neighbours = np.lib.stride_tricks.as_strided(array.values[:, :-1], (3, 2, 2), (*view.strides, 4))
    assert np.isnan(neighbours[..., 1]).all()


# ---- warps ----


@each_schedule
def test_shuffles_move_values_as_cuda_does(schedule):
    given = floats(64)
    result = run("shuffles", given, floats(6, 64), threads=64, schedule=schedule)
    lane = np.arange(64) % 32
    first = np.arange(64) - lane
    sources = [
        np.full(64, 3),
        lane // 8 * 8 + (lane + 5) % 8,
        lane ^ 16,
        np.where((lane ^ 9) // 16 > lane // 16, lane, lane ^ 9),
        np.where(lane < 3, lane, lane - 3),
        np.where(lane % 4 + 2 >= 4, lane, lane + 2),
    ]
    assert np.array_equal(result, np.stack([given[first + source] for source in sources]))


def test_shuffles_move_64_bits():
    given = floats(32).astype(np.float64) / 3
    assert np.array_equal(run("shuffle_of_doubles", given, given, threads=32), exchanged(given, 1))


def test_votes_count_every_lane():
    odd = np.random.default_rng(7).integers(0, 2, 32, np.int32)
    ballot, some, every = run("votes", odd, np.zeros((3, 32), np.uint32), threads=32)
    assert set(ballot) == {sum(1 << i for i in range(32) if odd[i])}
    assert set(some) == {1}
    assert set(every) == {0}


def test_every_block_of_a_grid_runs_once_and_knows_its_place():
    grid = (3, 2, 2)
    result = run("indices", floats(1), np.zeros((12, 32, 9), np.uint32), threads=32, grid=grid, schedule=SCHEDULES[2])
    for block in range(12):
        place = (block % 3, block // 3 % 2, block // 6)
        for thread in range(32):
            assert tuple(result[block, thread]) == (thread, 0, *place, 32, *grid)


# ---- cp.async ----


def copied(given: Any, bytes_read: int) -> Any:
    result = given.copy()
    result.reshape(-1, 4)[:, bytes_read // 4 :] = 0
    return result


@each_time
@pytest.mark.parametrize(("name", "bytes_read"), [("copies", 16), ("copies_of_12_bytes", 12), ("copies_of_nothing", 0)])
def test_copies_arrive_when_they_are_waited_for(name, bytes_read, schedule):
    given = floats(5 * 64 * 4)
    assert np.array_equal(run(name, given, given, 5, threads=64, schedule=schedule), copied(given, bytes_read))


WRONG_COPIES = {
    "copies_without_wait": "without a barrier between|has not waited for",
    "copies_with_too_weak_a_wait": "has not waited for",
    "copies_without_barrier_after_wait": "has not waited for|without a barrier between|nothing was written",
    "copies_without_barrier_at_end": "has not waited for|without a barrier between",
    "copy_left_alone": r"leaves the kernel without waiting for its cp\.async issued at units\.cu",
    "copy_from_outside": "reads 16 bytes outside every array",
}


@each_time
@pytest.mark.parametrize("name", WRONG_COPIES)
def test_wrong_copies_are_reported(name, schedule):
    given = floats(5 * 64 * 4)
    with pytest.raises(EmulatorError, match=WRONG_COPIES[name]):
        run(name, given, given, 5, threads=64, schedule=schedule)


@pytest.mark.parametrize("name", [name for name in WRONG_COPIES if name.startswith("copies") and "after" not in name])
def test_wrong_copies_change_numbers_under_some_schedule_even_unwatched(name):
    given = floats(5 * 64 * 4)
    schedules = [Schedule(order, True, asynchronous=time) for order, time in product(ORDERS, TIMES)]

    def is_right(schedule: Schedule) -> bool:
        try:
            return np.array_equal(run(name, given, given, 5, threads=64, schedule=schedule, watched=False), given)
        except EmulatorError:
            return False

    assert not all(map(is_right, schedules))


# ---- ldmatrix and mma.sync ----


def test_ldmatrix_hands_out_matrices_and_their_transposes():
    given = np.random.default_rng(7).integers(0, 1 << 16, (16, 16), np.uint16)
    words = run("matrices", given, np.zeros((8, 32), np.uint32), threads=32)
    parts = [given[:8, :8], given[8:, :8], given[:8, 8:], given[8:, 8:]]
    order = product((False, True), range(4))
    for word, (transposed, part) in zip(words, order, strict=True):
        matrix = parts[part].T if transposed else parts[part]
        assert np.array_equal(np.ascontiguousarray(word).view(np.uint16).reshape(8, 8), matrix)


@pytest.mark.parametrize(
    ("name", "k", "rounded"),
    [
        ("m16n8k16_f16", 16, lambda x: x.astype(np.float16)),
        ("m16n8k16_bf16", 16, lambda x: x.astype(ml_dtypes.bfloat16)),
        ("m16n8k8_f16", 8, lambda x: x.astype(np.float16)),
        ("m16n8k8_tf32", 8, lambda x: tf32(x, away=True)),
        ("m16n8k8_tf32_of_floats", 8, lambda x: tf32(x, away=False)),
    ],
)
def test_mma_multiplies_matrices(name, k, rounded):
    a, b, d = floats(16, k, seed=1), floats(8, k, seed=2), floats(16, 8, seed=3)
    result, statistics = launch_unit(name, np.concatenate([a.ravel(), b.ravel(), d.ravel()]), d, threads=32)
    a, b = rounded(a).astype(np.float64), rounded(b).astype(np.float64)
    assert (abs(result - (d + a @ b.T)) <= sum_error(k, abs(d) + abs(a) @ abs(b.T))).all()
    assert statistics.multiplications == 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("sum_bits", "before", "term", "terms", "expected"),
    [
        (24, 1, 2**-24, 16, 1),  # each is cut off
        (26, 1, 2**-24, 16, 1 + 2**-20),
        (26, 2**-12, 1, 1, 1 + 2**-12),  # the largest is a product
        (26, 1, 1.75 * 2**-23, 1, 1 + 2**-23),  # the sum is cut off
        (0, 1, 1.75 * 2**-23, 1, 1 + 2**-22),
        (24, 0, 0, 16, 0),
        (24, np.inf, 1, 16, np.inf),
        (24, 1, np.inf, 1, np.inf),
    ],
)
def test_tensor_cores_cut_off_what_they_add(sum_bits, before, term, terms, expected, sign):
    a, b, d = (np.zeros(shape, np.float32) for shape in ((16, 16), (8, 16), (16, 8)))
    a[:, :terms], b[:, :terms], d[...] = sign * term * 2**12, 2**-12, sign * before
    given = np.concatenate([a.ravel(), b.ravel(), d.ravel()])
    result, _ = launch_unit("m16n8k16_f16", given, d, threads=32, sum_bits=sum_bits)
    assert (result == sign * expected).all()


# ---- numbers ----


def tf32(x: Any, away: bool) -> Any:
    """Rounded to nearest, ties away from zero, or with the lower bits cut off."""
    bits = x.view(np.uint32) + np.uint32(0x1000 if away else 0)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def converted(name: str, given: Any, dtype: Any) -> Any:
    return run(name, given, np.zeros(given.size, dtype), threads=1024, grid=given.size // 1024)


@functools.cache
def all_kinds_of_floats() -> Any:
    """Random bits, the neighbourhood of every float16, and what is special."""
    with np.errstate(all="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        near = [(halves + np.uint32(step)).view(np.float32) for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0xFFFFFFFF)]
    bits = np.random.default_rng(7).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    return np.concatenate([bits, *near])


def same(result: Any, expected: Any) -> bool:
    """Equal in value and sign, or NaN in both."""
    nan = np.isnan(expected)
    if not np.array_equal(np.isnan(result), nan):
        return False
    result, expected = result[~nan], expected[~nan]
    return np.array_equal(result, expected) and np.array_equal(np.signbit(result), np.signbit(expected))


def test_every_float16_becomes_the_same_float():
    given = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert same(converted("f16_to_float", given, np.float32), given.astype(np.float32))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast", "ignore:invalid value encountered in cast")
def test_floats_are_rounded_to_float16():
    given = all_kinds_of_floats()
    assert same(converted("float_to_f16", given, np.float16), given.astype(np.float16))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast", "ignore:invalid value encountered in cast")
@pytest.mark.parametrize(("name", "dtype"), [("floats_to_f16", np.float16), ("floats_to_bf16", ml_dtypes.bfloat16)])
def test_pairs_of_floats_are_packed_low_half_first(name, dtype):
    given = all_kinds_of_floats()
    pairs = converted(name, given, np.uint32).view(dtype).reshape(-1, 2)
    assert same(pairs[:, 0].astype(np.float32), given.astype(dtype).astype(np.float32))
    assert same(pairs[:, 1].astype(np.float32), (-given).astype(dtype).astype(np.float32))


def test_floats_are_rounded_to_tf32():
    given = all_kinds_of_floats()
    given = given[: given.size // 1024 * 1024]
    result = converted("float_to_tf32", given, np.float32)
    finite = np.isfinite(given)
    assert same(result[~finite], given[~finite])
    assert np.array_equal(result[finite], tf32(given[finite], away=True))


def test_approximations_flush_what_is_too_small():
    given = np.full(1024, -126.5, np.float32)
    given[:4] = [-3, -126, np.inf, -np.inf]
    assert same(converted("power_of_two", given, np.float32)[:5], np.float32([0.125, 2.0**-126, np.inf, 0, 0]))
    given[:5] = [4, -np.inf, 1e-40, 2.0**127, np.nan]
    assert same(converted("reciprocal", given, np.float32)[:5], np.float32([0.25, -0.0, np.inf, 0, np.nan]))


# ---- the two headers ----

DECLARATION = re.compile(r"__device__ __forceinline__ (?P<type>[\w:]+) (?P<name>\w+)\((?P<parameters>[^{;]*)\) \{")
SITE = re.compile(r",? *emulator::Site site = emulator::here\(\)")


def declarations(text: str) -> set[tuple[str, str, str]]:
    """Return type, name and parameters of every function of a header."""
    found = DECLARATION.finditer(text.replace("\n", " "))
    return {(f["type"].replace("int", "i32"), f["name"], SITE.sub("", f["parameters"])) for f in found}


def test_every_function_of_the_gpu_header_has_a_twin():
    gpu, twin = (declarations(text) for text in (kernel_texts()["ptx.cuh"], (EMULATOR / "ptx.cuh").read_text()))
    assert gpu
    assert gpu - twin == set()


def test_every_function_of_the_gpu_header_is_used_by_a_kernel():
    header, *others = sorted(kernel_texts(), key=lambda name: name != "ptx.cuh")
    used = set(re.findall(r"\w+", "".join(kernel_texts()[name] for name in others)))
    names = {name for _, name, _ in declarations(kernel_texts()[header])}
    assert "ldmatrix_x4" in names & used
    assert names - used == set()


def test_every_type_and_macro_of_the_gpu_header_has_a_twin():
    declared = re.compile(r"^(?:using (\w+) =|struct (\w+) |#define (\w+)\()", re.MULTILINE)
    twin_text = (EMULATOR / "ptx.cuh").read_text() + (EMULATOR / "emulator.h").read_text()
    gpu, twin = (
        {"".join(names) for names in declared.findall(text)} for text in (kernel_texts()["ptx.cuh"], twin_text)
    )
    assert {"u32", "half_t", "DYNAMIC_SMEM"} <= gpu
    assert gpu - twin == set()


def test_inline_assembly_stands_in_one_header_only():
    assert [name for name, text in kernel_texts().items() if re.search(r"\basm\b", text)] == ["ptx.cuh"]
