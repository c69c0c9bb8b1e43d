"""Tuning a list of workloads on one GPU: for each a study, a search, finals, and the winner on disk.

A session may be one of several, in processes of their own, that share a storage: they take the workloads in different
order, join in each other's searches, and one of them runs the finals of each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from optuna.storages import BaseStorage

from cuflash import tuned
from cuflash.device import DeviceInfo
from cuflash.tuning import record, search
from cuflash.tuning.measure import Backend, GpuBackend, MeasureError, Measurement
from cuflash.tuning.processes import Machine
from cuflash.tuning.space import Point, Space
from cuflash.tuning.study import Study
from cuflash.tuning.table import Table, TableBackend
from cuflash.tuning.workload import Workload
from cuflash.winner import GpuConfig, Key, Winner, config_as_json, config_from_json, key_of
from cuflash.winner import Measurement as Timing

FINALS_SHARE, FINALS_SECONDS = 0.25, 10.0  # of the time for a workload, and at most, that are left for its finals
MOST_SEEDS = 6
RUNNER_UPS = 5
WAIT_SECONDS = 0.2  # for what another process is doing
TOO_LATE = "there was no time to measure anything"
INTERRUPTED = "interrupted: run the command again to go on"

_log = logging.getLogger("cuflash")


class Result(NamedTuple):
    """What came of a workload.

    Attributes
    ----------
    workload : Workload
    state : str
        ``"tuned"``; ``"default"``, which nothing beats by more than the tie band; ``"known"`` from an earlier run;
        ``"failed"``, for the reason in `note`.
    config : GpuConfig or None
    default_us, time_us : float
        Microseconds of the default and of `config`, timed in turn.
    evaluations : int
        Configurations that were measured.
    note : str
    """

    workload: Workload
    state: str
    config: GpuConfig | None = None
    default_us: float = math.nan
    time_us: float = math.nan
    evaluations: int = 0
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default_us / self.time_us

    def as_json(self) -> dict[str, Any]:
        """The result as JSON knows it."""
        config = None if self.config is None else [self.config.family, config_as_json(self.config)]
        numbers = {
            name: None if math.isnan(x) else x for name, x in zip(("default_us", "time_us"), self[3:5], strict=True)
        }
        return {**self._asdict(), **numbers, "workload": self.workload.as_json(), "config": config}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Result:
        """What `as_json` made this of."""
        workload = Workload.from_json(document["workload"])
        config = document["config"] and config_from_json(workload.operation, *document["config"])
        numbers = {name: math.nan if document[name] is None else document[name] for name in ("default_us", "time_us")}
        return Result(**{**document, **numbers, "workload": workload, "config": config})


class Event(NamedTuple):
    """Progress of one workload on one device, for a display.

    Attributes
    ----------
    device : int
        Which process of the run.
    workload : Workload
    evaluations, limit : int
        Configurations that were measured, and how many are at most.
    best : float
        The least time so far, over the default's.
    candidate : str
        What was measured last.
    seconds_left : float
    """

    device: int
    workload: Workload
    evaluations: int
    limit: int
    best: float
    candidate: str
    seconds_left: float

    def as_json(self) -> dict[str, Any]:
        """The event as JSON knows it."""
        numbers = {name: None if math.isinf(x) else x for name, x in (("best", self.best), ("seconds_left", self[6]))}
        return {**self._asdict(), **numbers, "workload": self.workload.as_json()}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Event:
        """What `as_json` made this of."""
        numbers = {name: math.inf if document[name] is None else document[name] for name in ("best", "seconds_left")}
        return Event(**{**document, **numbers, "workload": Workload.from_json(document["workload"])})


class Target(Protocol):
    """What is tuned: a GPU, or recorded tables."""

    @property
    def device(self) -> DeviceInfo:
        """The GPU."""

    @property
    def is_real(self) -> bool:
        """Whether what is found holds for this machine, and is kept."""

    def space(self, workload: Workload) -> Space:
        """The points that may be chosen."""

    def backend(self, workload: Workload, space: Space) -> Backend:
        """What measures them."""


class GpuTarget:
    """A GPU of this machine."""

    is_real = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.device = machine.device()

    def space(self, workload: Workload) -> Space:
        """Every legal point."""
        return Space.legal(workload.problem(), self.device)

    def backend(self, workload: Workload, space: Space) -> GpuBackend:
        """The machine's processes."""
        return GpuBackend(self._machine, workload, space)


class ReplayTarget:
    """Recorded tables in place of a GPU."""

    is_real = False

    def __init__(self, tables: Sequence[Table], seed: int = 0, pace: float = 0.0) -> None:
        self._tables = {table.workload: table for table in tables}
        self._seed = seed
        self._pace = pace
        self.device = tables[0].space.device

    def space(self, workload: Workload) -> Space:
        """The recorded points."""
        return self._tables[workload].space

    def backend(self, workload: Workload, space: Space) -> TableBackend:
        """The recorded times."""
        return TableBackend(self._tables[workload], self._seed, pace=self._pace)


class Session:
    """Tunes workloads on one target, alone or beside other processes.

    Parameters
    ----------
    target : Target
    storage : optuna.storages.BaseStorage, optional
        Where the studies are kept; in memory if not given.
    run : str
        Names the run, which may have several processes: what was found in it is not sought again.
    index, processes : int
        Which process of how many this is.
    shared : bool
        Whether other processes may use the storage at the same time.
    seed : int
    directory : Path, optional
        Where measurements are recorded.
    exhaustive : bool
        Whether every legal point is measured, however many.
    report : callable, optional
        Called with an `Event` after every measurement.
    """

    def __init__(
        self,
        target: Target,
        *,
        storage: BaseStorage | None = None,
        run: str = "run",
        index: int = 0,
        processes: int = 1,
        shared: bool = False,
        seed: int = 0,
        directory: Path | None = None,
        exhaustive: bool = False,
        report: Callable[[Event], None] | None = None,
    ) -> None:
        self._target = target
        self._storage = storage
        self._run = run
        self._index = index
        self._processes = processes
        self._worker = worker_name(run, index) if shared else None
        self._seed = seed
        self._record = record.Record(directory)
        self._exhaustive = exhaustive
        self._report = report
        self._interrupted = False

    def run(self, workloads: Sequence[Workload], seconds: float = math.inf) -> Iterator[Result]:
        """Tune `workloads` within `seconds`, and yield what came of each, in no certain order.

        Ctrl-C ends the search of the workload at hand, whose finals are still run, and then the run.
        """
        deadline = time.monotonic() + seconds
        first = self._index * len(workloads) // self._processes  # each process begins elsewhere
        left = [*workloads[first:], *workloads[:first]]
        while left and not self._interrupted:
            others_work = True
            for workload in list(left):
                share = max(0.0, deadline - time.monotonic()) / math.ceil(len(left) / self._processes)
                result = self._tune(workload, share)
                if result is not None:
                    others_work = False
                    left.remove(workload)
                    yield result
                if self._interrupted:
                    return
            if others_work:
                time.sleep(WAIT_SECONDS)

    def _tune(self, workload: Workload, seconds: float) -> Result | None:
        """Tune one workload; None where its finals are another process's and not done yet."""
        try:
            space = self._target.space(workload)
        except (TypeError, ValueError) as error:
            return Result(workload, "failed", note=str(error))
        study = Study(space, self._study_name(workload, space), self._storage, self._seed, self._worker)
        if (outcome := self._outcome(study)) is not None:
            return outcome
        study.restore(self._record.read(study.name))
        seeds = seeds_for(space, key_of(space.problem, space.device)) if self._target.is_real else []
        searching = search.Search(study, seeds, self._exhaustive, self._seed)
        backend = self._target.backend(workload, space)
        for_finals = min(FINALS_SHARE * seconds, FINALS_SECONDS)
        deadline = time.monotonic() + seconds - for_finals

        def is_late() -> bool:
            return time.monotonic() >= deadline or self._outcome(study) is not None

        def learned(progress: search.Progress) -> None:
            latest = progress.latest
            self._record.add(study.name, workload, space, "search", latest)
            if self._report is not None:
                best = 1.0 if progress.best is None else min(progress.best.ratio, 1.0)
                left = deadline - time.monotonic()
                event = Event(
                    self._index, workload, progress.evaluations, progress.limit, best, shown(space, latest), left
                )
                self._report(event)

        try:
            search.run(searching, backend, is_late, learned)
            while not is_late() and study.others_work():
                time.sleep(WAIT_SECONDS)
                search.run(searching, backend, is_late, learned)  # what one that died was at
        except KeyboardInterrupt:
            self._interrupted = True
        except MeasureError as error:
            study.release()
            return Result(workload, "failed", evaluations=len(searching.known), note=str(error))
        backend.abandon()
        study.release()
        if (outcome := self._outcome(study)) is not None:
            return outcome
        if not study.owns_finals():
            return None
        try:
            searching.refresh()
            return self._finish(workload, searching, backend, for_finals)
        except MeasureError as error:
            return Result(workload, "failed", evaluations=len(searching.known), note=str(error))
        finally:
            study.release_finals()

    def _finish(self, workload: Workload, searching: search.Search, backend: Backend, seconds: float) -> Result:
        """Run the finals within about `seconds`, keep the winner and publish the outcome."""
        space, study = searching.space, searching.study
        if not searching.known:
            return Result(workload, "failed", note=INTERRUPTED if self._interrupted else TOO_LATE)
        decided = search.race(space, searching.ranked(), backend, seconds)
        if decided.error:
            note = f"no finalist could be timed: {decided.error}"
            return Result(workload, "failed", evaluations=len(searching.known), note=note)
        for point, ms in decided.milliseconds.items():
            self._record.add(study.name, workload, space, "finals", Measurement(point, "ok", 1.0, (ms,)))
        default, config = space.points[0], space.config(decided.point)
        times = {point: 1e3 * ms for point, ms in decided.milliseconds.items()}
        note = INTERRUPTED if self._interrupted else ""
        result = Result(
            workload,
            "default" if decided.point == default else "tuned",
            config,
            times.get(default, math.nan),
            times.get(decided.point, math.nan),
            len(searching.known),
            note,
        )
        is_complete = searching.is_over() and not self._interrupted
        is_beaten_by_none = len(times) == 1 and is_complete  # of a space of one point
        if (len(times) > 1 or is_beaten_by_none) and self._target.is_real:
            self._keep(searching, decided, result)
        study.publish({"run": self._run, "complete": is_complete, "result": result.as_json()})
        return result

    def _keep(self, searching: search.Search, decided: search.Winner, result: Result) -> None:
        """Put the winner where calls look for it, the default too: then it is known that nothing beats it."""
        space = searching.space
        fastest = sorted(decided.milliseconds.items(), key=lambda item: item[1])
        runner_ups = [
            {"config": config_as_json(space.config(point)), "time_us": 1e3 * ms}
            for point, ms in fastest
            if point != decided.point
        ]
        details = {
            "workload": result.workload.as_json(),
            "study": searching.study.name,
            "points": len(space.points),
            "tie_band": decided.band,
            "runner_ups": runner_ups[:RUNNER_UPS],
            "seed": self._seed,
        }
        timing = Timing(result.time_us, result.default_us, result.evaluations, record.now(), details)
        key = key_of(space.problem, space.device)
        config = space.config(decided.point)
        tuned.put(Winner(key, config, tuned.current_provenance(space.kernel), timing))

    def _outcome(self, study: Study) -> Result | None:
        """What is known to have come of a workload: completely in some run, or in this one."""
        outcome = study.outcome
        if outcome is None or not (outcome["complete"] or outcome["run"] == self._run):
            return None
        result = Result.from_json(outcome["result"])
        return result if outcome["run"] == self._run else result._replace(state="known", note="tuned before")

    def _study_name(self, workload: Workload, space: Space) -> str:
        """Changes with whatever makes old measurements void: kernels, NVRTC, driver, GPU, space."""
        made_with = tuned.current_provenance(space.kernel) if self._target.is_real else ("replay",)
        parts = [workload.as_json(), repr(space.device), list(made_with), space.fingerprint]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        return f"{record.slug(str(workload))}-{space.family}-{digest}"


def shown(space: Space, measurement: Measurement) -> str:
    """A candidate and what came of it, in a few words."""
    words = [f"{axis}={int(value)}" for axis, value in zip(space.axes, measurement.point, strict=True)]
    return f"{' '.join(words)}: {f'{measurement.ratio:.3f}' if measurement.status == 'ok' else measurement.status}"


def worker_name(run: str, index: int) -> str:
    """How the process `index` of a run signs its claims."""
    return f"{run}-{index}"


def seeds_for(space: Space, key: Key) -> list[Point]:
    """Where to begin: the winners of the most similar keys, of GPUs of the same compute capability."""
    lattice = search.Lattice(space)
    similar: list[tuple[tuple[float, ...], Point]] = []
    for found in tuned.winners():
        winner = found.winner
        if winner.kernel != space.kernel:
            continue
        if winner.key.device.compute_capability != space.device.compute_capability:
            continue
        point = tuple(getattr(winner.config, axis) for axis in space.axes)
        nearest = lattice.nearest(clamped(space, point), set())
        if nearest is not None:
            similar.append((distance(winner.key, key), nearest))
    return list(dict.fromkeys(point for _, point in sorted(similar)))[:MOST_SEEDS]


def clamped(space: Space, point: Point) -> Point:
    """`point` with each value replaced by the nearest one of its axis."""
    return tuple(
        value if value in values else min(values, key=lambda other: abs(other - value))
        for values, value in zip(space.axes.values(), point, strict=True)
    )


def distance(a: Key, b: Key) -> tuple[float, ...]:
    """How little two keys have in common: options first, then head dims, lengths, the GPU."""
    options = sum(
        getattr(a.spec, name) != getattr(b.spec, name) for name in ("left", "right", "softcap", "mask", "bias")
    )
    dims = abs(math.log2(a.spec.d / b.spec.d)) + abs(math.log2(a.spec.d_v / b.spec.d_v))
    lengths = abs(math.log2(a.bucket.n_q / b.bucket.n_q)) + abs(math.log2(a.bucket.n_k / b.bucket.n_k))
    others = (
        (a.spec.dtype != b.spec.dtype) + (a.bucket.waves != b.bucket.waves) + (a.bucket.grouped != b.bucket.grouped)
    )
    return options + dims, lengths + others, float(a.device != b.device)


BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
UNITS = {"s": 1, "m": 60, "h": 3600}


def read_budget(budget: str | float) -> float:
    """Seconds of ``"60s"``, ``"5m"``, ``"2h"`` or a number; infinite for ``"full"``.

    Examples
    --------
    >>> from cuflash.tuning.session import read_budget
    >>> read_budget("5m"), read_budget(90), read_budget("full")
    (300.0, 90.0, inf)
    """
    if budget == "full":
        return math.inf
    if isinstance(budget, str):
        if (match := BUDGET.fullmatch(budget)) is None:
            raise ValueError(f"budget must be such as 60s, 5m, 2h or full, got {budget!r}")
        seconds = float(match[1]) * UNITS[match[2]]
    else:
        seconds = float(budget)
    if not seconds > 0:
        raise ValueError(f"budget must be positive, got {budget!r}")
    return seconds
