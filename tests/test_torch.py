"""`cuflash.torch.attention` on the CPU: derivatives, torch.compile, and what PyTorch asks of an operator."""

import numpy as np
import pytest

import cuflash

torch = pytest.importorskip("torch")
attention = pytest.importorskip("cuflash.torch").attention

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left", "softcap": 2.0},
    {"window": (3, 2), "scale": 0.7},
    {"layout": "bnhd", "causal": True},
    {"deterministic": False},
]


def draw(n_q=5, n_k=6, layout="bhnd", dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, n_q, 3), (2, 2, n_k, 3), (2, 2, n_k, 4))
    drawn = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    if layout == "bnhd":
        drawn = [x.transpose(1, 2).contiguous() for x in drawn]
    return [x.requires_grad_(requires_grad) for x in drawn]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_the_limit_of_differences(options):
    q, k, v = draw(layout=options.get("layout", "bhnd"))
    bias = torch.randn(4, 1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], bias=x[3], **options, return_lse=True), (q, k, v, bias), fast_mode=True
    )


def test_gradients_flow_through_the_output_alone_and_the_log_sum_exp_alone():
    q, k, v = draw()
    for which in (0, 1):
        assert torch.autograd.gradcheck(
            lambda *x, i=which: attention(*x, return_lse=True)[i], (q, k, v), fast_mode=True
        )


def test_gradients_of_inputs_that_broadcast_and_repeat_are_summed():
    q, _, _ = draw()
    k = torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: attention(x[0], x[1].expand(2, 2, 6, 3), x[2]), (q, k, v))


def test_lengths_and_masks_have_no_gradient_and_rows_without_keys_none_either():
    q, k, v = draw()
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[3] = False
    lengths = torch.tensor([5, 2])
    attention(q, k, v, mask=mask, q_lengths=lengths).sum().backward()
    assert not q.grad[:, :, 3].any()
    assert not q.grad[1, :, 2:].any()
    assert q.grad[0, :, 4].any()


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = draw()
    k.requires_grad_(False)
    attention(q, k, v, bias=torch.zeros(6, dtype=torch.float64)).sum().backward()
    assert k.grad is None
    assert q.grad is not None
    assert v.grad is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_result_and_dtypes_are_those_of_cuflash_attention(dtype):
    q, k, v = draw(dtype=getattr(torch, dtype))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    with torch.no_grad():
        expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    out.sum().backward()
    assert q.grad.dtype == q.dtype


def test_operator_passes_the_checks_of_pytorch():
    q, k, v = draw()
    bias = torch.randn(4, 1, 6, dtype=torch.float64, requires_grad=True)
    options = (None, bias, None, None, None, "bottom-right", None, None, 2.0, "bhnd", False)
    torch.library.opcheck(torch.ops.cuflash.attention.default, (q, k, v, *options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shapes_are_known_without_computing(options):
    layout = options.get("layout", "bhnd")
    q, k, v = draw(layout=layout, requires_grad=False)
    real = attention(q, k, v, **options, return_lse=True)
    fake = attention(*(x.to("meta") for x in (q, k, v)), **options, return_lse=True)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("deterministic", [None, 0, "no"])
def test_compiled_code_takes_nothing_else_for_false(deterministic):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError):  # Dynamo's own, which has no word of the TypeError in it
        compiled(*draw(requires_grad=False), deterministic=deterministic)


def test_compiled_and_eager_give_the_same_bits_for_any_length():
    torch._dynamo.reset()

    def loss(q, k, v):
        return attention(q * 2, k, v, causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9):
        inputs = draw(n, n + 1)
        assert all(
            torch.equal(one, other)
            for one, other in zip(
                torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), strict=True
            )
        )


def test_second_derivatives_are_refused():
    q, k, v = draw()
    (first,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


def test_plain_attention_names_the_function_that_differentiates():
    q, k, v = draw()
    with pytest.raises(TypeError, match=r"q requires grad.* Use cuflash\.torch\.attention"):
        cuflash.attention(q, k, v)


def test_errors_are_those_of_cuflash_attention():
    q, k, v = draw()
    with pytest.raises(ValueError, match="softcap must be positive"):
        attention(q, k, v, softcap=-1.0)


X = torch.randn(2, 5, 3)
REFUSED = {
    "k on meta": ({"k": X.to("meta")}, "one device, got q on cpu and k on meta"),
    "mask on meta": ({"mask": torch.ones(5, 5, dtype=torch.bool, device="meta")}, "q on cpu and mask on meta"),
    "NumPy": ({"v": X.numpy()}, "v must be a Tensor, got ndarray"),
    "lengths in a list": ({"kv_lengths": [3]}, "kv_lengths must be a Tensor, got list"),
    "bias of a number": ({"bias": 1.0}, "bias must be a Tensor, got float"),
    "causal of 2": ({"causal": 2}, "causal must be False, True"),
    "causal of nothing": ({"causal": ""}, "causal must be False, True"),
    "scale of True": ({"scale": True}, "scale must be a real number"),
    "scale of a word": ({"scale": "a"}, "scale must be a real number"),
    "scale beyond floats": ({"scale": 10**400}, "scale must be a finite"),
    "softcap of True": ({"softcap": True}, "softcap must be a positive number"),
    "window of one": ({"window": 3}, "window must be a pair"),
    "window of three": ({"window": (1, 2, 3)}, "window must be a pair"),
    "window of halves": ({"window": (1.5, None)}, "window left must be an integer"),
    "no layout": ({"layout": None}, "layout must be one of"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_refused_as_by_cuflash_attention(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention(**{"q": X, "k": X, "v": X} | given)


def test_a_window_wider_than_any_sequence_is_none():
    assert torch.equal(attention(X, X, X, window=(10**30, None)), attention(X, X, X))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own, of its first jvp
def test_forward_mode_derivatives_are_refused():
    with pytest.raises(TypeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: attention(x, X, X), (X,), (X,))
    with pytest.raises(TypeError, match="no forward-mode derivative"):
        torch.func.jacfwd(lambda x: attention(x, X, X))(X)


def test_training_one_head_lowers_the_loss():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 12, 8, generator=generator)
    target = torch.from_numpy(np.roll(x.numpy(), 1, axis=2))
    weights = [torch.randn(8, 8, generator=generator).div(3).requires_grad_() for _ in "qkv"]
    optimizer = torch.optim.Adam(weights, lr=0.05)
    losses = []
    for _ in range(60):
        loss = (attention(*(x @ w for w in weights)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
