"""The files of tuned configurations: data that is checked; what damage, a full disk and killed processes leave."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from winners import (
    AMPERE,
    BACKWARD_CONFIG,
    BACKWARD_KEY,
    CONFIG,
    DAMAGE,
    HOPPER,
    KEY,
    OTHER,
    found,
    make_problem,
    make_winner,
    operand,
    own_folders,
    start_process,
)

import cuflash
from cuflash import store, tuned
from cuflash.backward_config import BackwardSimtConfig, BackwardWgmmaConfig
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.store import Store
from cuflash.winner import Damaged, Foreign, checksum, key_of, winner_from_json


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Directories of this test's own: the user's, the site's, the temporary one; nothing shipped; a new process."""
    own_folders(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def user(folders):
    return Store(folders / "user" / "tuned")


def names_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---- what comes from a file is data ----


def test_winner_survives_its_form_as_json():
    for config, device in ((CONFIG, AMPERE), (WgmmaConfig(2, 128), HOPPER), (SimtConfig(64, 64, 128, 16), AMPERE)):
        problem = make_problem(causal=True, window=(5, 0), kv_lengths=operand("kv_lengths", 1, dtype="int32"))
        winner = make_winner(config, key_of(problem, device), runner_ups=[[1.5, {"b_r": 64}]], seed=3)
        assert winner_from_json(json.loads(json.dumps(winner.as_json()))) == winner


@pytest.mark.parametrize("config", [BACKWARD_CONFIG, BackwardSimtConfig(32, 32, 128, 16), BackwardWgmmaConfig(64)])
def test_winner_of_gradients_survives_its_form_as_json(config):
    winner = make_winner(config, BACKWARD_KEY)
    assert winner_from_json(json.loads(json.dumps(winner.as_json()))) == winner


def test_configuration_of_the_other_pass_is_not_a_winner():
    with pytest.raises((Damaged, Foreign)):
        winner_from_json(make_winner(CONFIG, BACKWARD_KEY).as_json())


def changed(document, *path, to):
    """The document with one value replaced, under a checksum that fits."""
    document = json.loads(json.dumps(document))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    if path != ("checksum",):
        document["checksum"] = checksum(document)
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config", "b_r"), "64; asm(\"trap;\")"), (("config", "b_r"), 64.0), (("config", "b_r"), True),
        (("config", "b_r"), -64), (("config", "b_r"), 10**30), (("config", "b_r"), None), (("config", "b_r"), [64]),
        (("config", "swizzle"), 1), (("config", "swizzle"), "true"), (("config",), []),
        (("key", "spec", "dtype"), "float16; //"), (("key", "spec", "dtype"), ["float16"]),
        (("key", "spec", "bias"), "int"), (("key", "spec", "d"), 8), (("key", "spec", "d"), 512),
        (("key", "spec", "d"), True), (("key", "spec", "mask"), 1), (("key", "spec"), None),
        (("key", "bucket", "n_q"), 1000), (("key", "bucket", "n_k"), 2**40), (("key", "bucket", "waves"), "3"),
        (("key", "bucket", "waves"), 4), (("key", "bucket", "grouped"), 0), (("key", "bucket", "window"), None),
        (("key", "device", "name"), "GPU\x1b[2J"), (("key", "device", "name"), 3),
        (("key", "device", "compute_capability"), [8]), (("key", "device", "compute_capability"), "80"),
        (("key", "device", "multiprocessors"), 1.5), (("key", "device", "shared_bytes"), -1),
        (("provenance", "nvrtc"), 13.0), (("provenance",), "here"), (("measurement", "time_us"), 0),
        (("measurement", "time_us"), "fast"), (("measurement", "evaluations"), -1), (("measurement", "date"), None),
        (("measurement", "details"), []), (("checksum",), None), (("schema",), "1"), (("schema",), True),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else repr(value)[:20],
)  # fmt: skip
def test_value_that_no_winner_has_is_refused(path, value):
    with pytest.raises(Damaged):
        winner_from_json(changed(make_winner().as_json(), *path, to=value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2), (("key", "operation"), "backward"), (("family",), "tcgen05"), (("config", "clusters"), 2),
        (("key", "spec", "alibi"), True), (("key", "bucket", "beams"), 4), (("novelty",), 1),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_a_later_version_may_write_is_told_from_damage(path, value):
    with pytest.raises(Foreign):
        winner_from_json(changed(make_winner().as_json(), *path, to=value))


def test_field_that_an_earlier_version_did_not_know_takes_its_default():
    document = make_winner(MmaConfig(64, 64, 4, tile_sums=False)).as_json()
    del document["config"]["tile_sums"]
    document["checksum"] = checksum(document)
    assert winner_from_json(document) == make_winner()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_number_that_is_none_is_refused(value):
    text = json.dumps(changed(make_winner().as_json(), "measurement", "time_us", to=12345.0))
    with pytest.raises(Damaged):
        winner_from_json(json.loads(text.replace("12345.0", value)))


# ---- damage ----


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_set_aside_and_the_next_source_serves(folders, user, caplog, damage):
    Store(folders / "site").write(make_winner(OTHER))
    path = user.write(make_winner())
    path.write_bytes(damage(path.read_bytes()))
    assert found() == [(OTHER, "site")]
    assert [name.endswith(".bad") for name in names_in(path.parent)] == [True]
    assert "is not used" in caplog.text
    tuned.put(make_winner())
    assert found() == [(CONFIG, "tuned"), (OTHER, "site")]


@pytest.mark.parametrize(("where", "value"), [(("schema",), 2), (("family",), "tcgen05")], ids=["schema", "family"])
def test_file_of_a_later_version_is_left_alone(user, where, value):
    path = user.write(make_winner())
    path.write_text(json.dumps(changed(make_winner().as_json(), *where, to=value)))
    assert found() == []
    assert names_in(path.parent) == [path.name]


def test_file_under_the_name_of_another_key_is_not_used(user, caplog):
    other = key_of(make_problem(causal=True), AMPERE)
    user.path_of(KEY).parent.mkdir(parents=True)
    user.path_of(KEY).write_text(json.dumps(make_winner(key=other).as_json()))
    assert found() == []
    assert "the winner of another key" in caplog.text


def test_folder_or_pipe_in_the_place_of_a_file_is_passed_over(user):
    user.path_of(KEY).parent.mkdir(parents=True)
    os.mkfifo(user.path_of(KEY))
    assert user.read(KEY) is None
    user.path_of(KEY).unlink()
    user.path_of(KEY).mkdir()
    assert user.read(KEY) is None
    assert list(user.winners()) == []


def test_winner_written_while_a_damaged_one_is_set_aside_is_not_lost(user, monkeypatch):
    path = user.write(make_winner())
    path.write_bytes(b"{")
    read = store._read

    def read_and_be_overtaken(path):
        content = read(path)
        monkeypatch.setattr(store, "_read", read)
        user.write(make_winner(OTHER))  # another process
        return content

    monkeypatch.setattr(store, "_read", read_and_be_overtaken)
    assert user.read(KEY) is None
    assert user.read(KEY).config == OTHER


def test_file_that_is_replaced_on_a_network_file_system_is_read_again(user, monkeypatch):
    user.write(make_winner())
    read = store._read

    def fail_once(path):
        monkeypatch.setattr(store, "_read", read)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(store, "_read", fail_once)
    assert user.read(KEY) == make_winner()


def test_damaged_shipped_file_is_not_fatal(monkeypatch, tmp_path, caplog):
    monkeypatch.undo()
    (tmp_path / "tuned.json").write_text("{")
    monkeypatch.setattr(tuned.importlib.resources, "files", lambda package: tmp_path)
    assert tuned._shipped.__wrapped__() == {}
    assert "come with cuflash cannot be used" in caplog.text


def test_shipped_winners_are_intact_and_legal():
    document = json.loads(Path(tuned.__file__).with_name("tuned.json").read_text())
    for entry in document["winners"]:
        winner = winner_from_json(entry)
        assert winner.config.why_illegal(winner.key.spec, winner.key.device) is None


# ---- nowhere to write ----


def raising(number):
    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    return fail


def test_winner_goes_to_a_private_temporary_folder_where_the_home_is_read_only(folders, monkeypatch, caplog):
    (folders / "user").write_text("a file where the folder should be")
    path = tuned.put(make_winner())
    assert folders / "temporary" in path.parents
    assert path.parents[3].stat().st_mode & 0o777 == 0o700
    assert "they go to" in caplog.text
    start_process(monkeypatch)
    assert found() == [(CONFIG, "tuned")]


def test_full_disk_loses_neither_the_old_winner_nor_the_new(folders, user, monkeypatch):
    tuned.put(make_winner(OTHER, date="2025-01-01T00:00:00Z"))
    before = user.path_of(KEY).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full_below(folders / "user"))
        path = tuned.put(make_winner(CONFIG))
    assert folders / "temporary" in path.parents
    assert user.path_of(KEY).read_bytes() == before
    assert names_in(folders / "user") == [user.path_of(KEY).name]
    start_process(monkeypatch)
    assert found() == [(CONFIG, "tuned"), (OTHER, "tuned")]


def full_below(folder, fsync=os.fsync):
    """A disk that is full: what is written to files below `folder` does not reach it."""

    def flush(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    return flush


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_winner_serves_this_process_where_nothing_can_be_written(monkeypatch, caplog, number):
    monkeypatch.setattr(Path, "mkdir", raising(number))
    assert tuned.put(make_winner()) is None
    assert found() == [(CONFIG, "loaded")]
    assert os.strerror(number) in caplog.text


def test_no_temporary_directory_at_all_is_no_obstacle(folders, monkeypatch):
    monkeypatch.setattr(tuned.tempfile, "gettempdir", raising(errno.ENOENT))
    assert found() == []
    (folders / "user").write_text("a file where the folder should be")
    assert tuned.put(make_winner()) is None
    assert found() == [(CONFIG, "loaded")]


def test_unreadable_store_is_passed_over_with_one_warning(user, monkeypatch, caplog):
    monkeypatch.setattr(store, "_read", raising(errno.EACCES))
    assert found() == found(key_of(make_problem(causal=True), AMPERE)) == []
    assert len([message for message in caplog.messages if "user" in message]) == 1


def test_temporary_folder_of_somebody_else_is_not_used(folders, monkeypatch):
    (folders / "user").write_text("a file where the folder should be")
    tuned.temporary_directory().parent.mkdir(mode=0o777)
    tuned.temporary_directory().parent.chmod(0o777)
    assert tuned.put(make_winner()) is None
    assert found() == [(CONFIG, "loaded")]


def test_relative_directory_is_not_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "here")
    assert tmp_path / "temporary" in tuned.put(make_winner()).parents
    assert not (tmp_path / "here").exists()


def test_folder_that_the_store_makes_serves_compiled_kernels_too(folders):
    tuned.put(make_winner())
    assert cuflash.tuned.cubins.why_untrusted(folders / "user") is None


# ---- many processes, some of them killed ----

KILLED = """
import os, signal, sys
from cuflash import store
import winners

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(*{"while writing": (store.os, "fsync"), "before renaming": (store.Path, "replace")}[sys.argv[2]], die)
store.Store(store.Path(sys.argv[1])).write(winners.make_winner(winners.OTHER))
"""

MANY = """
import os, random, signal, sys, time
from cuflash.store import Path, Store
import winners

PROCESSES, ROUNDS = 32, 10
winners.make_winner()  # what is imported for it need not be imported by every process
store = Store(Path(sys.argv[1]))
problems = [winners.make_problem(n=2 ** (6 + i % 9), causal=i > 8) for i in range(18)]
shared = [winners.key_of(problem, winners.AMPERE) for problem in problems]
configs = [winners.MmaConfig(64, b_c, 4) for b_c in (16, 32, 48, 64)]

def check(winner, key):
    if winner is not None and (winner.key != key or winner.config not in configs):
        os._exit(3)

def work(number, own):
    chance = random.Random(number)
    for _ in range(ROUNDS):
        for key in (own, chance.choice(shared)):
            store.write(winners.make_winner(chance.choice(configs), key, number=number))
        check(store.read(own) or os._exit(2), own)
        check(store.read(other := chance.choice(shared)), other)
        if chance.random() < 0.1:
            list(store.winners())

children = []
for number in range(PROCESSES):
    own = winners.key_of(winners.make_problem(d=16 * (1 + number % 16), causal=number > 15), winners.HOPPER)
    child = os.fork()
    if child == 0:
        try:
            work(number, own)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append((child, own))
time.sleep(0.2)
for child, _ in children[::4]:
    os.kill(child, signal.SIGKILL)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
kept = [store.read(own) is not None for _, own in children]
print(sorted(set(codes)), all(there for there, code in zip(kept, codes) if code == 0), codes.count(0))
print(len(list(store.winners())), [path.name for path in store.directory.rglob("*.bad")])
"""


def run_script(script, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("when", ["while writing", "before renaming"])
def test_killed_writer_leaves_the_winner_that_was_there(user, when):
    user.write(make_winner())
    assert run_script(KILLED, user.directory, when).returncode == -9
    assert user.read(KEY).config == CONFIG
    abandoned = [path for path in user.path_of(KEY).parent.iterdir() if path.name.endswith(".tmp")]
    assert len(abandoned) == 1
    user.write(make_winner(OTHER))
    assert abandoned[0].exists()  # its writer might be alive
    os.utime(abandoned[0], (0, 0))
    user.write(make_winner(OTHER))
    assert names_in(user.directory) == [user.path_of(KEY).name]


def test_32_processes_write_and_read_at_once_and_some_are_killed(tmp_path):
    run = run_script(MANY, tmp_path)
    assert not run.stderr
    codes, winners = run.stdout.splitlines()
    assert codes.startswith(("[-9, 0] True", "[0] True"))
    assert winners.endswith("[]")
