"""The tensor-core forward kernel, emulated, against the plain formula; and seeded bugs, which must be found."""

import functools
import zlib
from dataclasses import replace
from typing import Any

import gold
import numpy as np
import pytest
from cases import CASES, Case, make_inputs, random_case
from emulator import SCHEDULES, EmulatorError, Schedule, kernel_texts, why_no_emulator
from emulator.forward import attention, read
from emulator.mutants import Mutant

from cuflash.config import MmaConfig, why_not_mma
from cuflash.device import known_device
from cuflash.problem import Spec

pytestmark = pytest.mark.skipif(why_no_emulator() is not None, reason=str(why_no_emulator()))

H200 = known_device("sm_90")
CONFIGS = (
    MmaConfig(b_r=32, b_c=32, warps=2, stages=2),
    MmaConfig(b_r=64, b_c=16, warps=2, stages=3, swizzle=True),
    MmaConfig(b_r=32, b_c=32, warps=1, stages=2, tile_sums=True),
    MmaConfig(b_r=32, b_c=32, warps=2, stages=1, q_in_registers=True, swizzle=True),
    MmaConfig(b_r=32, b_c=32, warps=1, stages=1, mma_k=8, async_copy=False),  # the form of sm_75
    MmaConfig(b_r=32, b_c=16, warps=2, stages=2, mma_k=8),
    MmaConfig(b_r=32, b_c=32, warps=1, stages=1, mma_k=8, swizzle=True),
)
SMALL = MmaConfig(b_r=32, b_c=32, warps=1, stages=2)
PACKED = replace(SMALL, pack_gqa=True)
KERNEL, TILES, PRODUCTS, SOFTMAX = "forward_mma.cu", "mma_tile.cuh", "mma_products.cuh", "mma_softmax.cuh"
FRAGMENTS, TF32 = "mma_fragments.cuh", "mma_tf32.cuh"
BY_ID = {case.id: case for case in CASES}
SERVED = [case for case in CASES if case.dtype != "float64"]
# Every eighth case, and more of those about values: what the others vary is shared with the kernel on CUDA cores.
CHOSEN = [
    case for number, case in enumerate(SERVED) if number % 8 == 0 or (case.values != "normal" and number % 3 == 0)
]


def pick(choices: Any, key: Any) -> Any:
    """One of the choices, for the same key always the same."""
    return choices[zlib.crc32(str(key).encode()) % len(choices)]


def config_of(spec: Spec) -> MmaConfig:
    """One configuration for each Spec, so that each is compiled once."""
    return pick([config for config in CONFIGS if config.why_illegal(spec, H200) is None], spec)


def check(case: Case, config: MmaConfig | None = None, schedule: Schedule | None = None) -> None:
    inputs = make_inputs(case)
    config = config or config_of(read(inputs, case.options)[1].spec)
    out, lse = attention(inputs, case.options, config, schedule or pick(SCHEDULES, case.id))
    gold.check(out, lse, **inputs, **case.options)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_mma_kernel_is_as_exact_as_the_rule_asks(case):
    check(case)


@pytest.mark.parametrize("seed", range(3))
def test_mma_kernel_is_right_for_a_random_problem(seed):
    case = next(case for number in range(100) if (case := random_case(3000 + 100 * seed + number)).dtype != "float64")
    check(case, schedule=Schedule("random", True, resident=2, asynchronous="at_random", seed=seed))


@pytest.mark.parametrize(
    "config", CONFIGS[:5], ids=lambda c: f"{c.b_r}x{c.b_c}-stages-{c.stages}-k{c.mma_k}-sums-{c.tile_sums}"
)
@pytest.mark.parametrize("id", ["d-59-to-111"])
def test_mma_kernel_is_right_with_every_configuration(id, config):
    check(replace(BY_ID[id], dtype="float16"), config)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "id", ["heads-6-over-2", "heads-16-over-1", "mask-of-one-head-of-a-group", "lengths-window-bnhd"]
)
def test_heads_of_a_group_can_share_a_tile(id, dtype):
    check(replace(BY_ID[id], dtype=dtype), replace(PACKED, mma_k=8 if dtype == "float32" else 16))


def test_bits_do_not_depend_on_the_schedule():
    case = BY_ID["everything"]
    inputs = make_inputs(case)
    schedules = (*SCHEDULES, *(Schedule("random", True, resident=4, seed=seed) for seed in range(10, 13)))
    results = [attention(inputs, case.options, SMALL, schedule) for schedule in schedules]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(dtype):
    case = replace(BY_ID["n-65-causal"], dtype=dtype)
    config = replace(SMALL, mma_k=8 if dtype == "float32" else 16)
    inputs = make_inputs(case)
    whole, _ = attention(inputs, case.options, config)
    other = inputs | {"q": inputs["q"].copy()}
    other["q"][:, :, :64:2] *= 100
    other["q"][:, :, 1:64:2] = np.inf
    changed, _ = attention(other, case.options, config)
    assert np.array_equal(whole[:, :, 64:], changed[:, :, 64:])


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e9])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_huge_scale_leaves_the_largest_score_alone(scale, dtype):
    case = Case(f"huge-{scale}", n=(33, 70), d=(16, 16), dtype=dtype, options={"scale": scale})
    inputs = make_inputs(case)
    out, _ = attention(inputs, case.options, replace(SMALL, mma_k=8 if dtype == "float32" else 16))
    scores = np.sign(scale) * np.matmul(inputs["q"].astype(float), inputs["k"].astype(float).swapaxes(-1, -2))
    best = np.take_along_axis(inputs["v"], scores.argmax(axis=-1)[..., None], axis=-2)
    np.testing.assert_allclose(out.astype(float), best.astype(float), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-50, -1e-50])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_scale_too_small_for_float32_makes_all_weights_equal(scale, dtype):
    case = Case(f"tiny-{scale}", n=(33, 70), d=(16, 16), dtype=dtype, options={"scale": scale, "causal": True})
    inputs = make_inputs(case)
    config = replace(SMALL, mma_k=8 if dtype == "float32" else 16)
    gold.check(*attention(inputs, case.options, config), **inputs, **case.options)


@pytest.mark.parametrize("id", ["exact-hot-float32", "scale--1024.0-hot", "bias-large"])
def test_log_sum_exp_of_large_scores_is_exact_enough_to_take_weights_from(id):
    case = BY_ID[id]
    inputs = make_inputs(case)
    _, lse = attention(inputs, case.options, replace(SMALL, mma_k=8))
    assert abs(lse - gold.gold(**inputs, **case.options)[1]).max() < 1e-6


# ---- references that scores exceed ----


def wild(number: int, dtype: str) -> dict[str, Any]:
    """Rows in which a few keys, a late one or ever later ones take nearly all the weight, or whose scores are random.

    Every other problem has one row. Scores are in units of log 2.
    """
    rng = np.random.default_rng(number)
    n_q, n_k = (1, 33)[number // 4 % 2], 150
    q, k, v = (0.1 * rng.standard_normal((1, 2, n, 16)) for n in (n_q, n_k, n_k))
    score = [
        np.where(rng.random(n_k) < 0.03, rng.uniform(5, 15), 0),
        np.where(np.arange(n_k) == rng.integers(100, n_k), rng.uniform(0, 12), 0),
        np.linspace(0, rng.uniform(3, 60), n_k),
        10 * rng.standard_normal(n_k),
    ][number % 4]
    q[..., 0], k[..., 0] = 1, score
    return {name: x.astype(np.dtype(dtype)) for name, x in (("q", q), ("k", k), ("v", v))}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", range(8))
def test_rows_that_outgrow_their_reference_are_exact(number, dtype):
    inputs = wild(number, dtype)
    gold.check(*attention(inputs, {"scale": float(np.log(2))}, SMALL), **inputs, scale=float(np.log(2)))


def just_above_the_reference() -> dict[str, Any]:
    """All values are the same, so O is one of them. Most keys weigh 1 + 0.45 ε, which P rounds to 1."""
    q, k = np.zeros((1, 1, 33, 16)), np.zeros((1, 1, 288, 16))
    q[..., 0] = 1
    k[..., 32:, 0] = np.log1p(0.45 * gold.EPSILON["float16"])
    v = np.broadcast_to(np.random.default_rng(0).standard_normal(16), k.shape)
    return {name: x.astype(np.float16) for name, x in (("q", q), ("k", k), ("v", v))}


def test_an_average_of_equal_values_is_that_value_whatever_the_weights():
    inputs = just_above_the_reference()
    out, _ = attention(inputs, {"scale": 1.0}, SMALL)
    assert np.array_equal(out, np.broadcast_to(inputs["v"][:, :, :1], out.shape))


def test_division_by_a_sum_that_is_not_of_p_would_be_found():
    inputs = just_above_the_reference()
    mutant = Mutant("unrounded", SOFTMAX, "kRoundsP ? l_of_p[r] : sum", "sum", ())
    out, _ = attention(inputs, {"scale": 1.0}, SMALL, texts=mutant.texts(kernel_texts()))
    assert not np.array_equal(out, np.broadcast_to(inputs["v"][:, :, :1], out.shape))


@pytest.mark.parametrize("device", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_bfloat16_and_float32_need_sm_80_and_float64_has_no_tensor_core_kernel(device):
    ampere = device != "sm_75"
    reasons = {dtype: why_not_mma(Spec(dtype, 64, 64), known_device(device)) for dtype in gold.EPSILON}
    assert {dtype for dtype, reason in reasons.items() if reason is None} == (
        {"float16", "bfloat16", "float32"} if ampere else {"float16"}
    )


# ---- seeded bugs ----

SIZED: dict[str, Any] = {"n": (40, 100), "d": (24, 40), "heads": (4, 2), "batch": (2,), "dtype": "float16"}
FLOAT = replace(SMALL, mma_k=8)
ONE_STAGE = replace(SMALL, b_r=64, warps=2, stages=1)
TURING = replace(SMALL, stages=1, mma_k=8, async_copy=False)
PROBLEMS = {
    "plain": (Case("mma-plain", **SIZED), replace(SMALL, b_r=64, warps=2)),
    "one-stage": (Case("mma-one-stage", **SIZED), ONE_STAGE),
    "causal": (Case("mma-causal", **SIZED, options={"causal": True}), SMALL),
    "ramp": (Case("mma-ramp", **SIZED, values="ramp"), SMALL),
    "dominated": (Case("mma-dominated", **SIZED, values="hot", options={"scale": 4.0}), SMALL),
    "negative": (Case("mma-negative", **SIZED, options={"scale": -0.3}), SMALL),
    "zero": (Case("mma-zero", **SIZED, options={"scale": 0.0, "causal": True}), SMALL),
    "hot": (Case("mma-hot", n=(65, 130), heads=(2, 1), values="exact-hot", options={"scale": 2.0**30}), SMALL),
    "bias": (Case("mma-bias", **SIZED, bias="bhqk"), SMALL),
    "softcap": (Case("mma-softcap", **SIZED, bias="---k", options={"softcap": 1.5}), SMALL),
    "late-cap": (Case("mma-late-cap", **SIZED, options={"softcap": 0.5}), SMALL),
    "late-cap-causal": (
        Case("mma-late-cap-causal", **SIZED, options={"softcap": 2.0, "scale": -0.3, "window": (30, 9)}),
        SMALL,
    ),
    "late-cap-falling": (Case("mma-late-cap-falling", **SIZED, values="falling", options={"softcap": 10.0}), SMALL),
    "late-cap-hot": (Case("mma-late-cap-hot", **SIZED, values="hot", options={"softcap": 900.0, "scale": 2.0}), SMALL),
    "mask": (Case("mma-mask", **SIZED, mask="bhqk"), SMALL),
    "packed": (Case("mma-packed", **SIZED | {"n": (9, 40)}, mask="bhqk", bias="-h-k"), PACKED),
    "turing": (Case("mma-turing", **SIZED), TURING),
    "swizzled": (Case("mma-swizzled", **SIZED | {"d": (64, 64)}), replace(SMALL, swizzle=True)),
    "tile-sums": (Case("mma-tile-sums", **SIZED), replace(SMALL, tile_sums=True)),
    "float": (Case("mma-float", **SIZED | {"dtype": "float32"}), FLOAT),
    "infinite": (Case("mma-infinite", **SIZED | {"dtype": "float32"}, values="infinite-key"), FLOAT),
    "denormal": (Case("mma-denormal", **SIZED | {"dtype": "float32"}, values="denormal-values"), FLOAT),
}

MUTANTS = [
    # ---- copies and barriers ----
    Mutant(
        "tile-read-before-it-came", KERNEL, "wait_for_copies<kAhead - 1>()", "wait_for_copies<kAhead>()", ("plain",)
    ),
    Mutant(
        "no-barrier-before-a-tile",
        KERNEL,
        "    __syncthreads();                // for every",
        "    // for every",
        ("plain",),
    ),
    Mutant(
        "no-barrier-before-k-is-replaced",
        KERNEL,
        "      __syncthreads();       // and every warp",
        "      //",
        ("one-stage",),
    ),
    Mutant("v-read-before-it-came", KERNEL, "      wait_for_copies<0>();  // V_j", "      // V_j", ("one-stage",)),
    Mutant("no-warp-barrier-before-o-is-stored", KERNEL, "    __syncwarp();\n", "", ("plain",)),
    Mutant("stage-used-too-early", KERNEL, "load_k(j + kAhead);", "load_k(j + kAhead); load_k(j);", ("plain",)),
    Mutant("rows-beyond-the-end-loaded", TILES, "first < rows_left ?", "true ?", ("plain",)),
    Mutant("columns-beyond-the-end-loaded", TILES, "elements > 0 ? kChunkBytes : 0", "kChunkBytes", ("plain",)),
    Mutant("swizzle-forgotten-on-the-way-back", TILES, "(address ^ chunks %", "(address + chunks %", ("swizzled",)),
    # ---- fragments ----
    Mutant("k-fragments-mixed-up", FRAGMENTS, "lane.index / 8 % 2", "lane.index / 16", ("plain",)),
    Mutant("p-halves-mixed-up", PRODUCTS, "p[1] = packed(s0[2]", "p[1] = packed(s1[2]", ("plain",)),
    Mutant(
        "v-block-twice",
        PRODUCTS,
        "multiply_block(o1, p, v[2], v[3], T{})",
        "multiply_block(o1, p, v[0], v[1], T{})",
        ("plain",),
    ),
    Mutant("second-half-of-a-step-left-out", FRAGMENTS, "    mma_m16n8k8(d, a1, b1, T{});\n", "", ("turing",)),
    Mutant("row-8-taken-for-row-0", KERNEL, "8 * (r % 2) + lane.g", "lane.g", ("causal",)),
    Mutant("small-parts-left-out", TF32, "mma_m16n8k8_tf32(sum[n][i], a[i].small, b[n].big);", "", ("float",)),
    Mutant(
        "float-keys-mixed-up",
        PRODUCTS,
        "split_in_two(weight[2], p[i].big[1]",
        "split_in_two(weight[1], p[i].big[1]",
        ("float",),
    ),
    Mutant("part-of-an-infinity-not-minded", PRODUCTS, "fabsf(of_big[e]) < kInfinity ?", "true ?", ("infinite",)),
    Mutant("small-values-lost", KERNEL, "size < kSmall * l", "false", ("denormal",)),
    # ---- softmax ----
    Mutant(
        "o-not-rescaled",
        SOFTMAX,
        "o[r / 2][b][2 * (r % 2) + e] *= factor",
        "o[r / 2][b][2 * (r % 2) + e] *= 1",
        ("ramp",),
    ),
    Mutant("l-not-rescaled", SOFTMAX, "    l[r] *= factor;\n", "", ("ramp",)),
    Mutant("sum-of-p-not-rescaled", SOFTMAX, "    l_of_p[r] *= factor;\n", "", ("ramp",)),
    Mutant("sum-of-p-of-another-row", PRODUCTS, "of_tile[r / 2][2 * (r % 2)]", "of_tile[r / 2][2]", ("plain",)),
    Mutant(
        "maximum-of-one-lane",
        *(SOFTMAX, "m[r] = max_of(m[r], __shfl_xor_sync(0xffffffff, m[r], step));", "m[r] += 0;", ("ramp",)),
    ),
    Mutant(
        "raised-in-some-lanes-of-a-row",
        SOFTMAX,
        "rises |= __shfl_xor_sync(0xffffffff, rises, step);",
        "",
        ("dominated",),
    ),
    Mutant("all-rows-raised", SOFTMAX, "does = rises >> r & 1;", "does = true;", ("dominated",)),
    Mutant("never-raised-again", SOFTMAX, "fmaf(largest, c, -offset[r]) > kSlack", "largest == kInfinity", ("ramp",)),
    Mutant("shift-of-another-row", SOFTMAX, "% kQuad == r % kQuad) shifts", "% kQuad == 0) shifts", ("hot",)),
    Mutant("l-of-two-lanes", SOFTMAX, "x += __shfl_xor_sync(0xffffffff, x, step)", "x += step * 0", ("plain",)),
    Mutant("coarse-reference", SOFTMAX, "fabsf(product) < kFar", "fabsf(product) < 1e30f", ("hot",)),
    Mutant("sign-of-the-scale-lost", KERNEL, "score.scale_log2 <= 0", "score.scale_log2 < -1e30f", ("negative",)),
    Mutant("scale-of-zero-not-minded", SOFTMAX, "c == 0 ? 1.0f : fminf(c, kLargest)", "c", ("zero",)),
    # ---- scores and masks ----
    Mutant("bias-of-the-next-key", KERNEL, "place(tile)[column] =", "place(tile)[column ^ 1] =", ("softcap",)),
    Mutant("large-scores-capped-as-small-ones", KERNEL, "__all_sync(0xffffffff, small)", "true", ("softcap",)),
    Mutant(
        "large-scores-capped-late-as-small-ones",
        *(SOFTMAX, "return __all_sync(0xffffffff, small);", "return true;", ("late-cap",)),
    ),
    Mutant("large-negative-scores-overlooked", SOFTMAX, "kMagnitude ? fabsf(x) : x", "x", ("late-cap-falling",)),
    Mutant(
        "masked-scores-capped",
        *(
            KERNEL,
            "      if (!whole) mask_scores(s, see, at, j * kBc, lane);  // -inf",
            "      // -inf",
            ("late-cap-causal",),
        ),
    ),
    Mutant(
        "sign-of-a-capped-scale-lost",
        *(KERNEL, "score.scale = fabsf(score.scale);", "", ("late-cap-causal",)),
    ),
    Mutant("mask-bits-mixed-up", KERNEL, "<< (2 * j + e)", "<< (2 * j + 1 - e)", ("mask",)),
    Mutant(
        "bias-stored-too-early",
        KERNEL,
        "place(i32 tile) const { return smem + tile % 2 * kBc; }",
        "place(i32 tile) const { return smem; }",
        ("softcap",),
    ),
    Mutant(
        "bias-of-a-row-that-is-not-there",
        KERNEL,
        "row = min(at.query_row(number), see.query_length - 1)",
        "row = at.query_row(number)",
        ("bias",),
    ),
    Mutant(
        "sums-of-a-tile-not-added",
        PRODUCTS,
        "o[i][c + e / 4][e % 4] += products",
        "o[i][c + e / 4][e % 4] = products",
        ("tile-sums",),
    ),
    Mutant("packed-rows-of-one-head", KERNEL, "(first + row) % group", "0", ("packed",)),
    Mutant("packed-mask-of-the-first-head", KERNEL, "see.of_head(at.head_offset(number))", "see", ("packed",)),
]


@functools.cache
def problem(name: str) -> tuple[dict[str, Any], gold.Expected]:
    case, _ = PROBLEMS[name]
    inputs = make_inputs(case)
    return inputs, gold.expect(**inputs, **case.options)


def complaint(name: str, texts: Any) -> str | None:
    """What is wrong with the result of a kernel made from `texts`; None where nothing is."""
    inputs, expected = problem(name)
    case, config = PROBLEMS[name]
    try:
        expected.check(*attention(inputs, case.options, config, texts=texts))
    except (EmulatorError, AssertionError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_mma_kernel_without_a_seeded_bug_passes(name):
    assert complaint(name, None) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_seeded_bug_of_the_mma_kernel_is_found(mutant: Mutant):
    texts = mutant.texts(kernel_texts())
    assert any(complaint(name, texts) for name in mutant.problems), "no problem shows the bug"
