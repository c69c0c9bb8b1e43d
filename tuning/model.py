"""A Gaussian process over the legal points, by which the neighbours of the fastest points are put in order.

Its kernel is the mean of two: one for the sum of what each axis does on its own, one for points that are alike in every
axis. Along an axis, likeness falls off exponentially with the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.tuning.space import Point, Space

LENGTH = 0.5  # of an axis, over which likeness falls to 1/e
NOISE = 0.02  # variance of a measurement, in units of that of the points
OPTIMISM = 1.0  # standard deviations by which a point may be faster than expected
SLOWEST = 3.0  # times the default: slower ones, and those that cannot be used, count as such


class Model:
    """Expects of a point what is known of points like it."""

    def __init__(self, space: Space) -> None:
        axes = list(space.axes.values())
        self.index = {point: number for number, point in enumerate(space.points)}
        self._positions = np.array(
            [[values.index(value) for values, value in zip(axes, point, strict=True)] for point in space.points], float
        )
        self._spans = np.array([max(len(values) - 1, 1) for values in axes], float)
        self._likeness: dict[Point, NDArray[Any]] = {}

    def scores(self, ratios: Mapping[Point, float], pending: Collection[Point] = ()) -> NDArray[Any]:
        """How fast each point of the space may well be, as a logarithm of its ratio: the less the better.

        Mean and standard deviation are those of Rasmussen and Williams, Gaussian Processes, Algorithm 2.1.
        """
        slowest = max((ratio for ratio in ratios.values() if ratio < math.inf), default=SLOWEST)
        logs = np.log([min(ratio, slowest, SLOWEST) for ratio in ratios.values()])
        centre, scale = float(np.median(logs)), max(float(logs.std()), 1e-3)
        # What is believed of pending points leaves the mean as it is, and makes their surroundings more certain.
        known, all_ = list(ratios), [*ratios, *pending]
        weights = np.linalg.solve(self._among(known), (logs - centre) / scale)
        half = np.linalg.solve(np.linalg.cholesky(self._among(all_)), self._columns(all_).T)
        spread = np.sqrt(np.maximum(1 - (half**2).sum(axis=0), 0.0))
        scores: NDArray[Any] = centre + scale * (self._columns(known) @ weights - OPTIMISM * spread)
        return scores

    def _columns(self, points: Sequence[Point]) -> NDArray[Any]:
        """How much every point of the space is like each of `points`."""
        return np.stack([self._like(point) for point in points], axis=1)

    def _among(self, points: Sequence[Point]) -> NDArray[Any]:
        """How much `points` are like each other, with the noise of their measurement."""
        return self._columns(points)[[self.index[point] for point in points]] + NOISE * np.eye(len(points))

    def _like(self, point: Point) -> NDArray[Any]:
        """How much every point of the space is like `point`, from 0 to 1."""
        if point not in self._likeness:
            steps = np.abs(self._positions - self._positions[self.index[point]]) / self._spans
            along = np.exp(-steps / LENGTH)
            self._likeness[point] = (along.mean(axis=1) + along.prod(axis=1)) / 2
        return self._likeness[point]
