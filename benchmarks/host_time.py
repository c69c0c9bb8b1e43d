"""Host time of a warm call on tiny CuPy arrays, part by part, beside PyTorch; and of first calls.

python benchmarks/host_time.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import cupy
import numpy as np

import cuflash
from cuflash import arrays, backward, call, plan
from cuflash.backward_plan import backward_wgmma_default, why_not_backward_wgmma_by_default
from cuflash.device import device_info
from cuflash.driver import Kernel

FIRST_CALL = """
import time, numpy as np, cupy, cuflash
q, k, v = (cupy.asarray(np.random.standard_normal((1, 2, 128, 64)).astype(np.float16)) for _ in range(3))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cuflash.attention(q, k, v, causal=True)
cupy.cuda.Device().synchronize()
print(1e3 * (time.perf_counter() - start))
"""


def microseconds(run: Callable[[], object], repeats: int = 2000) -> float:
    """Least time of a call of `run` over batches of 50, the GPU drained between batches."""
    best = float("inf")
    for _ in range(repeats // 50):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(50):
            run()
        best = min(best, (time.perf_counter() - start) / 50)
    return best * 1e6


def launched_again(kernel: Kernel) -> None:
    """Launch with the parameters of before, of a kernel that has no schedule to share or whose counter is free."""
    kernel.launch(kernel.take(), 0)


def backward_rows(q: cupy.ndarray, k: cupy.ndarray, v: cupy.ndarray) -> dict[str, Callable[[], object]]:
    """The parts of a call of the backward pass, dO being v."""
    out, lse = cuflash.attention_forward(q, k, v)
    explained = cuflash.explain_backward(v, q, k, v, out, lse)
    given = backward.BackwardCall(q, k, v, out, v, lse)
    known, addresses = backward.CALLS.ready(arrays.CUPY, given, call.Options(), backward.Wanted(), None)
    gradients, (_memory, start) = [make(q) for make in known.makers], known.make_workspace(q)
    addresses += [x.data.ptr for x in gradients] + list(known.absent)
    addresses += [start + offset for offset in known.offsets]
    launch = known.launch
    rows: dict[str, Callable[[], object]] = {
        f"cuflash.attention_backward, family {explained.family}": lambda: cuflash.attention_backward(
            v, q, k, v, out, lse
        ),
        "  look-up of the signature": lambda: backward.CALLS.ready(
            arrays.CUPY, given, call.Options(), backward.Wanted(), None
        ),
        "  allocations": lambda: ([make(q) for make in known.makers], known.make_workspace(q)),
        "  parameters and launches": lambda: launch(addresses),
    }
    spec, device = explained.problem.spec, device_info(0)
    if explained.family != "wgmma" and why_not_backward_wgmma_by_default(spec, device) is None:
        wgmma = backward_wgmma_default(spec, device)
        rows["cuflash.attention_backward, family wgmma"] = lambda: cuflash.attention_backward(
            v, q, k, v, out, lse, config=wgmma
        )
    return rows


def main() -> None:
    """Print the table."""
    q, k, v = (
        cupy.asarray(np.random.default_rng().standard_normal((1, 2, 128, 64)).astype(np.float16)) for _ in range(3)
    )
    spec = cuflash.explain(q, k, v).problem.spec
    mma = plan.mma_default(spec, device_info(0))  # the same on every GPU
    out = cuflash.attention(q, k, v)
    given, options = call.Call(q, k, v), call.Options()
    known, addresses = call.CALLS.ready(arrays.CUPY, given, options, False, None)
    addresses[call.OUT] = out.data.ptr
    addresses.insert(call.LSE, 0)
    made, kernel = known.launch, known.launch.kernel
    block = np.void(bytes(kernel.take().block))
    rows = {
        f"cuflash.attention, family {cuflash.explain(q, k, v).family}": lambda: cuflash.attention(q, k, v),
        "cuflash.attention, family mma": lambda: cuflash.attention(q, k, v, config=mma),
        "cuflash.attention(out=)": lambda: cuflash.attention(q, k, v, out=out),
        "  look-up of the signature": lambda: call.CALLS.ready(arrays.CUPY, given, options, False, None),
        "    of it, reading the arrays": lambda: arrays.CUPY.read(given),
        "  allocation": lambda: known.new_out(q),
        "  parameters and launch": lambda: made(addresses),
        "    of it, the driver's launch": lambda: launched_again(kernel),
        "  (CuPy's launch of the same)": lambda: made.function(
            (made.grid,), (made.threads,), (block,), made.shared_bytes
        ),
    }
    rows |= backward_rows(q, k, v)
    try:
        import torch

        a, b, c = (torch.as_tensor(x, device="cuda") for x in (q, k, v))
        leaves = [x.clone().requires_grad_() for x in (a, b, c)]
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves)
        rows["torch.autograd.grad of its result"] = lambda: torch.autograd.grad(theirs, leaves, c, retain_graph=True)
        rows["torch scaled_dot_product_attention"] = lambda: torch.nn.functional.scaled_dot_product_attention(a, b, c)
        rows["cuflash.attention on PyTorch tensors"] = lambda: cuflash.attention(a, b, c)
    except ImportError:
        pass
    for name, run in rows.items():
        run()
        print(f"{microseconds(run):8.2f} us  {name}", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o700)
        for what in ("cold first call", "first call of a new process, warm cache"):
            times = subprocess.run(
                [sys.executable, "-c", FIRST_CALL],
                env={**os.environ, "CUFLASH_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            print(f"{float(times.stdout.split()[-1]):8.1f} ms  {what}")


if __name__ == "__main__":
    main()
