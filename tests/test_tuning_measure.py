"""Measuring candidates in processes that hang, crash and lie: `cuflash.tuning.measure`, `processes` and `worker`."""

import json
import signal
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from host_worker import HostGpu

from cuflash.arrays import DTYPE_OF
from cuflash.device import known_device
from cuflash.tuning import checks, worker
from cuflash.tuning.measure import GpuBackend, MeasureError, Measurement, at_worst
from cuflash.tuning.processes import Died, Machine, Worker
from cuflash.tuning.space import Space
from cuflash.tuning.workload import Workload

HOST_WORKER = Path(__file__).with_name("host_worker.py")
WORKLOAD = Workload("float32", 1, (2, 1), (400, 500), (16, 16), "bottom-right")
DEFAULT_B_C = 64


@pytest.fixture
def faults(monkeypatch):
    """Use workers whose GPU is the CPU, with the faults that are set, by b_c."""
    monkeypatch.setattr(Worker, "command", (sys.executable, str(HOST_WORKER)))

    def set_faults(**by_b_c):
        monkeypatch.setenv("FAULTS", json.dumps({name.removeprefix("b"): fault for name, fault in by_b_c.items()}))

    return set_faults


def space_of(*others):
    """The default, of b_c = 64, and others."""
    space = Space.legal(WORKLOAD.problem(), known_device("sm_90"), "simt")
    assert space.default.b_c == DEFAULT_B_C
    default = space.points[0]
    axis = list(space.axes).index("b_c")
    points = [default, *((*default[:axis], b_c, *default[axis + 1 :]) for b_c in others)]
    return Space(space.problem, space.device, space.default, {**space.axes, "b_c": (*others, DEFAULT_B_C)}, points)


def measured(space, machine, workload=WORKLOAD):
    """What came of every point, by b_c."""
    backend = GpuBackend(machine, workload, space)
    for point in space.points:
        backend.submit(point)
    found = []
    while len(found) < len(space.points):
        found += backend.collect()
    return {space.config(measurement.point).b_c: measurement for measurement in found}


BACKWARD = Workload("float32", 1, (2, 1), (400, 500), (16, 16), "bottom-right", backward=True)
BACKWARD_FAULTS = {"b16": "wrong", "b48": "overrun", "b80": "overrun of the workspace", "b96": "wrong at full size"}


def test_gradients_are_checked_and_timed_too(faults, machine):
    faults(**BACKWARD_FAULTS)
    space = Space.legal(BACKWARD.problem(), known_device("sm_90"), "simt")
    axis, default = list(space.axes).index("b_c"), space.points[0]
    columns = [int(name.removeprefix("b")) for name in BACKWARD_FAULTS] + [112]
    points = [default, *((*default[:axis], b_c, *default[axis + 1 :]) for b_c in columns)]
    axes = {**space.axes, "b_c": (*columns, space.default.b_c)}
    found = measured(Space(space.problem, space.device, space.default, axes, points), machine, BACKWARD)
    assert {b_c: m.status for b_c, m in found.items()} == {
        space.default.b_c: "ok",
        **dict.fromkeys(columns[:-1], "wrong"),
        112: "ok",
    }
    assert [found[b_c].error.partition(" an ")[0] for b_c in columns[:2]] == [
        "rows of dq from 0 on have",
        "it writes beyond dq",
    ]
    assert found[80].error == "it writes beyond workspace"
    assert found[96].error.startswith("at full size dq differs from the default's by")


@pytest.fixture
def machine():
    with Machine(0, 1) as machine:
        yield machine


BAD = {
    "does not compile": "compile",
    "kills the compiler": "compile",
    "refused": "launch",
    "wrong": "wrong",
    "wrong at full size": "wrong",
    "unwritten": "wrong",
    "overrun": "wrong",
    "sticky": "crash",
    "dies": "crash",
    "hang": "hang",
    "hang later": "hang",
}


@pytest.fixture(scope="module")
def with_bad_ones():
    """What came of a batch with every kind of bad candidate: by fault, and of the good ones among them."""
    b_c_of = {fault: 128 + 16 * i for i, fault in enumerate(BAD)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "command", (sys.executable, str(HOST_WORKER)))
        patch.setenv("FAULTS", json.dumps({str(b_c): fault for fault, b_c in b_c_of.items()}))
        with Machine(0, 1) as machine:
            found = measured(space_of(16, *b_c_of.values(), 32), machine)
    return {fault: found.pop(b_c) for fault, b_c in b_c_of.items()}, found


@pytest.mark.parametrize(("fault", "status"), BAD.items())
def test_a_bad_candidate_is_marked(fault, status, with_bad_ones):
    bad, _ = with_bad_ones
    assert bad[fault].status == status
    assert bad[fault].ratio == np.inf
    assert bad[fault].error


def test_the_others_are_timed_against_the_default(with_bad_ones):
    _, good = with_bad_ones
    assert {b_c: m.status for b_c, m in good.items()} == {16: "ok", 32: "ok", 64: "ok"}
    assert good[16].ratio == pytest.approx(1.016 / 1.064)
    assert good[32].ratio == pytest.approx(1.032 / 1.064)
    assert good[16].registers == 100
    assert good[16].compile_seconds == 1.5


def test_a_worker_that_says_nothing_is_killed(faults, machine, monkeypatch):
    faults(b32="silent")
    monkeypatch.setattr("cuflash.tuning.measure.SILENCE_SECONDS", -3.0)  # and twice 3 s
    found = measured(space_of(16, 32), machine)
    assert found[32].status == "hang"
    assert found[16].status == "ok"


@pytest.mark.parametrize("fault", ["wrong", "dies"])
def test_a_default_that_fails_ends_the_measurement(fault, faults, machine):
    faults(b64=fault)
    with pytest.raises(MeasureError, match="default configuration cannot be measured"):
        measured(space_of(16), machine)


def test_a_gpu_process_that_never_starts_is_an_error(monkeypatch):
    monkeypatch.setattr(Worker, "command", (sys.executable, "-c", "raise SystemExit('no GPU here')"))
    with Machine(0, 1) as machine, pytest.raises(Died, match="no GPU here"):
        machine.device()


def test_the_same_binary_is_timed_once(faults, machine):
    faults()
    workload = Workload("bfloat16", 1, (2, 1), (400, 500), (64, 64))
    full = Space.legal(workload.problem(), known_device("sm_90"))
    sections = [full.points[0], *((*full.points[0][:-1], mb) for mb in (32, 64))]  # without a mask all are the same
    space = Space(full.problem, full.device, full.default, full.axes, sections)
    backend = GpuBackend(machine, workload, space)
    timed = []
    real = machine.gpu.ask
    machine.gpu.ask = lambda request, silence: timed.extend(request.get("candidates", ())) or real(request, silence)
    for point in space.points:
        backend.submit(point)
    found = []
    while len(found) < 3:
        found += backend.collect()
    assert len(timed) == 1
    assert {m.point for m in found} == set(sections)
    assert len({tuple(m.times) for m in found}) == 1


def test_finals_time_everyone_as_often(faults, machine):
    faults()
    space = space_of(16, 32)
    found = GpuBackend(machine, WORKLOAD, space).finals(space.points[1:], 9)
    assert [m.point for m in found] == list(space.points[1:])
    assert {len(m.times) for m in found} == {3}  # of one of three places
    assert {len(m.anchor_times) for m in found} == {3}


def test_luck_in_one_place_of_memory_decides_no_finals(faults, machine):
    faults(b16="lucky")
    space = space_of(16, 32)
    lucky, other = GpuBackend(machine, WORKLOAD, space).finals(space.points[1:], 9)
    assert min(lucky.times) == pytest.approx(1.016)
    assert lucky.ratio == pytest.approx(1.016 / 1.064)
    assert other.ratio == pytest.approx(1.032 / 1.064)


def test_a_finalist_that_fails_in_one_place_of_memory_is_not_run_in_the_next(faults, machine):
    faults(b16="hang elsewhere", b48="wrong")
    space = space_of(16, 32, 48)
    asked = []
    real = machine.gpu.ask
    machine.gpu.ask = lambda request, silence: asked.append(request) or real(request, silence)
    hung, good, wrong = GpuBackend(machine, WORKLOAD, space).finals(space.points[1:], 9)
    assert [m.status for m in (hung, good, wrong)] == ["hang", "ok", "wrong"]
    assert good.ratio == pytest.approx(1.032 / 1.064)
    assert len(good.times) == len(good.anchor_times) == 3
    runs = [(request["place"], len(request["candidates"])) for request in asked if request["do"] == "measure"]
    assert runs == [(0, 3), (1, 2), (1, 1), (2, 1)]


def test_the_default_among_finalists_is_what_it_is_compared_with(faults, machine):
    faults()
    space = space_of(16)
    default, other = GpuBackend(machine, WORKLOAD, space).finals(space.points, 10)
    assert default.ratio == 1.0
    assert default.times == default.anchor_times == other.anchor_times
    assert len(default.times) == 4  # of one place


def test_arrays_leave_one_place_of_memory_before_they_are_made_in_the_next():
    class Counting(HostGpu):
        held = most = 0

        def allocate(self, size):
            memory = super().allocate(size)
            self.held += size
            self.most = max(self.most, self.held)
            weakref.finalize(memory, self.forget, size)
            return memory

        def forget(self, size):
            self.held -= size

    gpu = Counting(0)
    held = []
    for place in (0, 2, 2, 1, 0):
        gpu.load(WORKLOAD, place=place)
        held.append(gpu.held)
    moved = 1 + 2  # q stays, k moves by one step and v by two
    assert [size - held[0] for size in held] == [moved * place * worker.PLACE_BYTES for place in (0, 2, 2, 1, 0)]
    assert gpu.most == held[1]


def test_a_finalist_counts_by_the_place_that_suits_it_least():
    usual = Measurement((), "ok", 0.8, [0.8, 0.81, 0.79], [1.0, 1.01, 0.99])
    worst = Measurement((), "ok", 0.9, [1.8, 1.82, 1.78], [2.0, 2.02, 1.98])
    whole = at_worst([usual, worst, usual])
    assert whole.ratio == 0.9
    assert whole.times == pytest.approx([0.9, 0.91, 0.89])  # as long as the default takes in the first place
    assert whole.anchor_times == pytest.approx(usual.anchor_times)
    failed = Measurement((), "hang", error="no answer")
    assert at_worst([usual, failed, usual]) == failed


def test_what_was_not_begun_is_not_compiled_after_abandon(faults):
    faults()
    with Machine(0, 1) as machine:
        space = space_of(16, 32)
        backend = GpuBackend(machine, WORKLOAD, space)
        for point in space.points:
            backend.submit(point)
        backend.abandon()
        assert backend.finals(space.points[1:2], 3)[0].status == "ok"  # asked for again, it is compiled again


def test_processes_end_with_the_machine(faults):
    faults()
    with Machine(0, 1) as machine:
        machine.device()
        process = machine.gpu._process
        folder = Path(machine._folder.name)
        assert folder.is_dir()
    assert process.poll() == -signal.SIGKILL
    assert not folder.exists()


def test_a_worker_ends_when_its_parent_has_gone(faults):
    faults()
    child = Worker({}, {"do": "hello", "gpu": 0})
    child.start()
    child._process.stdin.close()
    assert child._process.wait(20) == 0
    child.close()


def test_a_real_kernel_is_compiled_by_a_compiler_process():
    space = space_of(32)
    with Machine(0, 1) as machine:
        compiled = machine.compile(WORKLOAD, space.default, "sm_90").result()
        refused = machine.compile(WORKLOAD, space.config(space.points[1]), "sm_999").result()
    assert not compiled.error
    assert len(compiled.cubin) == 64
    assert compiled.seconds > 0
    assert "sm_999" in refused.error


# ---- the checks of a worker ----


def test_lengths_of_the_checked_call_are_no_multiple_of_a_tile():
    ragged = Workload("bfloat16", 8, (32, 8), (4096, 4096), (128, 128), window=(4095, None)).ragged()
    assert ragged.seqlen[0] % 16
    assert ragged.seqlen[1] % 16
    assert ragged.heads == (8, 2)
    assert ragged.window == (70, None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int32"])
def test_random_arrays_are_of_the_dtype_and_not_constant(dtype):
    array = checks.host_array(dtype, 1000, np.random.default_rng(0), 333)
    assert array.dtype == np.dtype(DTYPE_OF.get(dtype, dtype))
    assert len(np.unique(array.astype(float))) > 1
    if dtype == "int32":
        assert array.min() >= 166
        assert array.max() <= 333


def test_a_block_of_few_elements_has_more_slack():
    eps = 2.0**-7
    assert list(checks.slack(67, 16, "bfloat16") / eps) == [1 / 16, 1 / 16, 1.0]
    assert list(checks.slack(1, 128, "bfloat16") / eps) == [1 / 16]
    assert list(checks.slack(33, 16, "float32") * 2**23) == [8.0, 8.0]


def test_compare_kernel_compiles():
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(worker.COMPARE, "compare.cu", [], [])
    nvrtc.compileProgram(program, ("-arch=sm_90",))
    assert nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)


ECHO = (
    "import json, sys\n"
    "for line in sys.stdin:\n"
    "    for what in ({'at': 0}, {'at': 1}, {'done': 1}):\n"
    "        print(json.dumps({**json.loads(line), **what}), flush=True)\n"
)


def test_the_rest_of_an_answer_that_was_interrupted_is_not_taken_for_that_of_the_next_request():
    child = Worker({}, command=(sys.executable, "-c", ECHO))
    answer = child.ask({"number": 1}, 10.0)
    assert next(answer)["number"] == 1
    answer.close()  # as by Ctrl-C
    assert [message["number"] for message in child.ask({"number": 2}, 10.0)] == [2, 2, 2]
    child.close()


def test_silence_is_measured_from_the_last_message():
    talkative = (
        "import json, sys, time\n"
        "for line in sys.stdin:\n"
        "    for i in range(6): time.sleep(0.5); print(json.dumps({'at': i}), flush=True)\n"
        "    print(json.dumps({'done': 1}), flush=True)\n"
    )
    child = Worker({}, command=(sys.executable, "-c", talkative))
    began = time.monotonic()
    assert [message.get("at") for message in child.ask({}, 2.5)] == [0, 1, 2, 3, 4, 5, None]
    assert time.monotonic() - began > 2.5
    child.close()
