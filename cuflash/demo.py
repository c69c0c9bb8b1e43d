"""``cuflash demo``: attention on real and on long input, judged against float64 and beside the plain formula."""

from __future__ import annotations

import functools
import importlib.resources
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import cuflash
from cuflash import machine
from cuflash.api import Explanation
from cuflash.reference import standard_attention

BLOCK_ROWS = 32  # the rule of exactness judges blocks of this many query rows
JUDGED_BLOCKS = 8  # a long problem is judged on this many blocks of each head, the first and the last among them
HEADS, HEAD_DIM = 8, 64
TIMED_SECONDS, MAX_REPEATS = 0.5, 50

# What a result may be off by beyond twice an ideal kernel's error, relative to the result.
SLACK = {"float16": 2.0**-14, "bfloat16": 2.0**-11, "float32": 2.0**-22, "float64": 2.0**-50}


class Case(NamedTuple):
    """A causal problem on the host, (batch, heads, N, D), and its result in float64 where that is known beforehand."""

    title: str
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    expected: NDArray[Any] | None = None


class Measured(NamedTuple):
    """What a computation gave, on the host, and its cost: the median of warm calls and the peak of one."""

    result: NDArray[Any]
    seconds: float
    peak_bytes: int


class Verdict(NamedTuple):
    """Relative L2 error over the judged rows, and whether every block of them keeps the rule."""

    error: float
    exact: bool


def run_demo(console: Console, gpu: bool, n: int | None = None) -> bool:
    """Run the demo and print its table.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    gpu : bool
        Compute on CuPy's current GPU, not on the CPU.
    n : int, optional
        Sequence length of the long problem: 16384 on a GPU and 4096 on a CPU unless given.

    Returns
    -------
    bool
        Whether every result keeps the rule of exactness.
    """
    if gpu:
        import cupy as xp

        where = machine.describe_gpu(xp.cuda.Device().id)
    else:
        xp = np
        where = f"the CPU ({machine.describe_cpu()})"
    console.print(f"cuflash {cuflash.__version__} on {where}")
    console.print(f"causal attention, and the plain formula softmax(q @ k.T * scale) @ v in {xp.__name__}:")
    console.print("relative L2 error against float64, time of a warm call, peak memory of a call")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("input", "computed by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("error", "time", "memory"):
        table.add_column(heading, no_wrap=True, justify="right")

    cases = [real_case(), long_case(n or (16384 if gpu else 4096), "float16" if gpu else "float32")]
    exact = True
    for case in cases:
        arrays = [xp.asarray(x) for x in (case.q, case.k, case.v)]
        plan = cuflash.explain(*arrays, causal=True)
        ours = measure(functools.partial(cuflash.attention, *arrays, causal=True), gpu)
        verdict = judge(case, ours.result)
        exact &= verdict.exact
        if table.row_count:
            table.add_row("")
        table.add_row(case.title, f"cuflash {describe_plan(plan)}", *_cells(verdict, ours))
        try:
            plain = measure(functools.partial(plain_formula, xp, *arrays), gpu)
            cells = _cells(judge(case, plain.result), plain)
        except ImportError:
            cells = ("no cuBLAS", "", "")  # CuPy's matmul needs it, and the extras of cuflash do not bring it
        except MemoryError:
            cells = ("too large", "", "")
        table.add_row(f"{case.q.dtype} {case.q.shape}", "plain formula", *cells)
    console.print(table)
    console.print()
    rule = f"in every block of {BLOCK_ROWS} rows, at most twice the error of an ideal kernel of the same dtype"
    console.print(f"exact: {rule}" if exact else f"NOT EXACT; the rule: {rule}", soft_wrap=True)
    return exact


def real_case() -> Case:
    """Queries, keys and values of a language model: data/smollm2_alice_layer14.txt says which."""
    path = importlib.resources.files("cuflash") / "data" / "smollm2_alice_layer14.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        return Case("SmolLM2, layer 14", data["q"], data["k"], data["v"], data["expected"])


def long_case(n: int, dtype: str) -> Case:
    """Standard normal inputs of length `n`."""
    random = np.random.default_rng(0)
    shape = (1, HEADS, n, HEAD_DIM)
    return Case(f"random, N = {n}", *(random.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)))


def plain_formula(xp: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal attention as one writes it without a fused kernel, in the dtype of the inputs; `xp` is NumPy or CuPy."""
    n, d = q.shape[-2:]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    s = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(d))
    s = xp.where(xp.tri(n, dtype=bool), s, xp.asarray(-xp.inf, s.dtype))
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ v


def judge(case: Case, result: NDArray[Any]) -> Verdict:
    """Hold `result` against float64, block by block: the rule of docs/exactness.md."""
    squared_error = squared_gold = 0.0
    exact = result.shape == case.q.shape and result.dtype == case.q.dtype
    for rows in _judged_blocks(case.q.shape[-2]):
        # The rows of a block see the keys up to its last row: the bottom-right causal mask of a smaller problem.
        q, k, v = case.q[..., rows, :], case.k[..., : rows.stop, :], case.v[..., : rows.stop, :]
        known = case.expected
        gold = standard_attention(q, k, v, causal=True) if known is None else known[..., rows, :].astype(np.float64)
        size = _norm(gold)
        error, ideal_error = _norm(result[..., rows, :] - gold), _norm(ideal_kernel(q, k, v) - gold)
        exact &= bool(np.all(error <= 2 * ideal_error + SLACK[case.q.dtype.name] * size))
        squared_error += float(np.sum(error**2))
        squared_gold += float(np.sum(size**2))
    return Verdict(math.sqrt(squared_error / squared_gold), exact)


def ideal_kernel(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """The yardstick: products and softmax in float32, P and the result rounded to the dtype of the inputs."""
    dtype = q.dtype
    work = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (x.astype(work) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    s = q @ k.swapaxes(-1, -2) * work(1 / math.sqrt(q.shape[-1]))
    n_q, n_k = s.shape[-2:]
    s = np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    rounded = p.astype(dtype).astype(work)
    ideal: NDArray[Any] = (rounded @ v / p.sum(axis=-1, keepdims=True)).astype(dtype)
    return ideal


def describe_plan(plan: Explanation) -> str:
    """Kernel family and tile, ``"simt 64 x 64"`` say."""
    return f"{plan.family} {plan.config.b_r} x {plan.config.b_c}"


def measure(compute: Callable[[], Any], gpu: bool) -> Measured:
    """Run `compute` once for its result and its memory, then a few times for its time."""
    result, peak = _peak_on_gpu(compute) if gpu else _peak_on_cpu(compute)
    seconds: list[float] = []
    while len(seconds) < MAX_REPEATS and sum(seconds) < TIMED_SECONDS:
        start = time.perf_counter()
        compute()
        if gpu:
            _synchronize()
        seconds.append(time.perf_counter() - start)
    return Measured(result, statistics.median(seconds), peak)


def _peak_on_cpu(compute: Callable[[], Any]) -> tuple[NDArray[Any], int]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = compute()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _peak_on_gpu(compute: Callable[[], Any]) -> tuple[NDArray[Any], int]:
    """The result, and what a memory pool that serves this call alone takes from the GPU, the result included."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        result = cupy.asnumpy(compute())
    return result, pool.total_bytes()


def _synchronize() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _norm(x: NDArray[Any]) -> NDArray[Any]:
    """The L2 norm over rows and columns, for each batch entry and head."""
    return np.asarray(np.linalg.norm(x, axis=(-2, -1)))


def _judged_blocks(n: int) -> Iterator[slice]:
    blocks = -(-n // BLOCK_ROWS)
    for block in sorted({round(x) for x in np.linspace(0, blocks - 1, JUDGED_BLOCKS)}):
        yield slice(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, n))


def _cells(verdict: Verdict, measured: Measured) -> tuple[str, str, str]:
    seconds = measured.seconds
    duration = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    return f"{verdict.error:.1e}", duration, machine.format_bytes(measured.peak_bytes)
