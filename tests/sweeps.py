"""The sweeps recorded on GPUs, and what can be done with them where there is none."""

import random
from pathlib import Path

from cuflash.tuning.measure import Measurement
from cuflash.tuning.search import Search, run
from cuflash.tuning.study import Study
from cuflash.tuning.table import TableBackend, read_table

FOLDER = Path(__file__).parent / "data" / "sweeps"
COMPILERS = 16  # of the machine that is played: so many candidates are always under way
HELD_OUT = frozenset({"wgmma-64-full", "mma-256-full"})  # not looked at when the search's constants were chosen
FAULTS = {"compile": 0.25, "wrong": 0.05, "hang": 0.02}


def names():
    return sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


def load(name):
    return read_table(FOLDER / f"{name}.json.gz")


def search(table, seed, backend=None, exhaustive=False):
    """A search of `table` that is over, and its backend."""
    backend = backend or TableBackend(table, None, COMPILERS)
    searching = Search(Study(table.space, f"seed {seed}", seed=seed), exhaustive=exhaustive, seed=seed)
    run(searching, backend)
    return searching, backend


def quality(table, points, limit):
    """Of each of `limit` evaluations: the best so far as a fraction of the table's best."""
    ratios = table.ratios
    best, least, curve = min(ratios.values()), float("inf"), []
    for point in points[:limit]:
        least = min(least, ratios[point])
        curve.append(best / least)
    return curve + curve[-1:] * (limit - len(curve))


def at_random(table, seed, limit):
    """The points of a random search."""
    return random.Random(seed).sample(table.space.points, limit)


def percentile(values, share):
    """The value below which `share` of them lie, rounded down."""
    return sorted(values)[int(share * (len(values) - 1))]


def with_faults(table, seed, crashing=True):
    """`table` with some candidates that do not compile, are wrong or hang, and one that crashes: never the default."""
    draw = random.Random(seed)
    measurements = list(table.measurements)
    for i, measurement in enumerate(measurements[1:], 1):
        chance = draw.random()
        for status, share in FAULTS.items():
            if chance < share:
                measurements[i] = Measurement(measurement.point, status, error="made up", compile_seconds=1.0)
                break
            chance -= share
    if crashing:
        i = draw.randrange(1, len(measurements))
        measurements[i] = Measurement(measurements[i].point, "crash", error="made up")
    return table._replace(measurements=tuple(measurements))
