"""Record exhaustive tables: every legal configuration of a workload, checked and timed, for the tests of the search.

python benchmarks/record_sweep.py FOLDER [--budget 240] [--only wgmma-128] [--compilers N]

Writes one compressed JSON file for each table to FOLDER. A table for which the budget does not suffice is not written.
What did not compile, hung, crashed or was wrong is in the table as such. tests/data/sweeps holds the recorded ones.

After each table the search is run twice on the same workload, as `cuflash tune` would, and what it found is timed in
turn with the fastest points of the table and the default.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cuflash.tuning import search
from cuflash.tuning.measure import GpuBackend, Measurement
from cuflash.tuning.processes import Machine
from cuflash.tuning.space import Space
from cuflash.tuning.study import Study
from cuflash.tuning.table import write_table
from cuflash.tuning.workload import Workload


class Sweep(NamedTuple):
    """A table to record: its name, its workload, and a kernel family other than the default's."""

    name: str
    workload: Workload
    family: str | None = None


CAUSAL = "bottom-right"
FASTEST = 3  # of a table, that a search is compared with
COMPARISON_ROUNDS = 50
SWEEPS = [
    Sweep("wgmma-128-causal", Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), CAUSAL)),
    Sweep("mma-128-causal", Workload("bfloat16", 2, (16, 16), (4096, 4096), (128, 128), CAUSAL), "mma"),
    Sweep("simt-64-full", Workload("float32", 1, (16, 16), (2048, 2048), (64, 64)), "simt"),
    Sweep("wgmma-64-full", Workload("bfloat16", 4, (32, 32), (4096, 4096), (64, 64))),
    Sweep("mma-256-full", Workload("bfloat16", 2, (8, 8), (4096, 4096), (256, 256)), "mma"),
    Sweep("wgmma-256-causal", Workload("bfloat16", 4, (16, 8), (4096, 4096), (256, 256), CAUSAL)),
    Sweep("wgmma-128-full", Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128))),
    Sweep("mma-128-backward", Workload("bfloat16", 2, (16, 16), (4096, 4096), (128, 128), backward=True), "mma"),
    Sweep("wgmma-128-backward", Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), backward=True), "wgmma"),
    Sweep("wgmma-64-backward", Workload("bfloat16", 4, (32, 32), (4096, 4096), (64, 64), backward=True), "wgmma"),
]


def record(
    name: str, workload: Workload, space: Space, backend: GpuBackend, folder: Path, deadline: float
) -> list[Measurement] | None:
    """Measure every point of one table and write it; None where there is no time for that."""
    began = time.monotonic()
    found: list[Measurement] = []
    while len(found) < len(space.points):
        found += backend.collect()
        if time.monotonic() > deadline:
            print(f"{name}: only {len(found)} of {len(space.points)} in time, not written", flush=True)
            return None
    best = min(found, key=lambda measurement: measurement.ratio)
    fate = collections.Counter(measurement.status for measurement in found)
    within = [sum(m.ratio * share <= best.ratio for m in found) for share in (0.99, 0.98, 0.95, 0.9)]
    path = folder / f"{name}.json.gz"
    write_table(path, workload, space, found)
    compiling = sum(measurement.compile_seconds for measurement in found)
    print(
        f"{name}: {len(found)} points in {time.monotonic() - began:.0f} s (compiling {compiling:.0f} core s), "
        f"{dict(fate)}, best {best.ratio:.4f} of the default, {space.config(best.point)}; "
        f"within 1, 2, 5, 10 %: {within}; {path.stat().st_size // 1024} KiB",
        flush=True,
    )
    for status in fate.keys() - {"ok"}:
        example = next(measurement for measurement in found if measurement.status == status)
        print(f"  {status}: {space.config(example.point)}: {example.error[:300]}", flush=True)
    return found


def search_and_compare(name: str, machine: Machine, workload: Workload, space: Space, found: list[Measurement]) -> None:
    """Print how two independent searches compare with the default, with the table's best, and with each other."""
    picked = []
    evaluations = []
    for seed in (1, 2):
        searching = search.Search(Study(space, f"{name}-{seed}", seed=seed), seed=seed)
        backend = GpuBackend(machine, workload, space)
        search.run(searching, backend)
        picked.append(search.race(space, searching.ranked(), backend).point)
        evaluations.append(len(searching.known))
    usable = [measurement for measurement in found if measurement.status == "ok"]
    fastest = sorted(usable, key=lambda measurement: measurement.ratio)[:FASTEST]
    points = list(dict.fromkeys((*picked, *(measurement.point for measurement in fastest))))
    timed = GpuBackend(machine, workload, space).finals(points, COMPARISON_ROUNDS)
    ms = {measurement.point: statistics.median(measurement.times) for measurement in timed if measurement.times}
    default = statistics.median(timed[0].anchor_times)
    best = min(ms.values())
    print(
        f"  search of {evaluations} evaluations: {', '.join(f'{default / ms[point]:.4f}' for point in picked)} of the "
        f"default's speed, {', '.join(f'{best / ms[point]:.4f}' for point in picked)} of the table's best; "
        f"{default:.4f} ms by default, {best:.4f} at best",
        flush=True,
    )


def main() -> int:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, default=240, help="seconds for all tables")
    parser.add_argument("--only", default="", help="tables whose name contains this")
    parser.add_argument("--compilers", type=int, default=os.cpu_count(), help="candidates that are compiled at a time")
    options = parser.parse_args()
    began = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    with Machine(0, options.compilers) as machine:
        device = machine.device()
        print(f"{device} after {time.monotonic() - began:.0f} s", flush=True)
        jobs = []
        for name, workload, family in (sweep for sweep in SWEEPS if options.only in sweep.name):
            space = Space.legal(workload.problem(), device, family)
            backend = GpuBackend(machine, workload, space)
            for point in space.points:  # the compilers go on with the next table while this one is measured
                backend.submit(point)
            jobs.append((name, workload, space, backend))
        for name, workload, space, backend in jobs:
            found = record(name, workload, space, backend, options.folder, began + options.budget)
            if found is None:
                return 1
            search_and_compare(name, machine, workload, space, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
