"""Campaign: tiles of the tensor-core family, checked against float64, timed in interleaved rounds beside PyTorch.

python benchmarks/forward_mma.py [--rounds 7] [--budget 230] [--only bfloat16-128] [--default-only]

PyTorch's backend is FlashAttention-2 for 16-bit elements and the memory-efficient one for float32. B * N = 16384,
H * D = 2048 (the nearest multiple of D below), N = 4096. A head dim counts as what it is, not as what it is padded to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from timing import flops, interleaved, wait
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash
from cuflash.config import MmaConfig

N = 4096
CASES = (  # dtype, D, options
    ("bfloat16", 128, {}),
    ("bfloat16", 128, {"causal": True}),
    ("bfloat16", 64, {}),
    ("bfloat16", 64, {"causal": True}),
    ("bfloat16", 256, {}),
    ("bfloat16", 256, {"causal": True}),
    ("float32", 128, {}),
    ("float32", 128, {"causal": True}),
    ("bfloat16", 96, {"causal": True}),
    ("bfloat16", 80, {"causal": True}),
    ("bfloat16", 72, {"causal": True}),
    ("float32", 64, {}),
    ("bfloat16", 128, {"softcap": 30.0}),
    ("bfloat16", 128, {"bias": True}),
    ("float16", 128, {}),
)
# b_r, b_c, warps, stages, q_in_registers, swizzle, min_blocks
WIDE = ((128, 64, 4, 2, False, True, 1), (128, 64, 4, 1, False, True, 1), (128, 64, 4, 2, False, False, 1))
CANDIDATES = {
    ("bfloat16", 64): (
        (128, 64, 4, 2, False, True, 1),
        (128, 64, 4, 2, True, True, 1),
        (128, 64, 4, 3, True, True, 1),
        (128, 96, 4, 2, True, True, 1),
        (128, 128, 4, 2, False, True, 1),
        (128, 128, 4, 1, False, True, 1),
        (128, 64, 8, 2, True, True, 2),
        (64, 64, 4, 2, True, True, 3),
    ),
    ("bfloat16", 128): (
        *WIDE,
        (128, 32, 4, 2, False, True, 1),
        (128, 32, 4, 3, False, True, 1),
        (128, 48, 4, 2, False, False, 1),
        (128, 64, 8, 2, True, True, 1),
        (64, 64, 4, 2, True, True, 2),
        (256, 64, 8, 2, False, True, 1),
    ),
    ("bfloat16", 256): (
        (128, 64, 8, 1, False, False, 1),
        (128, 64, 8, 1, False, True, 1),
        (128, 32, 8, 2, False, True, 1),
        (128, 32, 8, 2, True, True, 1),
        (128, 32, 8, 1, True, True, 1),
        (64, 32, 4, 1, False, True, 2),
        (64, 64, 4, 1, False, True, 1),
    ),
    ("bfloat16", 96): (
        (128, 64, 4, 2, False, False, 1),
        (128, 64, 4, 1, False, False, 1),
        (128, 32, 4, 3, False, False, 1),
        (128, 64, 8, 2, True, False, 1),
    ),
    ("bfloat16", 80): (
        (128, 64, 4, 2, False, False, 1),
        (128, 64, 4, 1, False, False, 1),
        (128, 96, 4, 2, False, False, 1),
        (128, 64, 8, 2, True, False, 1),
    ),
    ("float32", 64): (
        (128, 32, 8, 2, False, False, 1),
        (128, 64, 8, 1, False, False, 1),
        (128, 32, 4, 2, False, True, 1),
        (64, 32, 4, 2, False, True, 2),
    ),
    ("float32", 128): (
        (128, 32, 8, 2, False, False, 1),
        (128, 32, 8, 2, False, True, 1),
        (128, 32, 8, 1, False, True, 1),
        (128, 64, 8, 1, False, True, 1),
        (128, 32, 4, 2, False, True, 1),
        (64, 32, 4, 1, False, True, 2),
        (128, 16, 4, 2, False, True, 1),
    ),
}
CANDIDATES["bfloat16", 72] = CANDIDATES["bfloat16", 80]
CANDIDATES["float16", 128] = CANDIDATES["bfloat16", 128][:2]
CAPS = {"float16": 6e-4, "bfloat16": 4e-3, "float32": 2e-6}
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def config_of(dtype: str, tile: tuple[Any, ...]) -> MmaConfig:
    """A candidate as a configuration."""
    b_r, b_c, warps, stages, q_in_registers, swizzle, min_blocks = tile
    return MmaConfig(b_r, b_c, warps, stages, q_in_registers, swizzle, min_blocks, 8 if dtype == "float32" else 16)


def label(case: tuple[str, int, dict[str, Any]]) -> str:
    """A case in a word."""
    return "-".join([case[0], str(case[1]), *case[2]]) if case[2] else f"{case[0]}-{case[1]}-full"


def show(config: MmaConfig | None) -> str:
    """A configuration in a few characters."""
    if config is None:
        return "default"
    flags = ("R" if config.q_in_registers else "") + ("S" if config.swizzle else "")
    return f"{config.b_r}x{config.b_c} w{config.warps} s{config.stages} b{config.min_blocks} {flags}"


def finish(run: Callable[[], Any], what: str) -> Any:
    """Run once and wait for it, under the watchdog."""
    result = run()
    event = cupy.cuda.Event()
    event.record()
    wait(event, what)
    return result


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=230, help="seconds after which no further case is started")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--default-only", action="store_true", help="time the planner's choice alone")
    options = parser.parse_args()
    began = time.monotonic()
    cases = [case for case in CASES if options.only in label(case)]

    def inputs(dtype: str, d: int, n: int) -> tuple[Any, ...]:
        shape = (max(16384 // n, 1) if n == N else 1, max(2048 // d, 1) if n == N else 1, n, d)
        return tuple(torch.randn(shape, device="cuda").to(TORCH_DTYPES[dtype]) for _ in range(3))

    def call_options(case: tuple[str, int, dict[str, Any]], n: int) -> dict[str, Any]:
        given = dict(case[2])
        if given.pop("bias", False):
            heads = 2048 // case[1] if n == N else 1
            given["bias"] = torch.randn((1, heads, 1, n), device="cuda").to(TORCH_DTYPES[case[0]])
        return given

    jobs = []
    for case in cases:
        tiles = () if options.default_only else CANDIDATES[case[0], case[1]]
        small, given = inputs(case[0], case[1], 128), call_options(case, 128)
        jobs += [(case, config, small, given) for config in (None, *(config_of(case[0], tile) for tile in tiles))]

    def compiled(job: tuple[Any, ...]) -> str | None:
        case, config, (q, k, v), given = job
        try:
            cuflash.prepare(q, k, v, config=config, **given)
        except Exception as error:  # the campaign goes on without the candidate, and says so
            return f"{label(case)} {show(config)}: {str(error).splitlines()[0]}"
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refusals = list(pool.map(compiled, jobs))
    print(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for refusal in filter(None, refusals):
        print("NOT COMPILED", refusal)

    table, failed = [], 0
    for case in cases:
        if time.monotonic() - began > options.budget:
            print("out of budget before", label(case))
            break
        dtype, d, _ = case
        q, k, v = inputs(dtype, d, N)
        given = call_options(case, N)
        causal = bool(given.get("causal"))
        out = torch.empty_like(q)
        rng = np.random.default_rng()
        rows = np.sort(rng.choice(N, 48, replace=False))
        head = q.shape[1] - 1
        sees = np.arange(N) <= rows[:, None] if causal else None
        bias = given["bias"][:, head].double().cpu().numpy()[0] if "bias" in given else None
        gold = cuflash.reference.standard_attention(
            *(x[-1, head].double().cpu().numpy()[take] for x, take in ((q, rows), (k, slice(None)), (v, slice(None)))),
            mask=sees,
            softcap=given.get("softcap"),
            bias=bias,
        )

        runs: dict[str, Callable[[], Any]] = {}
        for (job_case, config, _, _), refusal in zip(jobs, refusals, strict=True):
            if job_case is not case or refusal:
                continue

            def run(config: MmaConfig | None = config) -> Any:
                return cuflash.attention(q, k, v, config=config, out=out, **given)  # noqa: B023

            out.fill_(float("nan"))
            finish(run, show(config))
            got = out[-1, head].double().cpu().numpy()[rows]
            error = float(np.linalg.norm(got - gold) / np.linalg.norm(gold))
            finite = bool(torch.isfinite(out).all())
            if error < CAPS[dtype] and finite:
                runs[show(config)] = run
            else:
                print(f"WRONG {label(case)} {show(config)}: error {error:.2e}, finite {finite}", flush=True)
                failed += 1

        backend = SDPBackend.EFFICIENT_ATTENTION if dtype == "float32" else SDPBackend.FLASH_ATTENTION

        def rival() -> Any:
            with sdpa_kernel(backend):  # noqa: B023
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: B023

        runs["pytorch"] = rival
        times = interleaved(runs, options.rounds)
        work = flops(q.shape[0], q.shape[1], N, N, d, causal)
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            ratio = times["pytorch"] / ms
            table.append({"case": label(case), "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": ratio})
    for row in table:
        print(f"{row['case']:24} {row['tflops']:7.1f} TFLOP/s {row['ratio']:5.2f}x  {row['run']}")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "forward_mma.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
