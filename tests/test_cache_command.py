"""`cuflash cache`: what is on disk is listed, shared, checked and removed."""

import json

import pytest
from winners import AMPERE, CONFIG, HOPPER, KEY, OTHER, make_problem, make_winner, own_folders, stale

from cuflash import cubins, store, tuned
from cuflash.cli import main
from cuflash.config import MmaConfig
from cuflash.store import Store, read_collection, write_collection
from cuflash.winner import key_of

HOPPER_KEY = key_of(make_problem(causal=True), HOPPER)
ILLEGAL = MmaConfig(b_r=64, b_c=512, warps=4)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    own_folders(monkeypatch, tmp_path)
    (tmp_path / "user").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def user(folders):
    return Store(folders / "user" / "tuned")


@pytest.fixture
def file(folders):
    return folders / "winners.json"


def run(capsys, *arguments):
    """Exit code and output of a command."""
    code = main(["cache", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, " ".join(printed.out.split()), printed.err


def configs(directory):
    return [winner.config for winner in directory.winners()]


def test_list_shows_kernels_and_winners_with_gain_source_and_staleness(user, folders, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    cubins.store("0123456789abcdef", b"cubin")
    user.write(stale(make_winner(key=HOPPER_KEY)))
    Store(folders / "site").write(make_winner())
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert f"{folders / 'user'}: 1 compiled kernels, 5 B" in out
    assert "A100 float16 d64x64 N 1024 x 1024, up to 1 waves mma b_r=64 b_c=64 warps=4 1.25 2026-01-01 site" in out
    assert "H200 float16 d64x64 right" in out
    assert "tuned, stale: was measured with another version of the kernel" in out


def test_exported_winners_come_back_by_import(user, file, capsys):
    exported = [make_winner(), make_winner(key=HOPPER_KEY)]
    for winner in exported:
        user.write(winner)
    assert run(capsys, "export", file)[:2] == (0, f"{file}: 2 tuned configurations")
    user.clear()
    assert run(capsys, "import", file)[:2] == (0, "2 taken over, 0 no better than what was there, 0 not legal")
    assert sorted(user.winners(), key=str) == sorted(exported, key=str)


def test_export_of_one_gpu_leaves_the_others_out(user, file, capsys):
    for key in (KEY, HOPPER_KEY):
        user.write(make_winner(key=key))
    run(capsys, "export", file, "--gpu", "H200")
    assert [winner.key.device for winner in read_collection(file)] == [HOPPER]


def test_export_takes_the_newer_of_two_that_a_full_disk_has_parted(user, file, folders, capsys):
    user.write(make_winner(OTHER, date="2025-01-01T00:00:00Z"))
    (folders / "temporary" / tuned.temporary_directory().parent.name).mkdir(mode=0o700)
    Store(tuned.temporary_directory()).write(make_winner(CONFIG))
    run(capsys, "export", file)
    assert [winner.config for winner in read_collection(file)] == [CONFIG]


@pytest.mark.parametrize(
    ("there", "offered", "taken"),
    [
        (make_winner(date="2026-01-01"), make_winner(OTHER, date="2026-02-01"), True),
        (make_winner(date="2026-02-01"), make_winner(OTHER, date="2026-01-01"), False),
        (stale(make_winner(date="2026-02-01")), make_winner(OTHER, date="2026-01-01"), True),
        (make_winner(date="2026-01-01"), stale(make_winner(OTHER, date="2026-02-01")), False),
    ],
    ids=["newer", "older", "in place of a stale one", "stale"],
)
def test_import_keeps_the_better_of_two(user, file, capsys, there, offered, taken):
    user.write(there)
    write_collection(file, [offered])
    assert run(capsys, "import", file)[0] == 0
    assert configs(user) == [OTHER if taken else CONFIG]


def test_import_overwrites_when_asked_to(user, file, capsys):
    user.write(make_winner(date="2026-02-01"))
    write_collection(file, [stale(make_winner(OTHER, date="2026-01-01"))])
    run(capsys, "import", file, "--overwrite")
    assert configs(user) == [OTHER]


def test_import_for_the_site_leaves_the_user_alone(user, file, folders, capsys):
    write_collection(file, [make_winner()])
    assert run(capsys, "import", file, "--site")[0] == 0
    assert (configs(user), configs(Store(folders / "site"))) == ([], [CONFIG])


def test_import_refuses_what_is_not_legal(user, file, capsys):
    write_collection(file, [make_winner(ILLEGAL), make_winner(key=HOPPER_KEY)])
    assert run(capsys, "import", file)[:2] == (1, "1 taken over, 0 no better than what was there, 1 not legal")
    assert [winner.key for winner in user.winners()] == [HOPPER_KEY]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema": 1}', '{"schema": 1, "winners": [{}]}', '{"schema": 9, "winners": []}']
)
def test_import_of_what_is_no_export_says_so(user, file, capsys, text):
    file.write_text(text)
    code, _, error = run(capsys, "import", file)
    assert code == 2
    assert f"cuflash cache import: error: {file}: " in error


@pytest.mark.parametrize(("name", "message"), [("", "it must be a regular file"), ("no.json", "No such file")])
def test_import_of_what_is_no_file_says_so(folders, capsys, name, message):
    code, _, error = run(capsys, "import", folders / name)
    assert code == 2
    assert message in error
    assert str(folders / name) in error


def test_import_that_can_keep_nothing_fails(file, capsys, monkeypatch):
    write_collection(file, [make_winner()])
    monkeypatch.setattr(tuned, "_write", lambda winner: None)
    code, _, error = run(capsys, "import", file)
    assert (code, "cannot be kept" in error) == (1, True)


def test_verify_of_what_is_in_order_counts_it(user, folders, capsys):
    user.write(stale(make_winner()))
    Store(folders / "site").write(make_winner())
    assert run(capsys, "verify")[:2] == (0, "tuned configurations: 1 tuned, 1 site; 1 stale; 0 faults")


def test_verify_names_every_fault_and_fails(user, folders, capsys):
    damaged = user.write(make_winner())
    damaged.write_text("{")
    illegal = user.write(make_winner(ILLEGAL, key_of(make_problem(d=128), AMPERE)))
    misplaced = user.write(make_winner(key=HOPPER_KEY))
    misplaced = misplaced.rename(misplaced.with_name("forward.json"))
    later = misplaced.with_name("later.json")
    later.write_text(json.dumps({"schema": 2}))
    cubin = cubins.store("0123456789abcdef", b"cubin")
    cubin.write_bytes(b"another")
    code, out, _ = run(capsys, "verify")
    assert code == 1
    for path, why in [
        (damaged, "it is not JSON"),
        (illegal, "its configuration is not legal: "),
        (misplaced, "it holds the winner of another key"),
        (later, "its schema is 2"),
        (cubin, "it was damaged or not the user's own, and is removed"),
    ]:
        assert f"{path}: {why}" in out
    assert not cubin.exists()


@pytest.mark.parametrize(
    ("what", "kernels", "winners"), [((), 0, 1), (("kernels",), 0, 1), (("tuned",), 1, 0), (("all",), 0, 0)]
)
def test_clear_removes_what_is_named_and_by_default_what_can_be_made_again(user, capsys, what, kernels, winners):
    cubins.store("0123456789abcdef", b"cubin")
    user.write(make_winner())
    assert run(capsys, "clear", *what)[0] == 0
    assert (cubins.cache_info().files, len(user.paths())) == (kernels, winners)


def test_info_says_where_tuned_configurations_are(user, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    user.write(make_winner())
    assert main(["info"]) == 0
    assert f"{user.directory} (1 files)" in capsys.readouterr().out


def test_collection_is_written_whole_or_not_at_all(file, monkeypatch, capsys, user):
    file.write_text("before")
    user.write(make_winner())

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", fail)
    code, _, error = run(capsys, "export", file)
    assert (code, "No space left" in error) == (1, True)
    assert file.read_text() == "before"
    assert [path.name for path in file.parent.iterdir() if path.name.endswith(".tmp")] == []
