"""What the studies in a storage hold: a table, and for each study a picture of three panels.

The panels: the times in the order in which they were measured, and the best so far; how much each axis matters, by
Optuna's PED-ANOVA; and the least time over B_r and B_c, or what a family has in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from cuflash.tuning import record
from cuflash.tuning.study import MEASURED, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = ("b_r", "consumers")  # whichever a family has; a consumer is 64 rows
COLUMNS = ("b_c", "k_stages")
LABELS = {"b_r": "B_r", "b_c": "B_c", "consumers": "consumer warpgroups (64 rows each)", "k_stages": "tiles of K"}
SHOWN = 3.0  # times the best: slower ones are drawn at the edge


class Studied(NamedTuple):
    """A study and its trials, in the order of their numbers."""

    name: str
    study: optuna.Study
    trials: list[FrozenTrial]

    @property
    def usable(self) -> list[FrozenTrial]:
        """Those that have a time."""
        return [trial for trial in self.trials if trial.state == TrialState.COMPLETE and trial.value is not None]


def newest_journal() -> str | None:
    """The URL of the journal that was written last."""
    journals = sorted(record.folder().glob("*.journal"), key=lambda path: path.stat().st_mtime)
    return f"journal://{journals[-1]}" if journals else None


def read_studies(storage: BaseStorage) -> Iterator[Studied]:
    """The studies in a storage that hold measurements."""
    with quiet():
        for name in sorted(optuna.get_all_study_names(storage)):
            study = optuna.load_study(study_name=name, storage=storage)
            trials = [trial for trial in study.get_trials(deepcopy=False) if MEASURED in trial.user_attrs]
            if trials:
                yield Studied(name, study, trials)


def describe(studies: list[Studied]) -> Table:
    """For each study: what was measured, what could not be used, the best."""
    table = Table(box=None, pad_edge=False)
    for heading in ("study", "measured", "unusable", "best of the default", "at"):
        table.add_column(heading, justify="left" if heading in ("study", "at") else "right", overflow="fold")
    for studied in studies:
        usable = studied.usable
        best = min(usable, key=lambda trial: trial.value or math.inf, default=None)
        at = "-" if best is None else " ".join(f"{axis}={int(value)}" for axis, value in best.params.items())
        ratio = "-" if best is None else f"{best.value:.3f}"
        unusable = len(studied.trials) - len(usable)
        table.add_row(studied.name, str(len(studied.trials)), str(unusable), ratio, at)
    return table


def draw(studied: Studied, path: Path) -> None:
    """Write the picture of a study.

    Raises
    ------
    ImportError
        Where Matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    history, importance, heat = figure.subplots(1, 3)
    figure.suptitle(studied.name)
    _draw_history(history, studied)
    _draw_importance(importance, studied)
    _draw_heat_map(heat, studied)
    figure.savefig(path)


def _draw_history(axes: Axes, studied: Studied) -> None:
    ratios = [math.inf if trial.value is None else trial.value for trial in studied.trials]
    best = [min(ratios[: i + 1]) for i in range(len(ratios))]
    edge = SHOWN * min(ratios) if math.isfinite(min(ratios)) else SHOWN
    numbers = range(1, len(ratios) + 1)
    ok = [(i, min(ratio, edge)) for i, ratio in zip(numbers, ratios, strict=True) if math.isfinite(ratio)]
    bad = [(i, edge) for i, ratio in zip(numbers, ratios, strict=True) if not math.isfinite(ratio)]
    for points, mark, color, label in ((ok, ".", "tab:gray", "measured"), (bad, "x", "tab:red", "unusable")):
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=color, label=label)
    axes.plot(numbers, [min(ratio, edge) for ratio in best], color="tab:blue", label="best so far")
    axes.set(xlabel="evaluations", ylabel="time / default's time", title="history")
    axes.legend()


def importances(studied: Studied) -> dict[str, float]:
    """How much of the spread of times each axis accounts for; nothing where there is too little to tell."""
    varied = [axis for axis in studied.trials[0].params if len({trial.params[axis] for trial in studied.usable}) > 1]
    if not varied:
        return {}
    with quiet():
        found = optuna.importance.get_param_importances(studied.study, params=varied)
    return dict(found)


def _draw_importance(axes: Axes, studied: Studied) -> None:
    found = sorted(importances(studied).items(), key=lambda item: item[1])
    axes.barh([axis for axis, _ in found], [share for _, share in found], color="tab:blue")
    axes.set(xlabel="share (PED-ANOVA)", title="importance of each axis")


def heat_map(studied: Studied) -> tuple[tuple[str, str], list[Any], list[Any], list[list[float]]]:
    """The axes of rows and columns, their values, and the least ratio of each pair (NaN: none)."""
    params = studied.trials[0].params
    row_axis, column_axis = (next(axis for axis in axes if axis in params) for axes in (ROWS, COLUMNS))
    rows, columns = (sorted({trial.params[axis] for trial in studied.trials}) for axis in (row_axis, column_axis))
    least: dict[tuple[Any, Any], float] = {}
    for trial in studied.usable:
        cell = trial.params[row_axis], trial.params[column_axis]
        least[cell] = min(least.get(cell, math.inf), trial.value or math.inf)
    ratios = [[least.get((row, column), math.nan) for column in columns] for row in rows]
    return (row_axis, column_axis), rows, columns, ratios


def _draw_heat_map(axes: Axes, studied: Studied) -> None:
    (row_axis, column_axis), rows, columns, least = heat_map(studied)
    image = axes.imshow(least, cmap="viridis_r", aspect="auto", origin="lower")
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    for i, line in enumerate(least):
        for j, ratio in enumerate(line):
            if math.isfinite(ratio):
                axes.text(j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
    title = "least time / default's time"
    axes.set(xlabel=LABELS[column_axis], ylabel=LABELS[row_axis], title=title)
    axes.figure.colorbar(image, ax=axes)


def save(studies: list[Studied], folder: Path) -> list[Path]:
    """Write a picture of each study; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for studied in studies:
        path = folder / f"{record.slug(studied.name)}.png"
        draw(studied, path)
        written.append(path)
    return written
