"""Winners as files: one small file for each key in a directory, and collections of them in one file.

Any number of processes may read and write a directory at once, and any of them may be killed at any time: a file is
written under another name, flushed to disk and then renamed, so that under its own name it is always whole. A file that
is damaged all the same is set aside under a name that ends in ``.bad``.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from cuflash.problem import Spec
from cuflash.winner import SCHEMA, Damaged, Foreign, Key, Winner, canonical_json, key_as_json, winner_from_json

MOST_BYTES = 64 * 2**20  # of a file that is read at all
STALE_SECONDS = 3600.0  # a temporary file this old was left by a writer that was killed
SUFFIX, TEMPORARY_SUFFIX, BAD_SUFFIX = ".json", ".tmp", ".bad"

_log = logging.getLogger("cuflash")


class Store:
    """The winners in one directory, which need not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path_of(self, key: Key) -> Path:
        """Where the winner of `key` is kept."""
        device = f"{_slug(key.device.name)}.{key.device.architecture}"
        digest = hashlib.sha256(canonical_json(key_as_json(key)).encode()).hexdigest()[:12]
        name = f"{key.operation}-{describe_spec(key.spec)}-{key.bucket.n_q}x{key.bucket.n_k}.{digest}{SUFFIX}"
        return self.directory / f"v{SCHEMA}" / device / name

    def read(self, key: Key) -> Winner | None:
        """The winner of `key`, if there is one that can be read. A damaged file is set aside."""
        path = self.path_of(key)
        try:
            winner = self.load(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _warn_once(path if isinstance(error, ValueError) else self.directory, _reason(error))
            return None
        if winner.key != key:
            _warn_once(path, "it holds the winner of another key")
            return None
        return winner

    def write(self, winner: Winner) -> Path:
        """Keep `winner` for its key, durably, in the place of an earlier one; OSError where that is impossible."""
        path = self.path_of(winner.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(winner.as_json(), indent=1, allow_nan=False) + "\n")
        self._remove_abandoned(path.parent)
        return path

    def winners(self) -> Iterator[Winner]:
        """Every winner that can be read."""
        for path in self.paths():
            try:
                yield self.load(path)
            except FileNotFoundError:  # removed by another process a moment ago
                continue
            except (OSError, ValueError) as error:
                _warn_once(path, _reason(error))

    def paths(self) -> list[Path]:
        """The files that hold winners, intact or not."""
        return sorted(self.directory.glob(f"v{SCHEMA}/*/*{SUFFIX}"))

    def clear(self) -> int:
        """Remove every winner, and say how many there were."""
        paths = self.paths()
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def load(self, path: Path) -> Winner:
        """The winner in a file of this store. A damaged one is set aside.

        Raises
        ------
        OSError
            When it cannot be read.
        Damaged, Foreign
            When it is not what it should be.
        """
        try:
            text, identity = _read(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            text, identity = _read(path)  # on a network file system, another one has just taken its place
        try:
            return winner_from_json(_parse(text))
        except Damaged:
            _set_aside(path, identity)
            raise

    def _remove_abandoned(self, folder: Path) -> None:
        for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            with suppress(OSError):  # another process may have removed it
                if path.stat().st_mtime < time.time() - STALE_SECONDS:
                    path.unlink()


def describe_spec(spec: Spec) -> str:
    """A Spec in a few words, ``"float16-d64x64-right"`` say."""
    flags = [f.name for f in fields(Spec) if getattr(spec, f.name) is True and f.name != "aligned"]
    words = [spec.dtype, f"d{spec.d}x{spec.d_v}", *flags]
    words += [] if spec.bias is None else [f"bias_{spec.bias}"]
    words += [] if spec.aligned else ["unaligned"]
    return "-".join(words)


def write_durably(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else reads or writes it, and whatever is killed or unplugged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # not every file system knows it of a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_collection(path: Path) -> list[Winner]:
    """The winners in a file that `write_collection` made.

    Raises
    ------
    OSError
        When it cannot be read.
    Damaged, Foreign
        When it, or any winner in it, is not what it should be.
    """
    document = _parse(_read(path)[0])
    if not isinstance(document, dict) or not isinstance(document.get("winners"), list):
        raise Damaged("it is not a collection of winners of cuflash")
    if document.get("schema") != SCHEMA:
        raise Foreign(f"its schema is {document.get('schema')!r:.20}, this version of cuflash reads {SCHEMA}")
    winners = []
    for number, entry in enumerate(document["winners"], 1):
        try:
            winners.append(winner_from_json(entry))
        except (Damaged, Foreign) as error:
            raise type(error)(f"winner {number} of {len(document['winners'])}: {error}") from error
    return winners


def write_collection(path: Path, winners: Sequence[Winner]) -> None:
    """Write winners into one file, in an order that depends on their keys alone."""
    entries = sorted((winner.as_json() for winner in winners), key=lambda entry: canonical_json(entry["key"]))
    write_durably(path, json.dumps({"schema": SCHEMA, "winners": entries}, indent=1, allow_nan=False) + "\n")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise Damaged("it is nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"it is not JSON: {error}") from error


def _read(path: Path) -> tuple[bytes, tuple[int, int]]:
    """What a regular file holds, and which file that was."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise Foreign(f"it must be a regular file of at most {MOST_BYTES} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(), (status.st_dev, status.st_ino)
    finally:
        os.close(descriptor)


def _set_aside(path: Path, identity: tuple[int, int]) -> None:
    """Rename the damaged file that was read from `path`. A whole one that took its place meanwhile is put back."""
    bad = path.with_name(f"{path.name}.{secrets.token_hex(4)}{BAD_SUFFIX}")
    with suppress(OSError):  # read-only, or another process was faster
        path.rename(bad)
        status = bad.stat()
        if (status.st_dev, status.st_ino) != identity:
            with suppress(FileExistsError):  # a still newer one
                os.link(bad, path)
            bad.unlink()


@functools.cache
def _warn_once(path: Path, why: str) -> None:
    _log.warning("%s is not used: %s", path, why)


def _slug(name: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)[:80].strip(".") or "_"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
