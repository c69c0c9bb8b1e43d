"""What `cuflash tune report` shows of a study."""

import math

import pytest
from synthetic import small_table

from cuflash.tuning import report
from cuflash.tuning.measure import Measurement
from cuflash.tuning.study import Study, open_storage

SPACE = small_table().space
B_R, B_C = (list(SPACE.axes).index(axis) for axis in ("b_r", "b_c"))


def studied(folder, measurement_of):
    """A study of every point, as the report reads it."""
    url = f"journal://{folder}/s.journal"
    storage = open_storage(url)
    own = Study(SPACE, "all", storage)
    for point in SPACE.points:
        own.claim([point])
        own.finish(measurement_of(point))
    (found,) = report.read_studies(storage)
    return found


def usable(point, ratio):
    return Measurement(point, "ok", ratio, (ratio,), (1.0,))


def test_the_heat_map_has_the_least_time_of_each_tile(tmp_path):
    found = studied(tmp_path, lambda point: usable(point, 1 + 0.01 * point[B_R] + 0.001 * point[B_C]))
    axes, rows, columns, least = report.heat_map(found)
    assert axes == ("b_r", "b_c")
    assert rows == sorted({point[B_R] for point in SPACE.points})
    assert columns == sorted({point[B_C] for point in SPACE.points})
    there = {(point[B_R], point[B_C]) for point in SPACE.points}
    for row, line in zip(rows, least, strict=True):
        for column, ratio in zip(columns, line, strict=True):
            expected = 1 + 0.01 * row + 0.001 * column if (row, column) in there else math.nan
            assert ratio == pytest.approx(expected, nan_ok=True)


def test_the_axis_that_decides_is_the_most_important(tmp_path):
    found = studied(tmp_path, lambda point: usable(point, 1 + 0.1 * point[B_C]))
    assert max((shares := report.importances(found)), key=lambda axis: shares[axis]) == "b_c"


@pytest.mark.parametrize("status", ["ok", "crash"])
def test_a_picture_is_drawn_of_any_study(status, tmp_path):
    one = SPACE.points[0]
    found = studied(
        tmp_path, lambda point: usable(point, 1.0) if status == "ok" and point == one else Measurement(point, "crash")
    )
    assert report.save([found], tmp_path / "pictures") == [tmp_path / "pictures" / "all.png"]
    assert (tmp_path / "pictures" / "all.png").stat().st_size > 1000


def test_the_table_counts_what_cannot_be_used(tmp_path):
    found = studied(
        tmp_path, lambda point: usable(point, 0.9) if point == SPACE.points[3] else Measurement(point, "wrong")
    )
    table = report.describe([found])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells[:4] == ["all", str(len(SPACE.points)), str(len(SPACE.points) - 1), "0.900"]
