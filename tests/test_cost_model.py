"""The cost model against recorded sweeps, and the defaults that it chooses."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cuflash import plan
from cuflash.config import HOPPER, MmaConfig
from cuflash.cost_model import cycles_per_score, resident_blocks
from cuflash.device import KNOWN_DEVICES, known_device
from cuflash.problem import DTYPES, Spec
from cuflash.tuning.table import read_table

SWEEPS = sorted((Path(__file__).parent / "data" / "sweeps").glob("mma-*.json.gz"))
AMPERE = known_device("sm_80")
HALF = Spec("float16", 128, 128)
TILES = MmaConfig(b_r=128, b_c=64, warps=4, swizzle=True)


@pytest.fixture(scope="module", params=SWEEPS, ids=lambda path: path.name.partition(".")[0])
def sweep(request):
    """Of every configuration of a sweep: the model's cycles, and its time over that of the fastest."""
    table = read_table(request.param)
    space, spec = table.space, table.space.problem.spec
    times = {space.config(m.point): m.ratio for m in table.measurements if m.status == "ok"}
    fastest = min(times.values())
    return {c: (cycles_per_score(c, spec, space.device), time / fastest) for c, time in times.items()}


def test_there_are_sweeps_to_check_against():
    assert len(SWEEPS) >= 2


def test_least_cycles_of_all_legal_points_are_within_a_tenth_of_the_fastest(sweep):
    _, slowdown = min(sweep.values())
    assert slowdown < 1.1


def test_one_of_the_five_least_is_the_fastest(sweep):
    assert min(slowdown for _, slowdown in sorted(sweep.values())[:5]) < 1.01


def test_a_tenth_is_what_the_model_is_wrong_by(sweep):
    """By which margin the planner trusts it: among configurations that take at most twice as long as the fastest."""
    near = [(cycles, slowdown) for cycles, slowdown in sweep.values() if slowdown < 2]
    scale = statistics.median(cycles / slowdown for cycles, slowdown in near)
    wrong = [cycles / slowdown / scale - 1 for cycles, slowdown in near]
    assert statistics.fmean(error**2 for error in wrong) ** 0.5 < 1.3 * (1 - plan.MODEL_IS_SURE)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (replace(TILES, swizzle=False), TILES),
        (replace(TILES, stages=1), TILES),
        (replace(TILES, b_c=16), TILES),
        (replace(TILES, warps=8), TILES),  # K and V are read twice as often
    ],
    ids=["padding", "one stage", "short tiles", "16 rows a warp"],
)
def test_model_knows_what_costs(slower, faster):
    costs = [cycles_per_score(config, HALF, known_device("sm_90")) for config in (slower, faster)]
    assert costs[0] > costs[1]


def test_swizzling_counts_only_where_rows_are_swizzled():
    costs = {cycles_per_score(replace(TILES, swizzle=on), Spec("float16", 80, 80), AMPERE) for on in (True, False)}
    assert len(costs) == 1


def test_shared_memory_limits_how_many_blocks_are_resident():
    limits = [resident_blocks(TILES, HALF, replace(AMPERE, shared_bytes=kib * 1024)) for kib in (99, 163, 227)]
    assert limits == [1, 1, 2]


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=KNOWN_DEVICES)
def test_default_is_legal_and_no_slower_than_the_table_by_the_model(device, monkeypatch):
    for dtype in DTYPES:
        for d in range(16, 257, 16):
            spec = Spec(dtype, d, d)
            if plan.why_not_mma(spec, device) is None:
                monkeypatch.setattr(plan, "MODEL_IS_SURE", 0.9)
                chosen = plan.mma_default(spec, device)
                monkeypatch.setattr(plan, "MODEL_IS_SURE", 0.0)  # never
                table = plan.mma_default(spec, device)
                assert chosen.why_illegal(spec, device) is None
                ratio = cycles_per_score(chosen, spec, device) / cycles_per_score(table, spec, device)
                assert (chosen == table) if device.compute_capability == HOPPER else (chosen == table or ratio < 0.9)


def test_where_little_shared_memory_leaves_two_warps_one_stage_leaves_four():
    chosen = plan.mma_default(Spec("float32", 256, 256), known_device("sm_86"))
    assert (chosen.warps, chosen.stages) == (4, 1)


CROWDED = MmaConfig(b_r=128, b_c=64, warps=4, stages=1, swizzle=True)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_crowded_tiles_are_defaults_where_two_blocks_are_resident(architecture):
    assert plan.mma_default(HALF, known_device(architecture)) == CROWDED


def test_crowded_tiles_are_no_defaults_where_shared_memory_holds_one_block():
    assert plan.mma_default(HALF, known_device("sm_86")) != CROWDED


def test_crowded_tiles_are_no_defaults_for_rows_that_are_not_aligned():
    assert plan.mma_default(replace(HALF, aligned=False), known_device("sm_90")) != CROWDED


@pytest.mark.parametrize(
    ("feature", "b_c"), [({"softcap": True}, 64), ({"bias": "float16"}, 32), ({"mask": True}, 32)], ids=str
)
def test_a_feature_leaves_registers_for_so_many_keys(feature, b_c):
    chosen = plan.mma_default(replace(HALF, **feature), known_device("sm_90"))
    assert chosen == MmaConfig(b_r=128, b_c=b_c, warps=4, stages=2, swizzle=True)


def test_model_prefers_no_crowded_tiles():
    chosen = plan.mma_default(Spec("float16", 80, 80, softcap=True), AMPERE)
    assert chosen.b_c == 32
