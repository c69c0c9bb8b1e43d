"""Measuring candidates on a GPU: compiled ahead of it, checked before they are timed, timed beside the default.

Clocks drift, so nothing is compared that was not timed in turn: every batch of candidates is timed in rounds together
with an anchor, the default configuration, and what counts is the ratio to it. A candidate that hangs, crashes or gives
wrong results is marked, and the run goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cuflash.backward_problem import BackwardProblem
from cuflash.tuning.processes import Compiled, Died, Machine, as_document
from cuflash.tuning.space import Point, Space, default_of, section_of

if TYPE_CHECKING:
    from cuflash.tuning.workload import Workload

BATCH = 16  # candidates that are timed in turn with one anchor
ROUNDS = 5
PLACES = 3  # of the arrays in memory, in which finals are run
GIVE_UP = 3.0  # times the anchor's time: a slower candidate is run once
SLOWEST_FLOPS = 2e12  # a kernel that is slower than this hangs,
HANG_SECONDS = 3.0  # if it takes as much longer
COMPILING_SECONDS = 1.0  # after which a search may look at the clock
SILENCE_SECONDS = 60.0  # beyond that: arrays are made, modules are loaded
INNOCENT_DEATHS = 3  # of the process, in a row, with no candidate to blame
ANCHOR = 0


class MeasureError(RuntimeError):
    """The GPU, or the default configuration on it, cannot be measured."""


class Measurement(NamedTuple):
    """What came of one candidate.

    Attributes
    ----------
    point : Point
    status : str
        ``"ok"``, or why it cannot be used: ``"compile"``, ``"launch"``, ``"wrong"``, ``"crash"`` or ``"hang"``.
    ratio : float
        Its time over that of the default, timed in turn with it; infinite unless it is ok.
    times, anchor_times : sequence of float
        Milliseconds of each run, and of the default's runs among them.
    registers, spill_bytes : int
        Of a thread.
    compile_seconds : float
    error : str
        What was wrong.
    """

    point: Point
    status: str
    ratio: float = float("inf")
    times: Sequence[float] = ()
    anchor_times: Sequence[float] = ()
    registers: int = 0
    spill_bytes: int = 0
    compile_seconds: float = 0.0
    error: str = ""


def as_anchor(default: Measurement) -> Measurement:
    """The default's own measurement: the anchor's, which is what everything is compared with."""
    return default._replace(ratio=1.0, times=default.anchor_times)


class Backend(Protocol):
    """What the search measures with: a GPU, or a recorded table."""

    @property
    def ahead(self) -> int:
        """How many candidates should be on their way, so that neither compilers nor GPU wait."""

    def submit(self, point: Point) -> None:
        """Set a candidate on its way."""

    def collect(self) -> list[Measurement]:
        """Wait a moment for what came of those on their way, and return it."""

    def finals(self, points: Sequence[Point], rounds: int) -> list[Measurement]:
        """Time `points` and the default in turn, at least `rounds` times each."""

    def abandon(self) -> None:
        """Forget those on their way."""

    def now(self) -> float:
        """Seconds on a clock."""


def at_worst(parts: Sequence[Measurement]) -> Measurement:
    """The least favourable of measurements in several places, as if the default took what it did in the first.

    One that could not be used makes the whole useless.
    """
    for part in parts:
        if part.status != "ok":
            return part
    worst = max(parts, key=lambda part: part.ratio)
    scale = statistics.median(parts[0].anchor_times) / statistics.median(worst.anchor_times)
    return worst._replace(
        times=[ms * scale for ms in worst.times], anchor_times=[ms * scale for ms in worst.anchor_times]
    )


class Attempt(NamedTuple):
    """A candidate on its way through the process that owns the GPU."""

    point: Point
    compiled: Compiled


class GpuBackend:
    """Measures the candidates for one workload on the GPU of a `Machine`."""

    def __init__(self, machine: Machine, workload: Workload, space: Space) -> None:
        self._machine = machine
        self._workload = workload
        self._space = space
        self._architecture = space.device.architecture
        self._compiling: dict[Point, Future[Compiled]] = {}
        self._waiting: list[Attempt] = []
        self._of_binary: dict[tuple[str, int], Measurement] = {}
        self._hang_seconds = HANG_SECONDS + workload.flops() / SLOWEST_FLOPS
        problem = space.problem  # gradients need O and LSE
        self._forward = default_of(problem.forward, space.device) if isinstance(problem, BackwardProblem) else None

    @property
    def ahead(self) -> int:
        """As many as can be compiled while a batch is measured."""
        return 2 * max(self._machine.compilers, BATCH)

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def submit(self, point: Point) -> None:
        """Start to compile a candidate."""
        self._prepare()
        self._compiling[point] = self._compile(point)

    def collect(self) -> list[Measurement]:
        """Measure those that have been compiled, once there are any."""
        if not self._waiting and self._compiling:
            wait(self._compiling.values(), COMPILING_SECONDS, FIRST_COMPLETED)
        found: list[Measurement] = []
        for point in [point for point, future in self._compiling.items() if future.done()]:
            attempt = Attempt(point, self._compiling.pop(point).result())
            if attempt.compiled.error:
                seconds, error = attempt.compiled.seconds, attempt.compiled.error
                found.append(Measurement(attempt.point, "compile", compile_seconds=seconds, error=error))
            else:
                self._waiting.append(attempt)
        # The same binary launched in the same way need not be timed again.
        batch: dict[tuple[str, int], Attempt] = {}
        twins: list[tuple[Attempt, tuple[str, int]]] = []
        while self._waiting and len(batch) < BATCH:
            attempt = self._waiting.pop(0)
            config = self._space.config(attempt.point)
            binary = attempt.compiled.cubin, section_of(self._space.problem, config, self._space.device)
            if binary in batch or binary in self._of_binary:
                twins.append((attempt, binary))
            else:
                batch[binary] = attempt
        if batch:
            measured = self._measure([attempt.point for attempt in batch.values()], ROUNDS, GIVE_UP)
            for (binary, attempt), measurement in zip(batch.items(), measured, strict=True):
                timed = measurement._replace(compile_seconds=attempt.compiled.seconds)
                self._of_binary[binary] = timed
                found.append(timed)
        found += [
            self._of_binary[binary]._replace(point=attempt.point, compile_seconds=attempt.compiled.seconds)
            for attempt, binary in twins
        ]
        return found

    def finals(self, points: Sequence[Point], rounds: int) -> list[Measurement]:
        """Time `points` and the default in turn, a part of the rounds with the arrays in each of several places.

        Each counts by the place that suits it least: where arrays lie in another process, nobody knows. A point that
        fails in one place is not run in the next.
        """
        for future in [
            self._machine.compile(self._workload, self._space.config(p), self._architecture) for p in points
        ]:
            future.result()
        parts: dict[Point, list[Measurement]] = {point: [] for point in points}
        for place in range(PLACES):
            usable = [point for point, own in parts.items() if all(part.status == "ok" for part in own)]
            for point, part in zip(usable, self._measure(usable, -(-rounds // PLACES), None, place), strict=True):
                parts[point].append(part)
        return [at_worst(parts[point]) for point in points]

    def abandon(self) -> None:
        """Forget those on their way, and do not compile those that no compiler has begun with."""
        self._machine.cancel(self._compiling.values())
        self._compiling.clear()
        self._waiting.clear()

    def _prepare(self) -> list[Future[Compiled]]:
        """Compile what every measurement needs: the default, and the forward pass of gradients."""
        needed = [self._compile(self._space.points[0])]
        if self._forward is not None:
            forward = self._workload._replace(backward=False)
            needed.append(self._machine.compile(forward, self._forward, self._architecture))
        return needed

    def _compile(self, point: Point) -> Future[Compiled]:
        return self._machine.compile(self._workload, self._space.config(point), self._architecture)

    def _measure(
        self, points: Sequence[Point], rounds: int, give_up: float | None, place: int = 0
    ) -> list[Measurement]:
        """Measure each of `points` or find out why that cannot be done, whatever happens to the process."""
        for future in self._prepare():
            future.result()
        found: dict[Point, Measurement] = {}
        innocent = 0
        while left := [point for point in points if point not in found]:
            trial = _Trial(left)
            try:
                for message in self._machine.gpu.ask(self._request(left, rounds, give_up, place), self._silence()):
                    trial.read(message)
            except Died as death:
                culprit = trial.blame(death)
                if culprit is None:
                    innocent += 1
                    if innocent == INNOCENT_DEATHS:
                        raise MeasureError(f"the process that owns the GPU ends again and again: {death}") from death
                    continue
                innocent = 0
                if culprit.point == ANCHOR_POINT:
                    raise MeasureError(f"the default configuration cannot be measured: {death}") from death
                found[culprit.point] = culprit
                continue
            if trial.anchor_error is not None:
                raise MeasureError(f"the default configuration cannot be measured: {trial.anchor_error}")
            found.update(trial.measured())
        default = self._space.points[0]
        if default in found:
            found[default] = as_anchor(found[default])
        return [found[point] for point in points]

    def _request(self, points: Sequence[Point], rounds: int, give_up: float | None, place: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "do": "measure",
            "workload": self._workload.as_json(),
            "anchor": as_document(self._space.default),
            "candidates": [as_document(self._space.config(point)) for point in points],
            "rounds": rounds,
            "hang_seconds": self._hang_seconds,
            "place": place,
        }
        if self._forward is not None:
            request["forward"] = as_document(self._forward)
        return request if give_up is None else {**request, "give_up": give_up}

    def _silence(self) -> float:
        return SILENCE_SECONDS + 2 * self._hang_seconds


ANCHOR_POINT: Point = ()  # stands for the default where a death is blamed on it


class _Trial:
    """What the messages that answer one request say of each candidate."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = [ANCHOR_POINT, *points]
        self._checked: dict[int, dict[str, Any]] = {}
        self._times: dict[int, list[float]] = {}
        self._at: int | None = None
        self._hung: int | None = None

    def read(self, message: dict[str, Any]) -> None:
        """Take one message in."""
        if "begin" in message:
            self._at = message["begin"]
        elif "checked" in message:
            self._checked[message["checked"]] = message
            self._at = message["checked"] if message["status"] == "crash" else None
        elif "hung" in message:
            self._hung = message["hung"]
        elif "done" in message:
            self._times = {int(number): times for number, times in message["done"].items()}

    @property
    def anchor_error(self) -> str | None:
        """Why there is nothing to compare with."""
        anchor = self._checked.get(ANCHOR, {"error": "it was not run"})
        return anchor.get("error")

    def blame(self, death: Died) -> Measurement | None:
        """The candidate that a death is blamed on, if one was being run."""
        number = self._at if self._hung is None else self._hung
        if number is None:
            return None
        status = "hang" if death.hung or self._hung is not None else "crash"
        return Measurement(self._points[number], status, error=str(death))

    def measured(self) -> dict[Point, Measurement]:
        """What came of each candidate, by point."""
        found = {}
        for number, checked in self._checked.items():
            if number == ANCHOR:
                continue
            point = self._points[number]
            if checked["status"] != "ok":
                found[point] = Measurement(point, checked["status"], error=checked["error"])
                continue
            times, anchor = self._times[number], self._times[ANCHOR]
            ratio = statistics.median(times) / statistics.median(anchor)
            usage = checked["registers"], checked["spill_bytes"]
            found[point] = Measurement(point, "ok", ratio, times, anchor, *usage)
        return found
