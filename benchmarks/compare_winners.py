"""How well two independent tuning runs agree: what each found, timed in turn with the default.

CUFLASH_CACHE_DIR=$PWD/a cuflash tune --preset llm && CUFLASH_CACHE_DIR=$PWD/a cuflash cache export a.json
CUFLASH_CACHE_DIR=$PWD/b cuflash tune --preset llm --seed 7 && CUFLASH_CACHE_DIR=$PWD/b cuflash cache export b.json
python benchmarks/compare_winners.py a.json b.json [--rounds 50] [--budget 120]

Bars: no winner slower than the default by more than 1 %, and the two within 1 % of each other on 95 % of the workloads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cuflash.store import read_collection
from cuflash.tuning.campaign import compilers_of_each
from cuflash.tuning.measure import GpuBackend
from cuflash.tuning.processes import Machine
from cuflash.tuning.space import Point, Space
from cuflash.tuning.workload import Workload
from cuflash.winner import Winner

BAND = 0.01
AGREEING = 0.95  # of the workloads


class Pair(NamedTuple):
    """What two runs found for one workload."""

    workload: Workload
    space: Space
    points: tuple[Point, Point]


def pairs_of(first: list[Winner], second: list[Winner], machine: Machine) -> list[Pair]:
    """The workloads that both runs have tuned."""
    device, others = machine.device(), {winner.key: winner for winner in second}
    found = []
    for winner in first:
        if winner.key not in others or winner.key.device != device:
            continue
        workload = Workload.from_json(winner.measurement.details["workload"])
        space = Space.legal(workload.problem(), device)
        points = space.point(winner.config), space.point(others[winner.key].config)
        if None in points:
            print(f"{workload}: a configuration that is no point of the space any more", flush=True)
            continue
        found.append(Pair(workload, space, points))
    return found


def milliseconds(pair: Pair, machine: Machine, rounds: int) -> tuple[float, float, float]:
    """Medians of the default and of both winners, timed in turn."""
    measured = GpuBackend(machine, pair.workload, pair.space).finals(list(dict.fromkeys(pair.points)), rounds)
    ms = {one.point: statistics.median(one.times) for one in measured}
    a, b = pair.points
    return statistics.median(measured[0].anchor_times), ms[a], ms[b]


def main() -> int:
    """Print the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=2, type=Path)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=120, help="seconds after which no further workload is begun")
    options = parser.parse_args()
    began = time.monotonic()
    first, second = map(read_collection, options.files)
    apart, slower = [], []
    with Machine(0, compilers_of_each(None, 1)) as machine:
        pairs = pairs_of(first, second, machine)
        for workload, space, points in pairs:  # in the background
            for point in points:
                machine.compile(workload, space.config(point), space.device.architecture)
        for pair in pairs:
            if time.monotonic() - began > options.budget:
                print("out of budget before", pair.workload)
                break
            default, a, b = milliseconds(pair, machine, options.rounds)
            apart.append(max(a, b) / min(a, b) - 1)
            slower.append(max(a, b) / default - 1)
            same = "same" if len(set(pair.points)) == 1 else f"{100 * apart[-1]:.2f} % apart"
            gains = f"{default / a:.3f}x {default / b:.3f}x"
            print(f"{pair.workload!s:52} default {1e3 * default:9.1f} us  {gains}  {same}", flush=True)
    within = sum(gap <= BAND for gap in apart)
    print(f"within 1 %: {within} of {len(apart)}; slower than the default by more: {sum(x > BAND for x in slower)}")
    return 0 if apart and within >= AGREEING * len(apart) and max(slower) <= BAND else 1


if __name__ == "__main__":
    sys.exit(main())
