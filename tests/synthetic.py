"""A made-up sweep with the shape of a real one: interacting axes, a cliff where registers run out, failures, noise."""

import hashlib
import math
import random

from cuflash.device import known_device
from cuflash.tuning.measure import Measurement, as_anchor
from cuflash.tuning.space import Space
from cuflash.tuning.table import Table
from cuflash.tuning.workload import Workload

CAUSAL = "bottom-right"
WORKLOADS = {
    "wgmma-128-causal": (Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), CAUSAL), None),
    "wgmma-64-full": (Workload("bfloat16", 4, (32, 32), (4096, 4096), (64, 64)), None),
    "mma-128-causal": (Workload("bfloat16", 2, (16, 16), (4096, 4096), (128, 128), CAUSAL), "mma"),
    "simt-64-full": (Workload("float32", 1, (16, 16), (2048, 2048), (64, 64)), "simt"),
    "mma-256-full": (Workload("bfloat16", 2, (8, 8), (4096, 4096), (256, 256)), "mma"),
}


def synthetic_table(name, workload, family, noise=0.005):
    space = Space.legal(workload.problem(), known_device("sm_90"), family)
    rng = random.Random(name)
    effects = {axis: [rng.gauss(0, 0.06) for _ in values] for axis, values in space.axes.items()}
    pairs = [tuple(rng.sample(list(space.axes), 2)) for _ in range(3)]
    costs = {point: made_up_milliseconds(space, point, effects, pairs, name) for point in space.points}
    anchor = costs[space.points[0]]
    measurements = []
    for point, cost in costs.items():
        draw = random.Random(repr((name, point)))
        if draw.random() < 0.03 and point != space.points[0]:
            measurements.append(Measurement(point, "launch", compile_seconds=2.0, error="too many resources"))
            continue
        times, anchors = ([t * draw.gauss(1, noise) for _ in range(5)] for t in (cost, anchor))
        ratio = sorted(times)[2] / sorted(anchors)[2]
        measurements.append(Measurement(point, "ok", ratio, times, anchors, 168, 0, 2.0))
    return Table(workload, space, (as_anchor(measurements[0]), *measurements[1:]))


def made_up_milliseconds(space, point, effects, pairs, name):
    config, spec = space.config(point), space.problem.spec
    position = {axis: values.index(value) for (axis, values), value in zip(space.axes.items(), point, strict=True)}
    log = sum(effects[axis][i] for axis, i in position.items())
    for a, b in pairs:
        log += 0.08 * math.sin(3.0 * position[a] + 2.0 * position[b])
    log += 4 / config.b_c + 8 / config.b_r
    registers = config.registers(spec)
    log += 1.2 * max(0.0, registers / 170 - 1)
    log += 0.15 * max(0, 2 - space.device.shared_bytes // config.shared_bytes(spec))
    rough = int(hashlib.sha256(repr((name, point)).encode()).hexdigest()[:8], 16) / 2**32 - 0.5
    return math.exp(log + 0.06 * rough)


def small_table(backward=False):
    """An exhaustive table of few points."""
    workload = Workload("float32", 1, (2, 2), (512, 512), (256, 256), backward=backward)
    return synthetic_table("small", workload, "simt")
