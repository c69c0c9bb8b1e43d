"""``cuflash bench``: cuflash and what else is installed, side by side in one process.

For each case, every implementation is made ready and run once, and its result is held against float64 on sampled rows:
nobody is timed for a wrong result. Then all are timed in turn (`cuflash.timing`). What cuflash runs is what it plans
for the call, before the comparison.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import cuflash
from cuflash import machine, timing
from cuflash.peers import CUFLASH, Arrays, Case, Numbers, Peer, Runner, Unserved, as_torch, plan_cuflash, versions
from cuflash.samples import PEERS_MAY, judge_of, largest_error

TOKENS, HIDDEN = 16384, 2048  # B * N and H * D, as the FlashAttention papers compare

CEILING_SIZE = 8192

# Of Okabe and Ito, which people who confuse colours can tell apart.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999", "#F0E442")
MARKERS = "osD^vP*Xd"

Clock = Callable[[Mapping[str, Callable[[], object]], Collection[str]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Settings:
    """Which cases to compare; every combination of `d`, `n`, `causal` and `dtype`.

    Attributes
    ----------
    tokens : int
        B * N; a longer sequence is a batch of one.
    heads, kv_heads : int or None
        Unless given, as many heads as make H * D 2048, and as many of keys and values as of queries.
    """

    d: tuple[int, ...] = (64, 128, 256)
    n: tuple[int, ...] = (1024, 4096, 16384)
    causal: tuple[bool, ...] = (False, True)
    dtype: tuple[str, ...] = ("bfloat16",)
    tokens: int = TOKENS
    heads: int | None = None
    kv_heads: int | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    layout: str = "bnhd"
    backward: bool = False
    deterministic: bool = True

    def cases(self) -> list[Case]:
        """The cases.

        Raises
        ------
        ValueError
            When the number of query heads is no multiple of that of keys and values, or what is always deterministic
            is asked to be otherwise.
        """
        if not self.deterministic and not self.backward:
            raise ValueError("--deterministic no is about gradients, and needs --backward")
        return [
            self._case(dtype, d, n, causal)
            for dtype, d, n, causal in itertools.product(self.dtype, self.d, self.n, self.causal)
        ]

    def _case(self, dtype: str, d: int, n: int, causal: bool) -> Case:
        heads = self.heads or max(HIDDEN // d, 1)
        kv_heads = self.kv_heads or heads
        if heads % kv_heads:
            raise ValueError(f"the heads of queries must be a multiple of those of keys, got {heads} and {kv_heads}")
        return Case(
            d=d,
            n=n,
            causal=causal,
            dtype=dtype,
            batch=max(self.tokens // n, 1),
            heads=heads,
            kv_heads=kv_heads,
            window=self.window,
            softcap=self.softcap,
            alibi=self.alibi,
            layout=self.layout,
            backward=self.backward,
            deterministic=self.deterministic,
        )


PRESETS = {
    "papers": Settings(),
    "head-dims": Settings(d=(72, 80, 96, 192), n=(4096,), causal=(True,)),
    "gqa": Settings(d=(128,), n=(4096,), causal=(True,), heads=32, kv_heads=4),
    "window": Settings(d=(128,), n=(16384,), causal=(True,), window=(255, 0)),
    "softcap": Settings(d=(128,), n=(4096,), softcap=30.0),
    "alibi": Settings(d=(128,), n=(4096,), alibi=True),
}


class Measured(NamedTuple):
    """Milliseconds in each round, and the relative error that was found before."""

    ms: tuple[float, ...]
    error: float
    on_host: bool

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        low, high = np.percentile(self.ms, (25, 75))
        return float(high - low) / 2 / self.median


@dataclass(frozen=True)
class Comparison:
    """A case: who was measured, and who was not and why."""

    case: Case
    plan: str
    measured: Mapping[str, Measured]
    excluded: Mapping[str, str]

    def tflops(self, name: str) -> float:
        """10^12 operations in a second."""
        return self.case.flops() / self.measured[name].median / 1e9

    def ratio(self, name: str) -> float | None:
        """How many times as long as cuflash `name` takes; None where one of them was not measured."""
        if name not in self.measured or CUFLASH.name not in self.measured:
            return None
        return self.measured[name].median / self.measured[CUFLASH.name].median


class Ceiling(NamedTuple):
    """TFLOP/s of a product of square matrices, which no attention passes by much; or why it was not measured."""

    tflops: float | None
    by: str


@dataclass
class Report:
    """What a run found."""

    machine: dict[str, Any]
    method: dict[str, Any]
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    not_run: list[Case] = field(default_factory=list)

    def names(self) -> list[str]:
        """Those that were measured at least once, in order of appearance, cuflash first."""
        found = dict.fromkeys(name for comparison in self.comparisons for name in comparison.measured)
        return sorted(found, key=lambda name: name != CUFLASH.name)

    def geometric_mean(self, name: str) -> tuple[float, int] | None:
        """Of the ratios to `name`, and of how many."""
        ratios = [ratio for comparison in self.comparisons if (ratio := comparison.ratio(name)) is not None]
        return (math.exp(statistics.fmean(map(math.log, ratios))), len(ratios)) if ratios else None

    def as_json(self) -> dict[str, Any]:
        """Everything, the time of every round included."""
        means = {name: mean for name in self.names() if (mean := self.geometric_mean(name)) and name != CUFLASH.name}
        return {
            "cuflash": cuflash.__version__,
            "machine": self.machine,
            "method": self.method,
            "matmul": {dtype: ceiling._asdict() for dtype, ceiling in self.ceilings.items()},
            "cases": [
                {
                    "case": asdict(comparison.case),
                    "flops": comparison.case.flops(),
                    "plan": comparison.plan,
                    "results": {
                        name: {
                            "ms": list(measured.ms),
                            "median_ms": measured.median,
                            "spread": measured.spread,
                            "tflops": comparison.tflops(name),
                            "ratio": comparison.ratio(name),
                            "error": measured.error,
                            "on_host": measured.on_host,
                        }
                        for name, measured in comparison.measured.items()
                    },
                    "excluded": dict(comparison.excluded),
                }
                for comparison in self.comparisons
            ],
            "geometric_means": {name: {"ratio": mean, "cases": count} for name, (mean, count) in means.items()},
            "not_run": [asdict(case) for case in self.not_run],
        }


# ---- one case ----


def compare(case: Case, arrays: Arrays, peers: Sequence[Peer], clock: Clock, finish: Callable[..., Any]) -> Comparison:
    """Make cuflash and `peers` ready, judge them, and time those that are right.

    `clock` times callables by name, `finish` runs one and waits for it; both are of `cuflash.timing` but in tests.
    """
    judge = judge_of(case, arrays)
    ready: dict[str, tuple[Runner, float]] = {}
    excluded: dict[str, str] = {}
    for peer in (CUFLASH, *peers):
        most = largest_error(case) * (1 if peer is CUFLASH else PEERS_MAY)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns of every reason for which a backend does not serve
                runner = peer.make(case, arrays)
                error = judge.error(finish(runner.run, f"{peer.name}, {case}"), runner.layout)
        except Exception as exception:  # whatever an absent, unfit or broken peer raises is its reason
            excluded[peer.name] = why_excluded(exception)
            continue
        if error <= most:
            ready[peer.name] = runner, error
        else:
            excluded[peer.name] = f"wrong: its relative error is {error:.1e}, and at most {most:.0e} is allowed"
    on_host = {name for name, (runner, _) in ready.items() if runner.on_host}
    times = clock({name: runner.run for name, (runner, _) in ready.items()}, on_host)
    measured = {name: Measured(tuple(times[name]), error, name in on_host) for name, (_, error) in ready.items()}
    return Comparison(case, _planned(case, arrays), measured, excluded)


def why_excluded(exception: Exception) -> str:
    """An exception in one line."""
    if isinstance(exception, ModuleNotFoundError):
        return f"not installed (no module {exception.name})"
    lines = str(exception).strip().splitlines()
    what = lines[0] if lines else "no message"
    return what if isinstance(exception, Unserved) else f"{type(exception).__name__}: {what}"


def _planned(case: Case, arrays: Arrays) -> str:
    try:
        explanation = plan_cuflash(case, arrays, prepare=False)
    except Exception as exception:
        return why_excluded(exception)
    order = "" if explanation.deterministic else ", not deterministic"
    return f"{explanation.family} {explanation.config} (from: {explanation.source}){order}"


# ---- a run ----


class Device(NamedTuple):
    """What a run asks of the GPU: its name, arrays in its memory, to run and to time, and to free what is not used."""

    name: str
    put: Callable[[NDArray[Any]], Any]
    finish: Callable[[Callable[[], Any], str], Any]
    clock: Clock
    release: Callable[[], None]


def current_gpu(rounds: int, repeats: int) -> Device:
    """CuPy's current GPU; each implementation is timed in `rounds`, the median of `repeats` in each."""
    import cupy

    def clock(runs: Mapping[str, Callable[[], object]], on_host: Collection[str]) -> Mapping[str, Sequence[float]]:
        return timing.interleaved_times(runs, rounds, repeats, on_host=on_host)

    def release() -> None:
        cupy.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()

    return Device(machine.describe_gpu(cupy.cuda.Device().id), cupy.asarray, timing.finish, clock, release)


def run_bench(
    console: Console,
    device: Device,
    cases: Sequence[Case],
    peers: Sequence[Peer],
    *,
    method: Mapping[str, Any],
    budget: float = math.inf,
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> Report:
    """Compare, print tables, and write the files.

    Parameters
    ----------
    console : rich.console.Console
        Where to print.
    device, cases, peers
        On what, what, and with whom.
    method : mapping
        How `device` times, for the record.
    budget : float
        Seconds after which no further case is begun.
    json_file, plot_file : Path, optional
        Where to write all figures, after each case, and a plot.
    """
    began = time.monotonic()
    report = Report({"gpu": device.name, "packages": versions()}, dict(method), not_run=list(cases))
    console.print(f"cuflash {cuflash.__version__} on {device.name}", soft_wrap=True)
    console.print(", ".join(f"{name} {number}" for name, number in report.machine["packages"].items()), soft_wrap=True)
    for dtype in dict.fromkeys(case.dtype for case in cases):
        own = [case for case in cases if case.dtype == dtype]
        numbers = Numbers(dtype, own, device.put)
        prepare_all(own, numbers)
        report.ceilings[dtype] = measure_ceiling(numbers, device)
        for case in own:
            if time.monotonic() - began > budget:
                break
            comparison = compare(case, Arrays(case, numbers), peers, device.clock, device.finish)
            report.comparisons.append(comparison)
            report.not_run.remove(case)
            console.print(progress(comparison), soft_wrap=True)
            device.release()
            if json_file is not None:
                write_json(report, json_file)
    for part in describe(report):
        machine.print_whole(console, part)
    if plot_file is not None:
        plot(report, plot_file)
    return report


def prepare_all(cases: Sequence[Case], numbers: Numbers) -> None:
    """Compile what cuflash needs, in parallel. What does not compile says so when its case is run."""

    def prepare(case: Case) -> None:
        try:
            plan_cuflash(case, Arrays(case, numbers), prepare=True)
        except Exception:
            return

    with ThreadPoolExecutor() as pool:
        list(pool.map(prepare, cases))


def measure_ceiling(numbers: Numbers, device: Device) -> Ceiling:
    """What cuBLAS reaches, through PyTorch or else CuPy, on random numbers."""
    n = CEILING_SIZE
    try:
        multiply, by = _matmul(numbers, device, n)
        device.finish(multiply, "matrix product")
        ms = statistics.median(device.clock({"matmul": multiply}, ())["matmul"])
    except Exception as exception:  # cuBLAS may be absent, the GPU too small
        return Ceiling(None, f"{why_excluded(exception)}")
    return Ceiling(2 * n**3 / ms / 1e9, by)


def _matmul(numbers: Numbers, device: Device, n: int) -> tuple[Callable[[], object], str]:
    a, b = (device.put(np.resize(x, (n, n))) for x in numbers.host[:2])
    try:
        x, y = (as_torch(z) for z in (a, b))
    except ModuleNotFoundError:
        return (lambda: a @ b), "CuPy"
    return (lambda: x @ y), "PyTorch"


# ---- what is shown ----


def progress(comparison: Comparison) -> str:
    """A case in one line."""
    case = comparison.case
    parts = [f"{name} {comparison.tflops(name):.0f}" for name in comparison.measured]
    parts += [f"{name}: {reason}" for name, reason in comparison.excluded.items() if name == CUFLASH.name]
    return f"{case.dtype} {case}: {', '.join(parts)}"


def describe(report: Report) -> Iterator[Table | str]:
    """The tables and lines that are printed at the end, the geometric means last."""
    for dtype, ceiling in report.ceilings.items():
        found = f"not measured: {ceiling.by}"
        if ceiling.tflops is not None:
            found = f"{ceiling.tflops:.0f} TFLOP/s by {ceiling.by}"
        yield f"matrix product {CEILING_SIZE} x {CEILING_SIZE}, {dtype}: {found}"
    yield from _exclusions(report)
    if report.not_run:
        yield f"not run, for want of time: {'; '.join(map(str, report.not_run))}"
    on_host = sorted({n for c in report.comparisons for n, measured in c.measured.items() if measured.on_host})
    if on_host:
        yield f"timed by the host's clock, dispatch included: {', '.join(on_host)}"
    if any(comparison.case.backward for comparison in report.comparisons):
        yield "gradients: every kernel of the backward pass; operations: 2.5 times those of the forward pass"
    yield "TFLOP/s, ± half the distance of the quartiles; x: how many times as fast cuflash is"
    yield table(report)


def _exclusions(report: Report) -> Iterator[str]:
    """A line for each reason, with the number of cases where it is not all of them."""
    found: dict[tuple[str, int], list[str]] = {}
    pairs = Counter(pair for comparison in report.comparisons for pair in comparison.excluded.items())
    for (name, reason), count in pairs.items():
        found.setdefault((reason, count), []).append(name)
    for (reason, count), names in found.items():
        cases = len(report.comparisons)
        yield f"not compared: {', '.join(names)}: {reason}{'' if count == cases else f' (in {count} of {cases} cases)'}"


def table(report: Report) -> Table:
    """Cases by implementations, ratios, and their geometric means in the last row."""
    names = report.names()
    peers = [name for name in names if name != CUFLASH.name]
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_footer=bool(peers))
    made.add_column("case", footer="geometric mean", no_wrap=True)
    for name in names:
        mean = report.geometric_mean(name)
        footer = "" if mean is None or name == CUFLASH.name else f"{mean[0]:.2f}x"
        made.add_column(name, footer=footer, no_wrap=True, justify="right")
    if len(peers) > 1:
        made.add_column("best peer", footer=_mean_of_best(report), no_wrap=True, justify="right")
    several = len(report.ceilings) > 1
    for comparison in report.comparisons:
        cells = [_cell(comparison, name) for name in names]
        if len(peers) > 1:
            best = best_ratio(comparison)
            cells.append("" if best is None else f"{best:.2f}x")
        made.add_row(f"{comparison.case.dtype} {comparison.case}" if several else str(comparison.case), *cells)
    return made


def best_ratio(comparison: Comparison) -> float | None:
    """The ratio to the fastest peer."""
    ratios = [comparison.ratio(name) for name in comparison.measured if name != CUFLASH.name]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _mean_of_best(report: Report) -> str:
    ratios = [best for comparison in report.comparisons if (best := best_ratio(comparison)) is not None]
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}x" if ratios else ""


def _cell(comparison: Comparison, name: str) -> str:
    if name not in comparison.measured:
        return "-"
    rate = comparison.tflops(name)
    text = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
    text += f" ±{100 * comparison.measured[name].spread:.0f}%"
    ratio = comparison.ratio(name)
    return text if ratio is None or name == CUFLASH.name else f"{text} {ratio:.2f}x"


def write_json(report: Report, path: Path) -> None:
    """Write all figures, the file whole at any time."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(report.as_json(), indent=1) + "\n", "utf-8")
    temporary.replace(path)


def plot(report: Report, path: Path) -> None:
    """Draw TFLOP/s over N, a panel for each head dim and mask, with the matrix product's as a dashed line."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], list[Comparison]] = {}
    for comparison in sorted(report.comparisons, key=lambda comparison: comparison.case.n):
        panels.setdefault((_row_title(comparison.case), comparison.case.d), []).append(comparison)
    titles = list(dict.fromkeys(_row_title(comparison.case) for comparison in report.comparisons))
    head_dims = sorted({d for _, d in panels})
    size = (1 + 3.2 * max(len(head_dims), 1), 1 + 2.6 * max(len(titles), 1))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(max(len(titles), 1), max(len(head_dims), 1), squeeze=False, sharey=True)
    handles: dict[str, Any] = {}
    for (row, title), (column, d) in itertools.product(enumerate(titles), enumerate(head_dims)):
        axis = axes[row][column]
        comparisons = panels.get((title, d), [])
        if not comparisons:
            axis.set_axis_off()
            continue
        for number, name in enumerate(report.names()):
            points = [(c.case.n, c.tflops(name)) for c in comparisons if name in c.measured]
            width = 2.4 if name == CUFLASH.name else 1.2
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            if points:
                (handles[name],) = axis.plot(*zip(*points, strict=True), linewidth=width, markersize=4, **style)
        ceiling = report.ceilings[comparisons[0].case.dtype].tflops
        if ceiling is not None:
            handles["matrix product"] = axis.axhline(ceiling, color="grey", linestyle="--", linewidth=1)
        lengths = sorted({c.case.n for c in comparisons})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, labels=[str(n) for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_title(f"D = {d}, {title}", fontsize=9)
        axis.set_xlabel("N" if row == len(titles) - 1 else "")
        axis.set_ylabel("TFLOP/s" if column == 0 else "")
    axes[0][0].set_ylim(bottom=0)
    figure.suptitle(report.machine["gpu"], fontsize=9)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _row_title(case: Case) -> str:
    """What the panels of a row have in common: everything but D and N."""
    _, _, what = str(case).split(" ", 2)
    return what if case.dtype == "bfloat16" else f"{what}, {case.dtype}"
