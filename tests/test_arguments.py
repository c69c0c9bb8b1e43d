"""What `attention` takes and refuses: every rule of the contract, on NumPy arrays, before anything is computed."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.device import known_device
from cuflash.launch import ADDRESSES, SIZE_BLOCK, STRIDES_PER_ARRAY, all_strides, pack_sizes, shift, split_batch
from cuflash.plan import choose, default_config
from cuflash.problem import Operand, Spec, contiguous_strides, read_problem
from cuflash.tensor_maps import why_no_tensor_map


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


Q, K, V = normal(2, 4, 5, 8), normal(2, 2, 7, 8, seed=1), normal(2, 2, 7, 3, seed=2)
REFUSED = {
    "list": ({"q": [[1.0]]}, TypeError, "q must be a NumPy, CuPy, PyTorch or JAX array.*got list"),
    "one-axis": ({"q": normal(8)}, ValueError, r"q must have at least 2 axes \(N, D\), got shape \(8,\)"),
    "integers": ({"q": Q.astype(np.int32)}, TypeError, "q must have a dtype of float16, .*, got int32"),
    "complex": ({"v": V.astype(np.complex64)}, TypeError, "one dtype, got q float32 and v complex64"),
    "two-dtypes": ({"k": K.astype(np.float16)}, TypeError, "one dtype, got q float32 and k float16"),
    "byte-order": ({"q": Q.astype(">f4")}, TypeError, "q must be of native byte order, got >f4"),
    "masked-array": ({"v": np.ma.masked_array(V)}, TypeError, "v must not be a masked array"),
    "head-dims": ({"k": normal(2, 2, 7, 9)}, ValueError, "q and k must have the same head dim, got 8 and 9"),
    "lengths": ({"v": normal(2, 2, 6, 3)}, ValueError, "k and v must have the same length N_k, got 7 and 6"),
    "kv-heads": ({"v": normal(2, 4, 7, 3)}, ValueError, "same number of heads, got 2 and 4"),
    "groups": ({"q": normal(2, 5, 5, 8)}, ValueError, "`H_q` must be a multiple of `H_kv`, got 5 and 2"),
    "no-kv-heads": ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "`H_q` must be a multiple of `H_kv`, got 4 and 0"),
    "batches": ({"q": normal(3, 4, 5, 8)}, ValueError, r"must broadcast as in matmul, got q \(3,\), k \(2,\)"),
    "no-features": ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "head dim of q and k must be 1 to 256, got 0"),
    "wide": ({"q": normal(2, 4, 5, 257), "k": normal(2, 2, 7, 257)}, ValueError, "must be 1 to 256, got 257"),
    "wide-v": ({"v": normal(2, 2, 7, 257)}, ValueError, "head dim of v must be at most 256, got 257"),
    "scale-text": ({"scale": "1"}, TypeError, "scale must be a real number or None, got str"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be a finite float32, got nan"),
    "scale-beyond-float32": ({"scale": 1e39}, ValueError, r"scale must be a finite float32, got 1e\+39"),
    "scale-beyond-float64": ({"scale": 10**400}, ValueError, "scale must be a finite float32"),
    "scale-over-softcap": ({"scale": 1e38, "softcap": 1e-30}, ValueError, "scale / softcap must be a finite float32"),
    "softcap-huge": ({"softcap": 1e39}, ValueError, r"softcap must be positive, 1e-30 to 1e\+30"),
    "causal-array": ({"causal": np.array([1, 2])}, ValueError, "causal must be False, True"),
    "layout-array": ({"layout": np.array([1, 2])}, ValueError, "layout must be one of"),
    "causal-text": ({"causal": "upper"}, ValueError, "False, True, 'bottom-right' or 'top-left', got 'upper'"),
    "causal-number": ({"causal": 1}, ValueError, "causal must be .*, got 1"),
    "window-number": ({"window": 3}, TypeError, r"window must be a pair \(left, right\) or None, got 3"),
    "window-long": ({"window": (1, 2, 3)}, TypeError, "window must be a pair"),
    "window-float": ({"window": (1.0, 2)}, TypeError, "window left must be an integer or None, got 1.0"),
    "window-negative": ({"window": (None, -1)}, ValueError, r"window right must be at least 0 .*, got -1"),
    "softcap-zero": ({"softcap": 0}, ValueError, r"softcap must be positive, .* \(None turns it off\), got 0"),
    "softcap-nan": ({"softcap": float("nan")}, ValueError, "softcap must be positive"),
    "softcap-text": ({"softcap": "30"}, TypeError, "softcap must be a positive number or None, got str"),
    "mask-float": ({"mask": np.ones((5, 7), np.float32)}, TypeError, r"dtype bool.*additive values go into bias"),
    "mask-shape": ({"mask": np.ones((6, 7), bool)}, ValueError, r"mask must .* = \(2, 4, 5, 7\), got shape \(6, 7\)"),
    "mask-axes": ({"mask": np.ones((1, 1, 1, 5, 7), bool)}, ValueError, "mask must broadcast to"),
    "bias-dtype": ({"bias": np.ones((5, 7))}, TypeError, r"bias must be of dtype float32 .*, got float64"),
    "bias-shape": ({"bias": normal(3, 1, 5, 7)}, ValueError, "bias must broadcast to"),
    "lengths-dtype": ({"kv_lengths": np.ones(2, np.int16)}, TypeError, "of dtype int32 or int64, got int16"),
    "lengths-shape": ({"q_lengths": np.ones(3, np.int32)}, ValueError, r"broadcast to the batch axes = \(2,\)"),
    "lengths-list": ({"q_lengths": [3, 4]}, TypeError, "q_lengths must be a NumPy"),
    "layout": ({"layout": "nbhd"}, ValueError, r"layout must be one of \('bhnd', 'bnhd'\), got 'nbhd'"),
    "out-shape": ({"out": np.empty((2, 4, 5, 8), np.float32)}, ValueError, r"out must have shape \(2, 4, 5, 3\)"),
    "out-dtype": ({"out": np.empty((2, 4, 5, 3))}, ValueError, "dtype float32, got .* and float64"),
    "config": ({"config": (64, 64)}, TypeError, r"config must be a NumpyConfig for arrays of the CPU, got \(64, 64\)"),
    "config-gpu": ({"config": cuflash.SimtConfig(64, 64, 128, 16)}, TypeError, "config must be a NumpyConfig"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        cuflash.attention(**{"q": Q, "k": K, "v": V} | arguments)


@pytest.mark.parametrize("function", [cuflash.attention, cuflash.explain, cuflash.prepare])
def test_an_unknown_keyword_is_refused_by_name(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        function(Q, K, V, dropout=0.1)


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        cuflash.attention(Q, K, V, 0.5)


@pytest.mark.parametrize("function", [cuflash.explain, cuflash.prepare])
def test_explain_and_prepare_check_as_attention_does(function):
    with pytest.raises(ValueError, match="softcap must be positive"):
        function(Q, K, V, softcap=-1)


# ---- out ----


def test_out_is_written_and_returned():
    out = np.full((2, 4, 5, 3), np.nan, np.float32)
    assert cuflash.attention(Q, K, V, out=out) is out
    assert (out == cuflash.attention(Q, K, V)).all()


def test_out_may_have_any_strides():
    block = np.full((5, 3, 2, 4, 2), np.nan, np.float32)
    out = block[..., 0].transpose(2, 3, 0, 1)[..., ::-1]
    cuflash.attention(Q, K, V, out=out)
    assert (out == cuflash.attention(Q, K, V)).all()
    assert np.isnan(block[..., 1]).all()


def test_out_must_not_overlap_an_input():
    block = normal(2, 5, 4, 8)
    with pytest.raises(ValueError, match="out must not overlap an input, got an array that shares memory with q"):
        cuflash.attention(block[:, :, 0], block[:, :, 1], block[:, :, 2], out=block[:, :, 0])


def test_out_may_be_interleaved_with_the_inputs():
    block = normal(2, 5, 4, 8)
    q, k, v, out = (block[:, :, i] for i in range(4))
    expected = cuflash.attention(q, k, v)
    assert (cuflash.attention(q, k, v, out=out) == expected).all()


def test_out_must_be_writable():
    out = np.empty((2, 4, 5, 3), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        cuflash.attention(Q, K, V, out=out)


def test_out_must_not_repeat_elements():
    out = np.lib.stride_tricks.as_strided(np.empty(15, np.float32), (2, 4, 5, 3), (0, 0, 12, 4))
    with pytest.raises(ValueError, match=r"out must not repeat elements, got strides \(0, 0, 3, 1\)"):
        cuflash.attention(Q, K, V, out=out)


def test_out_must_not_overlap_itself():
    out = np.lib.stride_tricks.as_strided(np.empty(200, np.float32), (2, 4, 5, 3), (240, 60, 4, 4))
    with pytest.raises(ValueError, match=r"out must not repeat elements, got strides \(60, 15, 1, 1\)"):
        cuflash.attention(Q, K, V, out=out)


def test_elements_that_are_not_whole_elements_apart():
    rows = np.zeros((2, 4, 5), [("flag", "i1"), ("x", "f4", (8,))])
    rows["x"] = Q
    assert (cuflash.attention(rows["x"], K, V) == cuflash.attention(Q, K, V)).all()
    values = np.zeros((2, 4, 5), [("flag", "i1"), ("x", "f4", (3,))])
    with pytest.raises(ValueError, match="out must have strides that are multiples of its 4-byte elements"):
        cuflash.attention(Q, K, V, out=values["x"])
    assert not values["x"].any()


def test_nothing_is_written_when_a_call_is_refused():
    out = np.full((2, 4, 5, 3), 7, np.float32)
    with pytest.raises(ValueError, match="window"):
        cuflash.attention(Q, K, V, out=out, window=(-1, 0))
    assert (out == 7).all()


# ---- results ----


def test_shapes_and_dtypes_of_results():
    out, lse = cuflash.attention(Q, K, V, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 5, 3), np.float32, (2, 4, 5), np.float64)
    half = [x.astype(ml_dtypes.bfloat16).swapaxes(1, 2) for x in (Q, K, V)]
    out, lse = cuflash.attention(*half, layout="bnhd", return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 4, 3), ml_dtypes.bfloat16, (2, 4, 5), np.float32)
    out, lse = cuflash.attention(Q[0, 0], K[0, 0], V[0, 0], return_lse=True)
    assert (out.shape, lse.shape) == ((5, 3), (5,))


@pytest.mark.parametrize("empty", [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8)], ids=["batch", "heads", "rows"])
def test_empty_queries_give_an_empty_result(empty):
    keys = normal(*empty[:2], 7, 8)
    out, lse = cuflash.attention(normal(*empty), keys, keys, return_lse=True)
    assert (out.shape, lse.shape) == (empty, empty[:3])


def test_no_keys_give_zero():
    out, lse = cuflash.attention(Q, K[:, :, :0], V[:, :, :0], return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_values_without_features_still_have_a_log_sum_exp():
    out, lse = cuflash.attention(Q, K, V[..., :0], return_lse=True)
    assert out.shape == (2, 4, 5, 0)
    assert np.allclose(lse, cuflash.attention(Q, K, V, return_lse=True)[1])


def test_a_list_is_as_good_a_window_as_a_tuple():
    assert (cuflash.attention(Q, K, V, window=[2, 1]) == cuflash.attention(Q, K, V, window=(2, 1))).all()


def test_numpy_scalars_are_numbers():
    assert (cuflash.attention(Q, K, V, causal=np.True_) == cuflash.attention(Q, K, V, causal=True)).all()
    cuflash.attention(Q, K, V, scale=np.float32(0.5), softcap=np.float64(3), window=(np.int32(1), None))


# ---- the checked problem ----


def operand(name, *shape, strides=None, dtype="float16", alignment=16):
    return Operand(name, shape, contiguous_strides(shape) if strides is None else strides, dtype, alignment)


def spec_of(q, k, v, **options):
    return read_problem(operand("q", *q), operand("k", *k), operand("v", *v), **options).spec


def test_lengths_batches_heads_and_strides_are_not_compiled_in():
    one = spec_of((2, 4, 100, 64), (2, 2, 130, 64), (2, 2, 130, 64), window=(5, 5))
    other = spec_of((7, 6, 33, 64), (7, 6, 9000, 64), (7, 6, 9000, 64), window=(500, 0))
    assert one == other


def test_head_dims_round_up_to_a_multiple_of_16():
    spec = spec_of((4, 10, 65), (4, 10, 65), (4, 10, 7))
    assert (spec.d, spec.d_v) == (80, 16)


@pytest.mark.parametrize(
    ("changes", "aligned"),
    [
        ({}, True),
        ({"alignment": 2}, False),
        ({"strides": (650, 65, 1)}, False),
        ({"strides": (1152, 72, 1)}, True),
        ({"strides": (0, 64, 1)}, True),
    ],
    ids=["plain", "odd-address", "odd-rows", "long-rows", "broadcast"],
)
def test_alignment_is_of_every_row(changes, aligned):
    k = operand("k", 4, 10, 64)
    spec = read_problem(operand("q", 4, 10, 64)._replace(**changes), k, k._replace(name="v")).spec
    assert spec.aligned is aligned


def test_axes_of_one_element_may_have_any_stride():
    q = operand("q", 1, 1, 1, 64, strides=(3, 5, 7, 1))
    k = operand("k", 1, 1, 5, 64)
    assert read_problem(q, k, k._replace(name="v")).spec.aligned


def test_result_that_tma_cannot_write_is_told():
    q, out = operand("q", 4, 50, 64), operand("out", 4, 50, 64, strides=(3200, -64, 1))
    problem = read_problem(q, q._replace(name="k"), q._replace(name="v"), out=out)
    assert why_no_tensor_map(problem) == "TMA takes strides from 0 to 2^40 bytes, got out with (6400, -128)"
    assert why_no_tensor_map(problem, writes_out=False) is None


def test_windows_as_wide_as_the_problem_stay_within_32_bits():
    k = operand("k", 100, 64)
    problem = read_problem(operand("q", 50, 64), k, k._replace(name="v"), window=(2**40, 2**62))
    assert (problem.left, problem.right) == (150, 150)


def test_sequences_beyond_32_bits_are_refused():
    q = operand("q", 2**29, 16, strides=(0, 1))
    with pytest.raises(ValueError, match="sequence lengths must be below 2\\^29, got N_q = 536870912"):
        read_problem(q, q._replace(name="k"), q._replace(name="v"))


# ---- the launches ----


def random_problem(rng):
    """A problem on contiguous arrays whose batch axes broadcast in a random way."""
    batch = tuple(rng.integers(1, 4, size=rng.integers(0, 4)))
    q, k, v = (tuple(int(n) if rng.random() < 0.6 else 1 for n in batch) for _ in range(3))
    mask = operand("mask", *(n if rng.random() < 0.6 else 1 for n in (*np.broadcast_shapes(q, k, v), 4, 5, 6)))
    lengths = operand("kv_lengths", *np.broadcast_shapes(q, k, v), dtype="int64")
    return read_problem(
        operand("q", *q, 4, 5, 16), operand("k", *k, 2, 6, 16), operand("v", *v, 2, 6, 16),
        mask=mask._replace(dtype="bool"), kv_lengths=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_launches_reach_every_batch_entry_at_its_own_address(seed):
    problem = random_problem(np.random.default_rng(seed))
    grid, sizes, offsets = pack_sizes(problem, 16)
    batch, steps, _ = split_batch(problem)
    assert grid == batch * problem.h_q
    assert batch * len(offsets) == np.prod(problem.batch, initial=1)
    items = {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 4, "mask": 1, "kv_lengths": 8}
    rank, strides = len(problem.batch), all_strides(problem)
    wanted = [
        tuple(sum(i * s for i, s in zip(index, strides[name][:rank], strict=True)) * items[name] for name in items)
        for index in np.ndindex(*problem.batch)
    ]
    reached = [
        tuple(offset[ADDRESSES.index(name)] + i * steps[name] * items[name] for name in items)
        for offset in offsets
        for i in range(batch)
    ]
    assert sorted(reached) == sorted(wanted)
    packed = iter(SIZE_BLOCK.unpack(sizes))
    for name, count in STRIDES_PER_ARRAY.items():
        own = [next(packed) for _ in range(1 + count)]
        known = [steps[name], *strides[name][rank : rank + count]] if name in strides else [0] * (1 + count)
        assert own == known, name


def test_a_launch_takes_the_longest_axis_and_steps_along_it_in_lse_too():
    problem = read_problem(operand("q", 3, 2, 4, 5, 16), operand("k", 1, 2, 4, 6, 16), operand("v", 3, 1, 4, 6, 16))
    batch, steps, _ = split_batch(problem)
    assert (batch, steps["lse"]) == (3, 2 * 4 * 5)
    assert len(pack_sizes(problem, 16)[2]) == 2


def test_an_absent_array_stays_absent_in_every_launch():
    problem = read_problem(operand("q", 2, 3, 4, 5, 16), operand("k", 1, 3, 4, 6, 16), operand("v", 2, 1, 4, 6, 16))
    _, _, offsets = pack_sizes(problem, 16)
    assert len(offsets) == 2
    given = [1 << 20 if name in ("q", "k", "v", "out") else 0 for name in ADDRESSES]
    for offset in offsets:
        shifted = dict(zip(ADDRESSES, shift(given, offset), strict=True))
        assert {name for name, address in shifted.items() if address} == {"q", "k", "v", "out"}


# ---- the plan ----


def test_no_query_rows_in_a_group_of_heads():
    problem = read_problem(operand("q", 8, 0, 64), operand("k", 2, 5, 64), operand("v", 2, 5, 64))
    assert choose(problem, known_device("sm_80")).family == "mma"


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_spec_has_a_legal_default_on_every_gpu(architecture, dtype):
    device = known_device(architecture)
    for d in range(16, 257, 16):
        for d_v in (16, d, 256):
            for features in ({}, {"mask": True, "bias": dtype, "aligned": False, "left": True}):
                spec = Spec(dtype, d, d_v, **features)
                config = default_config(spec, device)
                assert config.why_illegal(spec, device) is None


def test_a_configuration_that_cannot_run_is_refused_with_the_rule():
    q = operand("q", 4, 10, 256, dtype="float32")
    problem = read_problem(q, q._replace(name="k"), q._replace(name="v"))
    with pytest.raises(ValueError, match=r"the tiles need .* bytes of shared memory, Tesla T4 has 65536 a block"):
        choose(problem, known_device("sm_75"), cuflash.SimtConfig(64, 64, 128, 16))
    with pytest.raises(ValueError, match="b_r must be a multiple of threads / lanes_per_row = 8, got 20"):
        choose(problem, known_device("sm_90"), cuflash.SimtConfig(20, 64, 128, 16))


@pytest.mark.parametrize("bad", [0, -16, 1.5, "64", True])
def test_a_configuration_is_made_of_positive_integers(bad):
    with pytest.raises(ValueError, match=r"SimtConfig\.b_r must be a positive int"):
        cuflash.SimtConfig(bad, 64, 128, 16)


def test_explain_names_the_family_the_tiles_and_why_not_another():
    explanation = cuflash.explain(Q, K, V, config=cuflash.NumpyConfig(16, 32))
    assert (explanation.family, explanation.source) == ("numpy", "the caller")
    assert "simt" in explanation.ruled_out
    assert "numpy on the CPU: NumpyConfig(b_r=16, b_c=32)" in str(explanation)
