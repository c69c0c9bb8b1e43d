"""Arguments of the backward pass: what is refused, in which words, and what every kind of array gets back."""

import numpy as np
import pytest

import cuflash
from cuflash import BackwardSimtConfig, NumpyConfig, SimtConfig


def call(n=6, d=8, heads=2, dtype=np.float32, **options):
    """Arguments of a call that is right."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, heads, n, d)).astype(dtype) for _ in range(4))
    out, lse = cuflash.attention_forward(q, k, v, **options)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **options}


WRONG = [
    ({"dout": None}, TypeError, "dout must be a NumPy, CuPy, PyTorch or JAX array.*got NoneType"),
    ({"dout": np.zeros((1, 2, 6, 8))}, TypeError, "dout must have the dtype of q, float32, got float64"),
    (
        {"out": np.zeros((1, 2, 6, 9), np.float32)},
        ValueError,
        r"out must have shape \(1, 2, 6, 8\), got \(1, 2, 6, 9\)",
    ),
    ({"dout": np.zeros((2, 6, 8), np.float32)}, ValueError, r"dout must have shape \(1, 2, 6, 8\), got \(2, 6, 8\)"),
    ({"lse": np.zeros((1, 6, 2))}, ValueError, r"lse must have shape \(1, 2, 6\), got \(1, 6, 2\)"),
    ({"lse": np.zeros((1, 2, 6), np.float16)}, TypeError, "lse must be of dtype float32 or float64, got float16"),
    ({"dlse": np.zeros((1, 2))}, ValueError, r"dlse must have shape \(1, 2, 6\), got \(1, 2\)"),
    ({"dlse": np.zeros((1, 2, 6), int)}, TypeError, "dlse must be of dtype float32 or float64, got int64"),
    ({"return_dbias": True}, ValueError, "return_dbias asks for the gradient of bias, and there is no bias"),
    ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
    ({"deterministic": None}, TypeError, "deterministic must be True or False, got None"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"k": np.zeros((1, 2, 6, 9), np.float32)}, ValueError, "q and k must have the same head dim, got 8 and 9"),
    ({"config": SimtConfig(32, 32, 128, 16)}, TypeError, "config must be a NumpyConfig for arrays of the CPU"),
    ({"config": BackwardSimtConfig(32, 32, 128, 16)}, TypeError, "config must be a NumpyConfig for arrays of the CPU"),
]


@pytest.mark.parametrize(
    ("argument", "kind", "message"), WRONG, ids=[", ".join(w[0]) + f"-{i}" for i, w in enumerate(WRONG)]
)
def test_what_is_wrong_is_refused_by_name(argument, kind, message):
    with pytest.raises(kind, match=message):
        cuflash.attention_backward(**(call() | argument))


def test_options_are_keyword_only():
    right = call()
    with pytest.raises(TypeError, match="positional"):
        cuflash.attention_backward(*right.values(), None)


def test_numpy_is_deterministic_whatever_is_asked_for():
    right = call()
    expected = cuflash.attention_backward(**right)
    assert all(map(np.array_equal, cuflash.attention_backward(**right, deterministic=False), expected))
    assert cuflash.explain_backward(**right, deterministic=False).deterministic


@pytest.mark.parametrize("inspect", [cuflash.explain_backward, cuflash.prepare_backward])
def test_explaining_refuses_what_the_call_would(inspect):
    with pytest.raises(TypeError, match="deterministic must be True or False, got 'no'"):
        inspect(**call(), deterministic="no")


def test_arrays_of_different_libraries_do_not_mix():
    torch = pytest.importorskip("torch")
    right = call()
    with pytest.raises(TypeError, match=r"one kind, got q numpy \(CPU\) and out torch \(CPU\)"):
        cuflash.attention_backward(**(right | {"out": torch.from_numpy(right["out"])}))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_pytorch_tensors_of_the_cpu_come_back_as_such(dtype):
    torch = pytest.importorskip("torch")
    right = {name: torch.from_numpy(x) for name, x in call().items() if name != "lse"}
    right = {name: x.to(getattr(torch, dtype)) for name, x in right.items()}
    out, lse = cuflash.attention_forward(right["q"], right["k"], right["v"])
    grads = cuflash.attention_backward(right["dout"], right["q"], right["k"], right["v"], out, lse)
    assert all(isinstance(x, torch.Tensor) and x.dtype == right["q"].dtype for x in grads)
    assert lse.dtype == (torch.float32 if right["q"].element_size() == 2 else torch.float64)


def test_a_pytorch_gradient_that_is_expanded_is_taken():
    torch = pytest.importorskip("torch")
    right = {name: torch.from_numpy(x) for name, x in call().items()}
    ones = torch.ones(()).expand_as(right["out"])
    whole = cuflash.attention_backward(**(right | {"dout": ones.clone()}))
    assert all(map(torch.equal, cuflash.attention_backward(**(right | {"dout": ones})), whole))


def test_jax_arrays_of_the_cpu_come_back_as_such():
    jax = pytest.importorskip("jax")
    right = {name: jax.numpy.asarray(x) for name, x in call().items()}
    assert right["lse"].dtype == np.float32  # float64 is off by default
    grads = cuflash.attention_backward(**right)
    assert all(isinstance(x, jax.Array) and x.dtype == np.float32 for x in grads)
    for one, other in zip(grads, cuflash.attention_backward(**call()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_explain_tells_family_and_configuration():
    explained = cuflash.explain_backward(**call(), config=NumpyConfig(4, 4))
    assert (explained.family, explained.config, explained.source) == ("numpy", NumpyConfig(4, 4), "the caller")
    assert explained.ruled_out
    assert cuflash.prepare_backward(**call()).family == "numpy"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 32, 100, 16), "threads must be a multiple of 32 from 32 to 1024, got 100"),
        ((32, 32, 128, 32), "lanes_per_row must be 4, 8 or 16, got 32"),
        ((36, 32, 128, 16), "b_r must be a multiple of threads / lanes_per_row = 8 and of lanes_per_row = 16, got 36"),
        ((32, 40, 128, 16), "b_c must be a multiple of threads / lanes_per_row = 8 and of lanes_per_row = 16, got 40"),
        ((48, 32, 128, 16), "b_r must divide 128, got 48"),
        ((128, 128, 256, 16), "the tiles need 344064 bytes of shared memory, H200 has 232448 a block"),
        ((64, 64, 64, 8), "accumulators and operands need 416 of 255 registers a thread"),
    ],
    ids=str,
)
def test_tiles_that_are_not_legal_say_why(sizes, message):
    from cuflash.device import known_device
    from cuflash.problem import Spec

    spec = Spec("float32", 128, 128)
    assert BackwardSimtConfig(*sizes).why_illegal(spec, known_device("sm_90")) == message


def test_sizes_of_tiles_must_be_positive_integers():
    with pytest.raises(ValueError, match=r"BackwardSimtConfig\.b_r must be a positive int, got 0"):
        BackwardSimtConfig(0, 32, 128, 16)
    with pytest.raises(ValueError, match=r"BackwardSimtConfig\.both_tiles must be True or False, got 1"):
        BackwardSimtConfig(32, 32, 128, 16, both_tiles=1)
