"""The backward pass on emulated CUDA cores, against the derivative of the formula; and seeded bugs, which must show."""

import functools
import zlib
from typing import Any

import gold_backward
import numpy as np
import pytest
from cases import CASES, Case, random_case
from cases_backward import make_call
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.backward import gradients, read
from emulator.mutants import Mutant
from emulator.mutants_backward import MUTANTS, PROBLEMS

from cuflash.backward_config import BackwardSimtConfig
from cuflash.device import known_device
from cuflash.problem import Spec

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
CONFIGS = (
    BackwardSimtConfig(32, 32, threads=64, lanes_per_row=8),
    BackwardSimtConfig(64, 32, threads=64, lanes_per_row=8),
    BackwardSimtConfig(32, 64, threads=64, lanes_per_row=8, both_tiles=False),
    BackwardSimtConfig(32, 32, threads=128, lanes_per_row=16),
)
MANY_CONFIGS = (
    BackwardSimtConfig(16, 16, threads=32, lanes_per_row=16),
    BackwardSimtConfig(8, 8, threads=32, lanes_per_row=4, both_tiles=False),
    BackwardSimtConfig(8, 16, threads=64, lanes_per_row=8),
    BackwardSimtConfig(128, 16, threads=64, lanes_per_row=8, both_tiles=False),
    BackwardSimtConfig(16, 64, threads=128, lanes_per_row=8),
    BackwardSimtConfig(64, 64, threads=256, lanes_per_row=16),
)
SMALL = BackwardSimtConfig(16, 16, threads=64, lanes_per_row=8)
BY_ID = {case.id: case for case in CASES}


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def config_of(spec: Spec) -> BackwardSimtConfig:
    """One configuration for each Spec, so that each is compiled once."""
    return pick([config for config in CONFIGS if config.why_illegal(spec, H200) is None], spec)


def check(case: Case, config: BackwardSimtConfig | None = None, schedule: Schedule | None = None) -> None:
    call = make_call(case)
    config = config or config_of(read(call, case.options)[1].spec)
    results = gradients(
        call,
        case.options,
        config,
        schedule or pick(SCHEDULES, case.id),
        return_dbias="bias" in call,
        watched=pick((True, False, False), case.id),  # which takes three times as long, and depends little on the case
    )
    gold_backward.expect(**call, **case.options).check(*results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_simt_gradients_are_as_exact_as_the_rule_asks(case):
    check(case)


@pytest.mark.parametrize("seed", range(8))
def test_simt_gradients_are_right_for_a_random_problem(seed):
    check(random_case(2000 + seed), schedule=Schedule("random", True, resident=2, asynchronous="at_random", seed=seed))


@pytest.mark.parametrize(
    "config",
    MANY_CONFIGS,
    ids=lambda c: f"{c.b_r}x{c.b_c}-{c.threads}-threads-{c.lanes_per_row}-lanes-{1 + c.both_tiles}-tiles",
)
def test_simt_gradients_are_right_with_every_configuration(config):
    check(BY_ID["everything"], config)


def test_bits_do_not_depend_on_the_schedule():
    case = BY_ID["everything"]
    call = make_call(case)
    schedules = (*SCHEDULES, *(Schedule("random", True, resident=4, seed=seed) for seed in range(10, 13)))
    results = [
        gradients(call, case.options, CONFIGS[0], schedule, return_dbias="bias" in call) for schedule in schedules
    ]
    assert len({b"".join(x.tobytes() for x in result) for result in results}) == 1


def test_gradients_of_a_row_and_of_a_head_do_not_depend_on_the_others():
    case = BY_ID["n-65-causal"]
    call = make_call(case)
    whole = gradients(call, case.options, SMALL)
    other = {name: x.copy() for name, x in call.items()}
    other["dout"][:, :, :64] *= 100
    other["q"][:, 1] *= 2
    changed = gradients(other, case.options, SMALL)
    assert np.array_equal(whole[0][:, 0, 64:], changed[0][:, 0, 64:])
    assert not np.array_equal(whole[1][:, 0], changed[1][:, 0])
    same = gradients(call | {"q": other["q"]}, case.options, SMALL)
    assert all(np.array_equal(one[:, 0], two[:, 0]) for one, two in zip(whole, same, strict=True))


# ---- seeded bugs ----


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold_backward.Expected]:
    call = make_call(PROBLEMS[name])
    if name == "backward-dead-bias-rows":  # what dO holds there must not reach dQ
        call["dout"] = np.where((call["lse"] == -np.inf)[..., None], np.float32(np.nan), call["dout"])
    return call, gold_backward.expect(**call, **PROBLEMS[name].options)


def complaint(name: str, texts: Any, schedule: Schedule) -> str | None:
    """What is wrong with the gradients by kernels made from `texts`; None where nothing is."""
    call, expected = problem(name)
    try:
        results = gradients(call, PROBLEMS[name].options, SMALL, schedule, texts=texts, return_dbias="bias" in call)
        expected.check(*results)
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_without_a_seeded_bug_pass(name):
    assert complaint(name, None, SCHEDULES[0]) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    found = [complaint(name, texts, SCHEDULES[0]) for name in mutant.problems]
    assert any(found), "no problem shows the bug"
