"""Studies in a real PostgreSQL, which the tests start for themselves. `make test-storage` runs them."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from test_tuning_campaign import WORKLOADS, assert_all_measured_once, plan_of, sweeps, trials_in

from cuflash.tuning import campaign, study
from cuflash.tuning.study import StorageError, Study, open_storage, opened
from cuflash.tuning.table import read_table

__all__ = ["sweeps"]  # a fixture
START_SECONDS = 60


def find(program):
    """A program of PostgreSQL's server; Debian keeps them out of PATH."""
    candidates = [shutil.which(program), *sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), reverse=True)]
    return next((str(path) for path in candidates if path is not None), None)


@pytest.fixture(scope="module")
def server(request):
    """The URL of a database on a server of its own, with a password."""
    if not request.config.getoption("--postgresql"):
        pytest.skip("needs a PostgreSQL server: make test-storage")
    initdb, postgres = find("initdb"), find("postgres")
    if initdb is None or postgres is None:
        pytest.fail("PostgreSQL's server is not installed (Debian, Ubuntu: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="cuflash-postgresql-", dir="/tmp"))
    as_user = {}
    if os.geteuid() == 0:  # it refuses to run as root
        as_user = {"user": "postgres", "group": "postgres"}
        shutil.chown(folder, **as_user)
    password = folder / "password"
    password.write_text("s3cret")
    password.chmod(0o644)
    options = ["--username=tuner", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync", "--encoding=UTF8"]
    quiet = {"stdout": subprocess.DEVNULL, "cwd": folder, **as_user}
    subprocess.run([initdb, "-D", folder / "data", *options], check=True, timeout=START_SECONDS, **quiet)
    running = subprocess.Popen(
        [postgres, "-D", folder / "data", "-k", folder, "-h", "", "-F"], stderr=subprocess.DEVNULL, **quiet
    )
    try:
        end = time.monotonic() + START_SECONDS
        while not (folder / ".s.PGSQL.5432").exists():
            assert running.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.05)
        time.sleep(0.5)
        yield f"postgresql+psycopg://tuner:s3cret@/postgres?host={folder}"
    finally:
        running.send_signal(signal.SIGINT)  # end without waiting for clients
        running.wait(START_SECONDS)
        shutil.rmtree(folder)


def test_two_processes_share_a_study(server, sweeps):
    plan = plan_of(sweeps[:1], server, devices=2, pace=0.05)
    (result,) = campaign.carry_out(plan)
    assert result.workload == WORKLOADS["small"]
    with opened(server) as storage:
        trials = trials_in(storage)
    assert_all_measured_once(trials)
    finished = [trial for found in trials.values() for trial in found if trial.state in study.FINISHED]
    assert len(finished) == len(read_table(Path(sweeps[0])).space.points)
    assert len({trial.user_attrs[study.WORKER] for trial in finished}) == 2
    (again,) = campaign.carry_out(plan)
    assert again.state == "known"


def test_claims_never_overlap(server, sweeps):
    space = read_table(Path(sweeps[0])).space
    with opened(server) as storage:
        Study(space, "claims", storage, worker="first")
    got = {}

    def claim_all(worker):
        with opened(server) as storage:
            own = Study(space, "claims", storage, worker=worker)
            got[worker] = [point for point in space.points[:8] if own.claim([point])]

    threads = [threading.Thread(target=claim_all, args=(f"w{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(point for points in got.values() for point in points) == sorted(space.points[:8])


OPEN_WHEN_TOLD = """
import sys
import sqlalchemy
from cuflash.tuning.study import opened
print("ready", flush=True)
sys.stdin.readline()
with opened(sys.argv[1]):
    pass
"""


def test_several_processes_open_an_empty_database_at_once(server):
    """Each begins to make the same tables."""
    import psycopg

    with psycopg.connect(server.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE DATABASE empty")
    command = [sys.executable, "-c", OPEN_WHEN_TOLD, server.replace("/postgres?", "/empty?")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4


def test_a_wrong_password_is_refused_and_not_told(server):
    with pytest.raises(StorageError) as error:
        open_storage(server.replace("s3cret", "guessed"))
    assert "guessed" not in str(error.value)
