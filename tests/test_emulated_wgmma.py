"""The Hopper forward kernel, emulated on the CPU, against the plain formula; and seeded bugs, which must be found."""

import functools
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gold
import numpy as np
import pytest
from cases import CASES, Case, make_inputs, random_case
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.forward import attention, read
from emulator.mutants import Mutant
from emulator.mutants_wgmma import MUTANTS, PROBLEMS

from cuflash.config import WgmmaConfig
from cuflash.device import known_device
from cuflash.problem import Problem, Spec
from cuflash.tensor_maps import why_no_tensor_map

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
CONFIGS = (
    WgmmaConfig(consumers=2, b_c=64),
    WgmmaConfig(consumers=1, b_c=32, stages=1, ping_pong=False),
    WgmmaConfig(consumers=3, b_c=48, q_stages=2, speculative=False),
    WgmmaConfig(consumers=2, b_c=80, stages=3, ping_pong=False),
)
MORE_CONFIGS = (
    WgmmaConfig(consumers=4, b_c=16, stages=3),
    WgmmaConfig(consumers=2, b_c=176, stages=1, q_stages=2),
    WgmmaConfig(consumers=1, b_c=128, stages=2, q_stages=3, ping_pong=False, speculative=False),
)
SMALL = WgmmaConfig(consumers=2, b_c=32)
ADVERSARIES = (
    *SCHEDULES,
    Schedule("reverse", asynchronous="at_last"),
    *(Schedule("random", True, resident=2 + seed % 2, asynchronous="at_random", seed=seed) for seed in range(4, 7)),
)
LEFT_OUT = ("d-40-16-bit", "d-96", "d-96-16-bit", "d-160-16-bit", "d-192", "d-192-16-bit")  # others are much like these


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def problem_of(case: Case) -> Problem:
    return read(make_inputs(case), case.options)[1]


def configs_for(problem: Problem) -> list[WgmmaConfig]:
    if problem.is_empty(True) or why_no_tensor_map(problem):
        return []
    return [config for config in CONFIGS if config.why_illegal(problem.spec, H200) is None]


def choose(cases: list[Case]) -> Iterator[tuple[Case, WgmmaConfig]]:
    """Of the cases that the kernel serves, the first of each Spec, half of those about values, an eighth of the others.

    Each Spec is tried in one 16-bit type and with one configuration, so that it is compiled once.
    """
    known: dict[Spec, tuple[Spec, int]] = {}
    for case in cases:
        if (
            case.id not in LEFT_OUT
            and case.dtype in ("float16", "bfloat16")
            and (configs := configs_for(problem := problem_of(case)))
        ):
            spec = problem.spec
            own, count = known.get(replace(spec, dtype="float16"), (spec, 0))
            known[replace(spec, dtype="float16")] = own, count + (own == spec)
            if own == spec and count % (8 if case.values == "normal" else 2) == 0:
                yield case, pick(configs, spec)


CHOSEN = list(choose(CASES))


def check(case: Case, config: WgmmaConfig, schedule: Schedule | None = None, blocks: int = 2) -> None:
    inputs = make_inputs(case)
    out, lse = attention(inputs, case.options, config, schedule or pick(ADVERSARIES, case.id), blocks=blocks)
    gold.check(out, lse, **inputs, **case.options)


@pytest.mark.parametrize(("case", "config"), [pytest.param(*each, id=each[0].id) for each in CHOSEN])
def test_wgmma_kernel_is_as_exact_as_the_rule_asks(case, config):
    check(case, config)


@pytest.mark.parametrize("seed", range(2))
def test_wgmma_kernel_is_right_for_a_random_problem(seed):
    cases = [random_case(5000 + 100 * seed + number) for number in range(40)]
    case, config = next(choose([replace(case, views={}) for case in cases]))
    check(case, config, Schedule("random", True, resident=3, asynchronous="at_random", seed=seed), blocks=3)


@pytest.mark.parametrize("config", MORE_CONFIGS, ids=str)
def test_wgmma_kernel_is_right_with_other_configurations(config):
    check(Case("configured", n=(300, 220), d=(16, 32), dtype="bfloat16", options={"causal": True}), config)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_tiles_are_shared_out_among_any_number_of_blocks(blocks):
    case = Case("shared", n=(150, 100), heads=(4, 2), batch=(2,))
    check(case, SMALL, Schedule("random", resident=3, asynchronous="at_random", seed=6), blocks)


@pytest.mark.parametrize("want_lse", [True, False], ids=["lse", "no-lse"])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 0, 1)], ids=str)
def test_result_is_written_where_it_lies_by_several_launches(axes, want_lse):
    # batch axes that do not merge: K and V have no first one, and of O all axes but the last lie in any order
    case = Case(
        "launches", n=(70, 33), d=(16, 24), heads=(4, 2), batch=(3, 2), kv_batch=(1, 2), options={"causal": True}
    )
    inputs = make_inputs(case)
    _, problem = read(inputs, case.options)
    lying = np.zeros([problem.out_shape[axis] + 1 for axis in axes] + [32], np.float16)
    out = lying.transpose(*np.argsort(axes), 4)[1:, :-1, 1:, :-1, 8:]
    result, lse = attention(inputs, case.options, SMALL, ADVERSARIES[-1], out=out, want_lse=want_lse)
    assert result.strides == out.strides
    gold.check(result, lse, **inputs, **case.options)


@pytest.mark.parametrize("id", ["window", "lengths", "soaring"])
def test_bits_do_not_depend_on_the_schedule(id):
    case, config = PROBLEMS[id]
    inputs = make_inputs(case)
    schedules = list(enumerate(ADVERSARIES))
    results = [attention(inputs, case.options, config, each, blocks=2 + number % 2) for number, each in schedules]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1


def test_bits_of_a_row_do_not_depend_on_the_other_rows():
    case, config = PROBLEMS["rising"]
    inputs = make_inputs(case)
    whole, _ = attention(inputs, case.options, config)
    other = inputs | {"q": inputs["q"].copy()}
    other["q"][:, :, 1::2] *= -3
    other["q"][:, :, 2::16] = np.inf
    changed, _ = attention(other, case.options, config)
    same = np.arange(case.n[0]) % 2 == 0
    same[2::16] = False
    assert np.array_equal(whole[:, :, same], changed[:, :, same])


# ---- biases ----

THREE = WgmmaConfig(consumers=3, b_c=48, q_stages=2, speculative=False)
ALONE = WgmmaConfig(consumers=1, b_c=32, stages=1, ping_pong=False)
LENGTHS: dict[str, Any] = {"q_lengths": (150, 70), "kv_lengths": (35, 99)}


def biased(bias: str, config: WgmmaConfig = SMALL, n_k: int = 99, dtype: str | None = None, **others: Any) -> Any:
    """A case of several tiles, the last ones not full, with a bias of the axes `bias`; and its configuration."""
    name = f"wgmma-bias-{bias}-{'-'.join(map(str, others.values()))}"
    sizes: dict[str, Any] = {"n": (150, n_k), "d": (16, 16), "heads": (4, 2), "batch": (2,), "dtype": "bfloat16"}
    return Case(name, **sizes, bias=bias, bias_dtype=dtype, **others), config


EVERYTHING: dict[str, Any] = {"softcap": 5.0, "window": (40, 20), "scale": -0.3}
BIASED = {
    "of keys": biased("---k", dtype="float32"),
    "of keys and heads": biased("-h-k", options={"causal": True}),
    "of keys and batches": biased("b--k", THREE, dtype="float32"),
    "of all but rows": biased("bh-k", ALONE, options={"causal": "top-left"}),
    "of heads alone": biased("-h--", ALONE),
    "of dead keys": biased("---k", bias_kind="dead-columns"),
    "of late keys": biased("-h-k", bias_kind="late-keys"),
    "of keys, infinite": biased("-h-k", bias_kind="infinite"),
    "of keys, large": biased("-h-k", values="zero-queries", bias_kind="large", dtype="float32"),
    "of keys backwards": biased("-h-k", views={"bias": "reversed"}),
    "of every second key": biased(
        "bh-k", replace(SMALL, stages=3), dtype="float32", views={"bias": "every-second-column"}
    ),
    "of keys, window": biased("-h-k", options={"causal": True, "window": (30, 0)}),
    "of keys, lengths": biased("bh-k", replace(SMALL, q_stages=2), **LENGTHS),
    "of keys, everything": biased("bh-k", dtype="float32", mask="--qk", options=EVERYTHING, **LENGTHS),
    "of rows, pairs": biased("bhqk", n_k=98),
    "of rows, float pairs": biased("-hqk", THREE, n_k=98, dtype="float32"),
    "of rows, odd": biased("bhqk", options={"causal": True}),
    "of rows, odd start": biased("bhqk", replace(SMALL, speculative=False), n_k=98, views={"bias": "odd-offset"}),
    "of rows, every second key": biased("-hqk", dtype="float32", views={"bias": "every-second-column"}),
    "of rows, many blocks": biased("bhqk", WgmmaConfig(consumers=2, b_c=176), n_k=400),
    "of rows alone": biased("bhq-"),
    "of rows, lengths": biased("bhqk", **LENGTHS),
}


@pytest.mark.parametrize("name", BIASED)
def test_bias_is_read_where_it_lies_and_nowhere_else(name):
    case, config = BIASED[name]
    assert problem_of(case).spec.bias_of_keys == (not name.startswith("of rows"))
    for schedule in ADVERSARIES[0], pick(ADVERSARIES[1:], name):
        check(case, config, schedule)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, stages=1), THREE], ids=["two", "one", "three"])
def test_bits_do_not_depend_on_when_the_bias_comes(config):
    inputs = make_inputs(case := replace(PROBLEMS["bias-of-keys"][0], values="falling"))
    results = [attention(inputs, case.options, config, each) for each in ADVERSARIES]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1


@pytest.mark.parametrize("pattern", ["-h-k", "-hqk"])
@pytest.mark.parametrize("steps", [[0, 20, 60, 0, 15], [0, 105, 0, 20, 105], [0, 400, 0, 130]], ids=str)
def test_scores_that_climb_by_their_bias_are_exact(steps, pattern):
    # as `climb`, but the bias climbs; lost scores are worked out again with it
    inputs = climb(np.dtype("bfloat16"), [0] * len(steps), n_q=70)
    climbing = np.repeat(np.cumsum(steps)[::-1], 32) * np.log(2)
    bias = np.broadcast_to(climbing, (1, 1, 1 if pattern == "-h-k" else 70, 32 * len(steps))).astype(np.float32)
    for schedule in ADVERSARIES[0], pick(ADVERSARIES[1:], steps):
        out, lse = attention(inputs | {"bias": bias}, {"scale": 1.0}, SMALL, schedule)
        gold.check(out, lse, **inputs, bias=bias, scale=1.0)


# ---- references that are guessed: each tile of keys scores higher than those before it ----


def climb(dtype: Any, steps: list[float], n_q: int = 70) -> dict[str, Any]:
    """Inputs of 32 keys a tile; in the order of the kernel, tile t scores the sum of `steps[: t + 1]`, in log2 units.

    Every third row scores the opposite, every fifth a half of it.
    """
    rng = np.random.default_rng(11)
    n_k = 32 * len(steps)
    q, k = rng.standard_normal((1, 1, n_q, 16)) * 0.1, rng.standard_normal((1, 1, n_k, 16)) * 0.1
    q[..., 0] = 1
    q[..., ::3, 0] = -1
    q[..., ::5, 0] /= 2
    k[..., 0] = np.repeat(np.cumsum(steps)[::-1], 32) * np.log(2)
    v = rng.standard_normal((1, 1, n_k, 16))
    return {name: x.astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}


CLIMBS = {
    "just below what is noticed": [0, 9, 0, 0, 0],
    "a little": [0, 12, 12, 12, 12, 12, 12],
    "as far as float16 goes": [0, 15, 0, 15, 0, 15, 0],
    "often": [0, *[20] * 9],
    "nearly too far": [0, 95, 95, 0],
    "so far that scores are lost": [0, 105, 0, 20, 105],
    "beyond the range of float": [0, 130, 0, 400, 0],
    "far": [0, 5000, 5000, 0, 3000],
    "from far below": [-6000, 100, 5900, 30],
    "down": [0, -100, -3000, 0],
    "up and down": [0, 60, -60, 70, -200, 300, 0],
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("how", CLIMBS)
def test_rows_whose_scores_climb_are_exact(how, dtype):
    inputs = climb(np.dtype(dtype), CLIMBS[how])
    for schedule in ADVERSARIES[0], pick(ADVERSARIES[1:], how):
        out, lse = attention(inputs, {"scale": 1.0}, SMALL, schedule)
        gold.check(out, lse, **inputs, scale=1.0)


def test_trust_in_a_reference_is_not_won_by_the_repair_of_another_row():
    # Row 0 sees its first finite scores in a tile of which it sees a part, where row 8 is repaired; half a unit more
    # score in the next tile then has to move its reference, as it would alone.
    inputs = climb(np.dtype("float16"), [0] * 8, n_q=64)
    bias = np.zeros((1, 1, 64, 256), np.float32)
    bias[..., 0, 96:] = -np.inf
    bias[..., 0, 32:64] = 0.5
    results = []
    for jump in 0, 20:
        bias[..., 8, 64:96] = jump
        out, lse = attention(inputs | {"bias": bias}, {"window": (160, 0)}, SMALL)
        gold.check(out, lse, **inputs, bias=bias, window=(160, 0))
        results.append((out[..., :8, :], lse[..., :8]))
    assert all(np.array_equal(calm, beside_a_jump) for calm, beside_a_jump in zip(*results, strict=True))


# How scores change over eight tiles of 32 keys, in log2 units, in the order of the kernel: what they gain before a
# tile and, at an even pace, within it; and the first key, in that order, that a row sees.
KINDS = {
    "flat": ([0] * 8, [0] * 8, 0),
    "drifting": ([0.5] * 8, [0] * 8, 0),
    "rising": ([20] * 8, [0] * 8, 0),
    "repaired once": ([0, 0, 20, 0, 1, 1, 0, 0], [0] * 8, 0),
    "overflowing": ([0, 0, 130, 0, 1, 1, 0, 0], [0] * 8, 0),
    "rising at first": ([0, *[0.5] * 7], [20, *[0] * 7], 0),
    "steep": ([0] * 8, [80] * 8, 0),
    "steep at last": ([0, 0.5, 0, 0, 0, 0.5, 0, 0.5], [0, 0, -80, 80, 0, 0, 0, 0], 0),
    "hidden": ([0.5] * 8, [0] * 8, 5 * 32 - 8),
    "half hidden": ([0.5] * 8, [0] * 8, 16),
}


def mixed_rows() -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Inputs of 64 rows, the same in each head but for their kinds; and for each head its name and the kinds.

    First, for each kind, a head of nothing else, then for each two kinds one where rows are of either.
    """
    rng, keys = np.random.default_rng(15), np.arange(256)
    profiles = []
    for before, within, hidden in KINDS.values():
        starts = np.cumsum(before) + np.cumsum([0, *within[:-1]])
        profile = np.repeat(starts, 32) + np.repeat(within, 32) * (keys % 32) / 32
        profiles.append(np.where(keys < hidden, -np.inf, profile)[::-1] * np.log(2))
    pure = [(name, np.full(64, number)) for number, name in enumerate(KINDS)]
    pairs = itertools.combinations(range(len(KINDS)), 2)
    mixed = [(f"{a}-{b}", np.where(rng.random(64) < 0.5, a, b)) for a, b in pairs]
    kinds = np.stack([of_rows for _, of_rows in pure + mixed])
    q, k, v = (rng.standard_normal((1, 1, n, 16)).astype(np.float16) for n in (64, 256, 256))
    q = np.broadcast_to(q, (1, len(kinds), 64, 16)).copy()
    bias = np.stack(profiles).astype(np.float32)[kinds][None]
    return {"q": q, "k": k, "v": v, "bias": bias}, pure + mixed


def kinds_that_depend_on_others(texts: Any = None) -> set[str]:
    """Pairs of kinds of which rows have other bits beside each other than among their own kind."""
    inputs, heads = mixed_rows()
    out, lse = attention(inputs, {"scale": 0.1}, ALONE, texts=texts)
    rows = np.arange(64)
    return {
        name
        for head, (name, kinds) in enumerate(heads)
        if not np.array_equal(out[0, head], out[0, kinds, rows])
        or not np.array_equal(lse[0, head], lse[0, kinds, rows])
    }


def test_rows_that_differ_in_trust_are_exact_side_by_side():
    inputs, _ = mixed_rows()
    gold.check(*attention(inputs, {"scale": 0.1}, ALONE, ADVERSARIES[-1]), **inputs, scale=0.1)


def test_trust_of_a_row_does_not_depend_on_the_other_rows():
    assert kinds_that_depend_on_others() == set()


VOTES = {
    "settled-where-some-may-yet-trust": ("repairs_left[0] > 0 || repairs_left[1] > 0", "trusts(0) || trusts(1)"),
    "settled-where-one-is": (
        "!__any_sync(0xffffffff, repairs_left[0] > 0",
        "!__all_sync(0xffffffff, repairs_left[0] > 0",
    ),
    "decided-where-some-may-yet-trust": ("__any_sync(0xffffffff, may_yet", "__all_sync(0xffffffff, may_yet"),
    "trust-lost-to-a-late-rise": ("whole & may_yet_trust(r) &", "whole &"),
}


@pytest.mark.parametrize("id", VOTES)
def test_seeded_bug_that_makes_trust_depend_on_other_rows_is_found(id):
    bug = Mutant(id, "wgmma_softmax.cuh", *VOTES[id], ())
    assert kinds_that_depend_on_others(bug.texts(kernel_texts()))


def test_a_row_wins_no_trust_where_it_rises_steeply_within_its_first_tile():
    inputs, heads = mixed_rows()
    results = [
        attention(inputs, {"scale": 0.1}, replace(ALONE, speculative=speculative))[0][0]
        for speculative in (True, False)
    ]
    as_by_maxima = {name for (name, _), *of_head in zip(heads, *results, strict=True) if np.array_equal(*of_head)}
    assert "steep" in as_by_maxima
    assert as_by_maxima.isdisjoint({"drifting", "repaired once", "half hidden", "rising at first"})


@pytest.mark.parametrize("scale", [1e-50, -1e-50])
def test_a_scale_too_small_for_float32_makes_all_weights_equal(scale):
    case = Case(f"wgmma-tiny-{scale}", n=(70, 75), d=(16, 16), options={"scale": scale, "causal": True})
    inputs = make_inputs(case)
    gold.check(*attention(inputs, case.options, SMALL), **inputs, **case.options)


@pytest.mark.parametrize("d", [13, 72])
def test_scores_that_were_lost_are_of_the_right_head_batch_entry_and_columns(d):
    rng = np.random.default_rng(14)
    shapes = {"q": (2, 4, 70, 128), "k": (2, 2, 75, 128), "v": (2, 2, 75, 16)}
    whole = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    inputs = {name: x[..., :d] if name != "v" else x for name, x in whole.items()}  # NaN follows each row
    for name in "q", "k":
        whole[name][..., d:] = np.nan
    inputs["k"][..., :43, :] *= 200
    out, lse = attention(inputs, {"scale": -1.0}, SMALL)
    gold.check(out, lse, **inputs, scale=-1.0)


# ---- dominant keys ----


def hot(number: int) -> Case:
    """Scores in which a few keys, or one, take nearly all the weight of a row."""
    return Case(f"wgmma-wild-{number}", n=(130, 160), d=(64, 64), heads=(2, 1), values="hot", options={"scale": 4.0})


def late_key(dtype: Any, n_q: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of three tiles of 32 keys, and the options.

    In the order of the kernel, one key of the upper half of the first tile scores 0, and one of the second takes
    nearly all, with a weight that, measured from 0, would be rounded by nearly half a unit of `dtype`.
    """
    rng = np.random.default_rng(12)
    weight = 128 * (1 + 0.95 * gold.EPSILON[dtype.name] / 2)
    q, k, v = np.zeros((1, 1, n_q, 16)), np.zeros((1, 1, 96, 16)), rng.standard_normal((1, 1, 96, 64))
    q[..., 0], k[..., 0] = 1, -4
    k[..., 88, 0], k[..., 40, 0] = 0, 1
    return {name: x.astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}, {"scale": float(np.log(weight))}


SPECULATIVE = pytest.mark.parametrize("speculative", [True, False], ids=["speculative", "true-maximum"])
SIXTEEN_BIT = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@SPECULATIVE
@pytest.mark.parametrize("number", range(8))
def test_dominant_keys_are_as_exact_as_the_rule_asks(number, speculative):
    check(hot(number), replace(SMALL, speculative=speculative))


@SPECULATIVE
@SIXTEEN_BIT
def test_late_dominant_key_is_not_rounded(dtype, speculative):
    inputs, options = late_key(np.dtype(dtype))
    out, lse = attention(inputs, options, replace(SMALL, speculative=speculative))
    gold.check(out, lse, **inputs, **options)


def key_that_alone_makes_o(dtype: Any, weight: float) -> dict[str, Any]:
    """Inputs of three tiles of 32 keys: one key of the first scores 0, where V is 0, and one of the second more.

    Measured from 0, that has `weight`, rounded by nearly half a unit of `dtype`. Its row of V is such that O is nearly
    a number of `dtype`.
    """
    epsilon = gold.EPSILON[dtype.name]
    weight += 0.95 * 2 ** np.floor(np.log2(weight)) * epsilon / 2
    values = np.arange(1, 2, epsilon)
    out = values * weight / (1 + weight)
    score, v = np.full(96, -60.0), np.zeros((1, 1, 96, 16))
    score[84], score[40] = 0, np.log2(weight)
    v[..., 40, :] = values[np.argsort(np.abs(out.astype(dtype).astype(float) / out - 1))[:16]]
    bias = np.broadcast_to((score * np.log(2)).astype(np.float32), (1, 1, 64, 96))
    return {
        "q": np.zeros((1, 1, 64, 16), dtype),
        "k": np.zeros((1, 1, 96, 16), dtype),
        "v": v.astype(dtype),
        "bias": bias,
    }


@SPECULATIVE
@SIXTEEN_BIT
@pytest.mark.parametrize("weight", [1.25, 1.5, 2.5, 20.0])
def test_key_that_alone_makes_o_is_off_by_no_more_than_its_weight_is_rounded(weight, dtype, speculative):
    inputs = key_that_alone_makes_o(np.dtype(dtype), weight)
    expected = gold.expect(**inputs)
    out, lse = attention(inputs, {}, replace(SMALL, speculative=speculative))
    if speculative and weight < 2:  # docs/exactness.md: the one case that breaks the rule
        assert np.abs(out.astype(float) / expected.out - 1).max() <= gold.EPSILON[dtype]
    else:
        expected.check(out, lse)


@SIXTEEN_BIT
def test_late_dominant_key_would_be_rounded_if_weights_were_bounded_by_their_range_alone(dtype):
    bug = Mutant("by-range-alone", "wgmma_softmax.cuh", "kMostOfSum = 2", "kMostOfSum = 1e30f", ())
    alone = key_that_alone_makes_o(np.dtype(dtype), 20.0)
    for inputs, options in (late_key(np.dtype(dtype)), (alone, {})):
        out, lse = attention(inputs, options, SMALL, texts=bug.texts(kernel_texts()))
        with pytest.raises(AssertionError):
            gold.check(out, lse, **inputs, **options)


# ---- seeded bugs ----


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold.Expected]:
    case, _ = PROBLEMS[name]
    inputs = make_inputs(case)
    return inputs, gold.expect(**inputs, **case.options)


def complaint(name: str, texts: Any, schedule: Schedule) -> str | None:
    """What is wrong with the result of a kernel made from `texts`; None where nothing is."""
    inputs, expected = problem(name)
    case, config = PROBLEMS[name]
    try:
        expected.check(*attention(inputs, case.options, config, schedule, texts=texts))
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_wgmma_kernel_without_a_seeded_bug_passes(name):
    assert complaint(name, None, SCHEDULES[0]) is None


@pytest.mark.parametrize("schedule", ADVERSARIES[1:], ids=str)
@pytest.mark.parametrize("name", ["passing-over", "two-ends"])
def test_lanes_of_a_warp_that_lag_behind_the_others_are_waited_for(name, schedule):
    assert complaint(name, None, schedule) is None


def test_seeded_bug_of_which_a_part_no_longer_applies_is_an_error():
    stale = Mutant("stale", "wgmma_ring.cuh", "u32 parity = 0;", "", (), also=(("no such text", ""),))
    with pytest.raises(LookupError, match=r"stale must apply to wgmma_ring\.cuh 1 times, found 0 of 'no such text'"):
        stale.texts(kernel_texts())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_of_the_wgmma_kernel_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    assert any(complaint(name, texts, schedule) for name in mutant.problems for schedule in ADVERSARIES), (
        "nothing shows it"
    )
