"""The case list on a GPU, and what only a device shows: size, streams, threads, graphs, repetition."""

import threading
import time
from dataclasses import replace

import gold
import numpy as np
import pytest
from cases import CASES, VIEWS, make_arrays, random_case

import cuflash
from cuflash import call, compiler
from cuflash.device import known_device
from cuflash.plan import mma_default

cupy = pytest.importorskip("cupy")

# All of them legal for every head dim.
SMALL_TILES = (
    cuflash.SimtConfig(32, 32, 128, 16),
    cuflash.SimtConfig(16, 16, 64, 8),
    cuflash.SimtConfig(16, 16, 128, 16),
)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every allocation of CuPy starts as NaN, so that what a kernel does not write shows."""

    def allocate(size):
        memory = cupy.get_default_memory_pool().malloc(size)
        memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield


def on_device(array):
    """The same view of the same block of memory, on the GPU."""
    taken = VIEWS[array.view].take(cupy.asarray(array.base), array.drawn)
    return taken if array.drawn == array.shape else cupy.broadcast_to(taken, array.shape)


def run(case, **more):
    arrays = make_arrays(case)
    out, lse = cuflash.attention(
        **{name: on_device(array) for name, array in arrays.items()}, **case.options, **more, return_lse=True
    )
    gold.check(cupy.asnumpy(out), cupy.asnumpy(lse), **{n: a.of(a.base) for n, a in arrays.items()}, **case.options)


def normal(shape, dtype="float16", seed=0):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.dtype(dtype)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    run(case)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.id for case in CASES])
def test_case_with_small_simt_tiles(index):
    run(CASES[index], config=SMALL_TILES[index % len(SMALL_TILES)])


OLDER_GPUS = [
    (case, architecture)
    for case in CASES
    for architecture in ("sm_75", "sm_80", "sm_86")
    if case.dtype == "float16" or (case.dtype != "float64" and architecture != "sm_75")
]


@pytest.mark.parametrize(("case", "architecture"), OLDER_GPUS, ids=lambda x: getattr(x, "id", x))
def test_case_with_the_tensor_core_tiles_of_an_older_gpu(case, architecture):
    arrays = {name: on_device(array) for name, array in make_arrays(case).items()}
    spec = cuflash.explain(**arrays, **case.options).problem.spec
    run(case, config=mma_default(spec, known_device(architecture)))


@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_packing_the_heads_of_a_group_changes_no_bit(dtype, group):
    q = normal((2, 2 * group, 5, 64), dtype)
    k, v = (normal((2, 2, 300, 64), dtype, seed) for seed in (1, 2))
    spec = cuflash.explain(q, k, v, causal=True).problem.spec
    plain = mma_default(spec, known_device("sm_80"))
    packed = replace(plain, pack_gqa=True)
    outputs = [cuflash.attention(q, k, v, causal=True, config=config) for config in (plain, packed)]
    assert (outputs[0] == outputs[1]).all()


@pytest.mark.parametrize("seed", range(300))
def test_random_case(seed):
    run(random_case(seed))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_error_of_the_whole_tensor_is_under_the_cap(dtype, d):
    q, k, v = (
        normal((2, 4, 1000, d), gold.np.dtype(dtype) if dtype != "bfloat16" else gold.ml_dtypes.bfloat16, seed)
        for seed in range(3)
    )
    out = cupy.asnumpy(cuflash.attention(q, k, v, causal=True))
    gold.expect(*map(cupy.asnumpy, (q, k, v)), causal=True).check_caps(out)


# ---- size ----


def test_strides_beyond_two_to_the_31_elements():
    k, v = (normal((4100, 64), seed=seed) for seed in (1, 2))
    q = normal((5, 64), seed=3)
    block = cupy.empty((4100, 2**20), np.float16)
    far_k, far_v = block[:, :64], block[:, -64:]
    far_k[...], far_v[...] = k, v
    assert (cuflash.attention(q, far_k, far_v) == cuflash.attention(q, k, v)).all()


def test_more_than_two_to_the_31_elements_of_output():
    q, k, v = normal((1, 1, 1, 128), seed=1), normal((1, 1, 2, 128), seed=2), normal((1, 1, 2, 128), seed=3)
    batch = 2**24 + 3
    many = cupy.broadcast_to(q, (batch, 1, 1, 128))
    out = cuflash.attention(many, k, v)
    assert out.size > 2**31
    assert (out[::65537] == out[0]).all()
    assert (out[-3:] == out[0]).all()
    assert (out[:1] == cuflash.attention(q, k, v)).all()


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (3, 40_000), (8300, 8)])
def test_more_heads_than_a_grid_axis_holds(batch, heads):
    q, k, v = (normal((batch, heads, n, 8), "float32", n) for n in (3, 5, 6))
    k, v = k, v[:, :, :5]
    out = cuflash.attention(q, k, v)
    some = np.array([0, 1, batch // 2, batch - 1])
    for entry in some:
        expected = cuflash.reference.standard_attention(*(cupy.asnumpy(x[entry]) for x in (q, k, v)))
        assert np.abs(cupy.asnumpy(out[entry]) - expected).max() < 2e-6


def test_a_million_rows_in_linear_memory():
    n = 2**20
    q, k, v = (normal((n, 64), seed=seed) for seed in range(3))
    cuflash.prepare(q, k, v)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    out = cuflash.attention(q, k, v)
    assert pool.used_bytes() - before == out.nbytes
    rows = np.sort(np.random.default_rng(9).choice(n, 8, replace=False))
    s = q[rows].astype(np.float64) @ k.astype(np.float64).T / 8
    p = cupy.exp(s - s.max(axis=-1, keepdims=True))
    expected = cupy.asnumpy(p @ v.astype(np.float64) / p.sum(axis=-1, keepdims=True))
    error = np.linalg.norm(cupy.asnumpy(out[rows]) - expected) / np.linalg.norm(expected)
    assert error < gold.CAPS["float16"]


# ---- repetition ----


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_250_repeats_give_the_same_bits(dtype):
    q, k, v = (normal((2, 4, 300, 64), dtype, seed) for seed in range(3))
    first = cuflash.attention(q, k, v, causal=True)
    assert all((cuflash.attention(q, k, v, causal=True) == first).all() for _ in range(250))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    q, k, v = (normal((3, 4, 200, 64), dtype, seed) for seed in range(3))
    whole = cuflash.attention(q, k, v)
    for b, h, row in ((0, 0, 0), (1, 2, 77), (2, 3, 199)):
        alone = cuflash.attention(q[b, h, row : row + 1], k[b, h], v[b, h])
        assert (alone == whole[b, h, row : row + 1]).all()


# ---- streams, threads, graphs ----


def test_two_streams_at_once_while_a_third_keeps_the_device_busy():
    q, k, v = (normal((4, 8, 512, 64), seed=seed) for seed in range(3))
    expected = cuflash.attention(q, k, v)
    cupy.cuda.Device().synchronize()
    busy, *streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    big = normal((4096, 4096), "float32")
    results = []
    for _ in range(20):
        with busy:
            big @ big
        for stream in streams:
            with stream:
                results.append(cuflash.attention(q, k, v))
    cupy.cuda.Device().synchronize()
    assert all((result == expected).all() for result in results)


def test_a_warm_call_does_not_wait_for_the_device():
    q, k, v = (normal((4, 8, 4096, 64), "float32", seed) for seed in range(3))
    cuflash.attention(q, k, v)
    cupy.cuda.Device().synchronize()
    done = cupy.cuda.Event()
    start = time.perf_counter()
    for _ in range(20):
        cuflash.attention(q, k, v, causal=True)
    took = time.perf_counter() - start
    done.record()
    assert not done.done, f"20 calls returned only when they were done, after {took:.3f} s"


def test_four_threads():
    inputs = [[normal((2, 4, n, 64), seed=seed) for seed in range(3)] for n in (100, 200, 300, 400)]
    expected = [cuflash.attention(*x, causal=True) for x in inputs]
    call.CALLS.known.clear()
    compiler._functions.clear()
    wrong = []

    def work(x, want):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                got = cuflash.attention(*x, causal=True)
                stream.synchronize()
                if not (got == want).all():
                    wrong.append(got)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_first_call_of_a_new_thread_makes_its_context():
    q, k, v = (normal((2, 4, 64, 64), seed=seed) for seed in range(3))
    expected, out = cuflash.attention(q, k, v), cupy.zeros_like(q)
    cupy.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: cuflash.attention(q, k, v, out=out))
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert (out == expected).all()


def test_capture_in_a_graph_after_prepare():
    q, k, v = (normal((2, 4, 300, 64), seed=seed) for seed in range(3))
    out = cupy.zeros_like(q)
    cuflash.prepare(q, k, v, causal=True, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
    q[...] = normal(q.shape, seed=7)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (out == cuflash.attention(q, k, v, causal=True)).all()


def test_another_length_batch_or_stride_compiles_nothing(monkeypatch):
    cuflash.attention(*(normal((2, 4, 300, 64)) for _ in range(3)), causal=True)
    monkeypatch.setattr(compiler, "compile_cubin", lambda variant: pytest.fail(f"compiles {variant}"))
    monkeypatch.setattr(compiler.cubins, "find", lambda key: pytest.fail("reads a cubin"))
    cuflash.attention(*(normal((3, 8, 77, 64)) for _ in range(3)), causal=True)
    cuflash.attention(*(normal((1, 2, 500, 128))[..., :64] for _ in range(3)), causal=True)


# ---- outputs ----


def test_out_receives_the_result_and_is_returned():
    q, k, v = (normal((2, 4, 65, 40), seed=seed) for seed in range(3))
    out = cupy.empty((2, 4, 65, 80), np.float16)[..., ::2]
    assert cuflash.attention(q, k, v, out=out) is out
    assert (out == cuflash.attention(q, k, v)).all()


def test_out_may_be_interleaved_with_the_inputs_but_not_overlap_them():
    block = normal((2, 65, 4, 8, 64))
    q, k, v, out = (block[:, :, i] for i in range(4))
    expected = cuflash.attention(q, k, v, layout="bnhd")
    assert (cuflash.attention(q, k, v, layout="bnhd", out=out) == expected).all()
    for _ in range(2):
        with pytest.raises(ValueError, match="out must not overlap an input, got an array that shares memory with v"):
            cuflash.attention(q, k, v, layout="bnhd", out=block[:, :, 2])


def test_numpy_and_cupy_arrays_do_not_mix():
    q = normal((2, 8, 16))
    with pytest.raises(TypeError, match=r"one kind, got q cupy \(GPU\) and k numpy \(CPU\)"):
        cuflash.attention(q, cupy.asnumpy(q), q)


# ---- other libraries ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_pytorch_tensors_come_back_as_tensors_of_their_device_and_stream(dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda").to(getattr(torch, dtype)) for _ in range(3))
    with torch.cuda.stream(torch.cuda.Stream()):
        out, lse = cuflash.attention(q * 1, k * 1, v * 1, causal=True, return_lse=True)
        assert (out.dtype, out.device, lse.dtype) == (
            q.dtype,
            q.device,
            torch.float32 if q.element_size() == 2 else torch.float64,
        )
        torch.cuda.current_stream().synchronize()
    as_cupy = [cupy.from_dlpack(x) for x in (q, k, v)]
    assert (cupy.from_dlpack(out) == cuflash.attention(*as_cupy, causal=True)).all()
    packed = torch.randn(2, 100, 4, 3, 64, device="cuda").to(q.dtype).movedim(-2, 0)
    into = torch.empty_like(packed[0])
    assert cuflash.attention(*packed, layout="bnhd", out=into) is into
    assert torch.equal(into, cuflash.attention(*packed, layout="bnhd"))
    strided = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(cuflash.attention(strided, k, v), cuflash.attention(q, k, v))


def test_pytorch_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 10, 16, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match="q requires grad"):
        cuflash.attention(q, q, q)
    with torch.no_grad():
        assert cuflash.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_come_back_as_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 4, 100, 64), dtype) * 1 for key in keys)
    out = cuflash.attention(q, k, v, causal=True)
    assert isinstance(out, jax.Array)
    assert out.dtype == q.dtype
    assert out.devices() == q.devices()
    assert (cupy.from_dlpack(out) == cuflash.attention(*map(cupy.from_dlpack, (q, k, v)), causal=True)).all()
    with pytest.raises(TypeError, match="q is a JAX tracer"):
        jax.jit(lambda x: cuflash.attention(x, k, v))(q)
