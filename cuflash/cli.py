"""The command ``cuflash``: demo, run, tune, bench, info, cache.

Exit codes: 0 when all went well, 1 when a computation failed or the demo found a result that is not exact, 2 for an
argument or a file that cannot be used, 130 after Ctrl-C (`tune` then keeps what it found, and ends with 0 or 1). The
reason is on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import cuflash
from cuflash import cache, machine, timing, tuned
from cuflash.bench import PRESETS, Settings, current_gpu, run_bench
from cuflash.demo import describe_plan, run_demo
from cuflash.peers import CUFLASH, PEERS, Case, Peer
from cuflash.problem import DTYPES, LAYOUTS
from cuflash.tuning import command

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
ALIGNMENTS = ("bottom-right", "top-left")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}
YES_OR_NO = {"yes": True, "no": False}
BENCH_NOTES = """\
Every result is held against float64 before anybody is timed. Whoever is not installed or does not serve a case is
listed with the reason. All run in one process, in turn and in reversed order every second round, timed by CUDA events,
each with a cold L2 cache; figures are medians over the rounds. The presets: papers, D of 64, 128 and 256, N of 1024,
4096 and 16384, full and causal, in bfloat16; head-dims, D of 72, 80, 96 and 192; gqa, 32 heads to 4; window, 256 keys
of 16384; softcap; alibi. With --backward it is the gradients that are compared."""
RUN_NOTES = """\
q, k and v are (N, D), (H, N, D) or (B, H, N, D), mask and bias (..., H_q, N_q, N_k) or such that they broadcast to it.
The .npy format does not know bfloat16: it is read from uint16 bit patterns, or from the 2-byte void that numpy.save
makes of it, and written as uint16. In Python: numpy.load("o.npy").view(ml_dtypes.bfloat16)."""


class UsageError(Exception):
    """An argument or a file that cannot be used; the message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, those of the process unless given, and return the exit code."""
    arguments = _complete_causal(list(sys.argv[1:] if arguments is None else arguments))
    options = build_parser().parse_args(arguments)
    with _log_on_stderr():
        try:
            return int(options.command(options))
        except KeyboardInterrupt:
            return _complain(options, "interrupted", INTERRUPTED)
        except UsageError as error:
            return _complain(options, str(error), UNUSABLE)
        except MemoryError as error:
            return _complain(options, f"not enough memory: {error}", FAILED)
        except (OSError, RuntimeError) as error:  # CUDA errors and cuflash.compiler.CompileError are RuntimeErrors
            return _complain(options, str(error), FAILED)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    summary = "Exact, IO-aware attention on GPU and CPU."
    parser = argparse.ArgumentParser("cuflash", description=summary, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    demo = _add_command(commands, "demo", demo_command, "attention on real and on long input: error, time and memory")
    _add_device(demo)
    length_help = "length of the long input (default: 16384 on a GPU, 4096 on a CPU)"
    demo.add_argument("--n", type=_positive, metavar="N", help=length_help)

    run = _add_command(commands, "run", run_command, "attention of the arrays in .npy files", epilog=RUN_NOTES)
    for name in ("q", "k", "v"):
        run.add_argument(name, type=Path, metavar=f"{name}.npy")
    run.add_argument("-o", "--out", type=Path, required=True, metavar="o.npy", help="where to write the result")
    run.add_argument("--lse", type=Path, metavar="lse.npy", help="where to write the log-sum-exp of each row too")
    causal_help = "rows see keys up to the diagonal, which ends there (default: bottom-right)"
    run.add_argument("--causal", nargs="?", const=ALIGNMENTS[0], default=False, choices=ALIGNMENTS, help=causal_help)
    window_help = "how many keys a row sees to either side of the diagonal, or none for all of them"
    run.add_argument("--window", nargs=2, type=_bound, metavar=("LEFT", "RIGHT"), help=window_help)
    run.add_argument("--scale", type=float, help="factor of the scores (default: 1 / sqrt(D))")
    run.add_argument("--softcap", type=float, help="scores become softcap * tanh(score / softcap)")
    run.add_argument("--mask", type=Path, metavar="mask.npy", help="bool, True where a row may see a key")
    run.add_argument("--bias", type=Path, metavar="bias.npy", help="added to the scores")
    run.add_argument("--q-lengths", type=Path, metavar="n.npy", help="rows that are real, for each batch entry")
    run.add_argument("--kv-lengths", type=Path, metavar="n.npy", help="keys that are real, for each batch entry")
    run.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="order of the axes (default: %(default)s)")
    run.add_argument("--dtype", choices=DTYPES, help="compute in this dtype (default: that of the files)")
    _add_device(run)

    about = "find the fastest configurations on this machine's GPU and keep them"
    tune = _add_command(commands, "tune", tune_command, about, epilog=command.NOTES)
    command.add_arguments(tune)
    actions = tune.add_subparsers(metavar="report", required=False)
    about = "what was measured: history, importance of each axis, heat map"
    command.add_report_arguments(_add_command(actions, "report", report_command, about, parent="tune"))

    about = "cuflash and what else is installed, side by side on a GPU"
    bench = _add_command(commands, "bench", bench_command, about, epilog=BENCH_NOTES)
    presets_help = f"cases to compare: {', '.join(PRESETS)} (default: papers); the options below replace parts of them"
    bench.add_argument("--preset", type=_names(PRESETS), default=("papers",), metavar="NAMES", help=presets_help)
    bench.add_argument("--d", type=_positives, metavar="64,128", help="head dims")
    bench.add_argument("--n", type=_positives, metavar="1024,4096", help="sequence lengths")
    bench.add_argument("--causal", choices=CAUSAL, help="with the causal mask, without, or both")
    bench.add_argument("--dtype", type=_names(DTYPES), metavar="NAMES", help=f"of {', '.join(DTYPES)}")
    bench.add_argument("--tokens", type=_positive, metavar="B*N", help="batch size times N (default: 16384)")
    bench.add_argument("--heads", type=_positive, metavar="H", help="query heads (default: such that H * D is 2048)")
    bench.add_argument("--kv-heads", type=_positive, metavar="H", help="heads of keys and values (default: as many)")
    bench.add_argument("--window", nargs=2, type=_bound, metavar=("LEFT", "RIGHT"), help=window_help)
    bench.add_argument("--softcap", type=float, help="scores become softcap * tanh(score / softcap)")
    bench.add_argument("--alibi", action="store_const", const=True, help="scores get ALiBi's linear bias")
    bench.add_argument("--backward", action="store_const", const=True, help="the gradients, all their kernels counted")
    deterministic_help = "whether cuflash's gradients have the same bits on every run (default: yes)"
    bench.add_argument("--deterministic", choices=YES_OR_NO, help=deterministic_help)
    bench.add_argument("--layout", choices=LAYOUTS, help="order of the axes in memory (default: bnhd)")
    peers_help = f"whom to compare with, of {', '.join(peer.name for peer in PEERS)} (default: all that are installed)"
    bench.add_argument("--peers", type=_peers, default=PEERS, metavar="NAMES", help=peers_help)
    bench.add_argument("--rounds", type=_positive, default=9, help="in which all are timed in turn (default: 9)")
    bench.add_argument("--repeats", type=_positive, default=5, help="of each within a round (default: 5)")
    bench.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no case after them")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every figure, the time of each round included")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="draw TFLOP/s over N (needs cuflash[plot])")

    _add_command(commands, "info", info_command, "devices, driver, versions and caches of this machine")
    _add_cache_commands(commands)
    return parser


def demo_command(options: argparse.Namespace) -> int:
    """``cuflash demo``."""
    gpu = choose_gpu(options.device)
    if not gpu and options.device == "auto":
        print(f"No GPU is used: {machine.why_no_gpu()}.")
    return 0 if run_demo(_console(), gpu, options.n) else FAILED


def info_command(options: argparse.Namespace) -> int:
    """``cuflash info``."""
    _console().print(machine.describe_machine())
    return 0


def run_command(options: argparse.Namespace) -> int:
    """``cuflash run``."""
    outputs = [path for path in (options.out, options.lse) if path is not None]
    _check_outputs(outputs)
    gpu = choose_gpu(options.device)
    arrays = [read_floats(path, options.dtype) for path in (options.q, options.k, options.v)]
    keywords: dict[str, Any] = {
        "scale": options.scale,
        "causal": options.causal,
        "window": None if options.window is None else tuple(options.window),
        "softcap": options.softcap,
        "layout": options.layout,
        "mask": None if options.mask is None else read_array(options.mask),
        "bias": None if options.bias is None else read_floats(options.bias, options.dtype, keep="float32"),
    }
    for name in ("q_lengths", "kv_lengths"):
        path = getattr(options, name)
        keywords[name] = None if path is None else read_array(path)
    if gpu:
        import cupy

        arrays = [cupy.asarray(x) for x in arrays]
        keywords = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
    try:
        plan = cuflash.explain(*arrays, **keywords)
        start = time.perf_counter()
        results = cuflash.attention(*arrays, return_lse=True, **keywords)
        results = [cupy.asnumpy(x) if gpu else x for x in results]
        seconds = time.perf_counter() - start
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    write_arrays(list(zip(outputs, results, strict=False)))
    out = results[0]
    where = machine.describe_gpu(cupy.cuda.Device().id) if gpu else "the CPU"
    print(f"{options.out}: {out.dtype} {out.shape}, by {describe_plan(plan)} on {where} in {seconds:.3g} s")
    return 0


def bench_command(options: argparse.Namespace) -> int:
    """``cuflash bench``."""
    if (why := machine.why_no_gpu()) is not None:
        raise UsageError(f"it needs a GPU: {why}")
    _check_outputs([path for path in (options.json, options.plot) if path is not None])
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'cuflash[plot]'")
    report = run_bench(
        _console(),
        current_gpu(options.rounds, options.repeats),
        bench_cases(options),
        options.peers,
        method={"rounds": options.rounds, "repeats": options.repeats, "flushed_bytes": timing.FLUSH_BYTES},
        budget=options.budget,
        json_file=options.json,
        plot_file=options.plot,
    )
    return 0 if all(CUFLASH.name in comparison.measured for comparison in report.comparisons) else FAILED


def bench_cases(options: argparse.Namespace) -> list[Case]:
    """The cases of the presets, with what the command line gives in place of their settings."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    given["causal"] = None if options.causal is None else CAUSAL[options.causal]
    given["deterministic"] = YES_OR_NO.get(options.deterministic)
    given["window"] = None if options.window is None else tuple(options.window)
    replaced = {name: value for name, value in given.items() if value is not None}
    try:
        cases = [case for name in options.preset for case in dataclasses.replace(PRESETS[name], **replaced).cases()]
    except ValueError as error:
        raise UsageError(str(error)) from error
    return list(dict.fromkeys(cases))


def tune_command(options: argparse.Namespace) -> int:
    """``cuflash tune``."""
    if not options.replay and (why := machine.why_no_gpu()):
        raise UsageError(f"tuning needs a GPU: {why}; with --replay it runs on recorded sweeps")
    try:
        return command.run(options, _console())
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def report_command(options: argparse.Namespace) -> int:
    """``cuflash tune report``."""
    try:
        return command.run_report(options, _console())
    except ValueError as error:
        raise UsageError(str(error)) from error


def list_command(options: argparse.Namespace) -> int:
    """``cuflash cache list``."""
    console = _console()
    machine.print_whole(console, cache.describe_kernels())
    machine.print_whole(console, f"{tuned.user_directory()}: tuned configurations of this user")
    machine.print_whole(console, cache.describe_winners())
    return 0


def export_command(options: argparse.Namespace) -> int:
    """``cuflash cache export``."""
    _check_outputs([options.file])
    print(f"{options.file}: {cache.export_winners(options.file, options.gpu)} tuned configurations")
    return 0


def import_command(options: argparse.Namespace) -> int:
    """``cuflash cache import``."""
    try:
        taken, kept, refused = cache.import_winners(options.file, options.site, options.overwrite)
    except ValueError as error:
        raise UsageError(f"{options.file}: {error}") from error
    except OSError as error:
        if error.filename is None or Path(error.filename) != options.file:
            raise
        raise UsageError(str(error)) from error
    print(f"{taken} taken over, {kept} no better than what was there, {refused} not legal")
    return FAILED if refused else 0


def verify_command(options: argparse.Namespace) -> int:
    """``cuflash cache verify``."""
    faults = list(cache.find_faults())
    for fault in faults:
        print(fault)
    counts = cache.count_winners()
    stale = counts.pop("stale", 0)
    found = ", ".join(f"{count} {source}" for source, count in counts.items() if count) or "none"
    print(f"tuned configurations: {found}; {stale} stale; {len(faults)} faults")
    return FAILED if faults else 0


def clear_command(options: argparse.Namespace) -> int:
    """``cuflash cache clear``."""
    kernels, winners = cache.clear(options.what)
    print(f"removed {kernels} compiled kernels and {winners} tuned configurations")
    return 0


def choose_gpu(wanted: str) -> bool:
    """Whether to compute on a GPU: where there is one, unless `wanted` is ``"cpu"``; ``"gpu"`` insists."""
    if wanted == "cpu":
        return False
    why = machine.why_no_gpu()
    if why is not None and wanted == "gpu":
        raise UsageError(f"--device gpu: {why}")
    return why is None


def read_array(path: Path) -> NDArray[Any]:
    """The array in a .npy file, in the machine's byte order. Never unpickles."""
    try:
        with path.open("rb") as file:
            if file.peek(6)[:6] != b"\x93NUMPY":
                raise UsageError(f"{path}: not a .npy file")
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # whatever NumPy's reader of headers trips over
        raise UsageError(f"{path}: not a .npy file that can be read: {error}") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_floats(path: Path, dtype: str | None, keep: str | None = None) -> NDArray[Any]:
    """The floating point array in a .npy file, converted to `dtype` if one is given and it is not `keep` already."""
    array = read_array(path)
    if array.dtype in (np.dtype("uint16"), np.dtype("V2")):
        if dtype != "bfloat16":
            raise UsageError(f"{path}: holds {array.dtype}, which is read as bfloat16 with --dtype bfloat16 only")
        return array.view(BFLOAT16)
    if array.dtype.kind != "f":
        raise UsageError(f"{path}: must hold floating point numbers, holds {array.dtype}")
    if dtype is None or (keep is not None and array.dtype == keep):
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    if np.any(np.isinf(converted) & ~np.isinf(array)):
        raise UsageError(f"{path}: holds values beyond the range of {dtype}")
    return converted


def write_arrays(arrays: Sequence[tuple[Path, NDArray[Any]]]) -> None:
    """Write .npy files, each whole or not at all. bfloat16 is written as uint16."""
    written: list[tuple[Path, Path]] = []
    try:
        for path, array in arrays:
            target = path.resolve()  # what a link points to is written, not the link
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
                written.append((Path(file.name), target))
                np.save(file, array.view(np.uint16) if array.dtype == BFLOAT16 else array, allow_pickle=False)
        for temporary, target in written:
            temporary.chmod(0o666 & ~current_umask())
            temporary.replace(target)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)


def current_umask() -> int:
    """The permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_outputs(paths: Sequence[Path]) -> None:
    """Refuse what could not be written, before anything is computed."""
    for path in paths:
        if "\0" in str(path):
            raise UsageError(f"{path!r}: not the name of a file")
        if path.is_dir():
            raise UsageError(f"{path}: is a folder, not a file to write")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is not a regular file, and is not written to")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError(f"two outputs are the same file, {paths[0]}")


def _add_command(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str | None = None,
    parent: str = "",
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command, name=f"{parent} {name}".lstrip())
    return parser


def _add_cache_commands(commands: Any) -> None:
    """The commands of ``cuflash cache``."""
    summary = "compiled kernels and tuned configurations on disk"
    parser = commands.add_parser("cache", help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    actions = parser.add_subparsers(metavar="action", required=True)
    _add_command(actions, "list", list_command, "where they are and what they hold", parent="cache")
    exporting = _add_command(actions, "export", export_command, "write the tuned ones into one file", parent="cache")
    exporting.add_argument("file", type=Path, metavar="tuned.json")
    exporting.add_argument("--gpu", metavar="NAME", help='only those of one kind of GPU, "NVIDIA H200" say')
    importing = _add_command(actions, "import", import_command, "keep what export has written", parent="cache")
    importing.add_argument("file", type=Path, metavar="tuned.json")
    importing.add_argument("--site", action="store_true", help="for every user of this machine")
    overwrite_help = (
        "also in place of newer ones, and of ones measured with the kernel, NVRTC and driver of this machine"
    )
    importing.add_argument("--overwrite", action="store_true", help=overwrite_help)
    _add_command(actions, "verify", verify_command, "read every file, and say what is wrong with it", parent="cache")
    clearing = _add_command(actions, "clear", clear_command, "remove them", parent="cache")
    clearing.add_argument("what", nargs="?", choices=cache.CLEARED, default="kernels", help="default: kernels")


def _add_device(parser: argparse.ArgumentParser) -> None:
    device_help = "where to compute (default: a GPU where there is one)"
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help=device_help)


def _complete_causal(arguments: list[str]) -> list[str]:
    """Spell out a bare ``--causal`` of `run`, which would take the file name that follows for its value."""
    if arguments[:1] != ["run"]:
        return arguments
    return [
        f"{argument}={ALIGNMENTS[0]}" if argument == "--causal" and after not in ALIGNMENTS else argument
        for argument, after in itertools.zip_longest(arguments, arguments[1:])
    ]


def _bound(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer or 'none', got {text!r}") from None


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of names with commas between them."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {', '.join(map(repr, unknown))}")
        return names

    return read


def _peers(text: str) -> tuple[Peer, ...]:
    known = {peer.name: peer for peer in PEERS}
    return tuple(known[name] for name in _names(known)(text))


def _positives(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _positive(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")


def _console() -> Console:
    """Standard output, on which brackets are brackets: rich would take ``cuflash[cuda13]`` for markup."""
    return Console(markup=False, highlight=False)


def _complain(options: argparse.Namespace, message: str, code: int) -> int:
    print(f"cuflash {options.name}: error: {message}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Show what cuflash logs, the compilation of a kernel say."""
    log = logging.getLogger("cuflash")
    handler, level = logging.StreamHandler(), log.level
    handler.setFormatter(logging.Formatter("cuflash: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
