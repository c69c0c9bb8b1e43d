"""Gradients by the CPU path: against the derivative of the formula, and against finite differences."""

import tracemalloc

import cases
import gold_backward
import numpy as np
import pytest
from cases_backward import make_call
from gold import EPSILON

import cuflash
from cuflash import NumpyConfig, backward_reference
from cuflash.reference import standard_attention

CONFIGS = (NumpyConfig(16, 16), NumpyConfig(40, 1000), None)
FEWER_CONFIGS = (NumpyConfig(16, 16), None)


def draw(*shape, count=4, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


def differentiate(dout, q, k, v, config=None, **options):
    out, lse = cuflash.attention_forward(q, k, v, **options)
    return cuflash.attention_backward(dout, q, k, v, out, lse, **options, config=config)


def bits(arrays):
    return [array.tobytes() for array in arrays]


def check(case, configs):
    call = make_call(case)
    for array in call.values():
        array.flags.writeable = False
    expected = gold_backward.expect(**call, **case.options)
    for config in configs:
        expected.check(*cuflash.attention_backward(**call, **case.options, return_dbias="bias" in call, config=config))


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_every_tile_size_is_as_exact_as_the_rule_asks(case):
    check(case, CONFIGS if case.work < cases.MOST_WORK // 10 else FEWER_CONFIGS)


@pytest.mark.parametrize("seed", range(60))
def test_random_problems_are_as_exact_as_the_rule_asks(seed):
    check(cases.random_case(seed), FEWER_CONFIGS)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", EPSILON)
def test_the_error_on_normal_inputs_is_below_the_cap(dtype, causal):
    dout, q, k, v = draw(1, 2, 256, 64, dtype=dtype)
    expected = gold_backward.expect(dout, q, k, v, causal=causal)
    for config in FEWER_CONFIGS:
        expected.check_caps(*differentiate(dout, q, k, v, config, causal=causal))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": "top-left", "softcap": 0.9}, {"window": (2, 1), "scale": -0.7}, {"scale": 0.0}],
    ids=str,
)
def test_gradients_are_the_limit_of_differences(options):
    rng = np.random.default_rng(0)
    q, dout = draw(2, 4, 7, 5, count=2)
    k, v = draw(2, 2, 9, 5, count=2, seed=1)
    bias, mask = rng.standard_normal((4, 1, 9)), rng.random((2, 1, 7, 9)) < 0.8
    options = options | {"mask": mask}
    out, lse = cuflash.attention_forward(q, k, v, bias=bias, **options)
    dlse = rng.standard_normal(lse.shape)
    inputs = {"q": q, "k": k, "v": v, "bias": bias}
    gradients = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, bias=bias, **options, return_dbias=True)

    def loss(**changed):
        result, rows = standard_attention(**{**inputs, **changed}, **options, return_lse=True, dtype=np.longdouble)
        return (dout * result).sum() + (dlse * np.where(rows == -np.inf, 0, rows)).sum()

    step = np.longdouble(1e-6)
    for (name, x), gradient in zip(inputs.items(), gradients, strict=True):
        for _ in range(3):
            direction = rng.standard_normal(x.shape).astype(np.longdouble)
            slope = (loss(**{name: x + step * direction}) - loss(**{name: x - step * direction})) / (2 * step)
            np.testing.assert_allclose(float((gradient * direction).sum()), float(slope), rtol=1e-9, atol=1e-10)


def test_dead_rows_and_keys_that_no_row_sees_have_gradients_of_zero():
    dout, q, k, v = draw(2, 6, 8)
    mask = np.ones((6, 6), bool)
    mask[2], mask[:, 4] = False, False
    dout[:, 2] = np.nan  # where nothing was seen, nothing is used
    for config in FEWER_CONFIGS:
        dq, dk, dv = differentiate(dout, q, k, v, config, mask=mask)
        assert not dq[:, 2].any()
        assert not dk[:, 4].any()
        assert not dv[:, 4].any()
        assert np.isfinite([dq, dk, dv]).all()


def test_what_lies_beyond_the_lengths_does_not_change_a_bit():
    dout, q, k, v = draw(2, 2, 60, 16, dtype=np.float32)
    options = {"q_lengths": np.array([60, 31]), "kv_lengths": np.array([45, 60]), "causal": True}
    out, lse = cuflash.attention_forward(q, k, v, **options)
    clean = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=lse, **options)
    dlse = lse.copy()
    for x in (q, dout, out, lse, dlse):
        x[1, :, 31:] = np.nan
    k[0, :, 45:], v[0, :, 45:] = np.inf, np.nan
    poisoned = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert bits(clean) == bits(poisoned)
    assert not clean[0][1, :, 31:].any()
    assert not clean[1][0, :, 45:].any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_call_gives_the_same_bits(config):
    dout, q, k, v = draw(2, 3, 130, 24, dtype=np.float32)
    first = differentiate(dout, q, k, v, config, causal=True)
    assert all(bits(first) == bits(differentiate(dout, q, k, v, config, causal=True)) for _ in range(5))


def test_how_many_heads_are_worked_on_at_once_does_not_change_the_bits(monkeypatch):
    dout, q, k, v = draw(3, 4, 70, 24, dtype=np.float32)
    bias = np.zeros((4, 1, 70), np.float32)
    results = []
    for chunk_bytes in (1, 100_000, 1 << 30):
        monkeypatch.setattr(backward_reference, "CHUNK_BYTES", chunk_bytes)
        results.append(bits(differentiate(dout, q, k, v, NumpyConfig(32, 32), causal=True, bias=bias)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_inputs_that_broadcast_get_gradients_of_their_own_shape(layout):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 5, 5, 8)), rng.standard_normal((3, 5, 5, 8))
    v, bias = rng.standard_normal((5, 5, 8)), rng.standard_normal((3, 1, 1, 5))
    options = {"layout": layout, "bias": bias}
    out, lse = cuflash.attention_forward(q, k, v, **options)
    gradients = cuflash.attention_backward(out, q, k, v, out, lse, **options, return_dbias=True)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, bias.shape]
    gold_backward.expect(out, q, k, v, **options).check(*gradients)


def test_a_view_that_repeats_an_array_gets_a_gradient_for_every_element():
    dout, q = draw(3, 2, 10, 8, count=2)
    k, v = (np.broadcast_to(x, (3, 2, 10, 8)) for x in draw(2, 10, 8, count=2, seed=1))
    _, dk, _ = differentiate(dout, q, k, v)
    assert dk.shape == k.shape
    assert np.array_equal(dk[1], differentiate(dout[1], q[1], k[1], v[1])[1])


def test_float32_lse_serves_float32_inputs_as_far_as_it_is_exact():
    dout, q, k, v = draw(2, 50, 16, dtype=np.float32)
    out, lse = cuflash.attention_forward(q, k, v)
    assert lse.dtype == np.float64
    narrow = cuflash.attention_backward(dout, q, k, v, out, lse.astype(np.float32))
    for one, other in zip(narrow, cuflash.attention_backward(dout, q, k, v, out, lse), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_memory_grows_no_faster_than_the_sequence():
    def peak(n):
        dout, q, k, v = draw(1, n, 8, dtype=np.float16)
        out, lse = cuflash.attention_forward(q, k, v, window=(300, 0))
        tracemalloc.start()
        try:
            cuflash.attention_backward(dout, q, k, v, out, lse, window=(300, 0))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(8192) < 2 * peak(4096)
    assert peak(8192) < 32 << 20


def test_the_callers_error_state_is_neither_used_nor_changed():
    dout, q, k, v = draw(1, 40, 8, dtype=np.float32)
    q[0, 3], k[0, 5] = np.inf, 1e38
    with np.errstate(all="raise"):
        out, lse = cuflash.attention_forward(q, k, v, scale=-1e3)
        cuflash.attention_backward(dout, q, k, v, out, lse, scale=-1e3)
        assert set(np.geterr().values()) == {"raise"}


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_bias_of_no_scores_has_a_gradient_of_zero(shape):
    q, k, bias = np.zeros((0, 3, 4), "f4"), np.zeros((2, 0, 4), "f4"), np.zeros(shape, "f4")
    out, lse = cuflash.attention_forward(q, k, k, bias=bias)
    dbias = cuflash.attention_backward(out, q, k, k, out, lse, bias=bias, return_dbias=True)[3]
    assert dbias.shape == shape
    assert (dbias == 0).all()
