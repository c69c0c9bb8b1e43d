"""The rule that judges gradients: what it lets pass, and what it finds."""

import gold_backward
import numpy as np
import pytest
from gold import EPSILON

DTYPES = [*EPSILON]


def draw(dtype, n=70, heads=2, **more):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, heads, n, 16)).astype(dtype) for name in ("dout", "q", "k", "v")}
    return arrays | more


def ideal(call):
    """The yardstick of a call, and what is expected of it."""
    formula = gold_backward.Formula.read(**call)
    dtypes = dict.fromkeys(gold_backward.NAMES, call["q"].dtype)
    fused = next(gold_backward.yardstick(formula, False, dtypes))
    return [fused[name] for name in formula.shapes], gold_backward.expect(**call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1.0, "bias": np.zeros((70, 70))}], ids=[*"abc"])
def test_the_yardstick_itself_passes(dtype, options):
    if "bias" in options:
        options = options | {"bias": options["bias"].astype(dtype)}
    gradients, expected = ideal(draw(dtype, **options))
    expected.check(*gradients)


@pytest.mark.parametrize("name", [0, 1, 2], ids=["dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_in_one_block_of_one_head_is_found(dtype, name):
    gradients, expected = ideal(draw(dtype))
    too_much = 3 * expected.limit[gold_backward.NAMES[name]][0, 1, 1]  # as the norm of a row of 16
    changed = gradients[name].astype(np.float64)
    changed[0, 1, 40] += too_much / 4
    gradients[name] = changed.astype(dtype)
    with pytest.raises(AssertionError, match=r"is wrong in a block of 32 rows.* at \(0, 1, 1\), one of 1 of 6"):
        expected.check(*gradients)


def test_a_head_left_out_of_a_group_is_found():
    call = draw("float32", heads=4)
    call |= {"k": call["k"][:, :2], "v": call["v"][:, :2]}
    gradients, expected = ideal(call)
    expected.check(*gradients)
    gradients[1] = gradients[1] / 2
    with pytest.raises(AssertionError, match="dk is wrong"):
        expected.check(*gradients)


def test_a_gradient_where_nothing_is_seen_is_found():
    mask = np.ones((70, 70), bool)
    mask[:, 3] = False
    gradients, expected = ideal(draw("float32", mask=mask))
    expected.check(*gradients)
    gradients[2][0, 0, 3, 0] = 1e-30
    with pytest.raises(AssertionError, match="dv is not zero where nothing has a weight"):
        expected.check(*gradients)


def test_nan_is_found_where_the_formula_is_finite_and_asked_for_where_it_is_not():
    gradients, expected = ideal(draw("float32"))
    gradients[0][0, 0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="dq is not finite where the formula is"):
        expected.check(*gradients)
    call = draw("float32")
    call["q"][0, 0, 5] = np.nan
    gradients, expected = ideal(call)
    assert np.isnan(gradients[1][0, 0]).all()
    expected.check(*gradients)
    gradients[0] = np.nan_to_num(gradients[0])
    with pytest.raises(AssertionError, match="dq is finite where the formula is not"):
        expected.check(*gradients)


def test_one_key_has_no_gradient_and_rounding_in_its_place_passes():
    call = draw("float32", n=1)
    expected = gold_backward.expect(**call)
    assert expected.gold.magnitude["dq"].min() > 0
    rounding = np.full(call["q"].shape, 1e-8, np.float32)
    expected.check(rounding, rounding, call["dout"])
    with pytest.raises(AssertionError, match="dq is wrong"):
        expected.check(rounding + np.float32(1e-4), rounding, call["dout"])
