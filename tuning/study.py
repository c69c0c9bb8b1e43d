"""The Optuna study of one workload: every measurement is a trial, and a trial that runs is a claim.

Several processes may share a study, on one GPU each. Before a process measures a point it claims it: it adds a running
trial that has the point from the start, in one step, so that trials have one order for all. The first trial of a point
owns it; who finds another's in front gives way. A claim lapses when its trial is marked as failed, because the process
has died, or after `LEASE_SECONDS`.

What cannot be used, because it does not compile or gives wrong results, is a pruned trial that breaks a constraint, so
that the sampler keeps away from it. A failed trial is one that nothing is known of.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from cuflash.tuning.measure import Measurement
from cuflash.tuning.space import Point, Space

LEASE_SECONDS = 600.0
OPENINGS = 5  # of a database; others may be making its tables at the same time
LOCK_SECONDS = 8  # a lock that is so old was left by a process that died: an append takes milliseconds
STARTUP_TRIALS = 10  # before the sampler models anything
DATABASES = {"postgresql": "PostgreSQL", "mysql": "MySQL"}
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}  # of the extra "storage"
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
MEASURED, WORKER = "measurement", "worker"  # user attributes of a trial
OUTCOME = "outcome"  # user attribute of a study
UNUSABLE = "unusable"  # a constraint


class StorageError(ValueError):
    """A storage URL that is not allowed or cannot be opened; the message holds no password."""


def open_storage(url: str | None) -> BaseStorage:
    """The storage at `url`: PostgreSQL, MySQL or a journal file; None keeps studies in memory.

    Examples
    --------
    >>> from cuflash.tuning.study import open_storage
    >>> open_storage("sqlite:///tuning.db")
    Traceback (most recent call last):
        ...
    cuflash.tuning.study.StorageError: storage must be postgresql://, mysql:// or journal:///path, got sqlite://
    """
    if url is None:
        return InMemoryStorage()
    scheme = url.partition(":")[0]
    if scheme == "journal":
        path = str(journal_path(url))
        lock = JournalFileSymlinkLock if os.name == "posix" else JournalFileOpenLock
        return JournalStorage(JournalFileBackend(path, lock(path, grace_period=LOCK_SECONDS)))
    if scheme.partition("+")[0] not in DATABASES:
        raise StorageError(f"storage must be postgresql://, mysql:// or journal:///path, got {scheme[:20]}://")
    attempt = 0
    while True:
        attempt += 1
        try:
            return get_storage(DRIVERS.get(scheme, scheme) + url[len(scheme) :])
        except ImportError as error:
            driver = "psycopg[binary]" if scheme.startswith("postgresql") else "pymysql"
            raise StorageError(f"{shown(url)}: its driver is not installed: pip install '{driver}' ({error})") from None
        except Exception as error:  # of whichever driver; its text may hold the URL
            statement = getattr(error, "statement", None)  # None where there is no connection
            if statement is None or attempt == OPENINGS:
                raise StorageError(f"{shown(url)}: {type(error).__name__}: it cannot be opened") from None
        time.sleep(random.uniform(0.1, 0.5))


@contextlib.contextmanager
def opened(url: str | None) -> Iterator[BaseStorage]:
    """The storage at `url`, whose connections are closed in the end."""
    storage = open_storage(url)
    try:
        yield storage
    finally:
        database = getattr(storage, "_backend", None)  # behind Optuna's cache
        if isinstance(database, RDBStorage):
            database.engine.dispose()


def journal_path(url: str) -> Path:
    """The file of a ``journal:///path`` URL."""
    path = url.removeprefix("journal://")
    if not path.startswith("/"):
        raise StorageError(f"a journal is named journal:///path, got {url[:80]!r}")
    return Path(path)


def shown(url: str) -> str:
    """`url` without what is secret in it.

    Examples
    --------
    >>> from cuflash.tuning.study import shown
    >>> shown("postgresql+psycopg://tuner:secret@db.example/studies?sslkey=k")
    'postgresql+psycopg://db.example/studies'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Claim(NamedTuple):
    """A point that this process is to measure."""

    point: Point
    trial_id: int
    number: int


class Study:
    """The trials of one workload, for one of the processes that measure it.

    Parameters
    ----------
    space : Space
    name : str
        Names what is measured: two studies of one name are one.
    storage : BaseStorage, optional
    seed : int
        Of the sampler.
    worker : str, optional
        Names this process among those that share the storage; None if none do, and no claims are needed.
    """

    def __init__(
        self, space: Space, name: str, storage: BaseStorage | None = None, seed: int = 0, worker: str | None = None
    ) -> None:
        self.space = space
        self.name = name
        self.worker = worker
        self._distributions: dict[str, BaseDistribution] = {
            axis: CategoricalDistribution(values) for axis, values in space.axes.items()
        }
        self._storage = InMemoryStorage() if storage is None else storage
        with quiet():
            # Proposals that were made before are replaced by others near them: no need for a lie about running trials.
            self._sampler = TPESampler(constant_liar=False, n_startup_trials=STARTUP_TRIALS, seed=seed)
            self._study = optuna.create_study(
                study_name=name, storage=self._storage, sampler=self._sampler, load_if_exists=True
            )
        self._id = self._storage.get_study_id_from_name(name)
        self._claims: dict[Point, Claim | None] = {}  # None where no other process could have the point

    # ---- what is known ----

    def trials(self) -> list[FrozenTrial]:
        """Every trial that is not failed."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state != TrialState.FAIL and trial.params]

    def known(self) -> list[Measurement]:
        """What came of every point that was measured, by whichever process."""
        return [known for trial in self.trials() if (known := self._read(trial)) is not None]

    def taken(self) -> set[Point]:
        """Points that were measured or that some process, this one included, is measuring."""
        now = datetime.now()
        return {self._point(trial) for trial in self.trials() if not has_lapsed(trial, now)} | self._claims.keys()

    def others_work(self) -> bool:
        """Whether another process is measuring some point."""
        now = datetime.now()
        running = [trial for trial in self.trials() if trial.state == TrialState.RUNNING and not has_lapsed(trial, now)]
        return any(trial.user_attrs.get(WORKER) != self.worker for trial in running)

    def _point(self, trial: FrozenTrial) -> Point:
        return tuple(trial.params[axis] for axis in self.space.axes)

    def _read(self, trial: FrozenTrial) -> Measurement | None:
        if trial.state not in FINISHED or MEASURED not in trial.user_attrs:
            return None
        facts = json.loads(trial.user_attrs[MEASURED])
        return Measurement(
            point=self._point(trial),
            status=facts["status"],
            ratio=math.inf if trial.value is None else trial.value,
            times=[] if facts["milliseconds"] is None else [facts["milliseconds"]],
            registers=facts["registers"],
            spill_bytes=facts["spill_bytes"],
            error=facts["error"],
        )

    # ---- claims ----

    def claim(self, points: Iterable[Point]) -> list[Point]:
        """Those of `points` that no other process has; this one is to measure them."""
        if self.worker is None:
            points = list(points)
            self._claims.update(dict.fromkeys(points))
            return points
        asked = []
        for point in points:
            running = self._trial(point, state=TrialState.RUNNING, user_attrs={WORKER: self.worker})
            trial_id = self._storage.create_new_trial(self._id, template_trial=running)
            asked.append(Claim(point, trial_id, self._storage.get_trial_number_from_id(trial_id)))
        now = datetime.now()
        first: dict[Point, int] = {}
        for trial in self.trials():
            if not has_lapsed(trial, now):
                first.setdefault(self._point(trial), trial.number)
        ours = []
        for claim in asked:
            if first.get(claim.point, claim.number) == claim.number:
                self._claims[claim.point] = claim
                ours.append(claim.point)
            else:
                self._study.tell(claim.number, state=TrialState.FAIL)
        return ours

    def finish(self, measurement: Measurement) -> None:
        """Record what came of a claimed point, unless the claim has lapsed and another process has taken it over."""
        times = sorted(measurement.times)
        facts = {
            "status": measurement.status,
            "milliseconds": times[len(times) // 2] if times else None,
            "registers": measurement.registers,
            "spill_bytes": measurement.spill_bytes,
            "error": measurement.error[:200],
        }
        ok, text = measurement.status == "ok", json.dumps(facts)
        state = TrialState.COMPLETE if ok else TrialState.PRUNED
        claim = self._claims.pop(measurement.point)
        if claim is None:
            constraints = {} if ok else {UNUSABLE: 1.0}
            value = measurement.ratio if ok else None
            attributes = {MEASURED: text}
            self._study.add_trial(
                self._trial(measurement.point, state=state, value=value, user_attrs=attributes, constraints=constraints)
            )
            return
        if self._storage.get_trial(claim.trial_id).state.is_finished():
            return
        self._storage.set_trial_user_attr(claim.trial_id, MEASURED, text)
        if not ok:
            optuna.trial.Trial(self._study, claim.trial_id).set_constraint(UNUSABLE, 1.0)
        self._study.tell(claim.number, measurement.ratio if ok else None, state)

    def _trial(self, point: Point, **facts: Any) -> FrozenTrial:
        return create_trial(
            params=dict(zip(self.space.axes, point, strict=True)), distributions=self._distributions, **facts
        )

    def release(self) -> None:
        """Give up this process's claims."""
        self._claims.clear()
        if self.worker is not None:
            release(self._study, self.worker)

    def restore(self, known: Iterable[Measurement]) -> None:
        """Add what was measured before and the storage has lost."""
        taken = self.taken()
        for measurement in known:
            if measurement.point not in taken and measurement.point in self.space.known:
                taken.add(measurement.point)
                if self.claim([measurement.point]):
                    self.finish(measurement)

    # ---- the model ----

    def propose(self, count: int) -> list[Point]:
        """Points of the product of the axes that the sampler expects to be fast; they may be illegal or known."""
        blank = FrozenTrial(
            number=-1,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=None,
            datetime_complete=None,
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
            trial_id=-1,
        )
        searched = {axis: values for axis, values in self._distributions.items() if not values.single()}
        found = []
        for _ in range(count):
            drawn = self._sampler.sample_relative(self._study, blank, dict(searched)) if searched else {}
            if not drawn:
                break  # fewer trials than the model needs
            found.append(tuple(drawn.get(axis, values[0]) for axis, values in self.space.axes.items()))
        return found

    # ---- the outcome ----

    @property
    def outcome(self) -> dict[str, Any] | None:
        """What the finals found, if they were run."""
        found = self._study.user_attrs.get(OUTCOME)
        return None if found is None else json.loads(found)

    def publish(self, outcome: dict[str, Any]) -> None:
        """Let every process know what the finals found."""
        self._study.set_user_attr(OUTCOME, json.dumps(outcome))

    def owns_finals(self) -> bool:
        """Whether it is this process that runs the finals: the first to ask, of those that live."""
        if self.worker is None:
            return True
        lease, now = self._lease(), datetime.now()
        running = create_trial(state=TrialState.RUNNING, user_attrs={WORKER: self.worker})
        lease_id = self._storage.get_study_id_from_name(lease.study_name)
        trial_id = self._storage.create_new_trial(lease_id, template_trial=running)
        own = self._storage.get_trial_number_from_id(trial_id)
        trials = lease.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        owner = min(trial.number for trial in trials if trial.number == own or not has_lapsed(trial, now))
        if owner != own:
            lease.tell(own, state=TrialState.FAIL)
        return owner == own

    def release_finals(self) -> None:
        """Give the finals up, done or not."""
        if self.worker is not None:
            release(self._lease(), self.worker)

    def _lease(self) -> optuna.Study:
        """A study whose running trials ask for the finals of this one."""
        with quiet():
            return optuna.create_study(study_name=f"{self.name}-finals", storage=self._storage, load_if_exists=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from saying that it made a study."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def has_lapsed(trial: FrozenTrial, now: datetime) -> bool:
    """Whether a trial is a claim that is too old."""
    started = trial.datetime_start
    return (
        trial.state == TrialState.RUNNING and started is not None and now - started > timedelta(seconds=LEASE_SECONDS)
    )


def release_everywhere(storage: BaseStorage, worker: str) -> int:
    """Give up every claim of a process that has died."""
    with quiet():
        names = optuna.get_all_study_names(storage)
        return sum(release(optuna.load_study(study_name=name, storage=storage), worker) for name in names)


def release(study: optuna.Study, worker: str) -> int:
    """Mark what `worker` was measuring as failed."""
    held = [
        trial
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if trial.user_attrs.get(WORKER) == worker
    ]
    for trial in held:
        study.tell(trial.number, state=TrialState.FAIL)
    return len(held)
