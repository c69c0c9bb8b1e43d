"""What an installation holds: built from the source archive, so that the archive is complete too."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import cuflash

ROOT = Path(__file__).parents[1]
SOURCES = [
    "CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "NOTICE", "README.md", "pyproject.toml",
    "cuflash", "docs", "examples", "kernels_cu", "tests", "tuning",
]  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind, tree, target):
    run = subprocess.run([sys.executable, "-c", BUILD, kind, str(target)], cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return target / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive, of a copy of this checkout."""
    folder = tmp_path_factory.mktemp("archive")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    return build("sdist", tree, folder)


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(archive) as file:
        names = [member for member in file.getmembers() if member.isfile() or member.isdir()]
        file.extractall(folder, members=names, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds what installing the wheel puts into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def run_installed(installed, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_wheel_serves_every_python_and_platform(wheel):
    assert wheel.name == f"cuflash-{cuflash.__version__}-py3-none-any.whl"


def test_wheel_puts_nothing_but_cuflash_into_site_packages(installed):
    assert {path.name for path in installed.iterdir()} == {"cuflash", f"cuflash-{cuflash.__version__}.dist-info"}


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [
        ("cuflash", "*.py"),
        ("cuflash", "py.typed"),
        ("cuflash", "*.json"),
        ("cuflash/data", "*"),
        ("kernels_cu", "*.cu*"),
        ("tuning", "*.py"),
    ],
    ids=["modules", "types", "tuned", "data", "kernels", "tuner"],
)
def test_wheel_holds_every_file_of(installed, folder, pattern):
    inside = Path(folder) if folder.startswith("cuflash") else Path("cuflash", folder)
    expected = {path.name for path in (ROOT / folder).glob(pattern) if path.is_file()}
    assert expected
    assert expected == {path.name for path in (installed / inside).glob(pattern) if path.is_file()}


def test_wheel_carries_the_licence(installed):
    assert "Apache License" in (installed / f"cuflash-{cuflash.__version__}.dist-info/licenses/LICENSE").read_text()


def test_core_dependencies_bring_no_gpu_library(installed):
    metadata = message_from_bytes((installed / f"cuflash-{cuflash.__version__}.dist-info/METADATA").read_bytes())
    core = {line.partition(">")[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert core == {"numpy", "ml_dtypes", "platformdirs", "optuna", "rich"}


def test_installed_package_runs(installed):
    where = "import cuflash, cuflash.tuning, cuflash.kernels_cu; print(cuflash.__file__, cuflash.tuning.__file__)"
    assert all(Path(path).is_relative_to(installed) for path in run_installed(installed, "-c", where).split())
    assert run_installed(installed, "-m", "cuflash", "--version") == f"cuflash {cuflash.__version__}\n"


def test_installed_package_finds_its_kernels_and_its_data(installed):
    code = "from cuflash import compiler, demo; print(*compiler.kernel_sources(), demo.real_case().q.shape, sep='\\n')"
    lines = run_installed(installed, "-c", code).splitlines()
    assert "forward_simt.cu" in lines
    assert lines[-1] == "(1, 9, 132, 64)"


def test_source_archive_holds_the_tests_and_the_docs(archive):
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"Makefile", "README.md", "tests/conftest.py", "docs/contract.md", "kernels_cu/forward_simt.cu"} <= names
