"""The rule that judges every implementation: what it accepts, and that it refuses results that are nearly right."""

import cases
import ml_dtypes
import numpy as np
import pytest
from gold import CAPS, EPSILON, HOT_ORDERS, Canonical, check, expect, gold, yardstick

from cuflash.reference import standard_attention

B_R, B_C = 32, 16


def draw(dtype="float16", n=(100, 100), d=32, heads=2, seed=0):
    rng = np.random.default_rng(seed)
    n_q, n_k = n
    return [rng.standard_normal((1, heads, rows, d)).astype(dtype) for rows in (n_q, n_k, n_k)]


def fused(q, k, v, **options):
    """An ideal kernel's output."""
    return yardstick(q, k, v, **options)[0]


def tiled(q, k, v, mistake=None, scale=None):
    """Tile by tile with the online softmax in float32, P rounded to the input dtype, and one mistake."""
    dtype = q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    m = np.full((*q.shape[:-1], 1), -np.inf, np.float32)
    row_sum, acc = np.zeros_like(m), np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
    for tile, start in enumerate(range(0, k.shape[-2], B_C)):
        keys = slice(start, start + B_C)
        s = q @ k[..., keys, :].swapaxes(-1, -2) * np.float32(scale)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        p, alpha = np.exp(s - m_new), np.exp(m - m_new)
        row_sum = row_sum * alpha + p.sum(axis=-1, keepdims=True)
        if mistake == "O is not rescaled after the second tile" and tile == 1:
            alpha = np.ones_like(alpha)
        acc = acc * alpha + p.astype(dtype).astype(np.float32) @ v[..., keys, :]
        if mistake == "O is summed in the input dtype":
            acc = acc.astype(dtype).astype(np.float32)
        m = m_new
    return (acc / row_sum).astype(dtype), (m.astype(float) + np.log(row_sum.astype(float)))[..., 0]


@pytest.mark.parametrize("dtype", EPSILON)
def test_an_ideal_kernel_is_accepted(dtype):
    q, k, v = draw(dtype)
    out, lse = fused(q, k, v, causal=True)
    expected = expect(q, k, v, causal=True)
    expected.check(out, lse)
    expected.check_caps(out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_tiled_kernel_is_accepted(dtype):
    q, k, v = draw(dtype)
    out, lse = tiled(q, k, v)
    check(out, lse.astype(np.float64 if dtype == "float32" else np.float32), q, k, v)


@pytest.mark.parametrize(
    ("dtype", "mistake"),
    [
        *((dtype, "O is not rescaled after the second tile") for dtype in ("float16", "bfloat16", "float32")),
        *((dtype, "O is summed in the input dtype") for dtype in ("float16", "bfloat16")),
    ],
)
def test_a_tiled_kernel_with_a_mistake_is_refused(dtype, mistake):
    q, k, v = draw(dtype, n=(100, 500))
    out, _ = tiled(q, k, v, mistake)
    with pytest.raises(AssertionError, match="O is wrong in a block of 32 rows"):
        check(out, None, q, k, v)


def test_float32_computed_with_bfloat16_inputs_is_refused():
    q, k, v = draw("float32")
    out, _ = fused(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)))
    with pytest.raises(AssertionError, match="O is wrong in a block"):
        check(out.astype(np.float32), None, q, k, v)


def test_float32_with_the_inputs_rounded_to_11_bits_is_refused():
    q, k, v = draw("float32")
    out, _ = fused(*(x.astype(np.float16).astype(np.float32) for x in (q, k, v)))
    with pytest.raises(AssertionError, match="O is wrong in a block"):
        check(out, None, q, k, v)


def test_float64_computed_in_float32_is_refused():
    q, k, v = draw("float64")
    out, _ = fused(*(x.astype(np.float32) for x in (q, k, v)))
    with pytest.raises(AssertionError, match="O is wrong in a block"):
        check(out.astype(np.float64), None, q, k, v)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("row", [0, 31, 50, 99])
def test_one_wrong_row_is_refused(dtype, row):
    q, k, v = draw(dtype)
    out, _ = fused(q, k, v, causal=True)
    out[0, 1, row] = out[0, 1, row - 1]
    with pytest.raises(AssertionError, match=rf"at \(0, 1, {row // 32}\), one of 1 of 8"):
        check(out, None, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("size", [(65, 65), (65, 300), (300, 300)])
@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        ({"window": (16, 8)}, {"window": (17, 8)}),
        ({"window": (16, 8)}, {"window": (16, 9)}),
        ({"window": (16, None)}, {"window": (15, None)}),
        ({"causal": True}, {"window": (None, 1)}),
        ({"kv_lengths": np.array([60])}, {"kv_lengths": np.array([61])}),
        ({"kv_lengths": np.array([60])}, {"kv_lengths": np.array([59])}),
    ],
    ids=["left-wide", "right-wide", "left-narrow", "causal-wide", "length-more", "length-less"],
)
def test_a_bound_that_is_off_by_one_is_refused(dtype, size, asked, computed):
    q, k, v = draw(dtype, n=size)
    out, _ = fused(q, k, v, **computed)
    with pytest.raises(AssertionError, match="O is "):
        check(out, None, q, k, v, **asked)


@pytest.mark.parametrize("dtype", EPSILON)
def test_one_masked_key_that_leaks_into_one_row_is_refused(dtype):
    q, k, v = draw(dtype)
    mask = np.random.default_rng(1).random((100, 100)) < 0.5
    leaky = mask.copy()
    leaky[70, np.flatnonzero(~mask[70])[0]] = True
    out, _ = fused(q, k, v, mask=leaky)
    with pytest.raises(AssertionError, match="O is wrong in a block"):
        check(out, None, q, k, v, mask=mask)


@pytest.mark.parametrize("dtype", EPSILON)
def test_a_row_without_keys_that_is_not_zero_is_refused(dtype):
    q, k, v = draw(dtype, n=(40, 20))
    out, _ = fused(q, k, v, causal=True)
    out[0, 0, 3, 5] = 1e-7
    with pytest.raises(AssertionError, match=r"O is not zero in a row that sees no key:  at \(0, 0, 3, 5\)"):
        check(out, None, q, k, v, causal=True)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_result_that_is_not_finite_where_gold_is_is_refused(special):
    q, k, v = draw()
    out, lse = fused(q, k, v)
    lse[0, 1, 7] = special
    with pytest.raises(AssertionError, match="LSE is NaN or infinite where gold is not"):
        check(out, lse, q, k, v)
    out[0, 1, 7, 3] = special
    with pytest.raises(AssertionError, match=r"O is NaN or infinite where gold is not.* at \(0, 1, 7, 3\)"):
        check(out, lse, q, k, v)


def test_a_number_where_gold_is_nan_is_refused():
    q, k, v = draw()
    q[0, 0, 5, 0] = np.nan
    out, lse = fused(q, k, v)
    check(out, lse, q, k, v)
    out[0, 0, 5] = 0
    with pytest.raises(AssertionError, match="the other way round"):
        check(out, lse, q, k, v)


@pytest.mark.parametrize("dtype", EPSILON)
def test_a_log_sum_exp_in_another_base_or_a_little_off_is_refused(dtype):
    q, k, v = draw(dtype)
    out, lse = fused(q, k, v)
    for wrong in (lse / np.log(2), lse * (1 + 30 * EPSILON["float64" if dtype == "float64" else "float32"])):
        with pytest.raises(AssertionError, match="LSE is wrong in a row"):
            check(out, wrong.astype(lse.dtype), q, k, v)


def test_the_wrong_dtype_or_shape_is_refused():
    q, k, v = draw()
    out, lse = fused(q, k, v)
    with pytest.raises(AssertionError, match="O is float32, not float16"):
        check(out.astype(np.float32), lse, q, k, v)
    with pytest.raises(AssertionError, match=r"O has shape \(1, 2, 100\)"):
        check(out[..., 0], lse, q, k, v)
    with pytest.raises(AssertionError, match="LSE is float64, not float32"):
        check(out, lse.astype(np.float64), q, k, v)


@pytest.mark.parametrize("dtype", EPSILON)
def test_an_error_beyond_the_cap_is_refused(dtype):
    q, k, v = draw(dtype)
    out, _ = fused(q, k, v)
    wrong = (out.astype(np.float64) * (1 + 1.5 * CAPS[dtype])).astype(dtype)
    with pytest.raises(AssertionError, match="O is wrong as a whole"):
        expect(q, k, v).check_caps(wrong)


def test_hot_scores_are_judged_by_several_orders_of_summation_and_still_strictly():
    q, k, v = draw("float32")
    q *= 30
    assert len(yardstick(q, k, v, hot=True)) == HOT_ORDERS
    out, _ = tiled(q, k, v)
    check(out, None, q, k, v)
    for wrong, _ in (tiled(q, k, v, "O is not rescaled after the second tile"), fused(q, k, v, scale=0.1768)):
        with pytest.raises(AssertionError, match="O is wrong in a block"):
            check(wrong, None, q, k, v)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 4)}, {"kv_lengths": np.array([70])}], ids=str)
def test_sampled_rows_are_rows_of_the_whole(options, layout):
    q, k, v = draw("float32")
    mask = np.random.default_rng(2).random((2, 100, 100)) < 0.7
    bias = np.random.default_rng(3).standard_normal((100, 1)).astype(np.float32)
    options = {**options, "mask": mask, "bias": bias, "layout": layout}
    if layout == "bnhd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    rows = np.array([99, 3, 40, 41])
    whole, whole_lse = gold(q, k, v, **options)
    some, some_lse = gold(q, k, v, rows=rows, **options)
    np.testing.assert_allclose(some, whole[..., rows, :], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(some_lse, whole_lse[..., rows], rtol=1e-12)
    out, lse = fused(q, k, v, rows=rows, **options)
    expect(q, k, v, rows=rows, **options).check(out.swapaxes(1, 2) if layout == "bnhd" else out, lse)


def test_gold_sees_the_same_keys_as_the_yardstick():
    """Each reads the options by itself. Where all scores are zero, exp(LSE) is the number of keys that a row sees."""
    for case in cases.CASES:
        inputs = cases.make_inputs(case)
        inputs |= {name: np.zeros_like(inputs[name]) for name in "qk"}
        inputs.pop("bias", None)
        _, lse = standard_attention(**inputs, **case.options, return_lse=True)
        seen = Canonical.read(**inputs, **case.options).sees.sum(axis=-1)
        lse = lse[None] if case.rank == 2 else lse
        np.testing.assert_allclose(np.exp(lse), np.broadcast_to(seen, lse.shape), err_msg=case.id)


def test_a_case_is_small_and_is_the_same_each_time():
    assert len({case.id for case in cases.CASES}) == len(cases.CASES)
    for case in (*cases.CASES, *map(cases.random_case, range(20))):
        assert case.work <= cases.MOST_WORK, case.id
        first, second = cases.make_inputs(case), cases.make_inputs(case)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first), case.id


@pytest.mark.parametrize("view", cases.VIEWS)
def test_a_view_of_a_copied_block_is_the_same_array(view):
    case = next(case for case in cases.CASES if case.id == f"all-{view}-float16")
    for array in cases.make_arrays(case).values():
        here, copied = array.of(array.base), array.of(array.base.copy())
        assert here.strides == copied.strides
        assert here.shape == array.shape
        assert np.array_equal(here, copied)


def test_views_realise_the_strides_they_are_named_after():
    def strides(case_id, name="q"):
        array = cases.make_inputs(next(case for case in cases.CASES if case.id == case_id))[name]
        return tuple(step // array.itemsize for step in array.strides), array

    plain, _ = strides("all-plain-float16")
    assert plain == (4 * 64 * 24, 64 * 24, 24, 1)
    assert strides("all-transposed-float16")[0] == (4 * 64 * 24, 24, 4 * 24, 1)
    assert strides("all-reversed-float16")[0] == tuple(-step for step in plain)
    assert strides("all-broadcast-batch-float16")[0][0] == 0
    assert strides("all-broadcast-columns-float16")[0][-1] == 0
    assert strides("all-features-first-float16")[0][-2:] == (1, 64)
    assert strides("all-column-slice-float16")[0][-2:] == (29, 1)
    assert min(strides("size-one-axes-everywhere")[0]) < 0
    odd = strides("all-odd-offset-float16")[1]
    assert (odd.__array_interface__["data"][0] - odd.base.__array_interface__["data"][0]) % 4 == 2
