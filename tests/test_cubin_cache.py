import errno
import io
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuflash import cubins
from cuflash.cubins import CubinCache

KEY = "0123456789abcdef"
OTHER_KEY = "fedcba9876543210"
CUBIN = b"\x7fELF" + bytes(range(256)) * 16

needs_user_ids = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The user's directory of cubins, which does not exist yet, in a process that has used none so far."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(cubins, "_private", {})
    monkeypatch.setattr(cubins, "_warned", set())
    return tmp_path / "cubins"


@pytest.fixture
def cache(tmp_path):
    """A cache in a directory of its own, with room for three cubins."""
    (tmp_path / "cache").mkdir(mode=0o700)
    return CubinCache(tmp_path / "cache", max_bytes=3 * len(CUBIN))


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def age(path, seconds):
    """Set the modification time of `path` to `seconds` ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def assert_kept_privately(caplog, why):
    """A cubin is kept in the process's temporary directory, and one warning says that `why` is the reason."""
    path = cubins.store(KEY, CUBIN)
    assert path.parent.parent == Path(tempfile.gettempdir())
    assert cubins.store(OTHER_KEY, CUBIN).parent == path.parent
    assert path.read_bytes() == CUBIN
    assert mode_of(path.parent) == 0o700
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(cubins.user_directory()) in warning
    assert why in warning


def python(script, *arguments, **environment):
    """Start Python on `script`, with this process's modules and `environment`, its output in a pipe."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


# ---- what is kept, and where ----


def test_a_cubin_is_found_again(directory):
    path = cubins.store(KEY, CUBIN)
    assert path.parent == directory
    assert cubins.find(KEY) == path
    assert path.read_bytes() == CUBIN


def test_an_unknown_key_finds_nothing(directory):
    cubins.store(KEY, CUBIN)
    assert cubins.find(OTHER_KEY) is None


def test_the_beginning_of_a_key_finds_nothing(directory):
    cubins.store(KEY, CUBIN)
    assert cubins.find(KEY[:-1]) is None


def test_a_write_leaves_one_file(directory):
    path = cubins.store(KEY, CUBIN)
    assert names_in(directory) == [path.name]


@needs_user_ids
def test_the_directory_is_made_for_its_user_alone(directory):
    cubins.store(KEY, CUBIN)
    assert mode_of(directory) == 0o700


@needs_user_ids
def test_a_file_is_made_for_its_user_alone(directory):
    assert mode_of(cubins.store(KEY, CUBIN)) == 0o600


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_without_the_variable_cubins_go_to_the_users_cache_directory(monkeypatch, value):
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("CUFLASH_CACHE_DIR", value)
    monkeypatch.setattr(cubins.platformdirs, "user_cache_dir", lambda name, **options: f"/caches/{name}")
    assert cubins.user_directory() == Path("/caches/cuflash/cubins")


def test_info_counts_cubins_and_bytes(directory):
    cubins.store(KEY, CUBIN)
    cubins.store(OTHER_KEY, CUBIN)
    assert cubins.cache_info() == (directory, 2, 2 * len(CUBIN), None)


def test_info_creates_nothing(directory):
    assert cubins.cache_info() == (directory, 0, 0, None)
    assert not directory.exists()


def test_info_says_why_a_directory_is_not_used(directory):
    directory.write_text("")
    assert cubins.cache_info().why_unused == "it is not a directory"


def test_clearing_removes_every_cubin(directory):
    cubins.store(KEY, CUBIN)
    cubins.store(OTHER_KEY, CUBIN)
    assert cubins.clear_cache() == 2
    assert names_in(directory) == []


def test_clearing_leaves_files_that_are_not_cubins(directory):
    cubins.store(KEY, CUBIN)
    (directory / "notes.txt").write_text("mine")
    cubins.clear_cache()
    assert names_in(directory) == ["notes.txt"]


def test_clearing_removes_what_was_kept_privately(directory):
    directory.write_text("")
    path = cubins.store(KEY, CUBIN)
    assert cubins.clear_cache() == 1
    assert not path.exists()


# ---- which directory is trusted ----


@needs_user_ids
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o500, 0o777], ids=oct)
def test_a_directory_of_another_mode_is_not_used(directory, caplog, mode):
    directory.mkdir()
    directory.chmod(mode)
    assert_kept_privately(caplog, f"its mode must be 0700, got {mode:04o}")


@needs_user_ids
def test_a_directory_may_inherit_the_group_of_its_parent(directory):
    directory.mkdir()
    directory.chmod(0o2700)
    assert cubins.store(KEY, CUBIN).parent == directory


@needs_user_ids
def test_a_directory_of_another_user_is_not_used(directory, monkeypatch):
    directory.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cubins.cache_info().why_unused == f"it belongs to user {user}, not to user {user + 1}"
    cubins.store(KEY, CUBIN)
    assert names_in(directory) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a directory away")
def test_root_does_not_use_a_directory_of_another_user(directory, caplog):
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, -1)
    assert_kept_privately(caplog, "it belongs to user 12345, not to user 0")


@needs_user_ids
def test_without_user_ids_owner_and_mode_do_not_matter(directory, monkeypatch):
    directory.mkdir(mode=0o755)
    monkeypatch.delattr(os, "geteuid")
    path = cubins.store(KEY, CUBIN)
    assert path.parent == directory
    assert cubins.find(KEY) == path


def test_a_symbolic_link_to_a_directory_is_not_used(directory, tmp_path, caplog):
    (tmp_path / "target").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "target", target_is_directory=True)
    assert_kept_privately(caplog, "it is a symbolic link")
    assert names_in(tmp_path / "target") == []


def test_a_parent_may_be_a_symbolic_link(directory, tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target", target_is_directory=True)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "link" / "cubins"))
    assert cubins.store(KEY, CUBIN).parent == tmp_path / "link" / "cubins"


def test_a_file_in_place_of_the_directory_is_not_used(directory, caplog):
    directory.write_text("")
    assert_kept_privately(caplog, "it is not a directory")


def test_a_directory_below_a_file_is_not_used(directory, monkeypatch, caplog):
    directory.write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(directory / "cubins"))
    assert_kept_privately(caplog, os.strerror(errno.ENOTDIR))


def test_a_relative_directory_is_not_used(directory, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "relative")
    assert_kept_privately(caplog, "it is not an absolute path")
    assert not Path("relative").exists()


def test_a_user_without_a_home_directory_is_served(directory, monkeypatch, caplog):
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    monkeypatch.setattr(cubins.platformdirs, "user_cache_dir", lambda *name, **options: "~/.cache/cuflash")
    assert_kept_privately(caplog, "it is not an absolute path")


def test_looking_a_cubin_up_makes_no_temporary_directory(directory):
    directory.write_text("")
    assert cubins.find(KEY) is None
    assert names_in(Path(tempfile.gettempdir())) == []


def test_what_is_kept_privately_is_found_again(directory):
    directory.write_text("")
    assert cubins.store(KEY, CUBIN) == cubins.find(KEY)


def test_a_temporary_directory_that_was_removed_is_replaced(directory):
    directory.write_text("")
    first = cubins.store(KEY, CUBIN)
    first.unlink()
    first.parent.rmdir()
    assert cubins.find(KEY) is None
    assert cubins.store(KEY, CUBIN).read_bytes() == CUBIN


FORK = """
import os, sys
from cuflash import cubins
path = cubins.store("key", b"cubin")
if os.fork() == 0:
    sys.exit()
os.wait()
print(path.parent, path.exists())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_temporary_directory_ends_with_its_process_and_not_with_a_forked_child(tmp_path):
    process = python(FORK, CUFLASH_CACHE_DIR="relative", TMPDIR=str(tmp_path))
    output, _ = process.communicate()
    directory, outlived_the_child = output.split()
    assert Path(directory).parent == tmp_path
    assert outlived_the_child == "True"
    assert not Path(directory).exists()


# ---- what cannot be written ----


@pytest.fixture
def read_only(directory, monkeypatch):
    """The user's directory, with one cubin in it, on a file system that has become read-only."""
    cubins.store(KEY, CUBIN)
    open_any = os.open

    def open_existing(path, flags, *mode, **options):
        if flags & os.O_CREAT and Path(path).is_relative_to(directory):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open_any(path, flags, *mode, **options)

    def refuse(path, *times):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(cubins, "_cache_at", CubinCache)  # as a process would that has not touched the file yet
    monkeypatch.setattr(os, "open", open_existing)
    monkeypatch.setattr(os, "utime", refuse)
    return directory


def test_a_read_only_directory_serves_what_it_holds(read_only):
    assert cubins.find(KEY).read_bytes() == CUBIN


def test_what_a_read_only_directory_cannot_take_is_kept_privately(read_only, caplog):
    assert_kept_privately(caplog, os.strerror(errno.EROFS))


def test_a_directory_that_cannot_be_made_is_not_used(directory, monkeypatch, caplog):
    mkdir = Path.mkdir

    def refuse(path, *arguments, **options):
        if path == directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_kept_privately(caplog, os.strerror(errno.EACCES))


class FullDisk(io.FileIO):
    """A file on a disk that is full half-way through what is written."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full_disk(directory, monkeypatch):
    """The user's directory, on a disk that is full."""
    fdopen = os.fdopen

    def open_full(descriptor, *arguments, **options):
        status, disk = os.fstat(descriptor), directory.stat()
        here = any(path.stat().st_ino == status.st_ino for path in directory.iterdir()) and status.st_dev == disk.st_dev
        return FullDisk(descriptor, "wb") if here else fdopen(descriptor, *arguments, **options)

    monkeypatch.setattr(os, "fdopen", open_full)
    return directory


def test_what_does_not_fit_on_the_disk_is_kept_privately(full_disk, caplog):
    assert_kept_privately(caplog, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_leaves_no_file(full_disk):
    cubins.store(KEY, CUBIN)
    assert names_in(full_disk) == []


KILLED = """
import resource, signal, sys
from pathlib import Path
from cuflash.cubins import CubinCache
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
CubinCache(Path(sys.argv[1])).put("key", bytes(100_000))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system has no limit on the size of a file")
def test_a_process_killed_while_it_writes_leaves_no_cubin(cache):
    process = python(KILLED, cache.directory)
    process.communicate()
    assert process.returncode == -signal.SIGXFSZ
    [left] = cache.directory.iterdir()
    assert left.stat().st_size == 1000
    assert cache.get("key") is None
    assert cache.usage() == (0, 0)


# ---- what was damaged ----


def empty(path):
    path.write_bytes(b"")


def truncate(path):
    path.write_bytes(CUBIN[:-1])


def append(path):
    path.write_bytes(CUBIN + b"\0")


def flip_a_bit(path):
    path.write_bytes(CUBIN[:100] + bytes([CUBIN[100] ^ 1]) + CUBIN[101:])


def exchange_with_the_cubin_of_another_key(path):
    path.write_bytes(CUBIN[::-1])


def make_a_symbolic_link(path):
    target = path.parent.parent / "target"
    target.write_bytes(CUBIN)
    path.unlink()
    path.symlink_to(target)


DAMAGES = [empty, truncate, append, flip_a_bit, exchange_with_the_cubin_of_another_key, make_a_symbolic_link]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_cubin_is_removed(cache, damage):
    path = cache.put(KEY, CUBIN)
    damage(path)
    assert cache.get(KEY) is None
    assert cache.usage() == (0, 0)


def test_the_target_of_a_symbolic_link_is_left_alone(cache):
    path = cache.put(KEY, CUBIN)
    make_a_symbolic_link(path)
    cache.get(KEY)
    assert (path.parent.parent / "target").read_bytes() == CUBIN


@needs_user_ids
def test_a_file_of_another_user_is_removed(cache, monkeypatch):
    path = cache.put(KEY, CUBIN)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cache.get(KEY) is None
    assert not path.exists()


def test_a_folder_that_bears_the_name_of_a_cubin_is_not_used(cache):
    path = cache.put(KEY, CUBIN)
    path.unlink()
    path.mkdir()
    assert cache.get(KEY) is None


def test_an_intact_cubin_beside_a_damaged_one_is_found(cache):
    damaged = cache.put(KEY, CUBIN)
    flip_a_bit(damaged)
    intact = cache.put(KEY, CUBIN[::-1])
    assert cache.get(KEY) == intact


# ---- what is evicted ----


def test_the_cubin_unused_for_longest_is_evicted(cache):
    for days, key in enumerate("abc"):
        age(cache.put(key, CUBIN), days * 86400)
    cache.put("d", CUBIN)
    assert [key for key in "abcd" if cache.get(key)] == ["a", "b", "d"]


def test_using_a_cubin_keeps_it(cache):
    for days, key in enumerate("abc"):
        age(cache.put(key, CUBIN), days * 86400)
    cache.get("c")
    cache.put("d", CUBIN)
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]


def test_a_cubin_is_marked_as_used_once_a_process(cache):
    path = cache.put(KEY, CUBIN)
    cache.get(KEY)
    age(path, 86400)
    cache.get(KEY)
    assert path.stat().st_mtime < time.time() - 80000


def test_the_cubin_just_written_stays_however_large_it_is(cache):
    cache.put(KEY, CUBIN)
    path = cache.put(OTHER_KEY, CUBIN * 4)
    assert names_in(cache.directory) == [path.name]


def test_the_cubin_just_written_stays_though_others_are_from_the_future(cache):
    for key in "abc":
        age(cache.put(key, CUBIN), -86400)
    assert cache.put("d", CUBIN).exists()
    assert cache.usage() == (3, 3 * len(CUBIN))


def test_the_temporary_file_of_a_killed_writer_is_removed_after_an_hour(cache):
    stale = cache.directory / "killed.tmp"
    stale.write_bytes(CUBIN)
    age(stale, 3700)
    cache.put(KEY, CUBIN)
    assert not stale.exists()


def test_the_temporary_file_of_a_writer_at_work_stays(cache):
    fresh = cache.directory / "working.tmp"
    fresh.write_bytes(CUBIN)
    cache.put(KEY, CUBIN)
    cache.clear()
    assert fresh.exists()


# ---- several at once ----

WRITER = """
import sys
from pathlib import Path
from cuflash.cubins import CubinCache
cache = CubinCache(Path(sys.argv[1]), max_bytes=40_000)
bad = 0
for number in range(150):
    key = f"key{number % 7}"
    path = cache.get(key)
    if path is None:
        path = cache.put(key, f"{key} of process {sys.argv[2]}".encode() * 500)
    try:
        bad += not path.read_bytes().startswith(key.encode() + b" of process")
    except FileNotFoundError:
        pass  # evicted by another process
print(bad)
"""


def test_processes_that_write_and_evict_together_never_see_a_bad_cubin(cache):
    processes = [python(WRITER, cache.directory, number) for number in range(3)]
    assert [process.communicate()[0] for process in processes] == ["0\n"] * 3
    assert {name.rsplit(".")[-1] for name in names_in(cache.directory)} == {"cubin"}


def test_threads_that_write_one_cubin_together_leave_one_file(cache):
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: cache.put(KEY, CUBIN), range(64)))
    assert names_in(cache.directory) == [path.name for path in paths]
    assert cache.get(KEY) in paths
