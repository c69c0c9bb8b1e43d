"""A tuning run as a whole: on one GPU in this process, or on several with a process for each.

Run as a program, this module is such a process: it answers the request "tune" as `cuflash.tuning.worker` answers its
own, with a message for every event and every result.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import queue
import re
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuflash import tuned
from cuflash.device import device_info
from cuflash.tuning import record, worker
from cuflash.tuning.processes import Died, Machine, Worker
from cuflash.tuning.session import Event, GpuTarget, ReplayTarget, Result, Session, read_budget, worker_name
from cuflash.tuning.space import AXES
from cuflash.tuning.study import opened, release_everywhere
from cuflash.tuning.table import read_table
from cuflash.tuning.workload import Workload

SILENCE_SECONDS = 900.0  # after which a process is taken for dead
COMMAND = (sys.executable, "-m", "cuflash.tuning.campaign")
RESTARTS = 2  # of a process that died
ENDING_SHARE, ENDING_SECONDS = 0.05, 5.0  # of a budget, and at most: the last batch of candidates, ending processes

Report = Callable[[Event], None]


class TuningError(RuntimeError):
    """A run that cannot begin, or lost all its processes."""


class Plan(NamedTuple):
    """What a run is to do; as JSON, what its processes are told.

    Attributes
    ----------
    workloads : sequence of Workload
    seconds : float
    devices : sequence of int
        CUDA's numbers of the GPUs.
    storage : str or None
        The URL of a storage; None is the journal beside the tuned configurations.
    compilers : int
        How many candidates each process compiles at a time.
    seed : int
    replay : sequence of str
        Files of recorded sweeps to tune in place of GPUs.
    pace : float
        Seconds that a batch of a replay takes.
    shared : bool
        Whether several processes use the storage.
    run : str
        Its name.
    folder : str or None
        Where its processes keep the binaries of candidates.
    """

    workloads: Sequence[Workload]
    seconds: float = math.inf
    devices: Sequence[int] = (0,)
    storage: str | None = None
    compilers: int = 1
    seed: int = 0
    replay: Sequence[str] = ()
    pace: float = 0.0
    shared: bool = False
    run: str = ""
    folder: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON knows it."""
        seconds = None if math.isinf(self.seconds) else self.seconds
        lists = {"devices": list(self.devices), "replay": list(self.replay)}
        return {**self._asdict(), **lists, "seconds": seconds, "workloads": [w.as_json() for w in self.workloads]}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        """What `as_json` made this of."""
        seconds = math.inf if document["seconds"] is None else document["seconds"]
        workloads = [Workload.from_json(fields) for fields in document["workloads"]]
        return Plan(**{**document, "seconds": seconds, "workloads": workloads})


def tune(
    workloads: Sequence[Workload],
    *,
    budget: str | float = "5m",
    devices: Sequence[int] = (0,),
    storage: str | None = None,
    compilers: int | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> list[Result]:
    """Find the fastest configurations of `workloads` and keep them on disk, where later calls find them.

    Parameters
    ----------
    workloads : sequence of Workload
        Such as `cuflash.tuning.preset` makes.
    budget : str or float
        The time for all of them: seconds, or such as ``"60s"``, ``"5m"``; ``"full"`` measures every legal point.
    devices : sequence of int
        CUDA's numbers of the GPUs, which share one study. They must be of one model.
    storage : str, optional
        ``postgresql://``, ``mysql://`` or ``journal:///path``: studies that several machines share. By default a
        journal in the user's data directory.
    compilers : int, optional
        How many candidates are compiled at a time, by default one for each processor but one.
    seed : int
    report : callable, optional
        Called with an `Event` after every measurement.

    Returns
    -------
    list of Result
        In the order of `workloads`. After Ctrl-C, those that were reached.

    Raises
    ------
    ValueError
        When an argument cannot be used.
    TuningError
        When no GPU can be tuned.

    Examples
    --------
    >>> from cuflash.tuning import preset, tune
    >>> results = tune(preset("llm"), budget="5m")  # doctest: +SKIP
    """
    if not devices:
        raise ValueError("devices must name a GPU")
    each = compilers_of_each(compilers, len(devices))
    plan = Plan(workloads, read_budget(budget), tuple(devices), storage, each, seed)
    found = {result.workload: result for result in carry_out(plan, report)}
    return [found[workload] for workload in workloads if workload in found]


def available_processors() -> int:
    """How many processors this process may use, a container's quota counted."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return int(min(len(os.sched_getaffinity(0)), max(processor_quota(), 1.0)))


def processor_quota(control_groups: Path = Path("/sys/fs/cgroup")) -> float:
    """How many processors' time a container may use; infinite where there is no limit, or none that can be read."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 2, of the container's own group
        quota, period = (control_groups / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else math.inf
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((control_groups / "cpu" / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf


def compilers_of_each(compilers: int | None, devices: int) -> int:
    """How many candidates each process compiles at a time: unless told, a processor is left to the one with the GPU."""
    return max(1, (compilers or available_processors()) // devices - (compilers is None))


def carry_out(plan: Plan, report: Report | None = None) -> Iterator[Result]:
    """Tune, and yield what came of each workload as soon as it is known."""
    if not plan.workloads:
        return
    began = time.monotonic()
    shared = plan.storage is not None or len(plan.devices) > 1
    plan = plan._replace(run=uuid.uuid4().hex[:12], shared=shared, workloads=list(dict.fromkeys(plan.workloads)))
    with tempfile.TemporaryDirectory(prefix="cuflash-tune-") as folder:
        plan = plan._replace(folder=folder)
        if plan.storage is None and not plan.replay:
            plan = plan._replace(storage=record.own_journal(*_where_measured(plan.devices)))
        to_the_end = min(ENDING_SHARE * plan.seconds, ENDING_SECONDS) if math.isfinite(plan.seconds) else 0.0
        plan = plan._replace(seconds=plan.seconds - to_the_end - (time.monotonic() - began))
        if len(plan.devices) == 1:
            yield from run_on(plan, 0, report)
            return
        if plan.storage is None:
            plan = plan._replace(storage=f"journal://{folder}/studies.journal")
        yield from _run_on_several(plan, report)


def _where_measured(devices: Sequence[int]) -> tuple[str, str]:
    """The name of the GPU, and a digest of everything that makes old measurements void when it changes."""
    try:
        gpus = [device_info(device) for device in devices]
    except (ImportError, RuntimeError) as error:
        raise TuningError(f"no GPU can be tuned: {error}") from error
    if any(gpu != gpus[0] for gpu in gpus):
        names = " and ".join(sorted({gpu.name for gpu in gpus}))
        raise ValueError(f"GPUs that share a study must be of one model, got {names}")
    made_with = [tuned.current_provenance(kernel) for kernel in AXES]
    return gpus[0].name, hashlib.sha256(repr((gpus[0], made_with)).encode()).hexdigest()[:8]


def run_on(plan: Plan, index: int, report: Report | None) -> Iterator[Result]:
    """The part of the process `index` of a run."""
    began = time.monotonic()
    with opened(plan.storage) as storage:
        options: dict[str, Any] = {
            "storage": storage,
            "run": plan.run,
            "index": index,
            "processes": len(plan.devices),
            "shared": plan.shared,
            "seed": plan.seed + index,
            "exhaustive": math.isinf(plan.seconds),
            "report": report,
        }
        if plan.replay:
            tables = [read_table(Path(path)) for path in plan.replay]
            replay = Session(ReplayTarget(tables, plan.seed + index, plan.pace), **options)
            yield from replay.run(plan.workloads, plan.seconds)
            return
        gpu = plan.devices[index]
        with only_tuner_of(gpu), Machine(gpu, plan.compilers, plan.folder) as machine:
            try:
                session = Session(GpuTarget(machine), directory=record.folder(), **options)
            except Died as error:
                raise TuningError(f"GPU {gpu} cannot be used: {error}") from error
            yield from session.run(plan.workloads, plan.seconds - (time.monotonic() - began))


@contextlib.contextmanager
def only_tuner_of(gpu: int) -> Iterator[None]:
    """Keep a second tuner of this user from the GPU, whose times would be void.

    Raises
    ------
    TuningError
        When there is one.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path = Path(
        tempfile.gettempdir(),
        f"cuflash-{os.geteuid()}-gpu-{name_of(gpu, os.environ.get('CUDA_VISIBLE_DEVICES', ''))}.lock",
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TuningError(f"GPU {gpu} is being tuned by another process") from None
        yield
    finally:
        os.close(descriptor)


def name_of(gpu: int, visible_devices: str) -> str:
    """How the GPU that CUDA numbers `gpu` is named where CUDA_VISIBLE_DEVICES says which a process sees.

    That is a number or a UUID. Two processes that name one GPU in both ways do not know of each other.

    Examples
    --------
    >>> from cuflash.tuning.campaign import name_of
    >>> name_of(1, "3,5"), name_of(1, "")
    ('5', '1')
    """
    visible = [name.strip() for name in visible_devices.split(",")]
    name = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
    return re.sub(r"[^\w-]", "_", name)


# ---- several processes ----


def _run_on_several(plan: Plan, report: Report | None) -> Iterator[Result]:
    """Start a process for each device, pass on what they say, and start again those that die."""
    processes = [Worker({}, command=COMMAND) for _ in plan.devices]
    messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    interrupted = threading.Event()
    for index, process in enumerate(processes):
        arguments = (plan, index, process, messages, interrupted)
        threading.Thread(target=_follow, args=arguments, daemon=True).start()
    found: set[Workload] = set()
    faults: dict[int, str] = {}
    running = len(processes)
    try:
        while running:
            message: dict[str, Any] | None = {}
            try:
                index, message = messages.get()
                if message and "event" in message and report is not None:
                    report(Event.from_json(message["event"]))
            except KeyboardInterrupt:  # whatever was going on; a message that has come is not lost
                if interrupted.is_set():
                    raise
                interrupted.set()
                for process in processes:
                    process.interrupt()
            if message is None:
                running -= 1
            elif "fatal" in message:
                faults[index] = message["fatal"]
            elif "result" in message and (result := Result.from_json(message["result"])).workload not in found:
                found.add(result.workload)
                yield result
    finally:
        for process in processes:
            process.close()
    if len(faults) == len(processes):
        raise TuningError("; ".join(f"GPU {plan.devices[index]}: {fault}" for index, fault in faults.items()))


def _follow(
    plan: Plan,
    index: int,
    process: Worker,
    messages: queue.Queue[tuple[int, dict[str, Any] | None]],
    interrupted: threading.Event,
) -> None:
    """Pass on what one process says, and None at its end; one that dies gives up its claims and is started again."""
    deadline = time.monotonic() + plan.seconds
    try:
        for attempt in range(1 + RESTARTS):
            left = deadline - time.monotonic()
            request = {"do": "tune", "index": index, "plan": plan._replace(seconds=left).as_json()}
            try:
                for message in process.ask(request, SILENCE_SECONDS):
                    messages.put((index, message))
                return
            except Died as death:
                if plan.storage is not None:
                    with opened(plan.storage) as storage:
                        release_everywhere(storage, worker_name(plan.run, index))
                if interrupted.is_set():
                    return
                if attempt == RESTARTS or left <= 0:
                    messages.put((index, {"fatal": str(death)}))
                    return
    except Exception as error:  # of the storage, say: the run must learn of it
        messages.put((index, {"fatal": f"{type(error).__name__}: {error}"}))
    finally:
        messages.put((index, None))


def answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Do the part of one process of a run."""
    plan = Plan.from_json(request["plan"])
    for result in run_on(plan, request["index"], lambda event: worker.emit({"event": event.as_json()})):
        yield {"result": result.as_json()}
    yield {"done": {}}


if __name__ == "__main__":
    worker.main({"tune": answer})
