"""Campaign: backward tiles of the tensor-core family, checked against float64, timed in turn with PyTorch.

python benchmarks/backward_mma.py [--rounds 7] [--budget 80] [--only bfloat16-128] [--default-only]

PyTorch's backend is FlashAttention-2 for 16-bit elements, the memory-efficient one and the plain formula for float32;
the ratio is to the faster one. The backward pass alone is timed, all kernels counted. B * N = 16384, H * D = 2048, but
for the longest sequence, which has one head. Operations: 10 B H N_q N_k D, half if causal.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash
from cuflash.backward_config import BackwardMmaConfig, BackwardSimtConfig
from cuflash.timing import BACKWARD_WORK, finish, flops, interleaved


class Case(NamedTuple):
    """A problem: dtype, head dim, sequence length, options, and how many query heads share a head of k and v."""

    dtype: str
    d: int
    n: int = 4096
    options: tuple[tuple[str, Any], ...] = ()
    group: int = 1

    def __str__(self) -> str:
        extra = [name for name, _ in self.options] or ["full"]
        return "-".join(
            [self.dtype, str(self.d), str(self.n), *extra, *([f"gqa{self.group}"] if self.group > 1 else [])]
        )


CAUSAL = (("causal", True),)
LONG = 2**18
CASES = (
    Case("bfloat16", 128),
    Case("bfloat16", 128, options=CAUSAL),
    Case("float32", 128, 1024),
    Case("float32", 128, 1024, CAUSAL),
    Case("bfloat16", 64, LONG),
    Case("bfloat16", 64),
    Case("bfloat16", 64, options=CAUSAL),
    Case("bfloat16", 128, 1024, CAUSAL),
    Case("bfloat16", 256, options=CAUSAL),
    Case("float16", 128, options=CAUSAL),
    Case("bfloat16", 128, 16384, CAUSAL),
    Case("bfloat16", 128, options=CAUSAL, group=8),
    Case("bfloat16", 96, options=CAUSAL),
    Case("bfloat16", 128, options=(("softcap", 30.0),)),
)
CANDIDATES = {
    ("bfloat16", 64): (
        BackwardMmaConfig(64, 128, 8, 4),
        BackwardMmaConfig(128, 128, 8, 4),
        BackwardMmaConfig(128, 128, 8, 8),
        BackwardMmaConfig(64, 128, 8, 8),
        BackwardMmaConfig(64, 64, 4, 4),
    ),
    ("bfloat16", 96): (BackwardMmaConfig(64, 128, 8, 4, swizzle=False), BackwardMmaConfig(64, 128, 8, 8)),
    ("bfloat16", 128): (
        BackwardMmaConfig(64, 128, 8, 4),
        BackwardMmaConfig(64, 128, 8, 4, stages=1),
        BackwardMmaConfig(64, 128, 8, 4, vector_adds=False),
        BackwardMmaConfig(32, 128, 8, 4),
        BackwardMmaConfig(64, 128, 8, 8),
        BackwardMmaConfig(32, 64, 4, 4),
        BackwardMmaConfig(64, 64, 8, 4),
    ),
    ("bfloat16", 256): (
        BackwardMmaConfig(64, 64, 8, 2),
        BackwardMmaConfig(64, 64, 8, 4),
        BackwardMmaConfig(32, 64, 8, 4),
        BackwardMmaConfig(64, 64, 8, 2, stages=1),
    ),
    ("float16", 128): (BackwardMmaConfig(64, 128, 8, 4),),
    ("float32", 128): (
        BackwardMmaConfig(64, 64, 8, 2, stages=1, mma_k=8),
        BackwardMmaConfig(64, 64, 8, 4, stages=1, mma_k=8),
        BackwardMmaConfig(32, 64, 8, 4, mma_k=8),
        BackwardMmaConfig(32, 64, 8, 4, stages=1, mma_k=8),
    ),
}
CAPS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 5e-6}
GOLD_ROWS = 4096  # at a time


def show(config: BackwardMmaConfig | BackwardSimtConfig | None) -> str:
    """A configuration in a few characters."""
    if not isinstance(config, BackwardMmaConfig):
        return "default" if config is None else f"simt {config.b_r}x{config.b_c}"
    flags = "".join(letter for letter, is_on in (("S", config.swizzle), ("V", config.vector_adds)) if is_on)
    return f"{config.b_r}x{config.b_c} w{config.warps}/{config.key_warps} s{config.stages} b{config.min_blocks} {flags}"


def make_inputs(case: Case, n: int) -> tuple[Any, ...]:
    """Standard normal q, k, v and dO; for `n` other than the case's, one batch entry and few heads."""
    dtype = getattr(torch, case.dtype)
    whole = n == case.n
    batch, heads = (max(16384 // n, 1), max(2048 // case.d, 1)) if whole and n < LONG else (1, case.group)
    q, dout = (torch.randn((batch, heads, n, case.d), device="cuda").to(dtype) for _ in range(2))
    k, v = (torch.randn((batch, heads // case.group, n, case.d), device="cuda").to(dtype) for _ in range(2))
    return q, k, v, dout


def gold(case: Case, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, Any, Any]:
    """The gradients of the last head of k and v, in float64."""
    q, dout = (x[-1, -case.group :].double() for x in (q, dout))
    k, v = (x[-1, -1:].double() for x in (k, v))
    options = dict(case.options)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for h in range(case.group):
        for first in range(0, q.shape[1], GOLD_ROWS):
            rows = slice(first, first + GOLD_ROWS)
            s = q[h, rows] @ k[0].T / math.sqrt(case.d)
            slope: Any = 1.0
            if "softcap" in options:
                t = torch.tanh(s / options["softcap"])
                s, slope = options["softcap"] * t, 1 - t * t
            if "causal" in options:
                s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + first), -math.inf)
            p = torch.softmax(s, -1)
            dp = dout[h, rows] @ v[0].T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * slope / math.sqrt(case.d)
            dv[0] += p.T @ dout[h, rows]
            dk[0] += ds.T @ q[h, rows]
            dq[h, rows] = ds @ k[0]
    return dq, dk, dv


def rivals(case: Case, q: Any, k: Any, v: Any, dout: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's backward passes that serve the case."""
    if "softcap" in dict(case.options):
        return {}
    backends = {"pytorch": SDPBackend.FLASH_ATTENTION}
    if case.dtype == "float32":
        backends = {"pytorch": SDPBackend.EFFICIENT_ATTENTION, "pytorch formula": SDPBackend.MATH}
    runs = {}
    for name, backend in backends.items():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal="causal" in dict(case.options), enable_gqa=case.group > 1
            )
        runs[name] = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    return runs


def check(case: Case, got: tuple[Any, ...], expected: tuple[Any, ...]) -> str | None:
    """What is wrong with gradients; None where nothing is."""
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        own = x[-1, -y.shape[0] :].double()
        error = float((own - y).norm() / y.norm())
        if not error < CAPS[case.dtype] * (1.5 if "softcap" in dict(case.options) else 1) or not bool(
            torch.isfinite(x).all()
        ):
            return f"error of {name} {error:.2e}"
    return None


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no further case is started")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--default-only", action="store_true", help="time the planner's choice alone")
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    cases = [case for case in CASES if options.only in str(case)]

    jobs = []
    for case in cases:
        q, k, v, dout = make_inputs(case, 128)
        lse = torch.zeros(
            q.shape[:-1], device="cuda", dtype=torch.float64 if case.dtype == "float32" else torch.float32
        )
        tiles = () if options.default_only or case.n == LONG else CANDIDATES[case.dtype, case.d]
        jobs += [(case, config, (dout, q, k, v, q, lse)) for config in (None, *tiles)]

    def compiled(job: tuple[Any, ...]) -> str | None:
        case, config, arrays = job
        try:
            cuflash.prepare_backward(*arrays, config=config, **dict(case.options))
        except Exception as error:  # the campaign goes on without the candidate, and says so
            return f"{case} {show(config)}: {str(error).splitlines()[0]}"
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refusals = list(pool.map(compiled, jobs))
    print(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for refusal in filter(None, refusals):
        print("NOT COMPILED", refusal)

    table, failed = [], 0
    for case in cases:
        if time.monotonic() - began > options.budget:
            print("out of budget before", case)
            break
        given = dict(case.options)
        q, k, v, dout = make_inputs(case, case.n)
        out, lse = cuflash.attention_forward(q, k, v, **given)
        expected = gold(case, q, k, v, dout)
        runs: dict[str, Callable[[], Any]] = {}
        for (job_case, config, _), refusal in zip(jobs, refusals, strict=True):
            if job_case is not case or refusal:
                continue

            def run(config: Any = config) -> Any:
                return cuflash.attention_backward(dout, q, k, v, out, lse, config=config, **given)  # noqa: B023

            first, again = (finish(run, f"{case} {show(config)}") for _ in range(2))
            complaint = check(case, first, expected)
            if complaint is None and not all(torch.equal(x, y) for x, y in zip(first, again, strict=True)):
                complaint = "another run gives other bits"
            if complaint is None:
                runs[show(config)] = run
            else:
                print(f"WRONG {case} {show(config)}: {complaint}", flush=True)
                failed += 1
            del first, again

        if case.n == LONG and runs:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            finish(runs["default"], str(case))
            taken = torch.cuda.max_memory_allocated() - before
            print(
                f"{case!s:32} {taken / 2**20:.0f} MiB of gradients and scratch, {taken / q.nbytes:.1f} times q",
                flush=True,
            )
        theirs = rivals(case, q, k, v, dout)
        times = interleaved(runs | theirs, options.rounds)
        best = min((times[name] for name in theirs), default=math.nan)
        work = BACKWARD_WORK * flops(q.shape[0], q.shape[1], case.n, case.n, case.d, "causal" in given)
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            ratio = best / ms
            table.append({"case": str(case), "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": ratio})
            print(f"{case!s:32} {work / ms / 1e9:7.1f} TFLOP/s {ratio:5.2f}x  {name}", flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "backward_mma.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
