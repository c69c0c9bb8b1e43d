"""`cuflash.torch.attention` on a GPU."""

import pytest

import cuflash

torch = pytest.importorskip("torch")
attention = pytest.importorskip("cuflash.torch").attention


def draw(dtype, *shape, count=3):
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_attention_backward(dtype):
    q, k, v = draw(dtype, 2, 4, 100, 64)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        expected = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    assert all(map(torch.equal, grads, expected))


def test_gradients_on_a_stream_of_its_own():
    q, k, v = draw(torch.float16, 2, 8, 1000, 64)

    def gradients():
        return torch.autograd.grad(attention(q * 2, k, v).square().sum(), (q, k, v))

    expected = gradients()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = [gradients() for _ in range(20)]
    stream.synchronize()
    assert all(all(map(torch.equal, result, expected)) for result in results)


def test_float64_gradients_are_the_limit_of_differences():
    q, k, v = draw(torch.float64, 1, 2, 7, 5)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True, softcap=3.0), (q, k, v), fast_mode=True)


def test_compiled_and_eager_agree():
    q, k, v = draw(torch.float16, 2, 4, 100, 64)

    def loss(q, k, v):
        return attention(q * 2, k, v, causal=True).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_gradients_under_a_cuda_graph_of_pytorch():
    q, k, v = draw(torch.float16, 2, 4, 300, 64)

    def gradients():
        return torch.autograd.grad(attention(q, k, v, causal=True).float().square().sum(), (q, k, v))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, gradients()))
