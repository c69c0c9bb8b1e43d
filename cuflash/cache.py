"""What cuflash keeps on disk, compiled kernels and winners of tuning: shown, checked, shared and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from cuflash import cubins, tuned
from cuflash.machine import format_bytes
from cuflash.store import Store, describe_spec, read_collection, write_collection
from cuflash.winner import BACKWARD, GpuConfig, Winner

CLEARED = ("kernels", "tuned", "all")


class Imported(NamedTuple):
    """How many winners of a file were taken over, were no better than what was there, and are not legal here."""

    taken: int
    kept: int
    refused: int


def describe_kernels() -> str:
    """The compiled kernels in a line."""
    info = cubins.cache_info()
    unused = "" if info.why_unused is None else f"; not used: {info.why_unused}"
    return f"{info.directory}: {info.files} compiled kernels, {format_bytes(info.bytes)}{unused}"


def describe_winners() -> Table:
    """Every winner, as `cuflash cache list` prints it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("GPU", "call", "sizes", "configuration", "gain", "date", "from"):
        table.add_column(heading, no_wrap=True)
    for winner, source, stale in tuned.winners():
        key, measured = winner.key, winner.measurement
        state = source if stale is None else f"{source}, stale: {stale}"
        gain = f"{measured.gain:.2f}"
        call = describe_spec(key.spec).replace("-", " ") + (" backward" if key.operation == BACKWARD else "")
        day = measured.date.partition("T")[0]
        table.add_row(key.device.name, call, str(key.bucket), describe_config(winner.config), gain, day, state)
    return table


def describe_config(config: GpuConfig) -> str:
    """A family and those of its fields that are not at their defaults."""
    shown = {f.name: getattr(config, f.name) for f in fields(config)}
    usual = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    return " ".join([config.family, *(f"{name}={value}" for name, value in shown.items() if usual.get(name) != value)])


def export_winners(path: Path, device: str | None = None) -> int:
    """Write the user's winners, those of one GPU or all, into one file, and say how many there are.

    Raises
    ------
    OSError
        When it cannot be written.
    """
    own: dict[object, Winner] = {}
    for winner in (winner for store in tuned.own_stores() for winner in store.winners()):
        known = own.get(winner.key)
        if (device is None or winner.key.device.name == device) and (known is None or rank(winner) > rank(known)):
            own[winner.key] = winner
    write_collection(path, list(own.values()))
    return len(own)


def import_winners(path: Path, site: bool = False, overwrite: bool = False) -> Imported:
    """Keep the winners in a file that `export_winners` wrote: for this user, or with `site` for the whole machine.

    One that is there already stays, unless the new one was measured with what is here now and it was not, or else if
    the new one is newer; or with `overwrite`.

    Raises
    ------
    OSError
        When the file cannot be read, or nothing can be written.
    ValueError
        When it is damaged or of another version; then none of it is kept.
    """
    taken = kept = refused = 0
    for winner in read_collection(path):
        if winner.config.why_illegal(winner.key.spec, winner.key.device):
            refused += 1
            continue
        stores = [tuned.site_store()] if site else tuned.own_stores()
        known = [found for found in (store.read(winner.key) for store in stores) if found is not None]
        if not overwrite and any(rank(other) >= rank(winner) for other in known):
            kept += 1
        elif site:
            tuned.site_store().write(winner)
            taken += 1
        elif tuned.put(winner) is not None:
            taken += 1
        else:
            raise OSError(f"winners cannot be kept in {tuned.user_directory()}")
    return Imported(taken, kept, refused)


def rank(winner: Winner) -> tuple[bool, str]:
    """Which of two winners of a key is worth more: the larger one."""
    return tuned.why_stale(winner) is None, winner.measurement.date


def find_faults() -> Iterator[str]:
    """What is wrong with the files of winners and kernels, each in a line. Damaged ones are set aside or removed."""
    for store in (*tuned.own_stores(), tuned.site_store()):
        for path in store.paths():
            if fault := find_fault(store, path):
                yield f"{path}: {fault}"
    for path in cubins.remove_damaged():
        yield f"{path}: it was damaged or not the user's own, and is removed"


def find_fault(store: Store, path: Path) -> str | None:
    """Why the file of a winner is of no use; None where it is."""
    try:
        winner = store.load(path)
    except (OSError, ValueError) as error:
        return str(error)
    if store.path_of(winner.key) != path:
        return "it holds the winner of another key"
    reason = winner.config.why_illegal(winner.key.spec, winner.key.device)
    return reason and f"its configuration is not legal: {reason}"


def count_winners() -> Counter[str]:
    """How many winners there are by source, and how many of them are stale."""
    counts: Counter[str] = Counter()
    for found in tuned.winners():
        counts[found.source] += 1
        counts["stale"] += found.stale is not None
    return counts


def clear(what: str) -> tuple[int, int]:
    """Remove the user's compiled kernels, winners or both, and say how many of each there were."""
    if what not in CLEARED:
        raise ValueError(f"what must be one of {', '.join(CLEARED)}, got {what!r}")
    kernels = cubins.clear_cache() if what != "tuned" else 0
    winners = sum(store.clear() for store in tuned.own_stores()) if what != "kernels" else 0
    return kernels, winners
