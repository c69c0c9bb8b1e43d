"""The Hopper backward kernels, emulated on the CPU, against the derivative of the formula; and seeded bugs."""

import functools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gold_backward
import numpy as np
import pytest
from cases import CASES, Case, make_inputs, random_case
from cases_backward import make_call
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.backward import BLOCKS, gradients, read
from emulator.build import build
from emulator.forward import attention
from emulator.forward import read as read_forward
from emulator.launch import Array, launch
from emulator.mutants import Mutant
from emulator.mutants_backward_wgmma import ANY_ORDER, MORE_BLOCKS, MUTANTS, PROBLEMS

from cuflash import backward_launch
from cuflash.backward_config import BackwardWgmmaConfig
from cuflash.backward_plan import why_no_backward_maps
from cuflash.compiler import Variant
from cuflash.device import known_device
from cuflash.plan import wgmma_default
from cuflash.problem import Spec
from cuflash.tensor_maps import why_no_tensor_map

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
CONFIGS = (
    BackwardWgmmaConfig(64),
    BackwardWgmmaConfig(128),
    BackwardWgmmaConfig(64, k_stages=2, dq_stages=3),
    BackwardWgmmaConfig(64, 64),
)
ADVERSARIES = (
    *SCHEDULES,
    Schedule("reverse", asynchronous="at_last"),
    *(Schedule("random", True, resident=2 + seed % 2, asynchronous="at_random", seed=seed) for seed in range(4, 7)),
)
LEFT_OUT = ("d-40-16-bit", "d-96", "d-96-16-bit")  # others are much like these


@pytest.fixture(autouse=True)
def few_rows_are_enough_for_parts(monkeypatch):
    """Query heads that share keys are parted among tickets for small problems too."""
    monkeypatch.setattr(backward_launch, "LEAST_ROW_TILES_CAUSAL", 3)
    monkeypatch.setattr(backward_launch, "LEAST_ROW_TILES", 3)


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def configs_for(case: Case) -> tuple[Spec, list[BackwardWgmmaConfig]]:
    problem = read_forward(make_inputs(case), case.options)[1]
    if problem.is_empty(False) or why_no_tensor_map(problem, writes_out=False) or 0 in (problem.n_q, problem.n_k):
        return problem.spec, []
    return problem.spec, [config for config in CONFIGS if config.why_illegal(problem.spec, H200) is None]


def choose(cases: list[Case]) -> Iterator[tuple[Case, BackwardWgmmaConfig]]:
    """Of the cases that the kernels serve, the first of each Spec, half of those about values, an eighth of the others.

    Each Spec is tried in one 16-bit type and with one configuration, so that it is compiled once.
    """
    known: dict[Spec, tuple[Spec, int]] = {}
    for case in cases:
        if case.id in LEFT_OUT or case.dtype not in ("float16", "bfloat16"):
            continue
        spec, configs = configs_for(case)
        if configs:
            own, count = known.get(replace(spec, dtype="float16"), (spec, 0))
            known[replace(spec, dtype="float16")] = own, count + (own == spec)
            if own == spec and count % (8 if case.values == "normal" else 2) == 0:
                yield case, pick(configs, spec)


CHOSEN = list(choose(CASES))


def served_call(case: Case) -> dict[str, Any]:
    """The arrays of a call, with a dO that TMA reads."""
    call = make_call(case)
    problem = read(call, case.options)[1]
    if why_no_backward_maps(problem) or not problem.spec.aligned:
        call["dout"] = call["dout"].copy()
    return call


def check(case: Case, config: BackwardWgmmaConfig, schedule: Schedule | None = None, blocks: int = 2) -> None:
    call = served_call(case)
    schedule = schedule or pick(ADVERSARIES, case.id)
    results = gradients(call, case.options, config, schedule, blocks=blocks, return_dbias="bias" in call)
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize(("case", "config"), [pytest.param(*each, id=each[0].id) for each in CHOSEN])
def test_wgmma_gradients_are_as_exact_as_the_rule_asks(case, config):
    check(case, config)


def test_a_scale_too_small_for_float32_makes_all_weights_equal():
    case = Case("tiny", n=(70, 75), d=(16, 16), options={"scale": -1e-50, "causal": True})
    check(case, BackwardWgmmaConfig(64))


@pytest.mark.parametrize(("dtype", "b_c"), [("bfloat16", 128), ("float16", 128), ("bfloat16", 64)])
def test_gradients_that_one_row_gives_alone_are_as_exact_as_others(dtype, b_c):
    # A loss on one token: one or two keys make most of a block of dK, and what rounding their P did would be its error.
    for seed in range(3):
        case = Case(f"one-row-{seed}", n=(64, 128), d=(64, 64), heads=(4, 4), batch=(2,), dtype=dtype)
        call = served_call(case)
        call["dout"] = call["dout"].copy()
        call["dout"][..., :-1, :] = 0
        results = gradients(call, case.options, BackwardWgmmaConfig(64, b_c))
        gold_backward.expect(**call, **case.options).check(*results)


def test_a_block_of_few_numbers_is_as_exact_with_what_the_forward_pass_of_a_gpu_gives():
    # All columns of Q are equal, and so those of dK: 8 keys give 8 numbers, in which the rounding of O shows.
    case = next(case for case in CASES if case.id == "q-broadcast-columns")
    call, config = served_call(case), BackwardWgmmaConfig(128, k_stages=2)
    inputs = {name: call[name] for name in ("q", "k", "v")}
    spec = read_forward(inputs, case.options)[1].spec
    call["out"], call["lse"] = attention(inputs, case.options, wgmma_default(spec, H200))
    results = gradients(call, case.options, config)
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize("seed", range(2))
def test_wgmma_gradients_are_right_for_a_random_problem(seed):
    cases = [random_case(6000 + 100 * seed + number) for number in range(40)]
    case, config = next(choose([replace(case, views={}) for case in cases]))
    check(case, config, Schedule("random", True, resident=3, asynchronous="at_random", seed=seed), blocks=3)


@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, None)}], ids=["full", "causal", "left"])
def test_tickets_are_drawn_by_any_number_of_blocks(options, blocks):
    case = Case("drawn", n=(150, 200), d=(16, 16), heads=(4, 2), batch=(2,), dtype="bfloat16", options=options)
    schedule = Schedule("random", resident=3, asynchronous="at_random", seed=6)
    check(case, BackwardWgmmaConfig(64), schedule, blocks)


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2], ADVERSARIES[-1]], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_of_keys_that_no_row_sees_get_zeros(dtype, schedule):
    case = Case("unseen", n=(1, 900), d=(16, 16), heads=(1, 1), batch=(1,), dtype=dtype, options={"causal": "top-left"})
    check(case, BackwardWgmmaConfig(64, k_stages=2), schedule, blocks=1)


@pytest.mark.parametrize("id", ["plain", "causal", "window", "parts"])
def test_bits_do_not_depend_on_the_schedule(id):
    case, config = PROBLEMS[id]
    call = served_call(case)
    results = [
        gradients(call, case.options, config, each, blocks=1 + number % 4) for number, each in enumerate(ADVERSARIES)
    ]
    assert len({b"".join(x.tobytes() for x in result) for result in results}) == 1


@pytest.mark.parametrize("id", [*ANY_ORDER, "groups", "parts", "window", "half", "few-terms"])
def test_dq_alone_depends_on_the_schedule_where_its_sums_have_no_order(id):
    case, config = PROBLEMS[id]
    call = served_call(case)
    expected = gold_backward.expect(**call, **case.options)
    first = gradients(call, case.options, config)
    for number, schedule in enumerate(ADVERSARIES[zlib.crc32(id.encode()) % 3 :: 3]):
        results = gradients(call, case.options, config, schedule, blocks=2 + number, deterministic=False)
        expected.check(*results)
        for one, same in zip(first[1:], results[1:], strict=True):
            assert one.tobytes() == same.tobytes()


ORDERS = {"full": {}, "causal": {"causal": True}, "right": {"window": (None, 40)}, "left": {"window": (60, None)}}


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_a_batch_entry_alone_has_the_bits_that_it_has_among_others(options):
    case = Case("entries", n=(150, 200), d=(16, 16), heads=(6, 3), batch=(2,), dtype="bfloat16", options=options)
    config, call = BackwardWgmmaConfig(64), served_call(case)
    among_others = gradients(call, options, config, blocks=5)
    own = {name: np.ascontiguousarray(x[1:]) for name, x in call.items()}
    for one, all_of_them in zip(gradients(own, options, config, blocks=2), among_others, strict=True):
        assert one[0].tobytes() == all_of_them[1].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_of_a_head_do_not_depend_on_its_neighbours(dtype):
    case = Case("heads", n=(150, 280), d=(16, 16), heads=(6, 3), batch=(2,), dtype=dtype, options={"causal": True})
    config, call = BackwardWgmmaConfig(64), served_call(case)
    other = {name: x.copy() for name, x in call.items()}
    for name, x in other.items():
        x[:, [0, 2] if name in "kv" else [0, 1, 4, 5]] *= x.dtype.type(3)
    first, second = (gradients(each, case.options, config) for each in (call, other))
    for one, same, own in zip(first, second, (slice(2, 4), slice(1, 2), slice(1, 2)), strict=True):
        assert one[:, own].tobytes() == same[:, own].tobytes()
        assert one.tobytes() != same.tobytes()


def test_gradients_of_float16_do_not_leave_its_range_among_many_keys():
    case = Case("many-keys", n=(64, 6000), d=(16, 16), heads=(1, 1), batch=(1,), dtype="float16")
    call = make_call(case)
    call["dout"] = (call["dout"].astype(np.float32) * 2.0**-10).astype(np.float16)
    call["k"][...] = 0
    call.pop("dlse", None)
    call["lse"] = np.full_like(call["lse"], np.log(6000))
    call["out"] = np.broadcast_to(call["v"].astype(np.float32).mean(2, keepdims=True), call["out"].shape).astype("f2")
    results = gradients(call, case.options, BackwardWgmmaConfig(64))
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize(
    ("dtype", "b_c", "seeds"), [("float16", 128, (1, 3)), ("float16", 64, (14, 15)), ("bfloat16", 128, (5,))]
)
def test_key_tiles_that_no_row_sees_do_not_put_the_phases_of_v_out_of_step(dtype, b_c, seeds):
    # One block meets those of one head, and then the keys of the other that rows do see.
    case = Case(
        "unseen", n=(40, 650), d=(16, 16), heads=(2, 2), batch=(1,), dtype=dtype, options={"causal": "top-left"}
    )
    for seed in seeds:
        schedule = Schedule("random", True, resident=2, asynchronous="at_random", seed=seed)
        check(case, BackwardWgmmaConfig(64, b_c, k_stages=2), schedule, blocks=1)


KEEP_WEIGHTS = """#include "backward_wgmma.cu"
struct Floats {
  const float* in;
  float* out;
};
extern "C" __global__ void keep_weights(const __grid_constant__ Floats p) {
  const i32 first = threadIdx.x * kSRegisters;
  float x[kSRegisters];
  for (i32 i = 0; i < kSRegisters; ++i) x[i] = p.in[first + i];
  Weights kept;
  kept.cut_off_of(x);
  kept.round(x);
  for (i32 i = 0; i < kSRegisters; ++i) p.out[first + i] = kept.of_pair(i / 2).x[i % 2];
}
"""


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_weights_half_way_between_two_numbers_of_their_type_are_kept_as_others_are(dtype, bits):
    spec, config = Spec(dtype, 16, 16, aligned=True), BackwardWgmmaConfig(64)
    header = Variant("backward_wgmma", spec, config, "sm_90").header()
    kernel = build("keep_weights", header, {**kernel_texts(), "keep_weights.cu": KEEP_WEIGHTS}, optimized=False)
    unit = 2.0 ** -(1 + bits)  # from 1/2 to 1
    half_way = np.float32(0.5) + (np.arange(2**bits, dtype=np.float32) + np.float32(0.5)) * np.float32(unit)
    beside = half_way.view(np.int32)[:, None] + np.arange(-4, 4, dtype=np.int32)
    given = Array("in", beside.view(np.float32).reshape(-1))
    kept = Array("out", np.empty_like(given.values), writes="once")
    params = np.array([given.address, kept.address], np.uint64).tobytes()
    launch(kernel, grid=1, threads=given.values.size * 2 // config.b_r, params=params, arrays=[given, kept])
    assert np.abs(kept.values - given.values).max() <= unit / 128


# ---- seeded bugs ----


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold_backward.Expected]:
    case, _ = PROBLEMS[name]
    call = served_call(case)
    return call, gold_backward.expect(**call, **case.options)


def complaint(name: str, texts: Any, schedule: Schedule) -> str | None:
    """What is wrong with the gradients by kernels made from `texts`; None where nothing is."""
    call, expected = problem(name)
    case, config = PROBLEMS[name]
    try:
        how = {"deterministic": name not in ANY_ORDER, "blocks": MORE_BLOCKS.get(name, BLOCKS)}
        expected.check(*gradients(call, case.options, config, schedule, texts=texts, **how))
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_wgmma_kernels_without_a_seeded_bug_pass(name):
    assert complaint(name, None, SCHEDULES[0]) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_of_the_wgmma_kernels_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    assert any(complaint(name, texts, schedule) for name in mutant.problems for schedule in ADVERSARIES), (
        "nothing shows it"
    )
