"""The search: which point to measure next, when to stop, and which of the fastest wins.

Where all legal points fit the budget, all are measured. Otherwise points come from three sources: seeds (the default,
winners of similar workloads), Optuna's TPE sampler over categorical axes, and the neighbours of the fastest points so
far, which differ from them in one axis, those first that a model of all measurements expects most of. What the sampler
proposes may be known or illegal, and is then replaced by the nearest point that is neither.

Measured ratios are close to each other and noisy. So the fastest are timed again, in turn with the default and with
each other, and a fixed order decides between those within `TIE_BAND` of the best: the default first, then the least
shared memory, then the axes. Two runs thus find the same winner.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cuflash.tuning.measure import Backend, Measurement
from cuflash.tuning.model import Model
from cuflash.tuning.space import Point, Space
from cuflash.tuning.study import STARTUP_TRIALS, Study

EXHAUSTIVE = 256  # so many points are all measured
LEAST_EVALUATIONS, MOST_EVALUATIONS, SHARE = 50, 150, 0.1  # of a search: this share of the points, within these bounds
NEIGHBOURS, PROPOSALS = 12, 4  # taken in turn
INCUMBENTS = 8  # whose neighbours are considered
STAGNATION = 25  # evaluations without a gain of GAIN, after which a search ends
STAGNATION_SHARE = 0.15
GAIN = 0.005
TIE_BAND = 0.01
FINALISTS = 8
FINAL_ROUNDS, LEAST_FINAL_ROUNDS = 60, 9
FINAL_SECONDS = 10.0  # of all rounds, if more than LEAST_FINAL_ROUNDS


class Progress(NamedTuple):
    """How far a search has come.

    Attributes
    ----------
    evaluations, limit : int
        Measured so far, and at most.
    best : Measurement or None
        The fastest so far.
    latest : Measurement
    """

    evaluations: int
    limit: int
    best: Measurement | None
    latest: Measurement


class Winner(NamedTuple):
    """What the finals found: the winner, and everyone's time in milliseconds, the default's included.

    Where no finalist could be timed, the default stays for want of another, and `error` says what was wrong.
    """

    point: Point
    milliseconds: dict[Point, float]
    band: float
    error: str = ""


class Search:
    """Decides what to measure.

    Parameters
    ----------
    study : Study
    seeds : sequence of Point
        Measured first, after the default.
    exhaustive : bool
        Whether all points are to be measured, however many.
    seed : int
    """

    def __init__(self, study: Study, seeds: Sequence[Point] = (), exhaustive: bool = False, seed: int = 0) -> None:
        self.study = study
        self.space = study.space
        points = len(self.space.points)
        self.exhaustive = exhaustive or points <= EXHAUSTIVE
        self.limit = points if self.exhaustive else evaluation_limit(points)
        self._random = random.Random(seed)
        self._seeds = [self.space.points[0], *dict.fromkeys(seeds)]
        self._turn = 0
        self._lattice = Lattice(self.space)
        self._model = Model(self.space)
        self.known: dict[Point, Measurement] = {}
        self._taken: set[Point] = set()
        self._history: list[float] = []
        self.refresh()

    # ---- what is known ----

    def refresh(self) -> None:
        """Learn what other processes have measured or are measuring."""
        for known in self.study.known():
            if known.point not in self.known:
                self._learn(known)
        self._taken = self.study.taken() | self.known.keys()

    def tell(self, measurement: Measurement) -> None:
        """Take in what came of a point that `ask` gave out."""
        self.study.finish(measurement)
        if measurement.point not in self.known:
            self._learn(measurement)

    def _learn(self, measurement: Measurement) -> None:
        self.known[measurement.point] = measurement
        self._taken.add(measurement.point)
        self._history.append(min(measurement.ratio, self._history[-1] if self._history else float("inf")))

    def ranked(self) -> list[Measurement]:
        """Those that can be used, the fastest first."""
        usable = [measurement for measurement in self.known.values() if measurement.status == "ok"]
        return sorted(usable, key=lambda measurement: (measurement.ratio, self.space.cost(measurement.point)))

    def is_over(self) -> bool:
        """Whether nothing more is to be measured."""
        if len(self._taken) >= min(self.limit, len(self.space.points)):
            return True
        count = len(self.known)
        window = max(STAGNATION, int(STAGNATION_SHARE * count))
        if self.exhaustive or count < LEAST_EVALUATIONS or count <= window:
            return False
        gained = self._history[-1 - window] / self._history[-1] - 1
        best = next(iter(self.ranked()), None)
        return gained < GAIN and best is not None and not self._open_neighbours(best.point)

    # ---- what to measure ----

    def ask(self, count: int) -> list[Point]:
        """Up to `count` points for this process to measure; none when the search is over."""
        claimed: list[Point] = []
        while len(claimed) < count:
            self.refresh()
            chosen: list[Point] = []
            while len(claimed) + len(chosen) < count and not self.is_over() and (point := self._next()) is not None:
                self._taken.add(point)
                chosen.append(point)
            if not chosen:
                break
            claimed += self.study.claim(chosen)
        return claimed

    def _next(self) -> Point | None:
        while self._seeds:
            seed = self._seeds.pop(0)
            if seed in self.space.known and seed not in self._taken:
                return seed
        if len(self._taken) < STARTUP_TRIALS or not self.known:
            return self._draw()
        self._turn += 1
        if self._turn % (NEIGHBOURS + PROPOSALS) < NEIGHBOURS and (near := self._neighbours_of_the_fastest()):
            if len(self._taken) > MOST_EVALUATIONS:  # all are measured in the end, and the model would take its time
                return self._random.choice(near)
            pending = [point for point in self._taken if point not in self.known]
            scores = self._model.scores({point: known.ratio for point, known in self.known.items()}, pending)
            return min(near, key=lambda point: float(scores[self._model.index[point]]))
        for proposal in self.study.propose(1):
            return self._lattice.nearest(proposal, self._taken)
        return self._draw()

    def _neighbours_of_the_fastest(self) -> list[Point]:
        fastest = [measurement.point for measurement in self.ranked()[:INCUMBENTS]]
        return list(dict.fromkeys(near for point in fastest for near in self._open_neighbours(point)))

    def _open_neighbours(self, point: Point) -> list[Point]:
        return [near for near in self.space.neighbours(point) if near not in self._taken]

    def _draw(self) -> Point | None:
        left = [point for point in self.space.points if point not in self._taken]
        return self._random.choice(left) if left else None


class Lattice:
    """The legal points as positions on their axes, to find the nearest of them."""

    def __init__(self, space: Space) -> None:
        self._axes = list(space.axes.values())
        self._points = space.points
        self._positions = np.array([self._position(point) for point in space.points])

    def nearest(self, wanted: Point, taken: set[Point]) -> Point | None:
        """The point not in `taken` that differs from `wanted` in the fewest axes, and by the fewest steps."""
        steps = np.abs(self._positions - self._position(wanted))
        order = np.argsort((steps > 0).sum(axis=1) * 1000 + steps.sum(axis=1), kind="stable")
        return next((self._points[i] for i in order if self._points[i] not in taken), None)

    def _position(self, point: Point) -> list[int]:
        return [values.index(value) for values, value in zip(self._axes, point, strict=True)]


def evaluation_limit(points: int) -> int:
    """How many of so many points a search measures at most.

    Examples
    --------
    >>> from cuflash.tuning.search import evaluation_limit
    >>> [evaluation_limit(points) for points in (40, 300, 1000, 5000)]
    [40, 50, 100, 150]
    """
    return min(points, MOST_EVALUATIONS, max(LEAST_EVALUATIONS, int(SHARE * points)))


def run(
    search: Search,
    backend: Backend,
    is_late: Callable[[], bool] = lambda: False,
    report: Callable[[Progress], None] | None = None,
) -> None:
    """Measure until the search is over or `is_late`; what is on its way then, is left there."""
    on_their_way = 0
    while not is_late():
        if on_their_way < backend.ahead:
            points = search.ask(backend.ahead - on_their_way)
            for point in points:
                backend.submit(point)
            on_their_way += len(points)
        if not on_their_way:
            return
        for measurement in backend.collect():
            on_their_way -= 1
            search.tell(measurement)
            if report is not None:
                report(Progress(len(search.known), search.limit, next(iter(search.ranked()), None), measurement))


# ---- the finals ----


def finalists(space: Space, ranked: Sequence[Measurement]) -> list[Point]:
    """The points to race: half of them the fastest, half those that the fixed order prefers among the fastest."""
    tied = [measurement.point for measurement in ranked if measurement.ratio <= ranked[0].ratio * (1 + TIE_BAND)]
    preferred = sorted(tied, key=space.cost)[: FINALISTS // 2]
    points = [measurement.point for measurement in ranked]
    chosen = dict.fromkeys((*points[: FINALISTS // 2], *preferred, *points))
    default = space.points[0]
    return [point for point in chosen if point != default][:FINALISTS]


def race(space: Space, ranked: Sequence[Measurement], backend: Backend, seconds: float = FINAL_SECONDS) -> Winner:
    """Time the finalists and the default in turn, for about `seconds`, and name the winner.

    The default wins unless some finalist beats it by more than the tie band.
    """
    default = space.points[0]
    points = finalists(space, ranked)
    if not points:
        own = {m.point: statistics.median(m.times) for m in ranked if m.point == default and m.times}
        return Winner(default, own, TIE_BAND)
    slowest = sum(statistics.median(m.times) for m in ranked[:FINALISTS] if m.times) * (FINALISTS + 1) / FINALISTS
    rounds = max(LEAST_FINAL_ROUNDS, min(FINAL_ROUNDS, int(seconds * 1e3 / max(slowest, 1e-3))))
    times: dict[Point, list[float]] = {}
    error = ""
    for measurement in backend.finals(points, rounds):
        if measurement.status == "ok":
            times[measurement.point] = list(measurement.times)
            times[default] = list(measurement.anchor_times)
        else:
            error = f"{measurement.status}, {measurement.error}"
    return decide(space, times) if times else Winner(default, {}, TIE_BAND, error)


def decide(space: Space, times: dict[Point, list[float]]) -> Winner:
    """The winner of finals in which every point was timed as often."""
    medians = {point: statistics.median(taken) for point, taken in times.items()}
    best = min(medians, key=lambda point: medians[point])
    band = max(TIE_BAND, 2 * standard_error(times[best]) / medians[best])
    tied = [point for point, median in medians.items() if median <= medians[best] * (1 + band)]
    return Winner(min(tied, key=space.cost), medians, band)


def standard_error(times: Sequence[float]) -> float:
    """Of the median, from the median deviation: 1.2533 · 1.4826 · MAD / √n, as of a normal distribution."""
    middle = statistics.median(times)
    deviation = statistics.median(abs(time - middle) for time in times)
    return float(1.2533 * 1.4826 * deviation / len(times) ** 0.5)
