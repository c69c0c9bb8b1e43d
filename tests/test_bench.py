"""`cuflash bench`: whom it compares, whom it leaves out and why, and what it prints and writes. No GPU is needed."""

import dataclasses
import io
import itertools
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from bench_reports import comparison, report_of
from rich.console import Console

from cuflash import bench, machine, peers, samples, timing
from cuflash.bench import PRESETS, Ceiling, Device, Measured, Settings
from cuflash.peers import Arrays, Case, Numbers, Peer, Runner, Unserved

SMALL = Settings(d=(32,), n=(96,), dtype=("float32",), tokens=192, heads=4, kv_heads=2)
SCHEMA = {"cuflash", "machine", "method", "matmul", "cases", "geometric_means", "not_run"}


def fake_device(milliseconds=None):
    """One that computes with NumPy, and on which each implementation takes the milliseconds that are given."""

    def clock(runs, on_host):
        return {name: [(milliseconds or {}).get(name, 1.0)] * 3 for name in runs}

    return Device("a GPU", lambda x: x, lambda run, what: run(), clock, lambda: None)


def arrays_of(case):
    return Arrays(case, Numbers(case.dtype, [case], lambda x: x))


def compare(case, *them, device=None):
    device = device or fake_device()
    return bench.compare(case, arrays_of(case), them, device.clock, device.finish)


def echo(name="echo", change=lambda out: out, on_host=False):
    """A peer that computes what cuflash does, and changes the result."""

    def make(case, arrays):
        runner = peers.make_cuflash(case, arrays)
        return Runner(lambda: change(runner.run()), runner.layout, on_host)

    return Peer(name, name, make)


def raising(exception, name="broken"):
    def make(case, arrays):
        raise exception

    return Peer(name, name, make)


@pytest.fixture
def small_ceiling(monkeypatch):
    monkeypatch.setattr(bench, "CEILING_SIZE", 64)


def run(cases, *them, console=None, device=None, **options):
    console = console or Console(file=io.StringIO(), width=60, markup=False, highlight=False)
    report = bench.run_bench(console, device or fake_device(), cases, them, method={"rounds": 3}, **options)
    return report, console.file.getvalue()


# the cases


def test_default_preset_is_the_setting_of_the_papers():
    cases = PRESETS["papers"].cases()
    assert len(cases) == 18
    assert {case.batch * case.n for case in cases} == {16384}
    assert {case.heads * case.d for case in cases} == {2048}
    assert {case.dtype for case in cases} == {"bfloat16"}


def test_head_dim_that_does_not_divide_2048_gets_as_many_heads_as_fit():
    assert [case.heads for case in PRESETS["head-dims"].cases()] == [28, 25, 21, 10]


def test_sequence_longer_than_the_tokens_is_a_batch_of_one():
    assert Settings(n=(65536,)).cases()[0].batch == 1


def test_causal_mask_halves_the_operations():
    assert Case(64, 512, causal=True).flops() == Case(64, 512).flops() / 2 == 2 * 512 * 512 * 64


@pytest.mark.parametrize("window", [(3, 0), (3, 5), (None, 2), (4, None), (1000, 1000)])
def test_operations_of_a_window_are_those_of_the_pairs_it_shows(window):
    case = Case(8, 40, window=window)
    assert case.flops() == pytest.approx(4 * 8 * case.visible(np.arange(40)).sum())


# who is timed, and who is not


def test_peer_that_is_right_is_timed_beside_cuflash():
    found = compare(*SMALL.cases()[:1], echo(), device=fake_device({"cuflash": 2.0, "echo": 3.0}))
    assert list(found.measured) == ["cuflash", "echo"]
    assert found.ratio("echo") == 1.5
    assert not found.excluded


WRONG = {
    "NaN": lambda out: np.full_like(out, np.nan),
    "zero": np.zeros_like,
    "shifted": lambda out: np.roll(out, 1, axis=1),
    "heads swapped": lambda out: out[:, :, ::-1],
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_peer_that_is_wrong_is_not_timed(change):
    found = compare(SMALL.cases()[0], echo(change=change))
    assert list(found.measured) == ["cuflash"]
    assert found.excluded["echo"].startswith("wrong: its relative error is ")


def test_peer_without_the_mask_is_wrong():
    full, causal = SMALL.cases()
    ignorant = Peer("ignorant", "", lambda case, arrays: peers.make_cuflash(full, arrays))
    assert "wrong" in compare(causal, ignorant).excluded["ignorant"]


def test_peer_may_round_to_its_dtype_where_cuflash_does_not():
    case = dataclasses.replace(SMALL.cases()[0], dtype="bfloat16")
    coarse = echo(change=lambda out: (out.astype(np.float32) * 1.02).astype(out.dtype))
    assert "echo" in compare(case, coarse).measured


def test_cuflash_itself_is_not_timed_when_wrong(monkeypatch):
    wrong = echo("cuflash", change=np.zeros_like)
    monkeypatch.setattr(bench, "CUFLASH", wrong)
    found = compare(SMALL.cases()[0], echo())
    assert "wrong" in found.excluded["cuflash"]
    assert found.ratio("echo") is None


REASONS = {
    "absent": (ModuleNotFoundError("no", name="flash_attn"), "not installed (no module flash_attn)"),
    "refusing": (Unserved("has no option for softcap"), "has no option for softcap"),
    "broken": (RuntimeError("device side\nmany lines"), "RuntimeError: device side"),
    "silent": (AssertionError(), "AssertionError: no message"),
}


@pytest.mark.parametrize(("exception", "reason"), REASONS.values(), ids=REASONS)
def test_peer_that_fails_is_listed_with_its_reason(exception, reason):
    found = compare(SMALL.cases()[0], raising(exception), echo())
    assert found.excluded == {"broken": reason}
    assert "echo" in found.measured


def test_peer_that_fails_when_it_is_run_is_listed_too():
    def fail():
        raise MemoryError("out of memory")

    late = Peer("late", "", lambda case, arrays: Runner(fail, "bhnd"))
    assert compare(SMALL.cases()[0], late).excluded == {"late": "MemoryError: out of memory"}


def test_peer_on_a_stream_of_its_own_is_timed_by_the_host():
    asked = []

    def clock(runs, on_host):
        asked.append(set(on_host))
        return {name: [1.0] for name in runs}

    found = compare(SMALL.cases()[0], echo(on_host=True), device=fake_device()._replace(clock=clock))
    assert asked == [{"echo"}]
    assert found.measured["echo"].on_host
    assert not found.measured["cuflash"].on_host


# the peers' calls, by backends that run on a CPU

FEATURES = {
    "full": {},
    "causal": {"causal": (True,)},
    "window": {"window": (20, 7)},
    "causal window": {"window": (20, None), "causal": (True,)},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": True, "causal": (True,)},
    "bhnd": {"layout": "bhnd", "causal": (True,)},
    "bfloat16": {"dtype": ("bfloat16",)},
}


def case_with(feature):
    return dataclasses.replace(SMALL, **{"causal": (False,), **FEATURES[feature]}).cases()[0]


def error_of(make, case):
    arrays = arrays_of(case)
    runner = make(case, arrays)
    return samples.judge_of(case, arrays).error(runner.run(), runner.layout) / samples.largest_error(case)


def gradients_of(feature):
    return dataclasses.replace(case_with(feature), backward=True)


@pytest.mark.parametrize("feature", FEATURES)
def test_cuflash_computes_the_case(feature):
    assert error_of(peers.make_cuflash, case_with(feature)) < 1


@pytest.mark.parametrize("feature", ["full", "causal", "bhnd", "bfloat16"])
def test_pytorch_computes_the_case(feature, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(peers, "require_memory", lambda size: None)
    assert error_of(lambda case, arrays: peers.make_sdpa("MATH", case, arrays), case_with(feature)) < samples.PEERS_MAY


@pytest.mark.parametrize("feature", ["full", "causal", "window", "causal window", "softcap", "ALiBi"])
def test_functions_for_flex_attention_mean_the_case(feature):
    torch = pytest.importorskip("torch")
    case = case_with(feature)

    def by_the_formula(case, arrays):
        q, k, v = arrays.torch("bhnd")
        sees, modified = peers.flex_functions(case, "cpu")
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
        b, h, i, j = torch.meshgrid(*map(torch.arange, (case.batch, case.heads, case.n, case.n)), indexing="ij")
        s = modified(q @ k.transpose(-1, -2) / case.d**0.5, b, h, i, j)
        return Runner(lambda: torch.where(sees(b, h, i, j), s, -torch.inf).softmax(-1) @ v, "bhnd")

    assert error_of(by_the_formula, case) < samples.PEERS_MAY


@pytest.mark.parametrize("feature", ["full", "causal", "window", "causal window", "bhnd"])
def test_jax_computes_the_case(feature, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(peers, "require_memory", lambda size: None)
    assert error_of(peers.make_jax, case_with(feature)) < samples.PEERS_MAY


@pytest.mark.parametrize("feature", FEATURES)
def test_cuflash_computes_the_gradients_of_the_case(feature):
    assert error_of(peers.make_cuflash, gradients_of(feature)) < 1


@pytest.mark.parametrize("feature", ["full", "causal", "bhnd", "bfloat16"])
def test_pytorch_computes_the_gradients_of_the_case(feature, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(peers, "require_memory", lambda size: None)
    case = gradients_of(feature)
    assert error_of(lambda case, arrays: peers.make_sdpa("MATH", case, arrays), case) < samples.PEERS_MAY


def test_jax_computes_the_gradients_of_the_case(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(peers, "require_memory", lambda size: None)
    assert error_of(peers.make_jax, gradients_of("causal window")) < samples.PEERS_MAY


@pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_peer_with_a_wrong_gradient_is_not_timed(which, change):
    def changed(gradients):
        return tuple(change(x) if place == which else x for place, x in enumerate(gradients))

    found = compare(gradients_of("causal"), echo(change=changed))
    assert list(found.measured) == ["cuflash"]
    assert found.excluded["echo"].startswith("wrong: its relative error is ")


def test_rows_of_a_long_sequence_are_summed_bit_by_bit(monkeypatch):
    case = gradients_of("causal")
    arrays = arrays_of(case)
    whole = samples.judge_of(case, arrays).gold
    monkeypatch.setattr(samples, "ROWS_AT_ONCE", 40)
    parts = samples.judge_of(case, arrays).gold
    assert all(np.allclose(x, y, rtol=1e-12, atol=1e-14) for x, y in zip(whole, parts, strict=True))


def test_gradients_take_two_and_a_half_times_the_operations():
    case = case_with("causal")
    assert dataclasses.replace(case, backward=True).flops() == 2.5 * case.flops()


def packaged_attention(taken):
    """`flash_attn_func` of a package that keeps what it was given."""

    def flash_attn_func(q, k, v, causal, softcap, window_size, **options):
        taken.update(shape=tuple(q.shape), causal=causal, softcap=softcap, window_size=window_size, **options)
        return q, "the log-sum-exp"

    return flash_attn_func


PACKAGES = {
    "fa3": (peers.make_fa3, "fa3_fwd_interface", -1),
    "fa2": (peers.make_fa2, "flash_attn", -1),
    "fa4": (peers.make_fa4, "flash_attn.cute", None),
}


@pytest.mark.parametrize(("make", "module", "unbounded"), PACKAGES.values(), ids=PACKAGES)
def test_packages_get_the_axes_and_the_window_that_they_take(make, module, unbounded, monkeypatch):
    pytest.importorskip("torch")
    taken = {}
    for name in {module.partition(".")[0], module}:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[module].flash_attn_func = packaged_attention(taken)
    case = dataclasses.replace(SMALL.cases()[1], layout="bhnd", window=(20, None))
    runner = make(case, arrays_of(case))
    assert runner.layout == "bnhd"
    assert tuple(runner.run().shape) == (2, 96, 4, 32)
    assert taken == {"shape": (2, 96, 4, 32), "causal": True, "softcap": 0.0, "window_size": (20, unbounded)}


def test_gradients_of_a_package_are_those_of_its_function(monkeypatch):
    torch = pytest.importorskip("torch")
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, causal, softcap, window_size):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2), "the log-sum-exp"

    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert error_of(peers.make_fa3, gradients_of("causal")) < samples.PEERS_MAY


def test_package_of_the_forward_pass_alone_is_not_asked_for_gradients(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", ModuleType("fa3_fwd_interface"))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ModuleNotFoundError):
        peers.make_fa3(gradients_of("causal"), arrays_of(gradients_of("causal")))


QUICK = [peer for peer in peers.PEERS if peer.name != "flex"]  # which would call a C++ compiler on a CPU


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("peer", QUICK, ids=lambda peer: peer.name)
def test_every_peer_is_ready_or_has_a_reason_on_this_machine(peer, backward):
    found = compare(dataclasses.replace(case_with("ALiBi"), backward=backward), peer)
    assert (peer.name in found.measured) != (peer.name in found.excluded)


def test_large_matrices_of_scores_are_refused(monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (2**30, 2**31))
    with pytest.raises(Unserved, match=r"needs 4 GiB .* has 1 left"):
        peers.require_memory(2**32)
    peers.require_memory(2**30)


# the table


def printed(report, width=60):
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    for part in bench.describe(report):
        machine.print_whole(console, part)
    return console.file.getvalue()


CASES = [Case(64, n, heads=32, batch=4) for n in (1024, 4096, 16384)]


def test_table_ends_with_the_geometric_means():
    report = report_of(comparison(CASES[0], cuflash=1.0, a=2.0, b=1.0), comparison(CASES[1], cuflash=1.0, a=8.0, b=4.0))
    assert printed(report).splitlines()[-1].split() == ["geometric", "mean", "4.00x", "2.00x", "2.00x"]


def test_mean_is_of_the_cases_that_a_peer_serves():
    report = report_of(comparison(CASES[0], cuflash=1.0, a=2.0), comparison(CASES[1], cuflash=1.0))
    assert report.geometric_mean("a") == (pytest.approx(2.0), 1)
    assert report.geometric_mean("b") is None


def test_best_peer_is_the_fastest():
    assert bench.best_ratio(comparison(CASES[0], cuflash=1.0, a=2.0, b=0.8)) == 0.8
    assert bench.best_ratio(comparison(CASES[0], cuflash=1.0)) is None


def test_spread_is_half_the_distance_of_the_quartiles():
    assert Measured((9.0, 10.0, 10.0, 10.0, 11.0), 0.0, False).spread == 0.0
    assert Measured((8.0, 9.0, 10.0, 11.0, 12.0), 0.0, False).spread == pytest.approx(0.1)


def test_table_is_whole_where_the_output_is_narrow():
    names = [f"implementation{i}" for i in range(8)]
    lines = printed(report_of(comparison(CASES[0], cuflash=1.0, **dict.fromkeys(names, 2.0))), width=40).splitlines()
    assert all(name in lines[-3] for name in names)
    assert "…" not in lines[-2]


def test_reasons_are_listed_once_with_how_often_they_hold():
    absent = {"fa3": "not installed", "fa4": "not installed"}
    text = printed(
        report_of(
            comparison(CASES[0], {**absent, "math": "too large"}, cuflash=1.0),
            comparison(CASES[1], absent, cuflash=1.0),
        )
    )
    assert "not compared: fa3, fa4: not installed\n" in text
    assert "not compared: math: too large (in 1 of 2 cases)\n" in text


def test_ceiling_is_shown_or_why_there_is_none():
    assert "matrix product 8192 x 8192, bfloat16: 800 TFLOP/s by cuBLAS" in printed(report_of())
    report = report_of()
    report.ceilings["float32"] = Ceiling(None, "no cuBLAS")
    assert "float32: not measured: no cuBLAS" in printed(report)


# a run


@pytest.mark.usefixtures("small_ceiling")
def test_run_compares_every_case_and_says_so(tmp_path):
    report, text = run(SMALL.cases(), echo(), raising(Unserved("cannot")), json_file=tmp_path / "o.json")
    assert len(report.comparisons) == 2
    assert "float32 D=32 N=96 full 4:2 heads: cuflash " in text
    assert "not compared: broken: cannot\n" in text
    assert text.splitlines()[-1].startswith("geometric mean")


@pytest.mark.usefixtures("small_ceiling")
def test_json_holds_every_figure(tmp_path):
    run(SMALL.cases(), echo(), json_file=tmp_path / "o.json", device=fake_device({"echo": 4.0}))
    found = json.loads((tmp_path / "o.json").read_text())
    assert set(found) == SCHEMA
    first = found["cases"][0]
    assert first["case"] == dataclasses.asdict(SMALL.cases()[0])
    assert first["plan"].startswith("numpy NumpyConfig(")
    assert first["results"]["echo"].items() >= {"ms": [4.0, 4.0, 4.0], "median_ms": 4.0, "ratio": 4.0}.items()
    assert 0 < first["results"]["cuflash"]["error"] < samples.LARGEST_ERROR["float32"]
    assert found["geometric_means"]["echo"]["cases"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.usefixtures("small_ceiling")
def test_run_of_gradients_says_what_is_counted(tmp_path):
    cases = dataclasses.replace(SMALL, backward=True).cases()
    _, text = run(cases, echo(), json_file=tmp_path / "o.json")
    assert "2.5 times those of the forward pass\n" in text
    assert "float32 D=32 N=96 full 4:2 heads backward: cuflash " in text
    first = json.loads((tmp_path / "o.json").read_text())["cases"][0]
    assert first["case"]["backward"]
    assert first["plan"].startswith("numpy NumpyConfig(")
    assert set(first["results"]) == {"cuflash", "echo"}


@pytest.mark.usefixtures("small_ceiling")
def test_case_beyond_the_budget_is_not_begun_and_is_listed(monkeypatch, tmp_path):
    ticks = itertools.count(0, 10)
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(ticks))
    report, text = run(SMALL.cases(), echo(), budget=15, json_file=tmp_path / "o.json")
    assert len(report.comparisons) == len(report.not_run) == 1
    assert "not run, for want of time: D=32 N=96 causal 4:2 heads\n" in text
    assert len(json.loads((tmp_path / "o.json").read_text())["not_run"]) == 1


def test_ceiling_that_cannot_be_measured_has_its_reason(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("cuBLAS is not there")

    monkeypatch.setattr(bench, "_matmul", fail)
    found = bench.measure_ceiling(Numbers("float32", SMALL.cases(), lambda x: x), fake_device())
    assert found == (None, "RuntimeError: cuBLAS is not there")


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    cases = [*Settings(d=(64, 128), n=(1024, 4096), causal=(True,)).cases(), *PRESETS["gqa"].cases()]
    bench.plot(report_of(*(comparison(case, cuflash=1.0, fa3=1.5) for case in cases)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_nothing_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    bench.plot(report_of(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# the clock


def test_rounds_are_taken_in_turn_and_every_second_one_in_reverse(monkeypatch):
    cupy = pytest.importorskip("cupy")
    taken = []
    monkeypatch.setattr(cupy, "empty", lambda *_: None)
    monkeypatch.setattr(timing, "time_once", lambda run, scratch, what: taken.append(what) or float(len(taken)))
    monkeypatch.setattr(timing, "time_on_host", lambda run, scratch, what: taken.append(what.upper()) or 0.5)
    runs = dict.fromkeys("abc", None)
    times = timing.interleaved_times(runs, rounds=2, repeats=2, warm_up=1, on_host={"c"})
    assert "".join(taken) == "abC" + "aabbCC" + "CCbbaa"
    assert times == {"a": [4.5, 14.5], "b": [6.5, 12.5], "c": [0.5, 0.5]}


@pytest.mark.parametrize(("host_takes", "written"), [(0.5, 1), (1.5, 3), (3.0, 7), (100.0, 15)])
def test_run_that_the_host_queues_too_late_is_timed_again_after_more_writing(host_takes, written, monkeypatch):
    cupy = pytest.importorskip("cupy")
    host, gpu, fills, runs = [0.0], [0.0], [], []  # clocks of the two, in the time that one fill takes

    class Event:
        def record(self, stream):
            self.at = gpu[0] = max(gpu[0], host[0])

        @property
        def done(self):
            return self.at <= host[0]

    def fill(value):
        fills.append(value)
        gpu[0] = max(gpu[0], host[0]) + 1.0

    def run():
        runs.append(1)
        host[0] += host_takes
        gpu[0] = max(gpu[0], host[0]) + 0.25

    def wait(event, what):
        host[0] = gpu[0]

    monkeypatch.setattr(timing, "wait", wait)
    monkeypatch.setattr(cupy, "cuda", SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: b.at - a.at))
    taken = timing.time_once(run, SimpleNamespace(fill=fill), "run")
    assert len(fills) == written
    assert (taken == 0.25) == (host_takes < 100)


def test_kernel_that_hangs_takes_the_process_with_it(monkeypatch, capsys):
    def exit_now(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_now)
    monkeypatch.setattr(timing, "HANG_SECONDS", 0.0)
    with pytest.raises(SystemExit):
        timing.wait(SimpleNamespace(done=False), "a kernel")
    assert capsys.readouterr().out == "HANG: a kernel did not end within 0 s\n"
