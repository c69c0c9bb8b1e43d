"""What a run does with its time, on a machine that is played: seconds pass on a clock, and none in truth."""

import hashlib

import pytest

from cuflash import tuned
from cuflash.device import known_device
from cuflash.tuning import measure, session
from cuflash.tuning.measure import HANG_SECONDS
from cuflash.tuning.processes import Compiled, Died
from cuflash.tuning.session import GpuTarget, Session
from cuflash.tuning.workload import Workload, preset

COMPILERS = 15  # of 16 cores
COMPILE_SECONDS = 2.5
START_SECONDS, RESTART_SECONDS = 5.0, 5.0
LOAD_SECONDS, CHECK_SECONDS = 0.8, 0.04  # of the arrays of a workload; of a candidate
FLUSH_MS, FLOPS = 0.4, 500e12


class Clock:
    """Time that passes only where something takes some."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class Later:
    """A result that is there at a certain time."""

    def __init__(self, clock, at, value):
        self.clock, self.at, self.value = clock, at, value

    def done(self):
        return self.clock.seconds >= self.at

    def cancel(self):
        return self.clock.seconds < self.at - self.value.seconds

    def result(self):
        self.clock.seconds = max(self.clock.seconds, self.at)
        return self.value


class PlayedMachine:
    """A `Machine` and its GPU. The candidates that `hangs` chooses by a number from 0 to 1 hang."""

    def __init__(self, clock, hangs=lambda share: False):
        self.clock, self.hangs, self.gpu, self.compilers = clock, hangs, self, COMPILERS
        self.free = [START_SECONDS] * COMPILERS
        self.compiled, self.loaded, self.hung = {}, None, []

    def device(self):
        return known_device("sm_90")

    def compile(self, workload, config, architecture):
        binary = (workload.problem().spec, *config.constants().items())
        if binary not in self.compiled:
            first = min(range(COMPILERS), key=lambda i: self.free[i])
            self.free[first] = max(self.free[first], self.clock.seconds) + COMPILE_SECONDS
            cubin = Compiled(repr(binary), COMPILE_SECONDS)
            self.compiled[binary] = Later(self.clock, self.free[first], cubin)
        return self.compiled[binary]

    def cancel(self, compiling):
        cancelled = {id(future) for future in compiling if future.cancel()}
        self.compiled = {name: future for name, future in self.compiled.items() if id(future) not in cancelled}
        busy = sorted(future.at for future in self.compiled.values() if not future.done())[-COMPILERS:]
        self.free = busy + [self.clock.seconds] * (COMPILERS - len(busy))

    def ask(self, request, silence):
        workload = Workload.from_json(request["workload"])
        if workload != self.loaded:
            self.clock.sleep(LOAD_SECONDS)
            self.loaded = workload
        default, times = 1e3 * workload.flops() / FLOPS + 0.01, []
        for number, candidate in enumerate([request["anchor"], *request["candidates"]]):
            self.clock.sleep(CHECK_SECONDS)
            share = int(hashlib.sha256(repr((workload, candidate)).encode()).hexdigest()[:8], 16) / 2**32
            if number and self.hangs(share):
                yield {"begin": number}
                self.clock.sleep(request["hang_seconds"])
                yield {"hung": number}
                self.hung.append((self.clock.seconds, candidate))
                self.clock.sleep(RESTART_SECONDS)
                self.loaded = None
                raise Died("it hangs", hung=True)
            times.append(default * (0.98 + 2 * share**2 if number else 1.0))
            yield {"checked": number, "status": "ok", "registers": 128, "spill_bytes": 0}
        self.clock.sleep((1 + request["rounds"]) * (sum(times) + FLUSH_MS * len(times)) / 1e3)
        yield {"done": {str(number): [ms] * request["rounds"] for number, ms in enumerate(times)}}


@pytest.fixture
def play(monkeypatch):
    """Tune on a played machine; what came of each workload, the seconds it took, and the machine."""
    clock = Clock()

    def wait(futures, seconds, return_when):
        clock.seconds = max(clock.seconds, min(*(future.at for future in futures), clock.seconds + seconds))

    monkeypatch.setattr(measure, "wait", wait)
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(tuned, "put", lambda winner: None)
    monkeypatch.setattr(tuned, "winners", lambda: iter(()))

    def run(workloads, seconds, **options):
        machine = PlayedMachine(clock, **options)
        return list(Session(GpuTarget(machine)).run(workloads, seconds)), clock.seconds, machine

    return run


def test_each_workload_of_the_llm_preset_has_its_share_of_five_minutes(play):
    some = preset("llm")[::9]
    share = 295 * len(some) / len(preset("llm"))
    results, seconds, _ = play(some, share)
    assert seconds <= share
    assert [result.state for result in results] == ["tuned"] * len(some)
    assert min(result.evaluations for result in results) >= 30


def test_a_minute_serves_one_workload(play):
    (result,), seconds, _ = play(preset("llm")[1:2], 60 - 3)
    assert seconds <= 57
    assert result.evaluations == 69  # all that the search asks for


def test_a_candidate_that_hangs_costs_its_time_and_that_of_a_new_process(play):
    _, without, _ = play(preset("llm")[1:2], 60)
    _, seconds, machine = play(preset("llm")[1:2], 60 + without, hangs=lambda share: share > 0.95)
    assert 0 < len(machine.hung) <= 4
    again = RESTART_SECONDS + LOAD_SECONDS + (measure.BATCH + 1) * CHECK_SECONDS
    longest = HANG_SECONDS + preset("llm")[1].flops() / measure.SLOWEST_FLOPS
    assert seconds - 2 * without <= len(machine.hung) * (longest + again)


def test_what_there_was_no_time_for_is_said(play):
    results, _, _ = play(preset("llm")[:2], 0.0)
    assert [result.state for result in results] == ["failed", "failed"]
    assert all(result.note == session.TOO_LATE for result in results)
