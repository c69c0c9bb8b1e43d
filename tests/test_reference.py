"""NumPy attention: the plain formula against a loop over scalars, and the tiled path against the formula."""

import math
import tracemalloc

import cases
import numpy as np
import pytest
from gold import EPSILON, expect

import cuflash
from cuflash import NumpyConfig, reference
from cuflash.reference import standard_attention

CONFIGS = (NumpyConfig(16, 16), NumpyConfig(64, 48), NumpyConfig(1, 33), NumpyConfig(40, 1000), None)
FEWER_CONFIGS = (NumpyConfig(16, 16), None)
FUZZ_SEEDS = range(100)


def draw(*shape, dtype=np.float32, seed=0):
    """Normal q, k and v of one shape (..., H, N, D)."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in "qkv"]


def attend(inputs, options, config, out_shape, dtype):
    """O and LSE of the CPU path, for inputs that nothing may write to and an output full of NaN."""
    for array in inputs.values():
        array.flags.writeable = False
    out = np.full(out_shape, np.nan, dtype)
    result, lse = cuflash.attention(**inputs, **options, config=config, out=out, return_lse=True)
    assert result is out
    return out, lse


def bits(*arrays):
    return [array.tobytes() for array in arrays]


def formula(q, k, v, sees, scale, softcap=None, bias=None):
    """One row of attention in Python floats, from q (D,), k (N_k, D), v (N_k, D_v), and what it sees of the keys."""
    scores = {}
    for j in np.flatnonzero(sees):
        score = scale * math.fsum(q * k[j])
        if softcap is not None:
            score = softcap * math.tanh(score / softcap)
        scores[j] = score + (0.0 if bias is None else bias[j])
    scores = {j: score for j, score in scores.items() if score > -math.inf}
    if not scores:
        return np.zeros(v.shape[-1]), -math.inf
    largest = max(scores.values())
    weights = {j: math.exp(score - largest) for j, score in scores.items()}
    total = math.fsum(weights.values())
    out = [math.fsum(weights[j] / total * v[j, column] for j in weights) for column in range(v.shape[-1])]
    return np.array(out), largest + math.log(total)


def bound(i, j, q_length, kv_length, causal=False, window=None):
    """Whether row i may see key j."""
    delta = 0 if causal == "top-left" else kv_length - q_length
    left, right = window or (None, None)
    return (
        i < q_length
        and j < kv_length
        and (left is None or j >= i + delta - left)
        and (right is None or j <= i + delta + right)
        and (not causal or j <= i + delta)
    )


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, (2, 1), (None, 0), (1, None)])
@pytest.mark.parametrize("causal", [False, True, "bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_standard_attention_is_the_formula(causal, window, softcap, lengths):
    rng = np.random.default_rng(0)
    batch, h_q, h_kv, n_q, n_k, d, d_v, scale = 2, 4, 2, 5, 7, 3, 2, 0.7
    q = rng.standard_normal((batch, h_q, n_q, d))
    k, v = rng.standard_normal((batch, h_kv, n_k, d)), rng.standard_normal((batch, h_kv, n_k, d_v))
    mask = rng.random((batch, 1, n_q, n_k)) < 0.8
    bias = np.where(rng.random((h_q, 1, n_k)) < 0.2, -np.inf, rng.standard_normal((h_q, 1, n_k)))
    q_lengths, kv_lengths = (np.array([4, 9]), np.array([-2, 6])) if lengths else (None, None)
    out, lse = standard_attention(
        *(q, k, v),
        **{"scale": scale, "causal": causal, "window": window, "softcap": softcap, "mask": mask, "bias": bias},
        **{"q_lengths": q_lengths, "kv_lengths": kv_lengths, "return_lse": True},
    )
    for b, h, i in np.ndindex(batch, h_q, n_q):
        q_length, kv_length = (min(4, n_q), 0) if lengths and b == 0 else (n_q, 6) if lengths else (n_q, n_k)
        sees = [bool(mask[b, 0, i, j]) and bound(i, j, q_length, kv_length, causal, window) for j in range(n_k)]
        row, row_lse = formula(q[b, h, i], k[b, h // 2], v[b, h // 2], sees, scale, softcap, bias[h, 0])
        np.testing.assert_allclose(out[b, h, i], row, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(lse[b, h, i], row_lse, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"layout": "nhd"}, "`layout` must be 'bhnd' or 'bnhd', got 'nhd'"),
        ({"causal": "left"}, "`causal` must be False, True, 'bottom-right' or 'top-left', got 'left'"),
        ({"softcap": 0.0}, "`softcap` must be positive, got 0.0"),
    ],
    ids=["layout", "causal", "softcap"],
)
def test_standard_attention_names_the_argument_that_is_wrong(argument, message):
    with pytest.raises(ValueError, match=message):
        standard_attention(*draw(2, 5, 4), **argument)


def test_standard_attention_refuses_heads_that_do_not_fit():
    q, k, v = draw(6, 5, 4)
    with pytest.raises(ValueError, match="`H_q` must be a multiple of `H_kv`, got 6 and 4"):
        standard_attention(q, k[:4], v[:4])


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_every_tile_size_is_as_exact_as_the_rule_asks(case):
    inputs = cases.make_inputs(case)
    expected = expect(**inputs, **case.options)
    for config in CONFIGS if case.work < cases.MOST_WORK // 10 else FEWER_CONFIGS:
        expected.check(*attend(inputs, case.options, config, expected.out_shape, expected.dtype))


@pytest.mark.parametrize("seed", FUZZ_SEEDS)
def test_random_problems_are_as_exact_as_the_rule_asks(seed):
    case = cases.random_case(seed)
    inputs = cases.make_inputs(case)
    expected = expect(**inputs, **case.options)
    for config in FEWER_CONFIGS:
        expected.check(*attend(inputs, case.options, config, expected.out_shape, expected.dtype))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", EPSILON)
def test_the_error_on_normal_inputs_is_below_the_cap(dtype, causal):
    q, k, v = draw(1, 2, 384, 64, dtype=dtype)
    expected = expect(q, k, v, causal=causal)
    for config in FEWER_CONFIGS:
        expected.check_caps(cuflash.attention(q, k, v, causal=causal, config=config))


def test_the_log_sum_exp_of_large_float32_scores_is_precise_beyond_float32():
    case = next(case for case in cases.CASES if case.id == "exact-hot-float32")
    inputs = cases.make_inputs(case)
    expected = expect(**inputs, **case.options)
    _, lse = cuflash.attention(**inputs, **case.options, return_lse=True)
    assert np.abs(expected.lse).min() > 9000  # where neighbouring float32 numbers are 1e-3 apart
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=1e-6)


def test_sampled_rows_of_a_long_sequence_are_exact():
    q, k, v = draw(1, 1, 6000, 32)
    rows = np.array([0, 1, 127, 128, 2999, 3000, 5998, 5999])
    out, lse = cuflash.attention(q, k, v, causal=True, window=(4000, 0), return_lse=True)
    expect(q, k, v, rows=rows, causal=True, window=(4000, 0)).check(out[..., rows, :], lse[..., rows])


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": "top-left"}, {"window": (20, 7)}], ids=str)
def test_a_bound_and_the_same_bound_as_a_mask_agree_bit_for_bit(options):
    q, k, v = draw(2, 90, 16)
    q = q[:, :70]
    mask = np.array([[bound(i, j, 70, 90, **options) for j in range(90)] for i in range(70)])
    config = NumpyConfig(16, 16)
    skipped = cuflash.attention(q, k, v, **options, config=config, return_lse=True)
    masked = cuflash.attention(q, k, v, mask=mask, config=config, return_lse=True)
    assert bits(*skipped) == bits(*masked)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_call_gives_the_same_bits(config):
    q, k, v = draw(2, 3, 130, 24)
    first = cuflash.attention(q, k, v, causal=True, config=config, return_lse=True)
    for _ in range(10):
        assert bits(*first) == bits(*cuflash.attention(q, k, v, causal=True, config=config, return_lse=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_batch_entry_has_the_same_bits_alone_and_in_a_batch(config):
    q, k, v = draw(5, 4, 130, 24)
    lengths = np.array([130, 100, 3, 0, 77])
    options = {"causal": True, "config": config, "return_lse": True}
    out, lse = cuflash.attention(q, k[:, :2], v[:, :2], kv_lengths=lengths, **options)
    for b in range(5):
        one = slice(b, b + 1)
        alone = cuflash.attention(q[one], k[one, :2], v[one, :2], kv_lengths=lengths[one], **options)
        assert bits(out[one], lse[one]) == bits(*alone)


def test_how_many_heads_are_worked_on_at_once_does_not_change_the_bits(monkeypatch):
    q, k, v = draw(3, 4, 70, 24)
    results = []
    for chunk_bytes in (1, 40_000, 1 << 30):
        monkeypatch.setattr(reference, "CHUNK_BYTES", chunk_bytes)
        results.append(bits(*cuflash.attention(q, k, v, causal=True, config=NumpyConfig(32, 32), return_lse=True)))
    assert results[0] == results[1] == results[2]


def test_chunks_cover_every_head_once():
    for shape in ((), (7,), (3, 4), (2, 3, 5), (1, 1, 6)):
        for at_once in (1, 2, 5, 12, 1000):
            seen = np.zeros(shape, int)
            for chunk in reference.chunks(shape, at_once):
                assert seen[chunk].size <= at_once
                seen[chunk] += 1
            assert (seen == 1).all()


def test_what_lies_beyond_the_lengths_does_not_change_a_bit():
    q, k, v = draw(2, 2, 60, 16)
    options = {"q_lengths": np.array([60, 31]), "kv_lengths": np.array([45, 60]), "causal": True, "return_lse": True}
    clean = cuflash.attention(q, k, v, **options)
    q[1, :, 31:] = np.nan
    k[0, :, 45:] = np.inf
    v[0, :, 45:] = np.nan
    assert bits(*clean) == bits(*cuflash.attention(q, k, v, **options))


def test_the_callers_error_state_is_neither_used_nor_changed():
    q, k, v = draw(1, 40, 8)
    q[0, 3], k[0, 5] = np.inf, 1e38
    with np.errstate(all="raise"):
        cuflash.attention(q, k, v, causal=True, scale=-1e3)
        standard_attention(q, k, v, causal=True, scale=-1e3, dtype=np.float32)
        assert set(np.geterr().values()) == {"raise"}


@pytest.mark.parametrize("group", [1, 8])
def test_memory_grows_no_faster_than_the_sequence(group):
    def peak(n):
        q, k, v = draw(group, n, 8, dtype=np.float16)
        out = np.empty_like(q)
        options = {"causal": True, "window": (600, 0), "out": out}
        cuflash.attention(q, k[:1], v[:1], **options)
        tracemalloc.start()
        try:
            cuflash.attention(q, k[:1], v[:1], **options)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(4096) < 2 * peak(2048)
    assert peak(4096) < 16 << 20


def test_keys_shared_by_a_group_of_heads_are_not_repeated():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((64, 1, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 20_000, 64)).astype(np.float16)
    tracemalloc.start()
    try:
        cuflash.attention(q, k, v)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * k.nbytes
