"""Compiled kernels on disk: which directory may be trusted, and a size-bounded cache of cubins in it.

A cubin is code that the GPU runs, so one is loaded only from a directory that is certain to be the user's own:

- It is a real directory, not a symbolic link, owned by the effective user, with mode 0700. Its parents are resolved as
  the system resolves every path, symbolic links included: whoever may rename them could replace the rest of the user's
  files as well.
- Files in it are opened without following symbolic links, must be regular, owned by the effective user, and hold what
  their name says: ``<key>.<SHA-256 of the content>.cubin``. Anything else is removed and compiled again.

Where the directory cannot be trusted or written, cubins go to a private temporary directory that ends with the process.
Systems without user ids (Windows) keep the checks of kind and content; there the permissions of the user's profile
protect the directory.

The directory is ``cubins`` in the user's cache directory, or the absolute path in the environment variable
``CUFLASH_CACHE_DIR``.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import platformdirs

ENVIRONMENT_VARIABLE = "CUFLASH_CACHE_DIR"
MAX_BYTES = 512 * 2**20
STALE_SECONDS = 3600.0  # a temporary file this old was left by a writer that was killed
DIGEST_DIGITS = 32
SUFFIX = ".cubin"
TEMPORARY_SUFFIX = ".tmp"

_log = logging.getLogger("cuflash")


class CacheInfo(NamedTuple):
    """What the cache of cubins holds.

    Attributes
    ----------
    directory : Path
        Where cubins are kept from one process to the next.
    files, bytes : int
        Number of cubins in it and their size.
    why_unused : str or None
        Why the directory is not used, where it is not: each process then compiles for itself.
    """

    directory: Path
    files: int
    bytes: int
    why_unused: str | None


class CubinCache:
    """Cubins in one directory of the user's own; beyond `max_bytes` those unused for longest are removed."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._touched: set[Path] = set()

    def get(self, key: str) -> Path | None:
        """The intact cubin of `key`, or None. A file that bears its name but is not intact is removed."""
        for path in self._files(SUFFIX):
            if path.name.startswith(f"{key}."):
                if _is_intact(path):
                    self._touch(path)
                    return path
                _log.info("removed %s: it is damaged or not the user's own", path)
                discard(path)
        return None

    def put(self, key: str, cubin: bytes) -> Path:
        """Write the cubin of `key`, whole or not at all, whoever else reads or writes; OSError where it cannot be."""
        path = self.directory / f"{key}.{_digest(cubin)}{SUFFIX}"
        descriptor, temporary = tempfile.mkstemp(TEMPORARY_SUFFIX, f"{key}.", self.directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(cubin)
            os.replace(temporary, path)
        except BaseException:
            discard(Path(temporary))
            raise
        self._evict(keep=path)
        return path

    def clear(self) -> int:
        """Remove every cubin, and say how many there were; a write under way in another process is left alone."""
        cubins = self._files(SUFFIX)
        for path in cubins:
            discard(path)
        self._evict()
        return len(cubins)

    def remove_damaged(self) -> list[Path]:
        """Remove every cubin that is not intact, and say which."""
        damaged = [path for path in self._files(SUFFIX) if not _is_intact(path)]
        for path in damaged:
            discard(path)
        return damaged

    def usage(self) -> tuple[int, int]:
        """Number of cubins and their size in bytes."""
        sizes = [status.st_size for _, status in self._stat(SUFFIX)]
        return len(sizes), sum(sizes)

    def _files(self, suffix: str) -> list[Path]:
        try:
            return [self.directory / name for name in os.listdir(self.directory) if name.endswith(suffix)]
        except FileNotFoundError:
            return []

    def _stat(self, suffix: str) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._files(suffix):
            with suppress(OSError):  # another process may have removed it
                found.append((path, path.lstat()))
        return found

    def _touch(self, path: Path) -> None:
        """Mark as used, once a process: eviction goes by modification time."""
        if path not in self._touched:
            self._touched.add(path)
            with suppress(OSError):  # a read-only directory still serves
                os.utime(path)

    def _evict(self, keep: Path | None = None) -> None:
        """Remove cubins unused for longest until the others fit, never `keep`; and temporary files nobody writes."""
        for path, status in self._stat(TEMPORARY_SUFFIX):
            if status.st_mtime < time.time() - STALE_SECONDS:
                discard(path)
        cubins = sorted(self._stat(SUFFIX), key=lambda cubin: cubin[1].st_mtime_ns)
        excess = sum(status.st_size for _, status in cubins) - self.max_bytes
        for path, status in cubins:
            if excess <= 0:
                return
            if path != keep:
                discard(path)
                excess -= status.st_size


def find(key: str) -> Path | None:
    """The cubin of `key` on disk, verified, or None."""
    for cache in (_user_cache(), _private_cache()):
        if cache is not None and (path := cache.get(key)) is not None:
            return path
    return None


def store(key: str, cubin: bytes) -> Path:
    """Keep the cubin of `key`: in the user's directory, or for this process alone where that is impossible."""
    cache = _user_cache()
    if cache is not None:
        try:
            return cache.put(key, cubin)
        except OSError as error:
            _warn_once(cache.directory, error.strerror or str(error))
    return _made_private_cache().put(key, cubin)


def discard(path: Path) -> None:
    """Remove a file of a cache, if it can be removed."""
    with suppress(OSError):
        path.unlink()


def cache_info() -> CacheInfo:
    """What the cache on disk holds; nothing is created.

    Examples
    --------
    >>> from cuflash.cubins import cache_info
    >>> cache_info().files >= 0
    True
    """
    directory = user_directory()
    why = why_untrusted(directory)
    files, size = _cache_at(directory).usage() if why is None else (0, 0)
    return CacheInfo(directory, files, size, why)


def clear_cache() -> int:
    """Remove every cubin from disk, and say how many there were. Kernels that are loaded stay loaded."""
    directory = user_directory()
    user = _cache_at(directory) if why_untrusted(directory) is None else None
    return sum(cache.clear() for cache in (user, _private_cache()) if cache is not None)


def remove_damaged() -> list[Path]:
    """Remove every cubin from disk that is not intact or not the user's own, and say which."""
    directory = user_directory()
    return _cache_at(directory).remove_damaged() if why_untrusted(directory) is None else []


def user_directory() -> Path:
    """Where cubins are kept from one process to the next, whether or not it exists and may be used."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(os.path.expanduser(named))
    return Path(platformdirs.user_cache_dir("cuflash", appauthor=False), "cubins")


def why_untrusted(directory: Path) -> str | None:
    """None where `directory` is the user's own or does not exist yet, else the rule that it breaks."""
    if not directory.is_absolute():
        return "it is not an absolute path"
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if not _is_own(status):
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if _has_user_ids() and status.st_mode & 0o777 != 0o700:
        return f"its mode must be 0700, got {status.st_mode & 0o777:04o}"
    return None


def _has_user_ids() -> bool:
    return hasattr(os, "geteuid")


def _is_own(status: os.stat_result) -> bool:
    return not _has_user_ids() or status.st_uid == os.geteuid()


def _is_intact(path: Path) -> bool:
    """Whether `path` is a regular file of the user's own that holds what its name says."""
    try:
        flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # no link, no pipe that never opens; each where it exists
        descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            return False
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _digest(file.read()) == path.name.split(".")[-2]
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()[:DIGEST_DIGITS]


@functools.cache
def _cache_at(directory: Path) -> CubinCache:
    return CubinCache(directory)


def _user_cache() -> CubinCache | None:
    """The cache in the user's directory, which is made where it is missing; None where it may not be used."""
    directory = user_directory()
    why = why_untrusted(directory)
    if why is None:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            why = why_untrusted(directory)  # again, now that it exists for certain: somebody else may have made it
        except OSError as error:
            why = error.strerror or str(error)
    if why is not None:
        _warn_once(directory, why)
        return None
    return _cache_at(directory)


_private_lock = threading.Lock()
_private: dict[int, CubinCache] = {}  # by process id: the child of a fork makes its own
_warned: set[Path] = set()


def _private_cache() -> CubinCache | None:
    """The cache in this process's temporary directory, if there is one and it is still the one that was made."""
    cache = _private.get(os.getpid())
    if cache is None or why_untrusted(cache.directory) is not None or not cache.directory.exists():
        return None
    return cache


def _made_private_cache() -> CubinCache:
    with _private_lock:
        cache = _private_cache()
        if cache is None:
            directory = Path(tempfile.mkdtemp(prefix="cuflash-"))
            atexit.register(_remove_private, directory, os.getpid())
            cache = _private[os.getpid()] = CubinCache(directory)
        return cache


def _remove_private(directory: Path, process: int) -> None:
    if process == os.getpid():  # not at the exit of a forked child
        shutil.rmtree(directory, ignore_errors=True)


def _warn_once(directory: Path, why: str) -> None:
    if directory not in _warned:
        _warned.add(directory)
        _log.warning("cubin cache %s cannot be used, so every process compiles its kernels anew: %s", directory, why)
