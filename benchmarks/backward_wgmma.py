"""Campaign: backward tiles of the Hopper family, checked against float64, timed in turn with cuDNN.

python benchmarks/backward_wgmma.py [--check] [--rounds 7] [--budget 80] [--only 128-4096]
python benchmarks/backward_wgmma.py --kernels [--only=-1024-]    the share of each kernel, with the default tiles

With --check only small problems of odd sizes are computed. cuDNN is PyTorch's. The backward pass alone is timed, all
kernels counted. B * N = 16384, H * D = 2048, layout (B, N, H, D). Operations: 10 B H N_q N_k D, half if causal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash
from cuflash.backward_config import BackwardWgmmaConfig
from cuflash.timing import finish, flops, interleaved

TOKENS, WIDTH = 16384, 2048
CAPS = {"float16": 1e-3, "bfloat16": 6e-3}


class Case(NamedTuple):
    """A problem; heads are (of queries, of keys)."""

    d: int
    n: tuple[int, int]
    causal: bool
    dtype: str = "bfloat16"
    heads: tuple[int, int] = (0, 0)
    batch: int = 0
    window: int | None = None

    def __str__(self) -> str:
        n = f"{self.n[0]}" if self.n[0] == self.n[1] else f"{self.n[0]}x{self.n[1]}"
        group = f"-{self.heads[0]}:{self.heads[1]}" if self.heads[0] != self.heads[1] else ""
        window = f"-window{self.window}" if self.window else ""
        return f"{self.d}-{n}-{'causal' if self.causal else 'full'}-{self.dtype}{group}{window}"

    def options(self) -> dict[str, Any]:
        """As cuflash takes them."""
        window = {"window": (self.window, 0)} if self.window else {}
        return {"causal": self.causal, "layout": "bnhd", **window}


def timed(d: int, n: int, causal: bool, dtype: str = "bfloat16", group: int = 1) -> Case:
    """A case of the usual size."""
    heads = WIDTH // d * (2 if group > 1 else 1)
    return Case(d, (n, n), causal, dtype, (heads, heads // group), TOKENS // n)


TIMED = [
    *(timed(d, n, causal) for n in (4096, 1024, 16384) for d in (128, 64, 256) for causal in (False, True)),
    *(timed(128, 4096, causal, group=8) for causal in (False, True)),
    *(timed(128, 4096, causal, "float16") for causal in (False, True)),
    *(timed(128, n, causal) for n in (4000, 4100) for causal in (False, True)),
    *(
        Case(128, (32768, 32768), causal, heads=(4, 4), batch=1) for causal in (False, True)
    ),  # more tiles of keys than blocks
]
SMALL = [
    Case(d, n, causal, dtype, heads, batch)
    for batch, heads, n in (
        (2, (3, 3), (256, 256)),
        (1, (2, 2), (77, 77)),
        (2, (4, 2), (1000, 1000)),
        (1, (6, 1), (130, 515)),
        (1, (8, 8), (2048, 2048)),
        (1, (2, 2), (1, 300)),
        (1, (2, 1), (400, 130)),
        (1, (40, 40), (512, 512)),
        (1, (1, 1), (300, 18000)),
    )
    for dtype in CAPS
    for d in (128, 64, 80, 256, 192)
    for causal in (False, True)
]
SMALL += [Case(128, (700, 900), False, "bfloat16", (4, 2), 2, window=100)]
TILES = {
    64: (BackwardWgmmaConfig(128, k_stages=2), BackwardWgmmaConfig(64)),
    128: (BackwardWgmmaConfig(64), BackwardWgmmaConfig(64, 64, k_stages=2)),
    256: (BackwardWgmmaConfig(64, 64),),
}
CANDIDATES = {
    64: (
        BackwardWgmmaConfig(128, k_stages=2),
        BackwardWgmmaConfig(128),
        BackwardWgmmaConfig(128, k_stages=2, waves=2),
    ),
    128: (
        BackwardWgmmaConfig(64),
        BackwardWgmmaConfig(64, dq_stages=3),
        BackwardWgmmaConfig(64, waves=2),
        BackwardWgmmaConfig(64, 64, k_stages=2),
    ),
    256: (BackwardWgmmaConfig(64, 64), BackwardWgmmaConfig(64, 64, waves=6)),
}


def show(config: BackwardWgmmaConfig) -> str:
    """A configuration in a few characters."""
    return f"{config.b_r}x{config.b_c} k{config.k_stages} dq{config.dq_stages} waves{config.waves}"


def make_inputs(case: Case) -> tuple[Any, ...]:
    """Standard normal q, k, v and dO."""
    dtype = getattr(torch, case.dtype)

    def normal(n: int, heads: int) -> Any:
        return torch.randn((case.batch, n, heads, case.d), device="cuda").to(dtype)

    (n_q, n_k), (h_q, h_kv) = case.n, case.heads
    return normal(n_q, h_q), normal(n_k, h_kv), normal(n_k, h_kv), normal(n_q, h_q)


def gold(case: Case, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, Any, Any]:
    """The gradients of the last head of k and v of the last batch entry, in float64."""
    group = case.heads[0] // case.heads[1]
    q, dout = (x[-1, :, -group:].double() for x in (q, dout))
    k, v = (x[-1, :, -1].double() for x in (k, v))
    rows = torch.arange(case.n[0], device="cuda")[:, None] + case.n[1] - case.n[0]
    keys = torch.arange(case.n[1], device="cuda")
    sees = torch.ones(case.n, dtype=torch.bool, device="cuda")
    if case.causal:
        sees &= keys <= rows
    if case.window:
        sees &= (keys <= rows) & (keys >= rows - case.window)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for h in range(group):
        s = (q[:, h] @ k.T / math.sqrt(case.d)).masked_fill(~sees, -math.inf)
        p = torch.softmax(s, -1).nan_to_num(0.0)
        dp = dout[:, h] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(case.d)
        dv += p.T @ dout[:, h]
        dk += ds.T @ q[:, h]
        dq[:, h] = ds @ k
    return dq, dk[:, None], dv[:, None]


def complaint(case: Case, got: tuple[Any, ...], again: tuple[Any, ...], expected: Any) -> str | None:
    """What is wrong with gradients; None where nothing is."""
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        own = x[-1, :, -y.shape[1] :].double()
        error = float((own - y).norm() / y.norm().clamp(min=1e-30))
        if not error < CAPS[case.dtype] or not bool(torch.isfinite(x).all()):
            return f"error of {name} {error:.2e}"
    if not all(torch.equal(x, y) for x, y in zip(got, again, strict=True)):
        return "another run gives other bits"
    return None


def prepare(cases: list[Case], configs: Callable[[Case], Any]) -> dict[tuple[Case, BackwardWgmmaConfig], str | None]:
    """Compile what the cases need; why it cannot be, by case and configuration."""
    jobs = [(case, config) for case in cases for config in configs(case)]

    def compiled(job: tuple[Case, BackwardWgmmaConfig]) -> str | None:
        case, config = job
        q, k, v, dout = make_inputs(case._replace(batch=1, n=(64, 64)))
        lse = torch.zeros((1, case.heads[0], 64), device="cuda")
        try:
            cuflash.prepare_backward(dout, q, k, v, q, lse, config=config, **case.options())
        except Exception as error:  # the campaign goes on without the candidate, and says so
            return f"{case} {show(config)}: {str(error).splitlines()[0]}"
        return None

    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refusals = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    print(f"compiled for {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for refusal in filter(None, refusals.values()):
        print("NOT COMPILED", refusal)
    return refusals


def checked(case: Case, configs: Any, arrays: Any) -> Iterator[tuple[BackwardWgmmaConfig, Any, str | None]]:
    """Each configuration, a call with it, and what is wrong with its results."""
    q, k, v, dout = arrays
    given = case.options()
    out, lse = cuflash.attention_forward(q, k, v, **given)
    expected = gold(case, q, k, v, dout)
    for config in configs:

        def run(config: Any = config) -> Any:
            return cuflash.attention_backward(dout, q, k, v, out, lse, config=config, **given)

        first, again = (finish(run, f"{case} {show(config)}") for _ in range(2))
        yield config, run, complaint(case, first, again, expected)


def check_small() -> int:
    """Small problems; how many are wrong."""

    def configs(case: Case) -> list[BackwardWgmmaConfig]:
        return list(TILES[next(d for d in TILES if case.d <= d)])

    refusals, failed, count = prepare(SMALL, configs), 0, 0
    for case in SMALL:
        legal = [config for config in configs(case) if refusals[case, config] is None]
        for config, _, wrong in checked(case, legal, make_inputs(case)):
            count += 1
            if wrong:
                failed += 1
                print(f"WRONG {case} {case.heads} {show(config)}: {wrong}", flush=True)
    print(f"small problems: {count - failed} of {count} right", flush=True)
    return failed


def print_kernels(case: Case, repeats: int = 20) -> None:
    """What each kernel takes of the time of all, by PyTorch's profiler."""
    q, k, v, dout = make_inputs(case)
    out, lse = cuflash.attention_forward(q, k, v, **case.options())

    def run() -> Any:
        return cuflash.attention_backward(dout, q, k, v, out, lse, **case.options())

    finish(run, str(case))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    took = {event.key: event.device_time_total / repeats for event in profile.key_averages()}
    took = {name.removeprefix("backward_wgmma_"): us for name, us in took.items() if name.startswith("backward_wgmma_")}
    shares = (f"{name} {us:.1f} us ({us / sum(took.values()):.1%})" for name, us in took.items())
    print(f"{case!s:28} {', '.join(shares)}", flush=True)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="small problems only")
    parser.add_argument("--kernels", action="store_true", help="the share of each kernel, by the profiler")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no further case is started")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    if options.check:
        return 1 if check_small() else 0

    cases = [case for case in TIMED if options.only in str(case)]
    if options.kernels:
        for case in cases:
            print_kernels(case)
        return 0
    refusals = prepare(cases, lambda case: CANDIDATES[case.d])
    table, failed = [], 0
    for case in cases:
        if time.monotonic() - began > options.budget:
            print("out of budget before", case)
            break
        q, k, v, dout = arrays = make_inputs(case)
        runs: dict[str, Callable[[], Any]] = {}
        legal = [config for config in CANDIDATES[case.d] if refusals[case, config] is None]
        for config, run, wrong in checked(case, legal, arrays):
            if wrong:
                print(f"WRONG {case} {show(config)}: {wrong}", flush=True)
                failed += 1
            else:
                runs[show(config)] = run
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            theirs = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=case.causal, enable_gqa=case.heads[0] != case.heads[1]
            )
        theirs_dout = dout.transpose(1, 2)

        def rival() -> Any:
            return torch.autograd.grad(theirs, leaves, theirs_dout, retain_graph=True)  # noqa: B023

        runs["cuDNN"] = rival
        times = interleaved(runs, options.rounds)
        work = 2.5 * flops(case.batch, case.heads[0], *case.n, case.d, case.causal)
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            ratio = times["cuDNN"] / ms
            table.append({"case": str(case), "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": ratio})
            print(f"{case!s:28} {work / ms / 1e9:7.1f} TFLOP/s {ratio:5.2f}x  {name}", flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "backward_wgmma.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
