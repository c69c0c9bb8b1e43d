"""Forward kernels, emulated on the CPU, against the plain formula; and seeded bugs, which these tests must find."""

import functools
import zlib
from typing import Any

import gold
import numpy as np
import pytest
from cases import CASES, Case, make_inputs, random_case
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.forward import attention, read
from emulator.mutants import MUTANTS, PROBLEMS, Mutant

from cuflash.config import SimtConfig
from cuflash.device import known_device
from cuflash.problem import Spec

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
CONFIGS = (
    SimtConfig(b_r=32, b_c=32, threads=64, lanes_per_row=8),
    SimtConfig(b_r=32, b_c=64, threads=64, lanes_per_row=8),
    SimtConfig(b_r=64, b_c=32, threads=64, lanes_per_row=8),
    SimtConfig(b_r=32, b_c=32, threads=128, lanes_per_row=16),
)
MANY_CONFIGS = (
    SimtConfig(b_r=16, b_c=16, threads=32, lanes_per_row=16),
    SimtConfig(b_r=8, b_c=4, threads=32, lanes_per_row=4),
    SimtConfig(b_r=64, b_c=8, threads=64, lanes_per_row=4),
    SimtConfig(b_r=16, b_c=128, threads=128, lanes_per_row=8),
    SimtConfig(b_r=64, b_c=64, threads=512, lanes_per_row=8),
    SimtConfig(b_r=128, b_c=32, threads=256, lanes_per_row=16),
)
SMALL = SimtConfig(b_r=16, b_c=16, threads=64, lanes_per_row=8)
BY_ID = {case.id: case for case in CASES}


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def config_of(spec: Spec) -> SimtConfig:
    """One configuration for each Spec, so that each is compiled once."""
    return pick([config for config in CONFIGS if config.why_illegal(spec, H200) is None], spec)


def check(case: Case, config: SimtConfig | None = None, schedule: Schedule | None = None) -> None:
    inputs = make_inputs(case)
    config = config or config_of(read(inputs, case.options)[1].spec)
    out, lse = attention(inputs, case.options, config, schedule or pick(SCHEDULES, case.id))
    gold.check(out, lse, **inputs, **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_simt_kernel_is_as_exact_as_the_rule_asks(case):
    check(case)


@pytest.mark.parametrize("seed", range(8))
def test_simt_kernel_is_right_for_a_random_problem(seed):
    check(random_case(1000 + seed), schedule=Schedule("random", True, resident=2, asynchronous="at_random", seed=seed))


@pytest.mark.parametrize(
    "config", MANY_CONFIGS, ids=lambda c: f"{c.b_r}x{c.b_c}-{c.threads}-threads-{c.lanes_per_row}-lanes"
)
@pytest.mark.parametrize("id", ["everything", "d-111-16-bit"])
def test_simt_kernel_is_right_with_every_configuration(id, config):
    check(BY_ID[id], config)


@pytest.mark.parametrize("id", ["everything", "n-129x65-causal", "window-n-30x130"])
def test_bits_do_not_depend_on_the_schedule(id):
    case = BY_ID[id]
    inputs = make_inputs(case)
    schedules = (*SCHEDULES, *(Schedule("random", True, resident=4, seed=seed) for seed in range(10, 15)))
    results = [attention(inputs, case.options, CONFIGS[0], schedule) for schedule in schedules]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1


def test_log_sum_exp_is_written_only_if_wanted():
    case = BY_ID["n-65"]
    inputs = make_inputs(case)
    out, lse = attention(inputs, case.options, CONFIGS[0], want_lse=False)
    assert lse is None
    gold.check(out, None, **inputs)


@pytest.mark.parametrize("view", ["rows apart", "heads inside rows", "rows backwards", "unaligned"])
def test_output_may_have_any_strides_along_rows_and_heads(view):
    case = Case(f"out-{view}", n=(40, 33), d=(24, 24), heads=(2, 2), batch=(2,), dtype="float32")
    base: Any = np.empty((2, 2, 80, 40), np.float32)
    out = {
        "rows apart": base[:, :, ::2, 4:28],
        "heads inside rows": np.empty((2, 40, 2, 24), np.float32).swapaxes(1, 2),
        "rows backwards": base[:, :, 39::-1, :24],
        "unaligned": base[:, :, :40, 1:25],
    }[view]
    inputs = make_inputs(case)
    result, lse = attention(inputs, {}, CONFIGS[0], out=out)
    assert result.strides == out.strides
    gold.check(result, lse, **inputs)


def test_bits_of_a_row_do_not_depend_on_the_other_rows():
    case = BY_ID["n-65-causal"]
    inputs = make_inputs(case)
    whole, _ = attention(inputs, case.options, SMALL)
    other = inputs | {"q": inputs["q"].copy()}
    other["q"][:, :, :64] *= 100
    changed, _ = attention(other, case.options, SMALL)
    assert np.array_equal(whole[:, :, 64:], changed[:, :, 64:])


# ---- seeded bugs ----


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold.Expected]:
    case = PROBLEMS[name]
    inputs = make_inputs(case)
    return inputs, gold.expect(**inputs, **case.options)


def complaint(name: str, texts: Any, schedule: Schedule) -> str | None:
    """What is wrong with the result of a kernel made from `texts`; None where nothing is."""
    inputs, expected = problem(name)
    try:
        out, lse = attention(inputs, PROBLEMS[name].options, SMALL, schedule, texts=texts)
        expected.check(out, lse)
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernel_without_a_seeded_bug_passes(name):
    assert complaint(name, None, SCHEDULES[0]) is None


def test_seeded_bug_that_no_longer_applies_is_an_error():
    stale = Mutant("stale", "softmax.cuh", "no such text", "", ())
    with pytest.raises(LookupError, match=r"stale must apply to softmax\.cuh 1 times, found 0"):
        stale.texts(kernel_texts())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    found = [complaint(name, texts, SCHEDULES[0]) for name in mutant.problems]
    assert any(found), "no problem shows the bug"


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if "barrier" in mutant.id], ids=lambda mutant: mutant.id
)
def test_missing_barrier_of_the_kernel_is_found_under_every_schedule(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    for schedule in SCHEDULES:
        report = complaint("plain", texts, schedule)
        assert report is not None
        assert "barrier" in report or "nothing was written" in report
