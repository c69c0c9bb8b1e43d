"""Recorded sweeps: what came of every point of a space on some GPU, and a backend that measures by looking it up.

With it, a search can be watched and tested where there is no GPU: `cuflash tune --replay`, and the tests of the search.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from cuflash.device import DeviceInfo
from cuflash.tuning.measure import BATCH, ROUNDS, Measurement, as_anchor
from cuflash.tuning.space import Point, Space
from cuflash.tuning.workload import Workload
from cuflash.winner import config_as_json, config_from_json

FORMAT = "cuflash sweep 1"
DIGITS = 5  # of a time, significant
LARGEST_TABLE = 64 << 20  # bytes of text


class Table(NamedTuple):
    """An exhaustive sweep: the space and what came of each of its points, in order."""

    workload: Workload
    space: Space
    measurements: tuple[Measurement, ...]

    @property
    def ratios(self) -> Mapping[Point, float]:
        """Of each point, its time over the default's; infinite where it cannot be used."""
        return {measurement.point: measurement.ratio for measurement in self.measurements}


def write_table(path: Path, workload: Workload, space: Space, measurements: Sequence[Measurement]) -> None:
    """Write a sweep, compressed."""
    of_point = {measurement.point: measurement for measurement in measurements}
    rows = [of_point[point] for point in space.points]
    text = json.dumps(
        {
            "format": FORMAT,
            "workload": workload.as_json(),
            "device": asdict(space.device),
            "family": space.family,
            "default": config_as_json(space.default),
            "axes": space.axes,
            "points": space.points,
            "status": [row.status for row in rows],
            "times": [_rounded(row.times) for row in rows],
            "anchor_times": [_rounded(row.anchor_times) for row in rows],
            "registers": [row.registers for row in rows],
            "spill_bytes": [row.spill_bytes for row in rows],
            "compile_seconds": _rounded([row.compile_seconds for row in rows]),
            "errors": [row.error for row in rows],
        },
        separators=(",", ":"),
    )
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_table(path: Path) -> Table:
    """Read a sweep.

    Raises
    ------
    ValueError
        When the file holds none.
    """
    try:
        with gzip.open(path) as file:
            text = file.read(LARGEST_TABLE + 1)
        if len(text) > LARGEST_TABLE:
            raise ValueError("it is too large")
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        workload = Workload.from_json(document["workload"])
        device = document["device"]
        space = Space(
            workload.problem(),
            DeviceInfo(**{**device, "compute_capability": tuple(device["compute_capability"])}),
            config_from_json(workload.operation, document["family"], document["default"]),
            {name: tuple(values) for name, values in document["axes"].items()},
            map(tuple, document["points"]),
        )
        columns = ("status", "times", "anchor_times", "registers", "spill_bytes", "compile_seconds", "errors")
        rows = zip(space.points, *(document[name] for name in columns), strict=True)
        default, *others = (_measurement(*row) for row in rows)
        return Table(workload, space, (as_anchor(default), *others))
    except (OSError, EOFError, zlib.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: no sweep that can be read: {error}") from error


def _measurement(
    point: Point,
    status: str,
    times: Sequence[float],
    anchor_times: Sequence[float],
    registers: int,
    spill_bytes: int,
    compile_seconds: float,
    error: str,
) -> Measurement:
    ratio = statistics.median(times) / statistics.median(anchor_times) if status == "ok" else float("inf")
    return Measurement(point, status, ratio, times, anchor_times, registers, spill_bytes, compile_seconds, error)


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.{DIGITS}g}") for number in numbers]


class TableBackend:
    """Measures by looking up what was recorded, with the noise that was recorded, on a clock of its own.

    Parameters
    ----------
    table : Table
    seed : int, optional
        Draws the times of a measurement from the recorded ones; None gives their median, always.
    compilers : int
        How many candidates are compiled at a time.
    pace : float
        Seconds that each batch takes in truth.
    """

    def __init__(self, table: Table, seed: int | None = None, compilers: int = 16, pace: float = 0.0) -> None:
        self._of_point = {measurement.point: measurement for measurement in table.measurements}
        self._default = table.space.points[0]
        self._random = None if seed is None else random.Random(seed)
        self._compilers = compilers
        self._pace = pace
        self._queue: list[Point] = []
        self._seconds = 0.0
        self.measured: list[Point] = []

    @property
    def ahead(self) -> int:
        """As many as are compiled at a time."""
        return self._compilers

    def now(self) -> float:
        """What compiling and measuring took when they were recorded."""
        return self._seconds

    def submit(self, point: Point) -> None:
        """Queue a point."""
        self._queue.append(point)

    def collect(self) -> list[Measurement]:
        """What came of a batch."""
        time.sleep(self._pace)
        batch, self._queue = self._queue[: self._compilers], self._queue[self._compilers :]
        self._seconds += max((self._of_point[point].compile_seconds for point in batch), default=0.0)
        self.measured += batch
        return [self.draw(point, ROUNDS) for point in batch]

    def finals(self, points: Sequence[Point], rounds: int) -> list[Measurement]:
        """Times of `points` and of the default."""
        return [self.draw(point, rounds) for point in points]

    def abandon(self) -> None:
        """Forget the queue."""
        self._queue.clear()

    def draw(self, point: Point, rounds: int) -> Measurement:
        """A measurement of `point` of so many rounds."""
        recorded = self._of_point[point]
        if recorded.status != "ok":
            return recorded
        scale = statistics.median(self._of_point[self._default].times)
        own = [ms / statistics.median(recorded.anchor_times) * scale for ms in recorded.times]
        anchor = [ms / statistics.median(recorded.anchor_times) * scale for ms in recorded.anchor_times]
        if self._random is None:
            times, anchors = [statistics.median(own)] * rounds, [statistics.median(anchor)] * rounds
        else:
            times, anchors = self._random.choices(own, k=rounds), self._random.choices(anchor, k=rounds)
        self._seconds += (sum(times) + sum(anchors) / BATCH) / 1e3
        ratio = statistics.median(times) / statistics.median(anchors)
        return recorded._replace(ratio=ratio, times=times, anchor_times=anchors)
