"""Whole tuning runs: several processes on one study, deaths, Ctrl-C, going on, the command line, what is kept."""

import collections
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from synthetic import CAUSAL, small_table, synthetic_table

from cuflash import cli, cubins, tuned
from cuflash.backward_plan import choose_backward
from cuflash.device import known_device
from cuflash.tuning import campaign, command, record, session, space, study
from cuflash.tuning.processes import Machine, Worker
from cuflash.tuning.session import GpuTarget, Session, seeds_for
from cuflash.tuning.space import Space
from cuflash.tuning.table import read_table, write_table
from cuflash.tuning.workload import Workload, preset, with_gradients
from cuflash.winner import Measurement, Winner, key_of

HOST_WORKER = Path(__file__).with_name("host_worker.py")
WORKLOADS = {
    "small": Workload("float32", 1, (2, 2), (512, 512), (256, 256)),
    "other": Workload("float32", 1, (4, 4), (1024, 1024), (256, 256), CAUSAL),
    "third": Workload("float32", 2, (4, 4), (1024, 1024), (208, 208)),
}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Files of made-up sweeps."""
    folder = tmp_path_factory.mktemp("sweeps")
    for name, workload in WORKLOADS.items():
        table = synthetic_table(name, workload, "simt")
        write_table(folder / f"{name}.json.gz", workload, table.space, table.measurements)
    return [str(folder / f"{name}.json.gz") for name in WORKLOADS]


@pytest.fixture
def journal(tmp_path):
    return f"journal://{tmp_path}/studies.journal"


def plan_of(sweeps, journal=None, devices=1, pace=0.0, **options):
    workloads = [read_table(Path(path)).workload for path in sweeps]
    return campaign.Plan(workloads, devices=tuple(range(devices)), storage=journal, replay=sweeps, pace=pace, **options)


def trials_of(journal):
    return trials_in(study.open_storage(journal))


def trials_in(storage):
    """Every trial in a storage, by study."""
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    return {found.study_name: found.get_trials() for found in studies}


def assert_all_measured_once(trials):
    for name, found in trials.items():
        assert not [trial for trial in found if trial.state == TrialState.RUNNING], name
        finished = [tuple(trial.params.values()) for trial in found if trial.state in study.FINISHED]
        assert len(finished) == len(set(finished)), name


TOGETHER = """
import os, pathlib, sys, time
from cuflash.tuning import campaign, worker
ready = pathlib.Path(sys.argv[1])
(ready / str(os.getpid())).touch()
while len(list(ready.iterdir())) < 2:
    time.sleep(0.01)
worker.main({"tune": campaign.answer})
"""


def test_two_processes_share_the_work_of_one_study(sweeps, journal, tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    ready.mkdir()
    monkeypatch.setattr(campaign, "COMMAND", (sys.executable, "-c", TOGETHER, str(ready)))  # none has a start
    results = list(campaign.carry_out(plan_of(sweeps, journal, devices=2, pace=0.05)))
    assert {result.workload for result in results} == set(WORKLOADS.values())
    trials = trials_of(journal)
    assert_all_measured_once(trials)
    by_worker = collections.Counter(
        trial.user_attrs[study.WORKER].rpartition("-")[2]
        for found in trials.values()
        for trial in found
        if trial.state in study.FINISHED
    )
    points = sum(len(read_table(Path(path)).space.points) for path in sweeps)
    assert sum(by_worker.values()) == points
    assert min(by_worker["0"], by_worker["1"]) > 0.2 * points
    for result in results:
        ratios = read_table(Path(sweeps[list(WORKLOADS.values()).index(result.workload)])).ratios
        assert result.evaluations == len(ratios)
        assert 1 / result.gain == pytest.approx(min(ratios.values()), rel=0.03)


def test_a_process_that_is_killed_loses_nothing(sweeps, journal, monkeypatch):
    started = []

    class Watched(Worker):
        def start(self):
            super().start()
            started.append(self._process)

    monkeypatch.setattr(campaign, "Worker", Watched)

    def kill():
        while len(started) < 2 or not started[0].pid or not Path(journal.removeprefix("journal://")).exists():
            time.sleep(0.01)
        path = Path(journal.removeprefix("journal://"))
        while path.read_bytes().count(b'"worker"') < 30:  # in the middle of its work
            time.sleep(0.01)
        started[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    results = list(campaign.carry_out(plan_of(sweeps, journal, devices=2, pace=0.1)))
    killer.join()
    assert started[0].returncode == -9
    assert len(started) == 3  # it was started again
    assert {result.workload for result in results} == set(WORKLOADS.values())
    assert all(result.state in ("tuned", "default") for result in results)
    trials = trials_of(journal)
    assert_all_measured_once(trials)
    points = sum(len(read_table(Path(path)).space.points) for path in sweeps)
    assert sum(trial.state in study.FINISHED for found in trials.values() for trial in found) == points


def test_processes_that_cannot_work_are_an_error(sweeps, tmp_path):
    bad = plan_of(sweeps, f"journal://{tmp_path}/s.journal", devices=2)._replace(replay=(str(tmp_path / "none"),))
    with pytest.raises(campaign.TuningError, match=r"GPU 0: .*none"):
        list(campaign.carry_out(bad))


def test_interrupted_it_keeps_what_was_found_and_goes_on_later(sweeps, journal):
    seen = []

    def interrupt(event):
        seen.append(event)
        if len(seen) == 20:
            raise KeyboardInterrupt

    first = list(campaign.carry_out(plan_of(sweeps, journal), interrupt))
    assert [(result.state, "interrupted" in result.note) for result in first] == [("tuned", True)]
    measured = first[0].evaluations
    assert 20 <= measured < len(read_table(Path(sweeps[0])).space.points)
    seen.clear()
    again = list(campaign.carry_out(plan_of(sweeps, journal), lambda event: seen.append(event)))
    assert len(again) == 3
    assert again[0].evaluations == len(read_table(Path(sweeps[0])).space.points)
    assert sum(event.workload == again[0].workload for event in seen) == again[0].evaluations - measured
    assert_all_measured_once(trials_of(journal))


def test_ctrl_c_ends_all_processes_of_a_run_and_keeps_what_was_found(sweeps, journal):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background process ignores Ctrl-C
        "from cuflash.tuning.campaign import Plan, carry_out\n"
        "from cuflash.tuning.table import read_table\n"
        "from pathlib import Path\n"
        "sweeps = sys.argv[2:]\n"
        "workloads = [read_table(Path(path)).workload for path in sweeps]\n"
        "plan = Plan(workloads, devices=(0, 1), storage=sys.argv[1], replay=sweeps, pace=0.3)\n"
        "for result in carry_out(plan, lambda event: print('event', flush=True)):\n"
        "    print('result', result.state, result.note, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, journal, *sweeps], stdout=subprocess.PIPE, text=True) as run:
        lines = [run.stdout.readline() for _ in range(20)]
        run.send_signal(signal.SIGINT)
        lines += run.stdout.readlines()
    assert run.returncode == 0
    results = [line for line in lines if line.startswith("result")]
    assert results, "both processes ended without one"
    for line in results:
        assert re.match("result (tuned|default) interrupted", line)  # after so few, the default may still be the best
    trials = trials_of(journal)
    assert_all_measured_once(trials)
    assert sum(trial.state in study.FINISHED for found in trials.values() for trial in found) >= 20


def test_a_complete_run_is_not_repeated(sweeps, journal):
    first = list(campaign.carry_out(plan_of(sweeps, journal)))
    seen = []
    again = list(campaign.carry_out(plan_of(sweeps, journal), seen.append))
    assert seen == []
    assert [result.state for result in again] == ["known"] * 3
    assert [result.config for result in again] == [result.config for result in first]


class Clock:
    """Time that passes only where one sleeps, however busy the machine is."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


def test_a_budget_is_kept_and_shared_out(sweeps, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr("cuflash.tuning.table.time", clock)
    results = list(campaign.carry_out(plan_of(sweeps, pace=0.3, seconds=2.0)))
    assert len(results) == 3
    assert clock.seconds < 2.0 + 3 * 0.3  # a batch that was begun is ended
    assert all(16 <= result.evaluations < 60 for result in results)


# ---- a GPU, played by the CPU ----


@pytest.fixture
def host_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(Worker, "command", (sys.executable, str(HOST_WORKER)))
    monkeypatch.setattr(campaign, "device_info", lambda index: known_device("sm_90"))
    monkeypatch.setattr(campaign.tempfile, "gettempdir", lambda: str(tmp_path))  # other tests tune "GPU 0" meanwhile
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


TINY = Workload("float64", 1, (2, 1), (40, 50), (16, 16), CAUSAL)


def test_a_winner_is_kept_where_calls_find_it(host_gpu):
    (result,) = campaign.tune([TINY], budget="60s", compilers=1)
    assert result.state == "tuned", result.note
    assert result.config.b_c == 16
    assert result.gain == pytest.approx(1.032 / 1.016)
    found = tuned.candidates(key_of(TINY.problem(), known_device("sm_90")))[0]
    assert found.source == "tuned"
    assert found.stale is None
    assert found.winner.config == result.config
    assert found.winner.measurement.time_us == pytest.approx(1016)
    assert found.winner.measurement.default_time_us == pytest.approx(1032)
    lines = [json.loads(line) for line in (record.folder() / record.NAME).read_text().splitlines()]
    assert {line["stage"] for line in lines} == {"search", "finals"}
    assert len(list(record.folder().glob("H200-*.journal"))) == 1
    (again,) = campaign.tune([TINY], budget="60s", compilers=1)
    assert again.state == "known"


def test_a_new_cache_that_tuning_makes_keeps_compiled_kernels_too(host_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "new"))
    campaign.tune([TINY], budget="60s", compilers=1)
    assert cubins.why_untrusted(tmp_path / "new") is None
    assert (tmp_path / "new" / "measurements").is_dir()


def test_a_default_that_nothing_beats_is_kept_too(host_gpu, monkeypatch):
    monkeypatch.setenv("FAULTS", json.dumps({"16": "wrong"}))
    (result,) = campaign.tune([TINY], budget="60s", compilers=1)
    assert result.state == "default"
    assert result.gain == 1
    found = tuned.candidates(key_of(TINY.problem(), known_device("sm_90")))[0]
    assert found.winner.config == result.config


def test_a_default_that_is_the_only_point_is_kept_too(host_gpu, monkeypatch):
    only = Space.legal(TINY.problem(), known_device("sm_90")).default
    axes = {axis: (getattr(only, axis),) for axis in space.AXES["forward_simt"]}
    monkeypatch.setattr(space, "AXES", {**space.AXES, "forward_simt": axes})
    (result,) = campaign.tune([TINY], budget="60s", compilers=1)
    assert (result.state, result.evaluations) == ("default", 1)
    assert result.time_us == result.default_us > 0
    found = tuned.candidates(key_of(TINY.problem(), known_device("sm_90")))[0]
    assert (found.source, found.winner.config) == ("tuned", only)


def test_a_workload_whose_default_fails_does_not_end_the_run(host_gpu, monkeypatch):
    monkeypatch.setenv("FAULTS", json.dumps({"64": "wrong"}))
    other = Workload("float32", 1, (2, 2), (40, 40), (256, 256))
    with Machine(0, 1) as machine:
        results = list(Session(GpuTarget(machine)).run([other._replace(dtype="float64"), TINY], 30))
    assert len(results) == 2


def test_one_gpu_has_one_tuner(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign.tempfile, "gettempdir", lambda: str(tmp_path))
    with campaign.only_tuner_of(0):
        with campaign.only_tuner_of(1):
            pass
        with pytest.raises(campaign.TuningError, match="GPU 0 is being tuned"), campaign.only_tuner_of(0):
            pass
    with campaign.only_tuner_of(0):
        pass


def test_two_gpus_are_two_though_each_process_sees_one(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-6cb0, GPU-a511")
    with campaign.only_tuner_of(1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-6cb0")
        with campaign.only_tuner_of(0):
            pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a511")
        with pytest.raises(campaign.TuningError, match="GPU 0 is being tuned"), campaign.only_tuner_of(0):
            pass


def test_gpus_of_two_models_do_not_share_a_study(monkeypatch):
    monkeypatch.setattr(campaign, "device_info", lambda index: known_device(("sm_90", "sm_80")[index]))
    with pytest.raises(ValueError, match="must be of one model, got A100 and H200"):
        campaign.tune([TINY], devices=[0, 1])


def test_gradients_are_tuned_and_their_winner_is_kept_where_calls_find_it(host_gpu, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    gradients = TINY._replace(head_dim=(128, 128), backward=True)
    (result,) = campaign.tune([gradients], budget="60s", compilers=1)
    assert result.state == "tuned", result.note
    device, problem = known_device("sm_90"), gradients.problem()
    (found,) = tuned.candidates(key_of(problem, device))
    assert found.stale is None
    assert found.winner.config == result.config
    assert (found.winner.kernel, result.config.b_c) == ("backward_simt", 8)
    assert choose_backward(problem, device).config == found.winner.config
    assert cli.main(["cache", "list"]) == 0
    assert "float64 d128x128 right backward" in capsys.readouterr().out


QUOTAS = {
    "version 2": ({"cpu.max": "1600000 100000"}, 16),
    "version 2, no limit": ({"cpu.max": "max 100000"}, math.inf),
    "version 1": ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
    "version 1, no limit": ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    "none": ({}, math.inf),
    "nonsense": ({"cpu.max": "many"}, math.inf),
}


@pytest.mark.parametrize(("files", "quota"), QUOTAS.values(), ids=QUOTAS)
def test_quota_of_a_container_is_read(files, quota, tmp_path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert campaign.processor_quota(tmp_path) == quota


def test_a_processor_is_left_to_the_process_with_the_gpu(monkeypatch):
    monkeypatch.setattr(campaign, "available_processors", lambda: 16)
    assert [campaign.compilers_of_each(None, devices) for devices in (1, 2, 16)] == [15, 7, 1]
    assert campaign.compilers_of_each(8, 2) == 4


def test_seeds_are_the_winners_of_the_most_similar_calls(monkeypatch):
    def winner(workload, device="sm_90", **fields):
        space = Space.legal(workload.problem(), known_device(device), "wgmma")
        point = dict(zip(space.axes, space.points[0], strict=True)) | fields
        config = space.config(tuple(point.values()))
        key = key_of(workload.problem(), known_device(device))
        timing = Measurement(1.0, 1.0, 1, "2026-01-01T00:00:00Z", {})
        return tuned.Found(Winner(key, config, tuned.current_provenance("forward_wgmma"), timing), "tuned", None)

    wanted = Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), CAUSAL)
    far = winner(wanted._replace(head_dim=(64, 64), causal=None), b_c=96)
    near = winner(wanted._replace(seqlen=(8192, 8192), batch=2), b_c=112)
    monkeypatch.setattr(tuned, "winners", lambda: iter([far, near]))
    space = Space.legal(wanted.problem(), known_device("sm_90"))
    seeds = seeds_for(space, key_of(wanted.problem(), known_device("sm_90")))
    assert [space.config(point).b_c for point in seeds] == [112, 96]


# ---- the command line ----


def test_command_line_ends_with_a_table(sweeps, capsys):
    assert cli.main(["tune", "--replay", *sweeps, "--budget", "60s"]) == 0
    out = capsys.readouterr().out
    for heading in ("workload", "default", "winner", "gain", "evaluations"):
        assert heading in out
    assert "3 of 3 workloads" in out


def test_command_line_reports_on_a_journal(sweeps, journal, tmp_path, capsys):
    list(campaign.carry_out(plan_of(sweeps, journal)))
    assert cli.main(["tune", "report", journal.removeprefix("journal://"), "-o", str(tmp_path / "pictures")]) == 0
    assert "unusable" in capsys.readouterr().out
    pictures = list((tmp_path / "pictures").glob("*.png"))
    assert len(pictures) == 3
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tuning needs a GPU"),
        (["--replay", "missing.json.gz"], "missing.json.gz"),
        (["--replay", __file__], "no sweep that can be read"),
        (["report", "missing.journal"], "there is no such file"),
    ],
)
def test_command_line_refuses(arguments, message, capsys):
    if not arguments and cli.machine.why_no_gpu() is None:
        pytest.skip("there is a GPU")
    assert cli.main(["tune", *arguments]) == cli.UNUSABLE
    assert message in capsys.readouterr().err


def workloads_of(*arguments):
    return command.workloads_of(cli.build_parser().parse_args(["tune", *arguments]))


def test_shapes_make_one_workload():
    words = "--heads 32 8 --seqlen 4096 --head-dim 128 64 --batch 2 --causal --window 100 none --bias --unaligned"
    (workload,) = workloads_of(*words.split())
    expected = Workload(
        "bfloat16", 2, (32, 8), (4096, 4096), (128, 64), CAUSAL, (100, None), bias="float32", aligned=False
    )
    assert workload == expected
    assert not workload.problem().spec.aligned


def test_gradients_are_added_where_there_are_any():
    words = "--heads 8 --seqlen 100 --head-dim 64 --causal --backward"
    forward, backward = workloads_of(*words.split())
    assert (forward.backward, backward) == (False, forward._replace(backward=True))
    assert str(backward) == "bfloat16 1x8x100x64 causal backward"
    assert workloads_of("--backward") == with_gradients(preset("llm"))
    assert all(workload.seqlen[0] > 1 for workload in with_gradients(preset("llm")) if workload.backward)


def test_presets_are_the_default():
    assert workloads_of() == preset("llm")
    lists = [preset(name) for name in ("llm", "vit", "long", "papers")]
    assert workloads_of("--preset", "all") == list(dict.fromkeys(itertools.chain(*lists)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset llm --heads 8 --seqlen 8 --head-dim 8", "preset and shapes"),
        ("--heads 8", "shapes need --seqlen and --head-dim too"),
        ("--heads 8 --seqlen 8 --head-dim 8 --bias-of-keys", "give --bias too"),
        ("--causal", "need --heads"),
        ("--like q.npy k.npy v.npy --batch 4", "--like reads it from the files"),
        ("--replay sweep.json.gz --backward", "a replay is of what was recorded"),
        ("--heads 8 3 --seqlen 8 --head-dim 8", "multiple"),
        ("--heads 8 8 8 --seqlen 8 --head-dim 8", "one number or two"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        workloads_of(*words.split())


@pytest.mark.parametrize("text", ["0,x", "", "1,1", "-1"])
def test_devices_are_numbers(text):
    options = cli.build_parser().parse_args(["tune", f"--devices={text}"])
    with pytest.raises(ValueError, match="devices must be"):
        command.devices_of(options)


@pytest.mark.parametrize("budget", ["5", "m", "0s", "-1s", "5 m", 0])
def test_budgets_have_a_unit_and_are_positive(budget):
    with pytest.raises(ValueError, match="budget must be"):
        session.read_budget(budget)


def test_compilers_and_gpu_processes_do_not_load_optuna():
    code = "import cuflash.tuning.worker, cuflash.tuning, sys; assert 'optuna' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_small_table_reads_back_as_it_was_written(backward, tmp_path):
    table = small_table(backward)
    write_table(tmp_path / "t.json.gz", table.workload, table.space, table.measurements)
    again = read_table(tmp_path / "t.json.gz")
    assert again.space.points == table.space.points
    assert again.space.default == table.space.default
    assert again.workload == table.workload
    assert list(again.ratios.values()) == pytest.approx(list(table.ratios.values()), rel=1e-4)
