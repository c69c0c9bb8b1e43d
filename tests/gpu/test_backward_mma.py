"""Gradients by the tensor-core family on a GPU, with the tiles of every generation that this one can run."""

import gold_backward
import numpy as np
import pytest
from cases import CASES
from cases_backward import make_call
from device_arrays import call_on_device, on_device, poisoned_memory

import cuflash
from cuflash.backward_config import why_not_backward_mma
from cuflash.backward_plan import backward_mma_default, why_not_backward_mma_by_default
from cuflash.device import known_device
from cuflash.plan import mma_default, why_not_mma_by_default
from cuflash.problem import Spec

cupy = pytest.importorskip("cupy")

SERVED = [case for case in CASES if case.dtype != "float64"]
SIZES = ((2, 4, 300, 64), (1, 2, 1000, 128), (3, 2, 77, 40), (2, 8, 2048, 128))


@pytest.fixture(autouse=True)
def poison():
    with poisoned_memory():
        yield


def run(case, architecture):
    call = make_call(case)
    inputs = {name: on_device(x) for name, x in call.items() if name not in ("out", "dout", "lse", "dlse")}
    spec = cuflash.explain(**inputs, **case.options).problem.spec
    device = known_device(architecture)
    if reason := why_not_backward_mma_by_default(spec, device):
        pytest.skip(reason)
    forward = mma_default(spec, device) if why_not_mma_by_default(spec, device) is None else None
    arrays = call_on_device(call, case.options, forward)
    results = cuflash.attention_backward(**arrays, **case.options, config=backward_mma_default(spec, device))
    gold_backward.expect(**call, **case.options).check(*map(cupy.asnumpy, results))


def problem(shape, dtype, h_kv, **options):
    """dout, q, k, v, out, lse of one shape (..., H, N, D)."""
    kv_shape = (*shape[:-3], h_kv, *shape[-2:])
    shapes = (shape, shape, kv_shape, kv_shape)
    arrays = [np.random.default_rng(seed).standard_normal(s, np.float32).astype(dtype) for seed, s in enumerate(shapes)]
    dout, q, k, v = map(cupy.asarray, arrays)
    return dout, q, k, v, *cuflash.attention_forward(q, k, v, **options)


def tiles(dtype, d, **features):
    spec = Spec(dtype, -(-d // 16) * 16, -(-d // 16) * 16, **features)
    assert why_not_backward_mma(spec, known_device("sm_90")) is None
    return backward_mma_default(spec, known_device("sm_90"))


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)
def test_case_with_mma_tiles(case):
    run(case, "sm_90")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86"])
@pytest.mark.parametrize("case", SERVED[::6], ids=lambda case: case.id)
def test_case_with_tiles_of_older_gpus(case, architecture):
    run(case, architecture)


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_250_repeats_give_the_same_bits(dtype, shape):
    arrays = problem(shape, dtype, shape[1] // 2, causal=True)
    config = tiles(dtype, shape[-1], right=True)
    first = cuflash.attention_backward(*arrays, causal=True, config=config)
    for _ in range(250):
        again = cuflash.attention_backward(*arrays, causal=True, config=config)
        assert all((x == y).all() for x, y in zip(first, again, strict=True))


def test_two_streams_at_once_while_a_third_keeps_the_device_busy():
    arrays = problem((4, 8, 1024, 64), "float16", 8)
    config = tiles("float16", 64)
    expected = cuflash.attention_backward(*arrays, config=config)
    big = cupy.ones((4096, 4096), np.float32)
    busy, *streams = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(20):
        with busy:
            big @ big
        for stream in streams:
            with stream:
                results.append(cuflash.attention_backward(*arrays, config=config))
    cupy.cuda.Device().synchronize()
    assert all((x == y).all() for result in results for x, y in zip(result, expected, strict=True))
