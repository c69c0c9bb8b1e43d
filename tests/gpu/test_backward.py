"""Gradients on a GPU: the case list with every family, and what only a device shows."""

import threading
import zlib

import gold
import gold_backward
import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, random_case
from cases_backward import make_call
from device_arrays import call_on_device, on_device, poisoned_memory

import cuflash
from cuflash import backward, compiler
from cuflash.arrays import describe
from cuflash.backward_launch import query_heads_of_keys, wgmma_heads_of_part
from cuflash.backward_plan import (
    backward_simt_default,
    backward_wgmma_default,
    why_no_backward_maps,
    why_not_backward_wgmma_by_default,
)
from cuflash.backward_problem import read_backward_problem
from cuflash.device import device_info, known_device

cupy = pytest.importorskip("cupy")

# All of them legal for every head dim.
SMALL_TILES = (
    cuflash.BackwardSimtConfig(16, 16, 128, 16, both_tiles=False),
    cuflash.BackwardSimtConfig(8, 16, 64, 8),
    cuflash.BackwardSimtConfig(16, 8, 64, 8, both_tiles=False),
)
FORWARD_SIMT = cuflash.SimtConfig(32, 32, 128, 16)
SIZES = ((2, 4, 300, 64), (1, 2, 1000, 128), (3, 2, 77, 40))


@pytest.fixture(autouse=True)
def poison():
    with poisoned_memory():
        yield


def run(case, **more):
    run_call(make_call(case), case, **more)


def run_call(call, case, **more):
    forward = FORWARD_SIMT if isinstance(more.get("config"), cuflash.BackwardSimtConfig) else None
    arrays = call_on_device(call, case.options, forward)
    results = cuflash.attention_backward(**arrays, **case.options, **more, return_dbias="bias" in call)
    gold_backward.expect(**call, **case.options).check(*map(cupy.asnumpy, results))


def normal(shape, dtype="float16", seed=0):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.dtype(dtype)))


def problem(shape, dtype="float16", h_kv=None, **options):
    """dout, q, k, v, out, lse of one shape (..., H, N, D)."""
    kv_shape = shape if h_kv is None else (*shape[:-3], h_kv, *shape[-2:])
    dout, q, k, v = (normal(s, dtype, seed) for seed, s in enumerate((shape, shape, kv_shape, kv_shape)))
    return dout, q, k, v, *cuflash.attention_forward(q, k, v, **options)


def same(one, other):
    return all((x == y).all() for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    run(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_with_simt_tiles(case):
    arrays = {name: on_device(x) for name, x in make_call(case).items()}
    planned = cuflash.explain_backward(**arrays, **case.options)
    run(case, config=backward_simt_default(planned.problem.spec, known_device("sm_90")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_with_hopper_tiles(case):
    arrays = {name: on_device(x) for name, x in make_call(case).items()}
    operands = {name: describe(name, x) for name, x in arrays.items()}
    problem, device = read_backward_problem(**operands, **case.options), device_info(cupy.cuda.Device().id)
    if reason := why_not_backward_wgmma_by_default(problem.spec, device) or why_no_backward_maps(problem):
        pytest.skip(reason)
    run(case, config=backward_wgmma_default(problem.spec, device))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_with_small_simt_tiles(case):
    arrays = {name: on_device(x) for name, x in make_call(case).items()}
    spec = cuflash.explain_backward(**arrays, **case.options).problem.spec
    # One configuration for each Spec, so that each is compiled once
    run(case, config=SMALL_TILES[zlib.crc32(str(spec).encode()) % len(SMALL_TILES)])


@pytest.mark.parametrize("seed", range(200))
def test_random_case(seed):
    run(random_case(seed))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_error_of_the_whole_tensor_is_under_the_cap(dtype, d, causal):
    name = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    dout, q, k, v, out, lse = problem((1, 2, 700, d), name, causal=causal)
    results = cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
    expected = gold_backward.expect(*map(cupy.asnumpy, (dout, q, k, v)), causal=causal)
    expected.check(*map(cupy.asnumpy, results))
    expected.check_caps(*map(cupy.asnumpy, results))


# ---- sums in any order ----


@pytest.mark.parametrize(
    "case",
    [
        Case("any-order", n=(300, 2100), d=(128, 128), heads=(2, 2), batch=(1,), dtype="bfloat16"),
        Case("any-order-half", n=(500, 2048), d=(64, 64), heads=(2, 2), batch=(1,), dtype="float16"),
        Case(
            "any-order-causal",
            **{"n": (2100, 2100), "d": (128, 128), "heads": (2, 1), "batch": (1,), "dtype": "bfloat16"},
            options={"causal": True},
        ),
        Case(
            "any-order-lengths",
            **{"n": (400, 3000), "d": (64, 64), "heads": (4, 2), "batch": (2,), "dtype": "float16"},
            q_lengths=(400, 130),
            kv_lengths=(2900, 700),
        ),
        Case(
            "any-order-window",
            **{"n": (2500, 2500), "d": (80, 96), "heads": (2, 2), "batch": (1,), "dtype": "bfloat16"},
            options={"window": (300, 20)},
        ),
        Case("any-order-few-keys", n=(300, 2047), d=(128, 128), heads=(1, 1), batch=(1,), dtype="bfloat16"),
        Case("any-order-wide", n=(300, 2100), d=(256, 256), heads=(1, 1), batch=(1,), dtype="bfloat16"),
        Case("any-order-float32", n=(300, 2100), d=(64, 64), heads=(1, 1), batch=(1,), dtype="float32"),
    ],
    ids=lambda case: case.id,
)
def test_gradients_that_need_not_be_deterministic(case):
    call = make_call(case)
    call["dout"] = call["dout"].copy()  # TMA does not read every view
    run_call(call, case, deterministic=False)


def test_only_dq_has_other_bits_in_any_order():
    shape = (1, 8, 4096, 128)
    arrays = problem(shape, ml_dtypes.bfloat16)
    expected = cuflash.attention_backward(*arrays)
    for _ in range(3):
        results = cuflash.attention_backward(*arrays, deterministic=False)
        assert same(results[1:], expected[1:])
    assert same(cuflash.attention_backward(*arrays), expected)


# ---- keys whose query heads go into several tickets ----
IN_PARTS = [
    Case("parts", n=(520, 300), d=(80, 80), heads=(34, 2), batch=(2,), dtype="bfloat16"),
    Case("parts-half", n=(1100, 70), d=(64, 64), heads=(18, 1), batch=(1,), dtype="float16"),
    Case(
        "parts-causal",
        **{"n": (1100, 1200), "d": (128, 128), "heads": (16, 2), "batch": (2,), "dtype": "bfloat16"},
        options={"causal": True},
    ),
    Case(
        "parts-causal-half",
        **{"n": (2100, 1100), "d": (64, 64), "heads": (5, 1), "batch": (1,), "dtype": "float16"},
        options={"causal": "top-left"},
    ),
    Case(
        "parts-left",
        **{"n": (1100, 1500), "d": (128, 96), "heads": (7, 1), "batch": (1,), "dtype": "float16"},
        options={"window": (200, None)},
    ),
]


@pytest.mark.parametrize("case", IN_PARTS, ids=lambda case: case.id)
def test_keys_with_several_tickets(case):
    call = make_call(case)
    call["dout"] = call["dout"].copy()  # TMA does not read every view
    run_call(call, case)
    run_call(call, case, deterministic=False)
    arrays = call_on_device(call, case.options, None)
    operands = {name: describe(name, x) for name, x in arrays.items()}
    problem = read_backward_problem(**operands, **case.options)
    config = backward_wgmma_default(problem.spec, device_info(cupy.cuda.Device().id))
    assert wgmma_heads_of_part(problem, config) < query_heads_of_keys(problem)
    first = cuflash.attention_backward(**arrays, **case.options)
    assert all(same(cuflash.attention_backward(**arrays, **case.options), first) for _ in range(50))
    last = {name: x[-1:] for name, x in arrays.items()}
    assert same(cuflash.attention_backward(**last, **case.options), [x[-1:] for x in first])


# ---- size ----


def test_strides_beyond_two_to_the_31_elements():
    dout, q, k, v, out, lse = problem((2100, 64))
    block = cupy.empty((2100, 2**20), np.float16)
    far = [block[:, :64], block[:, 64:128], block[:, -64:]]
    for target, source in zip(far, (dout, k, v), strict=True):
        target[...] = source
    expected = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert same(cuflash.attention_backward(far[0], q, *far[1:], out, lse), expected)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (3, 40_000), (8300, 8)])
def test_more_heads_than_a_grid_axis_holds(batch, heads):
    dout, q, k, v, out, lse = problem((batch, heads, 3, 8), "float32")
    results = cuflash.attention_backward(dout, q, k, v, out, lse)
    for entry in (0, 1, batch // 2, batch - 1):
        expected = gold_backward.expect(*(cupy.asnumpy(x[entry : entry + 1]) for x in (dout, q, k, v)))
        expected.check(*(cupy.asnumpy(x[entry : entry + 1]) for x in results))


def test_workspace_is_linear_in_the_length():
    used = []
    for n in (4096, 8192):
        arrays = problem((1, 1, n, 64))
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            cuflash.attention_backward(*arrays)
        used.append(pool.total_bytes())
    size = arrays[0].nbytes
    assert size < used[1] <= 2 * used[0] + 4096
    assert used[1] < 16 * size


def test_a_quarter_of_a_million_rows_in_linear_memory():
    n = 2**18
    dout, q, k, v, out, lse = problem((n, 64))
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        grads = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert pool.total_bytes() < 16 * q.nbytes
    some = np.sort(np.random.default_rng(9).choice(n, 8, replace=False))
    wide = [x.astype(np.float64) for x in (dout, q, k, v, out, lse)]

    def weights(rows, keys):
        """P and dS of some rows and some keys."""
        do, q_, k_, v_, o, row_lse = (x[i] for x, i in zip(wide, (rows, rows, keys, keys, rows, rows), strict=True))
        p = cupy.exp(q_ @ k_.T / 8 - row_lse[:, None])
        return p, p * (do @ v_.T - (do * o).sum(axis=-1, keepdims=True))

    every = slice(None)
    ds_rows, (p_keys, ds_keys) = weights(some, every)[1], weights(every, some)
    expected = ds_rows @ wide[2] / 8, ds_keys.T @ wide[1] / 8, p_keys.T @ wide[0]
    for gradient, right in zip(grads, expected, strict=True):
        error = cupy.linalg.norm(gradient[some].astype(np.float64) - right) / cupy.linalg.norm(right)
        assert float(error) < 4 * gold_backward.CAPS["float16"]  # O and LSE as they are, rounded


# ---- repetition ----


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_250_repeats_give_the_same_bits(dtype, shape):
    arrays = problem(shape, dtype, h_kv=shape[1] // 2, causal=True)
    first = cuflash.attention_backward(*arrays, causal=True)
    assert all(same(cuflash.attention_backward(*arrays, causal=True), first) for _ in range(250))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_batch_entry_has_the_same_bits_alone_and_in_a_batch(dtype):
    arrays = problem((3, 4, 200, 64), dtype)
    whole = cuflash.attention_backward(*arrays)
    for entry in range(3):
        alone = cuflash.attention_backward(*(x[entry : entry + 1] for x in arrays))
        assert same(alone, [x[entry : entry + 1] for x in whole])


# ---- streams, threads, graphs ----


def test_two_streams_at_once_while_a_third_keeps_the_device_busy():
    arrays = problem((4, 8, 512, 64))
    expected = cuflash.attention_backward(*arrays)
    cupy.cuda.Device().synchronize()
    busy, *streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    big = normal((4096, 4096), "float32")
    results = []
    for _ in range(20):
        with busy:
            big @ big
        for stream in streams:
            with stream:
                results.append(cuflash.attention_backward(*arrays))
    cupy.cuda.Device().synchronize()
    assert all(same(result, expected) for result in results)


def test_four_threads():
    inputs = [problem((2, 4, n, 64)) for n in (100, 200, 300, 400)]
    expected = [cuflash.attention_backward(*x) for x in inputs]
    cupy.cuda.Device().synchronize()  # the threads' streams do not wait for this one
    backward.CALLS.known.clear()
    compiler._functions.clear()
    wrong = []

    def work(x, want):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                got = cuflash.attention_backward(*x)
                stream.synchronize()
                if not same(got, want):
                    wrong.append(got)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_length_batch_or_stride_compiles_nothing(monkeypatch):
    cuflash.attention_backward(*problem((2, 4, 300, 64), causal=True), causal=True)
    other = problem((3, 8, 77, 64), causal=True)
    sliced = [normal((1, 2, 500, 128), seed=seed)[..., :64] for seed in range(4)]
    forward = cuflash.attention_forward(*sliced[1:], causal=True)
    monkeypatch.setattr(compiler, "compile_cubin", lambda variant: pytest.fail(f"compiles {variant}"))
    monkeypatch.setattr(compiler.cubins, "find", lambda key: pytest.fail("reads a cubin"))
    cuflash.attention_backward(*other, causal=True)
    cuflash.attention_backward(*sliced, *forward, causal=True)


# ---- arguments ----


def test_inputs_that_broadcast_get_gradients_of_their_own_shape():
    k, v = (normal((1, 2, 50, 32), "float32", seed) for seed in (1, 2))
    q, dout = (normal((3, 4, 40, 32), "float32", seed) for seed in (3, 4))
    out, lse = cuflash.attention_forward(q, k, v)
    results = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert [x.shape for x in results] == [q.shape, k.shape, v.shape]
    gold_backward.expect(*map(cupy.asnumpy, (dout, q, k, v))).check(*map(cupy.asnumpy, results))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_pytorch_tensors_come_back_as_tensors_of_their_device_and_stream(dtype):
    torch = pytest.importorskip("torch")
    dout, q, k, v = (torch.randn(2, 4, 100, 64, device="cuda").to(getattr(torch, dtype)) for _ in range(4))
    torch.cuda.synchronize()  # the stream below does not wait for this one
    with torch.cuda.stream(torch.cuda.Stream()):
        out, lse = cuflash.attention_forward(q * 1, k * 1, v * 1, causal=True)
        grads = cuflash.attention_backward(dout * 1, q * 1, k * 1, v * 1, out, lse, causal=True)
        torch.cuda.current_stream().synchronize()
    assert all((x.dtype, x.device, x.shape) == (q.dtype, q.device, q.shape) for x in grads)
    as_cupy = [cupy.from_dlpack(x) for x in (dout, q, k, v)]
    expected = cuflash.attention_backward(*as_cupy, *cuflash.attention_forward(*as_cupy[1:], causal=True), causal=True)
    assert same([cupy.from_dlpack(x) for x in grads], expected)
    expanded = torch.ones((), device="cuda", dtype=q.dtype).expand_as(out)
    one = cuflash.attention_backward(expanded, q, k, v, out, lse, causal=True)
    assert all(map(torch.equal, one, cuflash.attention_backward(expanded.clone(), q, k, v, out, lse, causal=True)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_jax_arrays_come_back_as_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    dout, q, k, v = (
        jax.random.normal(key, (2, 4, 100, 64), dtype) * 1 for key in jax.random.split(jax.random.key(0), 4)
    )
    out, lse = cuflash.attention_forward(q, k, v, causal=True)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert all(isinstance(x, jax.Array) and x.dtype == q.dtype for x in grads)
    gold_backward.expect(*map(np.asarray, (dout, q, k, v)), causal=True).check(*map(np.asarray, grads))


def test_numpy_and_cupy_arrays_do_not_mix():
    dout, q, k, v, out, lse = problem((2, 8, 16))
    with pytest.raises(TypeError, match=r"one kind, got q cupy \(GPU\) and lse numpy \(CPU\)"):
        cuflash.attention_backward(dout, q, k, v, out, cupy.asnumpy(lse))


def test_gradients_of_its_own_forward_pass_are_exact_on_hot_scores():
    q, k, v, dout = (normal((2, 2, 300, 64), "float32", seed) * (5 if seed < 2 else 1) for seed in range(4))
    out, lse = cuflash.attention_forward(q, k, v, causal=True)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert lse.dtype == gold.lse_dtype(q.dtype)
    gold_backward.expect(*map(cupy.asnumpy, (dout, q, k, v)), causal=True).check(*map(cupy.asnumpy, grads))
