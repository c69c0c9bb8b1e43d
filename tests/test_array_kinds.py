"""PyTorch and JAX arrays of the CPU come back as what they are; nothing is mixed, nothing loses a gradient."""

import subprocess
import sys

import numpy as np
import pytest

import cuflash


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_pytorch_tensors(dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(normal(seed, 2, 4, 20, 16)).to(getattr(torch, dtype)) for seed in range(3))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32 if q.element_size() == 2 else torch.float64)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    assert torch.allclose(out.double(), exact, atol=2 * torch.finfo(q.dtype).eps, rtol=2 * torch.finfo(q.dtype).eps)
    into = torch.empty_like(out)
    assert cuflash.attention(q, k, v, causal=True, out=into) is into
    assert torch.equal(into, out)


def test_pytorch_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, 8)
    k = torch.zeros(3, 8, requires_grad=True)
    with pytest.raises(TypeError, match=r"k requires grad, and cuflash.attention has no derivative.*detached"):
        cuflash.attention(x, k, x)
    with torch.no_grad():
        assert cuflash.attention(x, k, x).shape == x.shape


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_pytorch_tensors_under_a_transform_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.zeros(3, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(TypeError, match=r"v is being transformed.*forward-mode"):
            cuflash.attention(x, x, dual)
    with pytest.raises(TypeError, match="q is being transformed"):
        torch.func.vmap(lambda q: cuflash.attention(q, q, q))(torch.zeros(2, 3, 8))


def test_pytorch_views_of_complex_numbers():
    torch = pytest.importorskip("torch")
    conjugate = torch.randn(3, 8, dtype=torch.complex64).conj()
    imaginary = conjugate.imag
    assert torch.equal(cuflash.attention(imaginary, imaginary, imaginary), cuflash.attention(*[imaginary.clone()] * 3))


def test_a_deleted_jax_array_is_named():
    jax = pytest.importorskip("jax")
    x, gone = jax.numpy.zeros((3, 8)), jax.numpy.ones((3, 8))
    gone.delete()
    with pytest.raises(ValueError, match="k must be alive, got a JAX array that was deleted"):
        cuflash.attention(x, gone, x)


def test_pytorch_masks_and_lengths():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(normal(0, 2, 1, 9, 8))
    mask, lengths = torch.rand(9, 9) < 0.7, torch.tensor([9, 4])
    out = cuflash.attention(q, q, q, mask=mask, kv_lengths=lengths)
    array = q.numpy()
    expected = cuflash.attention(array, array, array, mask=mask.numpy(), kv_lengths=lengths.numpy())
    assert (out.numpy() == expected).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(normal(seed, 2, 4, 20, 16), dtype) for seed in range(3))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (out.dtype, out.devices()) == (q.dtype, q.devices())
    assert (np.asarray(out) == cuflash.attention(*map(np.asarray, (q, k, v)), causal=True)).all()


def test_jax_tracers_and_out_are_refused():
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((3, 8))
    with pytest.raises(TypeError, match=r"q is a JAX tracer.*outside of jax.jit"):
        jax.jit(lambda q: cuflash.attention(q, x, x))(x)
    with pytest.raises(TypeError, match="q is a JAX tracer"):
        jax.grad(lambda q: cuflash.attention(q, x, x).sum())(x)
    with pytest.raises(TypeError, match=r"out cannot be a jax .* array"):
        cuflash.attention(x, x, x, out=x)


def test_kinds_do_not_mix():
    torch = pytest.importorskip("torch")
    x = np.zeros((3, 8), np.float32)
    with pytest.raises(TypeError, match=r"all arrays of a call must be of one kind, got q numpy \(CPU\) and v torch"):
        cuflash.attention(x, x, torch.zeros(3, 8))
    with pytest.raises(TypeError, match=r"got q numpy .* and mask torch"):
        cuflash.attention(x, x, x, mask=torch.ones(3, 3, dtype=torch.bool))


def test_a_missing_cupy_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install 'cuflash\[cuda13\]'"):
        cuflash.arrays.import_cupy()


def test_neither_cupy_nor_pytorch_nor_jax_nor_optuna_is_imported_for_numpy_arrays():
    script = (
        "import sys, numpy as np, cuflash; x = np.zeros((3, 8), np.float32); cuflash.attention(x, x, x);"
        "print(*{'cupy', 'torch', 'jax', 'optuna', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
