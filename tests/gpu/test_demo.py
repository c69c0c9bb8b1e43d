"""The command line on a GPU."""

import ml_dtypes
import numpy as np

import cuflash
from cuflash import cli, machine


def test_demo_is_exact_and_shows_kernel_and_tile(capsys):
    assert cli.main(["demo", "--device", "gpu", "--n", "1000"]) == 0
    out = capsys.readouterr().out
    assert machine.describe_gpu(0) in out
    assert " x " in out


def test_run_computes_bfloat16_files_on_the_gpu(tmp_path):
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 4, 50, 32)).astype(ml_dtypes.bfloat16)
    paths = []
    for name, array in {"q": q, "k": k, "v": v}.items():
        paths.append(str(tmp_path / f"{name}.npy"))
        np.save(paths[-1], array)
    out = tmp_path / "o.npy"
    assert cli.main(["run", *paths, "--dtype", "bfloat16", "--device", "gpu", "-o", str(out)]) == 0
    expected = cuflash.reference.standard_attention(q, k, v)
    error = np.load(out).view(ml_dtypes.bfloat16).astype(np.float64) - expected
    assert np.linalg.norm(error) <= 4e-3 * np.linalg.norm(expected)


def test_info_names_the_gpu(capsys):
    assert cli.main(["info"]) == 0
    assert machine.describe_gpu(0) in " ".join(capsys.readouterr().out.split())
