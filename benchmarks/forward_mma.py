"""Campaign: tiles of the tensor-core family, checked against float64, timed in interleaved rounds beside their peers.

python benchmarks/forward_mma.py [--rounds 7] [--budget 100] [--only bfloat16-128] [--all]

The peers are PyTorch's backends, FlashAttention-2 for 16-bit elements and the memory-efficient one for float32, or the
formula in CuPy, or, for a feature, the same call without it. B * N = 16384, H * D = 2048 (the nearest multiple of D
below), N = 4096. A head dim counts as what it is, not as what it is padded to.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from forward_simt import naive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cuflash
from cuflash.config import MmaConfig
from cuflash.device import known_device
from cuflash.plan import mma_default
from cuflash.problem import Spec
from cuflash.timing import finish, flops, interleaved

N, ROWS = 4096, 48
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


@dataclass(frozen=True)
class Workload:
    """One row of the bars: how many times as fast as the peer the default must be."""

    dtype: str
    d: int
    peer: str
    bar: float
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.dtype, str(self.d), *(self.options or ["full"])])

    @property
    def causal(self) -> bool:
        """Whether the causal mask is on."""
        return bool(self.options.get("causal"))

    @property
    def spec(self) -> Spec:
        """What is compiled in."""
        d = -(-self.d // 16) * 16
        bias = self.dtype if "bias" in self.options else None
        return Spec(self.dtype, d, d, right=self.causal, softcap="softcap" in self.options, bias=bias)


WORKLOADS = (
    Workload("bfloat16", 128, "fa2", 1.0),
    Workload("bfloat16", 128, "fa2", 1.0, {"causal": True}),
    Workload("bfloat16", 64, "fa2", 0.9),
    Workload("bfloat16", 64, "fa2", 0.9, {"causal": True}),
    Workload("bfloat16", 256, "fa2", 0.9),
    Workload("bfloat16", 256, "fa2", 0.9, {"causal": True}),
    Workload("bfloat16", 72, "fa2", 1.0, {"causal": True}),
    Workload("bfloat16", 80, "fa2", 1.0, {"causal": True}),
    Workload("bfloat16", 96, "fa2", 1.0),
    Workload("bfloat16", 96, "fa2", 1.0, {"causal": True}),
    Workload("bfloat16", 128, "without", 0.85, {"softcap": 30.0}),
    Workload("bfloat16", 128, "without", 0.85, {"bias": True}),
    Workload("float32", 128, "efficient", 1.0),
    Workload("float32", 128, "efficient", 1.0, {"causal": True}),
    Workload("float32", 64, "efficient", 1.0),
    Workload("float16", 128, "cupy", 25),
)
# b_r, b_c, warps, stages, in which R keeps Q in registers, S swizzles
CANDIDATES: dict[tuple[str, int], tuple[tuple[int, int, int, int, str], ...]] = {
    ("bfloat16", 64): (
        (128, 128, 4, 1, "S"),
        (128, 128, 4, 2, "S"),
        (128, 96, 4, 2, "RS"),
        (128, 64, 4, 2, "RS"),
        (128, 64, 4, 2, "S"),
        (128, 64, 4, 3, "RS"),
    ),
    ("bfloat16", 128): (
        (128, 64, 4, 1, "S"),
        (128, 64, 4, 2, "S"),
        (128, 48, 4, 2, ""),
        (128, 32, 4, 2, "S"),
        (128, 32, 4, 1, "S"),
        (256, 64, 8, 2, "S"),
        (64, 64, 4, 2, "RS"),
    ),
    ("bfloat16", 256): (
        (128, 64, 8, 1, "S"),
        (128, 48, 8, 1, ""),
        (64, 64, 4, 1, "S"),
        (64, 48, 4, 1, ""),
        (128, 32, 8, 2, "RS"),
    ),
    ("bfloat16", 96): (
        (128, 64, 4, 2, ""),
        (128, 64, 4, 1, ""),
        (128, 80, 4, 2, ""),
        (128, 96, 4, 1, ""),
        (128, 96, 4, 2, ""),
    ),
    ("bfloat16", 80): (
        (128, 64, 4, 2, ""),
        (128, 80, 4, 2, ""),
        (128, 96, 4, 1, ""),
        (128, 96, 4, 2, ""),
        (128, 112, 4, 1, ""),
    ),
    ("float32", 64): ((128, 64, 4, 1, ""), (128, 32, 4, 2, "S")),
    ("float32", 128): ((128, 32, 8, 2, "S"), (128, 32, 4, 2, "S"), (64, 64, 4, 1, "")),
    ("float16", 128): ((128, 64, 4, 1, "S"), (128, 64, 4, 2, "S"), (128, 48, 4, 2, "")),
}
CANDIDATES["bfloat16", 72] = CANDIDATES["bfloat16", 80]
CAPS = {"float16": 6e-4, "bfloat16": 4e-3, "float32": 2e-6}


def configs(workload: Workload) -> dict[str, MmaConfig]:
    """The default and the candidates, by the name that the table gives them."""
    named = {"default": mma_default(workload.spec, known_device("sm_90"))}
    for b_r, b_c, warps, stages, flags in CANDIDATES[workload.dtype, workload.d]:
        config = MmaConfig(b_r, b_c, warps, stages, "R" in flags, "S" in flags)
        if workload.dtype == "float32":
            config = MmaConfig(b_r, b_c, warps, stages, "R" in flags, "S" in flags, mma_k=8)
        if config != named["default"]:
            named[f"{b_r}x{b_c} w{warps} s{stages} {flags}"] = config
    return named


def inputs(workload: Workload, n: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the options of a call of `n` rows."""
    batch, heads = (16384 // n, 2048 // workload.d) if n == N else (1, 1)
    dtype = getattr(torch, workload.dtype)
    shape = (batch, heads, n, workload.d)
    given = dict(workload.options)
    if "bias" in given:
        given["bias"] = torch.randn((1, heads, 1, n), device="cuda").to(dtype)
    return [torch.randn(shape, device="cuda").to(dtype) for _ in range(3)], given


def gold(workload: Workload, arrays: list[torch.Tensor], given: dict[str, Any], rows: Any) -> Any:
    """The plain formula in float64, of some rows of the last head."""
    q, k, v = (x[-1, -1].double().cpu().numpy() for x in arrays)
    mask = np.arange(N) <= rows[:, None] if workload.causal else None
    bias = given["bias"][0, -1].double().cpu().numpy() if "bias" in given else None
    return cuflash.reference.standard_attention(q[rows], k, v, mask=mask, softcap=given.get("softcap"), bias=bias)


def peer_of(workload: Workload, arrays: list[torch.Tensor]) -> Callable[[], Any]:
    """A call of the peer."""
    if workload.peer == "cupy":
        q, k, v = map(cupy.from_dlpack, arrays)
        return functools.partial(naive, q, k, v, workload.causal)
    if workload.peer == "without":
        config = mma_default(Spec(workload.dtype, workload.d, workload.d), known_device("sm_90"))
        return functools.partial(cuflash.attention, *arrays, config=config, out=torch.empty_like(arrays[0]))

    def peer() -> Any:
        q, k, v = arrays
        with sdpa_kernel(PEERS[workload.peer]):
            return scaled_dot_product_attention(q, k, v, is_causal=workload.causal)

    return peer


def measure(workload: Workload, named: dict[str, MmaConfig], rounds: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of the table, the default's first, then the fastest; and how many configurations were wrong."""
    arrays, given = inputs(workload, N)
    out = torch.empty_like(arrays[0])
    rows = np.sort(np.random.default_rng().choice(N, ROWS, replace=False))
    expected = gold(workload, arrays, given, rows)
    runs: dict[str, Callable[[], Any]] = {}
    for name, config in named.items():
        run = functools.partial(cuflash.attention, *arrays, config=config, out=out, **given)
        out.fill_(float("nan"))
        finish(run, f"{workload} {name}")
        error = float(np.linalg.norm(out[-1, -1].double().cpu().numpy()[rows] - expected) / np.linalg.norm(expected))
        if error < CAPS[workload.dtype] and bool(torch.isfinite(out).all()):
            runs[name] = run
        else:
            print(f"WRONG {workload} {name}: error {error:.2e}", flush=True)
    wrong = len(named) - len(runs)
    runs[workload.peer] = peer_of(workload, arrays)
    times = interleaved(runs, rounds)
    batch, heads = arrays[0].shape[:2]
    work = flops(batch, heads, N, N, workload.d, workload.causal)
    table = [
        {
            **{"case": str(workload), "run": name, "ms": ms, "tflops": work / ms / 1e9},
            **{"peer": workload.peer, "bar": workload.bar, "ratio": times[workload.peer] / ms},
        }
        for name, ms in sorted(times.items(), key=lambda item: (item[0] != "default", item[1]))
    ]
    return table, wrong


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=100, help="seconds after which no further case is started")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--all", action="store_true", help="print every candidate, not only the two best")
    options = parser.parse_args()
    began = time.monotonic()
    workloads = [workload for workload in WORKLOADS if options.only in str(workload)]

    def compiled(job: tuple[Workload, str, MmaConfig, Any]) -> str | None:
        workload, name, config, (arrays, given) = job
        try:
            cuflash.prepare(*arrays, config=config, **given)
        except Exception as error:  # the campaign goes on without the candidate, and says so
            return f"NOT COMPILED {workload} {name}: {str(error).splitlines()[0]}"
        return None

    small = {str(workload): inputs(workload, 128) for workload in workloads}
    jobs = [
        (workload, name, config, small[str(workload)])
        for workload in workloads
        for name, config in configs(workload).items()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refusals = list(pool.map(compiled, jobs))
    print(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s", *filter(None, refusals), sep="\n", flush=True)
    able = {(str(workload), name) for (workload, name, *_), refusal in zip(jobs, refusals, strict=True) if not refusal}

    table: list[dict[str, Any]] = []
    failed = len(jobs) - len(able)
    for workload in workloads:
        if time.monotonic() - began > options.budget:
            print("out of budget before", workload)
            break
        named = {name: config for name, config in configs(workload).items() if (str(workload), name) in able}
        rows, wrong = measure(workload, named, options.rounds)
        failed += wrong
        table += rows
        shown = rows if options.all else [row for row in rows if row["run"] in ("default", workload.peer)]
        best = [row for row in rows if row not in shown][:2]
        for row in shown + best:
            mark = " < bar" if row["run"] == "default" and row["ratio"] < workload.bar else ""
            print(
                f"{row['case']:22} {row['run']:17} {row['tflops']:6.1f} TFLOP/s, of {row['peer']:9} "
                f"(bar {row['bar']:4}) {row['ratio']:5.2f}{mark}",
                flush=True,
            )
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    print(f"{time.monotonic() - began:.0f} s")
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "forward_mma.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
