"""The store of tuned configurations: what is looked up where, and what survives."""

import errno
import json
import logging
import os
import subprocess
import sys
import timeit
from pathlib import Path

import numpy as np
import pytest
from winners import (
    AMPERE,
    CONFIG,
    HOPPER,
    KEY,
    OTHER,
    PROBLEM,
    make_problem,
    make_winner,
    operand,
    own_folders,
    stale,
    start_process,
)

import cuflash
from cuflash import call, plan, store, tuned
from cuflash.cli import build_parser
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.problem import read_problem
from cuflash.store import Store, read_collection, write_collection
from cuflash.tuning.command import workloads_of
from cuflash.winner import Bucket, Damaged, Foreign, Provenance, checksum, key_of, winner_from_json

DAMAGE = {
    "empty": lambda text: b"",
    "truncated": lambda text: text[: len(text) // 2],
    "one bit flipped": lambda text: text.replace(b'"b_c": 64', b'"b_c": 65'),
    "zeros": lambda text: bytes(len(text)),
    "not UTF-8": lambda text: b"\xff" + text,
    "another JSON value": lambda text: b"[1, 2]",
    "nested without end": lambda text: b"[" * 100000,
}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Directories of this test's own: the user's, the site's, the temporary one; nothing shipped; a new process."""
    own_folders(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def user(folders):
    return Store(folders / "user" / "tuned")


def found(key=KEY):
    return [(one.winner.config, one.source) for one in tuned.candidates(key)]


def names_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


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


# ---- lookup ----


def test_winner_serves_the_calls_of_its_bucket(user):
    tuned.put(make_winner())
    choice = plan.choose(make_problem(n=1100), AMPERE)
    assert (choice.family, choice.config, choice.source, choice.stale) == ("mma", CONFIG, "tuned", None)
    assert plan.choose(make_problem(n=300), AMPERE).source == "default"


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


def test_known_key_is_found_in_two_microseconds(user):
    user.write(make_winner())
    tuned.candidates(KEY)
    calls = 2000
    assert min(timeit.repeat(lambda: tuned.candidates(KEY), number=calls, repeat=20)) / calls < 2e-6


def test_explanation_names_the_source_and_why_it_is_stale():
    problem = PROBLEM
    explanation = cuflash.Explanation("mma", CONFIG, "tuned", "A100", {}, problem, "was measured with NVRTC 12.8")
    assert "(from: tuned; it was measured with NVRTC 12.8)" in str(explanation)


def test_winner_of_another_toolchain_is_used_and_reported_stale(monkeypatch, caplog):
    tuned.put(make_winner(provenance=tuned.current_provenance("mma")._replace(nvrtc="11.0", driver="11.0")))
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


def test_machine_without_nvrtc_and_driver_calls_no_toolchain_stale(monkeypatch):
    winner = make_winner(provenance=Provenance(tuned.current_provenance("mma").source, "11.0", "11.0"))
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
    "bias": make_problem(batch=3, bias=operand("bias", 1, 1, 1, 1000, dtype="float32"), dtype="bfloat16"),
    "unaligned": make_problem(d=59),
    "wide": make_problem(d=256, dtype="float32"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_command_that_is_printed_tunes_the_key_of_the_call(problem):
    options = build_parser().parse_args(tuned.tune_command(problem).split()[1:])
    (workload,) = workloads_of(options)
    assert key_of(workload.problem(), AMPERE) == key_of(problem, AMPERE)


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
    monkeypatch.setitem(call.REMEMBERED, "a signature", None)
    assert cuflash.load_configs(tmp_path / "file.json") == 1
    assert found() == [(OTHER, "loaded"), (CONFIG, "tuned")]
    assert not call.REMEMBERED


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
        "print(cuflash.load_configs(sys.argv[1]), len(list(tuned.winners())))\n"
        "print(*(name for name in sys.modules if name.startswith(('optuna', 'cuflash.tuning', 'sqlalchemy'))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file.json")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1 1\n\n"


# ---- what comes from a file is data ----


def test_winner_survives_its_form_as_json():
    for config, device in ((CONFIG, AMPERE), (WgmmaConfig(2, 128), HOPPER), (SimtConfig(64, 64, 128, 16), AMPERE)):
        problem = make_problem(causal=True, window=(5, 0), kv_lengths=operand("kv_lengths", 1, dtype="int32"))
        winner = make_winner(config, key_of(problem, device), runner_ups=[[1.5, {"b_r": 64}]], seed=3)
        assert winner_from_json(json.loads(json.dumps(winner.as_json()))) == winner


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
