"""The tensor-core backward kernels, emulated, against the derivative of the plain formula; and seeded bugs."""

import functools
import zlib
from dataclasses import replace
from typing import Any

import gold_backward
import numpy as np
import pytest
from cases import CASES, Case, random_case
from cases_backward import make_call
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.backward import gradients, read
from emulator.forward import attention
from emulator.mutants import Mutant

from cuflash.backward_config import BackwardMmaConfig, why_not_backward_mma
from cuflash.backward_plan import why_not_backward_mma_by_default
from cuflash.config import MmaConfig
from cuflash.device import known_device
from cuflash.problem import Spec

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
SMALL = BackwardMmaConfig(b_r=32, b_c=32, warps=2, key_warps=1)
CONFIGS = (
    SMALL,
    BackwardMmaConfig(b_r=64, b_c=32, warps=4, key_warps=2, stages=1, swizzle=False, vector_adds=False),
    BackwardMmaConfig(b_r=32, b_c=64, warps=4, key_warps=4),
    BackwardMmaConfig(b_r=64, b_c=32, warps=4, key_warps=1, swizzle=False),
)
FLOAT = replace(SMALL, mma_k=8)
FLOAT_CONFIGS = (
    FLOAT,
    BackwardMmaConfig(32, 32, warps=4, key_warps=2, stages=1, swizzle=False, mma_k=8, vector_adds=False),
)
TURING = BackwardMmaConfig(32, 32, 2, 1, stages=1, mma_k=8, async_copy=False, vector_adds=False)
MANY_CONFIGS = (
    TURING,
    BackwardMmaConfig(b_r=64, b_c=64, warps=8, key_warps=2),
    BackwardMmaConfig(b_r=32, b_c=32, warps=1, key_warps=1),
    BackwardMmaConfig(b_r=128, b_c=32, warps=4, key_warps=2, stages=1),
)
BY_ID = {case.id: case for case in CASES}
SERVED = [case for case in CASES if case.dtype in ("float16", "bfloat16")]
# Every sixteenth case, and more of those about values: what the others vary is shared with the kernels on CUDA cores.
CHOSEN = [
    case for number, case in enumerate(SERVED) if number % 16 == 0 or (case.values != "normal" and number % 5 == 0)
]
CHOSEN += [case for case in CASES if case.dtype == "float32"][::40]
LARGE_SCORES = ("exact-hot-float32", "bias-large", "hot-float32", "exact-hot-float16-causal")
NOT_FOR_TF32 = ("infinite-key-float32", "denormal-float32-causal")


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def config_of(spec: Spec) -> BackwardMmaConfig:
    """One configuration for each Spec, so that each is compiled once."""
    configs = FLOAT_CONFIGS if spec.dtype == "float32" else CONFIGS
    return pick([config for config in configs if config.why_illegal(spec, H200) is None], spec)


def check(case: Case, config: BackwardMmaConfig | None = None, schedule: Schedule | None = None) -> None:
    call = make_call(case)
    config = config or config_of(read(call, case.options)[1].spec)
    results = gradients(call, case.options, config, schedule or pick(SCHEDULES, case.id))
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_mma_gradients_are_as_exact_as_the_rule_asks(case):
    check(case)


@pytest.mark.parametrize("id", LARGE_SCORES)
def test_mma_gradients_are_exact_with_the_forward_pass_of_the_family_where_sums_are_cut_off(id):
    case = BY_ID[id]
    call = make_call(case)
    inputs = {name: x for name, x in call.items() if name not in ("dout", "out", "lse", "dlse")}
    config, sums = (FLOAT if case.dtype == "float32" else SMALL), {"watched": False, "sum_bits": 24}
    out, lse = attention(inputs, case.options, MmaConfig(32, 32, warps=1, mma_k=config.mma_k), **sums)
    results = gradients(call | {"out": out, "lse": lse}, case.options, config, **sums)
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize("id", NOT_FOR_TF32)
def test_numbers_that_tf32_does_not_serve_are_left_to_the_cuda_cores(id):
    check(BY_ID[id], FLOAT)


@pytest.mark.parametrize("seed", range(2))
def test_mma_gradients_are_right_for_a_random_problem(seed):
    numbers = range(4000 + 100 * seed, 4100 + 100 * seed)
    case = next(case for number in numbers if (case := random_case(number)).dtype in ("float16", "bfloat16"))
    check(case, schedule=Schedule("random", True, resident=2, asynchronous="at_random", seed=seed))


@pytest.mark.parametrize(
    "config", MANY_CONFIGS, ids=lambda c: f"{c.b_r}x{c.b_c}-{c.key_warps}-of-{c.warps}-warps-k{c.mma_k}"
)
def test_mma_gradients_are_right_with_every_configuration(config):
    check(replace(BY_ID["d-59-to-111"], dtype="float16"), config)


@pytest.mark.parametrize("id", ["everything", "window-n-30x130"])
def test_bits_do_not_depend_on_the_schedule(id):
    case = replace(BY_ID[id], dtype="bfloat16")
    call = make_call(case)
    schedules = (*SCHEDULES, *(Schedule("random", True, resident=8, seed=seed) for seed in range(10, 16)))
    results = [gradients(call, case.options, SMALL, schedule) for schedule in schedules]
    assert len({b"".join(x.tobytes() for x in result) for result in results}) == 1


def test_gradients_of_a_row_and_of_a_head_do_not_depend_on_the_others():
    case = replace(BY_ID["n-65-causal"], dtype="bfloat16")
    call = make_call(case)
    whole = gradients(call, case.options, SMALL)
    other = {name: x.copy() for name, x in call.items()}
    other["dout"][:, :, :64] *= 100
    other["q"][:, 1] *= 2
    changed = gradients(other, case.options, SMALL)
    assert np.array_equal(whole[0][:, 0, 64:], changed[0][:, 0, 64:])
    assert not np.array_equal(whole[1][:, 0], changed[1][:, 0])


@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_there_are_default_tiles_wherever_tensor_cores_serve_a_dtype(device):
    gpu = known_device(device)
    for dtype in ("float16", "bfloat16", "float32"):
        served = why_not_backward_mma(Spec(dtype, 64, 64), gpu) is None
        assert served == (device != "sm_75" or dtype == "float16")
        has_room_for = 256 if dtype != "float32" and device != "sm_75" else 128
        for d in (16, 64, 80, 128, 192, 256):
            spec = Spec(dtype, d, d, mask=True, bias=dtype, softcap=True)
            if served and d <= has_room_for:
                assert why_not_backward_mma_by_default(spec, gpu) is None


# ---- seeded bugs ----

SIZED: dict[str, Any] = {"n": (70, 100), "d": (24, 40), "heads": (4, 2), "batch": (2,), "dtype": "float16"}
ONE_STAGE = replace(SMALL, stages=1, vector_adds=False)
SHARED_KEYS = replace(SMALL, b_r=64, warps=4, key_warps=2)
HOT: dict[str, Any] = SIZED | {"n": (40, 50), "dtype": "float32", "values": "exact-hot", "options": {"scale": 1.0}}
PROBLEMS = {
    "plain": (Case("backward-mma-plain", **SIZED), SMALL),
    "shared-keys": (Case("backward-mma-shared-keys", **SIZED), SHARED_KEYS),
    "one-stage": (Case("backward-mma-one-stage", **SIZED), ONE_STAGE),
    "causal": (Case("backward-mma-causal", **SIZED, options={"causal": True}), SMALL),
    "window": (Case("backward-mma-window", **SIZED, options={"window": (16, 4)}), SMALL),
    "softcap": (Case("backward-mma-softcap", **SIZED, bias="bhqk", options={"softcap": 1.5}), SMALL),
    "saturated": (
        Case(
            "backward-mma-saturated",
            **SIZED | {"dtype": "bfloat16", "values": "falling", "mask": "bhqk", "mask_kind": "late-keys"},
            options={"softcap": 1.0},
        ),
        SMALL,
    ),
    "float": (Case("backward-mma-float", **SIZED | {"dtype": "float32"}), FLOAT),
    "hot-float": (Case("backward-mma-hot", **HOT), FLOAT),
    "infinite": (Case("backward-mma-infinite", **SIZED | {"dtype": "float32"}, values="infinite-key"), FLOAT),
    "uneven": (Case("backward-mma-uneven", **SIZED | {"d": (80, 48)}), SHARED_KEYS),
    "few-keys": (Case("backward-mma-few-keys", **SIZED | {"n": (70, 3)}), SMALL),
    "denormal": (BY_ID["denormal-bfloat16"], SMALL),
    "denormal-one-by-one": (BY_ID["denormal-bfloat16"], ONE_STAGE),
}

KERNEL, ORDER, SCORES, PRODUCTS, SPLIT, TF32 = (
    "backward_mma.cu",
    "backward_mma_order.cuh",
    "backward_mma_scores.cuh",
    "backward_mma_products.cuh",
    "mma_tf32.cuh",
    "backward_mma_tf32.cuh",
)
MUTANTS = [
    # ---- copies and barriers ----
    Mutant("tiles-read-before-they-came", KERNEL, "wait_for_copies<0>();  // Q_i", "// Q_i", ("plain",)),
    Mutant(
        "no-barrier-before-a-step",
        *(KERNEL, "    __syncthreads();       // for every thread;", "    //", ("plain",)),
    ),
    Mutant(
        "no-barrier-before-tiles-are-replaced",
        *(KERNEL, "      __syncthreads();  // every warp is done with Q and dO", "      //", ("one-stage",)),
    ),
    Mutant(
        "warps-that-share-keys-do-not-meet",
        KERNEL,
        "bar_sync(1 + warp.index",
        "if (false) bar_sync(1",
        ("shared-keys",),
    ),
    Mutant("ds-in-one-place", "backward_mma_shared.cuh", "(1 + step % 2) * kPBytes", "kPBytes", ("plain",)),
    # ---- the order of sums ----
    Mutant("turn-not-waited-for", KERNEL, "    sums.take_turn(of, is_turn);\n", "", ("plain",)),
    Mutant("turn-never-ended", KERNEL, "  sums.end_turn();\n", "", ("plain",)),
    Mutant(
        "turn-ended-before-it-is-used",
        *(ORDER, "      added = count;", "      red_release_add(count, 1);", ("plain",)),
    ),
    Mutant("turn-of-another-warp", ORDER, "visit.tile) * kWarps + warp.index", "visit.tile) * kWarps", ("plain",)),
    Mutant("turn-of-the-arrays", ORDER, "(kLeft ? see.first_key(visit.tile * kBr) / kBc : 0)", "0", ("window",)),
    Mutant("first-sum-added", ORDER, "turn(visit) == 0", "false", ("plain",)),
    Mutant("small-vectors-by-red", ORDER, "|| largest_of(x) >= kLeastForRed", "|| true", ("denormal",)),
    Mutant("small-numbers-not-looked-for", ORDER, "dq, unit) >= kLeastForRed", "dq, unit) >= 0", ("denormal",)),
    Mutant("small-numbers-by-red", ORDER, "(x[e]) >= kLeastForRed", "(x[e]) >= 0", ("denormal-one-by-one",)),
    Mutant("sums-of-the-first-head", ORDER, "own.p.group + visit.head;", "own.p.group;", ("plain",)),
    # ---- fragments ----
    Mutant("columns-beyond-the-last", PRODUCTS, "kColumns / kPair % kWarpsAside == 0 ||", "true ||", ("uneven",)),
    Mutant("ds-not-transposed", PRODUCTS, "ldmatrix_x4_trans(a[i], ATile", "ldmatrix_x4(a[i], ATile", ("plain",)),
    Mutant("row-8-taken-for-row-0", SCORES, "lane.g + 8 * (e / 2)", "lane.g", ("causal",)),
    # ---- TF32 ----
    Mutant("small-parts-left-out", SPLIT, "mma_m16n8k8_tf32(sum[n][i], a[i].small, b[n].big);", "", ("float",)),
    Mutant("odd-rows-before-even-ones", TF32, "2 * lane.t + odd, place)", "2 * lane.t + 1 - odd, place)", ("float",)),
    Mutant("special-numbers-not-found", TF32, "if (found) *special = 1;", "", ("infinite",)),
    Mutant("lse-of-one-float", SCORES, "log_weight -= lse_low.x[e % 2];", "log_weight -= 0;", ("hot-float",)),
    # ---- weights ----
    Mutant("slope-forgotten", SCORES, "x = weights[e] * slope;", "x = weights[e];", ("softcap",)),
    Mutant(
        "slope-that-cancels",
        "arithmetic.cuh",
        "4 * per_sum * fminf(e * per_sum, 1)",
        "4 * per_sum * (1 - per_sum)",
        ("saturated",),
    ),
    Mutant("bias-of-a-row-that-is-not-there", SCORES, "min(row, see.query_length - 1)", "row", ("softcap",)),
    Mutant("weights-of-unseen-keys", SCORES, "          weights[e] = 0;\n", "", ("causal",)),
    Mutant("delta-left-out", SCORES, ", -scaled_delta[e % 2]);", ", 0);", ("plain",)),
    Mutant("unit-of-ds-left-in-dq", KERNEL, "dq, 1 / unit);", "dq, 1);", ("plain",)),
    Mutant("ds-out-of-range", KERNEL, "unit = unit_of_ds(own, at, rows, shared);", "unit = 0x1p14f;", ("few-keys",)),
]


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold_backward.Expected]:
    case, _ = PROBLEMS[name]
    call = make_call(case)
    return call, gold_backward.expect(**call, **case.options)


def complaint(name: str, texts: Any, schedule: Schedule) -> str | None:
    """What is wrong with the gradients by kernels made from `texts`; None where nothing is."""
    call, expected = problem(name)
    case, config = PROBLEMS[name]
    try:
        expected.check(*gradients(call, case.options, config, schedule, texts=texts))
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


CROWDED = Schedule("random", run_ahead=True, resident=16, asynchronous="at_last", seed=5)
JUDGES = (SCHEDULES[0], CROWDED, replace(CROWDED, run_ahead=False))


@pytest.mark.parametrize("name", PROBLEMS)
def test_mma_kernels_without_a_seeded_bug_pass(name):
    assert [complaint(name, None, schedule) for schedule in JUDGES] == [None] * len(JUDGES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_of_the_mma_kernels_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    found = (complaint(name, texts, schedule) for name in mutant.problems for schedule in JUDGES)
    assert any(found), "no problem shows the bug"
