"""The study that processes share: claims, the model, storage URLs, what survives."""

import threading
from datetime import timedelta

import optuna
import pytest
from optuna.trial import TrialState
from synthetic import small_table

from cuflash.tuning import record, study
from cuflash.tuning.measure import Measurement
from cuflash.tuning.search import Search
from cuflash.tuning.study import StorageError, Study, open_storage, release_everywhere, shown

TABLE = small_table()
SPACE = TABLE.space
POINTS = SPACE.points


def ok(point, ratio=0.9):
    return Measurement(point, "ok", ratio, (ratio,) * 5, (1.0,) * 5, 128, 0)


def test_every_measurement_is_a_trial():
    own = Study(SPACE, "s")
    own.claim(POINTS[:2])
    own.finish(ok(POINTS[0], 0.8))
    own.finish(Measurement(POINTS[1], "wrong", error="rows from 0 on have a wrong output"))
    good, bad = own._study.get_trials()
    assert good.state == TrialState.COMPLETE
    assert good.value == 0.8
    assert good.params == dict(zip(SPACE.axes, POINTS[0], strict=True))
    assert bad.state == TrialState.PRUNED
    assert bad.constraints == {study.UNUSABLE: 1.0}
    assert [(known.point, known.status) for known in own.known()] == [
        (POINTS[0], "ok"),
        (POINTS[1], "wrong"),
    ]


@pytest.mark.parametrize("state", ["ok", "crash"])
def test_a_shared_study_keeps_the_same_as_one_of_its_own(state):
    measurement = ok(POINTS[3]) if state == "ok" else Measurement(POINTS[3], state, error="an illegal access")
    kept = []
    for worker in (None, "a"):
        own = Study(SPACE, "s", worker=worker)
        own.claim([POINTS[3]])
        own.finish(measurement)
        (trial,) = own._study.get_trials()
        kept.append((trial.state, trial.value, trial.params, trial.constraints, trial.user_attrs[study.MEASURED]))
    assert kept[0] == kept[1]


def test_a_point_is_claimed_once():
    storage = open_storage(None)
    a, b = Study(SPACE, "s", storage, worker="a"), Study(SPACE, "s", storage, worker="b")
    assert a.claim(POINTS[:4]) == list(POINTS[:4])
    assert b.claim(POINTS[2:6]) == list(POINTS[4:6])
    a.finish(ok(POINTS[0]))
    assert b.claim(POINTS[:1]) == []
    assert b.taken() == set(POINTS[:6])


def test_claims_of_many_threads_on_a_journal_never_overlap(tmp_path):
    url = f"journal://{tmp_path}/s.journal"
    Study(SPACE, "s", open_storage(url), worker="first")
    got = {}

    def claim_all(worker):
        own = Study(SPACE, "s", open_storage(url), worker=worker)
        got[worker] = [point for point in POINTS[:10] if own.claim([point])]

    threads = [threading.Thread(target=claim_all, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(point for points in got.values() for point in points) == sorted(POINTS[:10])


def test_claims_of_a_process_that_died_are_given_up():
    storage = open_storage(None)
    dead, alive = Study(SPACE, "s", storage, worker="dead"), Study(SPACE, "s", storage, worker="alive")
    dead.claim(POINTS[:3])
    dead.finish(ok(POINTS[0]))
    assert dead.owns_finals()
    assert not alive.owns_finals()
    assert alive.others_work()
    release_everywhere(storage, "dead")
    assert not alive.others_work()
    assert alive.claim(POINTS[:3]) == list(POINTS[1:3])
    assert alive.owns_finals()


def test_claims_lapse(monkeypatch):
    storage = open_storage(None)
    dead, alive = Study(SPACE, "s", storage, worker="dead"), Study(SPACE, "s", storage, worker="alive")
    dead.claim(POINTS[:2])
    dead.owns_finals()
    monkeypatch.setattr(study, "LEASE_SECONDS", -1.0)
    assert not alive.others_work()
    assert alive.claim(POINTS[:2])[:1] == [POINTS[0]]
    assert alive.owns_finals()


def test_a_claim_that_lapsed_and_was_given_up_is_not_finished():
    storage = open_storage(None)
    slow, other = Study(SPACE, "s", storage, worker="slow"), Study(SPACE, "s", storage, worker="other")
    slow.claim(POINTS[:1])
    release_everywhere(storage, "slow")
    slow.finish(ok(POINTS[0]))
    assert other.known() == []


def test_finals_have_one_owner_until_they_are_released():
    storage = open_storage(None)
    a, b = Study(SPACE, "s", storage, worker="a"), Study(SPACE, "s", storage, worker="b")
    assert [a.owns_finals(), b.owns_finals()] == [True, False]
    a.release_finals()
    assert b.owns_finals()


def test_the_outcome_is_seen_by_all():
    storage = open_storage(None)
    a, b = Study(SPACE, "s", storage, worker="a"), Study(SPACE, "s", storage, worker="b")
    assert b.outcome is None
    a.publish({"run": "r", "complete": True})
    assert b.outcome == {"run": "r", "complete": True}


def test_the_sampler_keeps_away_from_what_cannot_be_used():
    own = Study(SPACE, "s", seed=1)
    axis = list(SPACE.axes).index("threads")
    for point in POINTS:
        own.claim([point])
        usable = point[axis] != 256
        own.finish(ok(point, 1.0 + 0.01 * point[0]) if usable else Measurement(point, "launch"))
    proposals = own.propose(60)
    assert sum(point[axis] == 256 for point in proposals) < 10


def test_nothing_is_proposed_before_there_is_a_model():
    assert Study(SPACE, "s").propose(3) == []


def test_what_the_storage_has_lost_is_restored_from_the_record(tmp_path):
    kept = record.Record(tmp_path)
    kept.add("s", TABLE.workload, SPACE, "search", ok(POINTS[2], 0.7))
    kept.add("s", TABLE.workload, SPACE, "search", Measurement(POINTS[3], "hang", error="it said nothing"))
    kept.add("s", TABLE.workload, SPACE, "finals", ok(POINTS[4]))
    kept.add("other", TABLE.workload, SPACE, "search", ok(POINTS[5]))
    with (tmp_path / record.NAME).open("ab") as file:
        file.write(b'{"study": "s", "sta\n\xff\n')
    own = Study(SPACE, "s")
    own.restore(kept.read("s"))
    assert {known.point: known.status for known in own.known()} == {POINTS[2]: "ok", POINTS[3]: "hang"}
    assert Search(own).ranked()[0].ratio == 0.7


def test_a_record_that_cannot_be_written_is_done_without(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = record.Record(tmp_path / "file" / "folder")
    for _ in range(3):
        kept.add("s", TABLE.workload, SPACE, "search", ok(POINTS[0]))
    assert len([message for message in caplog.messages if "not recorded" in message]) == 1


# ---- storage URLs ----


@pytest.mark.parametrize(
    "url", ["sqlite:///tuning.db", "redis://localhost", "postgres://x", "file:///etc/passwd", "journal:relative", ""]
)
def test_other_storages_are_refused(url):
    with pytest.raises(StorageError, match=r"journal:///path"):
        open_storage(url)


@pytest.mark.parametrize(("scheme", "driver"), [("postgresql", "psycopg"), ("mysql", "pymysql")])
def test_a_database_without_a_driver_gets_the_one_of_our_extra(scheme, driver, monkeypatch):
    opened = []
    monkeypatch.setattr(study, "get_storage", opened.append)
    open_storage(f"{scheme}://host/studies")
    open_storage(f"{scheme}+other://host/studies")
    assert opened == [f"{scheme}+{driver}://host/studies", f"{scheme}+other://host/studies"]


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "mysql+pymysql", "postgresql+nonsense"])
def test_passwords_are_never_told(scheme, caplog, capfd):
    with pytest.raises(StorageError) as error:
        open_storage(f"{scheme}://tuner:s3cret@127.0.0.1:1/studies")
    cause = error.value.__cause__ or ""
    assert "s3cret" not in f"{error.value} {cause} {caplog.text} {''.join(capfd.readouterr())}"
    assert error.value.__suppress_context__


def test_shown_leaves_secrets_out():
    assert shown("mysql+pymysql://u:p%40ss@db/x?ssl_key=k#f") == "mysql+pymysql://db/x"


def test_a_journal_is_what_optuna_and_its_dashboard_open(tmp_path):
    own = Study(SPACE, "name", open_storage(f"journal://{tmp_path}/s.journal"))
    own.claim(POINTS[:1])
    own.finish(ok(POINTS[0], 0.75))
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "s.journal"))
    loaded = optuna.load_study(study_name="name", storage=optuna.storages.JournalStorage(backend))
    assert loaded.best_value == 0.75
    assert timedelta(0) <= loaded.best_trial.duration
