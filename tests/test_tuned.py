"""Tuned configurations: what is looked up where, what an untuned call says, what is required."""

import json
import logging
import subprocess
import sys
import timeit
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from winners import (
    AMPERE,
    BACKWARD_CONFIG,
    BACKWARD_KEY,
    CONFIG,
    DAMAGE,
    GRADIENTS,
    HOPPER,
    KEY,
    OTHER,
    PROBLEM,
    found,
    make_gradients,
    make_problem,
    make_winner,
    operand,
    own_folders,
    stale,
    start_process,
)

import cuflash
from cuflash import backward, call, plan, store, tuned
from cuflash.backward_config import BackwardWgmmaConfig
from cuflash.backward_plan import choose_backward
from cuflash.cli import build_parser
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.problem import read_problem
from cuflash.store import Store, read_collection, write_collection
from cuflash.tuning.command import workloads_of
from cuflash.winner import Bucket, Provenance, key_of


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Directories of this test's own: the user's, the site's, the temporary one; nothing shipped; a new process."""
    own_folders(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def user(folders):
    return Store(folders / "user" / "tuned")


# ---- keys ----


@pytest.mark.parametrize(("length", "power"), [(0, 16), (1, 16), (22, 16), (23, 32), (1000, 1024), (1448, 1024),
                                               (1449, 2048), (4096, 4096), (10**8, 32768)])  # fmt: skip
def test_length_falls_into_the_bucket_of_the_nearest_power_of_two(length, power):
    assert key_of(make_problem(n=length), AMPERE).bucket.n_k == power


def test_single_query_row_has_a_bucket_of_its_own():
    assert [key_of(make_problem(n_q=n_q), AMPERE).bucket.n_q for n_q in (1, 2)] == [1, 16]


def test_window_counts_where_it_is_bounded_on_both_sides():
    def window(**options):
        return key_of(make_problem(**options), AMPERE).bucket.window

    assert [window(causal=True), window(window=(100, None))] == [0, 0]
    assert [window(causal=True, window=(127, 0)), window(window=(5000, 5000))] == [128, 1024]


def test_waves_count_blocks_of_rows_of_all_heads_that_share_keys():
    few, many = make_problem(n_q=1, h_q=64, h_kv=2), make_problem(n_q=1, h_q=64, h_kv=64, batch=2)
    assert key_of(few, AMPERE).bucket == Bucket(1, 1024, 0, "0.5", True)
    assert key_of(many, AMPERE).bucket == Bucket(1, 1024, 0, "2", False)
    assert key_of(make_problem(n=16384, batch=8), AMPERE).bucket.waves == "more"


def test_key_tells_specs_devices_and_their_parts_apart():
    slice_of_it = AMPERE.__class__(AMPERE.name, AMPERE.compute_capability, 14, AMPERE.shared_bytes)
    keys = {
        key_of(problem, device)
        for problem in (PROBLEM, make_problem(causal=True), make_problem(dtype="bfloat16"), make_problem(d=80))
        for device in (AMPERE, HOPPER, slice_of_it)
    }
    assert len({Store(Path()).path_of(key) for key in keys}) == len(keys) == 12


def test_feature_that_is_off_leaves_no_trace_in_a_key(user):
    text = json.dumps(make_winner().as_json()["key"]["spec"])
    assert text == '{"dtype": "float16", "d": 64, "d_v": 64}'


def test_device_name_cannot_leave_the_folder(user):
    device = AMPERE.__class__("../../etc/x y", (8, 0), 108, 160000)
    assert user.path_of(KEY._replace(device=device)).parent.parent == user.directory / "v1"


def test_gradients_have_a_key_of_their_own_for_the_blocks_of_their_keys(user):
    assert KEY._replace(operation="backward") == BACKWARD_KEY
    assert user.path_of(BACKWARD_KEY).name.startswith("backward-float16-d64x64-")
    few, many = ({"n": 4096, "h_q": 64, "h_kv": h_kv} for h_kv in (2, 64))
    assert key_of(make_problem(**few), AMPERE).bucket.waves == "more"
    assert [key_of(make_gradients(**shape), AMPERE).bucket.waves for shape in (few, many)] == ["1", "more"]


# ---- lookup ----


def test_winner_serves_the_calls_of_its_bucket(user):
    tuned.put(make_winner())
    choice = plan.choose(make_problem(n=1100), AMPERE)
    assert (choice.family, choice.config, choice.source, choice.stale) == ("mma", CONFIG, "tuned", None)
    assert plan.choose(make_problem(n=300), AMPERE).source == "default"


def test_winner_of_gradients_serves_them_and_not_the_forward_pass():
    tuned.put(make_winner(BACKWARD_CONFIG, BACKWARD_KEY))
    choice = choose_backward(make_gradients(n=1100), AMPERE)
    assert (choice.family, choice.config, choice.source, choice.stale) == ("mma", BACKWARD_CONFIG, "tuned", None)
    assert set(choice.ruled_out) == {"numpy", "simt", "wgmma"}
    assert choose_backward(make_gradients(n=300), AMPERE).source == plan.choose(PROBLEM, AMPERE).source == "default"


def test_stale_winner_of_gradients_is_used_and_reported(caplog):
    tuned.put(stale(make_winner(BACKWARD_CONFIG, BACKWARD_KEY)))
    with caplog.at_level(logging.INFO, "cuflash"):
        choice = choose_backward(GRADIENTS, AMPERE)
    assert (choice.config, choice.stale) == (BACKWARD_CONFIG, "was measured with another version of the kernel")
    assert caplog.messages[0].endswith(" --head-dim 64 64 --backward")


def test_hopper_winner_of_gradients_does_not_serve_what_tma_cannot_read():
    key = key_of(GRADIENTS, HOPPER)
    tuned.put(make_winner(BackwardWgmmaConfig(64), key))
    assert choose_backward(GRADIENTS, HOPPER).family == "wgmma"
    strides = {**GRADIENTS.strides, "k": (*GRADIENTS.strides["k"][:2], -64, 1)}
    backwards = replace(GRADIENTS, strides=strides, forward=replace(PROBLEM, strides=strides))
    assert choose_backward(backwards, HOPPER).source == "default"


def test_sources_are_asked_in_order(folders, user, monkeypatch, tmp_path):
    configs = [MmaConfig(64, b_c, 4) for b_c in (16, 32, 48, 64)]
    write_collection(tmp_path / "file.json", [make_winner(configs[0])])
    user.write(make_winner(configs[1]))
    Store(folders / "site").write(make_winner(configs[2]))
    monkeypatch.setattr(tuned, "_shipped", lambda: {KEY: make_winner(configs[3])})
    cuflash.load_configs(tmp_path / "file.json")
    assert found() == list(zip(configs, ("loaded", "tuned", "site", "shipped"), strict=True))


def test_key_is_read_once_a_process(user, monkeypatch):
    user.write(make_winner())
    reads = []
    read = store._read
    monkeypatch.setattr(store, "_read", lambda path: reads.append(path) or read(path))
    for _ in range(3):
        tuned.candidates(KEY)
    assert reads.count(user.path_of(KEY)) == 1


def test_missing_key_is_looked_for_once_a_process(user, monkeypatch):
    assert found() == []
    user.write(make_winner())  # by another process
    assert found() == []


@pytest.mark.parametrize("key", [KEY, BACKWARD_KEY], ids=["forward", "backward"])
def test_known_key_is_found_in_two_microseconds(user, key):
    user.write(make_winner(CONFIG if key is KEY else BACKWARD_CONFIG, key))
    assert len(tuned.candidates(key)) == 1
    calls = 2000
    assert min(timeit.repeat(lambda: tuned.candidates(key), number=calls, repeat=20)) / calls < 2e-6


def test_explanation_names_the_source_and_why_it_is_stale():
    problem = PROBLEM
    explanation = cuflash.Explanation("mma", CONFIG, "tuned", "A100", {}, problem, "was measured with NVRTC 12.8")
    assert "(from: tuned; it was measured with NVRTC 12.8)" in str(explanation)


def test_winner_of_another_toolchain_is_used_and_reported_stale(monkeypatch, caplog):
    tuned.put(make_winner(provenance=tuned.current_provenance("forward_mma")._replace(nvrtc="11.0", driver="11.0")))
    monkeypatch.setattr(tuned, "_toolchain", lambda: ("13.0", "13.0"))
    start_process(monkeypatch)
    with caplog.at_level(logging.INFO, "cuflash"):
        choice = plan.choose(PROBLEM, AMPERE)
        plan.choose(PROBLEM, AMPERE)
    assert (choice.config, choice.stale) == (CONFIG, "was measured with NVRTC 11.0, and this is 13.0")
    assert [message.count("cuflash tune") for message in caplog.messages] == [1]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"source": "0"}, "kernel"), ({"nvrtc": "11.0"}, "NVRTC"), ({"driver": "11.0"}, "driver")],
    ids=["kernel", "NVRTC", "driver"],
)
def test_each_part_of_the_provenance_makes_stale(monkeypatch, change, what):
    monkeypatch.setattr(tuned, "_toolchain", lambda: ("13.0", "13.0"))
    winner = make_winner()
    assert tuned.why_stale(winner) is None
    assert what in tuned.why_stale(winner._replace(provenance=winner.provenance._replace(**change)))


def test_shipped_winner_is_stale_for_another_kernel_only(monkeypatch):
    winner = make_winner()
    other = winner._replace(provenance=winner.provenance._replace(nvrtc="11.0", driver="11.0"))
    assert tuned.why_stale(other) is not None
    assert tuned.why_stale(other, "shipped") is None
    assert tuned.why_stale(stale(winner), "shipped") is not None


def test_machine_without_nvrtc_and_driver_calls_no_toolchain_stale(monkeypatch):
    winner = make_winner(provenance=Provenance(tuned.current_provenance("forward_mma").source, "11.0", "11.0"))
    monkeypatch.setattr(tuned, "_toolchain", lambda: (tuned.UNKNOWN, tuned.UNKNOWN))
    assert tuned.why_stale(winner) is None


def test_stale_winner_yields_to_a_shipped_one_of_this_kernel(user, monkeypatch):
    user.write(stale(make_winner(CONFIG)))
    monkeypatch.setattr(tuned, "_shipped", lambda: {KEY: make_winner(OTHER)})
    assert found() == [(OTHER, "shipped"), (CONFIG, "tuned")]


def test_configuration_that_became_illegal_is_passed_over_loudly(user, monkeypatch, caplog):
    monkeypatch.setattr(tuned, "_shipped", lambda: {KEY: make_winner(OTHER)})
    user.write(make_winner(MmaConfig(b_r=64, b_c=512, warps=4)))
    assert found() == [(OTHER, "shipped")]
    assert "shared memory" in caplog.text


def test_hopper_winner_does_not_serve_what_tma_cannot_read(user):
    key = key_of(PROBLEM, HOPPER)
    tuned.put(make_winner(WgmmaConfig(2, 64), key))
    assert plan.choose(PROBLEM, HOPPER).family == "wgmma"
    k = operand("k", 1, 8, 1000, 64)
    backwards = k._replace(strides=(*k.strides[:2], -64, 1))
    problem = read_problem(operand("q", 1, 8, 1000, 64), backwards, operand("v", 1, 8, 1000, 64))
    choice = plan.choose(problem, HOPPER)
    assert (choice.family, choice.source) == ("mma", "default")


def test_packing_and_sums_by_tile_follow_the_call_and_not_the_winner():
    problem = make_problem(n_q=1, n=200000, h_q=64, h_kv=8)
    tuned.put(make_winner(key=key_of(problem, AMPERE)))
    config = plan.choose(problem, AMPERE).config
    assert (config.pack_gqa, config.tile_sums) == (True, True)


def test_empty_call_looks_up_nothing(caplog):
    with caplog.at_level(logging.INFO, "cuflash"):
        assert plan.choose(make_problem(n_q=0), AMPERE).source == "default"
    assert not caplog.messages


def test_winner_of_another_family_than_the_default_rules_the_others_out(user):
    config = SimtConfig(64, 64, 128, 16)
    tuned.put(make_winner(config))
    choice = plan.choose(PROBLEM, AMPERE)
    assert (choice.family, set(choice.ruled_out)) == ("simt", {"numpy", "mma", "wgmma"})


def test_configuration_that_does_not_load_gives_way_to_the_next(folders, user, monkeypatch, caplog):
    user.write(make_winner(CONFIG))
    Store(folders / "site").write(make_winner(OTHER))

    def make_launch(problem, choice, device):
        if choice.source in refused:
            raise RuntimeError("NVRTC does not compile it\nand more")
        return choice.source

    monkeypatch.setattr(call, "make_launch", make_launch)
    refused = {"tuned"}
    assert call.launch_of(PROBLEM, plan.choose(PROBLEM, AMPERE), AMPERE) == "site"
    assert plan.choose(PROBLEM, AMPERE).source == "site"
    refused |= {"site"}
    assert call.launch_of(PROBLEM, plan.choose(PROBLEM, AMPERE), AMPERE) == "default"
    assert [message.endswith("is not used: NVRTC does not compile it") for message in caplog.messages] == [True, True]
    refused |= {"default"}
    with pytest.raises(RuntimeError, match="NVRTC does not compile it"):
        call.launch_of(PROBLEM, plan.choose(PROBLEM, AMPERE), AMPERE)


def test_configuration_of_gradients_that_does_not_load_gives_way_to_the_next(user, monkeypatch):
    user.write(make_winner(BACKWARD_CONFIG, BACKWARD_KEY))

    def make_launch(problem, choice, device):
        if choice.source == "tuned":
            raise RuntimeError("NVRTC does not compile it")
        return choice.source

    monkeypatch.setattr(backward, "make_backward_launch", make_launch)
    launch, choice = backward.launch_of(GRADIENTS, choose_backward(GRADIENTS, AMPERE), AMPERE)
    assert launch == choice.source == "default"


def test_illegal_winner_is_not_kept(user):
    with pytest.raises(ValueError, match=r"config is not legal here: .* shared memory"):
        tuned.put(make_winner(MmaConfig(b_r=64, b_c=512, warps=4)))
    assert user.paths() == []


# ---- what an untuned call says ----


def test_untuned_call_logs_the_command_once_a_key(caplog):
    problem = make_problem(n=1000, h_q=8, h_kv=2, causal=True, window=(63, 0), softcap=20.0)
    with caplog.at_level(logging.INFO, "cuflash"):
        for _ in range(3):
            plan.choose(problem, AMPERE)
        plan.choose(make_problem(n=300), AMPERE)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith(
        "to tune it: cuflash tune --dtype float16 --batch 1 --heads 8 2 --seqlen 1000 1000 --head-dim 64 64"
        " --causal --window 63 0 --softcap"
    )


LENGTHS = {name: operand(name, 1, dtype="int64") for name in ("q_lengths", "kv_lengths")}
PROBLEMS = {
    "plain": PROBLEM,
    "causal": make_problem(n=700, n_q=30, h_q=32, h_kv=4, causal=True),
    "top-left": make_problem(causal="top-left", softcap=30.0),
    "window": make_problem(window=(3, 40)),
    "half a window": make_problem(window=(None, 40)),
    "causal window": make_problem(causal=True, window=(40, 0)),
    "mask and lengths": make_problem(mask=operand("mask", 1000, 1000, dtype="bool"), **LENGTHS),
    "bias": make_problem(bias=operand("bias", 1000, 1000, dtype="float16")),
    "bias of keys": make_problem(batch=3, bias=operand("bias", 1, 1, 1, 1000, dtype="float32"), dtype="bfloat16"),
    "unaligned": make_problem(d=59),
    "wide": make_problem(d=256, dtype="float32"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_command_that_is_printed_tunes_the_key_of_the_call(problem):
    options = build_parser().parse_args(tuned.tune_command(problem).split()[1:])
    (workload,) = workloads_of(options)
    assert key_of(workload.problem(), AMPERE) == key_of(problem, AMPERE)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_command_that_is_printed_for_gradients_tunes_their_key(options):
    problem = make_gradients(h_q=8, h_kv=2, **options)
    forward, gradients = workloads_of(build_parser().parse_args(tuned.tune_command(problem).split()[1:]))
    assert key_of(gradients.problem(), AMPERE) == key_of(problem, AMPERE)
    assert key_of(forward.problem(), AMPERE) == key_of(problem.forward, AMPERE)


def test_call_with_a_configuration_of_the_caller_says_nothing(caplog):
    with caplog.at_level(logging.INFO, "cuflash"):
        plan.choose(PROBLEM, AMPERE, CONFIG)
    assert not caplog.messages


def test_strict_mode_refuses_an_untuned_call_with_the_command(user):
    cuflash.require_tuned()
    with pytest.raises(cuflash.UntunedError, match=r"to tune it: cuflash tune --dtype float16 .* \(looked for /"):
        plan.choose(PROBLEM, AMPERE)
    assert plan.choose(PROBLEM, AMPERE, CONFIG).source == "the caller"
    tuned.put(make_winner())
    assert plan.choose(PROBLEM, AMPERE).source == "tuned"


def test_strict_mode_refuses_untuned_gradients_too():
    cuflash.require_tuned()
    tuned.put(make_winner())
    with pytest.raises(cuflash.UntunedError, match=r"for gradients of float16-d64x64, .*--backward \(looked for /"):
        choose_backward(GRADIENTS, AMPERE)
    assert choose_backward(GRADIENTS, AMPERE, BACKWARD_CONFIG).source == "the caller"
    assert choose_backward(make_gradients(n=0), AMPERE).source == "default"


def test_strict_mode_leaves_the_cpu_and_empty_calls_alone():
    cuflash.require_tuned()
    x = np.ones((4, 8), np.float32)
    assert np.allclose(cuflash.attention(x, x, x), 1)
    assert plan.choose(make_problem(n_q=0), AMPERE).source == "default"


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("0", False), ("", False)])
def test_environment_variable_turns_strict_mode_on(monkeypatch, value, raises):
    monkeypatch.setenv("CUFLASH_REQUIRE_TUNED", value)
    assert tuned.is_required() is raises


def test_python_switch_goes_before_the_environment_variable(monkeypatch):
    monkeypatch.setenv("CUFLASH_REQUIRE_TUNED", "1")
    cuflash.require_tuned(False)
    assert plan.choose(PROBLEM, AMPERE).source == "default"


def test_strict_mode_takes_no_other_values(monkeypatch):
    monkeypatch.setenv("CUFLASH_REQUIRE_TUNED", "yes")
    with pytest.raises(ValueError, match="CUFLASH_REQUIRE_TUNED must be 0 or 1, got 'yes'"):
        tuned.is_required()
    with pytest.raises(TypeError, match="required must be True or False"):
        cuflash.require_tuned("yes")


# ---- load_configs ----


def test_loaded_configurations_go_before_all_others_and_forget_remembered_calls(tmp_path, monkeypatch):
    tuned.put(make_winner(CONFIG))
    assert found() == [(CONFIG, "tuned")]
    write_collection(tmp_path / "file.json", [stale(make_winner(OTHER))])
    for calls in (call.CALLS, backward.CALLS):
        monkeypatch.setitem(calls.known, "a signature", None)
    assert cuflash.load_configs(tmp_path / "file.json") == 1
    assert found() == [(OTHER, "loaded"), (CONFIG, "tuned")]
    assert not call.CALLS.known
    assert not backward.CALLS.known


def test_new_winner_goes_before_a_loaded_one(tmp_path):
    write_collection(tmp_path / "file.json", [make_winner(OTHER)])
    cuflash.load_configs(tmp_path / "file.json")
    tuned.put(make_winner(CONFIG))
    assert found() == [(CONFIG, "tuned")]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_of_configurations_is_refused_as_a_whole(tmp_path, damage):
    path = tmp_path / "file.json"
    write_collection(path, [make_winner(), make_winner(key=key_of(PROBLEM, HOPPER))])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"file\.json cannot be used: "):
        cuflash.load_configs(path)
    assert found() == []


def test_collection_does_not_depend_on_the_order_of_its_winners(tmp_path):
    several = [
        make_winner(),
        make_winner(key=key_of(PROBLEM, HOPPER)),
        make_winner(key=key_of(make_problem(9), HOPPER)),
    ]
    for name, order in (("a", several), ("b", several[::-1])):
        write_collection(tmp_path / name, order)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(map(str, read_collection(tmp_path / "a"))) == sorted(map(str, several))


def test_process_that_loads_configurations_imports_neither_optuna_nor_the_tuner(tmp_path):
    write_collection(tmp_path / "file.json", [make_winner()])
    code = (
        "import sys, cuflash; from cuflash import tuned, winner\n"
        "print(cuflash.load_configs(sys.argv[1]), len(list(tuned.winners())) - len(tuned._shipped()))\n"
        "print(*(name for name in sys.modules if name.startswith(('optuna', 'cuflash.tuning', 'sqlalchemy'))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file.json")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1 1\n\n"
