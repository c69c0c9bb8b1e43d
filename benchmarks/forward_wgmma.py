"""Campaign: tiles of the Hopper family, checked against float64, timed in interleaved rounds beside cuDNN.

python benchmarks/forward_wgmma.py [--rounds 9] [--budget 230] [--only 128-4096]
python benchmarks/forward_wgmma.py --smoke     small problems with every feature, checked and not timed
python benchmarks/forward_wgmma.py --sweep 500 as many random problems, checked, each under the watchdog

cuDNN is PyTorch's backend of that name. B * N = 16384, H * D = 2048, bfloat16. The scores of a case named "rise"
rise by so many powers of two along the keys, in the order in which they are read. The table stands last; $OUT gets it
as JSON.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash
from cuflash import timing
from cuflash.config import WgmmaConfig
from cuflash.timing import flops, interleaved, wait

WIDE = WgmmaConfig(2, 128, 2, 2)
CANDIDATES = {  # by head dim
    64: (WgmmaConfig(3, 128, 3), WgmmaConfig(3, 128, 3, 2), WgmmaConfig(2, 128, 3, 2), WgmmaConfig(4, 64, 5, 2)),
    128: (
        WIDE,
        replace(WIDE, ping_pong=False),
        replace(WIDE, speculative=False),
        WgmmaConfig(3, 64, 3, 2, ping_pong=False),
    ),
    256: (WgmmaConfig(2, 64, 2), WgmmaConfig(2, 64, 2, ping_pong=False), WgmmaConfig(2, 64, 2, section_mb=32)),
    72: (WIDE, WgmmaConfig(3, 96, 2), WgmmaConfig(2, 176, 2)),
    80: (WIDE, WgmmaConfig(3, 96, 2), WgmmaConfig(2, 176, 2)),
    96: (WIDE, WgmmaConfig(2, 160, 2)),
    192: (WgmmaConfig(2, 96, 2), WgmmaConfig(2, 96, 2, ping_pong=False), WgmmaConfig(2, 80, 2)),
}
NARROW = (WgmmaConfig(2, 64, 3, 2), WgmmaConfig(2, 64, 3, 2, ping_pong=False))


@dataclass(frozen=True)
class Case:
    """What is timed.

    `group` query heads share a head of K and V, a bias is one of rows (1, H, 1, N), and scores rise by `rise` in log2
    units from the last key to the first, which is the worst for references that are guessed.
    """

    d: int
    n: int
    causal: bool = False
    group: int = 1
    window: tuple[int, int] | None = None
    softcap: float | None = None
    bias: bool = False
    rise: float = 0

    def __str__(self) -> str:
        words = [f"{self.d}-{self.n}-{'causal' if self.causal else 'full'}"]
        words += [f"gqa{self.group}"] if self.group > 1 else []
        words += ["window"] if self.window else []
        words += ["softcap"] if self.softcap else []
        words += ["bias"] if self.bias else []
        words += [f"rise{self.rise:g}"] if self.rise else []
        return "-".join(words)

    def configs(self) -> tuple[WgmmaConfig, ...]:
        """The candidates."""
        if self.rise:
            return WIDE, replace(WIDE, speculative=False)
        return NARROW if self.softcap or self.bias else CANDIDATES[self.d]

    def heads(self) -> int:
        """Query heads."""
        return 32 if self.group > 1 else 2048 // self.d

    def inputs(self, n: int, batch: int) -> tuple[torch.Tensor, ...]:
        """Fresh q, k, v of layout (B, N, H, D)."""
        heads = self.heads()
        if self.rise:
            return tuple(x.transpose(1, 2) for x in rising((batch, heads), n, n, self.d, self.rise))
        return tuple(normal(batch, n, h, self.d) for h in (heads, heads // self.group, heads // self.group))

    def options(self, n: int) -> dict[str, Any]:
        """The keywords of the call."""
        options: dict[str, Any] = {"causal": self.causal, "layout": "bnhd", "return_lse": True}
        if self.window:
            options["window"] = self.window
        if self.softcap:
            options["softcap"] = self.softcap
        if self.bias:
            options["bias"] = normal(1, self.heads(), 1, n)
        return options

    def has_peer(self) -> bool:
        """Whether cuDNN computes the same."""
        return not (self.window or self.softcap or self.bias or self.rise)


CASES = [
    *(Case(d, n, causal) for d in (128, 64, 256) for n in (4096, 1024, 16384) for causal in (False, True)),
    *(Case(d, 4096, True) for d in (72, 80, 96, 192)),
    Case(128, 4096, True, group=8),
    Case(128, 16384, window=(255, 0)),
    Case(128, 4096, softcap=30.0),
    Case(128, 4096, bias=True),
    *(Case(128, 4096, rise=rise) for rise in (204.0, 765.0, 8000.0)),
]
CAPS = {torch.float16: 6e-4, torch.bfloat16: 4e-3}
LSE_CAP = 4e-3


def show(config: WgmmaConfig) -> str:
    """A configuration in a few characters."""
    flags = ("" if config.ping_pong else " no-turns") + ("" if config.speculative else " true-maximum")
    return f"{config.consumers}x64x{config.b_c} s{config.stages} q{config.q_stages} L2:{config.section_mb}{flags}"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> torch.Tensor:
    """Fresh random numbers."""
    return (torch.randn(shape, device="cuda") * size).to(dtype)


def finish(run: Callable[[], Any], what: str) -> Any:
    """Run once and wait for it, under the watchdog."""
    result = run()
    event = cupy.cuda.Event()
    event.record()
    wait(event, what)
    return result


def float64(x: torch.Tensor) -> np.ndarray:
    """An array for the plain formula."""
    return x.double().cpu().numpy()


def errors(got: torch.Tensor, lse: torch.Tensor, gold: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Relative L2 error of O, largest error of LSE."""
    out, gold_lse = gold
    both_empty = np.isneginf(gold_lse) & np.isneginf(float64(lse))
    with np.errstate(invalid="ignore"):
        lse_error = np.where(both_empty, 0.0, np.abs(float64(lse) - gold_lse))
    return float(np.linalg.norm(float64(got) - out) / max(np.linalg.norm(out), 1e-30)), float(lse_error.max())


def prepared(jobs: list[tuple[str, Callable[[], None]]]) -> set[str]:
    """Compile in parallel; the names of those that did."""

    def compiled(job: tuple[str, Callable[[], None]]) -> str | None:
        name, prepare = job
        try:
            prepare()
        except Exception as error:  # the campaign goes on without the candidate, and says so
            print(f"NOT COMPILED {name}: {str(error).splitlines()[0]}", flush=True)
            return None
        return name

    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = {name for name in pool.map(compiled, jobs) if name}
    print(f"compiled {len(names)} of {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    return names


# ---- small problems ----

Problem = tuple[str, tuple[torch.Tensor, ...], dict[str, Any], WgmmaConfig]


def rising(batch: tuple[int, int], n_q: int, n_k: int, d: int, rise: float) -> tuple[torch.Tensor, ...]:
    """Queries and keys whose scores rise by `rise`, in log2 units, from the last key to the first."""
    unit = torch.ones(d, device="cuda") / math.sqrt(d)
    q = 0.1 * torch.randn((*batch, n_q, d), device="cuda") + 4 * unit
    ramp = torch.linspace(1, 0, n_k, device="cuda")[:, None] * rise * math.log(2) * math.sqrt(d) / 4
    k = 0.1 * torch.randn((*batch, n_k, d), device="cuda") + unit * ramp
    return q.bfloat16(), k.bfloat16(), normal(*batch, n_k, d)


def small_problems() -> Iterator[Problem]:
    """Name, (q, k, v), options, configuration."""
    c128, c64, c256 = WgmmaConfig(2, 128, 2, 2), WgmmaConfig(4, 64, 6), WgmmaConfig(2, 64, 2)
    for speculative in (False, True):
        config, word = replace(c128, speculative=speculative), "speculative" if speculative else "maximum"
        for causal in (False, True):
            for n_q, n_k in ((256, 256), (77, 77), (1000, 1000), (130, 515), (1, 300), (300, 150), (2048, 2048)):
                qkv = (normal(2, 6, n_q, 128), normal(2, 2, n_k, 128), normal(2, 2, n_k, 128))
                yield f"{word} {causal=} {n_q}x{n_k}", qkv, {"causal": causal}, config
            for size in (4, 16, 64):
                qkv = (normal(1, 2, 640, 128, size=size), normal(1, 2, 1024, 128), normal(1, 2, 1024, 128))
                yield f"{word} {causal=} size {size}", qkv, {"causal": causal}, config
        for rise in (31, 200, 765, 5000, 40000):
            yield f"{word} rise 2^{rise}", rising((1, 2), 520, 1100, 128, rise), {}, config
        qkv = (normal(1, 4, 700, 128), normal(1, 2, 900, 128), normal(1, 2, 900, 128))
        for scale in (-0.09, 0.0, 1e-30, 3.0, 1e6, 1e30):
            yield f"{word} {scale=}", qkv, {"scale": scale, "causal": True}, config
        lengths = [torch.tensor([[500], [0], [700]], device="cuda"), torch.tensor([[900], [300], [129]], device="cuda")]
        qkv = (normal(3, 1, 4, 700, 128), normal(3, 1, 2, 900, 128), normal(3, 1, 2, 900, 128))
        qkv[1][:, :, :, 897:], qkv[2][1, :, :, 300:] = torch.nan, torch.nan
        lengths[1][0] = lengths[1][2] = 897
        qkv[2][0, :, :, 897:] = qkv[2][2, :, :, 897:] = torch.nan
        options = {"q_lengths": lengths[0], "kv_lengths": lengths[1], "causal": True}
        yield f"{word} lengths", qkv, options, config
    qkv = (normal(1, 4, 700, 128), normal(1, 2, 900, 128), normal(1, 2, 900, 128))
    yield "top-left", qkv, {"causal": "top-left"}, c128
    yield "window", qkv, {"window": (100, 60)}, c128
    yield "softcap", qkv, {"softcap": 5.0}, c128
    yield "mask", qkv, {"mask": torch.rand((700, 900), device="cuda") < 0.7}, c128
    yield "bias", qkv, {"bias": normal(4, 700, 900)}, c128
    everything = {
        "mask": torch.rand((4, 700, 900), device="cuda") < 0.7,
        "bias": normal(700, 900).float(),
        "softcap": 20.0,
        "window": (300, 200),
    }
    yield "everything", qkv, everything, c128
    half = tuple(x.half() for x in qkv)
    yield "float16", half, {"causal": True}, c128
    yield "float16 size 8", (half[0] * 8, *half[1:]), {}, c128
    for d, config in (
        (64, c64),
        (64, WgmmaConfig(3, 128, 3)),
        (64, WgmmaConfig(2, 128, 3, 2)),
        (64, WgmmaConfig(1, 64, 2, ping_pong=False)),
        (256, c256),
        (16, c128),
        (40, c128),
        (72, c128),
        (80, c128),
        (96, c128),
        (112, c128),
        (160, WgmmaConfig(2, 96, 2)),
        (192, WgmmaConfig(2, 96, 2)),
    ):
        for causal in (False, True):
            qkv = (normal(1, 4, 700, d), normal(1, 2, 900, d), normal(1, 2, 900, d))
            yield f"D={d} {show(config)} {causal=}", qkv, {"causal": causal}, config
    qkv = (normal(1, 4, 700, 192), normal(1, 2, 900, 192), normal(1, 2, 900, 128))
    yield "D=192 D_v=128", qkv, {"causal": True}, WgmmaConfig(2, 96, 2)
    qkv = (normal(1, 4, 700, 64), normal(1, 2, 900, 64), normal(1, 2, 900, 176))
    yield "D=64 D_v=176", qkv, {}, WgmmaConfig(2, 64, 2)
    for d, config in ((64, c64), (256, c256)):
        yield f"D={d} rise 2^200", rising((1, 2), 300, 1100, d, 200), {}, config
        yield f"D={d} rise 2^5000", rising((1, 2), 300, 1100, d, 5000), {}, config
    bnhd = tuple(normal(2, n, h, 128) for n, h in ((500, 8), (600, 1), (600, 1)))
    yield "bnhd", bnhd, {"layout": "bnhd", "causal": True}, c128


SWEPT = (  # configuration, D, D_v, dtype: few enough to compile, times the features
    (WIDE, 128, 128, torch.bfloat16),
    (WgmmaConfig(2, 128, 3, 2), 64, 64, torch.float16),
    (WgmmaConfig(3, 96, 2), 80, 80, torch.bfloat16),
    (WgmmaConfig(2, 64, 2, 2), 40, 128, torch.float16),
    (WgmmaConfig(2, 48, 2), 192, 128, torch.bfloat16),
    (WgmmaConfig(2, 32, 2), 256, 256, torch.bfloat16),
)
FEATURES: tuple[Callable[[int, int, int], dict[str, Any]], ...] = (  # of a batch of two, H, N_q and N_k
    lambda h, n_q, n_k: {},
    lambda h, n_q, n_k: {"causal": True},
    lambda h, n_q, n_k: {"window": (n_k // 3, 17), "softcap": 9.0},
    lambda h, n_q, n_k: {"causal": "top-left", "bias": normal(h, 1, n_k).float()},
    lambda h, n_q, n_k: {"mask": torch.rand((n_q, n_k), device="cuda") < 0.6},
    lambda h, n_q, n_k: {
        "causal": True,
        "q_lengths": torch.tensor([n_q, n_q // 2], device="cuda"),
        "kv_lengths": torch.tensor([n_k // 3, n_k], device="cuda"),
    },
)


def random_problems(count: int) -> Iterator[Problem]:
    """Random sizes of every feature and configuration; some with scores that rise along the keys."""
    rng = np.random.default_rng(0)
    for number in range(count):
        config, d, d_v, dtype = SWEPT[number % len(SWEPT)]
        feature = number // len(SWEPT) % len(FEATURES)
        n_q, n_k, h_kv, group = (int(rng.integers(1, most)) for most in (700, 1200, 4, 4))
        heads = (2, h_kv * group)
        q, k, v = normal(*heads, n_q, d), normal(2, h_kv, n_k, d), normal(2, h_kv, n_k, d_v)
        if number % 5 == 0 and feature < 2:
            q = rising(heads, n_q, n_k, d, 0)[0]
            k = rising((2, h_kv), n_q, n_k, d, float(rng.choice([30, 300, 3000])))[1]
        name = f"{number}: {show(config)} D={d} D_v={d_v} {heads[1]}:{h_kv} {n_q}x{n_k} feature {feature}"
        yield name, tuple(x.to(dtype) for x in (q, k, v)), FEATURES[feature](heads[1], n_q, n_k), config


def check(problems: list[Problem], repeats: int) -> int:
    """Compare each with the plain formula, and its repeats with one another; 0 when all are right."""
    timing.HANG_SECONDS = 5.0

    def job(problem: tuple[Any, ...]) -> tuple[str, Callable[[], None]]:
        name, (q, k, v), options, config = problem
        return name, lambda: cuflash.prepare(q, k, v, return_lse=True, config=config, **options)

    ready = prepared([job(problem) for problem in problems])
    failed = len(problems) - len(ready)
    for name, (q, k, v), options, config in problems:
        if name not in ready:
            continue
        kept = (None, None)
        for repeat in range(repeats):
            out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, device="cuda", dtype=q.dtype)
            out, lse = finish(
                lambda: cuflash.attention(q, k, v, return_lse=True, out=out, config=config, **options),  # noqa: B023
                name,
            )
            if repeat == 0:
                kept = (out, lse)
            elif not all(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(kept, (out, lse), strict=True)
            ):
                print(f"WRONG {name}: repeat {repeat} has other bits", flush=True)
                failed += 1
                break
        arrays = {
            key: x.cpu().numpy() if torch.is_tensor(x) and x.dtype != torch.bfloat16 else x
            for key, x in options.items()
        }
        arrays = {key: float64(x) if torch.is_tensor(x) else x for key, x in arrays.items()}
        gold = cuflash.reference.standard_attention(*map(float64, (q, k, v)), return_lse=True, **arrays)
        error, lse_error = errors(*kept, gold)
        cap = CAPS[q.dtype] * (1.0 if "size" not in name and "scale" not in name else 1.5)
        size = float(np.abs(gold[1][np.isfinite(gold[1])]).max(initial=0.0))
        right = error < cap and lse_error < LSE_CAP + 1e-6 * size
        failed += not right
        print(f"{'ok   ' if right else 'WRONG'} {name}: O {error:.1e}, LSE {lse_error:.1e} of {size:.1e}", flush=True)
    print(f"{failed} of {len(problems)} failed")
    return failed > 0


# ---- the campaign ----


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """PyTorch's attention with its cuDNN backend, on arrays (B, N, H, D)."""
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]), torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=causal, enable_gqa=grouped)

    return run


def flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object] | None:
    """FlashAttention-3, if the wheel fa3-fwd is installed."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return None
    return lambda: flash_attn_func(q, k, v, causal=causal)


def sampled_error(case: Case, out: torch.Tensor, qkv: tuple[torch.Tensor, ...], options: dict[str, Any]) -> float:
    """Relative L2 error of some rows of the last head."""
    n = case.n
    rows = np.unique(np.append(np.random.default_rng().choice(n, 48), [0, n - 1]))
    q, k, v, got = (float64(x[-1, :, -1]) for x in (*qkv, out))
    distance = np.arange(n) - rows[:, None]
    left, right = case.window or (n, n)
    sees = (distance >= -left) & (distance <= (0 if case.causal else right))
    bias = float64(options["bias"])[0, -1] if case.bias else None
    gold = cuflash.reference.standard_attention(q[rows], k, v, mask=sees, bias=bias, softcap=case.softcap)
    return float(np.linalg.norm(got[rows] - gold) / np.linalg.norm(gold))


def visible_share(case: Case) -> float:
    """The share of the pairs of a row and a key that are seen, as papers count: a half with a causal mask."""
    if case.window:
        return (sum(case.window) + 1) / case.n
    return 0.5 if case.causal else 1.0


def campaign(rounds: int, budget: float, only: str) -> int:
    """Time the candidates beside cuDNN; 0 when all are right."""
    began = time.monotonic()
    cases = [case for case in CASES if only in str(case)]

    def job(case: Case, config: WgmmaConfig) -> tuple[str, Callable[[], None]]:
        q, k, v = case.inputs(128, 1)
        options = case.options(128)
        return f"{case} {show(config)}", lambda: cuflash.prepare(q, k, v, config=config, **options)

    ready = prepared([job(case, config) for case in cases for config in case.configs()])
    table: list[dict[str, Any]] = []
    failed = 0
    for case in cases:
        if time.monotonic() - began > budget:
            print("out of budget before", case, flush=True)
            break
        batch = 16384 // case.n
        q, k, v = case.inputs(case.n, batch)
        options = case.options(case.n)
        out = torch.empty_like(q)
        runs: dict[str, Callable[[], object]] = {}
        for config in case.configs():
            name = show(config)
            if f"{case} {name}" not in ready:
                continue
            run = partial(cuflash.attention, q, k, v, out=out, config=config, **options)
            out.fill_(torch.nan)
            finish(run, f"{case} {name}")
            error = sampled_error(case, out, (q, k, v), options)
            if error < CAPS[q.dtype]:
                runs[name] = run
            else:
                print(f"WRONG {case} {name}: {error:.1e}", flush=True)
                failed += 1
        if case.has_peer():
            runs["cuDNN"] = cudnn(q, k, v, case.causal)
            if (peer := flash_attention_3(q, k, v, case.causal)) is not None:
                runs["FlashAttention-3"] = peer
        if not runs:
            continue
        times = interleaved(runs, rounds)
        work = flops(batch, case.heads(), case.n, case.n, case.d, False) * visible_share(case)
        for name, ms in sorted(times.items(), key=lambda item: item[1]):
            ratio = times.get("cuDNN", math.nan) / ms
            table.append({"case": str(case), "run": name, "ms": ms, "tflops": work / ms / 1e9, "ratio": ratio})
        best = table[-len(times)]
        print(f"{case}: {best['run']} {best['tflops']:.0f} TFLOP/s {best['ratio']:.2f}x", flush=True)
    for row in table:
        print(f"{row['case']:24} {row['tflops']:6.1f} TFLOP/s {row['ratio']:5.2f}x  {row['ms']:7.4f} ms  {row['run']}")
    if folder := os.environ.get("OUT"):
        Path(folder, "forward_wgmma.json").write_text(json.dumps(table, indent=1))
    return failed > 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="check small problems, time nothing")
    parser.add_argument("--sweep", type=int, metavar="N", help="check N random problems, time nothing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=230, help="seconds after which no further case is started")
    parser.add_argument("--only", default="", help="cases whose name, such as 128-4096-causal, contains this")
    options = parser.parse_args()
    if options.smoke or options.sweep:
        problems = random_problems(options.sweep) if options.sweep else small_problems()
        return check(list(problems), repeats=2 if options.sweep else 4)
    return campaign(options.rounds, options.budget, options.only)


if __name__ == "__main__":
    sys.exit(main())
