"""How good the search is, replayed on recorded sweeps; and its parts."""

import collections
import functools
import statistics

import numpy as np
import pytest
import sweeps
from synthetic import small_table

from cuflash.tuning import search as search_module
from cuflash.tuning.measure import ROUNDS, Measurement
from cuflash.tuning.search import FINALISTS, TIE_BAND, Lattice, Search, decide, evaluation_limit, finalists, race, run
from cuflash.tuning.study import Study
from cuflash.tuning.table import TableBackend

NAMES = sweeps.names()
SEEDS, COLD_SEEDS = range(30), range(10)
SMALL = small_table()
load = functools.cache(sweeps.load)


@functools.cache
def curves(name, cold):
    """For each seed: how good the best so far was, after each evaluation; `cold`, without the default to begin with."""
    table = load(name)
    limit = evaluation_limit(len(table.space.points))
    found = []
    for seed in COLD_SEEDS if cold else SEEDS:
        searching = bounded(table, seed)
        if cold:
            searching._seeds.clear()
        backend = TableBackend(table, None, sweeps.COMPILERS)
        run(searching, backend)
        found.append(sweeps.quality(table, backend.measured, limit))
    return found


def bounded(table, seed):
    """A search that stops at the limit, also where all points would be few enough."""
    searching = Search(Study(table.space, f"seed {seed}", seed=seed), seed=seed)
    searching.exhaustive, searching.limit = False, evaluation_limit(len(table.space.points))
    return searching


def test_there_are_sweeps_of_every_family():
    assert len(NAMES) >= 4
    assert {name.partition("-")[0] for name in NAMES} == {"simt", "mma", "wgmma"}
    assert any(len(load(name).space.points) > search_module.EXHAUSTIVE for name in NAMES)
    assert len(sweeps.HELD_OUT & set(NAMES)) == 2


@pytest.mark.parametrize("cold", [False, True], ids=["from the default", "from nowhere"])
@pytest.mark.parametrize("name", NAMES)
def test_the_search_comes_close_to_the_best(name, cold):
    ends = [curve[-1] for curve in curves(name, cold)]
    assert statistics.median(ends) >= 0.98
    assert sweeps.percentile(ends, 0.1) >= 0.92


@pytest.mark.parametrize("name", NAMES)
def test_the_search_beats_random_search_by_area(name):
    table = load(name)
    limit = evaluation_limit(len(table.space.points))
    searched = statistics.mean(statistics.mean(curve) for curve in curves(name, True))
    drawn = (sweeps.quality(table, sweeps.at_random(table, seed, limit), limit) for seed in COLD_SEEDS)
    assert searched > statistics.mean(statistics.mean(curve) for curve in drawn)


@pytest.mark.parametrize("name", NAMES)
def test_measuring_all_finds_the_best_by_the_fixed_order(name):
    table = load(name)
    searching, backend = sweeps.search(table, 0, exhaustive=True)
    assert sorted(backend.measured) == sorted(table.space.points)
    best = min(table.ratios.values())
    tied = [point for point, ratio in table.ratios.items() if ratio <= best * (1 + TIE_BAND)]
    assert race(table.space, searching.ranked(), backend).point == min(tied, key=table.space.cost)


@pytest.mark.parametrize("name", NAMES)
def test_with_noise_little_is_lost_and_the_winner_stays(name):
    table = load(name)
    ratios, best = table.ratios, min(table.ratios.values())
    winners = []
    for seed in range(20):
        backend = TableBackend(table, seed)
        measured = [backend.draw(point, ROUNDS) for point in table.space.points]
        ranked = sorted((m for m in measured if m.status == "ok"), key=lambda measurement: measurement.ratio)
        winners.append(race(table.space, ranked, backend).point)
    regrets = [ratios[winner] / best - 1 for winner in winners]
    assert statistics.mean(regrets) <= 0.01
    assert sweeps.percentile(regrets, 0.95) <= 0.02
    second = sorted(ratios.values())[1]
    if second > best * (1 + TIE_BAND):
        assert collections.Counter(winners).most_common(1)[0][1] >= 19


@pytest.mark.parametrize("name", NAMES)
def test_faults_cost_less_than_a_hundredth_and_are_never_chosen(name):
    table = load(name)
    lost = []
    for seed in range(4):
        faulty = sweeps.with_faults(table, seed)
        searching, backend = sweeps.search(faulty, seed, TableBackend(faulty, seed, sweeps.COMPILERS))
        winner = race(table.space, searching.ranked(), backend).point
        assert faulty.ratios[winner] < np.inf
        whole, plain = sweeps.search(table, seed, TableBackend(table, seed, sweeps.COMPILERS))
        reachable = min(faulty.ratios.values()) / min(table.ratios.values())
        without = table.ratios[race(table.space, whole.ranked(), plain).point]
        lost.append(table.ratios[winner] / (without * reachable) - 1)
    assert statistics.mean(lost) < 0.01


# ---- the parts ----


def test_no_point_is_measured_twice():
    _, backend = sweeps.search(SMALL, 0)
    assert len(set(backend.measured)) == len(backend.measured)


def test_the_same_seed_measures_the_same_points():
    assert sweeps.search(SMALL, 5)[1].measured == sweeps.search(SMALL, 5)[1].measured


def test_the_default_is_measured_first_then_the_seeds():
    seeds = [SMALL.space.points[7], SMALL.space.points[3], SMALL.space.points[7]]
    searching = Search(Study(SMALL.space, "s"), seeds)
    assert searching.ask(3) == [SMALL.space.points[0], SMALL.space.points[7], SMALL.space.points[3]]


def test_a_search_that_gains_nothing_more_stops(monkeypatch):
    monkeypatch.setattr(search_module, "EXHAUSTIVE", 0)
    monkeypatch.setattr(search_module, "LEAST_EVALUATIONS", 12)
    monkeypatch.setattr(search_module, "STAGNATION", 6)
    searching = Search(Study(SMALL.space, "s"))
    searching.limit = len(SMALL.space.points)
    best = SMALL.space.points[0]

    class Flat(TableBackend):
        def draw(self, point, rounds):
            return Measurement(point, "ok", 0.5 if point == best else 1.0, [1.0], [1.0])

    backend = Flat(SMALL, None, 2)
    run(searching, backend)
    assert len(SMALL.space.neighbours(best)) < len(backend.measured) < len(SMALL.space.points)


def test_a_late_search_leaves_what_is_under_way():
    searching, backend = Search(Study(SMALL.space, "s")), TableBackend(SMALL, None, 4)
    run(searching, backend, is_late=lambda: len(searching.known) >= 8)
    assert len(searching.known) == 8


def test_what_is_proposed_is_replaced_by_the_nearest_point_that_is_free():
    lattice, points = Lattice(SMALL.space), SMALL.space.points
    assert lattice.nearest(points[4], set()) == points[4]
    near = lattice.nearest(points[4], {points[4]})
    assert SMALL.space.distance(points[4], near) == min(
        SMALL.space.distance(points[4], p) for p in points if p != points[4]
    )
    assert lattice.nearest(points[4], set(points)) is None


def test_limits_are_those_of_the_bar():
    assert [evaluation_limit(n) for n in (10, 50, 300, 700, 1500, 9000)] == [10, 50, 50, 70, 150, 150]


def measurements_of(*ratios):
    return [Measurement(point, "ok", ratio) for point, ratio in zip(SMALL.space.points[1:], ratios, strict=False)]


def test_finalists_are_the_fastest_and_those_that_ties_prefer():
    measurements = measurements_of(*(0.8 + 0.0005 * i for i in range(15)), *(0.9,) * 10)
    chosen = finalists(SMALL.space, measurements)
    assert len(chosen) == FINALISTS
    assert {m.point for m in measurements[:4]} <= set(chosen)
    tied = [m.point for m in measurements if m.ratio <= 0.8 * (1 + TIE_BAND)]
    assert min(tied, key=SMALL.space.cost) in chosen
    assert SMALL.space.points[0] not in chosen


def times(median, n=9):
    return [median * (1 + 0.001 * (i - n // 2)) for i in range(n)]


def test_the_default_stays_unless_it_is_beaten_by_more_than_the_band():
    default, other = SMALL.space.points[:2]
    assert decide(SMALL.space, {default: times(1.0), other: times(0.995)}).point == default
    assert decide(SMALL.space, {default: times(1.0), other: times(0.98)}).point == other


def test_a_tie_goes_to_the_point_that_comes_first_in_the_fixed_order():
    points = sorted(SMALL.space.points[1:], key=SMALL.space.cost)
    found = {SMALL.space.points[0]: times(1.2), points[5]: times(1.0), points[2]: times(1.005), points[0]: times(1.05)}
    assert decide(SMALL.space, found).point == points[2]


def test_noise_widens_the_band():
    points = sorted(SMALL.space.points[1:], key=SMALL.space.cost)
    noisy = [1.0 + 0.1 * (i % 5 - 2) for i in range(9)]
    found = {SMALL.space.points[0]: times(2.0), points[1]: noisy, points[0]: times(1.04)}
    decided = decide(SMALL.space, found)
    assert decided.band > 0.04
    assert decided.point == points[0]


def test_when_every_finalist_fails_the_default_stays_and_it_is_said_why():
    class Failing(TableBackend):
        def finals(self, points, rounds):
            return [Measurement(point, "hang", error="no answer") for point in points]

    decided = race(SMALL.space, measurements_of(0.5, 0.6), Failing(SMALL))
    assert (decided.point, decided.error) == (SMALL.space.points[0], "hang, no answer")


def test_a_replay_takes_the_time_that_was_recorded():
    backend = TableBackend(SMALL, None, 4)
    for point in SMALL.space.points[:4]:
        backend.submit(point)
    backend.collect()
    assert backend.now() > 2.0
