"""Several GPUs in one process: arrays decide where a call runs, whichever device is the current one."""

import contextlib
import threading

import gold
import gold_backward
import numpy as np
import pytest
from cases import CASES
from cases_backward import make_call
from device_arrays import call_on_device, on_device, poisoned_memory

import cuflash
from cuflash.backward_plan import backward_mma_default, backward_simt_default, backward_wgmma_default
from cuflash.device import device_info
from cuflash.plan import mma_default, simt_default, wgmma_default

cupy = pytest.importorskip("cupy")

FORWARD = {"simt": simt_default, "mma": mma_default, "wgmma": wgmma_default}
BACKWARD = {"simt": backward_simt_default, "mma": backward_mma_default, "wgmma": backward_wgmma_default}
FAMILIES = pytest.mark.parametrize("family", FORWARD)


@pytest.fixture(autouse=True)
def two_devices():
    """Skips where there is one GPU; poisons what is allocated on any."""
    if (count := cupy.cuda.runtime.getDeviceCount()) < 2:
        pytest.skip(f"needs two GPUs, this machine has {count}")
    with poisoned_memory():
        yield
    assert cupy.cuda.runtime.getDevice() == 0, "a call left another device current"


@contextlib.contextmanager
def current(number):
    with cupy.cuda.Device(number):
        yield


def problem(number, seed=0, shape=(2, 4, 300, 64), dtype="float16"):
    """dout, q, k, v on a device."""
    rng = np.random.default_rng(seed)
    with current(number):
        return [cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(4)]


def serving(table, family, explanation, number):
    """The family's default configuration for an explained call on a device."""
    device = device_info(number)
    if family == "wgmma" and device.compute_capability != (9, 0):
        pytest.skip(f"wgmma needs a Hopper GPU, device {number} is {device.architecture}")
    return table[family](explanation.problem.spec, device)


def explain_gradients(arrays, number):
    dout, q, k, v = arrays
    with current(number):
        lse = cupy.empty(q.shape[:-1], np.float32)
    return cuflash.explain_backward(dout, q, k, v, dout, lse, causal=True)


def gradients(arrays, forward=None, backward=None):
    """Out, LSE, dQ, dK, dV of `problem`."""
    dout, q, k, v = arrays
    out, lse = cuflash.attention_forward(q, k, v, causal=True, config=forward)
    return out, lse, *cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, config=backward)


def on_host(arrays):
    return [cupy.asnumpy(x) for x in arrays]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_on_the_second_device(case):
    call = make_call(case)
    inputs = {name: x for name, x in call.items() if name not in ("out", "dout", "lse", "dlse")}
    with current(1):
        arrays = {name: on_device(x) for name, x in inputs.items()}
    out, lse = cuflash.attention_forward(**arrays, **case.options)
    assert {out.device.id, lse.device.id} == {1}
    gold.check(cupy.asnumpy(out), cupy.asnumpy(lse), **inputs, **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_of_a_case_on_the_second_device(case):
    call = make_call(case)
    with current(1):
        arrays = call_on_device(call, case.options)
    results = cuflash.attention_backward(**arrays, **case.options, return_dbias="bias" in call)
    assert {x.device.id for x in results} == {1}
    gold_backward.expect(**call, **case.options).check(*on_host(results))


@FAMILIES
def test_devices_in_alternation_with_the_other_one_current(family):
    arrays = [problem(number) for number in (0, 1)]
    explained = [cuflash.explain(*x[1:], causal=True) for x in arrays]
    forward = [serving(FORWARD, family, explained[number], number) for number in (0, 1)]
    planned = [explain_gradients(arrays[number], number) for number in (0, 1)]
    backward = [serving(BACKWARD, family, planned[number], number) for number in (0, 1)]
    results = {0: [], 1: []}
    for _ in range(3):
        for number in (0, 1):
            with current(1 - number):
                made = gradients(arrays[number], forward[number], backward[number])
                assert cupy.cuda.runtime.getDevice() == 1 - number
            assert {x.device.id for x in made} == {number}
            results[number].append([x.tobytes() for x in on_host(made)])
    assert all(again == results[number][0] for number in (0, 1) for again in results[number])
    if device_info(0).name == device_info(1).name:
        assert results[0] == results[1]


def test_explanation_is_of_the_device_that_holds_the_arrays():
    for number in (0, 1):
        explanation = cuflash.explain(*problem(number)[1:])
        assert (explanation.device, explanation.source) == (device_info(number).name, "default")


def test_a_thread_for_each_device():
    inputs = {number: [problem(number, seed, (2, 4, 100 * (seed + 1), 64)) for seed in range(4)] for number in (0, 1)}
    expected = {number: [on_host(gradients(x)) for x in inputs[number]] for number in (0, 1)}
    wrong = []

    def work(number):
        for _ in range(25):
            for x, right in zip(inputs[number], expected[number], strict=True):
                made = on_host(gradients(x))
                if not all(np.array_equal(one, other) for one, other in zip(made, right, strict=True)):
                    wrong.append(number)

    for number in (0, 1):
        with current(number):
            cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arrays_on_two_devices_are_refused():
    dout, q, _, _ = problem(0)
    _, _, k, v = problem(1)
    with pytest.raises(ValueError, match=r"must be on one device, got q on .*0.* and k on .*1"):
        cuflash.attention(q, k, v)
    out, lse = cuflash.attention_forward(q, q, q)
    with pytest.raises(ValueError, match=r"must be on one device, got q on .*0.* and k on .*1"):
        cuflash.attention_backward(dout, q, k, v, out, lse)


def test_a_bias_on_the_other_device_is_refused_after_the_call_was_remembered():
    _, q, k, v = problem(1)
    bias = [problem(number, shape=(1, 4, 1, 300), dtype="float32")[0] for number in (0, 1)]
    cuflash.attention(q, k, v, bias=bias[1])
    with pytest.raises(ValueError, match=r"must be on one device, got q on .*1.* and bias on .*0"):
        cuflash.attention(q, k, v, bias=bias[0])


def test_a_call_takes_memory_on_its_own_device_only():
    arrays = problem(1)
    pool = cupy.get_default_memory_pool()
    made = gradients(arrays)  # compiles, and makes the counters
    before = pool.used_bytes()  # of the current device, 0
    made = gradients(arrays)
    assert pool.used_bytes() == before
    with current(1):
        assert pool.used_bytes() >= sum(x.nbytes for x in made)


def test_pytorch_tensors_of_the_second_device():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda:1", dtype=torch.float16) for _ in range(3))
    torch.cuda.synchronize(1)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert (out.device, lse.device, torch.cuda.current_device()) == (q.device, q.device, 0)
    gold.check(out.cpu().numpy(), lse.cpu().numpy(), *(x.cpu().numpy() for x in (q, k, v)), causal=True)
