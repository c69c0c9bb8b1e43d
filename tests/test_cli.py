"""The command line: what it prints and writes, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import cli, demo, machine
from cuflash.reference import standard_attention


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files():
    """q.npy, k.npy and v.npy in the current folder, and their arrays."""
    random = np.random.default_rng(7)
    shapes = {"q": (2, 4, 33, 16), "k": (2, 2, 41, 16), "v": (2, 2, 41, 8)}
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save(**arrays)
    return arrays


def save(**arrays):
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)


def run(*options, files=("q.npy", "k.npy", "v.npy")):
    return cli.main(["run", *files, "-o", "o.npy", "--device", "cpu", *map(str, options)])


def complaint(capsys, code, expected_code=2):
    """The one line on standard error with which a command that cannot work ends."""
    assert code == expected_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# what runs


def test_module_prints_the_version():
    command = [sys.executable, "-W", "error", "-m", "cuflash", "--version"]
    folder = Path(cuflash.__file__).parents[1]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert printed == f"cuflash {cuflash.__version__}\n"


def test_run_writes_attention_of_the_files(files, capsys):
    assert run() == 0
    out = np.load("o.npy")
    assert out.dtype == np.float32
    assert np.allclose(out, standard_attention(**files), rtol=0, atol=1e-5)
    assert capsys.readouterr().out.startswith("o.npy: float32 (2, 4, 33, 8), by numpy ")


OPTIONS = {
    "causal": (["--causal"], {"causal": True}),
    "causal top-left": (["--causal", "top-left"], {"causal": "top-left"}),
    "causal=bottom-right": (["--causal=bottom-right"], {"causal": "bottom-right"}),
    "window": (["--window", "5", "none"], {"window": (5, None)}),
    "negative scale": (["--scale", "-0.3"], {"scale": -0.3}),
    "softcap": (["--softcap", "1.5"], {"softcap": 1.5}),
    "float64": (["--dtype", "float64"], {}),
}


@pytest.mark.parametrize(("options", "keywords"), OPTIONS.values(), ids=OPTIONS)
def test_run_passes_the_option_on(files, options, keywords):
    assert run(*options) == 0
    assert np.allclose(np.load("o.npy"), standard_attention(**files, **keywords), rtol=0, atol=1e-5)


def test_bare_causal_may_stand_before_the_files(files):
    assert cli.main(["run", "--causal", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--device", "cpu"]) == 0
    assert np.allclose(np.load("o.npy"), standard_attention(**files, causal=True), rtol=0, atol=1e-5)


def test_run_takes_mask_bias_and_lengths_from_files(files):
    random = np.random.default_rng(8)
    given = {
        "mask": random.random((33, 41)) < 0.8,
        "bias": random.standard_normal((1, 4, 1, 41), np.float32),
        "q_lengths": np.array([33, 20]),
        "kv_lengths": np.array([7, 41]),
    }
    save(**given)
    options = [part for name in given for part in (f"--{name.replace('_', '-')}", f"{name}.npy")]
    assert run(*options) == 0
    assert np.allclose(np.load("o.npy"), standard_attention(**files, **given), rtol=0, atol=1e-5)


def test_run_takes_the_other_layout(files):
    save(**{name: array.swapaxes(1, 2) for name, array in files.items()})
    assert run("--layout", "bnhd") == 0
    assert np.allclose(np.load("o.npy"), standard_attention(**files).swapaxes(1, 2), rtol=0, atol=1e-5)


def test_run_writes_the_lse(files):
    assert run("--lse", "lse.npy") == 0
    _, lse = standard_attention(**files, return_lse=True)
    assert np.load("lse.npy").dtype == np.float64
    assert np.allclose(np.load("lse.npy"), lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("written_as", ["uint16", "V2", "float32"])
def test_bfloat16_is_read_from_bit_patterns_and_floats_and_written_as_uint16(files, written_as):
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in files.items()}
    save(
        **{name: x.astype(np.float32) if written_as == "float32" else x.view(written_as) for name, x in rounded.items()}
    )
    assert run("--dtype", "bfloat16") == 0
    out = np.load("o.npy")
    assert out.dtype == np.uint16
    expected = cuflash.attention(*rounded.values())
    assert (out.view(ml_dtypes.bfloat16) == expected).all()


def test_files_of_the_other_byte_order_are_read(files):
    save(**{name: array.astype(">f4") for name, array in files.items()})
    assert run() == 0
    assert np.allclose(np.load("o.npy"), standard_attention(**files), rtol=0, atol=1e-5)


def test_run_leaves_no_file_but_its_result(files, tmp_path):
    before = {path.name for path in tmp_path.iterdir()}
    assert run() == 0
    assert {path.name for path in tmp_path.iterdir()} == before | {"o.npy"}


def test_info_says_what_is_here(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert cuflash.__version__ in out
    assert all(word in out for word in ("NumPy", "CuPy", "NVRTC", "NVIDIA driver", "GPU", "compiled kernels"))


def test_info_names_the_extra_that_brings_cupy(monkeypatch, capsys):
    monkeypatch.setattr(machine, "driver_cuda_version", lambda: (12, 4))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["info"]) == 0
    assert "pip install 'cuflash[cuda12]'" in " ".join(capsys.readouterr().out.split())


# the demo


def test_demo_shows_both_inputs_and_ends_with_the_verdict(capsys):
    assert cli.main(["demo", "--device", "cpu", "--n", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("SmolLM2, layer 14") for line in lines)
    assert any(line.startswith("random, N = 300") for line in lines)
    assert lines[-1].startswith("exact: ")


@pytest.mark.parametrize("n", [1, 31, 33])
def test_demo_takes_any_length(n):
    assert cli.main(["demo", "--device", "cpu", "--n", str(n)]) == 0


def test_demo_fails_where_one_row_of_a_block_is_wrong(monkeypatch, capsys):
    attention = cuflash.attention

    def wrong(*arrays, **keywords):
        out = attention(*arrays, **keywords)
        out[0, 0, -1] *= 1.02
        return out

    monkeypatch.setattr(cuflash, "attention", wrong)
    assert cli.main(["demo", "--device", "cpu", "--n", "64"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT EXACT")


def test_packaged_result_is_the_attention_of_the_packaged_inputs():
    case = demo.real_case()
    assert np.allclose(standard_attention(case.q, case.k, case.v, causal=True), case.expected, rtol=0, atol=1e-6)


# what cannot be done


def test_missing_file_is_named(files, capsys):
    assert "nowhere.npy: No such file" in complaint(capsys, run(files=("nowhere.npy", "k.npy", "v.npy")))


def test_file_that_is_no_npy_is_refused(files, tmp_path, capsys):
    (tmp_path / "k.npy").write_text("0.5 0.5")
    assert "k.npy: not a .npy file" in complaint(capsys, run())


def test_truncated_file_is_refused(files, tmp_path, capsys):
    whole = (tmp_path / "k.npy").read_bytes()
    (tmp_path / "k.npy").write_bytes(whole[:-100])
    assert "k.npy: " in complaint(capsys, run())


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'shape': (2,",
        "{'descr': ('<f4',), 'fortran_order': False, 'shape': (2,)}",
        "  {",
        "{1: [], 'a': 2}",
    ],
)
def test_malformed_headers_are_refused(files, tmp_path, capsys, header):
    text = header.ljust(117).encode() + b"\n"
    (tmp_path / "k.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    assert "k.npy: not a .npy file that can be read" in complaint(capsys, run())


def test_pickled_objects_are_never_loaded(files, capsys):
    np.save("k.npy", np.array([print], dtype=object), allow_pickle=True)
    assert "k.npy: " in complaint(capsys, run())


def test_integers_are_refused(files, capsys):
    save(k=np.zeros((2, 2, 41, 16), np.int64))
    assert "k.npy: must hold floating point numbers, holds int64" in complaint(capsys, run())


def test_bit_patterns_without_dtype_are_refused(files, capsys):
    save(k=files["k"].astype(ml_dtypes.bfloat16))
    assert "--dtype bfloat16" in complaint(capsys, run())


def test_values_beyond_the_dtype_are_refused(files, capsys):
    save(k=files["k"] * np.float32(1e6))
    assert "k.npy: holds values beyond the range of float16" in complaint(capsys, run("--dtype", "float16"))


def test_arrays_that_do_not_fit_are_refused_by_the_rule_they_break(files, capsys):
    save(k=files["k"][..., :15])
    assert "cuflash run: error: " in complaint(capsys, run())


def test_float64_files_are_converted_too(files):
    save(**{name: x.astype(np.float64) for name, x in files.items()})
    assert run("--dtype", "float16") == 0
    assert np.load("o.npy").dtype == np.float16


def test_pipes_are_not_replaced(files, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in complaint(capsys, run("--lse", "pipe"))
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_a_link_to_the_result(files, tmp_path):
    (tmp_path / "o.npy").symlink_to("there.npy")
    assert run() == 0
    assert (tmp_path / "o.npy").is_symlink()
    assert np.load("there.npy").shape == np.load("o.npy").shape


def test_missing_folder_of_the_result_is_refused(files, capsys):
    assert "nowhere" in complaint(capsys, run("--lse", "nowhere/lse.npy"))


def test_one_file_for_both_results_is_refused(files, capsys):
    assert "same file" in complaint(capsys, run("--lse", "o.npy"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["run", "q.npy", "k.npy", "v.npy"], "-o/--out"),
        (["run", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--causal=left"], "invalid choice"),
        (
            ["run", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--window", "1", "x"],
            "must be an integer or 'none', got 'x'",
        ),
        (["demo", "--n", "0"], "must be a positive integer, got '0'"),
        (["train"], "invalid choice"),
        ([], "required"),
    ],
    ids=["no output", "unknown alignment", "no number", "no length", "unknown command", "no command"],
)
def test_unusable_arguments_end_with_usage_and_code_2(options, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(options)
    assert reason in capsys.readouterr().err


def test_failed_write_leaves_the_old_result_whole(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "o.npy").write_bytes(b"old")

    def full(file, array, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert "No space left on device" in complaint(capsys, run(), expected_code=1)
    assert (tmp_path / "o.npy").read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


def test_want_of_memory_is_said_in_one_line(files, monkeypatch, capsys):
    def starve(*_, **__):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(cuflash, "attention", starve)
    assert "not enough memory: Unable to allocate" in complaint(capsys, run(), expected_code=1)


def test_ctrl_c_ends_with_one_line(files, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cuflash, "attention", interrupt)
    assert "error: interrupted" in complaint(capsys, run(), expected_code=130)


def test_gpu_that_is_not_there_is_refused(files, monkeypatch, capsys):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "no NVIDIA driver is installed")
    assert "--device gpu: no NVIDIA driver is installed" in complaint(capsys, run("--device", "gpu"))
