"""What all tests share: a cubin cache of their own, and the reason for which tests that need a GPU skip."""

import os
import shutil
import tempfile

import pytest

# On a GPU, JAX would take most of the memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CACHE = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption(
        "--all-variants", action="store_true", help="compile every kernel for every combination, which takes minutes"
    )
    parser.addoption("--postgresql", action="store_true", help="test studies in a PostgreSQL server of the tests' own")


def pytest_configure(config):
    """Give the run an empty cache, shared by the workers of pytest-xdist, which inherit the variable."""
    if not hasattr(config, "workerinput"):
        config.stash[CACHE] = tempfile.mkdtemp(prefix="cuflash-tests-")
        os.environ["CUFLASH_CACHE_DIR"] = config.stash[CACHE]


def pytest_unconfigure(config):
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Mark what stands in tests/gpu, and skip what is marked where there is no GPU."""
    for item in items:
        if config.rootpath / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (why := why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {why}"))


def why_no_gpu():
    from cuflash.machine import why_no_gpu

    return why_no_gpu()
