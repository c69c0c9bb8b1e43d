"""The commands ``cuflash tune`` and ``cuflash tune report``: arguments, progress, tables."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from cuflash.problem import DTYPES
from cuflash.tuning.workload import DIAGONALS, PRESETS, Workload, like, preset, with_gradients

if TYPE_CHECKING:
    from cuflash.tuning.session import Event, Result

NOTES = """\
Without shapes, the workloads of a preset are tuned: llm, causal prefill and decoding of language models; vit, encoders
of images; long, sequences of 32768 and more; papers, what `cuflash bench` compares; all, all of these. One workload
stands for all calls of its size bucket. With --heads, --seqlen and --head-dim, one workload: pairs are of queries and
keys (or values), and one number stands for both. With --like, that of q, k and v in .npy files, of which only the
headers are read. --backward adds the gradients of each.

Winners go where calls find them (`cuflash cache list`). Ctrl-C keeps what was found; the same command goes on where it
stopped. Measurements and the journal of the studies, which optuna-dashboard opens, are in the folder that is printed.

--storage takes postgresql://, mysql:// and journal:///path: machines with GPUs of one model can then share studies. Let
the password come from the driver's own file (~/.pgpass, say), or it will be seen in the list of processes."""
CAUSAL = DIAGONALS[1:]
FLAGS = ("softcap", "mask", "q_lengths", "kv_lengths", "unaligned")
LATEST_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``cuflash tune``."""
    what = parser.add_argument_group("what to tune")
    what.add_argument("--preset", choices=(*PRESETS, "all"), help="a list of workloads (default: llm)")
    what.add_argument(
        "--like", nargs=3, type=Path, metavar=("q.npy", "k.npy", "v.npy"), help="the shapes of these files"
    )
    what.add_argument("--batch", type=_positive, metavar="B", help="batch entries (default: 1)")
    what.add_argument("--heads", nargs="+", type=_positive, metavar="H", help="query heads, and key heads if fewer")
    what.add_argument("--seqlen", nargs="+", type=_positive, metavar="N", help="queries, and keys")
    what.add_argument("--head-dim", nargs="+", type=_positive, metavar="D", help="head dim, and that of values")
    what.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16, or that of the files)")
    what.add_argument("--causal", nargs="?", const=CAUSAL[0], choices=CAUSAL, help="rows see keys up to the diagonal")
    what.add_argument(
        "--window", nargs=2, type=_bound, metavar=("LEFT", "RIGHT"), help="keys seen to either side, or none"
    )
    what.add_argument("--softcap", action="store_true", help="scores are capped")
    what.add_argument("--mask", action="store_true", help="there is a mask")
    what.add_argument("--bias", nargs="?", const="float32", choices=DTYPES, help="there is a bias, of this dtype")
    what.add_argument("--bias-of-keys", action="store_true", help="the bias is the same for all query rows")
    what.add_argument("--q-lengths", action="store_true", help="queries differ in length")
    what.add_argument("--kv-lengths", action="store_true", help="keys differ in length")
    what.add_argument("--unaligned", action="store_true", help="rows are not made of whole 16-byte vectors")
    what.add_argument("--backward", action="store_true", help="the gradients too, of all but decoding")
    how = parser.add_argument_group("how")
    budget_help = "time for all: 60s, 5m, 2h; full measures every legal point (default: 5m)"
    how.add_argument("--budget", default="5m", metavar="TIME", help=budget_help)
    how.add_argument("--devices", default="0", metavar="LIST", help="CUDA's numbers, such as 0,1, or all (default: 0)")
    how.add_argument("--storage", metavar="URL", help="where studies are kept and shared (default: a journal file)")
    how.add_argument("--compilers", type=_positive, metavar="N", help="compiled at a time (default: a core is left)")
    how.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    replay_help = "tune on recorded sweeps in place of a GPU; nothing is kept"
    how.add_argument("--replay", nargs="+", type=Path, metavar="sweep.json.gz", help=replay_help)


def workloads_of(options: argparse.Namespace) -> list[Workload]:
    """The workloads that the options name, with `--backward` their gradients too.

    Raises
    ------
    TypeError, ValueError
        When they contradict each other, or no call can be so.
    """
    if not options.backward:
        return _calls_of(options)
    if options.replay:
        raise ValueError("--backward adds to what is tuned, and a replay is of what was recorded")
    return with_gradients(_calls_of(options))


def _calls_of(options: argparse.Namespace) -> list[Workload]:
    """The calls of `attention` that the options name."""
    shaped = options.heads or options.seqlen or options.head_dim
    given = [name for name in ("preset", "like", "replay") if getattr(options, name)] + ["shapes"] * bool(shaped)
    if len(given) > 1:
        raise ValueError(f"give a preset, files, sweeps or shapes, got {' and '.join(given)}")
    features: dict[str, Any] = {name: getattr(options, name) for name in ("causal", "softcap", "mask", "bias")}
    features |= {name: getattr(options, name) for name in ("bias_of_keys", "q_lengths", "kv_lengths")}
    if options.bias_of_keys and not options.bias:
        raise ValueError("--bias-of-keys says what a bias is like; give --bias too")
    features["aligned"] = not options.unaligned
    features["window"] = None if options.window is None else tuple(options.window)
    if options.like and options.batch:
        raise ValueError("--batch goes with --heads, --seqlen and --head-dim; --like reads it from the files")
    if options.like:
        return [like(options.like, options.dtype, **features)]
    if shaped:
        missing = [
            f"--{name}" for name in ("heads", "seqlen", "head-dim") if not getattr(options, name.replace("-", "_"))
        ]
        if missing:
            raise ValueError(f"shapes need {' and '.join(missing)} too")
        heads, seqlen, head_dim = (_pair(name, getattr(options, name)) for name in ("heads", "seqlen", "head_dim"))
        dtype, batch = options.dtype or "bfloat16", options.batch or 1
        workload = Workload(dtype, batch, heads, seqlen, head_dim, **features)
        workload.problem()
        return [workload]
    if options.dtype or options.batch or any(value for name, value in features.items() if name != "aligned"):
        raise ValueError("options of a call need --heads, --seqlen and --head-dim, or --like")
    if options.replay:
        from cuflash.tuning.table import read_table

        return [read_table(path).workload for path in options.replay]
    return preset(options.preset or "llm")


def devices_of(options: argparse.Namespace) -> tuple[int, ...]:
    """CUDA's numbers of the GPUs to use."""
    if options.devices == "all":
        if options.replay:
            raise ValueError("--replay needs a list of --devices, such as 0,1: a process for each")
        from cupy.cuda import runtime

        return tuple(range(runtime.getDeviceCount()))
    parts = options.devices.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"devices must be numbers such as 0,1, or all, got {options.devices!r}")
    return tuple(map(int, parts))


def run(options: argparse.Namespace, console: Console) -> int:
    """``cuflash tune``: 0 when every workload has a winner or keeps its default, 1 otherwise.

    Raises
    ------
    TypeError, ValueError
        When an argument cannot be used.
    """
    began = time.monotonic()
    from optuna.exceptions import OptunaError

    from cuflash.tuning import campaign, record
    from cuflash.tuning.session import read_budget

    workloads, devices = workloads_of(options), devices_of(options)
    each = campaign.compilers_of_each(options.compilers, len(devices))
    budget = read_budget(options.budget)
    plan = campaign.Plan(
        workloads,
        budget - (time.monotonic() - began),
        devices,
        options.storage,
        each,
        options.seed,
        tuple(map(str, options.replay or ())),
    )
    results: list[Result] = []
    level = logging.getLogger("cuflash").level
    logging.getLogger("cuflash").setLevel(logging.WARNING)  # each of the compilations would be announced
    try:
        with Display(console, len(workloads), plan.seconds) as display:
            for result in campaign.carry_out(plan, display.show):
                results.append(result)
                display.finish(result)
    except KeyboardInterrupt:
        console.print("Stopped. What was measured is kept.")
    except OptunaError as error:
        raise RuntimeError(f"the storage failed: {type(error).__name__}: {error}") from error
    finally:
        logging.getLogger("cuflash").setLevel(level)
    console.print(result_table(sorted(results, key=lambda result: workloads.index(result.workload))))
    seconds = time.monotonic() - began
    where = "nothing was kept of this replay" if plan.replay else f"measurements are in {record.folder()}"
    console.print(f"{len(results)} of {len(workloads)} workloads in {seconds:.0f} s; {where}")
    complete = len(results) == len(workloads) and not any(result.state == "failed" for result in results)
    return 0 if complete else 1


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``cuflash tune report``."""
    storage_help = "the journal file, or the URL of a storage (default: the journal that was written last)"
    parser.add_argument("studies", nargs="?", metavar="STORAGE", help=storage_help)
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="write a picture of each study there")
    parser.add_argument("--only", default="", metavar="TEXT", help="studies whose name contains this")


def run_report(options: argparse.Namespace, console: Console) -> int:
    """``cuflash tune report``: a table, and pictures.

    Raises
    ------
    ValueError
        When there are no studies.
    """
    from cuflash.tuning import record, report
    from cuflash.tuning.study import opened

    where = options.studies or report.newest_journal()
    if where is None:
        raise ValueError(f"there is no journal in {record.folder()} yet: run cuflash tune")
    if "://" not in where:
        if not Path(where).is_file():
            raise ValueError(f"{where}: there is no such file")
        where = f"journal://{Path(where).resolve()}"
    with opened(where) as storage:
        studies = [studied for studied in report.read_studies(storage) if options.only in studied.name]
        if not studies:
            raise ValueError("it holds no study of such a name" if options.only else "it holds no measurements")
        console.print(report.describe(studies))
        if options.out is not None:
            try:
                written = report.save(studies, options.out)
            except ImportError as error:
                raise ValueError(f"pictures need Matplotlib: pip install 'cuflash[plot]' ({error})") from error
            console.print(f"{len(written)} pictures in {options.out}")
    return 0


class Display:
    """What is seen of a run: a line for each device on a terminal, and one for each workload that is done."""

    def __init__(self, console: Console, workloads: int, seconds: float) -> None:
        self._console = console
        self._deadline = time.monotonic() + seconds
        self._done, self._workloads = 0, workloads
        self._tasks: dict[int, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[candidate]}", style="dim"),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Bring the line of a device up to date."""
        fields = {
            "description": str(event.workload),
            "completed": event.evaluations,
            "total": event.limit,
            "best": f"best {1 / event.best:.3f}x the default",
            "candidate": event.candidate[:LATEST_WIDTH],
            "left": self._time_left(),
        }
        if event.device not in self._tasks:
            self._tasks[event.device] = self._progress.add_task(**fields)  # type: ignore[arg-type]
        self._progress.update(self._tasks[event.device], **fields)  # type: ignore[arg-type]

    def finish(self, result: Result) -> None:
        """Print a line for a workload that is done."""
        self._done += 1
        self._progress.console.print(f"[{self._done}/{self._workloads}] {result.workload}: {describe(result)}")

    def _time_left(self) -> str:
        left = self._deadline - time.monotonic()
        if math.isinf(left):
            return "no limit"
        minutes, seconds = divmod(max(int(left), 0), 60)
        return f"{minutes}:{seconds:02} left"


def describe(result: Result) -> str:
    """What came of a workload, in a few words."""
    if result.state == "failed":
        return f"failed: {result.note}"
    found = "the default stays" if result.state == "default" else f"{result.gain:.3f}x the default"
    return f"{found}, {result.evaluations} evaluations{f' ({result.note})' if result.note else ''}"


def result_table(results: Sequence[Result]) -> Table:
    """Workload, default, winner, gain, evaluations."""
    table = Table(box=None, pad_edge=False)
    for heading in ("workload", "default", "winner", "gain", "evaluations", "configuration"):
        right = heading in ("default", "winner", "gain", "evaluations")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for result in results:
        times = [f"{us:.1f} us" if math.isfinite(us) else "-" for us in (result.default_us, result.time_us)]
        gain = f"{result.gain:.3f}x" if math.isfinite(result.gain) else "-"
        what = {"default": "the default", "failed": f"failed: {result.note}"}.get(result.state, str(result.config))
        table.add_row(str(result.workload), *times, gain, str(result.evaluations), what)
    return table


def _pair(name: str, numbers: Sequence[int]) -> tuple[int, int]:
    if len(numbers) > 2:
        raise ValueError(f"--{name.replace('_', '-')} takes one number or two, got {len(numbers)}")
    return numbers[0], numbers[-1]


def _positive(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")


def _bound(text: str) -> int | None:
    if text == "none":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer or 'none', got {text!r}")
