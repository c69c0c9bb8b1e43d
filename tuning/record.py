"""The record of every measurement ever made: ``measurements.jsonl``, one JSON object a line, only ever appended to.

It outlives the studies: what a study has lost, or another version of Optuna cannot read, is restored from it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from cuflash import tuned
from cuflash.tuning.measure import Measurement
from cuflash.tuning.space import Space
from cuflash.tuning.workload import Workload

NAME = "measurements.jsonl"

_log = logging.getLogger("cuflash")


def folder() -> Path:
    """Where measurements and studies are kept: beside the tuned configurations."""
    return tuned.user_directory().parent / "measurements"


class Record:
    """The record in one folder; None keeps none."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / NAME

    def add(self, study: str, workload: Workload, space: Space, stage: str, measurement: Measurement) -> None:
        """Append a measurement of `stage` "search" or "finals". Where that cannot be done, it is said once."""
        if self._path is None:
            return
        facts = measurement._asdict()
        if measurement.status != "ok":
            del facts["ratio"]  # infinite, which JSON does not know
        line = {
            "study": study,
            "date": now(),
            "stage": stage,
            "workload": workload.as_json(),
            "device": space.device.name,
            "family": space.family,
            "axes": list(space.axes),
            **facts,
        }
        try:
            make_folder(self._path.parent)
            with self._path.open("ab") as file:  # one write, so that lines of several processes do not mix
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            _log.warning("measurements are not recorded: %s: %s", self._path, error.strerror)
            self._path = None

    def read(self, study: str) -> Iterator[Measurement]:
        """The measurements of a study's search; lines that are damaged are passed over."""
        for line in self._lines():
            try:
                facts = json.loads(line)
                if facts["study"] != study or facts["stage"] != "search":
                    continue
                values = {name: facts[name] for name in Measurement._fields if name in facts}
                yield Measurement(**{**values, "point": tuple(facts["point"])})
            except (ValueError, KeyError, TypeError):
                continue

    def _lines(self) -> Iterator[bytes]:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                yield from file
        except OSError:
            return


def now() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def slug(name: str) -> str:
    """A name as a part of a file's name.

    Examples
    --------
    >>> from cuflash.tuning.record import slug
    >>> slug("NVIDIA GeForce RTX 4090/D")
    'NVIDIA_GeForce_RTX_4090_D'
    """
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)


def make_folder(directory: Path) -> None:
    """Make `directory`, beside which compiled kernels may lie: what holds both is the user's alone."""
    tuned.make_private(directory.parent)
    directory.mkdir(exist_ok=True)


def own_journal(device: str, digest: str) -> str | None:
    """The URL of the journal in `folder`, or None where that cannot be written."""
    directory = folder()
    try:
        make_folder(directory)
        path = directory / f"{slug(device)}-{digest}.journal"
        with path.open("ab"):
            pass
    except OSError as error:
        _log.warning("the study is kept in memory only: %s: %s", directory, error.strerror)
        return None
    return f"journal://{os.fspath(path)}"
