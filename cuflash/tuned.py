"""Where winners are looked up: what this process was given, the user's, the machine's, those that ship with cuflash.

The first lookup of a key reads its files; afterwards it is one access to a dictionary. Nothing is ever measured here.

Winners are kept in the folder ``tuned`` of the user's data directory, or of the directory that the environment variable
``CUFLASH_CACHE_DIR`` names. Where that cannot be written they go to a private folder of the system's temporary
directory. Those of a whole machine are in the folder ``tuned`` of the site's data directory.
"""

from __future__ import annotations

import functools
import importlib.resources
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import platformdirs

from cuflash import cubins
from cuflash.backward_problem import BackwardProblem
from cuflash.device import DeviceInfo
from cuflash.problem import Problem
from cuflash.sources import source_hash
from cuflash.store import Store, describe_spec, read_collection
from cuflash.winner import BACKWARD, GpuConfig, Key, Provenance, Winner, key_of

ENVIRONMENT_VARIABLE = "CUFLASH_REQUIRE_TUNED"
UNKNOWN = "unknown"
FOLDER = "tuned"

_log = logging.getLogger("cuflash")


class UntunedError(LookupError):
    """A call has no tuned configuration, and one is required."""


class Found(NamedTuple):
    """A winner and where it was found.

    Attributes
    ----------
    winner : Winner
    source : {"loaded", "tuned", "site", "shipped"}
    stale : str or None
        Why it may no longer be the fastest: what differs from where it was measured.
    """

    winner: Winner
    source: str
    stale: str | None


# Called whenever another configuration may be the one to use; each time `version` counts one up.
when_changed: list[Callable[[], object]] = []

_known: dict[Key, tuple[Found, ...]] = {}
_loaded: dict[Key, Winner] = {}
_told: set[Key] = set()
_required: bool | None = None
_version = 0


def version() -> int:
    """How often what is to be used has changed in this process."""
    return _version


def candidates(key: Key) -> tuple[Found, ...]:
    """The legal winners of `key`, best source first; one measured with something else comes after those that are not.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import tuned, winner
    >>> from cuflash.device import known_device
    >>> x = np.zeros((8, 1000, 64), np.float32)
    >>> tuned.candidates(winner.key_of(cuflash.explain(x, x, x).problem, known_device("sm_75")))
    ()
    """
    found = _known.get(key)
    if found is None:
        before = version()
        found = _known[key] = tuple(_look_up(key))
        if version() != before:  # another thread has changed what was looked up
            _known.pop(key, None)
    return found


def _look_up(key: Key) -> list[Found]:
    own = [winner for winner in (store.read(key) for store in own_stores()) if winner is not None]
    own.sort(key=lambda winner: winner.measurement.date, reverse=True)
    sources = [("loaded", _loaded.get(key)), *(("tuned", winner) for winner in own)]
    sources += [("site", site_store().read(key)), ("shipped", _shipped().get(key))]
    found = []
    for source, winner in sources:
        if winner is None:
            continue
        if reason := winner.config.why_illegal(key.spec, key.device):
            _log.warning("a %s configuration is not used: %s; %s", source, reason, winner.config)
            continue
        found.append(Found(winner, source, why_stale(winner, source)))
    return sorted(found, key=lambda one: one.stale is not None and one.source != "loaded")


def find(
    problem: Problem | BackwardProblem, device: DeviceInfo, why_not: Callable[[GpuConfig], str | None]
) -> Found | None:
    """The first winner that serves a call, `why_not` being None; None where there is none. Either is logged at need.

    Raises
    ------
    UntunedError
        Where there is none, and one is required.
    """
    key = key_of(problem, device)
    for found in candidates(key):
        if why_not(found.winner.config) is None:
            if found.stale is not None:
                report_stale(key, problem, found)
            return found
    report_untuned(key, problem)
    return None


def refuse(key: Key, source: str, error: Exception) -> bool:
    """Use the configuration of `source` no more in this process, since it cannot be loaded; False if there is none."""
    found = candidates(key)
    rest = tuple(one for one in found if one.source != source)
    if len(rest) == len(found):
        return False
    _log.warning("the %s configuration for %s is not used: %s", source, _describe(key), str(error).split("\n")[0])
    _known[key] = rest
    return True


def put(winner: Winner) -> Path | None:
    """Keep `winner` for this process and every later one, and say where; None where nothing can be written.

    Raises
    ------
    ValueError
        When its configuration is not legal.
    """
    key = winner.key
    if reason := winner.config.why_illegal(key.spec, key.device):
        raise ValueError(f"config is not legal here: {reason}; {winner.config}")
    path = _write(winner)
    if path is None:
        _loaded[key] = winner
    else:
        _loaded.pop(key, None)
    _change(key)
    return path


def _write(winner: Winner) -> Path | None:
    try:
        directory = user_directory()
        if not directory.is_absolute():
            raise OSError(f"{directory} is not an absolute path")
        make_private(directory.parent)
        return Store(directory).write(winner)
    except OSError as error:
        why = error.strerror or str(error)
    temporary = temporary_directory()
    try:
        if temporary is None:
            raise OSError("no temporary directory can be written")
        make_private(temporary.parent)
        if reason := cubins.why_untrusted(temporary.parent):
            raise OSError(reason)
        path = Store(temporary).write(winner)
    except OSError as error:
        _log.warning("winners cannot be kept in %s (%s), nor in %s (%s)", directory, why, temporary, error)
        return None
    _log.warning("winners cannot be kept in %s (%s): they go to %s", directory, why, temporary)
    return path


def winners() -> Iterator[Found]:
    """Every winner of every source, legal or not, in the order of lookup; the first of a key is the one that counts."""
    for winner in list(_loaded.values()):
        yield Found(winner, "loaded", why_stale(winner))
    for name, store in (*(("tuned", store) for store in own_stores()), ("site", site_store())):
        for winner in store.winners():
            yield Found(winner, name, why_stale(winner))
    for winner in _shipped().values():
        yield Found(winner, "shipped", why_stale(winner, "shipped"))


def load_configs(path: str | os.PathLike[str]) -> int:
    """Use the configurations in a file that ``cuflash cache export`` wrote, in this process, before all others.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    int
        How many there are. Those of other GPUs do no harm.

    Raises
    ------
    OSError
        When the file cannot be read.
    ValueError
        When it is damaged or of another version; then none of it is used.

    Examples
    --------
    >>> import cuflash, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "winners.json")
    >>> _ = path.write_text('{"schema": 1, "winners": []}')
    >>> cuflash.load_configs(path)
    0
    """
    try:
        loaded = read_collection(Path(path))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be used: {error}") from error
    _loaded.update({winner.key: winner for winner in loaded})
    _change()
    return len(loaded)


def require_tuned(required: bool = True) -> None:
    """Whether a call on arrays of a GPU that has no tuned configuration, and no `config`, raises `UntunedError`.

    Unless this is called, the environment variable ``CUFLASH_REQUIRE_TUNED`` decides, where 1 means that it does.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.require_tuned(False)
    """
    global _required
    if not isinstance(required, bool):
        raise TypeError(f"required must be True or False, got {required!r}")
    _required = required
    _change()


def is_required() -> bool:
    """Whether an untuned call raises."""
    if _required is not None:
        return _required
    value = os.environ.get(ENVIRONMENT_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def report_untuned(key: Key, problem: Problem | BackwardProblem) -> None:
    """Say once for each key that the default is used and how to tune it; raise where tuning is required."""
    what = f"no tuned configuration for {_describe(key)}; to tune it: {tune_command(problem)}"
    if is_required():
        raise UntunedError(f"{what} (looked for {Store(user_directory()).path_of(key)})")
    if key not in _told:
        _told.add(key)
        _log.info("%s", what)


def report_stale(key: Key, problem: Problem | BackwardProblem, found: Found) -> None:
    """Say once for each key that its configuration may no longer be the fastest and how to tune it again."""
    if key not in _told:
        _told.add(key)
        what = f"the {found.source} configuration for {_describe(key)} {found.stale}"
        _log.info("%s; to tune it again: %s", what, tune_command(problem))


def tune_command(asked: Problem | BackwardProblem) -> str:
    """The command that tunes a problem of these sizes."""
    spec, problem = asked.spec, asked if isinstance(asked, Problem) else asked.forward
    batch = problem.heads_total // max(problem.h_q, 1)
    words = [f"cuflash tune --dtype {spec.dtype} --batch {batch} --heads {problem.h_q} {problem.h_kv}"]
    words.append(f"--seqlen {problem.n_q} {problem.n_k} --head-dim {problem.d} {problem.d_v}")
    is_causal = problem.right == 0
    if is_causal:
        words.append("--causal" if problem.bottom_right else "--causal top-left")
    if problem.left is not None or (problem.right is not None and not is_causal):
        left, right = ("none" if side is None else side for side in (problem.left, problem.right))
        words.append(f"--window {left} {right}")
    flags = {"--softcap": spec.softcap, "--mask": spec.mask, f"--bias {spec.bias}": spec.bias is not None}
    flags["--bias-of-keys"] = spec.bias_of_keys
    flags |= {"--q-lengths": spec.q_lengths, "--kv-lengths": spec.kv_lengths, "--unaligned": not spec.aligned}
    flags["--backward"] = asked is not problem
    return " ".join(words + [flag for flag, given in flags.items() if given])


def why_stale(winner: Winner, source: str = "tuned") -> str | None:
    """What differs from where `winner` was measured, as far as this machine can tell; None where nothing does.

    Of those that are shipped, only the kernel counts: the compilers and drivers of their users are many.
    """
    now, then = current_provenance(winner.kernel), winner.provenance
    if now.source != then.source:
        return "was measured with another version of the kernel"
    if source == "shipped":
        return None
    if now.nvrtc not in (then.nvrtc, UNKNOWN):
        return f"was measured with NVRTC {then.nvrtc}, and this is {now.nvrtc}"
    if now.driver not in (then.driver, UNKNOWN):
        return f"was measured with a driver for CUDA {then.driver}, and this one is for {now.driver}"
    return None


def current_provenance(kernel: str) -> Provenance:
    """What a kernel, ``"forward_mma"`` say, would be measured with here and now."""
    return Provenance(source_hash(kernel), *_toolchain())


@functools.cache
def _toolchain() -> tuple[str, str]:
    """Versions of NVRTC and of the driver's CUDA."""
    try:
        from cupy.cuda import nvrtc, runtime

        major, minor = nvrtc.getVersion()
        driver = runtime.driverGetVersion()
    except (ImportError, RuntimeError):
        return UNKNOWN, UNKNOWN
    return f"{major}.{minor}", f"{driver // 1000}.{driver % 1000 // 10}" if driver else UNKNOWN


def user_directory() -> Path:
    """Where the user's winners are kept, whether or not it exists."""
    if named := os.environ.get(cubins.ENVIRONMENT_VARIABLE):
        return Path(os.path.expanduser(named), FOLDER)
    return Path(platformdirs.user_data_dir("cuflash", appauthor=False), FOLDER)


def temporary_directory() -> Path | None:
    """Where the user's winners go that cannot be kept elsewhere; None where nothing can be written at all."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    try:
        return Path(tempfile.gettempdir(), f"cuflash-{user}", FOLDER)
    except OSError:  # gettempdir tries to write
        return None


def site_directory() -> Path:
    """Where the winners of a whole machine are kept, whether or not it exists."""
    return Path(platformdirs.site_data_dir("cuflash", appauthor=False), FOLDER)


def own_stores() -> list[Store]:
    """The directories of the user's own winners that may be used."""
    own = [Store(user_directory())] if user_directory().is_absolute() else []
    temporary = temporary_directory()
    if temporary is not None and cubins.why_untrusted(temporary.parent) is None:
        own.append(Store(temporary))
    return own


def site_store() -> Store:
    """The winners of the whole machine."""
    return Store(site_directory())


def make_private(folder: Path) -> None:
    """Make a folder that is the user's alone, where it does not exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@functools.cache
def _shipped() -> dict[Key, Winner]:
    """The winners that come with cuflash."""
    try:
        with importlib.resources.as_file(importlib.resources.files("cuflash") / "tuned.json") as path:
            return {winner.key: winner for winner in read_collection(path)}
    except (OSError, ValueError) as error:
        _log.warning("the configurations that come with cuflash cannot be used: %s", error)
        return {}


def _describe(key: Key) -> str:
    gradients = "gradients of " if key.operation == BACKWARD else ""
    return f"{gradients}{describe_spec(key.spec)}, {key.bucket}, on {key.device.name}"


def _change(key: Key | None = None) -> None:
    """Forget what was looked up, of one key or of all."""
    global _version
    _version += 1
    if key is None:
        _known.clear()
        _told.clear()
    else:
        _known.pop(key, None)
        _told.discard(key)
    for tell in when_changed:
        tell()
